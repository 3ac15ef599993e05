//! Operators on rows: norms and softmax.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::guard_work;
use super::status::xserv_status;
use super::tensor::{optional_tensor, tensor_argument, xserv_tensor};
use crate::ops;

/// Computes root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019): out
/// = x / sqrt(mean(x^2) + eps) * weight, in f32, rounded once.
///
/// x, out: [..., width], any strides; weight: [width]; all f32, all f16 or all bf16. eps: at least
/// 0. out may be the same view as x, and shares no memory with the others.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_rms_norm(
    context: *const xserv_context,
    x: *const xserv_tensor,
    weight: *const xserv_tensor,
    eps: f32,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, weight, out) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(weight, "weight")?,
                tensor_argument(out, "out")?,
            )
        };
        ops::rms_norm::rms_norm(context_of(context)?.get()?, &x, &weight, eps, &out)
    })
}

/// Computes a residual addition and the root-mean-square normalisation of its result in one pass:
/// residual_out = x + residual, rounded to the element type; out = xserv_op_rms_norm of
/// residual_out.
///
/// x, residual, residual_out, out: [..., width], any strides; weight: [width]; all f32, all f16 or
/// all bf16. eps: at least 0. residual_out may be the same view as residual or as x; out may be the
/// same view as x, if residual_out is not. Otherwise the results share no memory with anything.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_add_rms_norm(
    context: *const xserv_context,
    x: *const xserv_tensor,
    residual: *const xserv_tensor,
    weight: *const xserv_tensor,
    eps: f32,
    residual_out: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, residual, weight, residual_out, out) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(residual, "residual")?,
                tensor_argument(weight, "weight")?,
                tensor_argument(residual_out, "residual_out")?,
                tensor_argument(out, "out")?,
            )
        };
        let tensors = ops::rms_norm::AddRmsNorm {
            x: &x,
            residual: &residual,
            weight: &weight,
            residual_out: &residual_out,
            out: &out,
        };
        ops::rms_norm::add_rms_norm(context_of(context)?.get()?, tensors, eps)
    })
}

/// Computes layer normalisation over the last dimension (Ba, Kiros and Hinton, 2016): out = (x -
/// mean(x)) / sqrt(var(x) + eps) * weight + bias with the population variance, in f32, rounded
/// once. A mean that is large compared with the deviations costs no accuracy.
///
/// x, out: [..., width], any strides; weight, bias: [width], bias may be NULL for none; all f32,
/// all f16 or all bf16. eps: at least 0. out may be the same view as x, and shares no memory with
/// the others.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_layer_norm(
    context: *const xserv_context,
    x: *const xserv_tensor,
    weight: *const xserv_tensor,
    bias: *const xserv_tensor,
    eps: f32,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, weight, bias, out) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(weight, "weight")?,
                optional_tensor(bias, "bias")?,
                tensor_argument(out, "out")?,
            )
        };
        let context = context_of(context)?;
        ops::layer_norm::layer_norm(context.get()?, &x, &weight, bias.as_ref(), eps, &out)
    })
}

/// Computes the softmax over the last dimension: out_i = exp(x_i - max(x)) / sum_j exp(x_j -
/// max(x)), in f32, rounded once. A row of -infinity only (everything masked) gives zeros; a NaN or
/// +infinity makes its row NaN.
///
/// x, out: [..., width], any strides; both f32, both f16 or both bf16. out may be the same view as
/// x.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_softmax(
    context: *const xserv_context,
    x: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (x, out) = unsafe { (tensor_argument(x, "x")?, tensor_argument(out, "out")?) };
        ops::softmax::softmax(context_of(context)?.get()?, &x, &out)
    })
}
