//! The memory that operators take from time to time in passes of a model: set apart with the work space, so that it is
//! what was planned, on every chip and whether cuBLAS is there or not.

use super::graphs::{row_bucket, table_bucket};
use super::heads::HeadSpacing;
use super::load::matrix_geometry;
use super::workspace::MAX_STEP_ROWS;
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::weights::{MatrixLayout, MatrixPlan, VectorPlan, WeightReader, WeightsPlan};
use crate::model::ModelConfig;
use crate::ops::attention::attention_scratch_bytes;
use crate::ops::gemm::{cublas_workspace_for, gemm_scratch_bytes, WeightShape};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// How large the passes of a model become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassLimits {
    /// Tokens in a pass.
    pub num_tokens: usize,
    /// Sequences in it.
    pub num_sequences: usize,
    /// Tokens in a context, those of the pass among them.
    pub max_context_tokens: usize,
}

impl PassLimits {
    /// Passes of up to `num_tokens` tokens, whatever else they are.
    pub fn of_tokens(config: &ModelConfig, num_tokens: usize) -> Self {
        let max_context_tokens = config.max_context_tokens;
        PassLimits { num_tokens, num_sequences: num_tokens, max_context_tokens }
    }

    /// Rows of a step that decodes, filled up.
    pub(super) fn rows(&self) -> usize {
        let num_tokens = self.num_tokens.max(1);
        row_bucket(self.num_sequences.clamp(1, MAX_STEP_ROWS)).min(num_tokens).min(MAX_STEP_ROWS)
    }

    /// Blocks in the table of a sequence, filled up.
    pub(super) fn blocks(&self) -> usize {
        table_bucket(self.max_context_tokens.div_ceil(BLOCK_SIZE))
    }
}

/// The weights of a model as products see them, each shape once.
#[derive(Clone, Debug, Default)]
pub(super) struct ProductShapes {
    spacing: Option<HeadSpacing>,
    shapes: Vec<WeightShape>,
}

impl ProductShapes {
    /// Those of the weights in `plan`.
    pub fn of(plan: &WeightsPlan, spacing: HeadSpacing) -> Result<Self> {
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

    /// Of the same shape in any case.
    fn same(&mut self, _: &MatrixPlan, _: &MatrixPlan) -> Result<bool> {
        Ok(true)
    }
}

/// What is set apart for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scratch {
    /// All that one of them takes at a time.
    pub bytes: usize,
    /// What cuBLAS gets of it.
    pub cublas_bytes: usize,
}

impl Scratch {
    /// For passes within `limits`.
    pub fn of(
        config: &ModelConfig,
        products: &ProductShapes,
        dtype: DType,
        spacing: HeadSpacing,
        limits: &PassLimits,
        is_deterministic: bool,
    ) -> Self {
        let num_rows = |shape: &WeightShape| match shape.out_features == config.vocab_size {
            true => limits.num_tokens.min(MAX_STEP_ROWS),
            false => limits.num_tokens,
        };
        let most = |bytes: &dyn Fn(&WeightShape) -> usize| {
            products.shapes.iter().map(bytes).max().unwrap_or(0)
        };
        let product = |shape: &WeightShape| {
            gemm_scratch_bytes(dtype, num_rows(shape), shape, is_deterministic)
        };
        let cublas =
            |shape: &WeightShape| cublas_workspace_for(num_rows(shape), shape.out_features);
        let (heads, width) = (config.num_heads, spacing.stride);
        let most_keys = limits.blocks().saturating_mul(BLOCK_SIZE);
        let attention = attention_scratch_bytes(
            dtype,
            limits.rows(),
            heads,
            width,
            most_keys,
            is_deterministic,
        );
        Scratch {
            bytes: most(&product).max(attention),
            cublas_bytes: if is_deterministic { 0 } else { most(&cublas) },
        }
    }
}
