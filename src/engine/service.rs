//! The scheduler's thread as others see it: requests go in, statistics come out, and it ends with the service.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::order::{Machine, Order};
use super::scheduler::Scheduler;
use super::stats::{EngineStats, Recorder};
use super::step_model::StepModel;
use super::worker::Worker;
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, ErrorKind, Result};
use crate::thread_state::SignalsBlocked;

/// What arrives for the thread.
#[derive(Default)]
pub(super) struct Intake {
    pub orders: VecDeque<Order>,
    /// The thread is to end.
    pub shutdown: bool,
    /// Why no request is taken any more.
    pub failed: Option<Error>,
    /// What the thread begins with, until it does.
    unstarted: Option<Box<Worker>>,
    thread: Option<JoinHandle<()>>,
}

/// What the scheduler's thread shares with all others.
pub(super) struct Shared {
    pub intake: Mutex<Intake>,
    pub arrived: Condvar,
    pub stats: Mutex<EngineStats>,
}

/// A scheduler and its thread, which starts with the first request and ends with this.
pub(super) struct Service {
    shared: Arc<Shared>,
    process_id: u32,
}

/// What a lock guards, also after a panic elsewhere.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stack of the thread: ten times what was seen to be used by a forward pass.
const STACK_BYTES: usize = 1 << 20;

impl Service {
    /// A service that has not started. `closed` ends all requests as cancelled.
    pub fn new(
        model: Arc<dyn StepModel>,
        backend: Arc<CpuBackend>,
        machine: Machine,
        scheduler: Scheduler,
        closed: Arc<AtomicBool>,
    ) -> Self {
        let mut recorder = Recorder::default();
        recorder.counts(scheduler.counts());
        let shared = Arc::new(Shared {
            intake: Mutex::default(),
            arrived: Condvar::new(),
            stats: Mutex::new(recorder.stats),
        });
        let worker =
            Worker::new(model, backend, machine, scheduler, closed, shared.clone(), recorder);
        lock(&shared.intake).unstarted = Some(Box::new(worker));
        Service { shared, process_id: std::process::id() }
    }

    /// Hands requests to the scheduler, all or none.
    pub fn submit(&self, orders: Vec<Order>) -> Result<()> {
        let mut intake = lock(&self.shared.intake);
        if let Some(error) = &intake.failed {
            return Err(error.clone());
        }
        let room = intake.orders.try_reserve(orders.len());
        room.map_err(|_| Error::out_of_memory("a request", size_of::<Order>()))?;
        if intake.thread.is_none() {
            self.start(&mut intake)?;
        }
        intake.orders.extend(orders);
        drop(intake);
        self.shared.arrived.notify_one();
        Ok(())
    }

    fn start(&self, intake: &mut Intake) -> Result<()> {
        let shared = self.shared.clone();
        let body = move || {
            let Some(mut worker) = lock(&shared.intake).unstarted.take() else { return };
            drop(shared);
            worker.run();
        };
        // The thread waits for the lock that is held here.
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new()
            .name("xserv-engine".to_string())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map_err(|e| {
                Error::new(ErrorKind::OutOfMemory, format!("cannot start the engine's thread: {e}"))
            })?;
        intake.thread = Some(thread);
        Ok(())
    }

    /// How things stand.
    pub fn stats(&self) -> EngineStats {
        *lock(&self.shared.stats)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if std::process::id() != self.process_id {
            // In a forked child the thread does not exist, and its locks may be held for ever. What is
            // shared with it is left alone.
            std::mem::forget(self.shared.clone());
            return;
        }
        let (thread, unstarted) = {
            let mut intake = lock(&self.shared.intake);
            intake.shutdown = true;
            (intake.thread.take(), intake.unstarted.take())
        };
        self.shared.arrived.notify_one();
        drop(unstarted);
        if let Some(thread) = thread {
            // A waker may have dropped the engine: then the thread ends by itself, after the waker.
            if thread.thread().id() != std::thread::current().id() {
                // It catches every panic; there is nothing to report here.
                let _ = thread.join();
            }
        }
    }
}
