//! Copies between tensors.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::guard_work;
use super::status::xserv_status;
use super::tensor::{tensor_argument, xserv_tensor};
use crate::ops;

/// Copies a tensor: target = source, bit for bit, between layouts (making a view contiguous,
/// filling a slice) and, on a CUDA context, between host and device in either direction. A copy
/// from or to the host has finished when the call returns.
///
/// source, target: the same shape and dtype, any strides. They must be the same view or share no
/// memory.
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_copy(
    context: *const xserv_context,
    source: *const xserv_tensor,
    target: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (source, target) =
            unsafe { (tensor_argument(source, "source")?, tensor_argument(target, "target")?) };
        ops::copy::copy(context_of(context)?.get()?, &source, &target)
    })
}
