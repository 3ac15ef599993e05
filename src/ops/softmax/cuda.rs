//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext};
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::common::row_kernels::{
    all_vectors, block_per_row, matrix_stride, rows_and_width, RowForm,
};

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (rows, width) = rows_and_width("softmax", x)?;
    let form = RowForm::new(x.width(), all_vectors(&[x, out]), &[16, 32]);
    let kernel = match form {
        RowForm::Registers(16) => kernels::SOFTMAX_ROW16.of(dtype),
        RowForm::Registers(_) => kernels::SOFTMAX_ROW32.of(dtype),
        RowForm::Loop => kernels::SOFTMAX_LOOP.of(dtype),
        RowForm::Scalar => kernels::SOFTMAX_SCALAR.of(dtype),
    };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(x)
        .i32(width)
        .i64(matrix_stride(out)?)
        .i64(matrix_stride(x)?);
    // SAFETY: the arguments of these kernels; the strides span the rows of both tensors, which are
    // vectors for all but the scalar one.
    unsafe { cuda.launch(kernel, block_per_row(form, rows, x), arguments) }
}
