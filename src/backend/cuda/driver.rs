//! The CUDA driver: whether it is installed, and its status codes as errors.

use crate::error::{Error, ErrorKind, Result};
use crate::process::{NoFork, Process};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;
use std::sync::OnceLock;

/// The oldest driver interface that reads what nvcc 13.0 writes (CUDA 13.0, driver 580).
const OLDEST_VERSION: i32 = 13_000;

/// The process that was the first to initialise the driver, or tried to.
static STARTED: OnceLock<Process> = OnceLock::new();

/// The driver's answer to its initialisation.
static INITIALISED: OnceLock<std::result::Result<(), String>> = OnceLock::new();

const FORKED: &str =
    "the process was forked after CUDA had been started, and a child cannot use what its parent \
     started: start a new process";

/// Fails, saying why, if CUDA cannot be used. Nothing else of cudarc may be called before this has
/// returned `Ok`: its functions panic where the driver is missing.
pub fn available() -> Result<()> {
    let found = present().and_then(|()| {
        let started = {
            // A child that is forked meanwhile would wait for ever for a value that is half set.
            let _no_fork = NoFork::new();
            *STARTED.get_or_init(Process::current)
        };
        if started.is_current() {
            INITIALISED.get_or_init(initialise).clone()
        } else {
            after_fork()
        }
    });
    found.map_err(|why| Error::new(ErrorKind::NoDevice, why))
}

/// Whether there is a driver that may be usable. The check is fast and starts nothing.
pub fn is_present() -> bool {
    present().is_ok() && STARTED.get().is_none_or(|started| started.is_current())
}

/// Returns why a child cannot use the driver, whose initialisation its parent has begun. Does not
/// wait for the end of that: the thread that did it does not exist in the child.
fn after_fork() -> std::result::Result<(), String> {
    match INITIALISED.get() {
        Some(Err(why)) => Err(why.clone()),
        Some(Ok(())) | None => Err(FORKED.into()),
    }
}

fn present() -> std::result::Result<(), String> {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return found.clone();
    }
    // As for `STARTED`.
    let _no_fork = NoFork::new();
    FOUND.get_or_init(look).clone()
}

fn look() -> std::result::Result<(), String> {
    if !super::fatbins::are_built_in() {
        return Err(
            "this build of the library has no CUDA kernels (it was built without nvcc)".into()
        );
    }
    // SAFETY: opens the driver's library, which starts no work of its own.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver is installed (libcuda.so.1 was not found)".into());
    }
    let mut version = 0;
    // SAFETY: the library was found; the function needs no initialisation and writes one int.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) };
    if status != CUresult::CUDA_SUCCESS || version < OLDEST_VERSION {
        return Err(format!(
            "the CUDA driver is too old: it speaks version {}.{}, 13.0 (driver 580) is needed",
            version / 1000,
            version % 1000 / 10
        ));
    }
    Ok(())
}

fn initialise() -> std::result::Result<(), String> {
    // SAFETY: the library was found.
    let status = unsafe { sys::cuInit(0) };
    if status == CUresult::CUDA_ERROR_NOT_INITIALIZED {
        // The driver's answer in a child of a process that started CUDA without this library.
        return Err(FORKED.into());
    }
    if status != CUresult::CUDA_SUCCESS {
        return Err(format!("the CUDA driver could not be initialised: {}", describe(status)));
    }
    match count_devices() {
        Ok(0) => Err("there is no CUDA device".into()),
        Ok(_) => Ok(()),
        Err(e) => Err(e.message().to_string()),
    }
}

/// Returns the number of devices that the driver shows. To be called only after [`available`] has
/// succeeded.
pub(super) fn count_devices() -> Result<i32> {
    let mut count = 0;
    // SAFETY: the driver is initialised; one int is written.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "counting CUDA devices")?;
    Ok(count)
}

/// Returns the status as `CUDA_ERROR_...: description`.
pub(super) fn describe(status: CUresult) -> String {
    let mut parts = [std::ptr::null(); 2];
    // SAFETY: both functions write a pointer to a static string, or NULL for an unknown status.
    unsafe {
        let _ = sys::cuGetErrorName(status, &mut parts[0]);
        let _ = sys::cuGetErrorString(status, &mut parts[1]);
    }
    let text = |part: *const std::ffi::c_char| {
        if part.is_null() {
            format!("status {}", status as u32).into()
        } else {
            // SAFETY: not NULL, so a static NUL-terminated string of the driver.
            unsafe { CStr::from_ptr(part) }.to_string_lossy()
        }
    };
    format!("{}: {}", text(parts[0]), text(parts[1]))
}

/// Whether the device's context is unusable after this failure.
pub(super) fn is_lost(status: CUresult) -> bool {
    use CUresult::*;
    matches!(
        status,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_UNKNOWN
    )
}

/// The bytes that the driver itself may need at any time, for example for the code of a kernel that
/// it has not run before.
const DRIVER_NEEDS_BYTES: usize = 64 << 20;

/// Returns the free bytes of the current context's device, if they are nearly exhausted. With none
/// left the driver may fail a launch with CUDA_ERROR_UNKNOWN (seen with 13.0), which leaves
/// everything as it was.
pub(super) fn shortage() -> Option<usize> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two numbers are written. Fails where there is no context, or a lost one.
    let known = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } == CUresult::CUDA_SUCCESS;
    (known && free < DRIVER_NEEDS_BYTES).then_some(free)
}

/// Whether a driver may answer so where it has no memory for what it needs itself.
pub(super) fn is_refused_for_memory(status: CUresult) -> bool {
    matches!(status, CUresult::CUDA_ERROR_UNKNOWN | CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

/// Turns a driver status into an error; `what` says what was tried. Where the device is nearly full, the
/// message says what is left.
pub(super) fn check(status: CUresult, what: &str) -> Result<()> {
    if is_refused_for_memory(status) {
        if let Some(free) = shortage() {
            let status = describe(status);
            let message = format!("{what}: {status}; the device has {free} bytes of memory left");
            return Err(Error::new(ErrorKind::OutOfMemory, message));
        }
    }
    let kind = match status {
        CUresult::CUDA_SUCCESS => return Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => ErrorKind::NoDevice,
        status if is_lost(status) => ErrorKind::DeviceLost,
        _ => ErrorKind::Internal,
    };
    Err(Error::new(kind, format!("{what}: {}", describe(status))))
}
