//! Decides which sequences take part in the next step, and with how many tokens. This is policy
//! alone, with no model, no threads and no clock: tokens and block numbers in, a plan out.
//!
//! Sequences have a rank: higher priority first, then order of arrival. They wait in this order and
//! are admitted in this order, when there are KV blocks for all their tokens and some to grow; so
//! no sequence is overtaken for ever. (One that would compute a block which another is computing
//! right now waits for that, and lets others pass.) Every running sequence with one token to
//! compute is in every step; beside them long inputs are computed in pieces, up to a number of
//! tokens a step. When blocks run out, the running sequence of the lowest rank loses its own and
//! waits again: its keys and values are kept on the host until then, or recomputed, whichever is
//! cheaper (`preemption`). The first in rank always goes on, so every sequence ends that could run
//! alone. When a step finds no memory, steps become smaller for a while, down to one token of the
//! first in rank (`step_size`).
//!
//! A step may be planned while the one before is under way: a token that is still being chosen is
//! then named by its row of logits in the step before.

use std::collections::VecDeque;

use super::block_pool::{BlockCounts, BlockPool, ContentId};
use super::planned_copies::PlannedCopies;
use super::sequence::blocks_for;
pub use super::sequence::{Entry, NewSequence, Sequence, SequenceKey};
pub use super::step_size::Limits;
use super::step_size::{StepSize, TokenBudget};
use super::swap::{Saved, SwapCounts, SwapSpace};
use crate::error::{try_with_capacity, Error, Result};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// Most waiting sequences that are passed over in one plan because others compute what they need.
const MAX_HELD: usize = 64;

/// A step is planned while the one before is under way, unless it would leave out at least one sequence
/// for every four that are ready. Waiting costs the others 9 % of a step of one millisecond and 4 % of
/// one of five (Qwen3-0.6B and Qwen2.5-7B on an H200); being left out costs a sequence 40 % of its rate
/// and more.
const LEFT_OUT_SHARE: usize = 4;

/// Plans that are in use at the same time, at most: those of two steps under way and the next one.
const MAX_PLANS: usize = 3;

/// Counts for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounts {
    /// Sequences that have blocks.
    pub running: usize,
    /// Sequences that have none, or have lost them.
    pub waiting: usize,
    /// Waiting sequences that lost their blocks.
    pub preempted: usize,
    /// Times that a sequence lost its blocks, since the beginning.
    pub preemptions: u64,
    /// Tokens of inputs that were looked up in the cache since the beginning.
    pub looked_up_tokens: u64,
    /// Tokens of inputs that were found in the cache since the beginning.
    pub cached_tokens: u64,
    /// Counts of the blocks.
    pub blocks: BlockCounts,
    /// Counts of the blocks on the host.
    pub swap: SwapCounts,
}

/// All sequences and blocks.
pub struct Scheduler {
    pub(super) limits: Limits,
    size: StepSize,
    /// Plans that are not in use, each with room for the entries of any step.
    spare_plans: Vec<Vec<Entry>>,
    pub(super) pool: BlockPool,
    pub(super) slots: Vec<Option<Sequence>>,
    free_slots: Vec<u32>,
    /// In the order of rank, like `running`.
    waiting: VecDeque<u32>,
    pub(super) running: Vec<u32>,
    next_serial: u64,
    pub(super) preemptions: u64,
    looked_up_tokens: u64,
    cached_tokens: u64,
    /// Sequences that wait for their hosts.
    num_awaiting: usize,
    pub(super) swap: SwapSpace,
    pub(super) copies: PlannedCopies,
}

impl Scheduler {
    /// Returns a scheduler without sequences.
    pub fn new(pool: BlockPool, limits: Limits) -> Result<Self> {
        let limits = Limits {
            max_sequences: limits.max_sequences.max(1),
            max_prefill_tokens: limits.max_prefill_tokens.max(1),
        };
        let mut spare_plans = try_with_capacity(MAX_PLANS, "plans")?;
        for _ in 0..MAX_PLANS {
            spare_plans.push(try_with_capacity(limits.max_sequences, "a plan")?);
        }
        Ok(Scheduler {
            running: try_with_capacity(limits.max_sequences, "running sequences")?,
            limits,
            size: StepSize::new(),
            spare_plans,
            pool,
            slots: Vec::new(),
            free_slots: Vec::new(),
            waiting: VecDeque::new(),
            next_serial: 0,
            preemptions: 0,
            looked_up_tokens: 0,
            cached_tokens: 0,
            num_awaiting: 0,
            swap: SwapSpace::default(),
            copies: PlannedCopies::default(),
        })
    }

