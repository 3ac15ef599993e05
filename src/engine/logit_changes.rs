//! What changes the logits of a sequence before a token is chosen: biases, end tokens that may not come
//! yet, and penalties, which need to know the tokens before. The sums are done by
//! [`ops::adjust_logits`](crate::ops::adjust_logits), here or on the device.

use std::collections::{HashMap, HashSet};

use crate::error::{Error, Result};
use crate::ops::adjust_logits::cpu::adjust_logits;
use crate::ops::adjust_logits::{AdjustedRow, Adjustment};

/// A number that is added to the logit of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub token_id: u32,
    /// At most [`MAX_LOGIT_BIAS`] either way; minus infinity bans the token.
    pub bias: f32,
}

/// The largest bias, either way.
pub const MAX_LOGIT_BIAS: f32 = 1e4;

/// The most biases of a request: they go to the device with every token.
pub const MAX_LOGIT_BIASES: usize = 16_384;

/// Refuses biases that are not of different tokens of the vocabulary, or too large.
pub(super) fn check_biases(biases: &[LogitBias], vocab_size: usize) -> Result<()> {
    if biases.len() > MAX_LOGIT_BIASES {
        return Err(Error::invalid_argument(format!(
            "logit_bias has {} entries, but at most {MAX_LOGIT_BIASES} are allowed",
            biases.len()
        )));
    }
    let mut seen = HashSet::new();
    seen.try_reserve(biases.len())
        .map_err(|_| Error::out_of_memory("logit_bias", size_of_val(biases)))?;
    for (place, LogitBias { token_id, bias }) in biases.iter().enumerate() {
        if *token_id as usize >= vocab_size {
            return Err(Error::invalid_argument(format!(
                "logit_bias[{place}].token_id is {token_id}, but the vocabulary has {vocab_size} tokens"
            )));
        }
        let is_ban = *bias == f32::NEG_INFINITY;
        if !is_ban && !(bias.abs() <= MAX_LOGIT_BIAS) {
            return Err(Error::invalid_argument(format!(
                "logit_bias[{place}].bias is {bias}, but must be from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, or minus infinity"
            )));
        }
        if !seen.insert(*token_id) {
            return Err(Error::invalid_argument(format!(
                "logit_bias[{place}].token_id is {token_id}, which has a bias already"
            )));
        }
    }
    if biases.len() == vocab_size && biases.iter().all(|b| b.bias == f32::NEG_INFINITY) {
        return Err(Error::invalid_argument("logit_bias bans every token of the vocabulary"));
    }
    Ok(())
}

/// The penalties of a request; see [`SamplingOverrides`](super::SamplingOverrides).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Penalties {
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
}

impl Penalties {
    fn is_neutral(&self) -> bool {
        self.repetition == 1.0 && self.presence == 0.0 && self.frequency == 0.0
    }
}

/// The changes to the logits of one sequence.
pub(super) struct LogitChanges {
    penalties: Penalties,
    /// The number of tokens before which no end token is chosen.
    min_tokens: u64,
    has_biases: bool,
    adjustments: Vec<Adjustment>,
    /// The place of each token in `adjustments`.
    places: HashMap<u32, u32>,
}

impl LogitChanges {
    /// The changes of a sequence that begins with `prompt`.
    pub fn new(penalties: Penalties, prompt: &[u32]) -> Result<Self> {
        let mut changes = LogitChanges {
            penalties,
            min_tokens: 0,
            has_biases: false,
            adjustments: Vec::new(),
            places: HashMap::new(),
        };
        if penalties.repetition != 1.0 {
            for &token_id in prompt {
                changes.of(token_id)?.flags |= Adjustment::SEEN;
            }
        }
        Ok(changes)
    }

    /// Adds biases, which have been checked.
    pub fn add_biases(&mut self, biases: &[LogitBias]) -> Result<()> {
        for &LogitBias { token_id, bias } in biases {
            self.of(token_id)?.bias = bias;
        }
        self.has_biases |= !biases.is_empty();
        Ok(())
    }

    /// Bans the tokens `ends` until `min_tokens` have been generated.
    pub fn ban_ends(&mut self, min_tokens: u32, ends: &[u32]) -> Result<()> {
        if min_tokens == 0 {
            return Ok(());
        }
        for &token_id in ends {
            self.of(token_id)?.flags |= Adjustment::ENDS;
        }
        self.min_tokens = if ends.is_empty() { 0 } else { min_tokens.into() };
        Ok(())
    }

    /// Makes room for `num_tokens` generated tokens, so that remembering them allocates nothing.
    pub fn reserve(&mut self, num_tokens: usize) -> Result<()> {
        if self.penalties.is_neutral() {
            return Ok(());
        }
        let bytes = num_tokens.saturating_mul(size_of::<Adjustment>() + 8);
        let no_memory = || Error::out_of_memory("the tokens of a sequence", bytes);
        self.adjustments.try_reserve(num_tokens).map_err(|_| no_memory())?;
        self.places.try_reserve(num_tokens).map_err(|_| no_memory())
    }

