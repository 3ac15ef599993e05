//! The time that the device spends on each step, by its own clock.
//!
//! Each step ends with a mark in the stream. A step that is queued while the device is still
//! computing the previous one begins where that ends, and needs no mark for it; one that comes
//! later has a mark before its first kernel, and the time from the end of the previous step to this
//! mark is the time in which the device was idle.

use super::limits::STEPS_IN_FLIGHT;
use crate::backend::cuda::{CudaContext, Event};
use crate::error::{Error, Result};
use crate::model::step::StepTime;

/// One more than the steps in flight, because the end of a step is needed until the next one has
/// ended.
const NUM_MARKS: usize = STEPS_IN_FLIGHT + 1;

/// The marks of a step.
struct Marks {
    /// The mark before its first kernel, recorded if `came_late`.
    begin: Event,
    end: Event,
    /// Whether the device had finished the previous step when this one was queued.
    came_late: bool,
}

/// Times steps that are begun and finished in the same order.
#[derive(Default)]
pub(super) struct StepClock {
    /// Created by the first step.
    marks: Vec<Marks>,
    num_begun: usize,
    num_finished: usize,
}

fn no_marks() -> Error {
    Error::internal("a step without marks")
}

impl StepClock {
    /// Marks the beginning of a step. Must be called before its first kernel is queued.
    pub fn begin(&mut self, cuda: &CudaContext) -> Result<()> {
        while self.marks.len() < NUM_MARKS {
            let (begin, end) = (Event::timed(cuda)?, Event::timed(cuda)?);
            self.marks.push(Marks { begin, end, came_late: false });
        }
        let came_late = match self.num_begun {
            0 => true,
            n => self.marks_of(n - 1)?.end.is_reached(cuda)?,
        };
        let marks = self.marks.get_mut(self.num_begun % NUM_MARKS).ok_or_else(no_marks)?;
        marks.came_late = came_late;
        if came_late {
            marks.begin.record(cuda)
        } else {
            Ok(())
        }
    }

    /// Marks the end of a step. Must be called after its last kernel is queued.
    pub fn end(&mut self, cuda: &CudaContext) -> Result<()> {
        self.marks_of(self.num_begun)?.end.record(cuda)?;
        self.num_begun += 1;
        Ok(())
    }

    /// Returns the time of the oldest step whose time was not taken yet. The device must have
    /// finished that step.
    pub fn finish(&mut self, cuda: &CudaContext) -> Result<StepTime> {
        let this = self.num_finished;
        self.num_finished += 1;
        let marks = self.marks_of(this)?;
        let before = match this {
            0 => None,
            n => Some(&self.marks_of(n - 1)?.end),
        };
        // The last kernel may be done slightly before the mark after it is reached.
        marks.end.synchronize(cuda)?;
        let (from, idle) = match before {
            Some(before) if !marks.came_late => (before, Default::default()),
            Some(before) => (&marks.begin, marks.begin.since(before, cuda)?),
            None => (&marks.begin, Default::default()),
        };
        Ok(StepTime { busy: marks.end.since(from, cuda)?, idle })
    }

    fn marks_of(&self, step: usize) -> Result<&Marks> {
        self.marks.get(step % NUM_MARKS).ok_or_else(no_marks)
    }
}
