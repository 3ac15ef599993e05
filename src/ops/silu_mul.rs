//! `silu(gate) * up` with `silu(x) = x / (1 + e^-x)` (Shazeer, 2020, SwiGLU), and silu alone.

use crate::backend::cpu::math::exp;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};

/// gate_up is [num_tokens, 2 * intermediate_size], the gate first in each row; out is
/// [num_tokens, intermediate_size]. No overflow for any finite gate.
pub fn silu_mul(
    backend: &CpuBackend,
    gate_up: &[f32],
    intermediate_size: usize,
    out: &mut [f32],
) -> Result<()> {
    if out.len().checked_mul(2) != Some(gate_up.len())
        || (intermediate_size == 0 && !out.is_empty())
        || (intermediate_size > 0 && !out.len().is_multiple_of(intermediate_size))
    {
        return Err(Error::internal(format!(
            "silu_mul: {} inputs, {} outputs, rows of {intermediate_size}",
            gate_up.len(),
            out.len()
        )));
    }
    backend.parallel_rows(out, intermediate_size, |first, out| {
        let gate_up = &gate_up[2 * first * intermediate_size..][..2 * out.len()];
        backend.run(SiluMulRows { gate_up, intermediate_size, out });
    })
}

/// `out[i] = silu(x[i])`.
pub fn silu(backend: &CpuBackend, x: &[f32], out: &mut [f32]) -> Result<()> {
    if x.len() != out.len() {
        return Err(Error::internal(format!("silu: {} inputs, {} outputs", x.len(), out.len())));
    }
    backend.parallel_rows(out, 1, |first, out| backend.run(Silu { x: &x[first..], out }))
}

#[inline(always)]
fn silu_value<S: Simd>(x: f32) -> f32 {
    x / (1.0 + exp::<S>(-x))
}

struct SiluMulRows<'a> {
    gate_up: &'a [f32],
    intermediate_size: usize,
    out: &'a mut [f32],
}

impl Kernel for SiluMulRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let width = self.intermediate_size;
        for (row, out) in self.gate_up.chunks_exact(2 * width).zip(self.out.chunks_exact_mut(width))
        {
            let (gate, up) = row.split_at(width);
            for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
                *o = silu_value::<S>(g) * u;
            }
        }
    }
}

struct Silu<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Silu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for (o, &x) in self.out.iter_mut().zip(self.x) {
            *o = silu_value::<S>(x);
        }
    }
}
