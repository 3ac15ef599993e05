//! Softmax over the last dimension: `out_i = e^(x_i - max x) / sum_j e^(x_j - max x)`.
//!
//! x, out [..., width] of one floating-point type; computed in f32 whatever the type. A row of -infinity only
//! (everything masked) gives zeros; a NaN or +infinity makes its row NaN.

use super::check::{self, InPlace};
use super::row_kernels::{
    all_vectors, block_per_row, fits_matrix, matrix_stride, rows_and_width, RowForm,
};
use super::staging::{contiguous, host_slice, host_slice_mut, input, input_beside, output};
use super::{kernel_name, with_storage};
use crate::backend::cuda::{Arguments, CudaContext};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::host;

/// See the head of the file. `out` may be the same view as `x`.
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
                // SAFETY: contiguous tensors of T on the host; the result does not overlap the input.
                let (x, out) =
                    unsafe { (host_slice::<T>(&x.tensor), host_slice_mut::<T>(&place.tensor)) };
                host::softmax(backend, x, width, out)
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

fn on_cuda(cuda: &CudaContext, dtype: DType, x: &Tensor, out: &Tensor) -> Result<()> {
    let (rows, width) = rows_and_width("softmax", x)?;
    let form = RowForm::new(x.width(), all_vectors(&[x, out]), &[16, 32]);
    let name = match form {
        RowForm::Registers(16) => kernel_name!("softmax_row16", dtype),
        RowForm::Registers(_) => kernel_name!("softmax_row32", dtype),
        RowForm::Loop => kernel_name!("softmax_loop", dtype),
        RowForm::Scalar => kernel_name!("softmax_scalar", dtype),
    };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(x)
        .i32(width)
        .i64(matrix_stride(out)?)
        .i64(matrix_stride(x)?);
    // SAFETY: the arguments of these kernels; the strides span the rows of both tensors, which are vectors
    // for all but the scalar one.
    unsafe { cuda.launch("softmax", name, block_per_row(form, rows, x), arguments) }
}
