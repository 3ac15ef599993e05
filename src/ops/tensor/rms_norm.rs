//! Root-mean-square normalisation (Zhang and Sennrich, 2019, equation 4) over the last dimension:
//! `out = x / sqrt(mean(x^2) + eps) * weight`, eps inside the root as in Transformers.
//!
//! x, out [..., width], weight [width], all of one floating-point type; sums in f32.

use super::check::{self, InPlace};
use super::staging::{contiguous, host_slice, host_slice_mut, input, input_beside, output};
use super::{fits_rows, kernel_name, num_blocks, row_layout, with_storage};
use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::host;

/// See the head of the file. `out` may be the same view as `x`.
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
                host::rms_norm(backend, x, weight, eps, out)
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

fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let too_many = || Error::unsupported("rms_norm: too many rows for one launch");
    let (rows, width) = (x.num_elements() / x.width(), x.width());
    let (out_layout, x_layout) = (row_layout(out)?, row_layout(x)?);
    // The kernel that takes any width and alignment.
    let name = kernel_name!("rms_norm_scalar", dtype);
    let block = (width.clamp(1, 1024) as u32).next_multiple_of(32);
    let launch = Launch::linear(num_blocks(rows, 1).ok_or_else(too_many)?, block);
    let width = i32::try_from(width).map_err(|_| too_many())?;
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(x)
        .tensor(weight)
        .i64(rows)
        .i32(width)
        .f32(eps)
        .value(&out_layout)
        .value(&x_layout);
    // SAFETY: the arguments of xserv_rms_norm_scalar; the layouts span the rows of both tensors.
    unsafe { cuda.launch("rms_norm", name, launch, arguments) }
}
