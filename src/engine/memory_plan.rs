//! How much KV cache a model gets: decided before anything is read.

use super::engine_load::EngineOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::model::DevicePlan;
use crate::ops::BLOCK_SIZE;

/// Memory that the system could still give, if it says so: what Linux calls available, and no more than
/// the control group of a container leaves.
pub(super) fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let available = line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)?;
    let number = |file: &str| -> Option<u64> {
        std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
    };
    // "max", or no such file, is no limit.
    let Some(limit) = number("memory.max") else { return Some(available) };
    Some(available.min(limit.saturating_sub(number("memory.current").unwrap_or(0))))
}

/// What loading will take, known before it begins.
pub(super) struct MemoryPlan {
    /// Weights, in the element type to be loaded.
    pub(super) weights_bytes: u64,
    /// Activations of the longest pass.
    pub(super) workspace_bytes: u64,
    /// Keys and values of one token in all layers.
    pub(super) kv_bytes_per_token: u64,
}

impl MemoryPlan {
    /// What loading takes of a device.
    pub(super) fn of(plan: &DevicePlan) -> Self {
        let DevicePlan { weights_bytes, workspace_bytes, kv_bytes_per_token } = *plan;
        MemoryPlan { weights_bytes, workspace_bytes, kv_bytes_per_token }
    }

    /// Longest context and tokens of KV cache under the options' budget.
    pub(super) fn kv_tokens(
        &self,
        options: &EngineOptions,
        max_context: u64,
        available: Option<u64>,
    ) -> Result<(u64, u64)> {
        let per_token = self.kv_bytes_per_token.max(1);
        let block = BLOCK_SIZE as u64;
        let fixed = self.weights_bytes.saturating_add(self.workspace_bytes);
        let whole_blocks = |bytes: u64| bytes / per_token / block * block;
        let wanted = match options.kv_cache_tokens {
            0 => max_context.div_ceil(block) * block,
            n => n.checked_next_multiple_of(block).unwrap_or(u64::MAX / per_token),
        };
        if options.max_context_tokens > 0 && options.kv_cache_tokens > 0 && wanted < max_context {
            return Err(Error::invalid_argument(format!(
                "max_context_tokens is {max_context}, but kv_cache_tokens is {}: one request of the longest \
                 context must fit",
                options.kv_cache_tokens
            )));
        }
        let mut tokens = wanted;
        if options.max_memory_bytes > 0 {
            let fits = whole_blocks(options.max_memory_bytes.saturating_sub(fixed));
            if fits == 0 || (options.kv_cache_tokens > 0 && fits < wanted) {
                return Err(Error::new(
                    ErrorKind::OutOfMemory,
                    format!(
                        "max_memory_bytes is {}, but the weights take {} bytes, the work space {} and the KV \
                         cache {per_token} for each of {wanted} tokens",
                        options.max_memory_bytes, self.weights_bytes, self.workspace_bytes
                    ),
                ));
            }
            tokens = tokens.min(fits);
        } else if options.kv_cache_tokens == 0 {
            // Nobody set a limit: leave half of what is free to the host.
            if let Some(available) = available {
                let spare = available.saturating_sub(fixed) / 2;
                tokens = tokens.min(whole_blocks(spare).max(block));
            }
        }
        // A context that the cache could not hold alone is not offered.
        Ok((max_context.min(tokens), tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: MemoryPlan =
        MemoryPlan { weights_bytes: 1000, workspace_bytes: 100, kv_bytes_per_token: 10 };

    #[test]
    fn the_cache_holds_one_context_by_default_and_less_when_memory_is_short() {
        let options = EngineOptions::default();
        assert_eq!(PLAN.kv_tokens(&options, 100, None).unwrap(), (100, 128));
        assert_eq!(PLAN.kv_tokens(&options, 100, Some(1_000_000)).unwrap(), (100, 128));
        // (2740 - 1100) / 2 = 820 bytes: 82 tokens, two whole blocks.
        assert_eq!(PLAN.kv_tokens(&options, 100, Some(2740)).unwrap(), (64, 64));
        assert_eq!(PLAN.kv_tokens(&options, 100, Some(0)).unwrap(), (32, 32));
    }

    #[test]
    fn a_budget_is_kept_or_refused() {
        let budget = |max_memory_bytes, kv_cache_tokens| EngineOptions {
            max_memory_bytes,
            kv_cache_tokens,
            ..Default::default()
        };
        assert_eq!(PLAN.kv_tokens(&budget(1100 + 640, 0), 100, None).unwrap(), (64, 64));
        assert_eq!(PLAN.kv_tokens(&budget(1100 + 640, 64), 100, None).unwrap(), (64, 64));
        for (bytes, tokens) in [(1000, 0), (1100, 0), (1419, 0), (1739, 64)] {
            let error = PLAN.kv_tokens(&budget(bytes, tokens), 100, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{bytes} {tokens}");
        }
    }
}
