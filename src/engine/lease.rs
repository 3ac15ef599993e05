//! Logits for a caller: the scheduler gives such a request its turns, a piece at a time and alone
//! in its step, and for each turn lends the resources of a forward pass to the caller's thread. So
//! the logits are written where the caller wants them, and only while the caller is inside the
//! call.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::request::CancelToken;
use super::step_resources::StepResources;
use crate::error::{Error, ErrorKind, Result};

/// The loan for one piece of a sequence.
pub(super) struct Lease {
    pub resources: Box<StepResources>,
    /// The sequence's KV blocks.
    pub blocks: Vec<u32>,
    /// Position of the piece's first token.
    pub start: usize,
    /// The number of its tokens.
    pub num_new: usize,
}

#[derive(Default)]
enum State {
    /// The caller waits for its turn, or the scheduler has not yet seen that it is back.
    #[default]
    Waiting,
    /// The caller may take the lease.
    Lent(Lease),
    /// The caller has the lease.
    Away,
    /// The scheduler may take the resources back.
    Back(Box<StepResources>, Result<()>),
    /// There will be no more turns.
    Ended(Result<()>),
    /// The caller has given up and waits for no turn.
    Left,
}

/// The interval at which a caller who may give up checks whether it should.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The place where a lease changes hands.
#[derive(Default)]
pub(super) struct Handoff {
    state: Mutex<State>,
    changed: Condvar,
}

/// A lease in the hands of the caller, who gives it back however the computation ends.
pub(super) struct Borrowed<'a> {
    handoff: &'a Handoff,
    lease: Option<Lease>,
    outcome: Result<()>,
}

fn given_up() -> Error {
    Error::new(ErrorKind::Cancelled, "the computation of logits was cancelled")
}

impl Handoff {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, state: State) {
        *self.state() = state;
        self.changed.notify_all();
    }

    /// Waits until `take` returns something.
    fn wait_for<T>(&self, mut take: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut state = self.state();
        loop {
            if let Some(found) = take(&mut state) {
                return found;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until `take` returns something; leaves when `cancel` is thrown before that.
    fn wait_until_cancelled<T>(
        &self,
        mut take: impl FnMut(&mut State) -> Option<T>,
        cancel: &CancelToken,
    ) -> Result<T> {
        let mut state = self.state();
        loop {
            if let Some(found) = take(&mut state) {
                return Ok(found);
            }
            if cancel.is_cancelled() {
                *state = State::Left;
                return Err(given_up());
            }
            let waited = self.changed.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The scheduler's side: lends, waits until the piece is computed, and takes back.
    pub fn lend(&self, lease: Lease) -> (Box<StepResources>, Result<()>) {
        {
            let mut state = self.state();
            if matches!(*state, State::Left) {
                return (lease.resources, Err(given_up()));
            }
            *state = State::Lent(lease);
        }
        self.changed.notify_all();
        self.wait_for(|state| match std::mem::take(state) {
            State::Back(resources, outcome) => Some((resources, outcome)),
            other => {
                *state = other;
                None
            }
        })
    }

    /// The scheduler's side: tells that there are no more turns.
    pub fn end(&self, outcome: Result<()>) {
        self.put(State::Ended(outcome));
    }

    /// The caller's side: waits for a turn, and gives up when `cancel` is thrown.
    pub fn borrow(&self, cancel: Option<&CancelToken>) -> Result<Borrowed<'_>> {
        let take = |state: &mut State| match std::mem::replace(state, State::Away) {
            State::Lent(lease) => Some(Ok(lease)),
            State::Ended(outcome) => Some(Err(outcome)),
            other => {
                *state = other;
                None
            }
        };
        let lease = match cancel {
            None => self.wait_for(take),
            Some(cancel) => self.wait_until_cancelled(take, cancel)?,
        };
        match lease {
            Ok(lease) => {
                let outcome = Err(Error::internal("the computation of logits was broken off"));
                Ok(Borrowed { handoff: self, lease: Some(lease), outcome })
            }
            Err(Err(error)) => Err(error),
            Err(Ok(())) => Err(Error::internal("logits were wanted of a request that has ended")),
        }
    }
}

impl Borrowed<'_> {
    /// Returns the lease.
    pub fn lease(&mut self) -> Result<&mut Lease> {
        self.lease.as_mut().ok_or_else(|| Error::internal("nothing was lent"))
    }

    /// Gives the lease back with the outcome of the computation.
    pub fn give_back(mut self, outcome: &Result<()>) {
        self.outcome = outcome.clone();
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            let outcome = std::mem::replace(&mut self.outcome, Ok(()));
            self.handoff.put(State::Back(lease.resources, outcome));
        }
    }
}
