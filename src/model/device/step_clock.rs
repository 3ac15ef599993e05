//! When the device was at a step, by its own clock.
//!
//! Each step ends with a mark in the stream. A step that is queued while the device is still at the one before
//! begins where that ends, and needs no mark for it; one that comes later has a mark in front of its first kernel,
//! and the time from the end of the step before to this mark is the time in which the device had nothing to do.

use super::limits::STEPS_IN_FLIGHT;
use crate::backend::cuda::{CudaContext, Event};
use crate::error::{Error, Result};
use crate::model::step::StepTime;

/// One more than steps in flight: the end of a step is wanted until the next one has ended.
const NUM_MARKS: usize = STEPS_IN_FLIGHT + 1;

/// The marks of a step.
struct Marks {
    /// In front of its first kernel, if `came_late`.
    begin: Event,
    end: Event,
    /// The device had come to the end of the step before when this one was queued.
    came_late: bool,
}

/// Times steps that are begun and finished in the same order.
#[derive(Default)]
pub(super) struct StepClock {
    /// Made by the first step.
    marks: Vec<Marks>,
    num_begun: usize,
    num_finished: usize,
}

fn no_marks() -> Error {
    Error::internal("a step without marks")
}

impl StepClock {
    /// To be called before the first kernel of a step is queued.
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
        match came_late {
            true => marks.begin.record(cuda),
            false => Ok(()),
        }
    }

    /// To be called behind the last kernel of a step.
    pub fn end(&mut self, cuda: &CudaContext) -> Result<()> {
        self.marks_of(self.num_begun)?.end.record(cuda)?;
        self.num_begun += 1;
        Ok(())
    }

    /// The time of the oldest step that was not asked for yet, whose end the device has come to.
    pub fn finish(&mut self, cuda: &CudaContext) -> Result<StepTime> {
        let this = self.num_finished;
        self.num_finished += 1;
        let marks = self.marks_of(this)?;
        let before = match this {
            0 => None,
            n => Some(&self.marks_of(n - 1)?.end),
        };
        // The last kernel may be done a little before the mark behind it is.
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
