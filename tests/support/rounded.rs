//! References in f64 of the operators that round to the type of their tensors after each step, as
//! Transformers does.

use super::device::{last_place, round};
use xserv::memory::DType;

/// `round(weight * round(x / sqrt(mean(x^2) + eps)))`.
pub fn rms_norm(dtype: DType, x: &[f64], weight: &[f64], eps: f32) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| round(dtype, round(dtype, x * scale) * w)).collect()
}

/// `round(round(silu(gate)) * up)`.
pub fn silu_mul(dtype: DType, gate: f64, up: f64) -> f64 {
    round(dtype, round(dtype, gate / (1.0 + (-gate).exp())) * up)
}

/// Returns the pairs (i, i + half) of a head rotated: `round(round(x * cos) + round(rotate_half(x)
/// * sin))`.
pub fn rope(dtype: DType, head: &[f64], cos: &[f64], sin: &[f64]) -> Vec<f64> {
    let half = head.len() / 2;
    let times = |a: f64, b: f64| round(dtype, a * b);
    (0..head.len())
        .map(|i| {
            let (cos, sin) = (cos[i % half], sin[i % half]);
            let own = times(head[i], cos);
            let other = times(head[(i + half) % head.len()], sin);
            round(dtype, if i < half { own - other } else { own + other })
        })
        .collect()
}

/// Returns a head normalised and rotated, and how far each element may be off: by the last places
/// of what it is made of.
pub fn norm_rope(
    dtype: DType,
    head: &[f64],
    weight: &[f64],
    (cos, sin): (&[f64], &[f64]),
    eps: f32,
) -> Vec<(f64, f64)> {
    turned_only(dtype, &rms_norm(dtype, head, weight, eps), (cos, sin))
}

/// Returns a head rotated, and how far each element may be off.
pub fn turned_only(dtype: DType, normed: &[f64], (cos, sin): (&[f64], &[f64])) -> Vec<(f64, f64)> {
    let half = normed.len() / 2;
    let rotated = rope(dtype, normed, cos, sin);
    let rotated = rotated.into_iter().enumerate();
    rotated
        .map(|(i, want)| {
            let (own, other) = (normed[i], normed[(i + half) % normed.len()]);
            let terms = (own * cos[i % half]).abs() + (other * sin[i % half]).abs();
            let size = (own.abs() + other.abs()).max(terms);
            (want, 3.0 * last_place(dtype) * size + 1e-6)
        })
        .collect()
}
