//! The largest elements of each row. As in PyTorch a NaN counts as larger than any number; the lowest
//! index wins a tie.

use super::index::Index;
use super::softmax::row_maximum;
use super::storage::Storage;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_with_capacity, Error, Result};
use std::cmp::Ordering;

/// x is [num_rows, row_len]; out is [num_rows].
pub fn argmax<T: Storage, I: Index>(
    backend: &CpuBackend,
    x: &[T],
    row_len: usize,
    out: &mut [I],
) -> Result<()> {
    check("argmax", x.len(), row_len, out.len(), 1)?;
    for_rows(backend, row_len, out, |row, out| {
        let index = backend.run(Largest { x: &x[row * row_len..(row + 1) * row_len] });
        // An index fits, checked above.
        if let Some(index) = I::from_index(index) {
            *out = index;
        }
    })
}

/// The `k` largest of each row of x [num_rows, row_len], largest first, into `values` and their places in
/// the row into `indices`, both [num_rows, k].
pub fn top_k<T: Storage, I: Index>(
    backend: &CpuBackend,
    x: &[T],
    row_len: usize,
    k: usize,
    values: &mut [T],
    indices: &mut [I],
) -> Result<()> {
    if k > row_len || values.len() != indices.len() {
        return Err(Error::internal(format!(
            "top_k: {k} of rows of {row_len}, into {} values and {} indices",
            values.len(),
            indices.len()
        )));
    }
    if k == 0 && values.is_empty() {
        return Ok(());
    }
    check("top_k", x.len(), row_len, indices.len(), k)?;
    // One list a row, so that rows may run at the same time.
    let num_rows = indices.len() / k;
    let mut lists = try_with_capacity(num_rows, "top-k rows")?;
    for _ in 0..num_rows {
        lists.push(try_with_capacity::<(f32, usize)>(2 * k, "top-k candidates")?);
    }
    for_rows(backend, row_len, &mut lists, |row, best| {
        select(&x[row * row_len..(row + 1) * row_len], k, best);
    })?;
    for (row, best) in lists.iter().enumerate() {
        let places = row * k..(row + 1) * k;
        let out = values[places.clone()].iter_mut().zip(&mut indices[places]);
        for ((value, index), &(_, place)) in out.zip(best) {
            *value = x[row * row_len + place];
            if let Some(place) = I::from_index(place) {
                *index = place;
            }
        }
    }
    Ok(())
}

/// Descending, NaN first, then by index.
fn order(a: &(f32, usize), b: &(f32, usize)) -> Ordering {
    let by_value = match (a.0.is_nan(), b.0.is_nan()) {
        (false, false) => b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal),
        (a, b) => b.cmp(&a),
    };
    by_value.then(a.1.cmp(&b.1))
}

/// Leaves the k first of the row's elements in `best`, in order, which takes room for 2 k.
pub(crate) fn select<T: Storage>(x: &[T], k: usize, best: &mut Vec<(f32, usize)>) {
    best.clear();
    // What is not above this cannot be among the first k: k earlier elements are at least as large.
    let mut bar = None;
    for (piece, x) in x.chunks(PIECE).enumerate() {
        let is_below = |x: f32, bar: f32| x <= bar || bar.is_nan();
        if bar.is_some_and(|bar| x.iter().fold(true, |all, x| all & is_below(x.to_f32(), bar))) {
            continue;
        }
        for (index, x) in x.iter().enumerate() {
            let x = x.to_f32();
            if bar.is_some_and(|bar| is_below(x, bar)) {
                continue;
            }
            best.push((x, piece * PIECE + index));
            if best.len() == 2 * k {
                best.select_nth_unstable_by(k - 1, order);
                best.truncate(k);
                bar = best.last().map(|last| last.0);
            }
        }
    }
    best.sort_unstable_by(order);
    best.truncate(k);
}

fn check(op: &str, len: usize, row_len: usize, out_len: usize, k: usize) -> Result<()> {
    let num_rows = out_len.checked_div(k).unwrap_or(0);
    if row_len == 0 && out_len > 0
        || num_rows.checked_mul(row_len) != Some(len)
        || num_rows.checked_mul(k) != Some(out_len)
        || i32::try_from(row_len).is_err()
    {
        return Err(Error::internal(format!(
            "{op}: {len} values in rows of {row_len}, {out_len} results, {k} a row"
        )));
    }
    Ok(())
}

/// Calls `task` with the number and the result of each row; in parallel when the rows are large.
fn for_rows<U: Send>(
    backend: &CpuBackend,
    row_len: usize,
    out: &mut [U],
    task: impl Fn(usize, &mut U) + Sync,
) -> Result<()> {
    let start = SendPointer(out.as_mut_ptr());
    backend.parallel_tokens(out.len(), row_len, |rows| {
        for row in rows {
            // SAFETY: row < out.len(), and each row is given out once.
            task(row, unsafe { &mut *start.get().add(row) });
        }
    })
}

/// The index of the largest element of a row that is not empty.
pub(crate) struct Largest<'a, T> {
    pub x: &'a [T],
}

impl<T: Storage> Kernel for Largest<'_, T> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self) -> usize {
        let max = row_maximum::<S, T>(self.x);
        let found = if max.is_nan() {
            position::<T>(self.x, |x| x.is_nan())
        } else {
            position::<T>(self.x, |x| x == max)
        };
        found.unwrap_or(0)
    }
}

/// Elements that are passed over at once, by vectors.
const PIECE: usize = 128;

/// The first place where the condition holds; pieces without one are passed over.
#[inline(always)]
fn position<T: Storage>(x: &[T], holds: impl Fn(f32) -> bool + Copy) -> Option<usize> {
    for (piece, x) in x.chunks(PIECE).enumerate() {
        let mut any = false;
        for x in x {
            any |= holds(x.to_f32());
        }
        if any {
            return x.iter().position(|x| holds(x.to_f32())).map(|at| piece * PIECE + at);
        }
    }
    None
}
