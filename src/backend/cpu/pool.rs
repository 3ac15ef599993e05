//! The thread pool of one backend.
//!
//! It runs one job at a time: a function over task numbers that the workers and the calling thread
//! claim from a counter. A forward pass dispatches some two hundred jobs a token, so a dispatch
//! must cost about a microsecond: idle workers spin for [`SPIN_MICROSECONDS`] on one atomic word
//! and only then sleep, and the caller never waits for a worker that has not begun.
//!
//! The word `state` is `epoch << 32 | OPEN | active`. A worker joins the job of an epoch it has not
//! yet seen by incrementing `active` while the job is open; the caller closes the job when no task
//! is left and returns once `active` is zero, so no worker can touch a job that is over.

use crate::error::{try_with_capacity, Context, Error, Result};
use crate::panic_guard::catch_panic;
use crate::process::Process;
use crate::threads::{Thread, STACK_BYTES};
use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it sleeps. Longer than the gaps between the operators of
/// a layer, far shorter than anything a person could see in `top`.
const SPIN_MICROSECONDS: u64 = 50;
/// A limit above the core count of any machine; guards the thread count of an option struct.
pub const MAX_THREADS: usize = 1024;

const OPEN: u64 = 1 << 31;
const ACTIVE_MASK: u64 = OPEN - 1;
const EPOCH_SHIFT: u32 = 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    num_tasks: usize,
}

