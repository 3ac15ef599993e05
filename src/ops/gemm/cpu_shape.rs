//! The products of slices that the CPU computes.

use crate::error::{Error, Result};

/// The shape and factors of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// The number of rows of op(A) and C.
    pub m: usize,
    /// The number of columns of op(B) and C.
    pub n: usize,
    /// The number of columns of op(A) and rows of op(B).
    pub k: usize,
    /// Whether A is stored [k, m].
    pub transpose_a: bool,
    /// Whether B is stored [n, k].
    pub transpose_b: bool,
    /// The distance in elements from row to row of A as it is stored.
    pub lda: usize,
    /// The distance in elements from row to row of B as it is stored.
    pub ldb: usize,
    /// The distance in elements from row to row of C.
    pub ldc: usize,
    /// The factor of the product.
    pub alpha: f32,
    /// The factor of the previous contents of C. With 0 C is not read.
    pub beta: f32,
}

impl Gemm {
    /// Describes `C = op(A) op(B)` of matrices without gaps.
    pub fn contiguous(m: usize, n: usize, k: usize, transpose_a: bool, transpose_b: bool) -> Self {
        Gemm {
            m,
            n,
            k,
            transpose_a,
            transpose_b,
            lda: if transpose_a { m } else { k },
            ldb: if transpose_b { k } else { n },
            ldc: n,
            alpha: 1.0,
            beta: 0.0,
        }
    }

    /// Fails if A, B or C have too few values.
    pub(super) fn check(&self, a: usize, b: usize, c: usize) -> Result<()> {
        let holds = |rows: usize, columns: usize, stride: usize, len: usize| {
            let last = rows.saturating_sub(1).checked_mul(stride);
            let end = last.and_then(|last| last.checked_add(columns));
            rows == 0 || columns == 0 || columns <= stride && end.is_some_and(|end| end <= len)
        };
        let swap = |swap: bool, x: usize, y: usize| if swap { (y, x) } else { (x, y) };
        let (a_rows, a_columns) = swap(self.transpose_a, self.m, self.k);
        let (b_rows, b_columns) = swap(self.transpose_b, self.k, self.n);
        if holds(a_rows, a_columns, self.lda, a)
            && holds(b_rows, b_columns, self.ldb, b)
            && holds(self.m, self.n, self.ldc, c)
        {
            return Ok(());
        }
        Err(Error::internal(format!("gemm: buffers of {a}, {b} and {c} values for {self:?}")))
    }
}
