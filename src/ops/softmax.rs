//! Softmax over rows; see [`host::softmax`].

use super::host;
use crate::backend::cpu::CpuBackend;
use crate::error::Result;

/// x and out are rows of `row_len`. A row that is all -infinity (everything masked) gives zeros; a
/// NaN makes its row NaN.
pub fn softmax(backend: &CpuBackend, x: &[f32], row_len: usize, out: &mut [f32]) -> Result<()> {
    host::softmax(backend, x, row_len, out)
}
