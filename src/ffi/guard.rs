//! The guard that every entry point runs inside, and the checks of raw arguments.
//!
//! An entry point checks and converts its arguments here, calls the engine, and writes its result
//! through the out-pointer only on success.

use std::ffi::{c_char, CStr};
use std::mem::{align_of, size_of};

use super::status::{set_last_error, xserv_status};
use crate::error::{try_with_capacity, Error, Result};
use crate::panic_guard;

/// The length that means "up to the terminating NUL".
pub const NUL_TERMINATED: usize = usize::MAX;

/// Runs the body of an entry point: catches panics, records the error, returns the status.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> xserv_status {
    match panic_guard::catch(body) {
        Ok(()) => xserv_status::XSERV_STATUS_OK,
        Err(error) => {
            set_last_error(&error);
            error.kind().into()
        }
    }
}

/// Runs the body of an entry point that does not return a status (`_free`, accessors).
pub(super) fn guard_or<T>(fallback: T, body: impl FnOnce() -> Result<T>) -> T {
    match panic_guard::catch(body) {
        Ok(value) => value,
        Err(error) => {
            set_last_error(&error);
            fallback
        }
    }
}

fn check_pointer<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::invalid_argument(format!("{name} is NULL")));
    }
    if !(pointer as usize).is_multiple_of(align_of::<T>()) {
        return Err(Error::invalid_argument(format!(
            "{name} is misaligned: address {pointer:p} for a type of alignment {}",
            align_of::<T>()
        )));
    }
    Ok(())
}

/// The pointer that receives a result, checked before any work is done.
pub(super) struct Out<T> {
    pointer: *mut T,
}

impl<T> Out<T> {
    /// # Safety
    /// If not NULL and aligned, `pointer` must be valid for writing a `T` until the call ends.
    pub(super) unsafe fn new(pointer: *mut T, name: &str) -> Result<Self> {
        check_pointer(pointer, name)?;
        Ok(Out { pointer })
    }

    /// Writes the result for the caller.
    pub(super) fn set(self, value: T) {
        // SAFETY: `new` checked NULL and alignment; its caller promised validity. `write` does not
        // read or drop what was there, so uninitialised memory is fine.
        unsafe { self.pointer.write(value) }
    }
}

/// A struct that begins with `size_t struct_size` and only ever grows at the end.
///
/// # Safety
/// The implementor is `repr(C)`, its first field is `struct_size: usize`, and every bit pattern is
/// a valid value of it.
pub(super) unsafe trait GrowingStruct: Copy {
    /// The size of the first version of the struct: the smallest that a caller may pass.
    const FIRST_SIZE: usize;
    /// The C name, for messages.
    const NAME: &'static str;
    /// How a caller sets `struct_size` correctly, for messages.
    const HOW: &'static str;
    /// Returns the defaults, with `struct_size` set.
    fn defaults() -> Self;
}

/// Checks the `struct_size` at the head of a caller's struct and returns it.
///
/// # Safety
/// If not NULL and aligned, `pointer` must be readable for a `size_t`.
pub(super) unsafe fn checked_size<T: GrowingStruct>(
    pointer: *const T,
    name: &str,
) -> Result<usize> {
    check_pointer(pointer, name)?;
    // SAFETY: not NULL, aligned for T (whose first field is a usize), readable by contract.
    let size = unsafe { (pointer as *const usize).read() };
    if size < T::FIRST_SIZE {
        return Err(Error::invalid_argument(format!(
            "{name}: struct_size is {size}, but {} has at least {} bytes: {}",
            T::NAME,
            T::FIRST_SIZE,
            T::HOW
        )));
    }
    if size > size_of::<T>() {
        return Err(Error::invalid_argument(format!(
            "{name}: struct_size is {size}, but this library's {} has {} bytes: the program was built \
             with a newer header than the library, or the struct was not initialised",
            T::NAME,
            size_of::<T>()
        )));
    }
    Ok(size)
}

