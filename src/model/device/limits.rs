//! How large the passes of a model become.

use super::graphs::{row_bucket, table_bucket};
use super::workspace::MAX_STEP_ROWS;
use crate::model::config::ModelConfig;
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
