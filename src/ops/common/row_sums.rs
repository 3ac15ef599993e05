//! Sums over several rows at once: the chains of additions of the rows run side by side, and each
//! row is summed in the order of [`crate::backend::cpu::math::sum_over`].

use crate::backend::cpu::math::{sum_lanes, LANES};
use crate::backend::cpu::simd::{Simd, Vector16};
use crate::ops::common::storage::Storage;

/// The number of rows summed at once: enough to hide the latency of an addition.
pub(crate) const GROUP: usize = 4;

/// The term that is summed over the values x of a row, given a number `shift` for each row.
pub(crate) trait Term {
    /// Returns sixteen sums with the terms of sixteen values added to them.
    /// # Safety
    /// V's instruction set is there.
    unsafe fn add<V: Vector16>(sum: V, x: V, shift: V) -> V;
    /// Returns one of these sums with the term of one value added.
    fn add_one<S: Simd>(sum: f32, x: f32, shift: f32) -> f32;
}

/// The term `x - shift`.
pub(crate) struct Difference;
/// The term `(x - shift)^2`.
pub(crate) struct SquaredDifference;
/// The term `x^2`.
pub(crate) struct Square;

impl Term for Difference {
    #[inline(always)]
    unsafe fn add<V: Vector16>(sum: V, x: V, shift: V) -> V {
        // SAFETY: passed on to the caller.
        unsafe { sum.add(x.sub(shift)) }
    }
    #[inline(always)]
    fn add_one<S: Simd>(sum: f32, x: f32, shift: f32) -> f32 {
        sum + (x - shift)
    }
}

impl Term for SquaredDifference {
    #[inline(always)]
    unsafe fn add<V: Vector16>(sum: V, x: V, shift: V) -> V {
        // SAFETY: passed on to the caller.
        unsafe {
            let difference = x.sub(shift);
            difference.mul_add(difference, sum)
        }
    }
    #[inline(always)]
    fn add_one<S: Simd>(sum: f32, x: f32, shift: f32) -> f32 {
        S::mul_add(x - shift, x - shift, sum)
    }
}

impl Term for Square {
    #[inline(always)]
    unsafe fn add<V: Vector16>(sum: V, x: V, _shift: V) -> V {
        // SAFETY: passed on to the caller.
        unsafe { x.mul_add(x, sum) }
    }
    #[inline(always)]
    fn add_one<S: Simd>(sum: f32, x: f32, _shift: f32) -> f32 {
        S::mul_add(x, x, sum)
    }
}

/// Returns the sum of `term` over each row; all rows have the same length.
#[inline(always)]
pub(crate) fn sum_rows<S: Simd, T: Storage, Q: Term, const R: usize>(
    _term: Q,
    rows: [&[T]; R],
    shifts: [f32; R],
) -> [f32; R] {
    let len = rows.iter().map(|row| row.len()).min().unwrap_or(0);
    let mut lanes = [[0.0f32; LANES]; R];
    let whole = len - len % LANES;
    // SAFETY: kernels run where S is there; 16 elements from k < whole on lie in every row.
    unsafe {
        let mut sums = [S::Vector::zero(); R];
        let mut shift = sums;
        for r in 0..R {
            shift[r] = S::Vector::splat(shifts[r]);
        }
        for k in (0..whole).step_by(LANES) {
            for r in 0..R {
                let x = T::load::<S::Vector>(rows[r].as_ptr().add(k));
                sums[r] = Q::add(sums[r], x, shift[r]);
            }
        }
        for r in 0..R {
            sums[r].store(lanes[r].as_mut_ptr());
        }
    }
    let mut result = [0.0; R];
    for r in 0..R {
        for (lane, &x) in lanes[r].iter_mut().zip(&rows[r][whole..]) {
            *lane = Q::add_one::<S>(*lane, x.to_f32(), shifts[r]);
        }
        result[r] = sum_lanes(lanes[r]);
    }
    result
}

/// Returns `1 / sqrt(sum / len + eps)`.
#[inline(always)]
pub(crate) fn inverse_root(sum: f32, len: usize, eps: f32) -> f32 {
    1.0 / (sum / len as f32 + eps).sqrt()
}
