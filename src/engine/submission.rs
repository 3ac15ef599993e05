//! Requests as the scheduler's thread gets them: a sequence, and the work to be done with it.

use std::sync::Arc;

use super::constrained::Constrained;
use super::inbox::Inbox;
use super::lease::Handoff;
use super::request::FinishReason;
use super::sampler::{Chosen, Sampler};
use super::score_call::ScoreCall;
use super::sequence::{NewSequence, SequenceKey};
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::model::{LogProbsWanted, TokenChoice};

/// The way in which the tokens of a sample are chosen, and the place where they go.
pub(super) struct SampleWork {
    pub inbox: Arc<Inbox>,
    /// Its number in the request.
    pub sample: u32,
    pub sampler: Sampler,
    /// The constraint that its text follows.
    pub constrained: Option<Box<Constrained>>,
    /// Tokens that end it.
    pub stop_token_ids: Arc<Vec<u32>>,
    pub num_prompt_tokens: usize,
    /// The sequence ends at this length.
    pub max_tokens: usize,
    /// The reason for that end.
    pub reason_at_max: FinishReason,
    /// The rule by which the model chooses, if it can; the worker fills in the index of the token.
    pub choice: TokenChoice,
    /// The log-probabilities that come with each token.
    pub log_probs: Option<LogProbsWanted>,
    /// Whether the host changes the logits before each choice.
    pub asks_host: bool,
}

/// The scoring of given tokens.
pub(super) struct ScoreWork {
    /// All its tokens, of which the last is scored and not computed.
    pub token_ids: Vec<u32>,
    /// The first token whose next one is scored.
    pub first_row: usize,
    /// The number of likeliest tokens that are told in the place of each.
    pub num_top: usize,
    pub to: ScoreReceiver,
}

/// Where scores go.
pub(super) enum ScoreReceiver {
    /// To a request, whose samples begin when all are there.
    Request { inbox: Arc<Inbox>, then: Vec<Submission> },
    /// To a thread that waits for them.
    Call(Arc<ScoreCall>),
}

impl SampleWork {
    /// Chooses the token number `index`, after `tokens`: prompt and answer so far.
    pub fn choose(
        &mut self,
        backend: &CpuBackend,
        logits: &mut [f32],
        index: u64,
        tokens: &[u32],
    ) -> Result<Chosen> {
        let Self { sampler, constrained, log_probs, .. } = self;
        // The first tokens fit; that was checked.
        let constrained = constrained.as_mut().filter(|_| !sampler.changes_mut().is_decided(index));
        let mask = constrained.map(|constrained| constrained.mask()).transpose()?;
        sampler.choose(backend, logits, index, tokens, mask, *log_probs)
    }

    /// Whether a constraint, rather than a first token, decides the token number `index`.
    pub fn is_masked(&mut self, index: u64) -> bool {
        self.constrained.is_some() && !self.sampler.changes_mut().is_decided(index)
    }
}

impl ScoreWork {
    /// Returns the number of samples that its end ends, for statistics.
    pub fn num_samples(&self) -> u64 {
        match &self.to {
            ScoreReceiver::Request { then, .. } => then.iter().map(Submission::num_samples).sum(),
            ScoreReceiver::Call(_) => 1,
        }
    }
}

/// The work that is done with a sequence.
pub(super) enum Work {
    /// Tokens are chosen.
    Sample(Box<SampleWork>),
    /// Its logits are computed by the thread that wants them.
    Logits(Arc<Handoff>),
    /// Its tokens get log-probabilities.
    Score(Box<ScoreWork>),
}

/// A request for the scheduler.
pub(super) enum Submission {
    /// A sequence is computed.
    Run { sequence: NewSequence, work: Work },
    /// There is nothing to compute: all samples of the request end for this reason. It comes here
    /// because only the scheduler's thread calls wakers.
    End { inbox: Arc<Inbox>, num_samples: u32, reason: FinishReason },
    /// Logits of a sequence, as its host has changed them.
    Answer { key: SequenceKey, logits: Vec<f32> },
}

impl Submission {
    /// Returns the number of samples that it ends, for statistics.
    pub fn num_samples(&self) -> u64 {
        match self {
            Submission::Run { work: Work::Score(work), .. } => work.num_samples(),
            Submission::Run { .. } => 1,
            Submission::End { num_samples, .. } => (*num_samples).into(),
            Submission::Answer { .. } => 0,
        }
    }
}
