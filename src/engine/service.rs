//! The scheduler's thread from outside: requests go in, statistics come out, and it ends with the
//! service.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::inbox::is_scheduler_thread;
use super::intake::{lock, Shared, MAX_REMARKS};
use super::log::Logger;
use super::scheduler::Scheduler;
use super::stats::{EngineStats, Recorder};
use super::step_model::StepModel;
use super::step_resources::StepResources;
use super::submission::Submission;
use super::worker::Worker;
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::process::Process;
use crate::threads;

/// The scheduler's thread before it has started and after.
struct Thread {
    /// The worker that the thread begins with, until it does.
    unstarted: Option<Box<Worker>>,
    handle: Option<threads::Thread<()>>,
}

/// A scheduler and its thread, which starts with the first request and ends when this is dropped.
pub(super) struct Service {
    shared: Arc<Shared>,
    thread: Arc<Mutex<Thread>>,
    process: Process,
}

/// Stack of the thread: ten times the use that was measured in a forward pass.
const STACK_BYTES: usize = 1 << 20;

impl Service {
    /// Returns a service that has not started. `closed` ends all requests as cancelled.
    pub fn new(
        model: Arc<dyn StepModel>,
        backend: Arc<CpuBackend>,
        resources: StepResources,
        scheduler: Scheduler,
        closed: Arc<AtomicBool>,
        log: Arc<Logger>,
    ) -> Self {
        let shared = Arc::new(Shared::new(Recorder::new(scheduler.counts()).stats));
        let worker = Worker::new(model, backend, resources, scheduler, closed, shared.clone(), log);
        let thread = Thread { unstarted: Some(Box::new(worker)), handle: None };
        Service { shared, thread: Arc::new(Mutex::new(thread)), process: Process::current() }
    }

    /// Hands requests to the scheduler, all or none.
    pub fn submit(&self, submissions: Vec<Submission>) -> Result<()> {
        let mut intake = lock(&self.shared.intake);
        if let Some(error) = &intake.failed {
            return Err(error.clone());
        }
        let room = intake.submissions.try_reserve(submissions.len());
        room.map_err(|_| Error::out_of_memory("a request", size_of::<Submission>()))?;
        self.start()?;
        intake.submissions.extend(submissions);
        drop(intake);
        self.shared.arrived.notify_one();
        Ok(())
    }

    /// Leaves a message for the log, to be written when the next request is taken.
    pub fn remark(&self, sentence: String) {
        let remarks = &mut lock(&self.shared.intake).remarks;
        if remarks.len() < MAX_REMARKS && remarks.try_reserve(1).is_ok() {
            remarks.push(sentence);
        }
    }

    /// Starts the thread, unless that has been done.
    fn start(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.handle.is_some() {
            return Ok(());
        }
        let shared = self.thread.clone();
        let body = move || {
            let Some(mut worker) = lock(&shared).unstarted.take() else { return Ok(()) };
            drop(shared);
            worker.run();
            Ok(())
        };
        // The thread waits for the lock that is held here.
        thread.handle = Some(threads::Thread::start("xserv-engine", STACK_BYTES, body)?);
        Ok(())
    }

    /// Returns the latest statistics.
    pub fn stats(&self) -> EngineStats {
        *lock(&self.shared.stats)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a forked child the thread does not exist, and its locks may be held for ever. The
            // state that is shared with it is leaked.
            std::mem::forget(self.shared.clone());
            std::mem::forget(self.thread.clone());
            return;
        }
        lock(&self.shared.intake).shutdown = true;
        let handle = lock(&self.thread).handle.take();
        self.shared.arrived.notify_one();
        // Without a thread nothing has been submitted, and the worker goes with `self.thread`. A
        // thread takes its worker in any case, to tell the end of what was submitted.
        let Some(handle) = handle else { return };
        // A waker may have dropped the engine, and two wakers the engines of each other: nothing is
        // waited for there, and the thread ends by itself. (`std::thread::current` would panic in
        // the destructor of a thread-specific key.)
        if !is_scheduler_thread() {
            // It catches every panic; there is nothing to report here.
            let _ = handle.join();
        }
    }
}
