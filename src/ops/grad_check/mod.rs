//! Compares an analytic gradient with central differences of the loss:
//! `dL/dx_i = (L(x + eps e_i) - L(x - eps e_i)) / (2 eps)`.
//!
//! The step is the difference of the two points as they are stored in f32, so that their rounding
//! is not taken for an error of the gradient. Needs one copy of the values and no device.

use crate::error::{try_with_capacity, Error, Result};

/// The options of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct GradCheck {
    /// The distance that a value is moved to each side.
    pub eps: f64,
    /// The tolerance relative to the larger of the two gradients.
    pub rel_tol: f64,
    /// The absolute tolerance, which is always allowed.
    pub atol: f64,
}

impl Default for GradCheck {
    fn default() -> Self {
        GradCheck { eps: 1e-3, rel_tol: 2e-2, atol: 1e-4 }
    }
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradCheckResult {
    /// The number of elements that differ by more than their tolerance, or are not finite.
    pub num_failed: usize,
    /// The element with the largest error in units of its tolerance.
    pub worst_index: usize,
    /// The gradient of that element according to the caller.
    pub worst_analytic: f64,
    /// Its gradient according to the differences.
    pub worst_numeric: f64,
    /// The absolute difference of the two; infinite where one of them is not finite.
    pub worst_error: f64,
}

/// Checks `|analytic - numeric| <= atol + rel_tol * max(|analytic|, |numeric|)` for every element.
/// An error of `loss` ends the check and is returned.
pub fn grad_check(
    options: &GradCheck,
    values: &[f32],
    gradient: &[f32],
    mut loss: impl FnMut(&[f32]) -> Result<f64>,
) -> Result<GradCheckResult> {
    let GradCheck { eps, rel_tol, atol } = *options;
    let wrong = |what: String| Err(Error::invalid_argument(what));
    if !(eps.is_finite() && eps > 0.0) {
        return wrong(format!("eps is {eps}, not a finite number above 0"));
    }
    for (name, tolerance) in [("rel_tol", rel_tol), ("atol", atol)] {
        if !(tolerance.is_finite() && tolerance >= 0.0) {
            return wrong(format!("{name} is {tolerance}, not a finite number of at least 0"));
        }
    }
    if values.len() != gradient.len() {
        return wrong(format!("{} values, but {} gradients", values.len(), gradient.len()));
    }
    let mut moved = try_with_capacity(values.len(), "a copy of the values")?;
    moved.extend_from_slice(values);
    let mut found = GradCheckResult::default();
    let mut worst_ratio = -1.0;
    for (index, (&value, &analytic)) in values.iter().zip(gradient).enumerate() {
        let analytic = f64::from(analytic);
        let mut at = |point: f32| {
            if let Some(slot) = moved.get_mut(index) {
                *slot = point;
            }
            loss(&moved)
        };
        let above = (f64::from(value) + eps) as f32;
        let below = (f64::from(value) - eps) as f32;
        let difference = at(above)? - at(below)?;
        // Without a step (of a value far above 1 / eps) there is no gradient: it is infinite or
        // NaN.
        let numeric = difference / (f64::from(above) - f64::from(below));
        if let Some(slot) = moved.get_mut(index) {
            *slot = value;
        }
        let is_finite = numeric.is_finite() && analytic.is_finite();
        let error = if is_finite { (analytic - numeric).abs() } else { f64::INFINITY };
        let tolerance = atol + rel_tol * analytic.abs().max(numeric.abs());
        let passes = is_finite && error <= tolerance;
        found.num_failed += usize::from(!passes);
        let ratio = match (passes, error == 0.0) {
            (_, true) => 0.0,
            (_, false) if !is_finite => f64::INFINITY,
            _ => error / tolerance,
        };
        if ratio > worst_ratio {
            worst_ratio = ratio;
            found.worst_index = index;
            (found.worst_analytic, found.worst_numeric) = (analytic, numeric);
            found.worst_error = error;
        }
    }
    Ok(found)
}
