//! Devices and compute contexts, in which the operators of this library run on their own.

#![allow(non_camel_case_types)]

use std::ffi::c_void;
use std::sync::Arc;

use super::guard::{
    guard, guard_or, guard_work, init_struct, read_struct, write_struct, GrowingStruct, Out,
};
use super::handle::HandleTable;
use super::status::xserv_status;
use super::types::xserv_device_kind;
use crate::backend::cuda::{num_cuda_devices, CudaDeviceInfo, StreamChoice};
use crate::backend::ComputeContext;
use crate::error::{Error, ErrorKind, Result};
use crate::process::Process;

/// A compute context: a device, a stream of work on it, and the memory that the work uses. It
/// serves the operators xserv_op_*; models have contexts of their own.
///
/// On the CPU an operator has finished when its function returns. On CUDA it has queued its work on
/// the context's stream: xserv_context_synchronize() waits for it, and reports what went wrong in
/// it. Calls from several threads on one context are safe and queue in the order of their arrival;
/// contexts are independent of each other.
pub struct xserv_context {
    _private: [u8; 0],
}

/// How to make a context. Fill with xserv_context_options_default() first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_context_options {
    /// sizeof(xserv_context_options); set by xserv_context_options_default().
    pub struct_size: usize,
    /// An xserv_device_kind. XSERV_DEVICE_AUTO, the default, takes CUDA where it can be used.
    pub device_kind: u32,
    /// The index among the devices of that kind; default 0.
    pub device_index: u32,
    /// CUDA: 1 to queue work on the caller's `stream`, 0 (the default) for a stream of the
    /// context's own.
    pub use_stream: u32,
    /// CPU: the number of threads, the calling one included, at most 1024; 0 (default): one for each
    /// core that the process may run on.
    pub num_threads: u32,
    /// CUDA with use_stream: a cudaStream_t (CUstream) of the device's primary context, which is
    /// the one that the CUDA runtime, PyTorch and CuPy use; NULL is the default stream. Must
    /// outlive the context.
    pub stream: *mut c_void,
    /// The most bytes of device memory that the context may hold for owned tensors and workspaces;
    /// 0 (default): no limit but that of the device.
    pub max_memory_bytes: u64,
}

// SAFETY: repr(C), struct_size first, numbers and a pointer that is never followed.
unsafe impl GrowingStruct for xserv_context_options {
    const SIZES: &'static [usize] = &[40];
    const NAME: &'static str = "xserv_context_options";
    const HOW: &'static str = "fill it with xserv_context_options_default()";

    fn defaults() -> Self {
        xserv_context_options {
            struct_size: size_of::<Self>(),
            device_kind: xserv_device_kind::XSERV_DEVICE_AUTO as u32,
            device_index: 0,
            use_stream: 0,
            num_threads: 0,
            stream: std::ptr::null_mut(),
            max_memory_bytes: 0,
        }
    }
}

/// Statistics of a context's allocator. Set struct_size to the sizeof the struct before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_memory_stats {
    /// sizeof(xserv_memory_stats), set by the caller.
    pub struct_size: usize,
    /// Bytes in use by owned tensors and by work under way, rounded up to the allocator's classes.
    pub allocated: u64,
    /// Bytes taken from the driver or the system: in use, or kept for later allocations.
    pub reserved: u64,
    /// The most that `allocated` has been.
    pub peak: u64,
    /// The most that `reserved` may become; 0: no limit but that of the device.
    pub max_memory_bytes: u64,
    /// The number of calls that took memory from the driver or the system or gave it back. A loop
    /// of same-shaped work leaves it unchanged after its first round.
    pub num_driver_calls: u64,
    /// The number of allocations asked of the allocator.
    pub num_allocations: u64,
}

// SAFETY: repr(C), struct_size first, numbers.
unsafe impl GrowingStruct for xserv_memory_stats {
    const SIZES: &'static [usize] = &[56];
    const NAME: &'static str = "xserv_memory_stats";
    const HOW: &'static str = "set it to sizeof(xserv_memory_stats)";

    fn defaults() -> Self {
        xserv_memory_stats {
            struct_size: size_of::<Self>(),
            allocated: 0,
            reserved: 0,
            peak: 0,
            max_memory_bytes: 0,
            num_driver_calls: 0,
            num_allocations: 0,
        }
    }
}

