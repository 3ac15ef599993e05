//! The work of every sequence that has not ended, by its slot in the scheduler.

use std::sync::{Mutex, PoisonError};

use super::inbox::Progress as InboxProgress;
use super::intake::lock;
use super::sampler::Chosen;
use super::sequence::SequenceKey;
use super::submission::Work;
use crate::error::{Error, Result};
use crate::model::NO_TOKEN;
use crate::text::Progress;

/// A sequence's work and state.
pub(super) struct Active {
    pub key: SequenceKey,
    pub work: Work,
    pub progress: InboxProgress,
    /// The token that was chosen on the host, or why its part of a step came to nothing.
    pub chosen: Option<Result<Chosen>>,
    /// The constraint's answer to the token that is handed out next, if it was asked already.
    pub followed: Option<Result<Progress>>,
    /// Logits on their way to the host, or the memory of those that came back.
    pub row: Vec<f32>,
}

impl Active {
    /// Has the constraint take the token `before`, if it has not yet, and write the mask of the next one.
    /// False if no token comes next.
    pub fn write_mask(&mut self, before: Option<u32>, row: &mut [u8]) -> bool {
        let Work::Sample(work) = &mut self.work else { return false };
        let Some(constrained) = &mut work.constrained else { return false };
        if let Some(token) = before {
            if token == NO_TOKEN {
                return false;
            }
            let followed = constrained.consume(token);
            let goes_on = matches!(followed, Ok(Progress::Open)) && !constrained.is_end(token);
            self.followed = Some(followed);
            if !goes_on {
                return false;
            }
        }
        constrained.write_mask(row);
        true
    }
}

/// The work of all sequences, by slot. Each slot has a lock, so that several threads can choose
/// tokens.
#[derive(Default)]
pub(super) struct ActiveTable {
    slots: Vec<Mutex<Option<Active>>>,
}

impl ActiveTable {
    /// Returns the number of slots, with and without a sequence.
    pub fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// Makes room for one more sequence than there are slots.
    pub fn reserve(&mut self) -> Result<()> {
        let bytes = size_of::<Mutex<Option<Active>>>();
        self.slots.try_reserve(1).map_err(|_| Error::out_of_memory("a sequence", bytes))
    }

    /// Adds the work of a new sequence, for which there is room.
    pub fn insert(&mut self, key: SequenceKey, work: Work) {
        while self.slots.len() <= key.slot() {
            self.slots.push(Mutex::new(None));
        }
        if let Some(place) = self.place(key.slot()) {
            let progress = InboxProgress::default();
            let row = Vec::new();
            *place = Some(Active { key, work, progress, chosen: None, followed: None, row });
        }
    }

    fn place(&mut self, slot: usize) -> Option<&mut Option<Active>> {
        let place = self.slots.get_mut(slot)?;
        Some(place.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the sequence in a slot, if there is one.
    pub fn at_mut(&mut self, slot: usize) -> Option<&mut Active> {
        self.place(slot)?.as_mut()
    }

    /// Returns a sequence that has not ended.
    pub fn get_mut(&mut self, key: SequenceKey) -> Option<&mut Active> {
        self.at_mut(key.slot()).filter(|active| active.key == key)
    }

    /// Removes a sequence that has not ended.
    pub fn remove(&mut self, key: SequenceKey) -> Option<Active> {
        self.place(key.slot())?.take_if(|active| active.key == key)
    }

    /// Calls `body` with a sequence that has not ended, while its lock is held.
    pub fn with<T>(&self, key: SequenceKey, body: impl FnOnce(&mut Active) -> T) -> Option<T> {
        let mut place = lock(self.slots.get(key.slot())?);
        place.as_mut().filter(|active| active.key == key).map(body)
    }
}
