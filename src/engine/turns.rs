//! How requests of many threads share the runner: they take turns, a forward pass at a time.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::fair_mutex::FairMutex;
use super::runner::{Absence, LogitsRows, Runner, SequenceId, Turn};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;

/// The runner and the line in front of it.
pub struct Turns {
    runner: FairMutex<Runner>,
    next_sequence: AtomicU64,
    ended: Mutex<Ended>,
}

/// Sequences whose requests have ended. Whoever has the next turn removes them: a request that ends
/// does not wait in line for that.
#[derive(Default)]
struct Ended {
    ids: Vec<SequenceId>,
    num_active: usize,
}

/// A sequence that is removed when its request ends, however it ends.
pub struct ActiveSequence<'a> {
    turns: &'a Turns,
    id: SequenceId,
    absence: Arc<Absence>,
    had_turn: Cell<bool>,
}

impl Turns {
    /// Nobody is in line.
    pub fn new(runner: Runner) -> Self {
        Turns {
            runner: FairMutex::new(runner),
            next_sequence: AtomicU64::new(0),
            ended: Mutex::default(),
        }
    }

    /// A sequence for a request that begins now.
    pub fn sequence(&self) -> Result<ActiveSequence<'_>> {
        let id = SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed));
        let mut ended = self.ended();
        ended.num_active += 1;
        // Room for the end of every active sequence, so that ending one never allocates.
        let wanted = ended.num_active;
        if ended.ids.try_reserve(wanted).is_err() {
            ended.num_active -= 1;
            return Err(Error::out_of_memory("a sequence", wanted * size_of::<SequenceId>()));
        }
        Ok(ActiveSequence { turns: self, id, absence: Arc::default(), had_turn: Cell::new(false) })
    }

    fn ended(&self) -> MutexGuard<'_, Ended> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActiveSequence<'_> {
    /// Computes what is not computed yet of `token_ids`, in as many turns as it takes. The logits are
    /// as in [`Runner::advance`]. `should_stop` is asked while waiting and between layers; then the
    /// call fails as cancelled.
    pub fn compute(
        &self,
        model: &Model,
        token_ids: &[u32],
        rows: LogitsRows,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        self.absence.end();
        let outcome = self.take_turns(model, token_ids, rows, logits, should_stop);
        self.absence.begin();
        outcome
    }

    fn take_turns(
        &self,
        model: &Model,
        token_ids: &[u32],
        rows: LogitsRows,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let cancelled = || Error::new(ErrorKind::Cancelled, "the request was cancelled");
        loop {
            if should_stop() {
                return Err(cancelled());
            }
            let mut runner = self.turns.runner.lock_unless(should_stop)?.ok_or_else(cancelled)?;
            self.turns.ended().ids.drain(..).for_each(|id| runner.remove_sequence(id));
            self.had_turn.set(true);
            let who = (self.id, &self.absence);
            match runner.advance(model, who, token_ids, rows, logits, should_stop)? {
                Turn::Done => return Ok(()),
                Turn::Partly => {}
                Turn::NoBlocks => {
                    drop(runner);
                    self.turns.runner.wait_for_change();
                }
            }
        }
    }
}

impl Drop for ActiveSequence<'_> {
    fn drop(&mut self) {
        let mut ended = self.turns.ended();
        ended.num_active -= 1;
        // One that never had a turn has nothing to be removed.
        if self.had_turn.get() {
            ended.ids.push(self.id);
        }
    }
}
