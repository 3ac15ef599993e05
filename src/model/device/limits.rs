//! Limits on the size of a model's passes.

use crate::model::config::ModelConfig;
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// The number of steps that may be in flight: the host prepares one while the device computes
/// another.
pub(in crate::model) const STEPS_IN_FLIGHT: usize = 2;

/// The maximum number of rows of logits of a step.
pub(in crate::model) const MAX_STEP_ROWS: usize = 256;

/// The number of rows whose logits are copied to the host at a time.
pub(in crate::model) const COPIED_ROWS: usize = 64;

/// Limits on the size of a model's passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassLimits {
    /// The maximum number of tokens in a pass.
    pub num_tokens: usize,
    /// The maximum number of sequences in a pass.
    pub num_sequences: usize,
    /// The maximum number of tokens in a context, including those of the pass.
    pub max_context_tokens: usize,
}

impl PassLimits {
    /// Returns limits that allow any pass of up to `num_tokens` tokens.
    pub fn of_tokens(config: &ModelConfig, num_tokens: usize) -> Self {
        let max_context_tokens = config.max_context_tokens;
        PassLimits { num_tokens, num_sequences: num_tokens, max_context_tokens }
    }

    /// Returns the maximum number of rows of a decode step, padding included.
    pub(super) fn rows(&self) -> usize {
        let num_tokens = self.num_tokens.max(1);
        row_bucket(self.num_sequences.clamp(1, MAX_STEP_ROWS)).min(num_tokens).min(MAX_STEP_ROWS)
    }

    /// Returns the maximum number of blocks in the table of a sequence, padding included.
    pub(super) fn blocks(&self) -> usize {
        table_bucket(self.max_context_tokens.div_ceil(BLOCK_SIZE))
    }
}

/// Returns the number of rows that a step of `len` rows is padded to.
pub(in crate::model) fn row_bucket(len: usize) -> usize {
    match len {
        0..=2 => len,
        3..=4 => 4,
        5..=8 => 8,
        9..=32 => len.next_multiple_of(8),
        33..=128 => len.next_multiple_of(16),
        _ => len.next_multiple_of(32),
    }
}

/// Returns the number of blocks that tables of up to `len` blocks are padded to.
pub(in crate::model) fn table_bucket(len: usize) -> usize {
    len.max(4).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_they_are_for() {
        let mut buckets = Vec::new();
        for len in 1..=256 {
            let bucket = row_bucket(len);
            assert!(bucket >= len && bucket <= 256 && row_bucket(bucket) == bucket);
            buckets.push(bucket);
            assert!(table_bucket(len) >= len);
        }
        buckets.dedup();
        assert_eq!(buckets.len(), 17);
    }
}
