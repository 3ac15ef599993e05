//! Root-mean-square normalisation (Zhang and Sennrich, 2019, equation 4) over the last dimension:
//! `out = x / sqrt(mean(x^2) + eps) * weight`, eps inside the root as in Transformers; and the same behind
//! a residual addition: `residual_out = x + residual`, `out` = the norm of what was stored there.
//!
//! x, residual, residual_out, out [..., width], weight [width], all of one floating-point type; sums in f32.

use super::check::{self, InPlace};
use super::row_kernels::{
    all_vectors, block_per_row, fits_matrix, matrix_stride, rows_and_width, RowForm,
};
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

/// The tensors of [`add_rms_norm`]. `residual_out` may be the same view as `residual` or `x`, and `out` as `x`.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm<'a> {
    /// What the layer before has computed.
    pub x: &'a Tensor,
    /// What it is added to.
    pub residual: &'a Tensor,
    /// [width]
    pub weight: &'a Tensor,
    /// The sum, rounded to the element type.
    pub residual_out: &'a Tensor,
    /// The norm of the sum.
    pub out: &'a Tensor,
}

/// See the head of the file.
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
                // SAFETY: contiguous tensors of T on the host; the results overlap no input and not each
                // other.
                let (x, residual, weight, sums, out) = unsafe {
                    (
                        host_slice::<T>(&x.tensor),
                        host_slice::<T>(&residual.tensor),
                        host_slice::<T>(&weight.tensor),
                        host_slice_mut::<T>(&sum_place.tensor),
                        host_slice_mut::<T>(&place.tensor),
                    )
                };
                host::add_rms_norm(backend, x, residual, weight, eps, sums, out)
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

/// The kernel for narrow rows and how many rows a block of 256 threads takes, if one covers rows of so many
/// vectors.
fn group(num_vectors: i64) -> Option<(i64, i64)> {
    match num_vectors {
        ..=16 => Some((16, 16)),
        17..=32 => Some((32, 8)),
        33..=64 => Some((64, 8)),
        65..=128 => Some((128, 8)),
        _ => None,
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
    let (rows, width) = rows_and_width("rms_norm", x)?;
    let form = RowForm::new(x.width(), all_vectors(&[x, weight, out]), &[16]);
    let vector = 16 / dtype.size_bytes() as i64;
    let (name, launch) = match (form, group(x.width() / vector)) {
        (RowForm::Registers(_), Some((vectors, rows_per_block))) => {
            let name = match vectors {
                16 => kernel_name!("rms_norm_group16", dtype),
                32 => kernel_name!("rms_norm_group32", dtype),
                64 => kernel_name!("rms_norm_group64", dtype),
                _ => kernel_name!("rms_norm_group128", dtype),
            };
            let blocks = num_blocks(rows.into(), rows_per_block)
                .ok_or_else(|| Error::internal("more blocks than rows"))?;
            (name, Launch::linear(blocks, 256))
        }
        // What is larger than the cache cannot be found there by whoever reads it next.
        (RowForm::Registers(_), None) if out.size_bytes() > cuda.device().info().l2_bytes => {
            (kernel_name!("rms_norm_stream", dtype), block_per_row(form, rows, x))
        }
        (RowForm::Registers(_), None) => {
            (kernel_name!("rms_norm_row", dtype), block_per_row(form, rows, x))
        }
        (RowForm::Loop, _) => (kernel_name!("rms_norm_loop", dtype), block_per_row(form, rows, x)),
        (RowForm::Scalar, _) => {
            (kernel_name!("rms_norm_scalar", dtype), block_per_row(form, rows, x))
        }
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
    // SAFETY: the arguments of these kernels; the layouts span the rows of both tensors, which are vectors
    // for all but the scalar one.
    unsafe { cuda.launch("rms_norm", name, launch, arguments) }
}

fn add_on_cuda(cuda: &CudaContext, dtype: DType, tensors: AddRmsNorm<'_>, eps: f32) -> Result<()> {
    let AddRmsNorm { x, residual, weight, residual_out, out } = tensors;
    let (rows, width) = rows_and_width("add_rms_norm", x)?;
    let aligned = all_vectors(&[x, residual, weight, residual_out, out]);
    let form = RowForm::new(x.width(), aligned, &[16]);
    let name = match form {
        RowForm::Registers(_) => kernel_name!("add_rms_norm_row", dtype),
        RowForm::Loop => kernel_name!("add_rms_norm_loop", dtype),
        RowForm::Scalar => kernel_name!("add_rms_norm_scalar", dtype),
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
    // SAFETY: the arguments of these kernels; the strides span the rows of the tensors, which are vectors
    // for all but the scalar one.
    unsafe { cuda.launch("rms_norm", name, block_per_row(form, rows, x), arguments) }
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
