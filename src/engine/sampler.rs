//! Chooses a token from logits.
//!
//! Parameters mean what they mean in Transformers (`generation/logits_process.py`), and are applied
//! in its order: biases, repetition, presence and frequency penalty, repeated sequences, temperature, top_k,
//! top_p, min_p, typical_p.
//! Presence and frequency penalty, which Transformers does not have, count generated tokens as the
//! OpenAI interface does.

use serde_json::{Map, Value};

use super::config_fields::{count, float};
use super::logit_changes::{LogitBias, LogitChanges, Penalties};
use crate::backend::cpu::CpuBackend;
use crate::error::{try_with_capacity, Error, Result};
use crate::model::{Draw, LogProbs, LogProbsWanted, TokenChoice, TokenLogProb};
use crate::ops::adjust_logits::cpu::mask_logits;
use crate::ops::log_probs::cpu::LogSum;
use crate::ops::sample::cpu::Candidates;
use crate::ops::top_k::cpu::select;
use crate::text::TokenMask;

/// The settings of a caller, where `None` leaves one to the model's generation_config.json; or those of
/// that file, where it leaves one at its neutral value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    /// Above 0, at most 1.
    pub top_p: Option<f32>,
    /// 0 to 1.
    pub min_p: Option<f32>,
    /// Above 0; 1 is neutral.
    pub repetition_penalty: Option<f32>,
    /// Any finite number; 0 is neutral.
    pub presence_penalty: Option<f32>,
    /// Any finite number; 0 is neutral.
    pub frequency_penalty: Option<f32>,
    /// Above 0; 1 keeps all.
    pub typical_p: Option<f32>,
    /// 0 allows all repetitions.
    pub no_repeat_ngram_size: Option<u32>,
}

/// Sampling parameters, resolved and checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    typical_p: f32,
    no_repeat_ngram_size: u32,
}

/// A setting that is a number: its name, also in generation_config.json, and what it may be.
struct Setting {
    name: &'static str,
    /// The value where neither the caller nor the model sets it.
    neutral: f32,
    is_valid: fn(f32) -> bool,
    expected: &'static str,
}

const TEMPERATURE: Setting = Setting {
    name: "temperature",
    neutral: 0.0,
    is_valid: |v| v >= 0.0,
    expected: "a finite number, at least 0",
};
const TOP_P: Setting = share("top_p");
const MIN_P: Setting = Setting {
    name: "min_p",
    neutral: 0.0,
    is_valid: |v| (0.0..=1.0).contains(&v),
    expected: "from 0 to 1",
};
const REPETITION_PENALTY: Setting = Setting {
    name: "repetition_penalty",
    neutral: 1.0,
    is_valid: |v| (1e-3..=1e3).contains(&v),
    expected: "from 0.001 to 1000",
};
const PRESENCE_PENALTY: Setting = additive("presence_penalty");
const FREQUENCY_PENALTY: Setting = additive("frequency_penalty");
const TYPICAL_P: Setting = share("typical_p");

/// Returns the setting of a share of the probability that is kept.
const fn share(name: &'static str) -> Setting {
    let is_valid = |v| v > 0.0 && v <= 1.0;
    Setting { name, neutral: 1.0, is_valid, expected: "above 0 and at most 1" }
}

/// Returns the setting of a penalty that is subtracted from logits.
const fn additive(name: &'static str) -> Setting {
    let is_valid = |v: f32| v.abs() <= 1e4;
    Setting { name, neutral: 0.0, is_valid, expected: "from -10000 to 10000" }
}

impl Setting {
    /// Returns what generation_config.json says.
    fn read(&self, json: &Map<String, Value>) -> Result<Option<f32>> {
        float(json, self.name, self.is_valid, self.expected)
    }

    /// Resolves the caller's value over the model's over the neutral one.
    fn resolve(&self, caller: Option<f32>, model: Option<f32>) -> Result<f32> {
        let value = caller.or(model).unwrap_or(self.neutral);
        if value.is_finite() && (self.is_valid)(value) {
            return Ok(value);
        }
        let Setting { name, expected, .. } = self;
        Err(Error::invalid_argument(format!("{name} is {value}, but must be {expected}")))
    }
}

