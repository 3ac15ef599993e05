//! Root-mean-square normalisation (Zhang and Sennrich, 2019, equation 4) over the last dimension:
//! `out = x / sqrt(mean(x^2) + eps) * weight`, eps inside the root as in Transformers; and the same
//! after a residual addition: `residual_out = x + residual`, `out` = the norm of what was stored
//! there.
//!
//! x, residual, residual_out, out [..., width], weight [width], all of one floating-point type;
//! sums in f32.

pub mod cpu;
pub mod cpu_heads;
mod cuda;
pub mod cuda_rounded;
mod tensors;

pub use self::tensors::AddRmsNorm;

use self::cuda::add_on_cuda;
use self::cuda::on_cuda;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::{fits_rows, with_storage};
use crate::ops::common::row_kernels::fits_matrix;
use crate::ops::common::staging::{
    contiguous, host_slice, host_slice_mut, input, input_beside, output,
};

/// Normalises the rows of `x`; see the head of the file. `out` may be the same view as `x`.
pub fn rms_norm(
    context: &ComputeContext,
    x: &Tensor,
    weight: &Tensor,
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
    if x.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = input_beside(context, x, out, contiguous)?;
            let weight = input(context, weight, contiguous)?;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T on the host; the result overlaps no input.
                let (x, weight, out) = unsafe {
                    (
                        host_slice::<T>(&x.tensor),
                        host_slice::<T>(&weight.tensor),
                        host_slice_mut::<T>(&place.tensor),
                    )
                };
                cpu::rms_norm(backend, x, weight, eps, out)
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, fits_rows)?;
            let weight = input(context, weight, contiguous)?;
            let place = output(context, out, fits_rows)?;
            on_cuda(cuda, dtype, &x.tensor, &weight.tensor, eps, &place.tensor)?;
            place.finish(context)
        }
    }
}

/// Adds and normalises; see the head of the file.
pub fn add_rms_norm(context: &ComputeContext, tensors: AddRmsNorm<'_>, eps: f32) -> Result<()> {
    let AddRmsNorm { x, residual, weight, residual_out, out } = tensors;
    let (x_named, residual_named, weight_named) =
        (("x", x), ("residual", residual), ("weight", weight));
    let (sum_named, out_named) = (("residual_out", residual_out), ("out", out));
    check::has_rows(x_named)?;
    let dtype = check::float(x_named)?;
    let all = [x_named, residual_named, weight_named, sum_named, out_named];
    check::same_type(&all)?;
    check::same_shape(&[x_named, residual_named, sum_named, out_named])?;
    check::shape(weight_named, &[x.width()], "the last dimension of x")?;
    check::epsilon(eps)?;
    check::reachable(context, &all)?;
    check::result(sum_named, &[x_named, residual_named], InPlace::Allowed)?;
    check::result(sum_named, &[weight_named], InPlace::Refused)?;
    check::result(out_named, &[x_named], InPlace::Allowed)?;
    check::result(out_named, &[residual_named, weight_named, sum_named], InPlace::Refused)?;
    if x.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let apart = |tensor: &Tensor| {
                contiguous(tensor) && !tensor.overlaps(out) && !tensor.overlaps(residual_out)
            };
            let x = input(context, x, apart)?;
            let residual = input(context, residual, apart)?;
            let weight = input(context, weight, contiguous)?;
            let sum_place = output(context, residual_out, contiguous)?;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T on the host; the results overlap no input and not
                // each other.
                let (x, residual, weight, sums, out) = unsafe {
                    (
                        host_slice::<T>(&x.tensor),
                        host_slice::<T>(&residual.tensor),
                        host_slice::<T>(&weight.tensor),
                        host_slice_mut::<T>(&sum_place.tensor),
                        host_slice_mut::<T>(&place.tensor),
                    )
                };
                cpu::add_rms_norm(backend, x, residual, weight, eps, sums, out)
            })?;
            sum_place.finish(context)?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, fits_matrix)?;
            let residual = input(context, residual, fits_matrix)?;
            let weight = input(context, weight, contiguous)?;
            let sum_place = output(context, residual_out, fits_matrix)?;
            let place = output(context, out, fits_matrix)?;
            let tensors = AddRmsNorm {
                x: &x.tensor,
                residual: &residual.tensor,
                weight: &weight.tensor,
                residual_out: &sum_place.tensor,
                out: &place.tensor,
            };
            add_on_cuda(cuda, dtype, tensors, eps)?;
            sum_place.finish(context)?;
            place.finish(context)
        }
    }
}
