//! A sequence of tokens as the scheduler sees it, and its part of a step.

use std::cmp::Reverse;

use super::block_pool::ContentId;
use super::swap::Saved;
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// Blocks for so many tokens.
pub(super) fn blocks_for(num_tokens: usize) -> usize {
    num_tokens.div_ceil(BLOCK_SIZE)
}

/// A sequence of a scheduler; never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceKey {
    pub(super) slot: u32,
    pub(super) serial: u64,
}

impl SequenceKey {
    /// Different for all sequences that are there at the same time, and small.
    pub fn slot(&self) -> usize {
        self.slot as usize
    }
}

/// What is to become a sequence.
#[derive(Debug, Default)]
pub struct NewSequence {
    /// At least one.
    pub token_ids: Vec<u32>,
    /// It ends with this many tokens, of which the last is not computed; more than there are now.
    pub max_tokens: usize,
    /// Higher goes first.
    pub priority: i32,
    /// Shares blocks only with sequences of the same number.
    pub isolation: u64,
    /// How many of the first tokens may be taken from blocks that are computed already; one is always
    /// computed.
    pub max_cached_tokens: usize,
    /// Its next token can be named before it is known.
    pub runs_ahead: bool,
    /// Takes part in no step: [`super::Scheduler::plan_alone`] plans it.
    pub alone: bool,
}

/// A sequence as it stands.
#[derive(Debug)]
pub struct Sequence {
    pub(super) serial: u64,
    pub(super) spec: NewSequence,
    /// KV blocks in the order of positions.
    pub(super) blocks: Vec<u32>,
    /// Tokens in steps that were begun.
    pub(super) num_begun: usize,
    /// Tokens in steps that were finished.
    pub(super) num_computed: usize,
    /// Blocks whose content was looked up or entered, and the content that they end.
    pub(super) num_entered: usize,
    pub(super) content: ContentId,
    /// Tokens being chosen in steps under way, and the row of the last one.
    pub(super) num_pending: usize,
    pub(super) pending_row: u32,
    /// What it has on the host while it waits again.
    pub(super) saved: Saved,
    /// Counts how often its blocks were taken.
    pub(super) epoch: u32,
    /// Tokens that were there when it was first admitted; `None` before that.
    pub(super) num_cached: Option<usize>,
}

impl Sequence {
    /// All known tokens.
    pub fn token_ids(&self) -> &[u32] {
        &self.spec.token_ids
    }

    /// Its KV blocks in the order of positions.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// How many of its tokens were not computed, but found; 0 before it was admitted.
    pub fn num_cached(&self) -> usize {
        self.num_cached.unwrap_or(0)
    }

    /// How often it lost its blocks.
    pub fn num_preemptions(&self) -> u32 {
        self.epoch
    }

    /// Tokens that are known or being chosen.
    pub fn num_tokens(&self) -> usize {
        self.spec.token_ids.len() + self.num_pending
    }

    pub(super) fn rank(&self) -> (Reverse<i32>, u64) {
        (Reverse(self.spec.priority), self.serial)
    }

    /// Tokens that could be computed now, in pieces or all at once.
    pub(super) fn num_ready(&self) -> usize {
        if self.num_tokens() >= self.spec.max_tokens && !self.spec.alone {
            // The last token is not computed.
            return 0;
        }
        match self.spec.token_ids.len().saturating_sub(self.num_begun) {
            0 if self.num_pending > 0 && self.spec.runs_ahead => 1,
            n => n,
        }
    }

    pub(super) fn may_cache(&self) -> usize {
        let computed = self.spec.token_ids.len().saturating_sub(1);
        // What was generated may be taken from blocks in any case.
        match self.epoch {
            0 => self.spec.max_cached_tokens.min(computed),
            _ if self.spec.alone => self.spec.max_cached_tokens.min(computed),
            _ => computed,
        }
    }
}

/// The part of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The sequence.
    pub key: SequenceKey,
    /// Position of the first token.
    pub start: usize,
    /// Tokens.
    pub num_new: usize,
    /// The one token is that of this row of logits of the step before.
    pub source: Option<u32>,
    /// The row of logits, in the order of the entries, that gives the sequence's next token.
    pub row: Option<u32>,
    /// The token of that row is chosen by the model ([`NewSequence::runs_ahead`]).
    pub by_model: bool,
    /// Tells whether the sequence has kept its blocks since.
    pub(super) epoch: u32,
}
