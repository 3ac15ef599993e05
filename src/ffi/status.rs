//! Status codes and the thread's last error.

use std::cell::RefCell;
use std::ffi::c_char;

use crate::error::{Error, ErrorKind};

/// The outcome of a call. Zero is success. Numbers are never reused; later versions may add new
/// ones, so treat an unknown value as a failure.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_status {
    /// The call did what it says.
    XSERV_STATUS_OK = 0,
    /// An argument is outside its contract (NULL, wrong size, out of range, not UTF-8).
    XSERV_STATUS_INVALID_ARGUMENT = 1,
    /// The handle is not one of this library, is of another kind, or was freed.
    XSERV_STATUS_BAD_HANDLE = 2,
    /// A file or folder does not exist.
    XSERV_STATUS_NOT_FOUND = 3,
    /// The operating system refused to read a file.
    XSERV_STATUS_IO = 4,
    /// A file exists but is damaged, or does not follow its format.
    XSERV_STATUS_INVALID_FILE = 5,
    /// The model, tokenizer or option is valid, but not implemented by this library.
    XSERV_STATUS_UNSUPPORTED = 6,
    /// The memory budget or the machine's memory is exhausted. Nothing was changed, but for the
    /// sample that xserv_next() ends with this.
    XSERV_STATUS_OUT_OF_MEMORY = 7,
    /// The prompt is longer than the context.
    XSERV_STATUS_CONTEXT_FULL = 8,
    /// A callback or another thread asked to stop. (xserv_generate reports this in the result's
    /// finish reason instead, with what was generated so far.)
    XSERV_STATUS_CANCELLED = 9,
    /// The chat template failed, or exceeded its limits of time, size or depth.
    XSERV_STATUS_TEMPLATE = 10,
    /// The requested device does not exist, or this build cannot use it, or the process was forked
    /// after CUDA had been started: only a new process can then use a GPU.
    XSERV_STATUS_NO_DEVICE = 11,
    /// The process was forked after the model was loaded. The child cannot use the model: load it
    /// again there (on the CPU, if CUDA had been started before the fork). Or the call came from a
    /// fork handler that was registered before the library was loaded.
    XSERV_STATUS_FORKED = 12,
    /// The library itself is at fault. The call had no effect; please report the message.
    XSERV_STATUS_INTERNAL = 13,
    /// The GPU failed for good: a kernel accessed invalid memory, or the hardware broke down. All
    /// work on that device is lost, and every later call on it reports this. The process can
    /// continue, but cannot use the device again.
    XSERV_STATUS_DEVICE_LOST = 14,
}

impl From<ErrorKind> for xserv_status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => xserv_status::XSERV_STATUS_INVALID_ARGUMENT,
            ErrorKind::BadHandle => xserv_status::XSERV_STATUS_BAD_HANDLE,
            ErrorKind::NotFound => xserv_status::XSERV_STATUS_NOT_FOUND,
            ErrorKind::Io => xserv_status::XSERV_STATUS_IO,
            ErrorKind::InvalidFile => xserv_status::XSERV_STATUS_INVALID_FILE,
            ErrorKind::Unsupported => xserv_status::XSERV_STATUS_UNSUPPORTED,
            ErrorKind::OutOfMemory => xserv_status::XSERV_STATUS_OUT_OF_MEMORY,
            ErrorKind::ContextFull => xserv_status::XSERV_STATUS_CONTEXT_FULL,
            ErrorKind::Cancelled => xserv_status::XSERV_STATUS_CANCELLED,
            ErrorKind::Template => xserv_status::XSERV_STATUS_TEMPLATE,
            ErrorKind::NoDevice => xserv_status::XSERV_STATUS_NO_DEVICE,
            ErrorKind::Forked => xserv_status::XSERV_STATUS_FORKED,
            ErrorKind::DeviceLost => xserv_status::XSERV_STATUS_DEVICE_LOST,
            ErrorKind::Internal => xserv_status::XSERV_STATUS_INTERNAL,
        }
    }
}

/// The size of the longest message kept, with its final NUL; longer ones are cut at a character
/// boundary.
const MESSAGE_BYTES: usize = 2048;

thread_local! {
    // A fixed buffer: writing an error never allocates, and the pointer handed out stays valid for
    // the thread's life (only its content changes, at the thread's next failing call).
    static LAST_ERROR: RefCell<[u8; MESSAGE_BYTES]> = const { RefCell::new([0; MESSAGE_BYTES]) };
}

/// Stores the message of a failing call for `xserv_last_error` of this thread.
pub(super) fn set_last_error(error: &Error) {
    let _ = LAST_ERROR.try_with(|buffer| {
        let Ok(mut buffer) = buffer.try_borrow_mut() else { return };
        let message = error.message();
        let mut len = message.len().min(MESSAGE_BYTES - 1);
        while !message.is_char_boundary(len) {
            len -= 1;
        }
        for (to, from) in buffer.iter_mut().zip(message.as_bytes().iter().take(len).chain(&[0])) {
            // An interior NUL would hide the rest of the sentence from C.
            *to = *from;
        }
        for byte in buffer.iter_mut().take(len) {
            if *byte == 0 {
                *byte = b'?';
            }
        }
    });
}

/// Returns one sentence that says what the calling thread's most recent failing call found wrong,
/// and in what (file, tensor, argument). Never NULL; empty if no call of this thread has failed.
///
/// The string is UTF-8, NUL-terminated, at most 2047 bytes, and belongs to the library. It is valid
/// until this thread's next failing call, and for this thread only. Successful calls leave it
/// alone.
#[no_mangle]
pub extern "C" fn xserv_last_error() -> *const c_char {
    LAST_ERROR.try_with(|buffer| buffer.as_ptr() as *const c_char).unwrap_or(c"".as_ptr())
}

/// Returns the name of a status, for example "XSERV_STATUS_NOT_FOUND", as a static string; "unknown
/// status" for a value that this version does not have.
#[no_mangle]
pub extern "C" fn xserv_status_name(status: u32) -> *const c_char {
    let name = match status {
        0 => c"XSERV_STATUS_OK",
        1 => c"XSERV_STATUS_INVALID_ARGUMENT",
        2 => c"XSERV_STATUS_BAD_HANDLE",
        3 => c"XSERV_STATUS_NOT_FOUND",
        4 => c"XSERV_STATUS_IO",
        5 => c"XSERV_STATUS_INVALID_FILE",
        6 => c"XSERV_STATUS_UNSUPPORTED",
        7 => c"XSERV_STATUS_OUT_OF_MEMORY",
        8 => c"XSERV_STATUS_CONTEXT_FULL",
        9 => c"XSERV_STATUS_CANCELLED",
        10 => c"XSERV_STATUS_TEMPLATE",
        11 => c"XSERV_STATUS_NO_DEVICE",
        12 => c"XSERV_STATUS_FORKED",
        13 => c"XSERV_STATUS_INTERNAL",
        14 => c"XSERV_STATUS_DEVICE_LOST",
        _ => c"unknown status",
    };
    name.as_ptr()
}
