//! Root-mean-square normalisation (Zhang and Sennrich, 2019, equation 4):
//! `out = x / sqrt(mean(x^2) + eps) * weight`, eps inside the root as in Transformers; computed in
//! f32 and rounded once. With a residual it first computes `residual = round(x + residual)`, then
//! the norm of that.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};
use crate::ops::common::row_sums::inverse_root;
use crate::ops::common::row_sums::{sum_rows, Square, GROUP};
use crate::ops::common::storage::{map2, Storage};

/// Whether the slices are whole rows of `width`.
fn is_rows(len: usize, width: usize) -> bool {
    len == 0 || width > 0 && len.is_multiple_of(width)
}

/// Normalises each row of x [num_rows, width] into `out` of the same shape; `weight` is [width].
pub fn rms_norm<T: Storage>(
    backend: &CpuBackend,
    x: &[T],
    weight: &[T],
    eps: f32,
    out: &mut [T],
) -> Result<()> {
    let width = weight.len();
    if x.len() != out.len() || !is_rows(x.len(), width) {
        return Err(Error::internal(format!(
            "rms_norm: {} inputs, {} outputs, weight of {width}",
            x.len(),
            out.len()
        )));
    }
    backend.parallel_rows(out, width, |first, out| {
        let x = &x[first * width..][..out.len()];
        backend.run(Rows { x, weight, eps, out });
    })
}

/// Computes `residual_out = x + residual`, rounded to T, and its norm `out`. All are [num_rows,
/// width].
pub fn add_rms_norm<T: Storage>(
    backend: &CpuBackend,
    x: &[T],
    residual: &[T],
    weight: &[T],
    eps: f32,
    residual_out: &mut [T],
    out: &mut [T],
) -> Result<()> {
    let width = weight.len();
    let lengths = [residual.len(), residual_out.len(), out.len()];
    if lengths != [x.len(); 3] || !is_rows(x.len(), width) {
        return Err(Error::internal(format!(
            "add_rms_norm: {} inputs, {lengths:?} residuals and outputs, weight of {width}",
            x.len()
        )));
    }
    let sums = SendPointer(residual_out.as_mut_ptr());
    backend.parallel_rows(out, width, |first, out| {
        let start = first * width;
        let x = &x[start..][..out.len()];
        let residual = &residual[start..][..out.len()];
        // SAFETY: residual_out is as long as out and cut in the same places; each run is given out
        // once, so nothing else refers to this part.
        let sums = unsafe { std::slice::from_raw_parts_mut(sums.get().add(start), out.len()) };
        backend.run(AddRows { x, residual, weight, eps, sums, out });
    })
}

/// Computes `out = x * scale * weight`.
#[inline(always)]
fn scale_row<S: Simd, T: Storage>(x: &[T], scale: f32, weight: &[T], out: &mut [T]) {
    map2::<S, T>(x, weight, out, |x, w| x * scale * w);
}

struct Rows<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    eps: f32,
    out: &'a mut [T],
}

impl<T: Storage> Kernel for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let width = self.weight.len();
        let groups = self.x.chunks(GROUP * width);
        for (x, out) in groups.zip(self.out.chunks_mut(GROUP * width)) {
            let (mut scales, num_rows) = ([0.0; GROUP], x.len() / width);
            if num_rows == GROUP {
                let rows = std::array::from_fn(|r| &x[r * width..(r + 1) * width]);
                scales = sum_rows::<S, T, _, GROUP>(Square, rows, scales);
            } else {
                for (scale, row) in scales.iter_mut().zip(x.chunks_exact(width)) {
                    *scale = sum_rows::<S, T, _, 1>(Square, [row], [0.0])[0];
                }
            }
            let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(width));
            for ((x, out), sum) in rows.zip(scales) {
                scale_row::<S, T>(x, inverse_root(sum, width, self.eps), self.weight, out);
            }
        }
    }
}

struct AddRows<'a, T> {
    x: &'a [T],
    residual: &'a [T],
    weight: &'a [T],
    eps: f32,
    sums: &'a mut [T],
    out: &'a mut [T],
}

impl<T: Storage> Kernel for AddRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let width = self.weight.len();
        let inputs = self.x.chunks_exact(width).zip(self.residual.chunks_exact(width));
        let outputs = self.sums.chunks_exact_mut(width).zip(self.out.chunks_exact_mut(width));
        for ((x, residual), (sums, out)) in inputs.zip(outputs) {
            map2::<S, T>(x, residual, sums, |x, r| x + r);
            let [sum] = sum_rows::<S, T, _, 1>(Square, [sums], [0.0]);
            scale_row::<S, T>(sums, inverse_root(sum, width, self.eps), self.weight, out);
        }
    }
}
