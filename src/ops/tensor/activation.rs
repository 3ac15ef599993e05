//! Activations, in f32 and rounded once:
//! `silu(x) = x / (1 + e^-x)`, `silu_mul(gate, up) = silu(gate) * up` (Shazeer, 2020, SwiGLU),
//! `gelu(x) = x/2 (1 + erf(x / sqrt 2))` and GPT-2's `gelu_tanh(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715
//! x^3)))` (Hendrycks and Gimpel, 2016).
//!
//! x, gate, up, out: one shape, one floating-point type. No finite x gives a NaN; minus infinity does, as
//! in PyTorch.

use super::check::{self, InPlace};
use super::staging::{contiguous, host_slice, host_slice_mut, input, input_beside, output};
use super::{fits_rows, kernel_name, num_blocks, row_layout, rows_are_vectors, with_storage};
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::{Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, RowLayout, Tensor};
use crate::ops::host::{self, Activation};
use std::sync::atomic::{AtomicBool, Ordering};

/// `out = function(x)`, see the head of the file. `out` may be the same view as `x`.
pub fn activation(
    context: &ComputeContext,
    function: Activation,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (x_named, out_named) = (("x", x), ("out", out));
    let dtype = check::float(x_named)?;
    check::same_type(&[x_named, out_named])?;
    check::same_shape(&[x_named, out_named])?;
    check::reachable(context, &[x_named, out_named])?;
    check::result(out_named, &[x_named], InPlace::Allowed)?;
    if x.is_empty() {
        return Ok(());
    }
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let place = output(context, out, contiguous)?;
            if x.is_same_view(&place.tensor) {
                with_storage!(dtype, T => {
                    // SAFETY: a contiguous tensor of T on the host, input and result at once.
                    let x = unsafe { host_slice_mut::<T>(&place.tensor) };
                    host::activation_in_place(backend, function, x)
                })?;
            } else {
                let x = input(context, x, contiguous)?;
                with_storage!(dtype, T => {
                    // SAFETY: contiguous tensors of T on the host; the result overlaps no input.
                    let (x, out) =
                        unsafe { (host_slice::<T>(&x.tensor), host_slice_mut::<T>(&place.tensor)) };
                    host::activation(backend, function, x, out)
                })?;
            }
            place.finish(context)
        }
        ContextBackend::Cuda(cuda) => {
            let x = input(context, x, contiguous)?;
            let place = output(context, out, contiguous)?;
            on_cuda(cuda, dtype, function, &x.tensor, &place.tensor)?;
            place.finish(context)
        }
    }
}

fn on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    function: Activation,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let elements = x.num_elements();
    let aligned = [x, out].iter().all(|tensor| (tensor.data() as usize).is_multiple_of(16));
    let name = match (function, aligned) {
        (Activation::GeluTanh, true) => kernel_name!("gelu_tanh_vec", dtype),
        (Activation::GeluTanh, false) => kernel_name!("gelu_tanh_scalar", dtype),
        (Activation::GeluErf, true) => kernel_name!("gelu_erf_vec", dtype),
        (Activation::GeluErf, false) => kernel_name!("gelu_erf_scalar", dtype),
        (Activation::Silu, true) => kernel_name!("silu_vec", dtype),
        (Activation::Silu, false) => kernel_name!("silu_scalar", dtype),
    };
    let vector = 16 / dtype.size_bytes() as i64;
    let (block, per_thread) = match (aligned, function) {
        (false, _) => (256, 1),
        (true, Activation::GeluErf) => (128, 2 * vector),
        (true, _) => (128, vector),
    };
    let grid = num_blocks(elements, i64::from(block) * per_thread)
        .ok_or_else(|| Error::unsupported(format!("{elements} elements are too many")))?;
    let arguments = Arguments::new().tensor(out).tensor(x).i64(elements);
    // SAFETY: the arguments of xserv_<function>_vec and _scalar; both are contiguous.
    unsafe { cuda.launch("activation", name, Launch::linear(grid, block), arguments) }
}

/// `out = silu(gate) * up`, see the head of the file. `out` may be the same view as `gate` or `up`. Rows of
/// any distance, such as those of the halves of a fused projection, are read in place.
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
                // SAFETY: tensors of T on the host, with rows; the result shares no element with an input.
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

/// True for tensors whose rows all have the same distance.
pub(super) fn one_stride(tensor: &Tensor) -> bool {
    row_layout(tensor).is_ok_and(|rows| rows.inner == 1)
}

/// The start of a row.
pub(super) fn row_start<T>(tensor: &Tensor, rows: &RowLayout, row: usize) -> *mut T {
    let (row, inner) = (row as i64, rows.inner.max(1));
    let offset = (row / inner) * rows.outer_stride + (row % inner) * rows.inner_stride;
    tensor.data().cast::<T>().wrapping_add(offset as usize)
}

/// # Safety
/// Tensors with rows, of T, on the host, of the same shape; those of `out` overlap nothing.
unsafe fn silu_mul_on_host<T: host::Storage>(
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
        return host::silu_mul(backend, gate, width, up, width, width, out);
    }
    let failed = AtomicBool::new(false);
    backend.parallel_tokens(num_rows, width, |rows| {
        for row in rows {
            // SAFETY: row < num_rows; elements of the tensors, by contract. Each row is given out once.
            let (gate, up, out) = unsafe {
                (
                    std::slice::from_raw_parts(row_start::<T>(gate, &gate_rows, row), width),
                    std::slice::from_raw_parts(row_start::<T>(up, &up_rows, row), width),
                    std::slice::from_raw_parts_mut(row_start::<T>(out, &out_rows, row), width),
                )
            };
            if host::silu_mul(backend, gate, width, up, width, width, out).is_err() {
                failed.store(true, Ordering::Relaxed);
            }
        }
    })?;
    match failed.into_inner() {
        true => Err(Error::internal("silu_mul: a row failed")),
        false => Ok(()),
    }
}

fn silu_mul_on_cuda(
    cuda: &CudaContext,
    dtype: DType,
    gate: &Tensor,
    up: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let too_many = || Error::unsupported(format!("shape {} is too large", out.shape()));
    let (num_rows, width) = (out.num_elements() / out.width(), out.width());
    let is_vector = [gate, up, out].iter().all(|tensor| rows_are_vectors(tensor));
    let (name, per_access) = match is_vector {
        true => (kernel_name!("silu_mul_vec", dtype), 16 / dtype.size_bytes() as i64),
        false => (kernel_name!("silu_mul_scalar", dtype), 1),
    };
    let accesses = width / per_access;
    let block = (accesses.clamp(1, 256) as u32).next_multiple_of(32);
    let rows = num_blocks(num_rows, 1).ok_or_else(too_many)?;
    // The kernel goes on with what is left of wider rows.
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
    // SAFETY: the arguments of xserv_silu_mul_vec and _scalar; the strides lead to the rows of each.
    unsafe { cuda.launch("activation", name, launch, arguments) }
}
