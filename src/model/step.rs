//! A step of generation: a forward pass and the choice of the next tokens, begun and finished apart, so that
//! the caller can prepare the next step while a device computes this one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::batch::ForwardBatch;

/// How a token is drawn at random: from the logits divided by the temperature, behind the filters top-k, top-p
/// and min-p in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Above 0.
    pub temperature: f32,
    /// 0: all tokens.
    pub top_k: u32,
    /// Above 0; 1: all tokens.
    pub top_p: f32,
    /// 0: all tokens.
    pub min_p: f32,
    /// The draw depends on seed and index alone: index is the number of the token in its sequence.
    pub seed: u64,
    /// See `seed`.
    pub index: u64,
}

/// How the token behind a row of logits is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenChoice {
    /// The most likely; of equal ones the first.
    Greedy,
    /// At random.
    Draw(Draw),
    /// By the caller: the step gives the row of logits.
    Caller,
}

/// In [`Step::token_sources`]: the token is the one in the batch.
pub const FROM_BATCH: u32 = u32::MAX;

/// In [`StepResult::tokens`]: the row's logits are not finite numbers, or the caller chooses.
pub const NO_TOKEN: u32 = u32::MAX;

/// What a step computes.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The tokens. Sequences with one token come before those with several.
    pub batch: ForwardBatch<'a>,
    /// `[num_tokens]`, or empty where all are [`FROM_BATCH`]: else the index of a logits row of the step begun
    /// before this one, whose token, perhaps not chosen yet, is this token. (The one in the batch is then any
    /// valid id.)
    pub token_sources: &'a [u32],
    /// `[num_logits_rows]`
    pub choices: &'a [TokenChoice],
}

/// What a step came to.
#[derive(Clone, Debug, Default)]
pub struct StepResult {
    /// `[num_logits_rows]`, [`NO_TOKEN`] where there is none.
    pub tokens: Vec<u32>,
    /// The logits of the rows with [`TokenChoice::Caller`], in their order, `[rows, vocab_size]`.
    pub logits: Vec<f32>,
    /// How long it took.
    pub time: StepTime,
}

/// How long a step took what computes it: a device by its own clock, the CPU by the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// From its beginning, or from the end of the step before where it waited for that, to its end.
    pub busy: Duration,
    /// From the end of the step before to its beginning. 0 for the first.
    pub idle: Duration,
}

/// A step that was begun and not finished.
#[derive(Debug, Default)]
pub(super) struct HostSteps {
    pub(super) pending: VecDeque<StepResult>,
    /// Results that were given back, for their memory.
    pub(super) spare: Vec<StepResult>,
    /// When the last one ended.
    pub(super) last_end: Option<Instant>,
}
