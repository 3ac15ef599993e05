//! The largest elements of each row. As in PyTorch a NaN counts as larger than any number; the
//! lowest index wins a tie.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::ops::common::index::Index;
use crate::ops::common::selection::check;
use crate::ops::common::selection::for_rows;
use crate::ops::common::selection::PIECE;
use crate::ops::common::storage::Storage;
use crate::ops::softmax::cpu::row_maximum;

/// Writes the index of the largest element of each row. x is [num_rows, row_len]; out is
/// [num_rows].
pub fn argmax<T: Storage, I: Index>(
    backend: &CpuBackend,
    x: &[T],
    row_len: usize,
    out: &mut [I],
) -> Result<()> {
    check("argmax", x.len(), row_len, out.len(), 1)?;
    for_rows(backend, row_len, out, |row, out| {
        let index = backend.run(Largest { x: &x[row * row_len..(row + 1) * row_len] });
        // The index fits, as checked above.
        if let Some(index) = I::from_index(index) {
            *out = index;
        }
    })
}

/// Returns the index of the largest element of a row that is not empty.
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

/// Returns the first place where the condition holds; pieces without one are passed over.
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
