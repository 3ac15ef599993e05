//! The index of the largest element along the last dimension. NaN counts as larger than every
//! number, -0 equals +0, and among equal elements the one with the lowest index is taken, as in
//! PyTorch (which does not specify the last).
//!
//! x [..., width] f32, f16 or bf16; out [...] i32 or i64.

pub mod cpu;
pub mod cpu_checked;
mod cuda;

use self::cuda::argmax_on_cuda;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::one_stride;
use crate::ops::common::launch::too_wide;
use crate::ops::common::launch::with_storage;
use crate::ops::common::staging::{contiguous, host_slice, host_slice_mut, input, output};

/// Writes the index of the largest element of each row, see the head of the file.
pub fn argmax(context: &ComputeContext, x: &Tensor, out: &Tensor) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    check::has_rows(x_named)?;
    let dtype = check::float(x_named)?;
    let out_is_i64 = check::indices_are_i64(out_named)?;
    let leading = x.shape().split_last().map_or(&[][..], |(_, leading)| leading);
    check::shape(out_named, leading, "x without its last dimension")?;
    check::reachable(context, &[x_named, out_named])?;
    check::result(out_named, &[x_named], InPlace::Refused)?;
    if out.is_empty() {
        return Ok(());
    }
    if x.width() == 0 {
        return Err(Error::invalid_argument(format!(
            "x has shape {}: there is no largest of no elements",
            x.shape()
        )));
    }
    let width = i32::try_from(x.width()).map_err(|_| too_wide(x))?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = &input(context, x, contiguous)?.tensor;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T and of the integer named, on the host, that share
                // nothing.
                unsafe {
                    let (x, width) = (host_slice::<T>(x), width as usize);
                    if out_is_i64 {
                        cpu::argmax(backend, x, width, host_slice_mut::<i64>(&place.tensor))
                    } else {
                        cpu::argmax(backend, x, width, host_slice_mut::<i32>(&place.tensor))
                    }
                }
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = &input(context, x, one_stride)?.tensor;
            let place = output(context, out, contiguous)?;
            argmax_on_cuda(context, cuda, dtype, out_is_i64, width, x, &place.tensor)?;
            place.finish(context)
        }
    }
}
