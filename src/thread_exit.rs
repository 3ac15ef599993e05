//! Destructors of thread-local variables, where memory is short.
//!
//! When a thread first uses a thread-local variable that has a destructor, the standard library
//! registers it with `__cxa_thread_atexit_impl`, for which glibc allocates a note, and ends the
//! process if it cannot. The library has no such variable, but dependencies have (minijinja has
//! three). So the build script has the linker put [`register`] in the place of that function
//! (`--wrap`), in the shared library and in the tests, but not in Rust programs that link the crate.
//! Its notes come from the library's allocator; where even that has nothing left, the variable is
//! leaked.
//!
//! The notes of a thread are a list, which is the value of a thread-specific key.

use std::alloc::{alloc, dealloc, Layout};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

type Destructor = unsafe extern "C" fn(*mut c_void);

/// A destructor that is to run, and its variable.
struct Note {
    destructor: Destructor,
    variable: *mut c_void,
    next: *mut Note,
}

const NOTE: Layout = Layout::new::<Note>();

/// The key plus one; 0: it has not been made.
static KEY: AtomicU64 = AtomicU64::new(0);

fn key() -> Option<libc::pthread_key_t> {
    let known = KEY.load(Ordering::Acquire);
    if known != 0 {
        return Some((known - 1) as libc::pthread_key_t);
    }
    let mut made: libc::pthread_key_t = 0;
    // SAFETY: writes a key on this stack. `run_all` is of a library that is never unloaded.
    if unsafe { libc::pthread_key_create(&mut made, Some(run_all)) } != 0 {
        return None;
    }
    let wanted = u64::from(made) + 1;
    match KEY.compare_exchange(0, wanted, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(made),
        Err(first) => {
            // SAFETY: nobody else knows this key.
            unsafe { libc::pthread_key_delete(made) };
            Some((first - 1) as libc::pthread_key_t)
        }
    }
}

/// Has `destructor` called with `variable` when this thread ends.
///
/// # Safety
/// As `__cxa_thread_atexit_impl`: the variable is one of this thread, with that destructor.
unsafe extern "C" fn register(
    destructor: Destructor,
    variable: *mut c_void,
    _library: *mut c_void,
) -> c_int {
    let Some(key) = key() else { return 0 };
    // SAFETY: the note is written before it is read, and belongs to the list from then on; the value
    // of the key is such a list or NULL.
    unsafe {
        let note = alloc(NOTE).cast::<Note>();
        if note.is_null() {
            return 0;
        }
        let next = libc::pthread_getspecific(key).cast();
        note.write(Note { destructor, variable, next });
        if libc::pthread_setspecific(key, note.cast()) != 0 {
            dealloc(note.cast(), NOTE);
        }
    }
    0
}

/// Called when a thread ends, and once more if destructors registered others.
unsafe extern "C" fn run_all(list: *mut c_void) {
    let mut list = list.cast::<Note>();
    while !list.is_null() {
        // SAFETY: the list is of notes that `register` made, for this thread, whose variables exist
        // until all destructors of keys have run.
        unsafe {
            let Note { destructor, variable, next } = list.read();
            dealloc(list.cast(), NOTE);
            destructor(variable);
            list = next;
        }
    }
}

// A function that the linker finds under this name, but that the shared library does not export.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.xserv_thread_exit,\"ax\",@progbits",
    ".globl __wrap___cxa_thread_atexit_impl",
    ".hidden __wrap___cxa_thread_atexit_impl",
    ".type __wrap___cxa_thread_atexit_impl,@function",
    "__wrap___cxa_thread_atexit_impl:",
    "jmp {register}",
    ".popsection",
    register = sym register,
);
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text.xserv_thread_exit,\"ax\",@progbits",
    ".globl __wrap___cxa_thread_atexit_impl",
    ".hidden __wrap___cxa_thread_atexit_impl",
    ".type __wrap___cxa_thread_atexit_impl,%function",
    "__wrap___cxa_thread_atexit_impl:",
    "b {register}",
    ".popsection",
    register = sym register,
);

extern "C" {
    fn __wrap___cxa_thread_atexit_impl(
        destructor: Destructor,
        variable: *mut c_void,
        library: *mut c_void,
    ) -> c_int;
}

/// Has this file linked, which the standard library's reference alone would not do.
#[used]
static LINKED: unsafe extern "C" fn(Destructor, *mut c_void, *mut c_void) -> c_int =
    __wrap___cxa_thread_atexit_impl;

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::atomic::AtomicUsize;

    static DROPPED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn count(number: *mut c_void) {
        // In reverse order.
        let before = DROPPED.fetch_add(1, Ordering::SeqCst);
        assert_eq!(number.addr(), 10 - before);
    }

    #[test]
    fn destructors_run_when_the_thread_ends() {
        thread_local!(static OWN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
        std::thread::spawn(|| {
            OWN.with(|own| own.borrow_mut().push(1));
            for number in 1..=10 {
                // SAFETY: `count` takes any pointer.
                unsafe {
                    register(count, std::ptr::without_provenance_mut(number), std::ptr::null_mut())
                };
            }
            assert_eq!(DROPPED.load(Ordering::SeqCst), 0);
        })
        .join()
        .unwrap();
        assert_eq!(DROPPED.load(Ordering::SeqCst), 10);
    }
}
