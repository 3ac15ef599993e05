//! Thread state that the library's threads and the host's must not inherit from each other.

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

/// Keeps this thread in the standard floating-point mode while it lives: round to nearest, no
/// flushing of subnormal numbers, no traps. A host may run its own threads otherwise (audio code
/// flushes, as do programs linked with `-ffast-math`), and results must not depend on which thread
/// computes what.
pub struct StandardFloats {
    #[cfg(target_arch = "x86_64")]
    previous: u32,
}

impl StandardFloats {
    /// Switches this thread to the standard mode.
    #[cfg(target_arch = "x86_64")]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        // All exceptions masked, round to nearest, neither flush-to-zero nor denormals-are-zero.
        const STANDARD: u32 = 0x1f80;
        let mut previous = 0u32;
        // SAFETY: stores and loads MXCSR, of this thread alone; both operands are u32 on this
        // stack.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &mut previous, options(nostack));
            std::arch::asm!("ldmxcsr [{}]", in(reg) &STANDARD, options(nostack, readonly));
        }
        StandardFloats { previous }
    }

    /// Does nothing: the mode of other processors is left as it is.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn new() -> Self {
        StandardFloats {}
    }
}

impl Drop for StandardFloats {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: loads what `new` stored on this thread.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &self.previous, options(nostack, readonly));
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

#[cfg(test)]
mod tests {
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_host_gets_its_mode_back() {
        use super::StandardFloats;
        let tiny = std::hint::black_box(f32::MIN_POSITIVE);
        let halved = || std::hint::black_box(tiny) * std::hint::black_box(0.5);
        let flushing = 0x9fc0u32;
        let standard = 0x1f80u32;
        // SAFETY: MXCSR of this test's thread, set back below.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &flushing, options(nostack, readonly)) };
        let before = halved();
        let inside = {
            let _mode = StandardFloats::new();
            halved()
        };
        let after = halved();
        // SAFETY: as above.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &standard, options(nostack, readonly)) };
        assert_eq!((before, after), (0.0, 0.0));
        assert!(inside > 0.0);
    }
}
