//! A sequence of tokens as the scheduler sees it, and its part of a step.

use std::cmp::Reverse;

use super::block_pool::ContentId;
use super::swap::Saved;
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// Returns the number of blocks for `num_tokens` tokens.
pub(super) fn blocks_for(num_tokens: usize) -> usize {
    num_tokens.div_ceil(BLOCK_SIZE)
}

/// The key of a sequence in its scheduler; it is never used again for another sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceKey {
    pub(super) slot: u32,
    pub(super) serial: u64,
}

impl SequenceKey {
    /// Returns a small number that differs between all sequences that exist at the same time.
    pub fn slot(&self) -> usize {
        self.slot as usize
    }
}

/// The description of a new sequence.
#[derive(Debug, Default)]
pub struct NewSequence {
    /// Its known tokens, at least one.
    pub token_ids: Vec<u32>,
    /// It ends with this many tokens, of which the last is not computed; more than `token_ids` has.
    pub max_tokens: usize,
    /// Higher goes first.
    pub priority: i32,
    /// Shares blocks only with sequences of the same number.
    pub isolation: u64,
    /// The number of first tokens that may be taken from blocks that are computed already; at least
    /// one token is always computed.
    pub max_cached_tokens: usize,
    /// Whether steps can be planned with its next token before that is known.
    pub runs_ahead: bool,
    /// Whether the model chooses its tokens; one that runs ahead has them chosen so.
    pub by_model: bool,
    /// Whether it takes part in no step with others: the scheduler's `plan_alone` plans it.
    pub alone: bool,
    /// Whether it takes part in steps with others of its kind all the same, which `plan_scored` plans.
    pub scored: bool,
}

/// The state of a sequence.
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
    /// The number of blocks whose content was looked up or entered, and the content that they end.
    pub(super) num_entered: usize,
    pub(super) content: ContentId,
    /// The number of tokens that steps under way are choosing, and the row of the last one.
    pub(super) num_pending: usize,
    pub(super) pending_row: u32,
    /// Its blocks on the host while it waits again.
    pub(super) saved: Saved,
    /// The number of times that its blocks were taken.
    pub(super) epoch: u32,
    /// Tokens that were there when it was first admitted; `None` before that.
    pub(super) num_cached: Option<usize>,
    /// Whether its host chooses the next token; until then there is nothing to compute.
    pub(super) awaits_host: bool,
}

impl Sequence {
    /// All known tokens.
    pub fn token_ids(&self) -> &[u32] {
        &self.spec.token_ids
    }

    /// Returns its KV blocks in the order of positions.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Returns the number of its tokens that were found in the cache; 0 before it was admitted.
    pub fn num_cached(&self) -> usize {
        self.num_cached.unwrap_or(0)
    }

    /// Returns the number of times that it lost its blocks.
    pub fn num_preemptions(&self) -> u32 {
        self.epoch
    }

    /// Returns the number of tokens that are known or being chosen.
    pub fn num_tokens(&self) -> usize {
        self.spec.token_ids.len() + self.num_pending
    }

    /// Returns its place in the order of sequences: the lowest goes first.
    pub(super) fn rank(&self) -> (Reverse<i32>, u64) {
        (Reverse(self.spec.priority), self.serial)
    }

    /// Returns the number of tokens that could be computed now, in pieces or all at once.
    pub(super) fn num_ready(&self) -> usize {
        let is_full = self.num_tokens() >= self.spec.max_tokens && !self.spec.alone;
        if is_full || self.awaits_host {
            // The last token is not computed.
            return 0;
        }
        match self.spec.token_ids.len().saturating_sub(self.num_begun) {
            0 if self.num_pending > 0 && self.spec.runs_ahead => 1,
            n => n,
        }
    }

    /// Whether it goes on when the token that is being chosen is known, and not before.
    pub(super) fn awaits_its_token(&self) -> bool {
        let has_more = self.num_tokens() < self.spec.max_tokens;
        self.num_pending > 0 && !self.spec.runs_ahead && has_more
    }

    /// Returns the number of first tokens that may be taken from blocks that are computed already.
    pub(super) fn may_cache(&self) -> usize {
        let computed = self.spec.token_ids.len().saturating_sub(1);
        // After a preemption, computed tokens may be taken from blocks in any case.
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
    /// The number of tokens.
    pub num_new: usize,
    /// If set, the one token is the one that this row of logits of the step before gives.
    pub source: Option<u32>,
    /// The row of logits, in the order of the entries, that gives the sequence's next token, if one
    /// does.
    pub row: Option<u32>,
    /// Whether the model chooses the token of that row ([`NewSequence::by_model`]).
    pub by_model: bool,
    /// The sequence's epoch at the time: if it differs, the blocks were taken since.
    pub(super) epoch: u32,
}
