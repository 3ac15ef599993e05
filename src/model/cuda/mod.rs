//! Models on a CUDA device: the weights in device memory, and the forward pass that queues operators on a
//! stream and waits once, for the logits.
//!
//! The residual stream and all activations have the model's element type, and are rounded where Transformers
//! rounds them ([`crate::ops::stepwise`]).

mod decode;
mod geometry;
mod gpt2;
mod graphs;
mod heads;
mod layers;
mod lead;
mod load;
mod loads;
mod one_token;
mod pass;
mod qwen3;
mod record;
mod scratch;
mod step_clock;
mod steps;
mod transfer;
mod workspace;

pub(super) use heads::HeadSpacing;
pub use scratch::PassLimits;
pub(super) use steps::STEPS_IN_FLIGHT;
pub(super) use workspace::DeviceWorkspace;

use std::sync::Arc;

use decode::DecodeKernels;
use scratch::{ProductShapes, Scratch};

use super::kv_cache::KvCache;
use super::load::Loader;
use super::weights::{Weights, WeightsPlan};
use super::{ModelConfig, ModelFolder, RopeConfig};
use crate::backend::cuda::CudaContext;
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType};
use crate::ops::rope::cuda_rounded::rope_tables;

/// What is lost where each allocation is rounded up to a multiple of 512 bytes: there are nine of a model.
const ROUNDING_BYTES: usize = 9 * 512;

/// What a model has on a device.
pub(super) struct CudaModel {
    pub context: Arc<ComputeContext>,
    weights: Weights<DeviceTensor, DeviceTensor>,
    /// Of a model with rotary positions.
    rope: Option<RopeTables>,
    pub spacing: HeadSpacing,
    dtype: DType,
    decode_kernels: DecodeKernels,
    /// See [`super::LoadOptions::deterministic`].
    is_deterministic: bool,
    products: ProductShapes,
}

/// Cosines and sines of all positions, `[max_context_tokens, head_dim / 2]` of the model's element type each.
struct RopeTables {
    cos: DeviceTensor,
    sin: DeviceTensor,
}

/// What a model takes of the memory of a device or of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// Weights, and on a device the tables of rotary positions.
    pub weights_bytes: u64,
    /// Activations of the longest pass and scratch of the operators: on a device set apart at load.
    pub workspace_bytes: u64,
    /// Keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
}

/// Bytes of the tables of cosines and sines, and of the frequencies they are made from.
fn rope_bytes(config: &ModelConfig, dtype: DType) -> Result<usize> {
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

impl ModelFolder {
    /// What the model takes of a CUDA device as `dtype`, for passes within `limits`. Refuses, by name, what does not
    /// run there.
    pub fn device_plan(
        &self,
        dtype: DType,
        limits: &PassLimits,
        is_deterministic: bool,
    ) -> Result<DevicePlan> {
        let config = self.config();
        let spacing = HeadSpacing::new(config.head_dim)?;
        let weights = load::device_bytes(self.plan(), dtype, spacing)?;
        let products = ProductShapes::of(self.plan(), spacing)?;
        let scratch = Scratch::of(config, &products, dtype, spacing, limits, is_deterministic);
        let layout = config.device_kv_layout(dtype)?;
        let workspace = workspace::device_bytes(config, dtype, spacing, limits)?
            .saturating_add(scratch.bytes)
            .saturating_add(CudaContext::COUNTERS_BYTES)
            .saturating_add(KvCache::spare_bytes(&layout))
            .saturating_add(ROUNDING_BYTES);
        Ok(DevicePlan {
            weights_bytes: (weights as u64).saturating_add(rope_bytes(config, dtype)? as u64),
            workspace_bytes: workspace as u64,
            kv_bytes_per_token: layout.bytes_per_token() as u64,
        })
    }
}

/// A model on its way to a device.
pub(super) struct CudaModelLoad<'a> {
    config: &'a ModelConfig,
    weights: load::WeightsLoad<'a>,
    spacing: HeadSpacing,
    dtype: DType,
    is_deterministic: bool,
    products: ProductShapes,
}

impl<'a> CudaModelLoad<'a> {
    /// Gives every weight its place, and makes ready what needs no device.
    pub fn new(
        config: &'a ModelConfig,
        plan: &'a WeightsPlan,
        loader: Loader<'a>,
        dtype: DType,
        is_deterministic: bool,
    ) -> Result<Self> {
        let spacing = HeadSpacing::new(config.head_dim)?;
        let mut weights = load::WeightsLoad::new(plan, loader, dtype, spacing)?;
        weights.prepare()?;
        let products = ProductShapes::of(plan, spacing)?;
        Ok(CudaModelLoad { config, weights, spacing, dtype, is_deterministic, products })
    }

