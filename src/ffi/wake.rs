//! Notifies the host of a submission's news: by a callback, and by a descriptor that is written to.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use super::guard::call_host;
use crate::engine::Waker;
use crate::error::{Error, Result};

/// See `xserv_wake_callback`.
type Callback = Option<unsafe extern "C" fn(*mut c_void)>;

/// The caller's callback and descriptor to be notified by.
struct WakeTarget {
    callback: Callback,
    user_data: *mut c_void,
    fd: c_int,
    /// See [`may_raise`].
    may_raise: bool,
}

// SAFETY: the pointer is only passed to the caller's function, which by contract may run on any
// thread.
unsafe impl Send for WakeTarget {}
// SAFETY: as above.
unsafe impl Sync for WakeTarget {}

impl WakeTarget {
    fn wake(&self) {
        if self.fd >= 0 {
            let one = 1u64.to_ne_bytes();
            if self.may_raise {
                write_quietly(self.fd, &one)
            } else {
                write(self.fd, &one)
            }
        }
        if let Some(callback) = self.callback {
            // SAFETY: the caller's function with the caller's data, valid until the submission is
            // freed, which waits for this call.
            call_host(|| unsafe { callback(self.user_data) });
        }
    }
}

/// Consumes a signal that is pending for this thread and blocked, if there is one.
///
/// # Safety
/// `signals` is a set of blocked signals.
#[cfg(target_os = "linux")]
unsafe fn take_pending(signals: &libc::sigset_t) {
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both point to initialised values; no information on the signal is asked for.
    unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &no_time) };
}

/// Consumes a signal that is pending for this thread and blocked, if there is one.
///
/// # Safety
/// `signals` is a set of blocked signals.
#[cfg(not(target_os = "linux"))]
unsafe fn take_pending(signals: &libc::sigset_t) {
    // SAFETY: as on Linux. A signal that is pending does not make it wait.
    unsafe {
        let mut pending = std::mem::zeroed::<libc::sigset_t>();
        let is_pending =
            libc::sigpending(&mut pending) == 0 && libc::sigismember(&pending, libc::SIGPIPE) == 1;
        if is_pending {
            libc::sigwait(signals, &mut 0);
        }
    }
}

/// Whether a write to the descriptor may raise SIGPIPE, as those to pipes and sockets do that
/// nobody reads: an eventfd, which is written for every token, never does.
fn may_raise(fd: c_int) -> bool {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes the struct where it returns 0, and only then it is read.
    let mode = unsafe {
        if libc::fstat(fd, stat.as_mut_ptr()) != 0 {
            return true;
        }
        stat.assume_init().st_mode
    };
    matches!(mode & libc::S_IFMT, libc::S_IFIFO | libc::S_IFSOCK)
}

/// Writes to a descriptor of the caller's, as [`write_quietly`] does, where no signal can be raised.
fn write(fd: c_int, bytes: &[u8]) {
    // SAFETY: the bytes are borrowed, of the length that is passed. The descriptor is open by contract.
    unsafe { libc::write(fd, bytes.as_ptr() as *const c_void, bytes.len()) };
}

/// Writes to a descriptor of the caller's. The result is ignored: a descriptor that is full has been
/// notified already, and one that nobody reads needs no notification.
fn write_quietly(fd: c_int, bytes: &[u8]) {
    // SAFETY: the sets and the bytes are on this stack or borrowed, of the sizes that are passed;
    // the mask changed is that of this thread only. The descriptor is open by contract.
    unsafe {
        let mut pipe = std::mem::zeroed::<libc::sigset_t>();
        let mut before = std::mem::zeroed::<libc::sigset_t>();
        let mut mask = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut pipe);
        libc::sigaddset(&mut pipe, libc::SIGPIPE);
        // The library's threads block it anyway, but a wake-up callback may have changed that.
        if libc::pthread_sigmask(libc::SIG_BLOCK, &pipe, &mut mask) != 0 {
            return;
        }
        let was_pending =
            libc::sigpending(&mut before) == 0 && libc::sigismember(&before, libc::SIGPIPE) == 1;
        let written = libc::write(fd, bytes.as_ptr() as *const c_void, bytes.len());
        if written < 0 && !was_pending {
            take_pending(&pipe);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
    }
}

/// Returns what wakes the caller by the fields of `xserv_submit_options`, if anything does.
pub(super) fn waker_of(
    callback: Callback,
    user_data: *mut c_void,
    fd: c_int,
) -> Result<Option<Waker>> {
    if callback.is_none() && fd < 0 {
        return Ok(None);
    }
    if fd >= 0 {
        // SAFETY: asks for the flags of a descriptor; a wrong number is an error.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        if flags < 0 || flags & libc::O_NONBLOCK == 0 {
            return Err(Error::invalid_argument(format!(
                "options.wake_fd is {fd}, which is not an open file descriptor that does not block (O_NONBLOCK)"
            )));
        }
    }
    let may_raise = fd >= 0 && may_raise(fd);
    let target = WakeTarget { callback, user_data, fd, may_raise };
    Ok(Some(Box::new(move || {
        let target = &target;
        target.wake()
    })))
}
