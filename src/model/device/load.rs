//! A model that is being loaded onto a device.

use std::sync::Arc;

use super::model::{expert_layer, rope_bytes, DeviceModel, RopeTables};
use super::scratch::{attention_sizes, ProductShapes};
use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::Result;
use crate::memory::{DType, ElementType};
use crate::model::config::{MlpKind, ModelConfig, NormKind, RopeConfig};
use crate::model::decoder::block::{Decoder, DecoderPlan, LinearWeights, MlpWeights};
use crate::model::load::heads::HeadSpacing;
use crate::model::load::{device as load, Loader};
use crate::ops::attention::AttentionPlan;
use crate::ops::experts::{check_experts, ExpertKernels, StridedMatrices};
use crate::ops::kv_cache::layout::KvFormat;
use crate::ops::linear::{DecoderSizes, Epilogue, LinearPlan, Matrix, Product};
use crate::ops::rope::cuda_rounded::rope_tables;

/// Returns all matrix products of a model, each with its epilogue.
fn all_products<'a>(
    config: &ModelConfig,
    weights: &'a Decoder<Matrix, DeviceTensor>,
) -> impl Iterator<Item = Product<'a>> {
    let first_of_mlp = match config.mlp {
        MlpKind::Gated => Epilogue::SwiGlu,
        MlpKind::Plain => Epilogue::Store,
    };
    let output = Product {
        weight: weights.tokens.output(),
        has_bias: false,
        epilogue: Epilogue::Store,
        is_output: true,
    };
    let blocks = weights.blocks.iter().flat_map(move |block| {
        let product = |layer: &'a LinearWeights<Matrix, DeviceTensor>, epilogue| Product {
            weight: &layer.weight,
            has_bias: layer.bias.is_some(),
            epilogue,
            is_output: false,
        };
        let [up, down] = match &block.mlp {
            MlpWeights::Gated { gate_up: up, down } | MlpWeights::Plain { up, down } => {
                [Some(product(up, first_of_mlp)), Some(product(down, Epilogue::AddResidual))]
            }
            MlpWeights::Experts(experts) => {
                let (weight, epilogue) = (&experts.router, Epilogue::Store);
                [Some(Product { weight, has_bias: false, epilogue, is_output: false }), None]
            }
        };
        let qkv = Some(product(&block.attention.qkv, Epilogue::Store));
        let output = Some(product(&block.attention.output, Epilogue::AddResidual));
        [qkv, output, up, down].into_iter().flatten()
    });
    std::iter::once(output).chain(blocks)
}

/// Refuses experts that no kernel serves.
fn check_all_experts(
    context: &ComputeContext,
    config: &ModelConfig,
    weights: &Decoder<Matrix, DeviceTensor>,
    dtype: DType,
    kernels: ExpertKernels,
) -> Result<()> {
    for block in &weights.blocks {
        let MlpWeights::Experts(experts) = &block.mlp else { continue };
        StridedMatrices::check(&experts.gate_up)?;
        StridedMatrices::check(&experts.down)?;
        check_experts(context, &expert_layer(config, experts, kernels)?, dtype)?;
    }
    Ok(())
}

/// A model that is being loaded onto a device.
pub(in crate::model) struct DeviceModelLoad<'a> {
    config: &'a ModelConfig,
    weights: load::WeightsLoad<'a>,
    spacing: HeadSpacing,
    dtype: DType,
    kv_format: KvFormat,
    is_deterministic: bool,
    products: ProductShapes,
}

impl<'a> DeviceModelLoad<'a> {
    /// Assigns every weight its place and does the preparation that needs no device.
    pub fn new(
        config: &'a ModelConfig,
        plan: &'a DecoderPlan,
        loader: Loader<'a>,
        dtype: DType,
        kv_format: KvFormat,
        is_deterministic: bool,
    ) -> Result<Self> {
        let spacing = HeadSpacing::new(config.head_dim)?;
        let mut weights = load::WeightsLoad::new(plan, loader, dtype, spacing)?;
        weights.prepare()?;
        let products = ProductShapes::of(plan, spacing)?;
        Ok(DeviceModelLoad {
            config,
            weights,
            spacing,
            dtype,
            kv_format,
            is_deterministic,
            products,
        })
    }

    /// Reads the weights to the device of `context`, which must serve this model alone. Also
    /// returns the number of bytes that weights and tables take there.
    pub fn finish(self, context: Arc<ComputeContext>) -> Result<(DeviceModel, u64)> {
        let DeviceModelLoad {
            config,
            weights,
            spacing,
            dtype,
            kv_format,
            is_deterministic,
            products,
        } = self;
        let weights_bytes = weights.device_bytes();
        let bytes = weights_bytes.saturating_add(rope_bytes(config, dtype)?) as u64;
        // Kernels are loaded while the weights are being transferred.
        let (weights, (rope, attention, linear, experts)) =
            weights.finish(&context, |weights| {
                let rope = match &config.rope {
                    Some(rope) => Some(RopeTables::new(&context, config, rope, dtype)?),
                    None => None,
                };
                let sizes = attention_sizes(config, spacing, kv_format);
                let attention = AttentionPlan::find(&context, sizes, dtype, is_deterministic)?;
                let sizes = DecoderSizes {
                    hidden_size: config.hidden_size,
                    // The kernels for one size of MLP are not for experts.
                    intermediate_size: if config.experts.is_some() {
                        0
                    } else {
                        config.intermediate_size
                    },
                    has_rms_norms: config.norm == NormKind::Rms,
                    dtype,
                };
                let products = all_products(config, weights);
                let linear =
                    LinearPlan::find(&context, &attention, &sizes, products, is_deterministic)?;
                let experts = ExpertKernels::find(&context, is_deterministic)?;
                check_all_experts(&context, config, weights, dtype, experts)?;
                Ok((rope, attention, linear, experts))
            })?;
        let model = DeviceModel {
            context,
            weights,
            rope,
            spacing,
            dtype,
            kv_format,
            attention,
            linear,
            experts,
            is_deterministic,
            products,
        };
        Ok((model, bytes))
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
