//! The copies of KV blocks between device and host that a plan asks for.

use super::sequence::SequenceKey;
use crate::model::BlockCopy;

/// Copies in the order in which they are to be done, with the sequence that each is for.
#[derive(Default)]
pub(super) struct PlannedCopies {
    copies: Vec<BlockCopy>,
    /// The sequence of each copy.
    keys: Vec<SequenceKey>,
}

impl PlannedCopies {
    /// Makes room for `count` more copies. False if there is no memory.
    pub fn reserve(&mut self, count: usize) -> bool {
        self.copies.try_reserve(count).is_ok() && self.keys.try_reserve(count).is_ok()
    }

    /// Adds a copy, for which there must be room.
    pub fn push(&mut self, key: SequenceKey, copy: BlockCopy) {
        self.copies.push(copy);
        self.keys.push(key);
    }

    /// All copies.
    pub fn as_slice(&self) -> &[BlockCopy] {
        &self.copies
    }

    /// Returns the sequence of each copy.
    pub fn keys(&self) -> &[SequenceKey] {
        &self.keys
    }

    /// Removes the copies of one sequence.
    pub fn forget(&mut self, key: SequenceKey) {
        let mut of_others = self.keys.iter().map(|other| *other != key);
        self.copies.retain(|_| of_others.next().unwrap_or(true));
        self.keys.retain(|other| *other != key);
    }

    /// Removes all copies.
    pub fn clear(&mut self) {
        self.copies.clear();
        self.keys.clear();
    }
}
