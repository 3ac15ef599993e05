//! The CPU half, on typed slices.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::ops::activation::cpu::silu_value;
use crate::ops::common::storage::{map2, Storage};

/// Computes `out = silu(gate) * up` (Shazeer, 2020, SwiGLU): out is [num_rows, width]; gate and up
/// have rows of `width`, `gate_stride` and `up_stride` elements apart. No finite gate overflows.
pub fn silu_mul<T: Storage>(
    backend: &CpuBackend,
    gate: &[T],
    gate_stride: usize,
    up: &[T],
    up_stride: usize,
    width: usize,
    out: &mut [T],
) -> Result<()> {
    let num_rows = out.len().checked_div(width).unwrap_or(0);
    let holds = |len: usize, stride: usize| {
        let last = num_rows.saturating_sub(1).checked_mul(stride);
        num_rows == 0 || last.and_then(|l| l.checked_add(width)).is_some_and(|end| end <= len)
    };
    if num_rows.checked_mul(width) != Some(out.len())
        || !holds(gate.len(), gate_stride)
        || !holds(up.len(), up_stride)
    {
        return Err(Error::internal(format!(
            "silu_mul: gate of {} with rows {gate_stride} apart, up of {} with rows {up_stride} \
             apart, {} outputs in rows of {width}",
            gate.len(),
            up.len(),
            out.len()
        )));
    }
    backend.parallel_rows(out, width, |first, out| {
        backend.run(SiluMul { gate, gate_stride, up, up_stride, width, first, out });
    })
}

struct SiluMul<'a, T> {
    gate: &'a [T],
    gate_stride: usize,
    up: &'a [T],
    up_stride: usize,
    width: usize,
    /// The row of `out[0]`.
    first: usize,
    out: &'a mut [T],
}

impl<T: Storage> Kernel for SiluMul<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for (row, out) in self.out.chunks_exact_mut(self.width).enumerate() {
            let row = self.first + row;
            let gate = &self.gate[row * self.gate_stride..][..self.width];
            let up = &self.up[row * self.up_stride..][..self.width];
            silu_mul_row::<S, T>(gate, up, out);
        }
    }
}

/// Computes `out = silu(gate) * up` of one row.
#[inline(always)]
pub(in crate::ops) fn silu_mul_row<S: Simd, T: Storage>(gate: &[T], up: &[T], out: &mut [T]) {
    map2::<S, T>(gate, up, out, |g, u| silu_value::<S>(g) * u);
}
