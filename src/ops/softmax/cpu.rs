//! Softmax over rows: `out_i = e^(x_i - max x) / sum_j e^(x_j - max x)`, computed in f32 and
//! rounded once.

use crate::backend::cpu::exponential::exp;
use crate::backend::cpu::math::{add_to_lanes, maximum, sum_lanes, sum_over, LANES};
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{try_filled, Error, Result};
use crate::ops::common::storage::{Storage, CHUNK};

/// Rows longer than this are cut into parts of this length, which threads share. The cuts, and so
/// the order of the sum, depend on the length alone.
const PART: usize = 8 * 1024;

/// Rows up to this length are widened into a small buffer.
const SHORT: usize = 1024;

/// Computes the softmax of each row. x and out are rows of `row_len`. A row that is all -infinity
/// (everything masked) gives zeros; a NaN makes its row NaN.
pub fn softmax<T: Storage>(
    backend: &CpuBackend,
    x: &[T],
    row_len: usize,
    out: &mut [T],
) -> Result<()> {
    if x.len() != out.len()
        || (row_len == 0 && !x.is_empty())
        || (row_len > 0 && !x.len().is_multiple_of(row_len))
    {
        return Err(Error::internal(format!(
            "softmax: {} inputs, {} outputs, rows of {row_len}",
            x.len(),
            out.len()
        )));
    }
    if row_len > PART {
        return long_rows(backend, x, row_len, out);
    }
    backend.parallel_rows(out, row_len, |first, out| {
        let x = &x[first * row_len..][..out.len()];
        backend.run(Rows { x, row_len, out });
    })
}

/// Computes each row in three steps, each over parts in parallel.
fn long_rows<T: Storage>(
    backend: &CpuBackend,
    x: &[T],
    row_len: usize,
    out: &mut [T],
) -> Result<()> {
    let num_parts = row_len.div_ceil(PART);
    let mut partial = try_filled(num_parts, 0.0f32, "softmax sums")?;
    for (x, out) in x.chunks_exact(row_len).zip(out.chunks_exact_mut(row_len)) {
        let part = |index: usize| &x[index * PART..row_len.min((index + 1) * PART)];
        parts(backend, &mut partial, 1, |index, result| {
            result[0] = backend.run(Maximum { x: part(index) });
        })?;
        // Sums of maxima would hide a NaN; the maximum of maxima does not.
        let max = maximum(&partial);
        if max == f32::NEG_INFINITY {
            out.fill(T::from_f32(0.0));
            continue;
        }
        parts(backend, &mut partial, 1, |index, result| {
            result[0] = backend.run(Sum { x: part(index), max });
        })?;
        let scale = 1.0 / partial.iter().sum::<f32>();
        parts(backend, out, PART, |index, out| {
            backend.run(Scaled { x: part(index), max, scale, out });
        })?;
    }
    Ok(())
}

/// Calls `task` with each piece of `len` elements of `data` and its number, on all threads.
fn parts<T: Send>(
    backend: &CpuBackend,
    data: &mut [T],
    len: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) -> Result<()> {
    let pieces: Vec<std::sync::Mutex<&mut [T]>> =
        data.chunks_mut(len).map(std::sync::Mutex::new).collect();
    backend.parallel_for(pieces.len(), &|index| {
        // This is never contended: each piece is taken once.
        if let Ok(mut piece) = pieces[index].lock() {
            task(index, &mut piece);
        }
    })
}

struct Maximum<'a, T> {
    x: &'a [T],
}

impl<T: Storage> Kernel for Maximum<'_, T> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        row_maximum::<S, T>(self.x)
    }
}

/// Returns the largest element of a stored row; NaN if there is one, -infinity if the row is empty.
#[inline(always)]
pub(crate) fn row_maximum<S: Simd, T: Storage>(x: &[T]) -> f32 {
    if let Some(x) = T::as_f32(x) {
        return maximum(x);
    }
    let mut wide = [0.0; CHUNK];
    let mut max = f32::NEG_INFINITY;
    for x in x.chunks(CHUNK) {
        let wide = &mut wide[..x.len()];
        T::widen::<S>(x, wide);
        max = maximum(&[max, maximum(wide)]);
    }
    max
}

struct Sum<'a, T> {
    x: &'a [T],
    max: f32,
}

impl<T: Storage> Kernel for Sum<'_, T> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let mut lanes = [0.0; LANES];
        let mut wide = [0.0; CHUNK];
        for x in self.x.chunks(CHUNK) {
            let wide = &mut wide[..x.len()];
            T::widen::<S>(x, wide);
            wide.iter_mut().for_each(|x| *x = exp::<S>(*x - self.max));
            add_to_lanes(&mut lanes, wide, |sum, p| sum + p);
        }
        sum_lanes(lanes)
    }
}

struct Scaled<'a, T> {
    x: &'a [T],
    max: f32,
    scale: f32,
    out: &'a mut [T],
}

impl<T: Storage> Kernel for Scaled<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Scaled { x, max, scale, out } = self;
        crate::ops::common::storage::map::<S, T>(x, out, |x| exp::<S>(x - max) * scale);
    }
}

struct Rows<'a, T> {
    x: &'a [T],
    row_len: usize,
    out: &'a mut [T],
}

impl<T: Storage> Kernel for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // Short rows should not pay for clearing a long buffer.
        if self.row_len <= SHORT {
            self.rows::<S, SHORT>();
        } else {
            self.rows::<S, PART>();
        }
    }
}

impl<T: Storage> Rows<'_, T> {
    #[inline(always)]
    fn rows<S: Simd, const LEN: usize>(self) {
        // The buffer holds the powers of a 16-bit row, before they are rounded.
        let mut wide = [0.0; LEN];
        let rows = self.x.chunks_exact(self.row_len);
        for (x, out) in rows.zip(self.out.chunks_exact_mut(self.row_len)) {
            if let (Some(x), Some(out)) = (T::as_f32(x), T::as_f32_mut(out)) {
                softmax_row::<S>(x, out);
                continue;
            }
            let wide = &mut wide[..self.row_len];
            T::widen::<S>(x, wide);
            softmax_in_place::<S>(wide);
            T::narrow::<S>(wide, out);
        }
    }
}

#[inline(always)]
fn softmax_row<S: Simd>(x: &[f32], out: &mut [f32]) {
    let max = maximum(x);
    if max == f32::NEG_INFINITY {
        return out.fill(0.0);
    }
    for (o, &x) in out.iter_mut().zip(x) {
        *o = exp::<S>(x - max);
    }
    let scale = 1.0 / sum_over(out, |sum, p| sum + p);
    out.iter_mut().for_each(|o| *o *= scale);
}

/// Computes one row in place.
#[inline(always)]
pub(crate) fn softmax_in_place<S: Simd>(x: &mut [f32]) {
    let max = maximum(x);
    if max == f32::NEG_INFINITY {
        return x.fill(0.0);
    }
    x.iter_mut().for_each(|x| *x = exp::<S>(*x - max));
    let scale = 1.0 / sum_over(x, |sum, p| sum + p);
    x.iter_mut().for_each(|x| *x *= scale);
}
