//! Operators on rows: norms, softmax, argmax, top-k, embedding, rotary embeddings, as C functions.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::guard;
use super::status::xserv_status;
use super::tensor::{tensor_argument, xserv_tensor};
use crate::ops::tensor;

/// Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019):
/// out = x / sqrt(mean(x^2) + eps) * weight, computed in f32 and rounded once.
///
/// x, out: [..., width], any strides; weight: [width]; all f32, all f16 or all bf16. eps: at least 0. out
/// may be the same view as x, and shares no memory with the others.
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
    guard(|| {
        // SAFETY: by the contract above.
        let (x, weight, out) = unsafe {
            (
                tensor_argument(x, "x")?,
                tensor_argument(weight, "weight")?,
                tensor_argument(out, "out")?,
            )
        };
        tensor::rms_norm(context_of(context)?.get()?, &x, &weight, eps, &out)
    })
}
