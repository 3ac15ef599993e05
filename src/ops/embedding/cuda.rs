//! The CUDA half.

use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::launch::{num_blocks, row_layout};

/// Returns the most bytes that the kernel may move at once: rows begin at multiples of it and
/// consist of such units.
fn unit_bytes(table: &Tensor, out: &Tensor) -> Result<i64> {
    let size = table.element().size_bytes() as i64;
    let mut numbers = vec![table.data() as i64, out.data() as i64, table.width() * size];
    for tensor in [table, out] {
        numbers.push(row_layout(tensor)?.outer_stride * size);
    }
    let fits = |unit: &i64| numbers.iter().all(|number| number % unit == 0);
    Ok([16, 4].into_iter().find(fits).unwrap_or(2))
}

pub(in crate::ops) fn on_cuda(
    cuda: &CudaContext,
    table: &Tensor,
    ids: &Tensor,
    ids_are_i64: bool,
    out: &Tensor,
) -> Result<()> {
    /// The number of threads of a block of the kernel.
    const BLOCK: u32 = 128;
    const UNITS: i64 = 2 * BLOCK as i64;
    let too_many = || Error::unsupported(format!("out: shape {} is too large", out.shape()));
    let unit = unit_bytes(table, out)?;
    let size = table.element().size_bytes() as i64;
    let kernel = match (ids_are_i64, unit) {
        (false, 16) => kernels::EMBEDDING_I32_B16,
        (false, 4) => kernels::EMBEDDING_I32_B4,
        (false, _) => kernels::EMBEDDING_I32_B2,
        (true, 16) => kernels::EMBEDDING_I64_B16,
        (true, 4) => kernels::EMBEDDING_I64_B4,
        (true, _) => kernels::EMBEDDING_I64_B2,
    };
    let units = out.width() * size / unit;
    let tokens = num_blocks(ids.num_elements(), 1).ok_or_else(too_many)?;
    let parts = num_blocks(units, UNITS).filter(|&parts| parts <= 65535).ok_or_else(too_many)?;
    let launch = Launch { grid: (tokens, parts, 1), block: BLOCK, shared_bytes: 0 };
    let arguments = Arguments::new()
        .tensor(out)
        .tensor(table)
        .tensor(ids)
        .i64(table.shape().first().copied().unwrap_or(0))
        .i32(units as i32)
        .i64(row_layout(out)?.outer_stride * size / unit)
        .i64(row_layout(table)?.outer_stride * size / unit)
        .pointer(cuda.faults());
    // SAFETY: the arguments of xserv_embedding_*; width and strides are whole units, and the kernel
    // reads no row outside the table.
    unsafe { cuda.launch(kernel, launch, arguments) }
}