    /// Adds a sequence, which waits. Fails if the blocks of the cache could not hold it alone.
    pub fn add(&mut self, spec: NewSequence) -> Result<SequenceKey> {
        let most = if spec.alone {
            spec.token_ids.len()
        } else {
            spec.max_tokens.saturating_sub(1).max(spec.token_ids.len())
        };
        if spec.token_ids.is_empty() || blocks_for(most) > self.pool.num_blocks() {
            return Err(Error::invalid_argument(format!(
                "a sequence of up to {most} tokens, which need {} blocks of {BLOCK_SIZE}, but the KV cache has \
                 {} blocks",
                blocks_for(most),
                self.pool.num_blocks()
            )));
        }
        let no_memory = || Error::out_of_memory("a sequence", size_of::<Sequence>());
        // Running sequences may have to wait again.
        self.waiting.try_reserve(1 + self.running.len()).map_err(|_| no_memory())?;
        let blocks = try_with_capacity(blocks_for(most), "a block table")?;
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None => {
                self.slots.try_reserve(1).map_err(|_| no_memory())?;
                // Room for the slot's end too: ending a sequence never allocates.
                let room = self.slots.len() + 1 - self.free_slots.len();
                self.free_slots.try_reserve(room).map_err(|_| no_memory())?;
                self.slots.push(None);
                self.slots.len() as u32 - 1
            }
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        let sequence = Sequence {
            serial,
            spec,
            blocks,
            num_begun: 0,
            num_computed: 0,
            num_entered: 0,
            content: ContentId::EMPTY,
            num_pending: 0,
            pending_row: 0,
            saved: Saved::default(),
            epoch: 0,
            num_cached: None,
            awaits_host: false,
        };
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(sequence);
        }
        self.wait(slot);
        Ok(SequenceKey { slot, serial })
    }

    /// Ends a sequence in any state. One that has ended is ignored.
    pub fn remove(&mut self, key: SequenceKey) {
        let found = self.slots.get_mut(key.slot());
        let Some(place) = found else { return };
        if place.as_ref().is_none_or(|sequence| sequence.serial != key.serial) {
            return;
        }
        if let Some(mut sequence) = place.take() {
            self.num_awaiting = self.num_awaiting.saturating_sub(sequence.awaits_host.into());
            self.pool.release(&mut sequence.blocks);
            self.swap.give_back(&mut sequence.saved.places);
        }
        self.running.retain(|slot| *slot != key.slot);
        self.waiting.retain(|slot| *slot != key.slot);
        self.free_slots.push(key.slot);
    }

    /// Returns the sequence, if it has not ended.
    pub fn sequence(&self, key: SequenceKey) -> Option<&Sequence> {
        self.at(key.slot).filter(|sequence| sequence.serial == key.serial)
    }

    /// Returns the sequence in a slot.
    pub(super) fn at(&self, slot: u32) -> Option<&Sequence> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn at_mut(&mut self, slot: u32) -> Option<&mut Sequence> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Counts for statistics.
    pub fn counts(&self) -> SchedulerCounts {
        let preempted = |slot: &&u32| self.at(**slot).is_some_and(|sequence| sequence.epoch > 0);
        SchedulerCounts {
            running: self.running.len(),
            waiting: self.waiting.len(),
            preempted: self.waiting.iter().filter(preempted).count(),
            preemptions: self.preemptions,
            looked_up_tokens: self.looked_up_tokens,
            cached_tokens: self.cached_tokens,
            blocks: self.pool.counts(),
            swap: self.swap.counts(),
        }
    }

    /// Puts a sequence into the queue by its rank. There is room for it.
    pub(super) fn wait(&mut self, slot: u32) {
        let rank = self.at(slot).map(Sequence::rank);
        let at = self.waiting.partition_point(|other| self.at(*other).map(Sequence::rank) < rank);
        self.waiting.insert(at, slot);
    }

    /// Returns memory for a plan. Planning in it allocates nothing, so it never fails for lack of memory.
    pub(super) fn take_plan_memory(&mut self) -> Vec<Entry> {
        self.spare_plans.pop().unwrap_or_default()
    }

    /// Takes back the memory of a plan that is not needed any more.
    pub(super) fn give_back_plan_memory(&mut self, mut entries: Vec<Entry>) {
        entries.clear();
        self.spare_plans.push(entries);
    }

    /// Plans the next step into `entries`, which stay empty if there is nothing to do. Entries with
    /// one token come first. Their sequences own the blocks that they need from now on. Every error
    /// is a fault of the library.
    pub fn plan(&mut self, entries: &mut Vec<Entry>) -> Result<()> {
        entries.clear();
        self.let_running_grow();
        let mut left = self.size.room(&self.limits);
        for at in 0..self.running.len() {
            let Some(&slot) = self.running.get(at) else { break };
            self.plan_sequence(slot, &mut left, entries);
        }
        self.admit(&mut left, entries)?;
        entries.sort_unstable_by_key(|entry| {
            let rank = self.at(entry.key.slot).map(Sequence::rank);
            (entry.num_new != 1, rank)
        });
        let mut row = 0;
        for entry in entries {
            let Some(sequence) = self.at(entry.key.slot) else { continue };
            if entry.start + entry.num_new >= sequence.spec.token_ids.len() {
                entry.row = Some(row);
                row += 1;
            }
        }
        Ok(())
    }

    /// Whether the next step should be planned only when the one under way is finished, because too many
    /// sequences need the tokens of that one before they can go on. If the next step were planned now, it
    /// would have the other sequences alone, and from then on the two groups would take turns: each step
    /// would take its whole time for a part of the sequences.
    pub fn wants_finished_step(&self) -> bool {
        let (mut ready, mut left_out) = (0, 0);
        for sequence in self.running.iter().filter_map(|&slot| self.at(slot)) {
            ready += usize::from(sequence.num_ready() > 0);
            left_out += usize::from(sequence.awaits_its_token());
        }
        left_out > 0 && left_out * LEFT_OUT_SHARE >= ready
    }

    /// Gives every running sequence the block that its next token needs, at the cost of those of
    /// the lowest rank.
    fn let_running_grow(&mut self) {
        let mut at = 0;
        while let Some(&slot) = self.running.get(at) {
            at += 1;
            let Some(sequence) = self.at(slot) else { continue };
            // Sequences with many tokens have had blocks for all of them since they were admitted.
            let ready = sequence.num_ready();
            if ready != 1 || sequence.num_begun < sequence.blocks.len() * BLOCK_SIZE {
                continue;
            }
            let block = loop {
                if let Some(block) = self.pool.allocate() {
                    break Some(block);
                }
                match self.preempt_last() {
                    Some(victim) if victim != slot => {}
                    _ => break None,
                }
            };
            if let (Some(block), Some(sequence)) = (block, self.at_mut(slot)) {
                // The table has room for all blocks that the sequence may ever need.
                sequence.blocks.push(block);
            }
        }
    }

    /// Adds the tokens of a running sequence to a plan, as far as there is room.
    fn plan_sequence(&self, slot: u32, left: &mut TokenBudget, entries: &mut Vec<Entry>) {
        let Some(sequence) = self.at(slot) else { return };
        let ready = sequence.num_ready();
        if ready == 0 || sequence.spec.alone {
            return;
        }
        let num_new = match ready {
            // Single tokens of running sequences never wait, unless memory is short.
            1 => left.all.min(1),
            n if n <= left.for_long() => n,
            // An input that fits into a step whole is not cut: it waits for the next step.
            n if n <= self.limits.max_prefill_tokens.min(self.size.max_tokens())
                && left.long < self.limits.max_prefill_tokens =>
            {
                left.long = 0;
                return;
            }
            _ => left.for_long(),
        };
        if num_new == 0 {
            return;
        }
        left.take(num_new, ready > 1);
        let is_known = sequence.num_begun < sequence.spec.token_ids.len();
        entries.push(Entry {
            key: SequenceKey { slot, serial: sequence.serial },
            start: sequence.num_begun,
            num_new,
            source: (!is_known).then_some(sequence.pending_row),
            row: None,
            by_model: sequence.spec.by_model,
            epoch: sequence.epoch,
        });
    }

    /// Lets waiting sequences run, in order, while there is room in the step and in the cache.
    fn admit(&mut self, left: &mut TokenBudget, entries: &mut Vec<Entry>) -> Result<()> {
        let (mut at, mut held) = (0, 0);
        while let Some(&slot) = self.waiting.get(at) {
            let Some(sequence) = self.at(slot) else { break };
            if sequence.awaits_host {
                at += 1;
                continue;
            }
            if (left.for_long() == 0 && !sequence.spec.alone) || sequence.num_pending > 0 {
                break;
            }
            let (num_found, num_idle) = self.find_prefix(sequence);
            if self.is_being_computed(sequence, sequence.saved.num_blocks_with(num_found)) {
                (at, held) = (at + 1, held + 1);
                if held >= MAX_HELD {
                    break;
                }
                continue;
            }
            let needed = blocks_for(sequence.spec.token_ids.len()) - num_found + num_idle;
            let priority = sequence.spec.priority;
            if !self.make_room(needed, priority, left, entries) {
                break;
            }
            // Blocks that were found may have lost their owners to this.
            let Some(sequence) = self.at(slot) else { break };
            let (num_found, num_idle) = self.find_prefix(sequence);
            let needed = blocks_for(sequence.spec.token_ids.len()) - num_found + num_idle;
            if needed > self.pool.num_available() {
                break;
            }
            self.run(slot)?;
            self.plan_sequence(slot, left, entries);
        }
        Ok(())
    }

    /// Returns the number of the sequence's blocks that are in the cache, and how many of these are
    /// idle.
    fn find_prefix(&self, sequence: &Sequence) -> (usize, usize) {
        let (mut num_found, mut num_idle) = (0, 0);
        self.each_found(sequence, |block, _| {
            num_found += 1;
            num_idle += usize::from(self.pool.is_idle(block));
        });
        (num_found, num_idle)
    }

    /// Calls `found` for each of the sequence's first blocks that are in the cache.
    fn each_found(&self, sequence: &Sequence, mut found: impl FnMut(u32, ContentId)) {
        let tokens = sequence.spec.token_ids.get(..sequence.may_cache()).unwrap_or_default();
        let mut content = ContentId::EMPTY;
        for tokens in tokens.chunks_exact(BLOCK_SIZE) {
            let Some((block, next)) = self.pool.find(sequence.spec.isolation, content, tokens)
            else {
                return;
            };
            content = next;
            found(block, next);
        }
    }

    /// Whether a running sequence is computing the block after the first `num_found` of this one,
    /// which are there.
    fn is_being_computed(&self, sequence: &Sequence, num_found: usize) -> bool {
        let wanted = (num_found + 1) * BLOCK_SIZE;
        if !self.pool.keeps_content() || wanted > sequence.may_cache() {
            return false;
        }
        let tokens = sequence.spec.token_ids.get(..wanted);
        self.running.iter().any(|slot| {
            self.at(*slot).is_some_and(|other| {
                other.spec.isolation == sequence.spec.isolation
                    && other.num_entered <= num_found
                    && other.spec.token_ids.get(..wanted) == tokens
            })
        })
    }

    /// Moves a waiting sequence, for whose blocks there is room, to the running ones.
    fn run(&mut self, slot: u32) -> Result<()> {
        let Some(mut sequence) = self.slots.get_mut(slot as usize).and_then(Option::take) else {
            return Err(Error::internal("a sequence that waits is not there"));
        };
        let mut blocks = std::mem::take(&mut sequence.blocks);
        blocks.clear();
        let mut content = ContentId::EMPTY;
        self.each_found(&sequence, |block, next| {
            blocks.push(block);
            content = next;
        });
        blocks.iter().for_each(|block| self.pool.share(*block));
        let num_found = blocks.len();
        let num_cached = num_found * BLOCK_SIZE;
        sequence.num_begun = num_cached;
        sequence.num_computed = num_cached;
        sequence.num_entered = blocks.len();
        sequence.content = content;
        if sequence.num_cached.is_none() {
            sequence.num_cached = Some(num_cached);
            self.looked_up_tokens += sequence.spec.token_ids.len() as u64;
            self.cached_tokens += num_cached as u64;
        }
        let wanted = blocks_for(sequence.spec.token_ids.len());
        let mut complete = true;
        while blocks.len() < wanted {
            match self.pool.allocate() {
                Some(block) => blocks.push(block),
                None => {
                    complete = false;
                    break;
                }
            }
        }
        sequence.blocks = blocks;
        let rank = sequence.rank();
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(sequence);
        }
        self.restore(slot, num_found);
        self.waiting.retain(|other| *other != slot);
        let at =
            self.running.partition_point(|o| self.at(*o).is_some_and(|other| other.rank() < rank));
        self.running.insert(at, slot);
        if complete {
            Ok(())
        } else {
            Err(Error::internal("the free KV blocks were miscounted"))
        }
    }

    /// Plans the next piece of the first running sequence that is to be computed alone, with up to
    /// as many tokens as a step may have. It has no row: its caller knows which logits it wants.
    pub fn plan_alone(&self) -> Option<Entry> {
        let slot = self.running.iter().find(|slot| {
            self.at(**slot).is_some_and(|sequence| sequence.spec.alone && sequence.num_ready() > 0)
        })?;
        let sequence = self.at(*slot)?;
        let num_new = sequence.num_ready().min(self.most_alone());
        Some(self.entry_alone(*slot, sequence, num_new))
    }

    /// Plans the next pieces of the running sequences that are scored, in their order, with up to as
    /// many tokens together as a step may have. Those with one token come first.
    pub fn plan_scored(&self, entries: &mut Vec<Entry>) {
        entries.clear();
        let most = self.most_alone();
        let mut left = most;
        for &slot in &self.running {
            let Some(sequence) = self.at(slot).filter(|it| it.spec.scored) else { continue };
            let ready = sequence.num_ready();
            // As elsewhere, an input that fits into a step whole is not cut.
            let num_new = if ready > left && ready <= most { 0 } else { ready.min(left) };
            if num_new > 0 {
                left -= num_new;
                entries.push(self.entry_alone(slot, sequence, num_new));
            }
        }
        entries.sort_unstable_by_key(|entry| {
            (entry.num_new > 1, self.at(entry.key.slot).map(Sequence::rank))
        });
    }

    /// Returns the most tokens of a step of sequences that are computed by themselves.
    fn most_alone(&self) -> usize {
        self.limits.max_prefill_tokens.min(self.size.max_tokens())
    }

    /// Returns the entry of a sequence that has no row: its caller knows which logits it wants.
    fn entry_alone(&self, slot: u32, sequence: &Sequence, num_new: usize) -> Entry {
        Entry {
            key: SequenceKey { slot, serial: sequence.serial },
            start: sequence.num_begun,
            num_new,
            source: None,
            row: None,
            by_model: false,
            epoch: sequence.epoch,
        }
    }

    /// Records that the step of a plan has begun. (A step that could not begin is not told: the next
    /// plan has the same tokens.)
    pub fn begun(&mut self, entries: &[Entry]) {
        self.size.grow(&self.limits);
        for entry in entries {
            let Some(sequence) = self.alive(entry) else { continue };
            sequence.num_begun = entry.start + entry.num_new;
            if let Some(row) = entry.row {
                sequence.num_pending += 1;
                sequence.pending_row = row;
            }
        }
    }

    /// Records that there was no memory for the step of a plan, which has not begun or is abandoned:
    /// the next plans are smaller, and sequences of lower rank get their turn later. False if the
    /// plan is one token of one sequence: no plan can be smaller.
    pub fn found_no_memory(&mut self, entries: &[Entry]) -> bool {
        self.size.shrink(entries.iter().map(|entry| entry.num_new).sum())
    }

    /// Records that no step under way will be finished: their tokens are planned again.
    pub fn abandon_steps(&mut self) {
        for sequence in self.slots.iter_mut().flatten() {
            sequence.num_begun = sequence.num_computed;
            sequence.num_pending = 0;
        }
    }

    /// Returns the sequence of an entry, if it has not ended.
    fn alive(&mut self, entry: &Entry) -> Option<&mut Sequence> {
        self.alive_at(entry.key)
    }

    fn alive_at(&mut self, key: SequenceKey) -> Option<&mut Sequence> {
        self.at_mut(key.slot).filter(|sequence| sequence.serial == key.serial)
    }

    /// Records that an entry of a step was computed. If it has a row, [`Scheduler::chosen`] comes next,
    /// or the sequence waits for its host. Steps are finished in the order in which they began.
    pub fn finished(&mut self, entry: &Entry) {
        let Some(sequence) = self.alive(entry) else { return };
        if entry.row.is_some() {
            sequence.num_pending = sequence.num_pending.saturating_sub(1);
        }
        if sequence.epoch == entry.epoch {
            sequence.num_computed = sequence.num_computed.max(entry.start + entry.num_new);
            self.enter_blocks(entry.key.slot);
        }
    }

    /// Records which token comes next in a sequence. False if the sequence has ended meanwhile.
    pub fn chosen(&mut self, key: SequenceKey, token: u32) -> Result<bool> {
        let Some(sequence) = self.alive_at(key) else { return Ok(false) };
        let ids = &mut sequence.spec.token_ids;
        ids.try_reserve(1).map_err(|_| Error::out_of_memory("token ids", 4 * ids.len()))?;
        ids.push(token);
        Ok(true)
    }

    /// Records that the host chooses the next token of a sequence, which takes part in no step until
    /// that is done; or that it is.
    pub fn set_awaits_host(&mut self, key: SequenceKey, awaits: bool) {
        let Some(sequence) = self.alive_at(key) else { return };
        if sequence.awaits_host != awaits {
            sequence.awaits_host = awaits;
            self.num_awaiting =
                if awaits { self.num_awaiting + 1 } else { self.num_awaiting.saturating_sub(1) };
        }
    }

    /// Whether a sequence waits for its host.
    pub fn awaits_hosts(&self) -> bool {
        self.num_awaiting > 0
    }

    /// Enters the blocks that are full now into the prefix cache.
    fn enter_blocks(&mut self, slot: u32) {
        let Self { slots, pool, .. } = self;
        let Some(Some(sequence)) = slots.get_mut(slot as usize) else { return };
        while (sequence.num_entered + 1) * BLOCK_SIZE <= sequence.num_computed {
            let begin = sequence.num_entered * BLOCK_SIZE;
            let tokens = sequence.spec.token_ids.get(begin..begin + BLOCK_SIZE);
            let block = sequence.blocks.get(sequence.num_entered);
            let (Some(tokens), Some(block)) = (tokens, block) else { return };
            sequence.content =
                pool.enter(*block, sequence.spec.isolation, sequence.content, tokens);
            sequence.num_entered += 1;
        }
    }

    /// Counts everything again; an error says which count is wrong.
    pub fn audit(&self) -> Result<()> {
        let live = self.slots.iter().flatten();
        self.pool.audit(live.clone().map(Sequence::blocks))?;
        let wrong = |what: &str| Err(Error::internal(what.to_string()));
        if live.count() != self.running.len() + self.waiting.len() {
            return wrong("a sequence neither runs nor waits, or does both");
        }
        if self.running.len() > self.limits.max_sequences {
            return wrong("too many sequences run");
        }
        let live = self.slots.iter().flatten();
        if live.filter(|sequence| sequence.awaits_host).count() != self.num_awaiting {
            return wrong("the sequences that wait for their hosts were miscounted");
        }
        let rank = |slot: &u32| self.at(*slot).map(Sequence::rank);
        if !self.running.is_sorted_by_key(rank) || !self.waiting.iter().is_sorted_by_key(rank) {
            return wrong("sequences are out of order");
        }
        if self.waiting.iter().any(|slot| self.at(*slot).is_none_or(|s| !s.blocks.is_empty())) {
            return wrong("a waiting sequence has blocks");
        }
        let has_places = |slot: &u32| self.at(*slot).is_none_or(|s| !s.saved.places.is_empty());
        if self.running.iter().any(has_places) {
            return wrong("a running sequence has places on the host");
        }
        let live = self.slots.iter().flatten();
        self.swap.audit(live.flat_map(|sequence| &sequence.saved.places))
    }
}
