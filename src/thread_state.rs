//! Thread state that the library's threads and the host's must not inherit from each other.

use std::cell::Cell;

/// Keeps signals blocked on this thread while it lives. Threads started meanwhile inherit the mask,
/// so that the host's signal handlers never run on a thread of ours. Faults of the thread itself
/// stay unblocked, for the host's crash reporter.
pub struct SignalsBlocked {
    #[cfg(unix)]
    previous: Option<libc::sigset_t>,
}

impl SignalsBlocked {
    /// Blocks the signals.
    #[cfg(unix)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        // SAFETY: both sets are plain values on this stack, filled before they are read; the mask
        // changed is that of the calling thread only.
        unsafe {
            let mut blocked = std::mem::zeroed::<libc::sigset_t>();
            let mut previous = std::mem::zeroed::<libc::sigset_t>();
            libc::sigfillset(&mut blocked);
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT] {
                libc::sigdelset(&mut blocked, fault);
            }
            let mask = &mut previous;
            let changed = libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, mask) == 0;
            SignalsBlocked { previous: changed.then_some(previous) }
        }
    }

    /// Does nothing on this system.
    #[cfg(not(unix))]
    pub fn new() -> Self {
        SignalsBlocked {}
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Some(previous) = &self.previous {
            // SAFETY: `previous` was filled by pthread_sigmask on this very thread.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, previous, std::ptr::null_mut()) };
        }
    }
}

/// The floating-point mode of a thread: rounding, flushing of subnormal numbers, and which
/// exceptions end in a signal. On x86-64 it is the register MXCSR, whose lowest bits are flags of
/// past exceptions; on aarch64 it is FPCR. On other processors all modes are equal.
///
/// The mode of the x87 unit is left out: no code of the library uses that unit, so its mode changes
/// no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FloatMode(u64);

impl FloatMode {
    /// Round to nearest, no flushing, no signals.
    #[cfg(target_arch = "x86_64")]
    const STANDARD: FloatMode = FloatMode(0x1f80);
    #[cfg(not(target_arch = "x86_64"))]
    const STANDARD: FloatMode = FloatMode(0);
    /// The bits that are flags.
    #[cfg(target_arch = "x86_64")]
    const FLAGS: u64 = 0x3f;
    #[cfg(not(target_arch = "x86_64"))]
    const FLAGS: u64 = 0;

    /// Returns the mode of this thread.
    fn get() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let mut mxcsr = 0u32;
            // SAFETY: stores MXCSR into a u32 on this stack.
            unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack)) };
            FloatMode(u64::from(mxcsr))
        }
        #[cfg(target_arch = "aarch64")]
        {
            let fpcr: u64;
            // SAFETY: reads FPCR, which every program may.
            unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nostack)) };
            FloatMode(fpcr)
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        Self::STANDARD
    }

    /// Makes this the mode of this thread.
    fn set(self) {
        #[cfg(target_arch = "x86_64")]
        {
            let mxcsr = self.0 as u32;
            // SAFETY: loads MXCSR, of this thread alone, with what `get` gave or the standard.
            unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mxcsr, options(nostack)) };
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: writes FPCR, of this thread alone, with what `get` gave or the standard.
        unsafe {
            std::arch::asm!("msr fpcr, {}", in(reg) self.0, options(nostack))
        };
    }

    /// Switches this thread to the standard mode, which costs more than finding it there.
    fn leave_for_standard(self) {
        if self.0 & !Self::FLAGS != Self::STANDARD.0 {
            Self::STANDARD.set();
        }
    }

    /// Switches this thread back to this mode and these flags.
    fn restore(self) {
        if Self::get() != self {
            self.set();
        }
    }
}

thread_local! {
    /// The mode in which the innermost call of the library found this thread. Threads of the
    /// library's own are in the standard mode.
    static HOST_MODE: Cell<FloatMode> = const { Cell::new(FloatMode::STANDARD) };
}

/// Runs `f` in the standard floating-point mode, and gives the thread its own mode back afterwards,
/// with its flags. A host may run its threads otherwise (audio code flushes, as do programs linked
/// with `-ffast-math`; numerical code lets exceptions end in signals), and results must not depend
/// on which thread computes what.
///
/// Threads that `f` starts inherit the standard mode.
// Not inlined, so that the compiler cannot move arithmetic of `f` to before or after the switch.
#[inline(never)]
pub fn with_standard_floats<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(FloatMode);
    impl Drop for Restore {
        fn drop(&mut self) {
            HOST_MODE.replace(self.0).restore();
        }
    }
    let host = FloatMode::get();
    let _restore = Restore(HOST_MODE.replace(host));
    host.leave_for_standard();
    apart(f)
}

