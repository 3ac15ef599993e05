//! Logits for a caller: the scheduler gives such a request its turns, a piece at a time and alone
//! in its step, and for each turn lends the resources of a forward pass to the caller's thread. So
//! the logits are written where the caller wants them, and only while the caller is inside the
//! call.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::request::{CancelToken, LOOK_EVERY};
use super::step_resources::StepResources;
use crate::error::{Error, ErrorKind, Result};

/// The loan for one piece of a sequence. `R`: what is lent; only tests lend anything else.
pub(super) struct Lease<R = StepResources> {
    pub resources: Box<R>,
    /// The sequence's KV blocks.
    pub blocks: Vec<u32>,
    /// Position of the piece's first token.
    pub start: usize,
    /// The number of its tokens.
    pub num_new: usize,
}

enum State<R> {
    /// The caller waits for its turn.
    Waiting,
    /// The caller may take the lease.
    Lent(Lease<R>),
    /// The caller has the lease.
    Away,
    /// The scheduler may take the resources back, which the caller does not wait for.
    Back(Box<R>, Result<()>),
    /// There will be no more turns.
    Ended(Result<()>),
}

struct Shared<R> {
    state: State<R>,
    /// Whether the caller has given up and waits for no turn. It may do so before the scheduler has
    /// taken back what it has lent, which `state` then still has.
    has_left: bool,
}

/// The place where a lease changes hands.
pub(super) struct Handoff<R = StepResources> {
    shared: Mutex<Shared<R>>,
    changed: Condvar,
}

impl<R> Default for Handoff<R> {
    fn default() -> Self {
        let shared = Shared { state: State::Waiting, has_left: false };
        Handoff { shared: Mutex::new(shared), changed: Condvar::new() }
    }
}

/// A lease in the hands of the caller, who gives it back however the computation ends.
pub(super) struct Borrowed<'a, R = StepResources> {
    handoff: &'a Handoff<R>,
    lease: Option<Lease<R>>,
    outcome: Result<()>,
}

fn given_up() -> Error {
    Error::new(ErrorKind::Cancelled, "the computation of logits was cancelled")
}

impl<R> Handoff<R> {
    fn shared(&self) -> MutexGuard<'_, Shared<R>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, state: State<R>) {
        self.shared().state = state;
        self.changed.notify_all();
    }

    /// Waits until `take` returns something.
    fn wait_for<T>(&self, mut take: impl FnMut(&mut State<R>) -> Option<T>) -> T {
        let mut shared = self.shared();
        loop {
            if let Some(found) = take(&mut shared.state) {
                return found;
            }
            shared = self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until `take` returns something; leaves when `cancel` is thrown before that.
    fn wait_until_cancelled<T>(
        &self,
        mut take: impl FnMut(&mut State<R>) -> Option<T>,
        cancel: &CancelToken,
    ) -> Result<T> {
        let mut shared = self.shared();
        loop {
            if let Some(found) = take(&mut shared.state) {
                return Ok(found);
            }
            if cancel.is_cancelled() {
                shared.has_left = true;
                return Err(given_up());
            }
            let waited = self.changed.wait_timeout(shared, LOOK_EVERY);
            shared = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The scheduler's side: lends, waits until the piece is computed, and takes back.
    pub fn lend(&self, lease: Lease<R>) -> (Box<R>, Result<()>) {
        {
            let mut shared = self.shared();
            if shared.has_left {
                return (lease.resources, Err(given_up()));
            }
            shared.state = State::Lent(lease);
        }
        self.changed.notify_all();
        self.wait_for(|state| match std::mem::replace(state, State::Waiting) {
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
    pub fn borrow(&self, cancel: Option<&CancelToken>) -> Result<Borrowed<'_, R>> {
        let take = |state: &mut State<R>| match std::mem::replace(state, State::Away) {
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

impl<R> Borrowed<'_, R> {
    /// Returns the lease.
    pub fn lease(&mut self) -> Result<&mut Lease<R>> {
        self.lease.as_mut().ok_or_else(|| Error::internal("nothing was lent"))
    }

    /// Gives the lease back with the outcome of the computation.
    pub fn give_back(mut self, outcome: &Result<()>) {
        self.outcome = outcome.clone();
    }
}

impl<R> Drop for Borrowed<'_, R> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            let outcome = std::mem::replace(&mut self.outcome, Ok(()));
            self.handoff.put(State::Back(lease.resources, outcome));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    /// A caller that gives up right after a piece must leave what it has lent to the scheduler, who
    /// waits for it: it waited forever, and with it all requests.
    #[test]
    fn leaving_after_a_piece_gives_back_what_was_lent() {
        let handoff = Handoff::<u32>::default();
        let cancel = CancelToken::default();
        let (send, receive) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let lease =
                    || Lease { resources: Box::new(7), blocks: Vec::new(), start: 0, num_new: 1 };
                let (resources, outcome) = handoff.lend(lease());
                send.send((*resources, outcome.is_ok())).expect("a receiver");
                // Nobody waits for another turn.
                let (resources, outcome) = handoff.lend(lease());
                send.send((*resources, outcome.is_ok())).expect("a receiver");
            });
            let mut borrowed = handoff.borrow(Some(&cancel)).expect("a turn");
            let lease = borrowed.lease.take().expect("a lease");
            cancel.cancel();
            // The scheduler sees nothing of this before the caller has left: it has not been woken.
            handoff.shared().state = State::Back(lease.resources, Ok(()));
            let error = handoff.borrow(Some(&cancel)).err().expect("no turn");
            assert_eq!(error.kind(), ErrorKind::Cancelled);
            handoff.changed.notify_all();
            let patience = Duration::from_secs(60);
            let first = receive.recv_timeout(patience);
            if first.is_err() {
                // Frees the scheduler, so that the test ends.
                handoff.put(State::Back(Box::new(0), Ok(())));
            }
            assert_eq!(first, Ok((7, true)));
            assert_eq!(receive.recv_timeout(patience), Ok((7, false)));
        });
    }
}
