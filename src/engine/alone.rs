//! Sequences that are computed alone in their steps: logits, which the thread that wants them computes
//! ([`lease`](super::lease)), and prompts whose tokens get log-probabilities.

use std::time::{Duration, Instant};

use super::lease::Lease;
use super::request::FinishReason;
use super::sequence::Entry;
use super::step_resources::StepResources;
use super::submission::Work;
use super::worker::{no_resources, Worker};
use crate::error::{try_with_capacity, Error, ErrorKind, Result};
use crate::model::StepTime;

impl Worker {
    /// Computes the next piece of such a sequence. Every error is a fault of the library.
    pub(super) fn compute_alone(&mut self, entry: Entry) -> Result<()> {
        let gone = || Error::internal("a planned sequence is gone");
        let sequence = self.scheduler.sequence(entry.key).ok_or_else(gone)?;
        let (start, num_new) = (entry.start, entry.num_new);
        let is_last = start + num_new >= sequence.token_ids().len();
        let mut blocks = match try_with_capacity(sequence.blocks().len(), "a block table") {
            Ok(blocks) => blocks,
            Err(error) => {
                self.end(entry.key, Err(error));
                return Ok(());
            }
        };
        blocks.extend_from_slice(sequence.blocks());
        self.follows = false;
        let begun = Instant::now();
        let resources = self.resources.take().ok_or_else(no_resources)?;
        let lease = Lease { resources, blocks, start, num_new };
        let (resources, outcome) = self.run_lease(&entry, lease);
        self.resources = Some(resources);
        match outcome {
            Ok(()) => {
                let time = StepTime { busy: begun.elapsed(), idle: Duration::ZERO };
                self.recorder.step(begun, time, false, num_new, 0);
                self.scheduler.begun(&[entry]);
                self.scheduler.finished(&entry);
                if is_last {
                    self.end_alone(&entry);
                }
            }
            // The next turn sees why, and ends it.
            Err(error) if error.kind() == ErrorKind::Cancelled && self.is_stopped(&entry) => {}
            Err(error) => self.end(entry.key, Err(error)),
        }
        Ok(())
    }

    /// Computes a piece, here or on the thread that wants it.
    fn run_lease(&mut self, entry: &Entry, mut lease: Lease) -> (Box<StepResources>, Result<()>) {
        match self.works.get_mut(entry.key).map(|active| &active.work) {
            Some(Work::Logits(handoff)) => handoff.lend(lease),
            Some(Work::Prompt(work)) => {
                let outcome = work.compute(&*self.model, &mut lease);
                (lease.resources, outcome)
            }
            Some(Work::Sample(_)) | None => {
                (lease.resources, Err(Error::internal("a planned sequence is gone")))
            }
        }
    }

    fn is_stopped(&mut self, entry: &Entry) -> bool {
        match self.works.get_mut(entry.key).map(|active| &active.work) {
            Some(Work::Prompt(work)) => work.inbox.stop_reason(0).is_some(),
            _ => false,
        }
    }

    /// Ends a sequence that has been computed completely.
    fn end_alone(&mut self, entry: &Entry) {
        self.scheduler.remove(entry.key);
        let Some(active) = self.works.remove(entry.key) else { return };
        match active.work {
            Work::Prompt(work) => {
                work.then.into_iter().for_each(|submission| self.start(submission));
            }
            // The caller knows that this was the last piece.
            work => self.tell_end(&work, Ok(FinishReason::MaxTokens)),
        }
    }
}
