//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::common::row_kernels::{
    all_vectors, block_per_row, matrix_stride, rows_and_width, RowForm,
};

/// Returns the blocks for the kernel that walks over rows, where it is faster than one block for
/// each row: for more rows of 16-bit elements than fit onto the device at once. 768 threads per
/// multiprocessor is what the registers of that kernel allow, and what was fastest on an H200 (8192
/// rows of 4096).
fn walking_blocks(dtype: DType, rows: u32, block: u32, num_multiprocessors: u32) -> Option<u32> {
    let resident = num_multiprocessors.saturating_mul((768 / block.max(1)).max(1));
    (dtype != DType::F32 && block <= 512 && rows > resident).then_some(resident)
}

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let (rows, width) = rows_and_width("layer_norm", x)?;
    let aligned = all_vectors(&[x, weight, bias.unwrap_or(weight), out]);
    let form = RowForm::new(x.width(), aligned, &[16]);
    let mut launch = block_per_row(form, rows, x);
    let num_multiprocessors = cuda.device().info().num_multiprocessors.max(1) as u32;
    let kernel = match form {
        RowForm::Registers(_) => {
            match walking_blocks(dtype, rows, launch.block, num_multiprocessors) {
                Some(blocks) => {
                    launch = Launch::linear(blocks, launch.block);
                    kernels::LAYER_NORM_WALK.of(dtype)
                }
                None => kernels::LAYER_NORM_ROW.of(dtype),
            }
        }
        RowForm::Loop => kernels::LAYER_NORM_LOOP.of(dtype),
        RowForm::Scalar => kernels::LAYER_NORM_SCALAR.of(dtype),
    };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(x)
        .tensor(weight)
        .optional(bias)
        .i64(rows.into())
        .i32(width)
        .f32(eps)
        .i64(matrix_stride(out)?)
        .i64(matrix_stride(x)?);
    // SAFETY: the arguments of these kernels; the strides span the rows of both tensors, which are
    // vectors for all but the scalar one.
    unsafe { cuda.launch(kernel, launch, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_16_bit_rows_are_walked_over() {
        assert_eq!(walking_blocks(DType::BF16, 8192, 256, 132), Some(396));
        assert_eq!(walking_blocks(DType::F16, 397, 256, 132), Some(396));
        assert_eq!(walking_blocks(DType::BF16, 396, 256, 132), None);
        assert_eq!(walking_blocks(DType::F32, 8192, 256, 132), None);
        assert_eq!(walking_blocks(DType::BF16, 8192, 512, 132), Some(132));
        assert_eq!(walking_blocks(DType::BF16, 8192, 544, 132), None);
        assert_eq!(walking_blocks(DType::BF16, u32::MAX, 32, 1), Some(24));
    }
}
