//! Sequences that are computed alone in their steps: logits, which the thread that wants them computes
//! ([`lease`](super::lease)).

use std::time::{Duration, Instant};

use super::active::Active;
use super::lease::Lease;
use super::request::FinishReason;
use super::sequence::Entry;
use super::step_resources::StepResources;
use super::submission::Work;
use super::worker::{no_resources, Worker};
use crate::error::{try_with_capacity, Error, Result};
use crate::model::StepTime;

impl Worker {
    /// Computes the next piece of such a sequence, or of those that are scored. Every error is a fault
    /// of the library.
    pub(super) fn compute_alone(&mut self, entry: Entry) -> Result<()> {
        let is_scored = |active: &mut Active| matches!(active.work, Work::Score(_));
        if self.works.with(entry.key, is_scored) == Some(true) {
            return self.score();
        }
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
            Err(error) => self.end(entry.key, Err(error)),
        }
        Ok(())
    }

    /// Has the thread that wants a piece compute it.
    fn run_lease(&mut self, entry: &Entry, lease: Lease) -> (Box<StepResources>, Result<()>) {
        match self.works.get_mut(entry.key).map(|active| &active.work) {
            Some(Work::Logits(handoff)) => handoff.lend(lease),
            Some(Work::Sample(_) | Work::Score(_)) | None => {
                (lease.resources, Err(Error::internal("a planned sequence is gone")))
            }
        }
    }

    /// Ends a sequence that has been computed completely. Its caller knows that this was the last
    /// piece.
    fn end_alone(&mut self, entry: &Entry) {
        self.end(entry.key, Ok(FinishReason::MaxTokens));
    }
}
