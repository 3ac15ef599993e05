//! A thread that waits for the scores of its tokens.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::request::{CancelToken, LOOK_EVERY};
use crate::error::{try_filled, Error, ErrorKind, Result};
use crate::model::TokenScore;

/// A thread's wait for scores.
#[derive(Default)]
pub(super) struct ScoreCall {
    shared: Mutex<CallState>,
    ended: Condvar,
}

#[derive(Default)]
struct CallState {
    scores: Vec<TokenScore>,
    outcome: Option<Result<()>>,
    has_left: bool,
}

impl ScoreCall {
    /// Returns the wait for this number of scores.
    pub fn new(num_scores: usize) -> Result<Self> {
        let scores = try_filled(num_scores, TokenScore::default(), "scores")?;
        let state = CallState { scores, ..CallState::default() };
        Ok(ScoreCall { shared: Mutex::new(state), ended: Condvar::new() })
    }

    fn shared(&self) -> MutexGuard<'_, CallState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the thread has given up.
    pub fn has_left(&self) -> bool {
        self.shared().has_left
    }

    /// Takes the scores from number `first` on.
    pub fn put(&self, first: usize, scores: &[TokenScore]) {
        let end = first.saturating_add(scores.len());
        if let Some(room) = self.shared().scores.get_mut(first..end) {
            room.copy_from_slice(scores);
        }
    }

    /// Ends the wait.
    pub fn end(&self, outcome: Result<()>) {
        self.shared().outcome.get_or_insert(outcome);
        self.ended.notify_all();
    }

    /// Waits for the scores and writes them to `out`; gives up when `cancel` is thrown.
    pub fn wait(&self, cancel: Option<&CancelToken>, out: &mut [TokenScore]) -> Result<()> {
        let mut shared = self.shared();
        loop {
            if let Some(outcome) = &shared.outcome {
                outcome.clone()?;
                if out.len() != shared.scores.len() {
                    return Err(Error::internal("other scores than were asked for"));
                }
                out.copy_from_slice(&shared.scores);
                return Ok(());
            }
            shared = match cancel {
                None => self.ended.wait(shared).unwrap_or_else(PoisonError::into_inner),
                Some(cancel) if cancel.is_cancelled() => {
                    shared.has_left = true;
                    return Err(Error::new(ErrorKind::Cancelled, "the scoring was cancelled"));
                }
                Some(_) => {
                    let waited = self.ended.wait_timeout(shared, LOOK_EVERY);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
