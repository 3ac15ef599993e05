//! The CPU half, on a row of f32.

use crate::backend::cpu::exponential::exp;
use crate::backend::cpu::math::{maximum, sum_lanes, LANES};
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;

/// The numbers that are added up in f32 before the sum goes on in f64: few enough that the error of
/// the sum stays below that of the numbers.
const CHUNK: usize = 256;

/// The part of the log-probability that all tokens of a row have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogSum {
    max: f32,
    temperature: f64,
    log_sum: f64,
}

/// Returns the largest logit, and the sum of `exp((logit - largest) * per_temperature)`.
struct Sum<'a> {
    logits: &'a [f32],
    per_temperature: f32,
}

impl Kernel for Sum<'_> {
    type Output = (f32, f64);

    #[inline(always)]
    fn run<S: Simd>(self) -> (f32, f64) {
        let max = maximum(self.logits);
        let mut sum = 0.0;
        for chunk in self.logits.chunks(CHUNK) {
            let mut lanes = [0.0; LANES];
            let (whole, rest) = chunk.as_chunks::<LANES>();
            for logits in whole {
                for i in 0..LANES {
                    lanes[i] += exp::<S>((logits[i] - max) * self.per_temperature);
                }
            }
            for (lane, logit) in lanes.iter_mut().zip(rest) {
                *lane += exp::<S>((logit - max) * self.per_temperature);
            }
            sum += f64::from(sum_lanes(lanes));
        }
        (max, sum)
    }
}

impl LogSum {
    /// Sums up a row of logits divided by `temperature`, which is above 0, on this thread.
    pub fn of(backend: &CpuBackend, logits: &[f32], temperature: f32) -> Self {
        let per_temperature = (1.0 / f64::from(temperature)).min(f64::from(f32::MAX)) as f32;
        let (max, sum) = backend.run(Sum { logits, per_temperature });
        LogSum { max, temperature: f64::from(temperature), log_sum: sum.ln() }
    }

    /// Returns the log-probability of a token with this logit; minus infinity for a banned token.
    pub fn log_prob(&self, logit: f32) -> f32 {
        if logit == f32::MIN {
            return f32::NEG_INFINITY;
        }
        ((f64::from(logit) - f64::from(self.max)) / self.temperature - self.log_sum) as f32
    }
}
