//! What a caller asks for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use super::prompt::Prompt;
use super::sampler::SamplingOverrides;

/// A switch that other threads can throw.
#[derive(Default)]
pub struct CancelToken {
    cancelled: AtomicBool,
}

impl CancelToken {
    /// Stops every request that carries the token, now and later.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Was it thrown?
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

/// One generation to be done. What is `None` comes from the model's generation_config.json.
pub struct Request<'a> {
    /// What to continue.
    pub prompt: Prompt<'a>,
    /// How to choose tokens.
    pub sampling: SamplingOverrides,
    /// Seed of the random draws; `None` draws one from the operating system.
    pub seed: Option<u64>,
    /// Most tokens to generate; `None`: the config's max_new_tokens, else until the context is full.
    pub max_tokens: Option<u32>,
    /// The text ends before the first of these that appears.
    pub stop_strings: Vec<&'a str>,
    /// Tokens that end the generation, beside the model's own.
    pub stop_token_ids: &'a [u32],
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// Do not stop at the model's own end tokens.
    pub ignore_eos: bool,
    /// Stops the request from another thread.
    pub cancel: Option<Arc<CancelToken>>,
    /// Higher goes first.
    pub priority: i32,
    /// Independent continuations of the prompt; sample `i` draws with the seed plus `i`. At least 1.
    pub num_samples: u32,
    /// Time from the call until the request is ended with what it has.
    pub time_limit: Option<Duration>,
    /// Requests with different numbers share no keys and values.
    pub cache_key: u64,
}
