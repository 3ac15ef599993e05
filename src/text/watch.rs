//! The watch over one text that is being encoded: it ends what takes too long or is no longer
//! wanted.
//!
//! The steps of the pipeline ask it between pieces, words and matches. Nothing else can end an
//! encoding: a step of the `tokenizers` crate runs to its end once begun.

use crate::error::{Error, ErrorKind, Result};
use crate::thread_state::thread_cpu_time;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The processor time that any text may take, and what each of its bytes adds: about eight times
/// what the tokenizers of published models take.
const BASE_TIME: Duration = Duration::from_millis(1000);
const TIME_PER_BYTE: Duration = Duration::from_nanos(4000);

/// Calls of [`Watch::tick`] between two looks at the clock, and the time, in nanoseconds, between
/// two looks at everything else, which cost a system call.
const TICKS: u32 = 8;
const INTERVAL_NS: u64 = 1_000_000;

/// Says whether the tokens of a text are no longer wanted.
pub type ShouldStop<'a> = dyn Fn() -> bool + Sync + 'a;

/// See the module's description. One thread uses it; the crate asks that what it is handed could be
/// used by several.
pub(super) struct Watch<'a> {
    should_stop: &'a ShouldStop<'a>,
    began: Instant,
    began_cpu: Duration,
    limit: Duration,
    ticks: AtomicU32,
    /// Nanoseconds from `began` to the last look.
    looked: AtomicU64,
    /// The first failure. The crate drops those of normalizers.
    failure: Mutex<Option<Error>>,
}

impl<'a> Watch<'a> {
    /// Watches the encoding of a text of `len` bytes by the calling thread.
    pub fn over_text(len: usize, should_stop: &'a ShouldStop<'a>) -> Self {
        let time = TIME_PER_BYTE.saturating_mul(u32::try_from(len).unwrap_or(u32::MAX));
        Self::with_limit(BASE_TIME.saturating_add(time), should_stop)
    }

    /// Watches with another limit of processor time.
    pub fn with_limit(limit: Duration, should_stop: &'a ShouldStop<'a>) -> Self {
        Watch {
            should_stop,
            began: Instant::now(),
            began_cpu: thread_cpu_time(),
            limit,
            ticks: AtomicU32::new(0),
            looked: AtomicU64::new(0),
            failure: Mutex::new(None),
        }
    }

    /// Returns the processor time since the beginning.
    pub fn elapsed(&self) -> Duration {
        thread_cpu_time().saturating_sub(self.began_cpu)
    }

    /// Fails if the encoding is to end: [`ErrorKind::Cancelled`] if it is no longer wanted,
    /// [`ErrorKind::InvalidFile`] if it has taken too long, else with the failure that was noted.
    pub fn check(&self) -> Result<()> {
        if let Some(failure) = self.failure().as_ref() {
            return Err(failure.clone());
        }
        if (self.should_stop)() {
            return Err(Error::new(ErrorKind::Cancelled, "the text is no longer wanted"));
        }
        if self.elapsed() > self.limit {
            return Err(Error::invalid_file(format!(
                "the tokenizer takes more than {} ms of processor time on the text",
                self.limit.as_millis()
            )));
        }
        Ok(())
    }

    /// Does the same as [`Watch::check`] once a millisecond, and else next to nothing: for loops
    /// over words and matches.
    pub fn tick(&self) -> Result<()> {
        if !self.ticks.fetch_add(1, Relaxed).is_multiple_of(TICKS) {
            return Ok(());
        }
        let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if now.saturating_sub(self.looked.load(Relaxed)) < INTERVAL_NS {
            return Ok(());
        }
        self.looked.store(now, Relaxed);
        self.check()
    }

    /// Notes a failure that would else be lost; [`Watch::check`] returns the first.
    pub fn note(&self, failure: Error) {
        self.failure().get_or_insert(failure);
    }

    fn failure(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
