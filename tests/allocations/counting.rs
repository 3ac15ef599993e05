//! Counts what the library's allocator does, and lets it fail.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use xserv::reserve::{watch, Watcher};

static IS_ON: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);
/// The place of the first one.
static FIRST: Mutex<Option<String>> = Mutex::new(None);

thread_local! {
    static IS_EXEMPT: Cell<bool> = const { Cell::new(false) };
    /// Allocations of this thread until one fails; 0: none does.
    static UNTIL_FAILURE: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this size fail on threads that are not exempt; 0: none does.
static FAILING_SIZE: AtomicUsize = AtomicUsize::new(0);
/// Allocations that failed.
static FAILURES: AtomicU64 = AtomicU64::new(0);

/// To be called before anything is counted or to fail.
pub fn begin() {
    watch(Watcher {
        may_allocate: |bytes| {
            note(&ALLOCATIONS);
            !is_to_fail(bytes)
        },
        freed: || note(&FREES),
    });
}

/// Lets the allocation of this thread with this number fail while `body` runs, from 1. Returns
/// whether there was one.
pub fn fail_nth<T>(number: u64, body: impl FnOnce() -> T) -> (T, bool) {
    UNTIL_FAILURE.set(number);
    let result = body();
    (result, UNTIL_FAILURE.replace(0) == 0)
}

/// Lets all allocations of `size` bytes fail on threads that are not exempt while `body` runs.
/// Returns their number.
pub fn fail_size(size: usize, body: impl FnOnce()) -> u64 {
    FAILURES.store(0, Ordering::SeqCst);
    FAILING_SIZE.store(size, Ordering::SeqCst);
    body();
    FAILING_SIZE.store(0, Ordering::SeqCst);
    FAILURES.load(Ordering::SeqCst)
}

fn is_to_fail(size: usize) -> bool {
    let left = UNTIL_FAILURE.get();
    UNTIL_FAILURE.set(left.saturating_sub(1));
    let by_size = size > 0 && FAILING_SIZE.load(Ordering::Relaxed) == size && !IS_EXEMPT.get();
    if by_size {
        FAILURES.fetch_add(1, Ordering::SeqCst);
    }
    left == 1 || by_size
}

/// The counts of threads that are not exempt.
#[derive(Debug)]
pub struct Counts {
    pub allocations: u64,
    pub frees: u64,
    /// The stack of the first.
    pub first: Option<String>,
}

/// Excludes this thread from the counts.
pub fn exempt_this_thread() {
    IS_EXEMPT.set(true);
}

/// Counts while `body` runs.
pub fn count(body: impl FnOnce()) -> Counts {
    ALLOCATIONS.store(0, Ordering::Relaxed);
    FREES.store(0, Ordering::Relaxed);
    IS_ON.store(true, Ordering::SeqCst);
    body();
    IS_ON.store(false, Ordering::SeqCst);
    Counts {
        allocations: ALLOCATIONS.load(Ordering::SeqCst),
        frees: FREES.load(Ordering::SeqCst),
        first: FIRST.lock().unwrap_or_else(PoisonError::into_inner).take(),
    }
}

fn note(counter: &AtomicU64) {
    if !IS_ON.load(Ordering::Relaxed) || IS_EXEMPT.get() {
        return;
    }
    // The main thread is that of the test runner.
    // SAFETY: takes nothing, always succeeds.
    if unsafe { libc::gettid() } == std::process::id() as i32 {
        return;
    }
    counter.fetch_add(1, Ordering::SeqCst);
    // Else taking the stack would be counted.
    IS_EXEMPT.set(true);
    let mut first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    if first.is_none() {
        *first = Some(Backtrace::force_capture().to_string());
    }
    drop(first);
    IS_EXEMPT.set(false);
}
