//! The state that the scheduler's thread shares with all others: requests on their way in,
//! statistics on their way out.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::stats::EngineStats;
use super::submission::Submission;
use crate::error::Error;

/// Requests that have arrived for the thread.
#[derive(Default)]
pub(super) struct Intake {
    pub submissions: VecDeque<Submission>,
    /// Remarks on odd requests, for the log, which only the thread writes to.
    pub remarks: Vec<String>,
    /// Whether the thread is to end.
    pub shutdown: bool,
    /// The reason why no request is taken any more.
    pub failed: Option<Error>,
}

/// The most remarks that wait for the thread; further ones are dropped.
pub(super) const MAX_REMARKS: usize = 16;

/// The state that the thread and its users share.
pub(super) struct Shared {
    pub intake: Mutex<Intake>,
    /// Notified when something arrives in `intake`.
    pub arrived: Condvar,
    pub stats: Mutex<EngineStats>,
}

impl Shared {
    /// Returns an intake at which nothing has arrived yet.
    pub fn new(stats: EngineStats) -> Self {
        Shared { intake: Mutex::default(), arrived: Condvar::new(), stats: Mutex::new(stats) }
    }
}

/// Returns the guard of a lock, also after a panic elsewhere.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
