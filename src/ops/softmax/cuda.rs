//! The CUDA half.

use crate::backend::cuda::{Arguments, CudaContext};
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::kernel_name;
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
    unsafe { cuda.launch("softmax/softmax", name, block_per_row(form, rows, x), arguments) }
}
