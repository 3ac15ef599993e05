//! The number of tokens that a step may have, and how it shrinks when memory is short.

use super::sequence::Entry;
use crate::model::PassLimits;

/// The largest size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most sequences that run at the same time.
    pub max_sequences: usize,
    /// Most tokens of long inputs in one step, all sequences together.
    pub max_prefill_tokens: usize,
}

impl Limits {
    /// Returns the most tokens of a step.
    pub fn max_step_tokens(&self) -> usize {
        self.max_prefill_tokens.saturating_add(self.max_sequences)
    }

    /// The passes of a model on a device, with contexts of up to `max_context` tokens.
    pub fn passes(&self, max_context: u64) -> PassLimits {
        PassLimits {
            num_tokens: self.max_step_tokens(),
            num_sequences: self.max_sequences,
            max_context_tokens: usize::try_from(max_context).unwrap_or(usize::MAX),
        }
    }
}

/// Steps that must go well before larger ones are tried again.
const STEPS_UNTIL_GROWTH: u32 = 64;

/// The size that steps may have at the moment.
#[derive(Debug)]
pub(super) struct StepSize {
    /// `None`: only the limits hold.
    max_tokens: Option<usize>,
    /// Steps that went well since `max_tokens` was set.
    num_good: u32,
}

/// The tokens that are left in a step that is being planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenBudget {
    /// Tokens of inputs of more than one token.
    pub long: usize,
    /// All tokens.
    pub all: usize,
}

impl TokenBudget {
    /// Returns the room for tokens of inputs of more than one token.
    pub fn for_long(&self) -> usize {
        self.long.min(self.all)
    }

    /// Takes room for the tokens of an entry. (A long input may have one token left.)
    pub fn take(&mut self, num_new: usize, is_long: bool) {
        self.all = self.all.saturating_sub(num_new);
        if is_long {
            self.long = self.long.saturating_sub(num_new);
        }
    }

    /// Gives back the room of an entry that is removed from the plan.
    pub fn give_back(&mut self, entry: &Entry) {
        self.all = self.all.saturating_add(entry.num_new);
        if entry.num_new > 1 {
            self.long += entry.num_new;
        }
    }
}

impl StepSize {
    /// Returns a size with no bound but the limits.
    pub fn new() -> Self {
        StepSize { max_tokens: None, num_good: 0 }
    }

    /// Returns the most tokens of a step.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens.unwrap_or(usize::MAX)
    }

    /// Returns the budget of an empty step.
    pub fn room(&self, limits: &Limits) -> TokenBudget {
        TokenBudget { long: limits.max_prefill_tokens, all: self.max_tokens() }
    }

    /// Records that a step of `num_tokens` found no memory: the next ones have half as many. False if
    /// they cannot have fewer.
    pub fn shrink(&mut self, num_tokens: usize) -> bool {
        if num_tokens <= 1 {
            return false;
        }
        self.max_tokens = Some(num_tokens / 2);
        self.num_good = 0;
        true
    }

    /// Records that a step went well. Memory that was short may be there again.
    pub fn grow(&mut self, limits: &Limits) {
        let Some(most) = self.max_tokens else { return };
        self.num_good += 1;
        if self.num_good >= STEPS_UNTIL_GROWTH {
            self.num_good = 0;
            let doubled = most.saturating_mul(2);
            self.max_tokens = (doubled < limits.max_step_tokens()).then_some(doubled);
        }
    }
}
