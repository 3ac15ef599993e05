//! The index of the largest element of each row; the lowest one wins a tie.

use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::argmax::cpu::Largest;

/// Finds the largest element of each row. x is [out.len(), row_len]. A NaN in a row is an error
/// that names the row.
pub fn argmax(backend: &CpuBackend, x: &[f32], row_len: usize, out: &mut [u32]) -> Result<()> {
    if row_len == 0 && !out.is_empty()
        || out.len().checked_mul(row_len) != Some(x.len())
        || u32::try_from(row_len).is_err()
    {
        return Err(Error::internal(format!(
            "argmax: {} values, {} rows of {row_len}",
            x.len(),
            out.len()
        )));
    }
    if row_len == 0 {
        return Ok(());
    }
    for (row, (x, out)) in x.chunks_exact(row_len).zip(out).enumerate() {
        let index = backend.run(Largest { x });
        if x[index].is_nan() {
            return Err(Error::internal(format!(
                "argmax: row {row} of {row_len} values holds a NaN"
            )));
        }
        // The index fits, as row_len was checked above.
        *out = index as u32;
    }
    Ok(())
}
