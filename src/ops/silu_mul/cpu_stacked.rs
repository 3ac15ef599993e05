//! `silu(gate) * up`, and silu alone; see
//! [`crate::ops::activation::cpu::activation`](mod@crate::ops::activation::cpu::activation).

use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};

/// Computes `out = silu(gate) * up`. gate_up is [num_tokens, 2 * intermediate_size], the gate first
/// in each row; out is [num_tokens, intermediate_size]. No finite gate overflows.
pub fn silu_mul(
    backend: &CpuBackend,
    gate_up: &[f32],
    intermediate_size: usize,
    out: &mut [f32],
) -> Result<()> {
    let stride = 2 * intermediate_size;
    if out.len().checked_mul(2) != Some(gate_up.len()) {
        return Err(Error::internal(format!(
            "silu_mul: {} inputs, {} outputs",
            gate_up.len(),
            out.len()
        )));
    }
    let up = gate_up.get(intermediate_size..).unwrap_or(&[]);
    super::cpu::silu_mul(backend, gate_up, stride, up, stride, intermediate_size, out)
}

/// Computes `out[i] = silu(x[i])`.
pub fn silu(backend: &CpuBackend, x: &[f32], out: &mut [f32]) -> Result<()> {
    crate::ops::activation::cpu::silu(backend, x, out)
}
