//! Transposition of matrices, in squares of sixteen.

use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::common::cpu_turn::Exact;
use crate::ops::common::cpu_turn::Turn;
use crate::ops::common::storage::Storage;
use std::marker::PhantomData;

/// Computes `out[c][r] = x[r][c]`, bit for bit: x is [rows, columns], out [columns, rows].
pub fn transpose<T: Storage>(
    backend: &CpuBackend,
    x: &[T],
    rows: usize,
    columns: usize,
    out: &mut [T],
) -> Result<()> {
    if rows.checked_mul(columns) != Some(x.len()) || x.len() != out.len() {
        return Err(Error::internal(format!(
            "transpose: {} inputs, {} outputs, for {rows} x {columns}",
            x.len(),
            out.len()
        )));
    }
    backend.parallel_rows(out, rows, |first, out| {
        let columns_here = out.len() / rows;
        backend.run(Turn::<T, T, Exact<T>> {
            from: &x[first..],
            from_stride: columns,
            rows,
            columns: columns_here,
            to: out,
            to_stride: rows,
            _element: PhantomData,
        });
    })
}
