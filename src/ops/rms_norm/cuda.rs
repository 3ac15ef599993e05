//! The CUDA half, rounded once.

use super::tensors::AddRmsNorm;
use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::{num_blocks, row_layout};
use crate::ops::common::row_kernels::{
    all_vectors, block_per_row, matrix_stride, rows_and_width, RowForm,
};

/// Returns the kernel for narrow rows and how many rows a block of 256 threads takes, if one covers
/// rows of this number of vectors.
fn group(num_vectors: i64) -> Option<(i64, i64)> {
    match num_vectors {
        ..=16 => Some((16, 16)),
        17..=32 => Some((32, 8)),
        33..=64 => Some((64, 8)),
        65..=128 => Some((128, 8)),
        _ => None,
    }
}

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let (rows, width) = rows_and_width("rms_norm", x)?;
    let form = RowForm::new(x.width(), all_vectors(&[x, weight, out]), &[16]);
    let vector = 16 / dtype.size_bytes() as i64;
    let (kernel, launch) = match (form, group(x.width() / vector)) {
        (RowForm::Registers(_), Some((vectors, rows_per_block))) => {
            let kernel = match vectors {
                16 => kernels::RMS_NORM_GROUP16.of(dtype),
                32 => kernels::RMS_NORM_GROUP32.of(dtype),
                64 => kernels::RMS_NORM_GROUP64.of(dtype),
                _ => kernels::RMS_NORM_GROUP128.of(dtype),
            };
            let blocks = num_blocks(rows.into(), rows_per_block)
                .ok_or_else(|| Error::internal("more blocks than rows"))?;
            (kernel, Launch::linear(blocks, 256))
        }
        // An output larger than the cache cannot be found there by its next reader.
        (RowForm::Registers(_), None) if out.size_bytes() > cuda.device().info().l2_bytes => {
            (kernels::RMS_NORM_STREAM.of(dtype), block_per_row(form, rows, x))
        }
        (RowForm::Registers(_), None) => {
            (kernels::RMS_NORM_ROW.of(dtype), block_per_row(form, rows, x))
        }
        (RowForm::Loop, _) => (kernels::RMS_NORM_LOOP.of(dtype), block_per_row(form, rows, x)),
        (RowForm::Scalar, _) => (kernels::RMS_NORM_SCALAR.of(dtype), block_per_row(form, rows, x)),
    };
    let (out_layout, x_layout) = (row_layout(out)?, row_layout(x)?);
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(x)
        .tensor(weight)
        .i64(rows.into())
        .i32(width)
        .f32(eps)
        .value(&out_layout)
        .value(&x_layout);
    // SAFETY: the arguments of these kernels; the layouts span the rows of both tensors, which are
    // vectors for all but the scalar one.
    unsafe { cuda.launch(kernel, launch, arguments) }
}

pub(in crate::ops) fn add_on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    tensors: AddRmsNorm<'_>,
    eps: f32,
) -> Result<()> {
    let AddRmsNorm { x, residual, weight, residual_out, out } = tensors;
    let (rows, width) = rows_and_width("add_rms_norm", x)?;
    let aligned = all_vectors(&[x, residual, weight, residual_out, out]);
    let form = RowForm::new(x.width(), aligned, &[16]);
    let kernel = match form {
        RowForm::Registers(_) => kernels::ADD_RMS_NORM_ROW.of(dtype),
        RowForm::Loop => kernels::ADD_RMS_NORM_LOOP.of(dtype),
        RowForm::Scalar => kernels::ADD_RMS_NORM_SCALAR.of(dtype),
    };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(residual_out)
        .tensor(x)
        .tensor(residual)
        .tensor(weight)
        .i32(width)
        .f32(eps)
        .i64(matrix_stride(out)?)
        .i64(matrix_stride(residual_out)?)
        .i64(matrix_stride(x)?)
        .i64(matrix_stride(residual)?);
    // SAFETY: the arguments of these kernels; the strides span the rows of the tensors, which are
    // vectors for all but the scalar one.
    unsafe { cuda.launch(kernel, block_per_row(form, rows, x), arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_rows() {
        for vectors in 1..=128 {
            let (covered, rows_per_block) = group(vectors).unwrap();
            let lanes = 256 / rows_per_block;
            assert!(covered >= vectors && [16, 32].contains(&lanes) && covered % lanes == 0);
        }
        assert_eq!(group(129), None);
    }
}