impl SamplingOverrides {
    /// Reads generation_config.json, which knows no presence and frequency penalty.
    pub(super) fn from_json(json: &Map<String, Value>) -> Result<Self> {
        Ok(SamplingOverrides {
            temperature: TEMPERATURE.read(json)?,
            top_k: count(json, "top_k")?,
            top_p: TOP_P.read(json)?,
            min_p: MIN_P.read(json)?,
            repetition_penalty: REPETITION_PENALTY.read(json)?,
            presence_penalty: None,
            frequency_penalty: None,
            typical_p: TYPICAL_P.read(json)?,
            no_repeat_ngram_size: count(json, "no_repeat_ngram_size")?,
        })
    }
}

impl SamplingParams {
    /// Resolves the caller's settings over the model's over the neutral ones.
    pub fn resolve(caller: &SamplingOverrides, model: &SamplingOverrides) -> Result<Self> {
        let float = |setting: Setting, of: fn(&SamplingOverrides) -> Option<f32>| {
            setting.resolve(of(caller), of(model))
        };
        Ok(SamplingParams {
            temperature: float(TEMPERATURE, |s| s.temperature)?,
            top_k: caller.top_k.or(model.top_k).unwrap_or(0) as usize,
            top_p: float(TOP_P, |s| s.top_p)?,
            min_p: float(MIN_P, |s| s.min_p)?,
            repetition_penalty: float(REPETITION_PENALTY, |s| s.repetition_penalty)?,
            presence_penalty: float(PRESENCE_PENALTY, |s| s.presence_penalty)?,
            frequency_penalty: float(FREQUENCY_PENALTY, |s| s.frequency_penalty)?,
            typical_p: float(TYPICAL_P, |s| s.typical_p)?,
            no_repeat_ngram_size: caller
                .no_repeat_ngram_size
                .or(model.no_repeat_ngram_size)
                .unwrap_or(0),
        })
    }
}

impl SamplingParams {
    fn penalties(&self) -> Penalties {
        Penalties {
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
        }
    }

    /// Whether the choice of a token needs to know the one before, so that it cannot be planned ahead.
    pub(super) fn looks_back(&self) -> bool {
        self.no_repeat_ngram_size > 0
    }

    /// Returns the way in which a model chooses the tokens of a sequence by itself, if it can.
    pub(super) fn model_choice(&self, seed: u64) -> TokenChoice {
        if self.temperature == 0.0 {
            return TokenChoice::Greedy;
        }
        TokenChoice::Draw(self.draw(seed, 0))
    }

    /// Returns the draw of the token number `index`. A temperature of 0, which is not drawn with, counts
    /// as 1.
    fn draw(&self, seed: u64, index: u64) -> Draw {
        Draw {
            temperature: if self.temperature == 0.0 { 1.0 } else { self.temperature },
            top_k: u32::try_from(self.top_k).unwrap_or(0),
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            seed,
            index,
        }
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// Its log-probabilities, where they were asked for.
    pub log_probs: Option<Box<LogProbs>>,
}

/// Chooses the tokens of one sequence.
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    changes: LogitChanges,
    candidates: Candidates,
    /// The likeliest logits and their tokens.
    largest: Vec<(f32, usize)>,
}

impl Sampler {
    /// Returns a sampler for a sequence that begins with `prompt`.
    pub fn new(params: SamplingParams, seed: u64, prompt: &[u32]) -> Result<Self> {
        let mut changes = LogitChanges::new(params.penalties(), prompt)?;
        changes.ban_repeated(params.no_repeat_ngram_size);
        Ok(Sampler {
            params,
            seed,
            changes,
            candidates: Candidates::default(),
            largest: Vec::new(),
        })
    }

    /// Returns the changes to the logits that come before the choice.
    pub(super) fn changes_mut(&mut self) -> &mut LogitChanges {
        &mut self.changes
    }

    /// Adds biases to those that change the logits.
    pub fn add_biases(&mut self, biases: &[LogitBias]) -> Result<()> {
        self.changes.add_biases(biases)
    }

