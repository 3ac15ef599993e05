//! The limits of a step that the options stand for: sequences, and tokens of prompts.

use super::options::EngineOptions;
use super::step_size::Limits;
use crate::error::{Error, Result};

/// Tokens of prompts in one step: enough for the matrix products to run at full speed, few enough
/// for requests that wait for their next token. The first number is for the CPU, the second for a
/// GPU.
const MAX_PREFILL_TOKENS: [usize; 2] = [512, 2048];

/// Sequences in one step, for the CPU and for a GPU. With more, the products are no longer bound by
/// reading the weights. On a GPU there is no room for more.
const DEFAULT_BATCH_SIZE: [usize; 2] = [64, 256];

/// More than any device can use; bounds the number in an option struct.
const MAX_BATCH_SIZE: u32 = 4096;

/// Returns the limits for a model with contexts of up to `max_context` tokens.
pub(super) fn step_limits(
    options: &EngineOptions,
    on_device: bool,
    max_context: u64,
) -> Result<Limits> {
    let of = |[host, device]: [usize; 2]| if on_device { device } else { host };
    let max_sequences = match options.max_batch_size {
        0 => of(DEFAULT_BATCH_SIZE),
        n if n <= MAX_BATCH_SIZE && on_device => of(DEFAULT_BATCH_SIZE).min(n as usize),
        n if n <= MAX_BATCH_SIZE => n as usize,
        n => {
            return Err(Error::invalid_argument(format!(
                "max_batch_size is {n}, but at most {MAX_BATCH_SIZE} are allowed"
            )))
        }
    };
    let most = match options.max_prefill_tokens {
        0 => of(MAX_PREFILL_TOKENS) as u64,
        n => n,
    };
    // No prompt is longer than the context.
    let max_prefill_tokens = usize::try_from(most.min(max_context)).unwrap_or(usize::MAX).max(1);
    Ok(Limits { max_sequences, max_prefill_tokens })
}
