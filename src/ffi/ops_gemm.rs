//! Matrix products, their gradients and the gradient check.

#![allow(non_camel_case_types)]

use std::ffi::c_void;

use super::context::{context_of, xserv_context};
use super::guard::{
    array_argument, call_host, checked_size, guard_or, guard_work, init_struct, read_struct,
    write_struct, GrowingStruct,
};
use super::status::xserv_status;
use super::tensor::{optional_tensor, tensor_argument, xserv_tensor};
use crate::error::{Error, ErrorKind, Result};
use crate::ops;
use crate::ops::gemm::{GemmBackend, GemmOptions};
use crate::ops::grad_check::GradCheck;

/// The implementation that computes a matrix product.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_gemm_backend {
    /// The fastest that supports the shape, the types and the device.
    XSERV_GEMM_AUTO = 0,
    /// The plain triple loop, on the CPU and on CUDA: the reference for the others.
    XSERV_GEMM_NAIVE = 1,
    /// CUDA: 32 x 32 tiles in shared memory.
    XSERV_GEMM_TILED = 2,
    /// CUDA: cuBLASLt, where it is installed. f32 is multiplied in f32, never in TF32.
    XSERV_GEMM_CUBLAS = 3,
    /// CUDA: the library's own kernels for the tensor cores, in f16 and bf16.
    XSERV_GEMM_TENSOR_CORE = 4,
    /// CPU: packed panels, SIMD and all threads of the context.
    XSERV_GEMM_BLOCKED = 5,
}

/// How to multiply. Fill with xserv_gemm_options_default() first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_gemm_options {
    /// sizeof(xserv_gemm_options); set by xserv_gemm_options_default().
    pub struct_size: usize,
    /// 1: a holds the transpose of A; 0, the default: A itself.
    pub transpose_a: u32,
    /// 1: b holds the transpose of B, as a weight of torch.nn.Linear does; 0, the default: B
    /// itself.
    pub transpose_b: u32,
    /// Factor of the product; default 1. With 0, a and b are not read.
    pub alpha: f32,
    /// Factor of what c holds; default 0. With 0, c is not read, and may hold NaN.
    pub beta: f32,
    /// An xserv_gemm_backend; default XSERV_GEMM_AUTO.
    pub backend: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: repr(C), struct_size first, numbers.
unsafe impl GrowingStruct for xserv_gemm_options {
    const SIZES: &'static [usize] = &[32];
    const NAME: &'static str = "xserv_gemm_options";
    const HOW: &'static str = "fill it with xserv_gemm_options_default()";

    fn is_reserved_zero(&self) -> bool {
        self.reserved == 0
    }
    fn defaults() -> Self {
        xserv_gemm_options {
            struct_size: size_of::<Self>(),
            transpose_a: 0,
            transpose_b: 0,
            alpha: 1.0,
            beta: 0.0,
            backend: xserv_gemm_backend::XSERV_GEMM_AUTO as u32,
            reserved: 0,
        }
    }
}

fn flag(value: u32, name: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid_argument(format!("{name} is {other}, but must be 0 or 1"))),
    }
}

fn backend_of(number: u32) -> Result<GemmBackend> {
    Ok(match number {
        0 => GemmBackend::Auto,
        1 => GemmBackend::Naive,
        2 => GemmBackend::Tiled,
        3 => GemmBackend::Cublas,
        4 => GemmBackend::TensorCore,
        5 => GemmBackend::Blocked,
        other => {
            return Err(Error::invalid_argument(format!(
                "options.backend is {other}, which is no xserv_gemm_backend"
            )))
        }
    })
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_gemm_options) of the header that the program is built with; no byte beyond it is
/// written. xserv_gemm_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_gemm_options_init(
    options: *mut xserv_gemm_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Computes the matrix product C = alpha * op(A) * op(B) + beta * C, where op(X) is X or its