/// Reads a caller's option struct. NULL gives the defaults; fields beyond an older caller's
/// `struct_size` keep theirs.
///
/// # Safety
/// If not NULL, `pointer` must be readable for the `struct_size` bytes that it claims.
pub(super) unsafe fn read_struct<T: GrowingStruct>(pointer: *const T, name: &str) -> Result<T> {
    let mut value = T::defaults();
    if pointer.is_null() {
        return Ok(value);
    }
    // SAFETY: readable by contract.
    let size = unsafe { checked_size(pointer, name) }?;
    // SAFETY: `size` is at most size_of::<T>(), the source is readable for it by contract, and any
    // bytes are a valid T (trait contract).
    unsafe { (pointer as *const u8).copy_to_nonoverlapping(&raw mut value as *mut u8, size) };
    Ok(value)
}

/// Fills a caller's info struct up to the `struct_size` that it claims, which stays as it is.
///
/// # Safety
/// `pointer` must be readable and writable for the `struct_size` bytes that it claims.
pub(super) unsafe fn write_struct<T: GrowingStruct>(
    pointer: *mut T,
    name: &str,
    value: &T,
) -> Result<()> {
    // SAFETY: readable by contract.
    let size = unsafe { checked_size(pointer as *const T, name) }?;
    let skip = size_of::<usize>();
    let from = value as *const T as *const u8;
    let to = pointer as *mut u8;
    // SAFETY: `skip <= size <= size_of::<T>()`; both sides are valid for `size` bytes.
    unsafe { from.add(skip).copy_to_nonoverlapping(to.add(skip), size - skip) };
    Ok(())
}

/// Reads a caller's text, given by pointer and length or NUL-terminated. NULL is allowed with
/// length 0.
///
/// # Safety
/// `text` must be readable for `len` bytes, or up to its NUL, for the lifetime `'a` that the caller
/// of this function picks (the duration of the C call).
pub(super) unsafe fn text_argument<'a>(
    text: *const c_char,
    len: usize,
    name: &str,
) -> Result<&'a str> {
    if len == 0 {
        return Ok("");
    }
    check_pointer(text, name)?;
    let bytes: &[u8] = if len == NUL_TERMINATED {
        // SAFETY: not NULL, NUL-terminated by contract.
        unsafe { CStr::from_ptr(text) }.to_bytes()
    } else {
        check_length::<u8>(len, name)?;
        // SAFETY: not NULL, readable for `len` bytes by contract, `len` at most isize::MAX.
        unsafe { std::slice::from_raw_parts(text as *const u8, len) }
    };
    std::str::from_utf8(bytes).map_err(|e| {
        Error::invalid_argument(format!(
            "{name} is not UTF-8: bad byte at offset {}",
            e.valid_up_to()
        ))
    })
}

/// Reads a NUL-terminated string that may be NULL.
///
/// # Safety
/// As [`text_argument`].
pub(super) unsafe fn optional_text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: by contract.
    unsafe { text_argument(text, NUL_TERMINATED, name) }.map(Some)
}

fn check_length<T>(len: usize, name: &str) -> Result<()> {
    match len.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => Err(Error::invalid_argument(format!("{name}: a length of {len} is impossible"))),
    }
}

/// Borrows a caller's array. Length 0 ignores the pointer.
///
/// # Safety
/// If `len` is not 0, `data` must be readable for `len` elements for the lifetime `'a`.
pub(super) unsafe fn array_argument<'a, T>(
    data: *const T,
    len: usize,
    name: &str,
) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_pointer(data, name)?;
    check_length::<T>(len, name)?;
    // SAFETY: not NULL, aligned, readable by contract, no more than isize::MAX bytes.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// Borrows a caller's array for writing. Length 0 ignores the pointer.
///
/// # Safety
/// If `len` is not 0, `data` must be valid for `len` elements, not otherwise accessed for `'a`.
pub(super) unsafe fn array_argument_mut<'a, T>(
    data: *mut T,
    len: usize,
    name: &str,
) -> Result<&'a mut [T]> {
    if len == 0 {
        return Ok(&mut []);
    }
    check_pointer(data as *const T, name)?;
    check_length::<T>(len, name)?;
    // SAFETY: as in `array_argument`, and exclusive by contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
}

/// Reads a flag that C passes as a byte.
pub(super) fn flag(value: u8, name: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid_argument(format!("{name} is {other}, but must be 0 or 1"))),
    }
}

/// Copies text and appends a NUL, for C.
pub(super) fn with_nul(text: &str) -> Result<Vec<u8>> {
    let mut bytes = try_with_capacity(text.len() + 1, "a string")?;
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(0);
    Ok(bytes)
}
