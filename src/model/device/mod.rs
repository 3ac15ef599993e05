//! Models on a CUDA device: the weights in device memory, and the forward pass that queues operators on a
//! stream and waits once, for the logits.
//!
//! The residual stream and all activations have the model's element type, and are rounded where Transformers
//! rounds them.

mod graphs;
pub(super) mod lead;
pub(super) mod limits;
mod logits;
pub(super) mod record;
mod scratch;
mod step_clock;
pub(super) mod steps;
pub(super) mod workspace;

use std::sync::Arc;

use limits::PassLimits;
use scratch::{ProductShapes, Scratch};
use workspace::DeviceWorkspace;

use super::config::{MlpKind, ModelConfig, NormKind, RopeConfig};
use super::decoder::block::{Decoder, DecoderPlan};
use super::kv_cache::KvCache;
use super::load::heads::HeadSpacing;
use super::load::{device as load, Loader};
use super::ModelFolder;
use crate::backend::cuda::CudaContext;
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType};
use crate::ops::attention::{AttentionPlan, AttentionSizes};
use crate::ops::linear::{DecoderSizes, Epilogue, LinearPlan, Matrix, Product};
use crate::ops::rope::cuda_rounded::rope_tables;

/// What is lost where each allocation is rounded up to a multiple of 512 bytes: there are nine of a model.
const ROUNDING_BYTES: usize = 9 * 512;

/// What a model has on a device.
pub(super) struct DeviceModel {
    pub context: Arc<ComputeContext>,
    pub weights: Decoder<Matrix, DeviceTensor>,
    /// Of a model with rotary positions.
    pub rope: Option<RopeTables>,
    pub spacing: HeadSpacing,
    dtype: DType,
    pub attention: AttentionPlan,
    pub linear: LinearPlan,
    /// See [`super::LoadOptions::deterministic`].
    is_deterministic: bool,
    products: ProductShapes,
}

/// Cosines and sines of all positions, `[max_context_tokens, head_dim / 2]` of the model's element type each.
pub(super) struct RopeTables {
    pub cos: DeviceTensor,
    pub sin: DeviceTensor,
}

/// What a model takes of the memory of a device or of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Weights, and on a device the tables of rotary positions.
    pub weights_bytes: u64,
    /// Activations of the longest pass and scratch of the operators: on a device set apart at load.
    pub workspace_bytes: u64,
    /// Keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
}

/// The heads of a model's attention on a device.
fn attention_sizes(config: &ModelConfig, spacing: HeadSpacing) -> AttentionSizes {
    AttentionSizes {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: spacing.head_dim,
        head_stride: spacing.stride,
        has_qk_norm_and_rope: config.has_qk_norm && config.rope.is_some(),
    }
}

/// All products of a model, and what becomes of each.
fn all_products<'a>(
    config: &ModelConfig,
    weights: &'a Decoder<Matrix, DeviceTensor>,
) -> impl Iterator<Item = Product<'a>> {
    let first_of_mlp = match config.mlp {
        MlpKind::Gated => Epilogue::SwiGlu,
        MlpKind::Plain => Epilogue::Store,
    };
    let output =
        Product { weight: weights.tokens.output(), has_bias: false, epilogue: Epilogue::Store };
    let blocks = weights.blocks.iter().flat_map(move |block| {
        let (up, down) = block.mlp.layers();
        let products = [
            (&block.attention.qkv, Epilogue::Store),
            (&block.attention.output, Epilogue::AddResidual),
            (up, first_of_mlp),
            (down, Epilogue::AddResidual),
        ];
        products.map(|(layer, epilogue)| Product {
            weight: &layer.weight,
            has_bias: layer.bias.is_some(),
            epilogue,
        })
    });
    std::iter::once(output).chain(blocks)
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
    ) -> Result<MemoryNeeds> {
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
        Ok(MemoryNeeds {
            weights_bytes: (weights as u64).saturating_add(rope_bytes(config, dtype)? as u64),
            workspace_bytes: workspace as u64,
            kv_bytes_per_token: layout.bytes_per_token() as u64,
        })
    }
}

/// A model on its way to a device.
pub(super) struct DeviceModelLoad<'a> {
    config: &'a ModelConfig,
    weights: load::WeightsLoad<'a>,
    spacing: HeadSpacing,
    dtype: DType,
    is_deterministic: bool,
    products: ProductShapes,
}

impl<'a> DeviceModelLoad<'a> {
    /// Gives every weight its place, and makes ready what needs no device.
    pub fn new(
        config: &'a ModelConfig,
        plan: &'a DecoderPlan,
        loader: Loader<'a>,
        dtype: DType,
        is_deterministic: bool,
    ) -> Result<Self> {
        let spacing = HeadSpacing::new(config.head_dim)?;
        let mut weights = load::WeightsLoad::new(plan, loader, dtype, spacing)?;
        weights.prepare()?;
        let products = ProductShapes::of(plan, spacing)?;
        Ok(DeviceModelLoad { config, weights, spacing, dtype, is_deterministic, products })
    }

    /// Reads the weights to the device of `context`, which works for this model alone. Also returns the bytes
    /// that weights and tables take there.
    pub fn finish(self, context: Arc<ComputeContext>) -> Result<(DeviceModel, u64)> {
        let DeviceModelLoad { config, weights, spacing, dtype, is_deterministic, products } = self;
        let weights_bytes = weights.device_bytes();
        let bytes = weights_bytes.saturating_add(rope_bytes(config, dtype)?) as u64;
        // Kernels are loaded while weights are on their way.
        let (weights, (rope, attention, linear)) = weights.finish(&context, |weights| {
            let rope = match &config.rope {
                Some(rope) => Some(RopeTables::new(&context, config, rope, dtype)?),
                None => None,
            };
            let sizes = attention_sizes(config, spacing);
            let attention = AttentionPlan::find(&context, sizes, dtype, is_deterministic);
            let sizes = DecoderSizes {
                hidden_size: config.hidden_size,
                intermediate_size: config.intermediate_size,
                has_rms_norms: config.norm == NormKind::Rms,
            };
            let products = all_products(config, weights);
            let linear = LinearPlan::find(&context, &attention, &sizes, products, is_deterministic);
            Ok((rope, attention, linear))
        })?;
        let model = DeviceModel {
            context,
            weights,
            rope,
            spacing,
            dtype,
            attention,
            linear,
            is_deterministic,
            products,
        };
        Ok((model, bytes))
    }
}

impl DeviceModel {
    /// A tensor of each allocation that holds weights or tables; twice the same where there are no tables.
    fn allocations(&self) -> [&DeviceTensor; 2] {
        let weights = self.weights.tokens.embedding.data();
        [weights, self.rope.as_ref().map_or(weights, |rope| &rope.cos)]
    }

    /// Element type of weights and activations.
    fn dtype(&self) -> DType {
        self.dtype
    }

    /// Memory for passes within `limits`.
    pub fn workspace(&self, config: &ModelConfig, limits: &PassLimits) -> Result<DeviceWorkspace> {
        let DeviceModel { products, dtype, spacing, is_deterministic, .. } = self;
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