/// transpose; sums are in f32 and rounded once. (With beta other than 0, cuBLAS may round products of f16
/// and bf16 before it adds beta * C, too.) options may be NULL for C = A * B.
///
/// op(A): [m, k]; op(B): [k, n]; c: [m, n]; all f32, all f16 or all bf16. For a batch of products:
/// c [batch, m, n], a and b of three dimensions with the same batch, or of two for one matrix that
/// is used in all products (as is one with a batch stride of 0). Any strides are allowed; matrices
/// that are contiguous along one of their two axes are used in place, others are copied first. c
/// shares no memory with a or b. With k = 0 the product is zero and c becomes beta * c.
///
/// Errors: XSERV_STATUS_UNSUPPORTED for a backend that this device, machine or element type does
/// not have; XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say; options is NULL or readable for
/// its struct_size.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_gemm(
    context: *const xserv_context,
    options: *const xserv_gemm_options,
    a: *const xserv_tensor,
    b: *const xserv_tensor,
    c: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (options, a, b, c) = unsafe {
            (
                read_struct(options, "options")?,
                tensor_argument(a, "a")?,
                tensor_argument(b, "b")?,
                tensor_argument(c, "c")?,
            )
        };
        let options = GemmOptions {
            transpose_a: flag(options.transpose_a, "options.transpose_a")?,
            transpose_b: flag(options.transpose_b, "options.transpose_b")?,
            alpha: options.alpha,
            beta: options.beta,
            backend: backend_of(options.backend)?,
            ..GemmOptions::default()
        };
        ops::gemm::gemm(context_of(context)?.get()?, &options, &a, &b, &c)
    })
}

/// Computes the gradients of a matrix product C = A * B: da = dc * B^T and db = A^T * dc.
///
/// a, da: [m, k]; b, db: [k, n]; dc: [m, n], the gradient of the loss with respect to C; or all of
/// them with the same leading batch dimension. All f32, all f16 or all bf16; any strides. da or db
/// may be NULL if it is not wanted. They share no memory with the inputs or each other.
///
/// transpose_kernels: 0 multiplies the operands in place, reading them transposed; 1 writes their
/// transposes to memory first. The results are the same up to rounding.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_gemm_backward(
    context: *const xserv_context,
    a: *const xserv_tensor,
    b: *const xserv_tensor,
    dc: *const xserv_tensor,
    transpose_kernels: u32,
    da: *const xserv_tensor,
    db: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (a, b, dc, da, db) = unsafe {
            (
                tensor_argument(a, "a")?,
                tensor_argument(b, "b")?,
                tensor_argument(dc, "dc")?,
                optional_tensor(da, "da")?,
                optional_tensor(db, "db")?,
            )
        };
        let transpose_kernels = flag(transpose_kernels, "transpose_kernels")?;
        let context = context_of(context)?;
        let (da, db) = (da.as_ref(), db.as_ref());
        ops::gemm::gemm_backward(context.get()?, &a, &b, &dc, transpose_kernels, da, db)
    })
}

/// The loss as a function of the values, for xserv_grad_check(). values: [count]. Writes the loss
/// and returns true, or returns false to end the check. Runs on the calling thread, with no lock
/// held, and may call the library.
pub type xserv_loss_callback = Option<
    unsafe extern "C" fn(
        values: *const f32,
        count: usize,
        loss: *mut f64,
        user_data: *mut c_void,
    ) -> bool,
>;

/// How to check a gradient. Fill with xserv_grad_check_options_default() first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_grad_check_options {
    /// sizeof(xserv_grad_check_options); set by xserv_grad_check_options_default().
    pub struct_size: usize,
    /// The distance by which each value is moved in both directions; default 1e-3.
    pub eps: f64,
    /// Tolerance relative to the larger of the two gradients; default 2e-2.
    pub rel_tol: f64,
    /// Absolute tolerance; default 1e-4.
    pub atol: f64,
}

// SAFETY: repr(C), struct_size first, numbers.
unsafe impl GrowingStruct for xserv_grad_check_options {
    const SIZES: &'static [usize] = &[32];
    const NAME: &'static str = "xserv_grad_check_options";
    const HOW: &'static str = "fill it with xserv_grad_check_options_default()";

    fn defaults() -> Self {
        let GradCheck { eps, rel_tol, atol } = GradCheck::default();
        xserv_grad_check_options { struct_size: size_of::<Self>(), eps, rel_tol, atol }
    }
}

