//! Distinguishes processes, and notices forks.
//!
//! The threads of a model exist in the process that loaded it, and not in a forked child. A child is
//! distinguished from its parent by counting: a handler that the C library calls in every forked child
//! ([`libc::pthread_atfork`]) adds one. The process id would not do, since parent and child can both
//! be the first process of a PID namespace.
//!
//! The same handlers keep locks usable in the child: [`NoFork`] delays forks while a lock that a
//! child may need is held.
//!
//! The handlers are registered when the library is loaded, not by its first call. The C library
//! calls handlers before a fork in reverse order of registration, and those after a fork in order.
//! So the handlers of a host that registered them later run while forks are not yet, or no longer,
//! in the hands of this module, and may call the library like any other code. Handlers that were
//! registered before the library was loaded run in between ([`check_not_forking`]).

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::{Error, ErrorKind, Result};

/// The number of forks between the first process that had the library and this one.
static NUM_FORKS: AtomicU32 = AtomicU32::new(0);

/// A process, to be compared with the one that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// Returns the process of the caller.
    pub fn current() -> Self {
        Process(NUM_FORKS.load(Ordering::Relaxed))
    }

    /// Whether the caller is in this process, rather than in a child that was forked from it.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }
}

/// Held for reading by [`NoFork`], and for writing by a thread that forks, until the fork is over.
/// Without it a lock that another thread held at that moment would stay locked in the child for
/// ever.
static FORK_GATE: RwLock<()> = RwLock::new(());

/// The lock that the forking thread holds between the handlers before and after the fork.
struct ForkGuard(UnsafeCell<Option<RwLockWriteGuard<'static, ()>>>);

// SAFETY: the content is touched only by a thread that holds `FORK_GATE` for writing, which is one
// at a time; in a forked child it is the only thread there is.
unsafe impl Sync for ForkGuard {}

static FORK_GUARD: ForkGuard = ForkGuard(UnsafeCell::new(None));

thread_local! {
    /// Whether this thread is between the handlers before and after a fork.
    static IS_FORKING: Cell<bool> = const { Cell::new(false) };
}

// The handlers do nothing the second time, in case they are registered twice.

extern "C" fn before_fork() {
    if IS_FORKING.get() {
        return;
    }
    let guard = FORK_GATE.write().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: this thread has just taken `FORK_GATE` for writing.
    unsafe { *FORK_GUARD.0.get() = Some(guard) };
    IS_FORKING.set(true);
}

extern "C" fn after_fork_in_parent() {
    if IS_FORKING.replace(false) {
        // SAFETY: this thread has held `FORK_GATE` for writing since `before_fork`.
        drop(unsafe { (*FORK_GUARD.0.get()).take() });
    }
}

extern "C" fn after_fork_in_child() {
    if IS_FORKING.get() {
        NUM_FORKS.fetch_add(1, Ordering::Relaxed);
    }
    after_fork_in_parent();
}

static IS_WATCHING: AtomicBool = AtomicBool::new(false);

/// Makes sure that forks are noticed. Fails only if that was impossible when the library was loaded
/// and still is. To be called before anything is made that a forked child must not use.
pub fn watch_forks() -> Result<()> {
    if IS_WATCHING.load(Ordering::Acquire) {
        return Ok(());
    }
    #[cfg(unix)]
    {
        let (before, parent, child) = (before_fork, after_fork_in_parent, after_fork_in_child);
        // SAFETY: the functions are of this library, which is never unloaded (linked with
        // nodelete).
        if unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) } != 0 {
            return Err(Error::out_of_memory("the fork handlers", 64));
        }
    }
    IS_WATCHING.store(true, Ordering::Release);
    Ok(())
}

#[cfg(target_os = "linux")]
extern "C" fn at_load() {
    // After a failure, which has no caller to be told, `watch_forks` is called again in time.
    let _ = watch_forks();
}

/// Called by the dynamic linker when the library is loaded.
#[cfg(target_os = "linux")]
#[used]
#[link_section = ".init_array"]
static AT_LOAD: extern "C" fn() = at_load;

/// Refuses calls that a fork handler makes while this thread has stopped all others for a fork:
/// that is a handler of the host which was registered before the library was loaded. Whatever such a
/// call waited for might wait for the end of the fork itself.
pub fn check_not_forking() -> Result<()> {
    if !IS_FORKING.get() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Forked,
        "called by a fork handler that was registered before the library was loaded",
    ))
}

/// Delays forks while it lives. To be held as long as a lock that is also taken in forked children.
pub struct NoFork {
    _gate: RwLockReadGuard<'static, ()>,
}

impl NoFork {
    /// Waits for the end of a fork that is under way.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        NoFork { _gate: FORK_GATE.read().unwrap_or_else(PoisonError::into_inner) }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another_process() {
        watch_forks().unwrap();
        let parent = Process::current();
        assert!(parent.is_current());
        // SAFETY: the child only reads and writes memory of its own, and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let own = Process::current();
            let is_right = !parent.is_current() && own.is_current() && !IS_FORKING.get();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child, and writes its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(parent.is_current());
    }
}
