//! Root-mean-square normalisation (Zhang and Sennrich, 2019, equation 4):
//! `out = x / sqrt(mean(x^2) + eps) * weight`, eps inside the root as in Transformers.

use crate::backend::cpu::math::sum_over;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::ops::common::row_sums::inverse_root;

/// Normalises each row of x [num_tokens, hidden_size] into `out` of the same shape, with `weight`
/// [hidden_size].
pub fn rms_norm(
    backend: &CpuBackend,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<()> {
    super::cpu::rms_norm(backend, x, weight, eps, out)
}

/// Normalises heads in place, each over its own `head_dim = weight.len()` values: x is
/// [num_tokens, num_heads, head_dim] with token rows `row_stride` elements apart, so that it may be
/// the q or k part of a fused projection.
pub fn rms_norm_heads(
    backend: &CpuBackend,
    x: &mut [f32],
    num_tokens: usize,
    row_stride: usize,
    num_heads: usize,
    weight: &[f32],
    eps: f32,
) -> Result<()> {
    crate::ops::common::check::check_strided(
        "rms_norm_heads",
        x.len(),
        num_tokens,
        row_stride,
        num_heads,
        weight.len(),
    )?;
    let row_len = num_heads * weight.len();
    if row_len == 0 {
        return Ok(());
    }
    let start = SendPointer(x.as_mut_ptr());
    backend.parallel_tokens(num_tokens, row_len, |tokens| {
        for token in tokens {
            // SAFETY: `check_strided` has found (num_tokens - 1) * row_stride + row_len <= x.len()
            // and row_len <= row_stride, so rows lie in x and do not overlap; each token is given
            // out once.
            let row = unsafe {
                std::slice::from_raw_parts_mut(start.get().add(token * row_stride), row_len)
            };
            backend.run(HeadsInPlace { x: row, weight, eps });
        }
    })
}

/// Normalises heads of as many values as `weight` has, in place.
pub(in crate::ops) struct HeadsInPlace<'a> {
    pub x: &'a mut [f32],
    pub weight: &'a [f32],
    pub eps: f32,
}

impl Kernel for HeadsInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for head in self.x.chunks_exact_mut(self.weight.len()) {
            let sum = sum_over(head, |sum, x| S::mul_add(x, x, sum));
            let scale = inverse_root(sum, head.len(), self.eps);
            for (x, &w) in head.iter_mut().zip(self.weight) {
                *x = *x * scale * w;
            }
        }
    }
}
