//! A step of generation: a forward pass and the choice of the next tokens, begun and finished
//! separately, so that the caller can prepare the next step while a device computes this one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::batch::ForwardBatch;
use crate::error::Result;
use crate::ops::adjust_logits::{AdjustedRow, Adjustment};
pub use crate::ops::sample::Draw;

/// The rule by which the token that follows a row of logits is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenChoice {
    /// The most likely token; the first among equals.
    Greedy,
    /// A token drawn at random.
    Draw(Draw),
    /// The caller chooses: the step returns the row of logits.
    Caller,
}

/// The value in [`Step::token_sources`] that stands for the token in the batch.
pub const FROM_BATCH: u32 = u32::MAX;

/// The value in [`StepResult::tokens`] of a row whose logits are not finite numbers, or whose token
/// the caller chooses.
pub const NO_TOKEN: u32 = u32::MAX;

/// The input of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The tokens. Sequences with one token come before those with several.
    pub batch: ForwardBatch<'a>,
    /// `[num_tokens]`, or empty if all are [`FROM_BATCH`]. Any other value is the index of a logits
    /// row of the step begun before this one, whose token, perhaps not chosen yet, is this token.
    /// (The one in the batch is then any valid id.)
    pub token_sources: &'a [u32],
    /// The choice of each row's token, `[num_logits_rows]`.
    pub choices: &'a [TokenChoice],
    /// The changes to the logits of each row before its token is chosen, `[num_logits_rows]`; those
    /// of missing rows stay as they are. Where the caller chooses, nothing changes.
    pub adjusted_rows: &'a [AdjustedRow],
    /// The adjustments of all rows. (A pending token is one of the step begun before this one.)
    pub adjustments: &'a [Adjustment],
    /// The log-probabilities that are wanted of each row, `[num_logits_rows]`; missing rows want
    /// none. Where the caller chooses, there are none.
    pub log_probs: &'a [Option<LogProbsWanted>],
    /// The rows, in order, whose tokens are kept to masks that are not known yet. If there are any,
    /// the tokens of all rows are chosen by [`crate::model::Model::choose_masked`].
    pub masked_rows: &'a [u32],
}

/// Writes the masks of a step: `[num_masked_rows, mask_words(vocab_size)]` words of 32 bits in the
/// machine's byte order. The bit `id % 32` of the word `id / 32` says whether a token may come.
pub type WriteMasks<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

/// Returns the number of words of a mask.
pub fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// The most tokens whose log-probabilities a row gives besides that of the chosen one.
pub const MAX_TOP_LOG_PROBS: u32 = 20;

/// The log-probabilities that come with every generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogProbsWanted {
    /// The number of the most likely tokens that are told besides the chosen one, at most
    /// [`MAX_TOP_LOG_PROBS`].
    pub num_top: u32,
    /// Whether the changes of the logits (biases, penalties, bans, masks) and the temperature count. (The
    /// filters top-k, top-p, min-p and typical-p never do.)
    pub processed: bool,
}

/// The log-probability of a given token after those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenScore {
    /// The logarithm of its softmax.
    pub log_prob: f32,
    /// Whether no other token was likelier, nor as likely with a lower id.
    pub is_likeliest: bool,
}

/// The destination of the logits of a pass.
#[derive(Debug)]
pub(super) enum RowsOut<'a> {
    /// They are written here, `[num_logits_rows, vocab_size]`.
    Logits(&'a mut [f32]),
    /// They say how likely tokens are.
    Scores(ScoresOut<'a>),
}

/// The scores of one token for each row of logits, and the likeliest ones.
#[derive(Debug)]
pub struct ScoresOut<'a> {
    /// `[num_logits_rows]`, in the vocabulary.
    pub tokens: &'a [u32],
    /// `[num_logits_rows]`
    pub scores: &'a mut [TokenScore],
    /// `[num_logits_rows, num_top]`: the likeliest tokens of each row, in order; of equals the one with
    /// the lower id first. At most [`MAX_TOP_LOG_PROBS`] for a row, and no more than the vocabulary has.
    pub top: &'a mut [TokenLogProb],
}

impl ScoresOut<'_> {
    /// Returns the number of likeliest tokens of a row.
    pub(super) fn num_top(&self) -> usize {
        self.top.len().checked_div(self.tokens.len()).unwrap_or(0)
    }
}

/// The log-probability of a token: the logarithm of its softmax.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenLogProb {
    /// The token.
    pub token_id: u32,
    /// Its natural logarithm, at most 0.
    pub log_prob: f32,
}

/// The log-probabilities of a row of logits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogProbs {
    /// That of the chosen token.
    pub chosen: f32,
    /// Those of the most likely tokens, the likeliest first.
    pub top: Vec<TokenLogProb>,
}

/// The result of a step.
#[derive(Clone, Debug, Default)]
pub struct StepResult {
    /// The chosen tokens, `[num_logits_rows]`; [`NO_TOKEN`] where there is none.
    pub tokens: Vec<u32>,
    /// The logits of the rows with [`TokenChoice::Caller`], in their order, `[rows, vocab_size]`.
    pub logits: Vec<f32>,
    /// The log-probabilities of the rows that want them, `[num_logits_rows]`, or empty if none does.
    pub log_probs: Vec<Option<Box<LogProbs>>>,
    /// The time that the step took.
    pub time: StepTime,
}

/// The time that a step took, measured on a device by its own clock and on the CPU by the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// The time from its beginning, or from the end of the previous step if it waited for that, to
    /// its end.
    pub busy: Duration,
    /// The time from the end of the previous step to its beginning; 0 for the first step.
    pub idle: Duration,
}

/// Steps on the CPU, which are computed as they begin.
#[derive(Debug, Default)]
pub(super) struct HostSteps {
    pub(super) pending: VecDeque<StepResult>,
    /// Returned results, kept for their memory.
    pub(super) spare: Vec<StepResult>,
    /// When the last step ended.
    pub(super) last_end: Option<Instant>,
}
