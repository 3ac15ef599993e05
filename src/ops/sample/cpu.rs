//! The CPU half: a token drawn from a row of logits.
//!
//! The arithmetic is f64, and no step sorts a vocabulary: the filters that keep a share of the
//! probability look for the place where it is reached in a histogram, and sort what lies there.

use super::Draw;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::top_k::cpu::select;

/// The tokens that a draw chooses from, with memory that is used again for the next one.
#[derive(Debug, Default)]
pub struct Candidates {
    /// The tokens in ascending order; empty if they are 0, 1, 2 and so on.
    ids: Vec<u32>,
    /// `(highest logit - logit) / temperature` of each; infinity for a banned token.
    distances: Vec<f64>,
    /// The probability of each divided by that of the likeliest, or 0 if it is out.
    weights: Vec<f64>,
    /// Their logits, if `ids` names them.
    kept: Vec<f32>,
    /// The top-k logits and their tokens.
    largest: Vec<(f32, usize)>,
    cut: Cut,
}

impl Candidates {
    /// Fills in the tokens of a row that the filters of `draw` leave, of which `highest` is the
    /// largest logit. All logits are finite; the lowest f32 stands for a banned token, which stays
    /// out unless all are banned.
    pub fn fill(
        &mut self,
        backend: &CpuBackend,
        logits: &[f32],
        highest: f32,
        draw: &Draw,
    ) -> Result<()> {
        // Memory for all tokens, whatever the filters leave: later rows take no more.
        let vocab_size = logits.len();
        let no_memory = |_| Error::out_of_memory("sampling", 4 * size_of_val(logits));
        let Candidates { ids, kept, distances, weights, largest, .. } = self;
        ids.clear();
        kept.clear();
        let top_k = draw.top_k as usize;
        let logits = if top_k > 0 && top_k < logits.len() {
            largest.clear();
            largest.try_reserve(2 * top_k).map_err(no_memory)?;
            select(logits, top_k, largest);
            // As in Transformers, ties with the k-th stay.
            let lowest = largest.last().map_or(f32::NEG_INFINITY, |last| last.0);
            ids.try_reserve(vocab_size).map_err(no_memory)?;
            kept.try_reserve(vocab_size).map_err(no_memory)?;
            for (id, &logit) in logits.iter().enumerate().filter(|(_, logit)| **logit >= lowest) {
                ids.push(id as u32);
                kept.push(logit);
            }
            kept.as_slice()
        } else {
            logits
        };
        for numbers in [&mut *distances, &mut *weights] {
            numbers.clear();
            numbers.try_reserve(vocab_size).map_err(no_memory)?;
            numbers.resize(logits.len(), 0.0);
        }
        let temperature = f64::from(draw.temperature);
        backend.run(Weigh { logits, highest, temperature, distances, weights });
        if draw.top_p < 1.0 {
            self.keep_nucleus(f64::from(draw.top_p))?;
        }
        if draw.min_p > 0.0 {
            let least = f64::from(draw.min_p);
            let keep = |weight: &mut f64| *weight = if *weight >= least { *weight } else { 0.0 };
            self.weights.iter_mut().for_each(keep);
        }
        if draw.typical_p < 1.0 {
            self.keep_typical(f64::from(draw.typical_p))?;
        }
        Ok(())
    }

    /// Keeps the likeliest tokens until they have the share `top_p` of all probability: a token stays
    /// if those before it, and before equals those with a lower id, do not reach it.
    fn keep_nucleus(&mut self, top_p: f64) -> Result<()> {
        let Candidates { distances, weights, cut, .. } = self;
        let goal = top_p * sum(weights);
        if let Some(last) = cut.find(distances, weights, 0.0, goal)? {
            keep_within(distances, weights, 0.0, last.distance);
            for &place in cut.range.iter().filter(|place| **place > last.place) {
                if distances.get(place as usize) == Some(&last.distance) {
                    weights.get_mut(place as usize).into_iter().for_each(|weight| *weight = 0.0);
                }
            }
        }
        Ok(())
    }

