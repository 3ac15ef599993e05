//! Embedding lookup: `out[i] = table[ids[i]]`, exact.

use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::index::Index;
use crate::ops::common::storage::Storage;

/// Copies row `ids[i]` of `table` [vocab_size, width] to row i of `out` [num_ids, width].
pub fn embedding<T: Storage, I: Index>(
    backend: &CpuBackend,
    table: &[T],
    vocab_size: usize,
    width: usize,
    ids: &[I],
    out: &mut [T],
) -> Result<()> {
    if vocab_size.checked_mul(width) != Some(table.len())
        || ids.len().checked_mul(width) != Some(out.len())
    {
        return Err(Error::internal(format!(
            "embedding: a table of {} for {vocab_size} x {width}, {} ids into {} values",
            table.len(),
            ids.len(),
            out.len()
        )));
    }
    let outside = ids.iter().position(|id| id.to_index(vocab_size).is_none());
    if let Some(index) = outside {
        return Err(Error::invalid_argument(format!(
            "id {} at index {index} is outside the vocabulary of {vocab_size}",
            ids[index].to_i64()
        )));
    }
    backend.parallel_rows(out, width, |first, rows| {
        for (row, id) in rows.chunks_exact_mut(width).zip(&ids[first..]) {
            // This is always some, as checked above.
            if let Some(id) = id.to_index(vocab_size) {
                row.copy_from_slice(&table[id * width..(id + 1) * width]);
            }
        }
    })
}
