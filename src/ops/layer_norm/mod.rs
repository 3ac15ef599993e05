//! Layer normalisation (Ba, Kiros and Hinton, 2016, equation 4) over the last dimension:
//! `out = (x - mean) / sqrt(var + eps) * weight + bias`, with the variance of the population.
//!
//! x, out [..., width], weight, bias [width] (no bias is zeros), all of one floating-point type;
//! sums in f32.

pub mod cpu;
mod cuda;

use self::cuda::on_cuda;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::with_storage;
use crate::ops::common::row_kernels::fits_matrix;
use crate::ops::common::staging::{
    contiguous, host_slice, host_slice_mut, input, input_beside, output,
};

/// Normalises each row; see the head of the file. `out` may be the same view as `x`.
pub fn layer_norm(
    context: &ComputeContext,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let (x_named, weight_named, out_named) = (("x", x), ("weight", weight), ("out", out));
    check::has_rows(x_named)?;
    let dtype = check::float(x_named)?;
    check::same_type(&[x_named, weight_named, out_named])?;
    check::same_shape(&[x_named, out_named])?;
    check::shape(weight_named, &[x.width()], "the last dimension of x")?;
    check::epsilon(eps)?;
    check::reachable(context, &[x_named, weight_named, out_named])?;
    check::result(out_named, &[x_named], InPlace::Allowed)?;
    check::result(out_named, &[weight_named], InPlace::Refused)?;
    if let Some(bias) = bias {
        let bias_named = ("bias", bias);
        check::same_type(&[x_named, bias_named])?;
        check::shape(bias_named, &[x.width()], "the last dimension of x")?;
        check::reachable(context, &[bias_named])?;
        check::result(out_named, &[bias_named], InPlace::Refused)?;
    }
    if x.is_empty() {
        return Ok(());
    }
    let weight = input(context, weight, contiguous)?;
    let bias = bias.map(|bias| input(context, bias, contiguous)).transpose()?;
    let bias = bias.as_ref().map(|bias| &bias.tensor);
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = input_beside(context, x, out, contiguous)?;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T on the host; the result overlaps no input.
                let (x, weight, bias, out) = unsafe {
                    (
                        host_slice::<T>(&x.tensor),
                        host_slice::<T>(&weight.tensor),
                        bias.map(|bias| host_slice::<T>(bias)),
                        host_slice_mut::<T>(&place.tensor),
                    )
                };
                cpu::layer_norm(backend, x, weight, bias, eps, out)
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, fits_matrix)?;
            let place = output(context, out, fits_matrix)?;
            on_cuda(cuda, dtype, &x.tensor, &weight.tensor, bias, eps, &place.tensor)?;
            place.finish(context)
        }
    }
}