    /// Chooses the token number `step` of the sequence, and remembers it. Sequences of tokens may be
    /// repeated. For tests.
    ///
    /// `logits`: [vocab_size]; changed by the penalties.
    #[doc(hidden)]
    pub fn sample(&mut self, backend: &CpuBackend, logits: &mut [f32], step: u64) -> Result<u32> {
        let chosen = self.choose(backend, logits, step, &[], None, None)?;
        self.changes.remember(chosen.token)?;
        Ok(chosen.token)
    }

    /// Chooses the token number `step` of the sequence, after `tokens`: prompt and answer so far. It is
    /// not remembered yet. It is one that `mask` allows. All work is done on this thread.
    ///
    /// `logits`: [vocab_size]; changed by biases, penalties and the mask.
    pub fn choose(
        &mut self,
        backend: &CpuBackend,
        logits: &mut [f32],
        step: u64,
        tokens: &[u32],
        mask: Option<TokenMask<'_>>,
        wanted: Option<LogProbsWanted>,
    ) -> Result<Chosen> {
        let raw = match wanted {
            Some(wanted) if !wanted.processed => Some(self.log_probs(backend, logits, wanted)?),
            _ => None,
        };
        self.changes.apply(step, tokens, logits)?;
        if let Some(mask) = mask {
            mask_logits(logits, mask.words);
        }
        let token = if self.params.temperature == 0.0 {
            most_likely(logits)?
        } else {
            self.draw(backend, logits, step)?
        };
        if mask.is_some_and(|mask| !mask.allows(token)) {
            return Err(none_left());
        }
        let logit = logits.get(token as usize).copied().unwrap_or(0.0);
        let (logit, found) = match (wanted, raw) {
            (None, _) => return Ok(Chosen { token, log_probs: None }),
            (_, Some(raw)) => (self.changes.before(token).unwrap_or(logit), raw),
            (Some(wanted), None) => (logit, self.log_probs(backend, logits, wanted)?),
        };
        let (sum, mut log_probs) = found;
        log_probs.chosen = sum.log_prob(logit);
        Ok(Chosen { token, log_probs: Some(log_probs) })
    }

    /// Returns the log-probabilities of the likeliest tokens, and what gives that of the chosen
    /// one.
    fn log_probs(
        &mut self,
        backend: &CpuBackend,
        logits: &[f32],
        wanted: LogProbsWanted,
    ) -> Result<(LogSum, Box<LogProbs>)> {
        let is_scaled = wanted.processed && self.params.temperature > 0.0;
        let sum =
            LogSum::of(backend, logits, if is_scaled { self.params.temperature } else { 1.0 });
        let count = (wanted.num_top as usize).min(logits.len());
        let mut top = try_with_capacity(count, "log-probabilities")?;
        if count > 0 {
            self.largest.clear();
            self.largest
                .try_reserve(2 * count)
                .map_err(|_| Error::out_of_memory("log-probabilities", 32 * count))?;
            select(logits, count, &mut self.largest);
            top.extend(self.largest.iter().map(|&(logit, id)| TokenLogProb {
                token_id: id as u32,
                log_prob: sum.log_prob(logit),
            }));
        }
        Ok((sum, Box::new(LogProbs { chosen: 0.0, top })))
    }

    /// Returns the tokens that can be chosen after `tokens` (prompt and answer so far) and their
    /// probabilities, which add up to 1: [`Sampler::sample`] without the draw. For tests.
    #[doc(hidden)]
    pub fn probabilities(
        &mut self,
        backend: &CpuBackend,
        logits: &mut [f32],
        tokens: &[u32],
    ) -> Result<Vec<(u32, f64)>> {
        self.changes.apply(0, tokens, logits)?;
        let highest = highest(logits)?;
        self.candidates.fill(backend, logits, highest, &self.params.draw(self.seed, 0))?;
        Ok(self.candidates.probabilities().collect())
    }

    fn draw(&mut self, backend: &CpuBackend, logits: &[f32], step: u64) -> Result<u32> {
        let highest = highest(logits)?;
        let draw = self.params.draw(self.seed, step);
        self.candidates.fill(backend, logits, highest, &draw)?;
        let token = self.candidates.draw(&draw);
        token.ok_or_else(|| Error::internal("no token is left to choose from"))
    }
}

