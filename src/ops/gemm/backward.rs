//! Gradients of a matrix product `C = A B`: `dA = dC B^T` and `dB = A^T dC`.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{Block, Tensor};
use crate::ops::common::check::{self, InPlace, Named};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::gemm::layout::{batch_size, matrix_sizes, padded_place};
use crate::ops::gemm::{gemm_unchecked, GemmOptions};

/// Computes those of the gradients for A and B that are asked for, from the gradient for C.
/// `transpose_kernels` makes the transposed operands in memory and multiplies them untransposed,
/// which gives the same results to compare with.
pub fn gemm_backward(
    context: &ComputeContext,
    a: &Tensor,
    b: &Tensor,
    dc: &Tensor,
    transpose_kernels: bool,
    da: Option<&Tensor>,
    db: Option<&Tensor>,
) -> Result<()> {
    let (a_named, b_named, dc_named) = (("a", a), ("b", b), ("dc", dc));
    let inputs = [a_named, b_named, dc_named];
    check::float(a_named)?;
    check::same_type(&inputs)?;
    inputs.into_iter().try_for_each(super::check_rank)?;
    check_inputs(a_named, b_named, dc_named)?;
    check::reachable(context, &inputs)?;
    for (out, like) in [(da.map(|da| ("da", da)), a_named), (db.map(|db| ("db", db)), b_named)] {
        let Some(out) = out else { continue };
        check::same_type(&[like, out])?;
        check::same_shape(&[like, out])?;
        check::reachable(context, &[out])?;
        check::result(out, &inputs, InPlace::Refused)?;
    }
    if let (Some(da), Some(db)) = (da, db) {
        check::result(("db", db), &[("da", da)], InPlace::Refused)?;
    }
    let plain = GemmOptions::default();
    if let Some(da) = da {
        if transpose_kernels && !b.is_empty() {
            let (b, _place) = transposed(context, b)?;
            gemm_unchecked(context, &plain, dc, &b, None, da)?;
        } else {
            let options = GemmOptions { transpose_b: true, ..plain };
            gemm_unchecked(context, &options, dc, b, None, da)?;
        }
    }
    if let Some(db) = db {
        if transpose_kernels && !a.is_empty() {
            let (a, _place) = transposed(context, a)?;
            gemm_unchecked(context, &plain, &a, dc, None, db)?;
        } else {
            let options = GemmOptions { transpose_a: true, ..plain };
            gemm_unchecked(context, &options, a, dc, None, db)?;
        }
    }
    Ok(())
}

/// Checks a [.., m, k], b [.., k, n], dc [.., m, n], all with the same batch or none.
fn check_inputs(a: Named<'_>, b: Named<'_>, dc: Named<'_>) -> Result<()> {
    let wrong = |what: String| Err(Error::invalid_argument(what));
    for (name, tensor) in [b, dc] {
        if batch_size(tensor) != batch_size(a.1) {
            return wrong(format!(
                "{name} has shape {}, but a has {}: the batches differ",
                tensor.shape(),
                a.1.shape()
            ));
        }
    }
    let ((m, k), (k_of_b, n)) = (matrix_sizes(a.1, false), matrix_sizes(b.1, false));
    if k != k_of_b {
        return wrong(format!(
            "b has shape {}, but a has {}: {k_of_b} rows for {k} columns",
            b.1.shape(),
            a.1.shape()
        ));
    }
    if matrix_sizes(dc.1, false) != (m, n) {
        return wrong(format!(
            "dc has shape {}, but the product of a and b is [{m}, {n}]",
            dc.1.shape()
        ));
    }
    Ok(())
}

/// Returns the transpose of each matrix, in memory of its own.
fn transposed(context: &ComputeContext, x: &Tensor) -> Result<(Tensor, Block)> {
    let turned = exchange(x)?;
    let (place, block) = padded_place(context, &turned)?;
    let done = match context.backend() {
        ContextBackend::Cuda(cuda) => on_cuda(cuda, x, &place)?,
        ContextBackend::Cpu { .. } => false,
    };
    if !done {
        // SAFETY: both are valid for their layouts; the new block overlaps nothing.
        unsafe { copy_unchecked(context, &turned, &place) }?;
    }
    Ok((place, block))
}

/// Returns a view of the same memory with the last two axes exchanged.
fn exchange(x: &Tensor) -> Result<Tensor> {
    let (mut shape, mut strides) = ([0i64; 3], [0i64; 3]);
    let rank = x.shape().len();
    for (index, (&size, &stride)) in x.shape().iter().zip(x.strides().iter()).enumerate() {
        let to = match rank - index {
            1 => index - 1,
            2 => index + 1,
            _ => index,
        };
        if let (Some(to_size), Some(to_stride)) = (shape.get_mut(to), strides.get_mut(to)) {
            (*to_size, *to_stride) = (size, stride);
        }
    }
    let shape = shape.get(..rank).unwrap_or_default();
    let strides = strides.get(..rank).unwrap_or_default();
    let (element, device) = (x.element(), x.device());
    // SAFETY: the same elements in another order.
    unsafe { Tensor::from_raw(x.data(), element, device, shape, Some(strides), "a transpose") }
}

/// Transposes by the kernel of `csrc/ops/transpose/transpose.cu`; returns false for layouts that it
/// does not take.
fn on_cuda(cuda: &CudaContext, x: &Tensor, y: &Tensor) -> Result<bool> {
    const TILE: u64 = 64;
    let (rows, columns) = matrix_sizes(x, false);
    let steps = |tensor: &Tensor| {
        let mut strides = tensor.strides().iter().rev().copied();
        let last = strides.next().unwrap_or(1);
        (last, strides.next().unwrap_or(0), strides.next().unwrap_or(0))
    };
    let ((x_last, x_row, x_batch), (_, y_row, y_batch)) = (steps(x), steps(y));
    let batch = batch_size(x).unwrap_or(1);
    let blocks = ((columns as u64).div_ceil(TILE), (rows as u64).div_ceil(TILE));
    if x_last != 1 || blocks.1 > 65_535 || batch > 65_535 || rows.max(columns) > 1 << 30 {
        return Ok(false);
    }
    let is_even = [rows, columns, x_row, x_batch, y_row, y_batch].iter().all(|n| n % 2 == 0);
    let kernel = match x.element().size_bytes() {
        4 => kernels::TRANSPOSE_B4,
        _ if is_even && (x.data() as usize).is_multiple_of(4) => kernels::TRANSPOSE_B2,
        _ => kernels::TRANSPOSE_B2_SCALAR,
    };
    let launch = Launch {
        grid: (blocks.0 as u32, blocks.1 as u32, batch as u32),
        block: 256,
        shared_bytes: 0,
    };
    let arguments = Arguments::new()
        .tensor(y)
        .tensor(x)
        .i32(rows as i32)
        .i32(columns as i32)
        .i64(y_batch)
        .i64(x_batch)
        .i64(y_row)
        .i64(x_row);
    // SAFETY: the arguments of the kernel; y has room for the transpose of each matrix of x.
    unsafe { cuda.launch(kernel, launch, arguments) }?;
    Ok(true)
}