/// Runs a function of the host within [`with_standard_floats`]: in the host's mode, which the
/// function may change.
#[inline(never)]
pub fn with_host_floats<T>(f: impl FnOnce() -> T) -> T {
    HOST_MODE.get().restore();
    let out = apart(f);
    let host = FloatMode::get();
    HOST_MODE.set(host);
    host.leave_for_standard();
    out
}

/// Runs `f` as a function of its own.
#[inline(never)]
fn apart<T>(f: impl FnOnce() -> T) -> T {
    f()
}

/// Keeps this thread from being cancelled (`pthread_cancel`) while it lives: the C library ends a
/// cancelled thread by unwinding its stack, which frames of Rust do not survive.
pub struct CancellationDisabled {
    #[cfg(target_os = "linux")]
    previous: std::ffi::c_int,
}

#[cfg(target_os = "linux")]
extern "C" {
    fn pthread_setcancelstate(
        state: std::ffi::c_int,
        previous: *mut std::ffi::c_int,
    ) -> std::ffi::c_int;
}

#[cfg(target_os = "linux")]
const PTHREAD_CANCEL_DISABLE: std::ffi::c_int = 1;

impl CancellationDisabled {
    /// Disables cancellation. A thread that is cancelled meanwhile ends after this value is
    /// dropped, at its next cancellation point.
    #[cfg(target_os = "linux")]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let mut previous = PTHREAD_CANCEL_DISABLE;
        // SAFETY: changes the calling thread alone, and writes an int on this stack. With these
        // arguments it cannot fail.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut previous) };
        CancellationDisabled { previous }
    }

    /// Does nothing on this system.
    #[cfg(not(target_os = "linux"))]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        CancellationDisabled {}
    }
}

impl Drop for CancellationDisabled {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.previous != PTHREAD_CANCEL_DISABLE {
            let mut ours = 0;
            // SAFETY: gives the thread back the state that `new` found. It is no cancellation point
            // for threads that are cancelled at such points only (the header asks for that).
            unsafe { pthread_setcancelstate(self.previous, &mut ours) };
        }
    }
}

/// Returns the processor time that the calling thread has used; zero where the system does not
/// report it.
#[cfg(unix)]
pub fn thread_cpu_time() -> std::time::Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which lies on this stack.
    let is_known = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } == 0;
    if is_known {
        std::time::Duration::new(
            time.tv_sec.max(0) as u64,
            time.tv_nsec.clamp(0, 999_999_999) as u32,
        )
    } else {
        std::time::Duration::ZERO
    }
}

/// Returns zero: this system does not report the processor time of a thread.
#[cfg(not(unix))]
pub fn thread_cpu_time() -> std::time::Duration {
    std::time::Duration::ZERO
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    fn halved() -> f32 {
        std::hint::black_box(f32::MIN_POSITIVE) * std::hint::black_box(0.5)
    }

    #[test]
    fn the_host_gets_its_mode_back() {
        let flushing = FloatMode(0x9fc0);
        let unmasked = FloatMode(0x1d00);
        flushing.set();
        let before = halved();
        let (inside, in_callback, after_callback, started) = with_standard_floats(|| {
            let inside = halved();
            let in_callback = with_host_floats(halved);
            let started = std::thread::spawn(halved).join();
            (inside, in_callback, halved(), started.unwrap())
        });
        let after = halved();
        // A callback changes the mode, and calls the library again.
        let nested = with_standard_floats(|| {
            with_host_floats(|| {
                unmasked.set();
                with_standard_floats(halved)
            })
        });
        let changed = FloatMode::get();
        FloatMode::STANDARD.set();
        assert_eq!((before, in_callback, after), (0.0, 0.0, 0.0));
        assert!(inside > 0.0 && after_callback > 0.0 && started > 0.0 && nested > 0.0);
        assert_eq!(changed, unmasked);
    }

    #[test]
    fn a_panic_gives_the_mode_back_too() {
        let flushing = FloatMode(0x9fc0);
        flushing.set();
        let outcome = std::panic::catch_unwind(|| {
            with_standard_floats(|| std::panic::resume_unwind(Box::new(())))
        });
        let after = FloatMode::get();
        FloatMode::STANDARD.set();
        assert!(outcome.is_err());
        assert_eq!(after, flushing);
    }
}
