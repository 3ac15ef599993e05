//! An allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static IS_ON: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);
/// Where the first was made.
static FIRST: Mutex<Option<String>> = Mutex::new(None);

thread_local! {
    static IS_EXEMPT: Cell<bool> = const { Cell::new(false) };
}

/// What threads that are not exempt did.
#[derive(Debug)]
pub struct Counts {
    pub allocations: u64,
    pub frees: u64,
    /// The stack of the first.
    pub first: Option<String>,
}

/// What this thread does is not counted.
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

// SAFETY: the system's allocator does all that it asks for.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(&ALLOCATIONS);
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(&ALLOCATIONS);
        // SAFETY: the caller's promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note(&ALLOCATIONS);
        // SAFETY: the caller's promises.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note(&FREES);
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}
