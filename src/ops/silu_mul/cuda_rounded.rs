//! The gate of SwiGLU (Shazeer, 2020), rounded after each step:
//! `out = round(round(silu(gate)) * up)`.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, cuda, float, matrix_size, vector_len};

/// Computes the gated product; see the head of the file. gate_up [num_rows, 2 * width], gate before
/// up; out [num_rows, width].
pub fn silu_mul(context: &ComputeContext, gate_up: &Tensor, out: &Tensor) -> Result<()> {
    let (dtype, (rows, width)) = (float("out", out)?, matrix_size("out", out)?);
    check("gate_up", gate_up, out.element(), &[rows.into(), 2 * i64::from(width)])?;
    if out.is_empty() {
        return Ok(());
    }
    let vector = vector_len(dtype, width, &[gate_up, out]);
    let kernel = match vector {
        1 => kernels::SILU_MUL_ROUNDED_SCALAR.of(dtype),
        _ => kernels::SILU_MUL_ROUNDED_VEC.of(dtype),
    };
    let accesses = (width / vector) as u32;
    let block = accesses.clamp(1, 256).next_multiple_of(32);
    // The kernel loops over the rest of wider rows.
    let parts = accesses.div_ceil(block).clamp(1, 65535);
    let launch = Launch { grid: (rows, parts, 1), block, shared_bytes: 0 };
    let arguments = Arguments::new().tensor(out).tensor(gate_up).i32(width);
    // SAFETY: the arguments of the kernel; both are contiguous and have the rows that it covers.
    unsafe { cuda(context)?.launch_overlapping(kernel, launch, arguments) }
}