/// The result of xserv_grad_check(). Set struct_size to the sizeof the struct before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_grad_check_result {
    /// sizeof(xserv_grad_check_result), set by the caller.
    pub struct_size: usize,
    /// 1 if every element of the gradient is within its tolerance, else 0.
    pub passed: u32,
    /// Always 0.
    pub reserved: u32,
    /// The number of elements that are not within their tolerance.
    pub num_failed: u64,
    /// The element with the largest error in units of its tolerance; 0 if there are none.
    pub worst_index: u64,
    /// Its gradient as passed in `gradient`.
    pub worst_analytic: f64,
    /// Its gradient by differences of the loss.
    pub worst_numeric: f64,
    /// The absolute difference of the two; infinite where one of them is not finite.
    pub worst_error: f64,
}

// SAFETY: repr(C), struct_size first, numbers.
unsafe impl GrowingStruct for xserv_grad_check_result {
    const SIZES: &'static [usize] = &[56];
    const NAME: &'static str = "xserv_grad_check_result";
    const HOW: &'static str = "set it to sizeof(xserv_grad_check_result)";

    fn defaults() -> Self {
        xserv_grad_check_result {
            struct_size: size_of::<Self>(),
            passed: 0,
            reserved: 0,
            num_failed: 0,
            worst_index: 0,
            worst_analytic: 0.0,
            worst_numeric: 0.0,
            worst_error: 0.0,
        }
    }
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_grad_check_options) of the header that the program is built with; no
/// byte beyond it is written. xserv_grad_check_options_default() passes it. Does nothing if options
/// is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_grad_check_options_init(
    options: *mut xserv_grad_check_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Checks an analytic gradient against central differences of a loss, one value at a time:
/// (loss(x + eps) - loss(x - eps)) / (2 eps), with the step as it is stored in f32. An element
/// passes if |analytic - numeric| <= atol + rel_tol * max(|analytic|, |numeric|), and fails if
/// either is not finite.
///
/// options: NULL for the defaults. loss: called 2 * count times, with one value moved each time.
/// values, gradient: [count], host memory, not changed; one copy of values is made. result: its
/// struct_size must be set. A gradient that fails the check is not an error: the call succeeds and
/// result.passed is 0. No device and no context is needed.
///
/// Errors: XSERV_STATUS_CANCELLED if loss returned false; XSERV_STATUS_INVALID_ARGUMENT,
/// XSERV_STATUS_OUT_OF_MEMORY.
///
/// # Safety
/// `values` and `gradient` are readable for `count` values, options is NULL or readable and result
/// writable for its struct_size; `loss` is such a function, and does not unwind.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_grad_check(
    options: *const xserv_grad_check_options,
    loss: xserv_loss_callback,
    user_data: *mut c_void,
    values: *const f32,
    gradient: *const f32,
    count: usize,
    result: *mut xserv_grad_check_result,
) -> xserv_status {
    guard_work(|| {
        let loss = loss.ok_or_else(|| Error::invalid_argument("loss is NULL"))?;
        // SAFETY: by the contract above.
        let (options, values, gradient) = unsafe {
            // Checked before the calls rather than after them.
            checked_size(result.cast_const(), "result")?;
            (
                read_struct(options, "options")?,
                array_argument(values, count, "values")?,
                array_argument(gradient, count, "gradient")?,
            )
        };
        let options = GradCheck { eps: options.eps, rel_tol: options.rel_tol, atol: options.atol };
        let found = ops::grad_check::grad_check(&options, values, gradient, |moved| {
            // If the callback does not write the loss, the check fails.
            let mut value = f64::NAN;
            // SAFETY: the callback's contract; the slice has `count` values.
            let goes_on =
                call_host(|| unsafe { loss(moved.as_ptr(), moved.len(), &mut value, user_data) });
            if goes_on {
                Ok(value)
            } else {
                Err(Error::new(
                    ErrorKind::Cancelled,
                    "the loss callback returned false, so the check ended",
                ))
            }
        })?;
        let value = xserv_grad_check_result {
            passed: u32::from(found.num_failed == 0),
            num_failed: found.num_failed as u64,
            worst_index: found.worst_index as u64,
            worst_analytic: found.worst_analytic,
            worst_numeric: found.worst_numeric,
            worst_error: found.worst_error,
            ..xserv_grad_check_result::defaults()
        };
        // SAFETY: by the contract above.
        unsafe { write_struct(result, "result", &value) }
    })
}
