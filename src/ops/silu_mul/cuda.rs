//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::launch::{num_blocks, row_layout, rows_are_vectors};

pub(in crate::ops) fn silu_mul_on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    gate: &Tensor,
    up: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let too_many = || Error::unsupported(format!("shape {} is too large", out.shape()));
    let (num_rows, width) = (out.num_elements() / out.width(), out.width());
    let is_vector = [gate, up, out].iter().all(|tensor| rows_are_vectors(tensor));
    let (kernel, per_access) = if is_vector {
        (kernels::SILU_MUL_VEC.of(dtype), 16 / dtype.size_bytes() as i64)
    } else {
        (kernels::SILU_MUL_SCALAR.of(dtype), 1)
    };
    let accesses = width / per_access;
    let block = (accesses.clamp(1, 256) as u32).next_multiple_of(32);
    let rows = num_blocks(num_rows, 1).ok_or_else(too_many)?;
    // The kernel loops over the rest of wider rows.
    let parts = num_blocks(accesses, i64::from(block)).ok_or_else(too_many)?.min(1024);
    let grid = num_blocks(i64::from(rows) * i64::from(parts), 1).ok_or_else(too_many)?;
    let launch = Launch::linear(grid, block);
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(gate)
        .tensor(up)
        .i32(i32::try_from(width).map_err(|_| too_many())?)
        .i32(parts as i32)
        .i64(row_layout(out)?.outer_stride)
        .i64(row_layout(gate)?.outer_stride)
        .i64(row_layout(up)?.outer_stride);
    // SAFETY: the arguments of xserv_silu_mul_vec and _scalar; the strides lead to the rows of
    // each.
    unsafe { cuda.launch(kernel, launch, arguments) }
}
