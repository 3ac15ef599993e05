//! A model's state on a device.

use std::sync::Arc;

use super::limits::PassLimits;
use super::scratch::{ProductShapes, Scratch};
use super::workspace::DeviceWorkspace;
use crate::backend::cuda::CudaContext;
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::config::ModelConfig;
use crate::model::decoder::block::{Decoder, ExpertWeights};
use crate::model::load::heads::HeadSpacing;
use crate::ops::attention::AttentionPlan;
use crate::ops::experts::{ExpertKernels, ExpertLayer, StridedMatrices};
use crate::ops::kv_cache::layout::KvFormat;
use crate::ops::linear::{LinearPlan, Matrix};

/// A model's state on a device.
pub(in crate::model) struct DeviceModel {
    pub context: Arc<ComputeContext>,
    pub weights: Decoder<Matrix, DeviceTensor>,
    /// The tables of rotary positions, if the model has them.
    pub rope: Option<RopeTables>,
    pub spacing: HeadSpacing,
    pub(super) dtype: DType,
    pub attention: AttentionPlan,
    pub linear: LinearPlan,
    pub(super) experts: ExpertKernels,
    /// See [`crate::model::LoadOptions::deterministic`].
    pub(super) kv_format: KvFormat,
    pub(super) is_deterministic: bool,
    pub(super) products: ProductShapes,
}

/// Cosines and sines of all positions, each `[max_context_tokens, head_dim / 2]` of the model's
/// element type.
pub(in crate::model) struct RopeTables {
    pub cos: DeviceTensor,
    pub sin: DeviceTensor,
}

/// Returns the operands of a layer with experts.
pub(super) fn expert_layer<'a>(
    config: &ModelConfig,
    weights: &'a ExpertWeights<Matrix>,
    kernels: ExpertKernels,
) -> Result<ExpertLayer<'a>> {
    let experts = config.experts.as_ref();
    let routing = experts.ok_or_else(|| Error::internal("experts without a config"))?.routing;
    Ok(ExpertLayer {
        routing,
        gate_up: StridedMatrices::new(&weights.gate_up)?,
        down: StridedMatrices::new(&weights.down)?,
        kernels,
    })
}

impl DeviceModel {
    /// Returns one tensor of each allocation that holds weights or tables; both are the same if
    /// there are no tables.
    pub(super) fn allocations(&self) -> [&DeviceTensor; 2] {
        let weights = self.weights.tokens.embedding.data();
        [weights, self.rope.as_ref().map_or(weights, |rope| &rope.cos)]
    }

    /// Returns the operands of a layer with experts.
    pub fn expert_layer<'a>(
        &self,
        config: &ModelConfig,
        weights: &'a ExpertWeights<Matrix>,
    ) -> Result<ExpertLayer<'a>> {
        expert_layer(config, weights, self.experts)
    }

    /// Returns the element type of weights and activations.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Allocates memory for passes within `limits`.
    pub fn workspace(&self, config: &ModelConfig, limits: &PassLimits) -> Result<DeviceWorkspace> {
        let DeviceModel { products, dtype, kv_format, spacing, is_deterministic, .. } = self;
        let scratch =
            Scratch::of(config, products, *dtype, *kv_format, *spacing, limits, *is_deterministic);
        DeviceWorkspace::new(&self.context, config, *dtype, *spacing, limits, scratch)
    }

    /// Returns a human-readable name, such as "cuda (NVIDIA H200)".
    pub fn device_name(&self) -> String {
        match self.cuda() {
            Ok(cuda) => format!("cuda ({})", cuda.device().info().name),
            Err(_) => "cpu".to_string(),
        }
    }

    /// Returns the device half of the context.
    pub fn cuda(&self) -> Result<&CudaContext> {
        match self.context.backend() {
            ContextBackend::Cuda(cuda) => Ok(cuda),
            ContextBackend::Cpu { .. } => {
                Err(Error::internal("a model of a device with a context of the CPU"))
            }
        }
    }
}

/// Returns the size in bytes of the tables of cosines and sines and of the frequencies they are
/// made from.
pub(super) fn rope_bytes(config: &ModelConfig, dtype: DType) -> Result<usize> {
    if config.rope.is_none() {
        return Ok(0);
    }
    let half = config.head_dim / 2;
    let table = Arena::bytes_for(ElementType::Float(dtype), &[config.max_context_tokens, half])?;
    let frequencies = Arena::bytes_for(ElementType::Float(DType::F32), &[half])?;
    table
        .checked_mul(2)
        .and_then(|bytes| bytes.checked_add(frequencies))
        .ok_or_else(|| Error::out_of_memory("the tables of positions", usize::MAX))
}
