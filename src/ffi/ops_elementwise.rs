//! Operators on single elements: activations, add, mul, cast; and transpose.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::guard_work;
use super::status::xserv_status;
use super::tensor::{tensor_argument, xserv_tensor};
use crate::ops;
use crate::ops::activation::cpu::Activation;

/// Computes out = x/2 (1 + erf(x / sqrt(2))), the exact GELU (Hendrycks and Gimpel, 2016), in f32,
/// rounded once.
///
/// x, out: the same shape, any strides; all f32, all f16 or all bf16. out may be the same view as
/// x; otherwise they share no memory. Plus infinity stays; minus infinity and NaN give NaN, and no
/// finite x does.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_gelu(
    context: *const xserv_context,
    x: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, out) = unsafe { (tensor_argument(x, "x")?, tensor_argument(out, "out")?) };
        ops::activation::activation(context_of(context)?.get()?, Activation::GeluErf, &x, &out)
    })
}

/// Computes out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU (Hendrycks and
/// Gimpel, 2016), in f32, rounded once.
///
/// x, out: the same shape, any strides; all f32, all f16 or all bf16. out may be the same view as
/// x; otherwise they share no memory. Plus infinity stays; minus infinity and NaN give NaN, and no
/// finite x does.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_gelu_tanh(
    context: *const xserv_context,
    x: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, out) = unsafe { (tensor_argument(x, "x")?, tensor_argument(out, "out")?) };
        ops::activation::activation(context_of(context)?.get()?, Activation::GeluTanh, &x, &out)
    })
}

/// Computes SiLU, out = x / (1 + exp(-x)), in f32, rounded once.
///
/// x, out: the same shape, any strides; all f32, all f16 or all bf16. out may be the same view as
/// x; otherwise they share no memory. Plus infinity stays; minus infinity and NaN give NaN, and no
/// finite x does.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_silu(
    context: *const xserv_context,
    x: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, out) = unsafe { (tensor_argument(x, "x")?, tensor_argument(out, "out")?) };
        ops::activation::activation(context_of(context)?.get()?, Activation::Silu, &x, &out)
    })
}

/// Computes out = silu(gate) * up, the gated activation of SwiGLU (Shazeer, 2020), in f32, rounded
/// once.
///
/// gate, up, out: the same shape [..., width], any strides; all f32, all f16 or all bf16. gate and
/// up may be the two halves of one fused tensor [..., 2 * width]: rows at any distance are read in
/// place. out may be the same view as gate or as up; otherwise it shares no memory with them.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_silu_mul(
    context: *const xserv_context,
    gate: *const xserv_tensor,
    up: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (gate, up, out) = unsafe {
            (
                tensor_argument(gate, "gate")?,
                tensor_argument(up, "up")?,
                tensor_argument(out, "out")?,
            )
        };
        ops::silu_mul::silu_mul(context_of(context)?.get()?, &gate, &up, &out)
    })
}

/// Computes out = a + b in f32, rounded once.
///
/// a, b, out: the same shape, any strides; all f32, all f16 or all bf16. A stride of 0 in a or b
/// broadcasts it along that dimension. out may be the same view as a or as b; otherwise it shares
/// no memory with them.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_add(
    context: *const xserv_context,
    a: *const xserv_tensor,
    b: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (a, b, out) = unsafe {
            (tensor_argument(a, "a")?, tensor_argument(b, "b")?, tensor_argument(out, "out")?)
        };
        ops::elementwise::add(context_of(context)?.get()?, &a, &b, &out)
    })
}

/// Computes out = a * b in f32, rounded once.
///
/// a, b, out: the same shape, any strides; all f32, all f16 or all bf16. A stride of 0 in a or b
/// broadcasts it along that dimension. out may be the same view as a or as b; otherwise it shares
/// no memory with them.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_mul(
    context: *const xserv_context,
    a: *const xserv_tensor,
    b: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (a, b, out) = unsafe {
            (tensor_argument(a, "a")?, tensor_argument(b, "b")?, tensor_argument(out, "out")?)
        };
        ops::elementwise::mul(context_of(context)?.get()?, &a, &b, &out)
    })
}

/// Converts a tensor to another element type: target = source, rounded to nearest even. Values too
/// large for f16 become infinite, NaN stays NaN. Between equal types it is a copy, bit for bit.
///
/// source, target: the same shape, any strides; f32, f16 or bf16 each. They share no memory;
/// tensors of equal types may be the same view.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_cast(
    context: *const xserv_context,
    source: *const xserv_tensor,
    target: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (source, target) =
            unsafe { (tensor_argument(source, "source")?, tensor_argument(target, "target")?) };
        ops::elementwise::cast(context_of(context)?.get()?, &source, &target)
    })
}

/// Swaps the last two dimensions, bit for bit: out[..., c, r] = x[..., r, c].
///
/// x: [..., rows, columns], out: [..., columns, rows], at least two dimensions, of any one element
/// type, any strides. They share no memory.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_transpose(
    context: *const xserv_context,
    x: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, out) = unsafe { (tensor_argument(x, "x")?, tensor_argument(out, "out")?) };
        ops::transpose::transpose(context_of(context)?.get()?, &x, &out)
    })
}
