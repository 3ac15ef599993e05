//! The gate of SwiGLU: `silu_mul(gate, up) = silu(gate) * up` (Shazeer, 2020), in f32 and rounded
//! once.
//!
//! gate, up, out: one shape, one floating-point type. No finite gate gives a NaN.

pub mod cpu;
pub mod cpu_stacked;
mod cuda;
pub mod cuda_rounded;

use self::cuda::silu_mul_on_cuda;
use crate::backend::cpu::CpuBackend;
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::launch::one_stride;
use crate::ops::common::launch::row_start;
use crate::ops::common::launch::{fits_rows, with_storage};
use crate::ops::common::staging::{host_slice, host_slice_mut, input, input_beside, output};
use crate::ops::common::storage::Storage;
use std::sync::atomic::{AtomicBool, Ordering};

/// Computes `out = silu(gate) * up`, see the head of the file. `out` may be the same view as `gate`
/// or `up`. Rows at any distance, such as those of the halves of a fused projection, are read in
/// place.
pub fn silu_mul(context: &ComputeContext, gate: &Tensor, up: &Tensor, out: &Tensor) -> Result<()> {
    let (gate_named, up_named, out_named) = (("gate", gate), ("up", up), ("out", out));
    check::has_rows(gate_named)?;
    let dtype = check::float(gate_named)?;
    check::same_type(&[gate_named, up_named, out_named])?;
    check::same_shape(&[gate_named, up_named, out_named])?;
    check::reachable(context, &[gate_named, up_named, out_named])?;
    check::result(out_named, &[gate_named, up_named], InPlace::Allowed)?;
    if out.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let gate = input_beside(context, gate, out, fits_rows)?;
            let up = input_beside(context, up, out, fits_rows)?;
            let place = output(context, out, fits_rows)?;
            with_storage!(dtype, T => {
                // SAFETY: tensors of T on the host, with rows; the result shares no element with an
                // input.
                unsafe { silu_mul_on_host::<T>(backend, &gate.tensor, &up.tensor, &place.tensor) }
            })?;
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let gate = input(context, gate, one_stride)?;
            let up = input(context, up, one_stride)?;
            let place = output(context, out, one_stride)?;
            silu_mul_on_cuda(cuda, dtype, &gate.tensor, &up.tensor, &place.tensor)?;
            place.finish(context)
        }
    }
}

/// # Safety
/// The tensors have rows, are of type T and one shape, and lie on the host; those of `out` overlap
/// nothing.
unsafe fn silu_mul_on_host<T: Storage>(
    backend: &CpuBackend,
    gate: &Tensor,
    up: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let layout = |tensor: &Tensor| {
        tensor.rows().ok_or_else(|| Error::internal("silu_mul: a tensor without rows"))
    };
    let (gate_rows, up_rows, out_rows) = (layout(gate)?, layout(up)?, layout(out)?);
    let (num_rows, width) = (out_rows.num_rows as usize, out_rows.width as usize);
    if [gate, up, out].iter().all(|tensor| tensor.is_contiguous()) {
        // SAFETY: by contract.
        let (gate, up, out) =
            unsafe { (host_slice::<T>(gate), host_slice::<T>(up), host_slice_mut::<T>(out)) };
        return cpu::silu_mul(backend, gate, width, up, width, width, out);
    }
    let failed = AtomicBool::new(false);
    backend.parallel_tokens(num_rows, width, |rows| {
        for row in rows {
            // SAFETY: row < num_rows; elements of the tensors, by contract. Each row is given out
            // once.
            let (gate, up, out) = unsafe {
                (
                    std::slice::from_raw_parts(row_start::<T>(gate, &gate_rows, row), width),
                    std::slice::from_raw_parts(row_start::<T>(up, &up_rows, row), width),
                    std::slice::from_raw_parts_mut(row_start::<T>(out, &out_rows, row), width),
                )
            };
            if cpu::silu_mul(backend, gate, width, up, width, width, out).is_err() {
                failed.store(true, Ordering::Relaxed);
            }
        }
    })?;
    if failed.into_inner() {
        Err(Error::internal("silu_mul: a row failed"))
    } else {
        Ok(())
    }
}