/// Values that a loop handles at once, so that it is compiled to vector instructions.
const LANES: usize = 16;

/// Returns the largest of `values` (minus infinity if there are none), and whether all are finite.
fn largest(values: &[f32]) -> (f32, bool) {
    let mut best = [f32::NEG_INFINITY; LANES];
    // NaN survives the sum, infinities become NaN.
    let mut check = [0.0f32; LANES];
    let mut look_at = |values: &[f32]| {
        for ((best, check), &value) in best.iter_mut().zip(&mut check).zip(values) {
            *check += value * 0.0;
            *best = if value > *best { value } else { *best };
        }
    };
    let (whole, rest) = values.as_chunks::<LANES>();
    whole.iter().for_each(|values| look_at(values));
    look_at(rest);
    let best = best.into_iter().fold(f32::NEG_INFINITY, f32::max);
    (best, check.iter().all(|&check| check == 0.0))
}

/// Returns the highest logit. NaN or infinity is an error: the model's weights are broken, and no
/// token would be right.
fn highest(logits: &[f32]) -> Result<f32> {
    let (highest, is_finite) = largest(logits);
    if is_finite && !logits.is_empty() {
        Ok(highest)
    } else {
        Err(not_finite())
    }
}

/// Returns the token with the highest logit, the first one of equals.
fn most_likely(logits: &[f32]) -> Result<u32> {
    let highest = highest(logits)?;
    let found = logits.iter().position(|&logit| logit == highest);
    found.map(|id| id as u32).ok_or_else(not_finite)
}

/// Returns the error for logits from which no token can be chosen.
pub(super) fn not_finite() -> Error {
    Error::invalid_file(
        "the model's logits are not finite numbers: its weights are damaged, or too large for its dtype",
    )
}