/// The properties of a device. Set struct_size to the sizeof the struct before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_device_info {
    /// sizeof(xserv_device_info), set by the caller.
    pub struct_size: usize,
    /// Bytes of memory of the device.
    pub memory_bytes: u64,
    /// Bytes of its second-level cache.
    pub l2_bytes: u64,
    /// CUDA: the compute capability, such as 9 and 0.
    pub compute_capability_major: u32,
    /// See compute_capability_major.
    pub compute_capability_minor: u32,
    /// CUDA: the number of multiprocessors.
    pub num_multiprocessors: u32,
    /// Always 0.
    pub reserved: u32,
    /// The name of the device, NUL-terminated, for example "NVIDIA H200".
    pub name: [u8; 256],
}

// SAFETY: repr(C), struct_size first, numbers.
unsafe impl GrowingStruct for xserv_device_info {
    const SIZES: &'static [usize] = &[296];
    const NAME: &'static str = "xserv_device_info";
    const HOW: &'static str = "set it to sizeof(xserv_device_info)";

    fn defaults() -> Self {
        xserv_device_info {
            struct_size: size_of::<Self>(),
            memory_bytes: 0,
            l2_bytes: 0,
            compute_capability_major: 0,
            compute_capability_minor: 0,
            num_multiprocessors: 0,
            reserved: 0,
            name: [0; 256],
        }
    }
}

/// A context and the process that made it: its threads and its CUDA state do not exist in a forked
/// child.
pub(super) struct ContextObject {
    context: ComputeContext,
    process: Process,
}

static CONTEXTS: HandleTable<ContextObject> = HandleTable::new(8, "context");

impl ContextObject {
    /// Returns the context, if this is the process that made it.
    pub(super) fn get(&self) -> Result<&ComputeContext> {
        if self.process.is_current() {
            Ok(&self.context)
        } else {
            Err(Error::new(
                ErrorKind::Forked,
                "the process was forked after the context was made; make a new one in the child",
            ))
        }
    }
}

pub(super) fn context_of(context: *const xserv_context) -> Result<Arc<ContextObject>> {
    CONTEXTS.get(context)
}

/// Returns the number of usable CUDA devices: 0 without a driver, and in a library built without
/// CUDA kernels.
#[no_mangle]
pub extern "C" fn xserv_cuda_device_count() -> u32 {
    guard_or(0, || Ok(num_cuda_devices().max(0) as u32))
}

/// Describes a CUDA device, without starting anything on it. If CUDA cannot be used, the message of
/// XSERV_STATUS_NO_DEVICE says what is missing.
///
/// info: its struct_size must be set.
///
/// # Safety
/// `info` is writable for the size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_cuda_device_get_info(
    device_index: u32,
    info: *mut xserv_device_info,
) -> xserv_status {
    guard(|| {
        let found = CudaDeviceInfo::of(i32::try_from(device_index).unwrap_or(i32::MAX))?;
        let mut value = xserv_device_info {
            memory_bytes: found.memory_bytes as u64,
            l2_bytes: found.l2_bytes as u64,
            compute_capability_major: found.compute_capability.0 as u32,
            compute_capability_minor: found.compute_capability.1 as u32,
            num_multiprocessors: found.num_multiprocessors as u32,
            ..xserv_device_info::defaults()
        };
        for (to, from) in value.name.iter_mut().take(255).zip(found.name.bytes()) {
            *to = from;
        }
        // SAFETY: by the contract above.
        unsafe { write_struct(info, "info", &value) }
    })
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_context_options) of the header that the program is built with; no byte
/// beyond it is written. xserv_context_options_default() passes it. Does nothing if options is
/// NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_context_options_init(
    options: *mut xserv_context_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Makes a context. options may be NULL for the defaults: CUDA where it can be used, else the CPU.
///
/// Free with xserv_context_free(). Owned tensors of the context keep alive what they need.
///
/// Errors: XSERV_STATUS_NO_DEVICE (the message says what is missing), XSERV_STATUS_UNSUPPORTED (a
/// GPU before compute capability 8.0), XSERV_STATUS_INVALID_ARGUMENT, XSERV_STATUS_OUT_OF_MEMORY.
///
/// # Safety
/// `options` is NULL or readable for its struct_size; its stream is a stream; `context` is
/// writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_context_new(
    options: *const xserv_context_options,
    context: *mut *mut xserv_context,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (options, out) =
            unsafe { (read_struct(options, "options")?, Out::new(context, "context")?) };
        let made = make_context(&options)?;
        out.set(
            CONTEXTS
                .insert(Arc::new(ContextObject { context: made, process: Process::current() }))?,
        );
        Ok(())
    })
}

