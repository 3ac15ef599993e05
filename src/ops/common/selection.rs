//! Shared parts of the operators that choose among the elements of a row on the CPU.

use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};

pub(in crate::ops) fn check(
    op: &str,
    len: usize,
    row_len: usize,
    out_len: usize,
    k: usize,
) -> Result<()> {
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
pub(in crate::ops) fn for_rows<U: Send>(
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

/// The number of elements that are passed over at once, by vectors.
pub(in crate::ops) const PIECE: usize = 128;
