//! Layer normalisation; see [`host::layer_norm`].

use super::host;
use crate::backend::cpu::CpuBackend;
use crate::error::Result;

/// Normalises each row of x [num_tokens, hidden_size] into `out` of the same shape; `weight` and
/// `bias` are [hidden_size].
pub fn layer_norm(
    backend: &CpuBackend,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<()> {
    host::layer_norm(backend, x, weight, Some(bias), eps, out)
}
