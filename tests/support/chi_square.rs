//! Whether draws have the distribution that they should have.

/// Returns the quantile of the chi-square distribution that is exceeded once in a million times, by
/// the approximation of Wilson and Hilferty (1931).
fn bar(degrees: usize) -> f64 {
    let (k, normal) = (degrees as f64, 4.753);
    let part = 2.0 / (9.0 * k);
    k * (1.0 - part + normal * part.sqrt()).powi(3)
}

/// Asserts that the outcomes occurred as often as their probabilities say, which add up to 1.
/// Returns the degrees of freedom; with 0 there was nothing to test. Rare outcomes count together.
pub fn assert_fits(counts: &[u64], probabilities: &[f64], case: &str) -> usize {
    assert_eq!(counts.len(), probabilities.len());
    let num_draws = counts.iter().sum::<u64>() as f64;
    let (mut sum, mut bins, mut rare) = (0.0, 0usize, (0.0, 0.0));
    for (&count, &p) in counts.iter().zip(probabilities) {
        let expected = p * num_draws;
        assert!(p > 0.0 || count == 0, "{case}: what is out was drawn");
        if expected < 10.0 {
            rare = (rare.0 + count as f64, rare.1 + expected);
        } else {
            sum += (count as f64 - expected).powi(2) / expected;
            bins += 1;
        }
    }
    if rare.1 >= 10.0 {
        sum += (rare.0 - rare.1).powi(2) / rare.1;
        bins += 1;
    }
    let degrees = bins.saturating_sub(1);
    if degrees > 0 {
        let bar = bar(degrees);
        assert!(sum <= bar, "{case}: chi-square {sum} with {degrees} degrees, at most {bar}");
    }
    degrees
}
