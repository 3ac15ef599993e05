//! Softmax over rows: `out_i = e^(x_i - max x) / sum_j e^(x_j - max x)`.

use crate::backend::cpu::math::{exp, maximum, sum_over};
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};

/// x and out are rows of `row_len`. A row that is all -infinity (everything masked) gives zeros; a
/// NaN makes its row NaN.
pub fn softmax(backend: &CpuBackend, x: &[f32], row_len: usize, out: &mut [f32]) -> Result<()> {
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
    backend.parallel_rows(out, row_len, |first, out| {
        let x = &x[first * row_len..][..out.len()];
        backend.run(Rows { x, row_len, out });
    })
}

struct Rows<'a> {
    x: &'a [f32],
    row_len: usize,
    out: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.x.chunks_exact(self.row_len);
        for (x, out) in rows.zip(self.out.chunks_exact_mut(self.row_len)) {
            let max = maximum(x);
            if max == f32::NEG_INFINITY {
                out.fill(0.0);
                continue;
            }
            for (o, &x) in out.iter_mut().zip(x) {
                *o = exp::<S>(x - max);
            }
            let scale = 1.0 / sum_over::<S>(out, |sum, p| sum + p);
            for o in out {
                *o *= scale;
            }
        }
    }
}