    /// Keeps the tokens whose information content is nearest to the entropy, until they have the share
    /// `typical_p` of all probability (Meister et al. 2022, "Locally typical sampling",
    /// arXiv:2202.00666; Transformers' `TypicalLogitsWarper`). Ties with the last one stay.
    fn keep_typical(&mut self, typical_p: f64) -> Result<()> {
        let Candidates { distances, weights, cut, .. } = self;
        // A token's information is its distance plus the logarithm of the sum of weights, and the
        // entropy is the mean of that.
        let sum = sum(weights);
        let mean = sum_of(weights, distances, |weight, distance| {
            // A token without weight may be infinitely far.
            weight * if weight > 0.0 { distance } else { 0.0 }
        }) / sum;
        if let Some(last) = cut.find(distances, weights, mean, typical_p * sum)? {
            keep_within(distances, weights, mean, last.distance);
        }
        Ok(())
    }

    /// Draws one of them, in the order of their ids; `None` if there is none.
    pub fn draw(&self, draw: &Draw) -> Option<u32> {
        let mut left = uniform(draw.seed, draw.index) * sum(&self.weights);
        for (first, piece) in self.weights.chunks(PIECE).enumerate() {
            let after = left - sum_of_piece(piece);
            if after >= 0.0 {
                left = after;
                continue;
            }
            for (place, weight) in piece.iter().enumerate() {
                left -= weight;
                if left < 0.0 {
                    return self.id(first * PIECE + place);
                }
            }
        }
        // Rounding left a remainder, which goes to the last candidate.
        self.id(self.weights.iter().rposition(|&weight| weight > 0.0)?)
    }

    fn id(&self, place: usize) -> Option<u32> {
        match self.ids.is_empty() {
            true => u32::try_from(place).ok(),
            false => self.ids.get(place).copied(),
        }
    }

    /// Returns the tokens in ascending order and their probabilities, which add up to 1. For tests.
    #[doc(hidden)]
    pub fn probabilities(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        let sum = sum(&self.weights);
        let left = self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
        left.filter_map(move |(place, weight)| Some((self.id(place)?, weight / sum)))
    }
}

/// Works out distances and weights from logits, as [`Candidates`] has them.
struct Weigh<'a> {
    logits: &'a [f32],
    highest: f32,
    temperature: f64,
    distances: &'a mut [f64],
    weights: &'a mut [f64],
}

impl Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let is_all_banned = self.highest == f32::MIN;
        let lowest = if is_all_banned { f32::NEG_INFINITY } else { f32::MIN };
        let places = self.distances.iter_mut().zip(self.weights.iter_mut());
        for (&logit, (to_distance, to_weight)) in self.logits.iter().zip(places) {
            // The distance from the highest is divided: it stays finite for the smallest temperature.
            let distance = (f64::from(self.highest) - f64::from(logit)) / self.temperature;
            let distance = if logit > lowest { distance } else { f64::INFINITY };
            *to_distance = distance;
            *to_weight = exp_of_minus(distance);
        }
    }
}

/// The last token that a filter keeps, in the order of distances and then of places.
struct Last {
    distance: f64,
    place: u32,
}

/// Finds where the tokens nearest to a distance have so much weight.
#[derive(Debug, Default)]
struct Cut {
    /// The weight by distance, in ranges of equal width on a logarithmic scale.
    masses: Vec<f64>,
    /// The places within one range.
    range: Vec<u32>,
}

/// The ranges for each power of 2, as a power of 2 itself: a vocabulary whose probabilities are
/// nearly equal has some hundred tokens in each.
const RANGE_BITS: u32 = 8;
/// The distances that have ranges of their own, as powers of 2; those beyond share the first and last.
const LEAST_EXPONENT: i64 = -20;
const MOST_EXPONENT: i64 = 8;
const NUM_RANGES: usize = ((MOST_EXPONENT - LEAST_EXPONENT) << RANGE_BITS) as usize;

/// Returns the range of a distance that is not negative: a larger one is in the same or a later one.
fn range_of(distance: f64) -> usize {
    const MANTISSA_BITS: u32 = 52;
    const BIAS: i64 = 1023;
    let range = (distance.to_bits() >> (MANTISSA_BITS - RANGE_BITS)) as i64;
    let first = (BIAS + LEAST_EXPONENT) << RANGE_BITS;
    (range - first).clamp(0, NUM_RANGES as i64 - 1) as usize
}

