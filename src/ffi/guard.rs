//! The guard that every entry point runs inside, and the checks of raw arguments.
//!
//! An entry point checks and converts its arguments here, calls the engine, and writes its result
//! through the out-pointer only on success.

use std::ffi::{c_char, CStr};
use std::fmt::Display;
use std::mem::{align_of, size_of};

use super::status::{set_last_error, xserv_status};
use crate::error::{try_with_capacity, Error, ErrorKind, Result};
use crate::panic_guard;
use crate::process::check_not_forking;
use crate::reserve;
use crate::thread_state::{with_host_floats, with_standard_floats, CancellationDisabled};

/// The length that means "up to the terminating NUL".
pub const NUL_TERMINATED: usize = usize::MAX;

/// Runs the body of an entry point that begins something new (all that computes, and all that makes
/// a handle): as [`guard`], but refuses while memory is exhausted, for the sake of what is under way.
pub(super) fn guard_work(body: impl FnOnce() -> Result<()>) -> xserv_status {
    guard(|| {
        check_memory()?;
        body()
    })
}

/// Fails while memory is exhausted, so that nothing new begins ([`reserve::has_room`]).
#[inline]
pub(super) fn check_memory() -> Result<()> {
    if reserve::has_room() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::OutOfMemory,
        "the machine's memory is exhausted: free some, or wait until calls that are running end",
    ))
}

/// Runs the body of an entry point: in the library's own thread state, panics caught. The error is
/// recorded, the status returned.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> xserv_status {
    match run(body) {
        Ok(()) => xserv_status::XSERV_STATUS_OK,
        Err(error) => {
            set_last_error(&error);
            error.kind().into()
        }
    }
}

/// Runs the body of an entry point that does not return a status (`_free`, accessors).
pub(super) fn guard_or<T>(fallback: T, body: impl FnOnce() -> Result<T>) -> T {
    match run(body) {
        Ok(value) => value,
        Err(error) => {
            set_last_error(&error);
            fallback
        }
    }
}

/// Runs the body of an entry point with the guards that every one needs. (Those without a guard
/// only return constants.)
fn run<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    check_not_forking()?;
    let _not_cancelled = CancellationDisabled::new();
    with_standard_floats(|| {
        panic_guard::catch(|| {
            #[cfg(debug_assertions)]
            test_panic::happen();
            body()
        })
    })
}

/// Panics on demand inside the guard, for the test that every function catches them. Not part of
/// release builds.
#[cfg(debug_assertions)]
pub mod test_panic {
    use std::cell::Cell;

    thread_local! {
        static IS_DUE: Cell<bool> = const { Cell::new(false) };
    }

    /// Makes the next guarded call of this thread panic, or no longer.
    pub fn set_due(is_due: bool) {
        IS_DUE.set(is_due);
    }

    /// Whether no guarded call has been made since [`set_due`].
    pub fn is_due() -> bool {
        IS_DUE.get()
    }

    pub(super) fn happen() {
        if IS_DUE.replace(false) {
            panic!("asked for by a test");
        }
    }
}

/// Runs a callback of the host, inside the body of an entry point or on a thread of the library.
/// Cancellation stays disabled, as cancelling the thread in the callback would unwind the library's
/// frames below it.
pub(super) fn call_host<T>(callback: impl FnOnce() -> T) -> T {
    with_host_floats(callback)
}

fn check_pointer<T>(pointer: *const T, name: impl Display) -> Result<()> {
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
    /// The sizes of all versions of the struct within this ABI, ascending; the last is today's.
    const SIZES: &'static [usize];
    /// The C name, for messages.
    const NAME: &'static str;
    /// Instructions for setting `struct_size` correctly, for messages.
    const HOW: &'static str;
    /// Returns the defaults, with `struct_size` set.
    fn defaults() -> Self;
    /// Whether the bytes that have no meaning yet are 0, so that a later version can give them one.
    fn is_reserved_zero(&self) -> bool {
        true
    }
}

/// Holds a struct to the last of its sizes.
struct Sizes<T>(std::marker::PhantomData<T>);

impl<T: GrowingStruct> Sizes<T> {
    const ARE_RIGHT: () = {
        let mut last = 0;
        let mut i = 0;
        while i < T::SIZES.len() {
            assert!(T::SIZES[i] > last, "the sizes of a struct ascend");
            last = T::SIZES[i];
            i += 1;
        }
        assert!(last == size_of::<T>(), "a struct has grown: append its size to SIZES");
    };
}

/// Sets the first `struct_size` bytes of a caller's struct to the defaults, and its `struct_size` to
/// what the caller said. Never writes beyond; bytes that this version of the library does not know
/// become 0. NULL, a misaligned pointer and a size without room for `struct_size` itself are left
/// alone.
///
/// # Safety
/// `pointer` is NULL or writable for `struct_size` bytes.
pub(super) unsafe fn init_struct<T: GrowingStruct>(pointer: *mut T, struct_size: usize) {
    let () = Sizes::<T>::ARE_RIGHT;
    if check_pointer(pointer, "").is_err() || struct_size < size_of::<usize>() {
        return;
    }
    let defaults = T::defaults();
    let known = struct_size.min(size_of::<T>());
    let to = pointer as *mut u8;
    // SAFETY: `to` is writable for `struct_size` bytes by contract, of which `known` are no more
    // than T has; the rest are bytes of the caller's struct as well. The pointer is aligned for T,
    // whose first field is a usize.
    unsafe {
        (&raw const defaults as *const u8).copy_to_nonoverlapping(to, known);
        to.add(known).write_bytes(0, struct_size - known);
        (pointer as *mut usize).write(struct_size);
    }
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
    let () = Sizes::<T>::ARE_RIGHT;
    if size > size_of::<T>() {
        return Err(Error::invalid_argument(format!(
            "{name}: struct_size is {size}, but this library's {} has {} bytes: the program was built \
             with a newer header than the library, or the struct was not initialised",
            T::NAME,
            size_of::<T>()
        )));
    }
    if !T::SIZES.contains(&size) {
        return Err(Error::invalid_argument(format!(
            "{name}: struct_size is {size}, which no version of {} has (this one has {}): {}",
            T::NAME,
            size_of::<T>(),
            T::HOW
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
    if !value.is_reserved_zero() {
        return Err(Error::invalid_argument(format!(
            "{name}: a reserved field of {} is not 0: {}",
            T::NAME,
            T::HOW
        )));
    }
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

fn check_length<T>(len: usize, name: impl Display) -> Result<()> {
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
    name: impl Display,
) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_pointer(data, &name)?;
    check_length::<T>(len, &name)?;
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
