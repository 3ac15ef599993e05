//! GELU in the tanh form of GPT-2; see [`host::activation`](mod@host::activation).

use super::host::{self, Activation};
use crate::backend::cpu::CpuBackend;
use crate::error::Result;

/// Replaces each x by gelu(x). No NaN for any finite x: where the cube overflows, the exponential
/// is 0 or infinite and the result x or 0.
pub fn gelu_tanh(backend: &CpuBackend, x: &mut [f32]) -> Result<()> {
    host::activation_in_place(backend, Activation::GeluTanh, x)
}
