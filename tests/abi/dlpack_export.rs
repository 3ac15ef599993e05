//! Owned tensors as DLPack managed tensors: who keeps the memory, and how long.

use std::ffi::c_void;
use std::ptr;

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;

/// Returns a context on the CPU.
fn context() -> *mut xserv_context {
    let mut options: xserv_context_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_context_options_init(&mut options, size_of_val(&options)) };
    options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
    options.num_threads = 2;
    let mut context = ptr::null_mut();
    check(unsafe { xserv_context_new(&options, &mut context) }).unwrap();
    context
}

/// Returns a tensor [2, 3] of f32 that holds 0 to 5.
fn tensor(context: *const xserv_context) -> *mut xserv_owned_tensor {
    let (shape, mut tensor) = ([2_i64, 3], ptr::null_mut());
    check(unsafe { xserv_owned_tensor_new(context, 1, 2, shape.as_ptr(), &mut tensor) }).unwrap();
    let view = view(tensor);
    for i in 0..6 {
        unsafe { view.data.cast::<f32>().add(i).write(i as f32) };
    }
    tensor
}

fn view(tensor: *const xserv_owned_tensor) -> xserv_tensor {
    let mut view = unsafe { std::mem::zeroed() };
    check(unsafe { xserv_owned_tensor_view(tensor, &mut view) }).unwrap();
    view
}

fn allocated(context: *const xserv_context) -> u64 {
    let mut stats: xserv_memory_stats = unsafe { std::mem::zeroed() };
    stats.struct_size = size_of_val(&stats);
    check(unsafe { xserv_context_get_memory_stats(context, &mut stats) }).unwrap();
    stats.allocated
}

fn export(tensor: *const xserv_owned_tensor) -> *mut xserv_managed_tensor {
    let mut managed = ptr::null_mut();
    check(unsafe { xserv_owned_tensor_to_dlpack(tensor, &mut managed) }).unwrap();
    managed
}

fn export_versioned(
    tensor: *const xserv_owned_tensor,
    flags: u64,
) -> *mut xserv_managed_tensor_versioned {
    let mut managed = ptr::null_mut();
    check(unsafe { xserv_owned_tensor_to_dlpack_versioned(tensor, flags, &mut managed) }).unwrap();
    managed
}

/// Returns the elements, shape and strides that a consumer finds.
fn found(tensor: &xserv_tensor) -> (Vec<f32>, Vec<i64>, Vec<i64>) {
    let rank = tensor.ndim as usize;
    unsafe {
        (
            std::slice::from_raw_parts(tensor.data.cast(), 6).to_vec(),
            std::slice::from_raw_parts(tensor.shape, rank).to_vec(),
            std::slice::from_raw_parts(tensor.strides, rank).to_vec(),
        )
    }
}

/// A pointer that another thread may use.
struct Sent(*mut c_void);
unsafe impl Send for Sent {}

#[test]
fn an_export_outlives_the_tensor_and_its_context() {
    let expected = ((0..6).map(|i| i as f32).collect(), vec![2, 3], vec![3, 1]);
    let context = context();
    let tensor = tensor(context);
    let (old, versioned) = (export(tensor), export_versioned(tensor, XSERV_DLPACK_READ_ONLY));
    xserv_owned_tensor_free(tensor);
    xserv_context_free(context);
    let (old, versioned) = (Sent(old.cast()), Sent(versioned.cast()));
    let consumer = std::thread::spawn(move || {
        let (old, versioned) = ({ old }.0, { versioned }.0);
        let old = old.cast::<xserv_managed_tensor>();
        let versioned = versioned.cast::<xserv_managed_tensor_versioned>();
        unsafe {
            assert_eq!(found(&(*old).dl_tensor), expected);
            (*old).deleter.unwrap()(old);
            assert_eq!(((*versioned).version_major, (*versioned).version_minor), (1, 0));
            assert_eq!((*versioned).flags, XSERV_DLPACK_READ_ONLY);
            assert_eq!(found(&(*versioned).dl_tensor), expected);
            (*versioned).deleter.unwrap()(versioned);
        }
    });
    consumer.join().unwrap();
}

#[test]
fn the_last_deleter_gives_the_memory_back() {
    let context = context();
    let before = allocated(context);
    for _ in 0..3 {
        let tensor = tensor(context);
        let exports = [export_versioned(tensor, 0), export_versioned(tensor, 3)];
        let old = export(tensor);
        let held = allocated(context);
        assert!(held > before);
        xserv_owned_tensor_free(tensor);
        assert_eq!(allocated(context), held);
        unsafe { (*old).deleter.unwrap()(old) };
        for managed in exports {
            assert_eq!(allocated(context), held);
            unsafe { (*managed).deleter.unwrap()(managed) };
        }
        assert_eq!(allocated(context), before);
    }
    let empty = unsafe { free_nothing(context) };
    assert!(empty.is_null());
    xserv_context_free(context);
}

/// Exports a tensor without elements; returns its data.
unsafe fn free_nothing(context: *const xserv_context) -> *mut c_void {
    let (shape, mut tensor) = ([0_i64], ptr::null_mut());
    check(unsafe { xserv_owned_tensor_new(context, 1, 1, shape.as_ptr(), &mut tensor) }).unwrap();
    let managed = export(tensor);
    xserv_owned_tensor_free(tensor);
    let data = unsafe { (*managed).dl_tensor.data };
    unsafe { (*managed).deleter.unwrap()(managed) };
    data
}

#[test]
fn deleters_take_null() {
    let context = context();
    let tensor = tensor(context);
    let (old, versioned) = (export(tensor), export_versioned(tensor, 0));
    unsafe {
        (*old).deleter.unwrap()(ptr::null_mut());
        (*versioned).deleter.unwrap()(ptr::null_mut());
        (*old).deleter.unwrap()(old);
        (*versioned).deleter.unwrap()(versioned);
    }
    xserv_owned_tensor_free(tensor);
    xserv_context_free(context);
}

#[test]
fn wrong_arguments_are_refused() {
    let context = context();
    let tensor = tensor(context);
    let mut managed = ptr::null_mut();
    let status = unsafe { xserv_owned_tensor_to_dlpack_versioned(tensor, 4, &mut managed) };
    assert_eq!((status, managed.is_null()), (XSERV_STATUS_INVALID_ARGUMENT, true));
    assert!(last_error().contains("flags is 4"), "{}", last_error());
    let status = unsafe { xserv_owned_tensor_to_dlpack(tensor, ptr::null_mut()) };
    assert_eq!(status, XSERV_STATUS_INVALID_ARGUMENT);
    xserv_owned_tensor_free(tensor);
    let mut managed = ptr::null_mut();
    let status = unsafe { xserv_owned_tensor_to_dlpack(tensor, &mut managed) };
    assert_eq!((status, managed.is_null()), (XSERV_STATUS_BAD_HANDLE, true));
    xserv_context_free(context);
}