    /// Reads the weights to the device of `context`, which works for this model alone. Also returns the bytes
    /// that weights and tables take there.
    pub fn finish(self, context: Arc<ComputeContext>) -> Result<(CudaModel, u64)> {
        let CudaModelLoad { config, weights, spacing, dtype, is_deterministic, products } = self;
        let weights_bytes = weights.device_bytes();
        let bytes = weights_bytes.saturating_add(rope_bytes(config, dtype)?) as u64;
        // Kernels are loaded while weights are on their way.
        let (weights, (rope, decode_kernels)) = weights.finish(&context, |weights| {
            let rope = match &config.rope {
                Some(rope) => Some(RopeTables::new(&context, config, rope, dtype)?),
                None => None,
            };
            let decode_kernels = match weights {
                Weights::Qwen3(weights) => {
                    DecodeKernels::find(&context, config, weights, dtype, spacing.is_spaced())
                }
                Weights::Gpt2(_) => DecodeKernels::default(),
            };
            Ok((rope, decode_kernels))
        })?;
        let decode_kernels = match is_deterministic {
            true => decode_kernels.deterministic(),
            false => decode_kernels,
        };
        let model = CudaModel {
            context,
            weights,
            rope,
            spacing,
            dtype,
            decode_kernels,
            is_deterministic,
            products,
        };
        Ok((model, bytes))
    }
}

impl CudaModel {
    /// The tables of a model with rotary positions.
    fn rope(&self) -> Result<&RopeTables> {
        self.rope.as_ref().ok_or_else(|| Error::internal("a model without rotary positions"))
    }

    /// A tensor of each allocation that holds weights or tables; twice the same where there are no tables.
    fn allocations(&self) -> [&DeviceTensor; 2] {
        let weights = &self.weights.tokens().embedding;
        [weights, self.rope.as_ref().map_or(weights, |rope| &rope.cos)]
    }

    /// Element type of weights and activations.
    fn dtype(&self) -> DType {
        self.dtype
    }

    /// Memory for passes within `limits`.
    pub fn workspace(&self, config: &ModelConfig, limits: &PassLimits) -> Result<DeviceWorkspace> {
        let CudaModel { products, dtype, spacing, is_deterministic, .. } = self;
        let scratch = Scratch::of(config, products, *dtype, *spacing, limits, *is_deterministic);
        DeviceWorkspace::new(&self.context, config, *dtype, *spacing, limits, scratch)
    }

    /// For people: "cuda (NVIDIA H200)".
    pub fn device_name(&self) -> String {
        match self.cuda() {
            Ok(cuda) => format!("cuda ({})", cuda.device().info().name),
            Err(_) => "cpu".to_string(),
        }
    }

    /// The device half of the context.
    pub fn cuda(&self) -> Result<&CudaContext> {
        match self.context.backend() {
            ContextBackend::Cuda(cuda) => Ok(cuda),
            ContextBackend::Cpu { .. } => {
                Err(Error::internal("a model of a device with a context of the CPU"))
            }
        }
    }
}

impl RopeTables {
    fn new(
        context: &Arc<ComputeContext>,
        config: &ModelConfig,
        rope: &RopeConfig,
        dtype: DType,
    ) -> Result<Self> {
        let inv_freq = rope.inv_freq(config.head_dim)?;
        let half = config.head_dim / 2;
        let mut arena = Arena::new(context, rope_bytes(config, dtype)?, "the tables of positions")?;
        let shape = [config.max_context_tokens, half];
        let cos = arena.tensor(ElementType::Float(dtype), &shape)?;
        let sin = arena.tensor(ElementType::Float(dtype), &shape)?;
        let frequencies = arena.tensor(ElementType::Float(DType::F32), &[half])?;
        let mut staging = PinnedBuffer::new(context, half * 4, "rope frequencies")?;
        for (word, f) in staging.bytes()?.chunks_exact_mut(4).zip(&inv_freq) {
            word.copy_from_slice(&f.to_ne_bytes());
        }
        staging.upload(0..half * 4, &frequencies, 0)?;
        rope_tables(context, &frequencies, rope.attention_scaling(), &cos, &sin)?;
        staging.wait()?;
        Ok(RopeTables { cos, sin })
    }
}