impl Cut {
    /// Goes through the tokens that have weight, from those nearest to the distance `middle` on, and
    /// returns the first with which they have at least the weight `goal`; `None` if they do not.
    fn find(
        &mut self,
        distances: &[f64],
        weights: &[f64],
        middle: f64,
        goal: f64,
    ) -> Result<Option<Last>> {
        let Cut { masses, range, .. } = self;
        masses.clear();
        let no_memory = |_| Error::out_of_memory("sampling", size_of_val(distances));
        masses.try_reserve(NUM_RANGES).map_err(no_memory)?;
        masses.resize(NUM_RANGES, 0.0);
        for (distance, weight) in distances.iter().zip(weights) {
            if let Some(mass) = masses.get_mut(range_of((distance - middle).abs())) {
                *mass += weight;
            }
        }
        let mut before = 0.0;
        let reaches = |mass: &f64| {
            let is_reached = before + mass >= goal;
            if !is_reached {
                before += mass;
            }
            is_reached
        };
        let Some(reached) = masses.iter().position(reaches) else { return Ok(None) };
        range.clear();
        range.try_reserve(distances.len()).map_err(no_memory)?;
        let distance_of = |place: u32| {
            distances.get(place as usize).map_or(f64::INFINITY, |it| (it - middle).abs())
        };
        for (place, (distance, weight)) in distances.iter().zip(weights).enumerate() {
            if *weight > 0.0 && range_of((distance - middle).abs()) == reached {
                range.push(place as u32);
            }
        }
        range.sort_unstable_by(|&a, &b| distance_of(a).total_cmp(&distance_of(b)).then(a.cmp(&b)));
        let last = range.iter().find(|&&place| {
            before += weights.get(place as usize).copied().unwrap_or(0.0);
            before >= goal
        });
        // The sum of the range in another order may be less by a rounding.
        let last = last.or(range.last());
        Ok(last.map(|&place| Last { distance: distance_of(place), place }))
    }
}

/// The weights that are added up before the sum goes on.
const PIECE: usize = 256;
/// The sums that run side by side.
const LANES: usize = 8;

/// Takes away the weights of tokens that are further than `most` from the distance `middle`.
fn keep_within(distances: &[f64], weights: &mut [f64], middle: f64, most: f64) {
    for (weight, distance) in weights.iter_mut().zip(distances) {
        *weight = if (distance - middle).abs() <= most { *weight } else { 0.0 };
    }
}

/// Adds up `term(weight, distance)`, always in the same order.
fn sum_of(weights: &[f64], distances: &[f64], term: impl Fn(f64, f64) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let (whole, rest) = weights.as_chunks::<LANES>();
    let (whole_distances, rest_distances) = distances.as_chunks::<LANES>();
    for (weights, distances) in whole.iter().zip(whole_distances) {
        for i in 0..LANES {
            lanes[i] += term(weights[i], distances[i]);
        }
    }
    for (lane, (&weight, &distance)) in lanes.iter_mut().zip(rest.iter().zip(rest_distances)) {
        *lane += term(weight, distance);
    }
    lanes.iter().sum()
}

fn sum_of_piece(weights: &[f64]) -> f64 {
    sum_of(weights, weights, |weight, _| weight)
}

fn sum(weights: &[f64]) -> f64 {
    weights.chunks(PIECE).map(sum_of_piece).sum()
}

/// Returns `e^-x` for x of at least 0, to 4e-16 relative; 0 from 708 on. Without branches, so that
/// loops over it become vector instructions.
#[inline(always)]
fn exp_of_minus(x: f64) -> f64 {
    const LAST: f64 = 708.0;
    /// 1.5 * 2^52: adding it leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// ln 2 in two parts: the product of the first with a whole number below 2^11 is exact.
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// The Taylor series, highest power first: the first term left out is below 4e-18 for |r| up to
    /// ln 2 / 2.
    const TERMS: [f64; 14] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let clamped = -(if x < LAST { x } else { LAST });
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = (clamped - whole * LN2_HIGH) - whole * LN2_LOW;
    let mut value = TERMS[0];
    for term in &TERMS[1..] {
        value = value * r + term;
    }
    // The low bits of `shifted` are the integer; they move to the exponent.
    let scale = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1.0f64.to_bits()));
    if x < LAST {
        value * scale
    } else {
        0.0
    }
}

/// Returns a number in [0, 1) that depends on seed and index alone: two rounds of the SplitMix64
/// mixer (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") over their
/// combination.
fn uniform(seed: u64, index: u64) -> f64 {
    fn mix(mut z: u64) -> u64 {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let bits = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(index.wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
