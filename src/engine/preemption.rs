//! Takes blocks from sequences for others, and lets them go on later: their keys and values are
//! copied to the host and back (`swap`), or recomputed.

use super::block_pool::ContentId;
use super::scheduler::Scheduler;
use super::sequence::{blocks_for, Entry, Sequence, SequenceKey};
use super::step_size::TokenBudget;
use super::swap::{SwapCosts, SwapSpace};
use crate::model::{BlockCopy, CopyDirection};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

impl Scheduler {
    /// Lets preempted sequences keep up to `max_blocks` blocks on the host. There is no memory for
    /// any yet.
    pub fn set_max_swapped(&mut self, max_blocks: usize) {
        self.swap = SwapSpace::new(max_blocks);
    }

    /// Returns the number of further blocks that may be kept on the host, if a sequence found no
    /// memory for that; else 0.
    pub fn swap_places_wanted(&self) -> usize {
        self.swap.num_wanted()
    }

    /// Records that there is memory on the host for `num_places` more blocks; 0 says that there will
    /// never be more.
    pub fn add_swap_places(&mut self, num_places: usize) {
        match num_places {
            0 => self.swap.stop_growing(),
            n => self.swap.grow(n),
        }
    }

    /// Returns the costs of copying and computing, as far as they are known.
    pub fn swap_costs(&mut self) -> &mut SwapCosts {
        &mut self.swap.costs
    }

    /// Returns the copies to be done, in this order: after all steps that were begun before, and
    /// before anything planned since is computed.
    pub fn copies(&self) -> &[BlockCopy] {
        self.copies.as_slice()
    }

    /// Returns the sequence of each of [`Scheduler::copies`].
    pub fn copied_keys(&self) -> &[SequenceKey] {
        self.copies.keys()
    }

    /// Records that a sequence's copies are not done, and that it will end for that.
    pub fn forget_copies(&mut self, key: SequenceKey) {
        self.copies.forget(key);
    }

    /// Records that the copies are done.
    pub fn clear_copies(&mut self) {
        self.copies.clear();
    }

    /// Takes the blocks of the running sequence of the lowest rank.
    pub(super) fn preempt_last(&mut self) -> Option<u32> {
        let slot = self.running.pop()?;
        self.save(slot);
        let mut blocks = match self.at_mut(slot) {
            Some(sequence) => {
                sequence.num_begun = 0;
                sequence.num_computed = 0;
                sequence.num_entered = 0;
                sequence.content = ContentId::EMPTY;
                sequence.epoch += 1;
                std::mem::take(&mut sequence.blocks)
            }
            None => return Some(slot),
        };
        self.pool.release(&mut blocks);
        if let Some(sequence) = self.at_mut(slot) {
            // The empty table keeps its memory.
            sequence.blocks = blocks;
        }
        self.preemptions += 1;
        self.wait(slot);
        Some(slot)
    }

    /// Plans to copy the blocks of a sequence that is about to lose them to the host, if that is
    /// cheaper.
    fn save(&mut self, slot: u32) {
        let Self { slots, pool, swap, copies, .. } = self;
        let Some(Some(sequence)) = slots.get_mut(slot as usize) else { return };
        // Tokens in steps under way are recomputed: those steps may still fail.
        let num_tokens = sequence.num_computed;
        let num_blocks = blocks_for(num_tokens).min(sequence.blocks.len());
        let is_shared = |block: &&u32| pool.num_owners(**block) > 1;
        let first_block = sequence.blocks.iter().take_while(is_shared).count().min(num_blocks);
        let count = num_blocks - first_block;
        let num_own = num_tokens.saturating_sub(first_block * BLOCK_SIZE);
        let is_worth_it = swap.is_wanted()
            && !sequence.spec.alone
            && num_own >= BLOCK_SIZE
            && swap.costs.is_copy_cheaper(count, num_own);
        let saved = &mut sequence.saved;
        if !is_worth_it || !copies.reserve(count) || !swap.take(count, &mut saved.places) {
            return;
        }
        (saved.first_block, saved.num_tokens) = (first_block, num_tokens);
        let key = SequenceKey { slot, serial: sequence.serial };
        let own = sequence.blocks.get(first_block..num_blocks).unwrap_or_default();
        for (&block, &place) in own.iter().zip(&saved.places) {
            copies.push(key, BlockCopy { block, place, direction: CopyDirection::ToHost });
        }
        swap.blocks_out += count as u64;
    }

    /// Plans to copy the blocks that a sequence has on the host to its new blocks, of which the
    /// first `num_found` have their content already. Frees its places in any case.
    pub(super) fn restore(&mut self, slot: u32, num_found: usize) {
        let Self { slots, swap, copies, .. } = self;
        let Some(Some(sequence)) = slots.get_mut(slot as usize) else { return };
        let saved = &mut sequence.saved;
        if saved.goes_beyond(num_found) && copies.reserve(saved.places.len()) {
            let key = SequenceKey { slot, serial: sequence.serial };
            let places = saved.places.iter().skip(num_found - saved.first_block);
            for (&block, &place) in sequence.blocks.iter().skip(num_found).zip(places) {
                copies.push(key, BlockCopy { block, place, direction: CopyDirection::FromHost });
                swap.blocks_in += 1;
            }
            sequence.num_begun = saved.num_tokens;
            sequence.num_computed = saved.num_tokens;
        }
        swap.give_back(&mut saved.places);
    }

    /// Makes room for one more running sequence with `needed` blocks, if need be at the cost of
    /// running sequences of lower priority. False if that is not possible.
    pub(super) fn make_room(
        &mut self,
        needed: usize,
        priority: i32,
        left: &mut TokenBudget,
        entries: &mut Vec<Entry>,
    ) -> bool {
        let is_lower = |scheduler: &Self, slot: &u32| {
            scheduler.at(*slot).is_some_and(|other| other.spec.priority < priority)
        };
        // Each running sequence may soon need one more block; preempting this one for it would be a
        // waste.
        let fits = |scheduler: &Self, running: usize, available: usize| {
            running < scheduler.limits.max_sequences && needed.saturating_add(running) <= available
        };
        let available = self.pool.num_available();
        let (mut running, mut within) = (self.running.len(), available);
        if running == 0 {
            return needed <= available;
        }
        // Nothing is preempted unless that makes enough room.
        for slot in self.running.iter().rev() {
            if fits(self, running, within) || !is_lower(self, slot) {
                break;
            }
            running -= 1;
            let blocks = self.at(*slot).map_or(&[][..], Sequence::blocks);
            within += blocks.iter().filter(|block| self.pool.num_owners(**block) == 1).count();
        }
        let alone_fits = running == 0 && needed <= within;
        if !alone_fits && !fits(self, running, within) {
            return false;
        }
        while self.running.len() > running {
            let victim = self.preempt_last();
            // The victim may have been planned already.
            entries.retain(|entry| {
                let stays = Some(entry.key.slot) != victim;
                if !stays {
                    left.give_back(entry);
                }
                stays
            });
        }
        true
    }
}