struct Shared {
    state: AtomicU64,
    next_task: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    panicked: Mutex<Option<String>>,
    num_sleeping: AtomicUsize,
    /// Whether the workers are to end.
    sleep: Mutex<bool>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written by the one caller that
// holds `Pool::submit` while `active` is zero and the job closed, and read by workers only between
// joining (acquire) and leaving (release), during which the caller does not write.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only dereferenced while the caller keeps its target alive.
unsafe impl Send for Shared {}

thread_local! {
    /// Whether this thread is inside a task of any pool, in which case a nested job runs on this
    /// thread.
    static INSIDE_TASK: Cell<bool> = const { Cell::new(false) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The threads of one backend. The calling thread counts as one of `num_threads`.
pub(super) struct Pool {
    shared: Arc<Shared>,
    submit: Mutex<()>,
    workers: Vec<Thread<()>>,
    /// The process in which the workers run.
    process: Process,
}

impl Pool {
    pub(super) fn new(num_threads: usize) -> Result<Self> {
        if num_threads == 0 || num_threads > MAX_THREADS {
            return Err(Error::invalid_argument(format!(
                "the number of threads is {num_threads}; it must be 1 to {MAX_THREADS}"
            )));
        }
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next_task: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: Mutex::new(None),
            num_sleeping: AtomicUsize::new(0),
            sleep: Mutex::new(false),
            wake: Condvar::new(),
        });
        let mut pool = Pool {
            shared,
            submit: Mutex::new(()),
            workers: try_with_capacity(num_threads - 1, "threads")?,
            process: Process::current(),
        };
        for n in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let body = move || {
                work(&shared);
                Ok(())
            };
            let worker = Thread::start(&format!("xserv-cpu-{n}"), STACK_BYTES, body)
                .context(|| format!("thread {n} of {num_threads}"))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    pub(super) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    pub(super) fn parallel_for(&self, num_tasks: usize, task: &Task<'_>) -> Result<()> {
        if num_tasks == 0 {
            return Ok(());
        }
        if num_tasks == 1 || self.workers.is_empty() || INSIDE_TASK.get() {
            return run_here(num_tasks, task);
        }
        self.run(num_tasks, task, &mut |shared, job| shared.take_tasks(job))
    }

    pub(super) fn with_helpers(&self, helper: &Task<'_>, main: &mut dyn FnMut()) -> Result<()> {
        if self.workers.is_empty() || INSIDE_TASK.get() {
            return catch_panic(main).map_err(|message| task_panicked(&message));
        }
        self.run(self.workers.len(), helper, &mut |shared, job| {
            if let Err(message) = catch_panic(&mut *main) {
                // Helpers that have not begun need not begin.
                shared.next_task.store(job.num_tasks, Ordering::Relaxed);
                lock(&shared.panicked).get_or_insert(message);
            }
        })
    }

    /// Opens a job to the workers, does `here` on this thread, and closes the job. `here` must not
    /// panic.
    fn run(
        &self,
        num_tasks: usize,
        task: &Task<'_>,
        here: &mut dyn FnMut(&Shared, Job),
    ) -> Result<()> {
        // Concurrent callers take turns.
        let _submitting = lock(&self.submit);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is extended, to fit into `Shared`. This function does not
        // return before the job is closed and no worker is active, so nobody uses it past its
        // lifetime.
        let task: *const Task<'static> =
            unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        let job = Job { task, num_tasks };
        // SAFETY: we hold `submit`, the previous job is closed and has no active worker.
        unsafe { *shared.job.get() = Some(job) };
        shared.next_task.store(0, Ordering::Relaxed);
        let epoch = (shared.state.load(Ordering::Relaxed) >> EPOCH_SHIFT).wrapping_add(1);
        shared.state.store(epoch << EPOCH_SHIFT | OPEN, Ordering::SeqCst);
        if shared.num_sleeping.load(Ordering::SeqCst) > 0 {
            // The lock makes us wait for a worker that has counted itself but does not sleep yet.
            drop(lock(&shared.sleep));
            shared.wake.notify_all();
        }
        here(shared, job);
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & ACTIVE_MASK != 0 {
            spins = spins.saturating_add(1);
            // A worker that lost its core needs ours more than we do.
            if spins > 10_000 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        match lock(&shared.panicked).take() {
            None => Ok(()),
            Some(message) => Err(task_panicked(&message)),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a forked child the workers do not exist: waiting for them would never end.
            self.workers.drain(..).for_each(std::mem::forget);
            return;
        }
        *lock(&self.shared.sleep) = true;
        // An epoch without an open job makes spinning workers look at the flag.
        self.shared.state.fetch_add(1 << EPOCH_SHIFT, Ordering::SeqCst);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a task; there is nothing to report here.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Claims tasks until none is left. A panic ends the job early and is kept for the caller.
    fn take_tasks(&self, job: Job) {
        // SAFETY: the caller of `parallel_for` keeps the task alive while the job is open or any
        // worker is active, and this runs only then.
        let task = unsafe { &*job.task };
        INSIDE_TASK.set(true);
        let outcome = catch_panic(|| loop {
            let index = self.next_task.fetch_add(1, Ordering::Relaxed);
            if index >= job.num_tasks {
                break;
            }
            task(index);
        });
        INSIDE_TASK.set(false);
        order_streams();
        if let Err(message) = outcome {
            self.next_task.store(job.num_tasks, Ordering::Relaxed);
            lock(&self.panicked).get_or_insert(message);
        }
    }
}

/// The main loop of a worker.
fn work(shared: &Shared) {
    let mut seen_epoch = 0;
    loop {
        let Some(state) = wait_for_epoch(shared, seen_epoch) else { return };
        seen_epoch = state >> EPOCH_SHIFT;
        let mut current = state;
        let joined = loop {
            if current >> EPOCH_SHIFT != seen_epoch || current & OPEN == 0 {
                break false;
            }
            match shared.state.compare_exchange_weak(
                current,
                current + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break true,
                Err(now) => current = now,
            }
        };
        if joined {
            // SAFETY: we are counted in `active`, so the caller neither writes `job` nor returns.
            if let Some(job) = unsafe { *shared.job.get() } {
                shared.take_tasks(job);
            }
            shared.state.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Waits until the epoch of the state differs from `seen_epoch` and returns the state; None when
/// the pool ends.
fn wait_for_epoch(shared: &Shared, seen_epoch: u64) -> Option<u64> {
    let mut deadline = None;
    loop {
        for _ in 0..64 {
            let state = shared.state.load(Ordering::Acquire);
            if state >> EPOCH_SHIFT != seen_epoch {
                if state & OPEN == 0 && *lock(&shared.sleep) {
                    return None;
                }
                return Some(state);
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        match deadline {
            None => deadline = Some(now + Duration::from_micros(SPIN_MICROSECONDS)),
            Some(end) if now < end => {}
            Some(_) => break,
        }
    }
    let mut ending = lock(&shared.sleep);
    // Counted before the last look at the state, while the caller stores the state before it looks
    // at the count: one of the two sees the other.
    shared.num_sleeping.fetch_add(1, Ordering::SeqCst);
    let state = loop {
        let state = shared.state.load(Ordering::SeqCst);
        if *ending {
            break None;
        }
        if state >> EPOCH_SHIFT != seen_epoch {
            break Some(state);
        }
        ending = shared.wake.wait(ending).unwrap_or_else(PoisonError::into_inner);
    };
    shared.num_sleeping.fetch_sub(1, Ordering::SeqCst);
    state
}

/// Runs all tasks on this thread, handling panics as the pool does.
fn run_here(num_tasks: usize, task: &Task<'_>) -> Result<()> {
    let outcome = catch_panic(|| (0..num_tasks).for_each(task));
    order_streams();
    outcome.map_err(|message| task_panicked(&message))
}

/// Puts what this thread has written past the caches
/// ([`Vector16::stream`](super::simd::Vector16::stream)) before all that it writes from now on: such
/// stores alone are not in the order that locks and atomics rely on.
fn order_streams() {
    // SAFETY: every x86-64 has SSE.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

fn task_panicked(message: &str) -> Error {
    Error::internal(format!("a parallel task panicked: {message}"))
}
