//! Layer normalisation (Ba, Kiros and Hinton, 2016, equation 4) over the last dimension:
//! `out = (x - mean) / sqrt(var + eps) * weight + bias`, with the variance of the population.
//!
//! x, out [..., width], weight, bias [width] (no bias is zeros), all of one floating-point type; sums in f32.

use super::check::{self, InPlace};
use super::row_kernels::{
    all_vectors, block_per_row, fits_matrix, matrix_stride, rows_and_width, RowForm,
};
use super::staging::{contiguous, host_slice, host_slice_mut, input, input_beside, output};
use super::{kernel_name, with_storage};
use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::Result;
use crate::memory::{DType, Tensor};
use crate::ops::host;

/// See the head of the file. `out` may be the same view as `x`.
pub fn layer_norm(
    context: &ComputeContext,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
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
    if let Some(bias) = bias {
        let bias_named = ("bias", bias);
        check::same_type(&[x_named, bias_named])?;
        check::shape(bias_named, &[x.width()], "the last dimension of x")?;
        check::reachable(context, &[bias_named])?;
        check::result(out_named, &[bias_named], InPlace::Refused)?;
    }
    if x.is_empty() {
        return Ok(());
    }
    let weight = input(context, weight, contiguous)?;
    let bias = bias.map(|bias| input(context, bias, contiguous)).transpose()?;
    let bias = bias.as_ref().map(|bias| &bias.tensor);
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let x = input_beside(context, x, out, contiguous)?;
            let place = output(context, out, contiguous)?;
            with_storage!(dtype, T => {
                // SAFETY: contiguous tensors of T on the host; the result overlaps no input.
                let (x, weight, bias, out) = unsafe {
                    (
                        host_slice::<T>(&x.tensor),
                        host_slice::<T>(&weight.tensor),
                        bias.map(|bias| host_slice::<T>(bias)),
                        host_slice_mut::<T>(&place.tensor),
                    )
                };
                host::layer_norm(backend, x, weight, bias, eps, out)
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, fits_matrix)?;
            let place = output(context, out, fits_matrix)?;
            on_cuda(cuda, dtype, &x.tensor, &weight.tensor, bias, eps, &place.tensor)?;
            place.finish(context)
        }
    }
}

/// Blocks for the kernel that walks over rows, where it is faster than one block for each row: for more rows
/// of 16-bit elements than fit onto the device at once. 768 threads a multiprocessor is what the registers of
/// that kernel allow, and what was fastest on an H200 (8192 rows of 4096).
fn walking_blocks(dtype: DType, rows: u32, block: u32, num_multiprocessors: u32) -> Option<u32> {
    let resident = num_multiprocessors.saturating_mul((768 / block.max(1)).max(1));
    (dtype != DType::F32 && block <= 512 && rows > resident).then_some(resident)
}

fn on_cuda(
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
    let name = match form {
        RowForm::Registers(_) => {
            match walking_blocks(dtype, rows, launch.block, num_multiprocessors) {
                Some(blocks) => {
                    launch = Launch::linear(blocks, launch.block);
                    kernel_name!("layer_norm_walk", dtype)
                }
                None => kernel_name!("layer_norm_row", dtype),
            }
        }
        RowForm::Loop => kernel_name!("layer_norm_loop", dtype),
        RowForm::Scalar => kernel_name!("layer_norm_scalar", dtype),
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
    // SAFETY: the arguments of these kernels; the strides span the rows of both tensors, which are vectors
    // for all but the scalar one.
    unsafe { cuda.launch("layer_norm", name, launch, arguments) }
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
