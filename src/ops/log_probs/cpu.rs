//! The CPU half, on a row of f32.

/// The numbers that are added up in f32 before the sum goes on in f64: few enough that the error of
/// the sum stays below that of the numbers.
const CHUNK: usize = 256;
/// The sums that grow side by side, so that the loop is compiled to vector instructions.
const LANES: usize = 16;

/// What the log-probabilities of all tokens of a row have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSum {
    max: f32,
    temperature: f64,
    log_sum: f64,
}

impl LogSum {
    /// Sums up a row of logits divided by `temperature`, which is above 0.
    pub fn of(logits: &[f32], temperature: f32) -> Self {
        let max = largest(logits);
        let per_temperature = (1.0 / f64::from(temperature)).min(f64::from(f32::MAX)) as f32;
        let mut sum = 0.0;
        for chunk in logits.chunks(CHUNK) {
            let mut lanes = [0.0f32; LANES];
            let (whole, rest) = chunk.as_chunks::<LANES>();
            for values in whole {
                for (lane, &x) in lanes.iter_mut().zip(values) {
                    *lane += exp_of_negative((x - max) * per_temperature);
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane += exp_of_negative((x - max) * per_temperature);
            }
            sum += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        }
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

fn largest(values: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for values in whole {
        for (best, &value) in best.iter_mut().zip(values) {
            *best = if value > *best { value } else { *best };
        }
    }
    let best = best.into_iter().chain(rest.iter().copied());
    best.fold(f32::NEG_INFINITY, f32::max)
}

/// Returns exp(x) for x <= 0 to about two units of rounding, by a polynomial that vectorises: with
/// n = round(x / ln 2) it is 2^n exp(r), where |r| <= ln(2) / 2 and exp(r) is its Taylor series.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    // Below this it is less than the smallest normal number and counts as nothing.
    const LOWEST: f32 = -87.0;
    // ln(2) in two parts: n times the first is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let is_tiny = x < LOWEST;
    let x = if is_tiny { LOWEST } else { x };
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + factor;
    }
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if is_tiny {
        0.0
    } else {
        sum * power
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_that_of_f64_to_two_units() {
        for i in 0..=870_000u32 {
            let x = -(i as f32) * 1e-4;
            let (found, right) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            let unit = right * f64::from(f32::EPSILON);
            assert!((found - right).abs() <= unit, "exp({x}) is {found}, not {right}");
        }
        assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
        assert!(exp_of_negative(f32::NAN).is_nan());
    }
}
