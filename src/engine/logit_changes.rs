//! The changes to the logits of a sequence before a token is chosen: biases, end tokens that may
//! not come yet, and penalties, which need to know the tokens before. The sums are done by
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
        if !is_ban && (bias.is_nan() || bias.abs() > MAX_LOGIT_BIAS) {
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
    /// One for each of the first tokens, which nothing else decides.
    first_tokens: Vec<Adjustment>,
    /// No sequence of this many tokens occurs twice; 0 allows all.
    no_repeat_ngram: usize,
    /// The adjustments that were applied last, and the logits that they changed, as they were.
    applied: Vec<Adjustment>,
    before: Vec<f32>,
}

/// The bias of a token that must be chosen: larger than all other logits together.
const MUST: f32 = 1e30;

impl LogitChanges {
    /// Returns the changes of a sequence that begins with `prompt`.
    pub fn new(penalties: Penalties, prompt: &[u32]) -> Result<Self> {
        let mut changes = LogitChanges {
            penalties,
            min_tokens: 0,
            has_biases: false,
            adjustments: Vec::new(),
            places: HashMap::new(),
            first_tokens: Vec::new(),
            no_repeat_ngram: 0,
            applied: Vec::new(),
            before: Vec::new(),
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

    /// Makes the sequence begin with `tokens`.
    pub fn begin_with(&mut self, tokens: &[u32]) -> Result<()> {
        let no_memory = |_| Error::out_of_memory("the first tokens", size_of_val(tokens));
        self.first_tokens.try_reserve(tokens.len()).map_err(no_memory)?;
        let must = |&token_id: &u32| Adjustment { token_id, bias: MUST, ..Adjustment::default() };
        self.first_tokens.extend(tokens.iter().map(must));
        Ok(())
    }

    /// Bans tokens that would repeat a sequence of `size` tokens of the prompt or the answer, as
    /// Transformers' `NoRepeatNGramLogitsProcessor` does; 0 bans none. That needs to know all tokens
    /// before, so such a sequence cannot run ahead.
    pub fn ban_repeated(&mut self, size: u32) {
        self.no_repeat_ngram = size as usize;
    }

    /// Makes room for `num_tokens` generated tokens, so that choosing and remembering them allocates
    /// nothing, but for sequences that must not be repeated.
    pub fn reserve(&mut self, num_tokens: usize) -> Result<()> {
        let more = if self.penalties.is_neutral() { 0 } else { num_tokens };
        let len = self.adjustments.len().saturating_add(more).saturating_add(1);
        let bytes = len.saturating_mul(2 * size_of::<Adjustment>() + 12);
        let no_memory = |_| Error::out_of_memory("the tokens of a sequence", bytes);
        self.adjustments.try_reserve(more).map_err(no_memory)?;
        self.places.try_reserve(more).map_err(no_memory)?;
        self.applied.try_reserve(len).map_err(no_memory)?;
        self.before.try_reserve(len).map_err(no_memory)
    }

    /// Returns the adjustment of a token, which is new if there was none.
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

    /// Returns the changes for the token number `index` of the sequence, except those for repeated
    /// sequences; `None` if there are none.
    pub fn row(&self, index: u64) -> Option<(AdjustedRow, &[Adjustment])> {
        let first = usize::try_from(index).ok().and_then(|index| self.first_tokens.get(index));
        if let Some(first) = first {
            let row = AdjustedRow { count: 1, ..AdjustedRow::default() };
            return Some((row, std::slice::from_ref(first)));
        }
        let bans_ends = index < self.min_tokens;
        if self.penalties.is_neutral() && !self.has_biases && !bans_ends {
            return None;
        }
        let row = AdjustedRow {
            count: self.adjustments.len() as u32,
            bans_ends: bans_ends.into(),
            repetition_penalty: self.penalties.repetition,
            presence_penalty: self.penalties.presence,
            frequency_penalty: self.penalties.frequency,
            ..AdjustedRow::default()
        };
        Some((row, &self.adjustments))
    }

    /// Whether the token number `index` is one of the first ones, which nothing else decides.
    pub fn is_decided(&self, index: u64) -> bool {
        usize::try_from(index).is_ok_and(|index| index < self.first_tokens.len())
    }

    /// Returns the changes for the token number `index` of the sequence, which comes after
    /// `tokens`: prompt and answer so far, of which the last may still be missing where no
    /// repetition is banned. `None` if there are none.
    pub fn row_after(
        &mut self,
        index: u64,
        tokens: &[u32],
    ) -> Result<Option<(AdjustedRow, &[Adjustment])>> {
        if self.no_repeat_ngram == 0 {
            return Ok(self.row(index));
        }
        let row = self.collect(index, tokens)?;
        Ok((!self.applied.is_empty()).then_some((row, &self.applied)))
    }

    /// Puts together the adjustments for the token number `index`, which comes after `tokens`.
    fn collect(&mut self, index: u64, tokens: &[u32]) -> Result<AdjustedRow> {
        let mut applied = std::mem::take(&mut self.applied);
        applied.clear();
        let found = self.row(index);
        let (row, adjustments) = found.unwrap_or((AdjustedRow::UNCHANGED, &[]));
        let no_memory = |_| Error::out_of_memory("logits", size_of_val(adjustments));
        applied.try_reserve(adjustments.len()).map_err(no_memory)?;
        applied.extend_from_slice(adjustments);
        if !self.is_decided(index) {
            self.add_repeated(tokens, &mut applied)?;
        }
        self.applied = applied;
        Ok(row)
    }

    /// Changes the logits for the token number `index`, which comes after `tokens`: prompt and answer so
    /// far.
    pub fn apply(&mut self, index: u64, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        let row = self.collect(index, tokens)?;
        let applied = &self.applied;
        self.before.clear();
        let no_memory = |_| Error::out_of_memory("logits", applied.len() * 4);
        self.before.try_reserve(applied.len()).map_err(no_memory)?;
        let logit = |change: &Adjustment| logits.get(change.token_id as usize).copied();
        self.before.extend(applied.iter().map(|change| logit(change).unwrap_or(0.0)));
        adjust_logits(logits, &row, applied);
        Ok(())
    }

    /// Bans each token after which the last tokens would be a repeated sequence.
    fn add_repeated(&self, tokens: &[u32], applied: &mut Vec<Adjustment>) -> Result<()> {
        let Some(kept) = self.no_repeat_ngram.checked_sub(1) else { return Ok(()) };
        let Some(last) = tokens.len().checked_sub(kept).and_then(|at| tokens.get(at..)) else {
            return Ok(());
        };
        let num_known = applied.len();
        for window in tokens.windows(self.no_repeat_ngram) {
            let Some((&token_id, before)) = window.split_last() else { continue };
            if before != last {
                continue;
            }
            let known = self.places.get(&token_id).filter(|_| num_known > 0);
            match known.and_then(|&place| applied.get_mut(place as usize)) {
                Some(adjustment) => adjustment.bias = f32::NEG_INFINITY,
                None => {
                    let no_memory = |_| Error::out_of_memory("logits", size_of::<Adjustment>());
                    applied.try_reserve(1).map_err(no_memory)?;
                    let bias = f32::NEG_INFINITY;
                    applied.push(Adjustment { token_id, bias, ..Adjustment::default() });
                }
            }
        }
        Ok(())
    }

    /// Returns the logit that a token had before [`LogitChanges::apply`] changed it; `None` if it
    /// did not.
    pub fn before(&self, token_id: u32) -> Option<f32> {
        // A token that was banned twice was changed in the first place.
        let place = self.applied.iter().position(|change| change.token_id == token_id)?;
        self.before.get(place).copied()
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
        assert!(changes.row(0).is_none() && changes.adjustments.is_empty());
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
        changes.apply(0, &[], &mut logits).unwrap();
        assert_eq!(logits, [2.0, -2.0, 1.5 - 0.5 - 2.0 * 0.25, 5.0, f32::MIN]);
        let old: Vec<_> = (0..5).map(|id| changes.before(id)).collect();
        assert_eq!(old, [Some(4.0), Some(1.0), Some(3.0), None, Some(9.0)]);
    }

    #[test]
    fn no_sequence_comes_twice() {
        let banned = |size: u32, tokens: &[u32]| {
            let mut changes = LogitChanges::new(NEUTRAL, &[]).unwrap();
            changes.add_biases(&[LogitBias { token_id: 2, bias: 1.0 }]).unwrap();
            changes.ban_repeated(size);
            let mut logits = [0.0; 6];
            changes.apply(9, tokens, &mut logits).unwrap();
            let ids = (0..6u32).filter(|&id| logits[id as usize] == f32::MIN);
            ids.collect::<Vec<_>>()
        };
        let tokens = [1, 2, 3, 1, 2, 4, 5, 1, 2];
        assert_eq!(banned(3, &tokens), [3, 4]);
        assert_eq!(banned(2, &tokens), [3, 4]);
        assert_eq!(banned(4, &tokens), [0u32; 0]);
        assert_eq!(banned(1, &tokens), [1, 2, 3, 4, 5]);
        assert_eq!(banned(0, &tokens), [0u32; 0]);
        assert_eq!(banned(2, &[1, 2, 1]), [2]);
        assert_eq!(banned(3, &[1]), [0u32; 0]);
        assert_eq!(banned(9, &tokens), [0u32; 0]);
        assert_eq!(banned(10, &tokens), [0u32; 0]);
    }

    #[test]
    fn the_first_tokens_are_decided() {
        let penalties = Penalties { repetition: 2.0, presence: 0.5, frequency: 0.25 };
        let mut changes = LogitChanges::new(penalties, &[1, 2]).unwrap();
        changes.begin_with(&[2, 0]).unwrap();
        changes.ban_repeated(1);
        let mut logits = [3.0, 2.0, -5.0];
        changes.apply(0, &[1, 2], &mut logits).unwrap();
        assert_eq!(logits, [3.0, 2.0, 1e30]);
        assert_eq!((changes.before(2), changes.before(1)), (Some(-5.0), None));
        let mut logits = [3.0, 2.0, -5.0];
        changes.apply(2, &[1, 2, 2, 0], &mut logits).unwrap();
        assert_eq!(logits, [f32::MIN; 3]);
    }
}
