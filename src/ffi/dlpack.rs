//! Owned tensors as DLPack managed tensors, for other libraries to keep.

#![allow(non_camel_case_types)]

use std::ffi::c_void;
use std::sync::Arc;

use super::guard::{guard_or, guard_work, Out};
use super::status::xserv_status;
use super::tensor::{owned_tensor, view_of, xserv_owned_tensor, xserv_tensor, OwnedTensor};
use crate::error::{Error, Result};

/// Flag of xserv_managed_tensor_versioned: the tensor must not be written to.
pub const XSERV_DLPACK_READ_ONLY: u64 = 1;
/// Flag of xserv_managed_tensor_versioned: the memory is a copy, which nobody else uses.
pub const XSERV_DLPACK_IS_COPIED: u64 = 2;

/// The major version of DLPack that xserv_managed_tensor_versioned is made for.
const MAJOR: u32 = 1;
/// The first minor version of it: nothing newer is used.
const MINOR: u32 = 0;

/// A tensor that another library keeps, as DLPack had it before its version 1.0: the layout of
/// DLManagedTensor. Whoever has it calls its deleter once, from any thread.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_managed_tensor {
    /// The tensor, whose shape and strides live as long as this struct.
    pub dl_tensor: xserv_tensor,
    /// The library's own.
    pub manager_ctx: *mut c_void,
    /// Frees this struct and gives back the memory, from any thread, also after the tensor's handle
    /// and its context were freed.
    pub deleter: Option<unsafe extern "C" fn(managed: *mut xserv_managed_tensor)>,
}

/// A tensor that another library keeps, as DLPack has it from its version 1.0 on: the layout of
/// DLManagedTensorVersioned. Whoever has it calls its deleter once, from any thread.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_managed_tensor_versioned {
    /// DLPack's major version, 1. With another one only `deleter` may be used.
    pub version_major: u32,
    /// DLPack's minor version.
    pub version_minor: u32,
    /// The library's own.
    pub manager_ctx: *mut c_void,
    /// Frees this struct and gives back the memory, from any thread, also after the tensor's handle
    /// and its context were freed.
    pub deleter: Option<unsafe extern "C" fn(managed: *mut xserv_managed_tensor_versioned)>,
    /// XSERV_DLPACK_READ_ONLY and XSERV_DLPACK_IS_COPIED, added up.
    pub flags: u64,
    /// The tensor, whose shape and strides live as long as this struct.
    pub dl_tensor: xserv_tensor,
}

/// A managed tensor and what keeps its memory, shape and strides alive. The managed tensor is first,
/// so that its address is that of the whole.
#[repr(C)]
struct Export<M> {
    managed: M,
    tensor: Arc<OwnedTensor>,
}

/// Frees an export.
///
/// # Safety
/// `managed` is NULL, or the managed tensor of a live `Export<M>`, which nobody uses after this.
unsafe fn free<M>(managed: *mut M) {
    guard_or((), || {
        if managed.is_null() {
            return Ok(());
        }
        // SAFETY: made by `give`, whose first field it is.
        let export = unsafe { Box::from_raw(managed.cast::<Export<M>>()) };
        if export.tensor.is_forked() {
            // In a forked child neither the threads nor the device state exist, so the context cannot
            // be ended.
            std::mem::forget(export);
        }
        Ok(())
    })
}

unsafe extern "C" fn free_managed(managed: *mut xserv_managed_tensor) {
    // SAFETY: the contract of DLPack's deleters.
    unsafe { free(managed) }
}

unsafe extern "C" fn free_versioned(managed: *mut xserv_managed_tensor_versioned) {
    // SAFETY: as above.
    unsafe { free(managed) }
}

/// Makes an export of an owned tensor.
///
/// # Safety
/// `managed` is writable.
unsafe fn give<M>(
    tensor: *const xserv_owned_tensor,
    managed: *mut *mut M,
    make: impl FnOnce(xserv_tensor) -> Result<M>,
) -> Result<()> {
    // SAFETY: by the contract.
    let out = unsafe { Out::new(managed, "managed") }?;
    let tensor = owned_tensor(tensor)?;
    tensor.check_process()?;
    // The object of the view's shape and strides is kept by the export.
    let managed = make(view_of(&tensor))?;
    out.set(Box::into_raw(Box::new(Export { managed, tensor })).cast());
    Ok(())
}

/// Shares the memory of an owned tensor with a library that speaks DLPack before version 1.0
/// (DLManagedTensor, capsules named "dltensor"). Nothing is copied.
///
/// managed: becomes a struct that belongs to the caller, or to whom it is passed on to, and is freed by
/// its own deleter, once, from any thread. It keeps the memory alive: the handle and the context may be
/// freed before it. Any number of them may be made of a tensor.
///
/// Work that writes the tensor has to be done, or be ordered before the other library's work; on CUDA
/// xserv_context_synchronize() waits for it.
///
/// Errors: XSERV_STATUS_BAD_HANDLE, XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_FORKED.
///
/// # Safety
/// `managed` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_owned_tensor_to_dlpack(
    tensor: *const xserv_owned_tensor,
    managed: *mut *mut xserv_managed_tensor,
) -> xserv_status {
    // SAFETY: by the contract above.
    guard_work(|| unsafe {
        give(tensor, managed, |dl_tensor| {
            Ok(xserv_managed_tensor {
                dl_tensor,
                manager_ctx: std::ptr::null_mut(),
                deleter: Some(free_managed),
            })
        })
    })
}

/// Shares the memory of an owned tensor as xserv_owned_tensor_to_dlpack() does, with a library that
/// speaks DLPack from version 1.0 on (DLManagedTensorVersioned, capsules named "dltensor_versioned").
///
/// flags: 0; XSERV_DLPACK_READ_ONLY forbids writing, which the library that gets it has to heed;
/// XSERV_DLPACK_IS_COPIED tells it that nobody else uses the memory; or both, added up.
///
/// Errors: XSERV_STATUS_BAD_HANDLE, XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_FORKED.
///
/// # Safety
/// `managed` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_owned_tensor_to_dlpack_versioned(
    tensor: *const xserv_owned_tensor,
    flags: u64,
    managed: *mut *mut xserv_managed_tensor_versioned,
) -> xserv_status {
    // SAFETY: by the contract above.
    guard_work(|| unsafe {
        give(tensor, managed, |dl_tensor| {
            let known = XSERV_DLPACK_READ_ONLY | XSERV_DLPACK_IS_COPIED;
            if flags & !known != 0 {
                return Err(Error::invalid_argument(format!(
                    "flags is {flags}, but only 1 (read-only), 2 (copied) and their sum are known"
                )));
            }
            Ok(xserv_managed_tensor_versioned {
                version_major: MAJOR,
                version_minor: MINOR,
                manager_ctx: std::ptr::null_mut(),
                deleter: Some(free_versioned),
                flags,
                dl_tensor,
            })
        })
    })
}
