//! Activations, in f32 and rounded once: `silu(x) = x / (1 + e^-x)`,
//! `silu_mul(gate, up) = silu(gate) * up` (Shazeer, 2020, SwiGLU),
//! `gelu(x) = x/2 (1 + erf(x / sqrt 2))` and GPT-2's
//! `gelu_tanh(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel, 2016).
//!
//! x, gate, up, out: one shape, one floating-point type. No finite x gives a NaN; minus infinity
//! does, as in PyTorch.

pub mod cpu;
mod cuda;
pub mod cuda_rounded;

use self::cuda::on_cuda;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::activation::cpu::Activation;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::with_storage;
use crate::ops::common::staging::{contiguous, host_slice, host_slice_mut, input, output};

/// Computes `out = function(x)`, see the head of the file. `out` may be the same view as `x`.
pub fn activation(
    context: &ComputeContext,
    function: Activation,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    let dtype = check::float(x_named)?;
    check::same_type(&[x_named, out_named])?;
    check::same_shape(&[x_named, out_named])?;
    check::reachable(context, &[x_named, out_named])?;
    check::result(out_named, &[x_named], InPlace::Allowed)?;
    if x.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let place = output(context, out, contiguous)?;
            if x.is_same_view(&place.tensor) {
                with_storage!(dtype, T => {
                    // SAFETY: a contiguous tensor of T on the host, which is both the input and the
                    // result.
                    let x = unsafe { host_slice_mut::<T>(&place.tensor) };
                    cpu::activation_in_place(backend, function, x)
                })?;
            } else {
                let x = input(context, x, contiguous)?;
                with_storage!(dtype, T => {
                    // SAFETY: contiguous tensors of T on the host; the result overlaps no input.
                    let (x, out) =
                        unsafe { (host_slice::<T>(&x.tensor), host_slice_mut::<T>(&place.tensor)) };
                    cpu::activation(backend, function, x, out)
                })?;
            }
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, contiguous)?;
            let place = output(context, out, contiguous)?;
            on_cuda(cuda, dtype, function, &x.tensor, &place.tensor)?;
            place.finish(context)
        }
    }
}
