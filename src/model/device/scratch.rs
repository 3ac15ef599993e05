//! The memory that operators take temporarily during the passes of a model. It is set apart with
//! the workspace, so that its size is as planned on every chip, with cuBLAS or without.

use super::limits::{PassLimits, MAX_STEP_ROWS};
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::config::{ExpertsConfig, ModelConfig};
use crate::model::decoder::block::DecoderPlan;
use crate::model::load::device::matrix_geometry;
use crate::model::load::device_quantised::device_tiles;
use crate::model::load::heads::HeadSpacing;
use crate::model::load::weights::{MatrixPlan, VectorPlan, WeightReader};
use crate::model::step::MAX_TOP_LOG_PROBS;
use crate::ops::attention::AttentionSizes;
use crate::ops::experts::ExpertSizes;
use crate::ops::gemm::WeightShape;
use crate::ops::kv_cache::layout::{KvFormat, BLOCK_SIZE};
use crate::ops::linear::MatrixLayout;
use crate::ops::quantised::QuantFormat;
use crate::ops::{attention, experts, linear, top_k};

/// The shape of a weight, and how it is quantised on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProductShape {
    weight: WeightShape,
    format: Option<QuantFormat>,
}

/// The weights of a model as the matrix products see them, each shape once.
#[derive(Clone, Debug, Default)]
pub(super) struct ProductShapes {
    spacing: Option<HeadSpacing>,
    shapes: Vec<ProductShape>,
}

impl ProductShapes {
    /// Returns the shapes of the weights in `plan`.
    pub fn of(plan: &DecoderPlan, spacing: HeadSpacing) -> Result<Self> {
        let mut found = ProductShapes { spacing: Some(spacing), shapes: Vec::new() };
        plan.read(&mut found)?;
        Ok(found)
    }
}

impl WeightReader for ProductShapes {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        let spacing = self.spacing.ok_or_else(|| Error::internal("heads of no size"))?;
        let geometry = matrix_geometry(plan, spacing);
        let (rows, columns) = (geometry.device_rows(), geometry.device_columns());
        let shape = match plan.layout {
            MatrixLayout::Rows => {
                WeightShape { out_features: rows, in_features: columns, transposed: true }
            }
            MatrixLayout::Columns => {
                WeightShape { out_features: columns, in_features: rows, transposed: false }
            }
        };
        let format = device_tiles(plan, spacing)?.map(|tiles| tiles.format());
        let shape = ProductShape { weight: shape, format };
        if !self.shapes.contains(&shape) {
            let room = self.shapes.try_reserve(1);
            room.map_err(|_| Error::out_of_memory("the shapes of weights", 1))?;
            self.shapes.push(shape);
        }
        Ok(())
    }

    fn vector(&mut self, _: &VectorPlan) -> Result<()> {
        Ok(())
    }
}

/// The memory that is set apart for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scratch {
    /// The largest number of bytes that one operator takes at a time.
    pub bytes: usize,
    /// The part of `bytes` that the library of matrix products gets.
    pub library_bytes: usize,
}

impl Scratch {
    /// Returns the sizes for passes within `limits`.
    pub fn of(
        config: &ModelConfig,
        products: &ProductShapes,
        dtype: DType,
        kv_format: KvFormat,
        spacing: HeadSpacing,
        limits: &PassLimits,
        is_deterministic: bool,
    ) -> Self {
        let num_rows = |shape: &WeightShape| {
            if shape.out_features == config.vocab_size {
                limits.num_tokens.min(MAX_STEP_ROWS)
            } else {
                limits.num_tokens
            }
        };
        let most = |bytes: &dyn Fn(&ProductShape) -> usize| {
            products.shapes.iter().map(bytes).max().unwrap_or(0)
        };
        let product = |shape: &ProductShape| {
            let ProductShape { weight, format } = shape;
            let format = format.as_ref();
            linear::scratch_bytes(dtype, num_rows(weight), weight, format, is_deterministic)
        };
        let library = |shape: &ProductShape| {
            linear::library_workspace_bytes(
                num_rows(&shape.weight),
                &shape.weight,
                is_deterministic,
            )
        };
        let max_keys = limits.blocks().saturating_mul(BLOCK_SIZE);
        let sizes = attention_sizes(config, spacing, kv_format);
        let attention =
            attention::scratch_bytes(&sizes, dtype, limits.rows(), max_keys, is_deterministic);
        let rows = limits.num_tokens.clamp(1, MAX_STEP_ROWS);
        let log_probs = top_k::scratch_bytes(rows, config.vocab_size, MAX_TOP_LOG_PROBS as usize);
        let experts = config.experts.as_ref().map_or(0, |experts| {
            let ExpertsConfig { routing, width, .. } = *experts;
            let sizes = ExpertSizes { routing, width, hidden_size: config.hidden_size };
            // The logits of the router are there meanwhile.
            experts::scratch_bytes(dtype, limits.num_tokens.max(1), &sizes)
        });
        let bytes = most(&product).max(attention).max(log_probs).max(experts);
        Scratch { bytes, library_bytes: most(&library) }
    }
}

/// Returns the sizes of a model's attention on a device.
pub(super) fn attention_sizes(
    config: &ModelConfig,
    spacing: HeadSpacing,
    kv_format: KvFormat,
) -> AttentionSizes {
    AttentionSizes {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: spacing.head_dim,
        head_stride: spacing.stride,
        has_rope: config.rope.is_some(),
        kv_format,
    }
}