    /// The adjustment of a token, which is new if there was none.
    fn of(&mut self, token_id: u32) -> Result<&mut Adjustment> {
        let no_memory =
            |_| Error::out_of_memory("the tokens of a sequence", size_of::<Adjustment>());
        self.places.try_reserve(1).map_err(no_memory)?;
        self.adjustments.try_reserve(1).map_err(no_memory)?;
        let next = self.adjustments.len() as u32;
        let place = *self.places.entry(token_id).or_insert(next);
        if place == next {
            self.adjustments.push(Adjustment { token_id, ..Adjustment::default() });
        }
        let found = self.adjustments.get_mut(place as usize);
        found.ok_or_else(|| Error::internal("a token without an adjustment"))
    }

    /// Takes note of a generated token.
    pub fn remember(&mut self, token_id: u32) -> Result<()> {
        if !self.penalties.is_neutral() {
            let adjustment = self.of(token_id)?;
            adjustment.flags |= Adjustment::SEEN;
            adjustment.num_generated = adjustment.num_generated.saturating_add(1);
        }
        Ok(())
    }

    /// What changes for the token number `index` of the sequence; `None` if nothing does.
    pub fn row(&self, index: u64) -> Option<AdjustedRow> {
        let bans_ends = index < self.min_tokens;
        if self.penalties.is_neutral() && !self.has_biases && !bans_ends {
            return None;
        }
        Some(AdjustedRow {
            count: self.adjustments.len() as u32,
            bans_ends: bans_ends.into(),
            repetition_penalty: self.penalties.repetition,
            presence_penalty: self.penalties.presence,
            frequency_penalty: self.penalties.frequency,
            ..AdjustedRow::default()
        })
    }

    /// The tokens whose logits change.
    pub fn adjustments(&self) -> &[Adjustment] {
        &self.adjustments
    }

    /// Changes the logits for the token number `index`. The logits that change are kept in `before`
    /// as they were, in the order of the adjustments.
    pub fn apply(&self, index: u64, logits: &mut [f32], before: &mut Vec<f32>) -> Result<()> {
        before.clear();
        let Some(row) = self.row(index) else { return Ok(()) };
        before
            .try_reserve(self.adjustments.len())
            .map_err(|_| Error::out_of_memory("logits", self.adjustments.len() * 4))?;
        let logit = |change: &Adjustment| logits.get(change.token_id as usize).copied();
        before.extend(self.adjustments.iter().map(|change| logit(change).unwrap_or(0.0)));
        adjust_logits(logits, &row, &self.adjustments);
        Ok(())
    }

    /// The logit that a token had before the change that left `before`; `None` if it did not change.
    pub fn before(&self, token_id: u32, before: &[f32]) -> Option<f32> {
        before.get(*self.places.get(&token_id)? as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEUTRAL: Penalties = Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };

    #[test]
    fn biases_are_refused_by_place() {
        let refused = |biases: &[(u32, f32)], words: &str| {
            let biases: Vec<LogitBias> =
                biases.iter().map(|&(token_id, bias)| LogitBias { token_id, bias }).collect();
            let error = check_biases(&biases, 10).unwrap_err();
            assert!(error.message().contains(words), "{error}");
        };
        refused(&[(1, 0.0), (10, 0.0)], "logit_bias[1].token_id is 10");
        refused(&[(1, f32::NAN)], "logit_bias[0].bias is NaN");
        refused(&[(1, f32::INFINITY)], "logit_bias[0].bias is inf");
        refused(&[(1, 10_001.0)], "logit_bias[0].bias is 10001");
        refused(&[(1, 1.0), (2, 1.0), (1, 2.0)], "logit_bias[2].token_id is 1");
        let all: Vec<(u32, f32)> = (0..10).map(|id| (id, f32::NEG_INFINITY)).collect();
        refused(&all, "bans every token");
        refused(&vec![(1, 0.0); MAX_LOGIT_BIASES + 1], "logit_bias has 16385 entries");
        let good = [LogitBias { token_id: 9, bias: -10_000.0 }];
        assert!(check_biases(&good, 10).is_ok());
        assert!(check_biases(&[LogitBias { token_id: 0, bias: f32::NEG_INFINITY }], 10).is_ok());
    }

    #[test]
    fn nothing_changes_where_nothing_was_asked_for() {
        let mut changes = LogitChanges::new(NEUTRAL, &[1, 2]).unwrap();
        changes.remember(3).unwrap();
        changes.ban_ends(5, &[]).unwrap();
        assert!(changes.row(0).is_none() && changes.adjustments().is_empty());
        changes.ban_ends(2, &[7]).unwrap();
        assert!(changes.row(1).is_some() && changes.row(2).is_none());
    }

    #[test]
    fn changed_logits_are_kept_as_they_were() {
        let penalties = Penalties { repetition: 2.0, presence: 0.5, frequency: 0.25 };
        let mut changes = LogitChanges::new(penalties, &[0, 2, 0]).unwrap();
        changes.add_biases(&[LogitBias { token_id: 1, bias: -3.0 }]).unwrap();
        changes.ban_ends(1, &[4]).unwrap();
        changes.remember(2).unwrap();
        changes.remember(2).unwrap();
        let mut logits = [4.0, 1.0, 3.0, 5.0, 9.0];
        let mut before = Vec::new();
        changes.apply(0, &mut logits, &mut before).unwrap();
        assert_eq!(logits, [2.0, -2.0, 1.5 - 0.5 - 2.0 * 0.25, 5.0, f32::MIN]);
        let old: Vec<_> = (0..5).map(|id| changes.before(id, &before)).collect();
        assert_eq!(old, [Some(4.0), Some(1.0), Some(3.0), None, Some(9.0)]);
    }
}
