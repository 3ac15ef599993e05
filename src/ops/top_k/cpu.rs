//! The CPU half, on typed slices.

use crate::backend::cpu::CpuBackend;
use crate::error::{try_with_capacity, Error, Result};
use crate::ops::common::index::Index;
use crate::ops::common::selection::check;
use crate::ops::common::selection::for_rows;
use crate::ops::common::selection::PIECE;
use crate::ops::common::storage::Storage;
use std::cmp::Ordering;

/// Writes the `k` largest of each row of x [num_rows, row_len], largest first, to `values` and
/// their places in the row to `indices`, both [num_rows, k].
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
    // There is one list per row, so that rows may run at the same time.
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

/// Orders descending, NaN first, then by index.
fn order(a: &(f32, usize), b: &(f32, usize)) -> Ordering {
    let by_value = match (a.0.is_nan(), b.0.is_nan()) {
        (false, false) => b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal),
        (a, b) => b.cmp(&a),
    };
    by_value.then(a.1.cmp(&b.1))
}

/// Leaves the first k of the row's elements in `best`, in order; `best` has room for 2 k.
pub(crate) fn select<T: Storage>(x: &[T], k: usize, best: &mut Vec<(f32, usize)>) {
    best.clear();
    // An element that is not above this cannot be among the first k: k earlier elements are at
    // least as large.
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