/// Makes the context that options describe.
pub(super) fn make_context(options: &xserv_context_options) -> Result<ComputeContext> {
    let is = |kind: xserv_device_kind| options.device_kind == kind as u32;
    let wants_cuda = match () {
        _ if is(xserv_device_kind::XSERV_DEVICE_CPU) => false,
        _ if is(xserv_device_kind::XSERV_DEVICE_CUDA) => true,
        _ if is(xserv_device_kind::XSERV_DEVICE_AUTO) => num_cuda_devices() > 0,
        _ => {
            return Err(Error::invalid_argument(format!(
                "device_kind is {}, not an xserv_device_kind",
                options.device_kind
            )))
        }
    };
    if options.use_stream > 1 {
        return Err(Error::invalid_argument(format!(
            "use_stream is {}, not 0 or 1",
            options.use_stream
        )));
    }
    let budget = match options.max_memory_bytes {
        0 => usize::MAX,
        bytes => usize::try_from(bytes).unwrap_or(usize::MAX),
    };
    if wants_cuda {
        let index = i32::try_from(options.device_index).unwrap_or(i32::MAX);
        let stream = match options.use_stream {
            0 => StreamChoice::Own,
            _ => StreamChoice::Callers(options.stream as usize),
        };
        return ComputeContext::cuda(index, stream, budget);
    }
    if options.use_stream == 1 {
        return Err(Error::invalid_argument(
            "use_stream is 1, but the context is on the CPU".to_string(),
        ));
    }
    if options.device_index != 0 {
        return Err(Error::new(
            ErrorKind::NoDevice,
            format!("there is no CPU device {}, only 0", options.device_index),
        ));
    }
    let num_threads = match options.num_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n as usize,
    };
    ComputeContext::cpu(num_threads, budget)
}

/// Gives the kind of device that a context works on, an xserv_device_kind.
///
/// # Safety
/// `device_kind` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_context_get_device(
    context: *const xserv_context,
    device_kind: *mut u32,
) -> xserv_status {
    guard(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(device_kind, "device_kind") }?;
        let context = context_of(context)?;
        let kind = match context.get()?.device() {
            crate::memory::Device::Cpu => xserv_device_kind::XSERV_DEVICE_CPU,
            crate::memory::Device::Cuda(_) => xserv_device_kind::XSERV_DEVICE_CUDA,
        };
        out.set(kind as u32);
        Ok(())
    })
}

/// Waits until all work queued on the context's stream is done, and reports what went wrong in it:
/// XSERV_STATUS_DEVICE_LOST, or, once, XSERV_STATUS_INVALID_ARGUMENT for an index that a kernel met
/// and did not follow (a token id outside the table, a position outside the table of angles, a
/// block outside the cache).
#[must_use]
#[no_mangle]
pub extern "C" fn xserv_context_synchronize(context: *const xserv_context) -> xserv_status {
    guard(|| context_of(context)?.get()?.synchronize())
}

/// Returns memory that the context keeps for later allocations to the driver.
#[must_use]
#[no_mangle]
pub extern "C" fn xserv_context_trim(context: *const xserv_context) -> xserv_status {
    guard(|| {
        context_of(context)?.get()?.trim();
        Ok(())
    })
}

/// Gives statistics of the context's allocator of device memory. stats->struct_size must be set.
///
/// # Safety
/// `stats` is writable for the size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_context_get_memory_stats(
    context: *const xserv_context,
    stats: *mut xserv_memory_stats,
) -> xserv_status {
    guard(|| {
        let context = context_of(context)?;
        let found = context.get()?.memory_stats();
        let value = xserv_memory_stats {
            allocated: found.allocated as u64,
            reserved: found.reserved as u64,
            peak: found.peak as u64,
            max_memory_bytes: if found.budget == usize::MAX { 0 } else { found.budget as u64 },
            num_driver_calls: found.num_driver_calls,
            num_allocations: found.num_allocations,
            ..xserv_memory_stats::defaults()
        };
        // SAFETY: by the contract above.
        unsafe { write_struct(stats, "stats", &value) }
    })
}

/// Frees a context, after waiting for its work; NULL is allowed. Tensors that it made stay valid
/// until they are freed themselves.
#[no_mangle]
pub extern "C" fn xserv_context_free(context: *mut xserv_context) {
    guard_or((), || {
        if let Some(object) = CONTEXTS.remove(context)? {
            if object.get().is_err() {
                // In a forked child neither the threads nor the device state exist, so nothing can
                // be ended.
                std::mem::forget(object);
            }
        }
        Ok(())
    })
}
