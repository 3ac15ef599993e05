//! Softmax over the last dimension: `out_i = e^(x_i - max x) / sum_j e^(x_j - max x)`.
//!
//! x, out [..., width] of one floating-point type; computed in f32 whatever the type. A row of
//! nothing but -infinity (everything masked) gives zeros; a NaN or +infinity makes its row NaN.

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

/// Computes the softmax of each row; see the head of the file. `out` may be the same view as `x`.
pub fn softmax(context: &ComputeContext, x: &Tensor, out: &Tensor) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    check::has_rows(x_named)?;
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
            let width = x.width() as usize;
            let x = input_beside(context, x, out, contiguous)?;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T on the host; the result does not overlap the
                // input.
                let (x, out) =
                    unsafe { (host_slice::<T>(&x.tensor), host_slice_mut::<T>(&place.tensor)) };
                cpu::softmax(backend, x, width, out)
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, fits_matrix)?;
            let place = output(context, out, fits_matrix)?;
            on_cuda(cuda, dtype, &x.tensor, &place.tensor)?;
            place.finish(context)
        }
    }
}
