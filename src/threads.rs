//! Threads of the library's own.
//!
//! They are started here and not by [`std::thread`], which ends the process where memory is short:
//! it makes its description of a thread in the system's memory, past the library's allocator, and
//! the new thread registers a destructor for it, which glibc does or aborts. Here a thread that
//! cannot be started is an error. For the same reason no code of the library asks for
//! [`std::thread::current`], be it through a scope or a channel of the standard library.
//!
//! All threads have signals blocked, so that handlers of the host never run on them, and catch
//! panics.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::panic_guard;
use crate::thread_state::SignalsBlocked;

/// The stack of a thread that needs no more than usual.
pub const STACK_BYTES: usize = 2 << 20;

type Outcome<T> = Arc<Mutex<Option<Result<T>>>>;

/// A thread and what it is to return. It goes on when this is dropped.
pub struct Thread<T> {
    id: Option<system::Id>,
    outcome: Outcome<T>,
}

impl<T: Send + 'static> Thread<T> {
    /// Starts a thread that runs `body`. `name`: at most 15 bytes.
    pub fn start(
        name: &str,
        stack_bytes: usize,
        body: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        // SAFETY: neither the body nor what it returns borrows anything.
        unsafe { Self::start_borrowing(name, stack_bytes, body) }
    }
}

impl<T: Send> Thread<T> {
    /// Starts a thread whose body may borrow.
    ///
    /// # Safety
    /// What `body` and T borrow outlives the thread.
    unsafe fn start_borrowing<F: FnOnce() -> Result<T> + Send>(
        name: &str,
        stack_bytes: usize,
        body: F,
    ) -> Result<Self> {
        let outcome: Outcome<T> = Arc::new(Mutex::new(None));
        let start = Box::new(Start { name: named(name), body, outcome: outcome.clone() });
        let _blocked = SignalsBlocked::new();
        // SAFETY: by contract `start` is valid for as long as the thread runs.
        let id = unsafe { system::start(stack_bytes, start) }.map_err(|error| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!(
                    "cannot start the thread {name} with a stack of {stack_bytes} bytes: {error}"
                ),
            )
        })?;
        Ok(Thread { id: Some(id), outcome })
    }

    /// Waits for the thread and returns what its body did; a panic is an internal error.
    pub fn join(mut self) -> Result<T> {
        if let Some(id) = self.id.take() {
            system::join(id);
        }
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        outcome.unwrap_or_else(|| Err(Error::internal("a thread was lost")))
    }

    /// Whether the body has returned.
    pub fn is_finished(&self) -> bool {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

impl<T> Drop for Thread<T> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            system::detach(id);
        }
    }
}

/// Runs `body` on a thread of its own, and waits for it. `name`: at most 15 bytes.
pub fn run_apart<T: Send>(
    name: &str,
    stack_bytes: usize,
    body: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    // SAFETY: the thread has ended before this function returns, which cannot panic in between.
    unsafe { Thread::start_borrowing(name, stack_bytes, body) }?.join()
}

/// The name of a thread, which ends in a NUL.
type Name = [u8; 16];

fn named(name: &str) -> Name {
    let mut named = [0; 16];
    named.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from);
    named
}

/// The arguments of a new thread.
struct Start<F, T> {
    name: Name,
    body: F,
    outcome: Outcome<T>,
}

/// The new thread.
trait Run: Send {
    fn run(self: Box<Self>);
}

impl<T: Send, F: FnOnce() -> Result<T> + Send> Run for Start<F, T> {
    fn run(self: Box<Self>) {
        let Start { name, body, outcome } = *self;
        system::set_name(&name);
        let returned = panic_guard::catch(body);
        *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(returned);
    }
}

#[cfg(unix)]
mod system {
    use super::{Name, Run};
    use std::ffi::c_void;
    use std::io;

    pub(super) type Id = libc::pthread_t;

    /// Stacks are multiples of the largest page.
    const PAGE_BYTES: usize = 64 << 10;

    extern "C" fn run<R: Run>(start: *mut c_void) -> *mut c_void {
        // SAFETY: `start` made the pointer of a box, which it leaves to the thread.
        unsafe { Box::from_raw(start.cast::<R>()) }.run();
        std::ptr::null_mut()
    }

    /// # Safety
    /// What `start` borrows outlives the thread.
    pub(super) unsafe fn start<R: Run>(stack_bytes: usize, start: Box<R>) -> io::Result<Id> {
        let stack_bytes = stack_bytes.max(libc::PTHREAD_STACK_MIN).next_multiple_of(PAGE_BYTES);
        let start = Box::into_raw(start);
        // SAFETY: the attributes are initialised before they are used, and the id is written before
        // it is read. If there is no thread, the box is this function's again.
        unsafe {
            let mut attributes = std::mem::zeroed::<libc::pthread_attr_t>();
            let mut id = std::mem::zeroed::<Id>();
            let mut error = libc::pthread_attr_init(&mut attributes);
            if error == 0 {
                error = libc::pthread_attr_setstacksize(&mut attributes, stack_bytes);
                if error == 0 {
                    error = libc::pthread_create(&mut id, &attributes, run::<R>, start.cast());
                }
                libc::pthread_attr_destroy(&mut attributes);
            }
            if error != 0 {
                drop(Box::from_raw(start));
                return Err(io::Error::from_raw_os_error(error));
            }
            Ok(id)
        }
    }

    pub(super) fn join(id: Id) {
        // SAFETY: the thread was neither joined nor detached before.
        unsafe { libc::pthread_join(id, std::ptr::null_mut()) };
    }

    pub(super) fn detach(id: Id) {
        // SAFETY: as above.
        unsafe { libc::pthread_detach(id) };
    }

    pub(super) fn set_name(name: &Name) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        // SAFETY: names the calling thread; the name ends in a NUL.
        unsafe {
            libc::pthread_setname_np(libc::pthread_self(), name.as_ptr().cast())
        };
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = name;
    }
}

#[cfg(not(unix))]
mod system {
    use super::{Name, Run};
    use std::io;

    pub(super) type Id = std::thread::JoinHandle<()>;

    /// # Safety
    /// What `start` borrows outlives the thread.
    pub(super) unsafe fn start<R: Run>(stack_bytes: usize, start: Box<R>) -> io::Result<Id> {
        let builder = std::thread::Builder::new().stack_size(stack_bytes);
        // SAFETY: by contract.
        unsafe { builder.spawn_unchecked(|| start.run()) }
    }

    pub(super) fn join(id: Id) {
        // The body catches every panic.
        let _ = id.join();
    }

    pub(super) fn detach(_: Id) {}

    pub(super) fn set_name(_: &Name) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_returns_what_its_body_does() {
        let thread = Thread::start("xserv-test", STACK_BYTES, || Ok(7)).unwrap();
        assert_eq!(thread.join().unwrap(), 7);
        let thread = Thread::<()>::start("xserv-test", STACK_BYTES, || panic!("number 8")).unwrap();
        let error = thread.join().unwrap_err();
        assert!(error.kind() == ErrorKind::Internal && error.message().contains("number 8"));
        let text = String::from("borrowed");
        assert_eq!(run_apart("xserv-test", 1, || Ok(text.len())).unwrap(), 8);
    }

    #[test]
    fn a_thread_that_cannot_be_started_is_an_error() {
        let dropped = Arc::new(());
        let held = dropped.clone();
        let body = move || {
            drop(held);
            Ok(())
        };
        let error = run_apart("xserv-test", 1 << 60, body).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(Arc::strong_count(&dropped), 1);
    }
}
