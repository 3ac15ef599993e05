//! The CPU half, on a row of f32.

use crate::backend::cpu::exponential::exp;
use crate::backend::cpu::math::{maximum, sum_over};
use crate::backend::cpu::portable::Portable;

/// The numbers that are added up in f32 before the sum goes on in f64: few enough that the error of
/// the sum stays below that of the numbers.
const CHUNK: usize = 256;

/// The part of the log-probability that all tokens of a row have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSum {
    max: f32,
    temperature: f64,
    log_sum: f64,
}

impl LogSum {
    /// Sums up a row of logits divided by `temperature`, which is above 0.
    pub fn of(logits: &[f32], temperature: f32) -> Self {
        let max = maximum(logits);
        let per_temperature = (1.0 / f64::from(temperature)).min(f64::from(f32::MAX)) as f32;
        let add = |sum: f32, x: f32| sum + exp::<Portable>((x - max) * per_temperature);
        let sums = logits.chunks(CHUNK).map(|chunk| f64::from(sum_over(chunk, add)));
        LogSum { max, temperature: f64::from(temperature), log_sum: sums.sum::<f64>().ln() }
    }

    /// Returns the log-probability of a token with this logit; minus infinity for a banned token.
    pub fn log_prob(&self, logit: f32) -> f32 {
        if logit == f32::MIN {
            return f32::NEG_INFINITY;
        }
        ((f64::from(logit) - f64::from(self.max)) / self.temperature - self.log_sum) as f32
    }
}