/// Returns the error of a sequence for which nothing is left.
pub(super) fn none_left() -> Error {
    Error::invalid_argument(
        "no token is left to choose: what the constraint allows is banned by logit_bias, min_tokens or \
         no_repeat_ngram_size, or only tokens that end the answer (end and stop tokens) have its text",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend() -> CpuBackend {
        CpuBackend::new(1).unwrap()
    }

    fn params(caller: SamplingOverrides) -> SamplingParams {
        SamplingParams::resolve(&caller, &SamplingOverrides::default()).unwrap()
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_refuses_nan() {
        let backend = backend();
        let mut sampler = Sampler::new(params(SamplingOverrides::default()), 1, &[]).unwrap();
        assert_eq!(sampler.sample(&backend, &mut [0.0, 3.0, 3.0, -1.0], 0).unwrap(), 1);
        assert!(sampler.sample(&backend, &mut [0.0, f32::NAN], 1).is_err());
        assert!(sampler.sample(&backend, &mut [0.0, f32::INFINITY], 1).is_err());
        assert!(sampler.sample(&backend, &mut [], 1).is_err());
    }

    #[test]
    fn wrong_parameters_are_refused_by_name() {
        let bad = |caller: SamplingOverrides, name: &str| {
            let error =
                SamplingParams::resolve(&caller, &SamplingOverrides::default()).unwrap_err();
            assert!(error.message().starts_with(name), "{error}");
        };
        for v in [f32::NAN, -0.1, f32::INFINITY] {
            bad(SamplingOverrides { temperature: Some(v), ..Default::default() }, "temperature");
        }
        for v in [f32::NAN, 0.0, -1.0, 1.01] {
            bad(SamplingOverrides { top_p: Some(v), ..Default::default() }, "top_p");
        }
        for v in [f32::NAN, -0.1, 1.01] {
            bad(SamplingOverrides { min_p: Some(v), ..Default::default() }, "min_p");
        }
        for v in [f32::NAN, 0.0, -1.0] {
            let caller = SamplingOverrides { repetition_penalty: Some(v), ..Default::default() };
            bad(caller, "repetition_penalty");
        }
        let caller = SamplingOverrides { presence_penalty: Some(f32::NAN), ..Default::default() };
        bad(caller, "presence_penalty");
        let caller = SamplingOverrides { frequency_penalty: Some(f32::NAN), ..Default::default() };
        bad(caller, "frequency_penalty");
    }

    #[test]
    fn draws_follow_the_probabilities_and_the_seed() {
        let backend = backend();
        let caller = SamplingOverrides { temperature: Some(1.0), ..Default::default() };
        let logits = [1.0f32.ln(), 2.0f32.ln(), 5.0f32.ln()];
        let run = |seed: u64| -> Vec<u32> {
            let mut sampler = Sampler::new(params(caller), seed, &[]).unwrap();
            (0..20_000)
                .map(|step| sampler.sample(&backend, &mut logits.clone(), step).unwrap())
                .collect()
        };
        let tokens = run(7);
        assert_eq!(tokens, run(7));
        assert_ne!(tokens, run(8));
        for (id, expected) in [(0, 0.125), (1, 0.25), (2, 0.625)] {
            let share = tokens.iter().filter(|t| **t == id).count() as f64 / tokens.len() as f64;
            // Five standard deviations of the binomial at 20,000 draws.
            assert!((share - expected).abs() < 0.018, "token {id}: {share} for {expected}");
        }
    }

    /// Whole vocabularies, with equals.
    #[test]
    fn top_k_leaves_the_k_likeliest_and_their_equals() {
        let backend = backend();
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        for (len, steps) in [(151_936, 1e6f32), (151_937, 400.0), (40_000, 30.0), (100, 1e6)] {
            for top_k in [1, 7, 20, 512, 3000] {
                // Few different values where there are few steps.
                let logits: Vec<f32> =
                    (0..len).map(|_| ((next() + next()) * steps).round() / steps * 20.0).collect();
                let caller = SamplingOverrides {
                    temperature: Some(0.7),
                    top_k: Some(top_k),
                    ..Default::default()
                };
                let mut sampler = Sampler::new(params(caller), 1, &[]).unwrap();
                let found = sampler.probabilities(&backend, &mut logits.clone(), &[]).unwrap();
                let found: Vec<u32> = found.iter().map(|(token, _)| *token).collect();
                let mut sorted = logits.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                let kth = sorted[(top_k as usize).min(len) - 1];
                let expected: Vec<u32> =
                    (0..len as u32).filter(|&id| logits[id as usize] >= kth).collect();
                assert_eq!(found, expected, "{top_k} of {len}");
            }
        }
    }

    #[test]
    fn presence_and_frequency_count_generated_tokens_only() {
        let backend = backend();
        let caller = SamplingOverrides {
            presence_penalty: Some(1.0),
            frequency_penalty: Some(0.5),
            ..Default::default()
        };
        let mut sampler = Sampler::new(params(caller), 0, &[0]).unwrap();
        // The prompt's token 0 is not penalised.
        assert_eq!(sampler.sample(&backend, &mut [2.0, 1.9, 0.6], 0).unwrap(), 0);
        // 2.0 - 1.5 = 0.5.
        assert_eq!(sampler.sample(&backend, &mut [2.0, 1.9, 0.6], 1).unwrap(), 1);
        // 1.9 - 1.5 = 0.4, so 2 is next.
        assert_eq!(sampler.sample(&backend, &mut [2.0, 1.9, 0.6], 2).unwrap(), 2);
    }

    #[test]
    fn a_flat_nucleus_needs_more_than_the_likely_ones() {
        let backend = backend();
        let caller =
            SamplingOverrides { temperature: Some(1.0), top_p: Some(0.9), ..Default::default() };
        let mut sampler = Sampler::new(params(caller), 0, &[]).unwrap();
        // One token of weight 1 and 200,000 of weight 5e-5: together 11, of which 0.9 need 9.9.
        let mut logits = vec![(5e-5f32).ln(); 200_001];
        logits[100] = 0.0;
        let kept = sampler.probabilities(&backend, &mut logits, &[]).unwrap().len();
        assert!((178_000..=178_010).contains(&kept), "{kept}");
    }
}
