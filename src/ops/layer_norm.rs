//! Layer normalisation (Ba, Kiros and Hinton, 2016): `out = (x - mean) / sqrt(var + eps) * weight +
//! bias`, with the population variance, in two passes so that a large mean costs no accuracy.

use crate::backend::cpu::math::sum_over;
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};

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
    let width = weight.len();
    if x.len() != out.len()
        || bias.len() != width
        || (width == 0 && !x.is_empty())
        || (width > 0 && !x.len().is_multiple_of(width))
    {
        return Err(Error::internal(format!(
            "layer_norm: {} inputs, {} outputs, weight of {width}, bias of {}",
            x.len(),
            out.len(),
            bias.len()
        )));
    }
    backend.parallel_rows(out, width, |first, out| {
        let x = &x[first * width..][..out.len()];
        backend.run(Rows { x, weight, bias, eps, out });
    })
}

struct Rows<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let rough_mean = sum_over::<S>(x, |sum, x| sum + x) / width as f32;
            // The mean of what is left corrects the rounding of the first sum.
            let mean =
                rough_mean + sum_over::<S>(x, |sum, x| sum + (x - rough_mean)) / width as f32;
            let squares = sum_over::<S>(x, |sum, x| S::mul_add(x - mean, x - mean, sum));
            let scale = 1.0 / (squares / width as f32 + self.eps).sqrt();
            for (((o, &x), &w), &b) in out.iter_mut().zip(x).zip(self.weight).zip(self.bias) {
                *o = S::mul_add((x - mean) * scale, w, b);
            }
        }
    }
}
