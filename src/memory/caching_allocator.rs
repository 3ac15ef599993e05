//! A caching allocator: memory that is given back is kept and given out again, so that a loop of
//! same-shaped work asks the system or the driver for nothing after its first round.
//!
//! Sizes are rounded up to classes, eight to a doubling, so that at most an eighth is lost and
//! requests of nearly the same size reuse each other's blocks. One allocator belongs to one stream
//! of work: a block that was given back may still be in use by work queued before, and its next
//! owner queues its own work after that.
//!
//! A user that knows how much its work takes at a time can set that apart
//! ([`CachingAllocator::set_apart`]): blocks that fit there are cut from it and take nothing more.
//! Even work that is recorded and runs later need not keep them: the stream reaches it when nothing
//! else is using them.

use crate::error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// The smallest size class; every address is a multiple of at least 64.
const SMALLEST_CLASS: usize = 512;

/// The source of an allocator's memory.
pub trait MemorySource: Send + Sync {
    /// Allocates exactly `bytes`, aligned to at least 64.
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Releases memory for good, after waiting for work that uses it.
    ///
    /// # Safety
    /// `start` and `bytes` are those of one [`MemorySource::allocate`], released once.
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize);

    /// Returns the kind of memory for messages, such as "device memory".
    fn name(&self) -> &'static str;

    /// Returns how many bytes are free, and how many there are in all, where that is known.
    fn free_and_total(&self) -> Option<(usize, usize)> {
        None
    }
}

/// The statistics of an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in use, rounded up to classes.
    pub allocated: usize,
    /// Bytes taken from the source: in use or kept for later allocations.
    pub reserved: usize,
    /// The largest value that `allocated` has had.
    pub peak: usize,
    /// The number of calls that took memory from the source or gave it back.
    pub num_driver_calls: u64,
    /// The number of allocations asked of the allocator.
    pub num_allocations: u64,
    /// The most that `reserved` may become.
    pub budget: usize,
}

#[derive(Default)]
struct State {
    /// Free blocks by class.
    free: BTreeMap<usize, Vec<NonNull<u8>>>,
    stats: MemoryStats,
    /// Blocks given out since [`CachingAllocator::begin_holding`], with their classes.
    given_out: Option<Vec<(NonNull<u8>, usize)>>,
    /// The memory that was set apart.
    apart: Vec<Apart>,
}

/// Memory set apart, from which blocks are cut.
struct Apart {
    start: NonNull<u8>,
    len: usize,
    /// Offsets and lengths of the blocks given out, in ascending order.
    used: Vec<(usize, usize)>,
}

/// The most blocks that are cut from one piece of memory at a time.
const MAX_CUTS: usize = 16;

impl Apart {
    /// Cuts a block from the first gap of `len` bytes, if there is one.
    fn cut(&mut self, len: usize) -> Option<NonNull<u8>> {
        if self.used.len() >= MAX_CUTS {
            return None;
        }
        let (mut begin, mut index) = (0, 0);
        for &(offset, used) in &self.used {
            if offset - begin >= len {
                break;
            }
            begin = offset + used;
            index += 1;
        }
        if self.len - begin < len {
            return None;
        }
        self.used.insert(index, (begin, len));
        NonNull::new(self.start.as_ptr().wrapping_add(begin))
    }

    /// Takes a block back; returns false if it was not cut from this memory.
    fn put_back(&mut self, start: NonNull<u8>) -> bool {
        let offset = (start.as_ptr() as usize).wrapping_sub(self.start.as_ptr() as usize);
        let index = self.used.iter().position(|&(used, _)| used == offset);
        if let (true, Some(index)) = (offset < self.len, index) {
            self.used.remove(index);
            return true;
        }
        false
    }
}

/// Keeps memory set apart while it lives. Blocks cut from it must have been given back before it is
/// dropped.
pub struct SetApart {
    block: Block,
}

impl Drop for SetApart {
    fn drop(&mut self) {
        let mut state = self.block.allocator.lock();
        state.apart.retain(|apart| apart.start != self.block.start);
    }
}

// SAFETY: the addresses are numbers here; the allocator owns the memory.
unsafe impl Send for State {}

/// The allocator that the head of this file describes.
pub struct CachingAllocator {
    source: Box<dyn MemorySource>,
    state: Mutex<State>,
}

/// A block of memory, which returns to its allocator when dropped.
pub struct Block {
    start: NonNull<u8>,
    /// The length that was asked for.
    len_bytes: usize,
    class: usize,
    allocator: Arc<CachingAllocator>,
}

// SAFETY: a block owns its memory; nothing is read or written through `&Block`.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Returns the address of the first byte: a mere number for device memory.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length that was asked for.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.allocator.put_back(self.start, self.class);
    }
}

impl CachingAllocator {
    /// Makes an allocator that takes at most `budget` bytes from `source`.
    pub fn new(source: Box<dyn MemorySource>, budget: usize) -> Arc<Self> {
        let state =
            State { stats: MemoryStats { budget, ..MemoryStats::default() }, ..State::default() };
        Arc::new(CachingAllocator { source, state: Mutex::new(state) })
    }

    /// Allocates `len_bytes` for `what`. Fails with [`ErrorKind::OutOfMemory`] and the sizes only
    /// after everything kept has been given back to the source.
    pub fn allocate(self: &Arc<Self>, len_bytes: usize, what: &str) -> Result<Block> {
        let class = size_class(len_bytes).ok_or_else(|| Error::out_of_memory(what, len_bytes))?;
        let cut = || {
            let mut state = self.lock();
            let len = len_bytes.max(1).next_multiple_of(SMALLEST_CLASS);
            let start = state.apart.iter_mut().find_map(|apart| apart.cut(len))?;
            state.stats.num_allocations += 1;
            Some(start)
        };
        if let Some(start) = cut() {
            return Ok(Block { start, len_bytes, class: 0, allocator: self.clone() });
        }
        self.allocate_class(class, len_bytes, what)
    }

    /// Sets `len_bytes` apart, which [`CachingAllocator::allocate`] uses first as long as the
    /// result lives: for memory that is needed temporarily, and given back before more work is
    /// queued.
    pub fn set_apart(self: &Arc<Self>, len_bytes: usize, what: &str) -> Result<SetApart> {
        let block = self.allocate_exact(len_bytes, what)?;
        let mut used = Vec::new();
        used.try_reserve_exact(MAX_CUTS).map_err(|_| Error::out_of_memory(what, len_bytes))?;
        let mut state = self.lock();
        state.apart.try_reserve(1).map_err(|_| Error::out_of_memory(what, len_bytes))?;
        state.apart.push(Apart { start: block.start, len: block.class, used });
        drop(state);
        Ok(SetApart { block })
    }

    /// As [`CachingAllocator::allocate`] without rounding up to a class, for memory that is kept
    /// for long: weights, a KV cache.
    pub fn allocate_exact(self: &Arc<Self>, len_bytes: usize, what: &str) -> Result<Block> {
        let class = len_bytes.max(1).checked_next_multiple_of(SMALLEST_CLASS);
        let class = class.filter(|&class| class <= isize::MAX as usize);
        let class = class.ok_or_else(|| Error::out_of_memory(what, len_bytes))?;
        self.allocate_class(class, len_bytes, what)
    }

    fn allocate_class(
        self: &Arc<Self>,
        class: usize,
        len_bytes: usize,
        what: &str,
    ) -> Result<Block> {
        let mut state = self.lock();
        state.stats.num_allocations += 1;
        if let Some(given_out) = &mut state.given_out {
            given_out.try_reserve(1).map_err(|_| Error::out_of_memory(what, len_bytes))?;
        }
        let start = match state.free.get_mut(&class).and_then(Vec::pop) {
            Some(start) => start,
            None => self.fetch(&mut state, class, len_bytes, what)?,
        };
        if let Some(given_out) = &mut state.given_out {
            given_out.push((start, class));
        }
        state.stats.allocated += class;
        state.stats.peak = state.stats.peak.max(state.stats.allocated);
        drop(state);
        Ok(Block { start, len_bytes, class, allocator: self.clone() })
    }

    /// Takes a block of `class` from the source.
    fn fetch(
        &self,
        state: &mut State,
        class: usize,
        len_bytes: usize,
        what: &str,
    ) -> Result<NonNull<u8>> {
        let budget = state.stats.budget;
        if state.given_out.is_some() {
            // The driver must not be asked while work is recorded. Nobody sees this message.
            return Err(Error::out_of_memory(what, len_bytes));
        }
        if state.stats.reserved.saturating_add(class) > budget {
            self.give_back(state);
        }
        let refused = |state: &State, why: &str| {
            let mut message = format!(
                "cannot allocate {len_bytes} bytes of {} for {what}: {why} ({} bytes are in use",
                self.source.name(),
                state.stats.allocated
            );
            // A failed `write!` leaves the message shorter.
            if budget != usize::MAX {
                let _ = write!(message, ", the budget is {budget}");
            }
            if let Some((free, total)) = self.source.free_and_total() {
                let _ = write!(message, ", {free} of {total} are free");
            }
            message.push(')');
            Error::new(ErrorKind::OutOfMemory, message)
        };
        if state.stats.reserved.saturating_add(class) > budget {
            return Err(refused(state, "the budget is exhausted"));
        }
        // Reserves room for the block's return: giving back must not fail.
        let list = state.free.entry(class).or_default();
        list.try_reserve(1).map_err(|_| Error::out_of_memory(what, len_bytes))?;
        state.stats.num_driver_calls += 1;
        let start = match self.source.allocate(class) {
            Err(e) if e.kind() == ErrorKind::OutOfMemory => {
                self.give_back(state);
                state.stats.num_driver_calls += 1;
                self.source.allocate(class).map_err(|e| match e.kind() {
                    ErrorKind::OutOfMemory => refused(state, e.message()),
                    _ => e,
                })?
            }
            other => other?,
        };
        state.stats.reserved += class;
        Ok(start)
    }

    /// Starts to record which blocks are given out, and from now on gives out only blocks that it
    /// has.
    pub fn begin_holding(&self) {
        self.lock().given_out = Some(Vec::new());
    }

    /// Returns the blocks that were given out since [`CachingAllocator::begin_holding`] and have
    /// come back, and takes them out of circulation until they are dropped. Used for work that is
    /// recorded now and runs later.
    pub fn end_holding(self: &Arc<Self>) -> Result<Vec<Block>> {
        let mut state = self.lock();
        let mut given_out = state.given_out.take().unwrap_or_default();
        given_out.sort_unstable();
        given_out.dedup();
        let mut held = Vec::new();
        held.try_reserve_exact(given_out.len())
            .map_err(|_| Error::out_of_memory("blocks to hold", given_out.len()))?;
        for (start, class) in given_out {
            let free = state.free.entry(class).or_default();
            if let Some(index) = free.iter().position(|other| *other == start) {
                free.swap_remove(index);
                state.stats.allocated += class;
                held.push(Block { start, len_bytes: class, class, allocator: self.clone() });
            }
        }
        state.stats.peak = state.stats.peak.max(state.stats.allocated);
        Ok(held)
    }

    /// Returns everything that is not in use to the source.
    pub fn trim(&self) {
        self.give_back(&mut self.lock());
    }

    fn give_back(&self, state: &mut State) {
        for (class, list) in std::mem::take(&mut state.free) {
            for start in list {
                state.stats.num_driver_calls += 1;
                state.stats.reserved = state.stats.reserved.saturating_sub(class);
                // SAFETY: a block in a free list came from the source with this class and is used
                // by nobody.
                unsafe { self.source.release(start, class) };
            }
        }
    }

    fn put_back(&self, start: NonNull<u8>, class: usize) {
        let mut state = self.lock();
        if class == 0 {
            // The block was cut from memory set apart.
            state.apart.iter_mut().any(|apart| apart.put_back(start));
            return;
        }
        state.stats.allocated = state.stats.allocated.saturating_sub(class);
        let list = state.free.entry(class).or_default();
        if list.try_reserve(1).is_ok() {
            list.push(start);
        } else {
            state.stats.num_driver_calls += 1;
            state.stats.reserved = state.stats.reserved.saturating_sub(class);
            // SAFETY: the block came from the source with this class; its owner has just released
            // it.
            unsafe { self.source.release(start, class) };
        }
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> MemoryStats {
        self.lock().stats
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CachingAllocator {
    fn drop(&mut self) {
        // Every block holds the allocator, so none is in use now.
        self.trim();
    }
}

/// Returns the smallest class of at least `len_bytes`: 8, 9, ... 15 times a power of two.
fn size_class(len_bytes: usize) -> Option<usize> {
    if len_bytes <= SMALLEST_CLASS {
        return Some(SMALLEST_CLASS);
    }
    let step = 1usize << (len_bytes - 1).ilog2().saturating_sub(3);
    len_bytes.checked_next_multiple_of(step).filter(|&class| class <= isize::MAX as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A source of addresses without memory.
    struct Numbers {
        next: AtomicUsize,
        limit: usize,
        out: Arc<AtomicUsize>,
    }

    impl MemorySource for Numbers {
        fn allocate(&self, bytes: usize) -> Result<NonNull<u8>> {
            if self.out.load(Ordering::Relaxed) + bytes > self.limit {
                return Err(Error::out_of_memory("a test", bytes));
            }
            self.out.fetch_add(bytes, Ordering::Relaxed);
            let start = self.next.fetch_add(bytes, Ordering::Relaxed);
            Ok(NonNull::new(std::ptr::without_provenance_mut(start)).unwrap())
        }

        unsafe fn release(&self, _start: NonNull<u8>, bytes: usize) {
            self.out.fetch_sub(bytes, Ordering::Relaxed);
        }

        fn name(&self) -> &'static str {
            "test memory"
        }

        fn free_and_total(&self) -> Option<(usize, usize)> {
            let free = self.limit - self.out.load(Ordering::Relaxed);
            (self.limit != usize::MAX).then_some((free, self.limit))
        }
    }

    fn allocator(limit: usize, budget: usize) -> (Arc<CachingAllocator>, Arc<AtomicUsize>) {
        let out = Arc::new(AtomicUsize::new(0));
        let source = Numbers { next: AtomicUsize::new(4096), limit, out: out.clone() };
        (CachingAllocator::new(Box::new(source), budget), out)
    }

    #[test]
    fn classes_lose_an_eighth_at_most() {
        for len in (1..70_000).chain([1 << 20, (1 << 20) + 1, (1 << 33) + 12345]) {
            let class = size_class(len).unwrap();
            assert!(class >= len && class.is_multiple_of(64), "{len}: {class}");
            assert!(
                len <= SMALLEST_CLASS || class as f64 <= len as f64 * 1.125 + 1.0,
                "{len}: {class}"
            );
            assert_eq!(size_class(class), Some(class));
        }
        assert_eq!(size_class(usize::MAX), None);
    }

    #[test]
    fn exact_blocks_take_what_they_need() {
        let (allocator, out) = allocator(usize::MAX, 1 << 20);
        let block = allocator.allocate_exact((1 << 20) - 1000, "weights").unwrap();
        assert_eq!(block.len_bytes(), (1 << 20) - 1000);
        assert_eq!(out.load(Ordering::Relaxed), (1 << 20) - 512);
        assert!(allocator.allocate_exact(513, "more").is_err());
        assert!(allocator.allocate_exact(usize::MAX, "too much").is_err());
        drop(block);
        assert_eq!(allocator.stats().allocated, 0);
    }

    #[test]
    fn the_second_round_asks_for_nothing() {
        let (allocator, out) = allocator(usize::MAX, usize::MAX);
        let round = || {
            let a = allocator.allocate(10_000, "a").unwrap();
            let b = allocator.allocate(300, "b").unwrap();
            drop(a);
            let _c = allocator.allocate(9_900, "c").unwrap();
            drop(b);
        };
        round();
        let calls = allocator.stats().num_driver_calls;
        assert_eq!(calls, 2);
        (0..100).for_each(|_| round());
        assert_eq!(allocator.stats().num_driver_calls, calls);
        assert_eq!(allocator.stats().allocated, 0);
        allocator.trim();
        assert_eq!((allocator.stats().reserved, out.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn what_is_set_apart_serves_first_and_takes_no_more() {
        let (allocator, out) = allocator(usize::MAX, usize::MAX);
        let apart = allocator.set_apart(4096, "scratch").unwrap();
        let stats = allocator.stats();
        assert_eq!((stats.allocated, out.load(Ordering::Relaxed)), (4096, 4096));
        let a = allocator.allocate(1000, "a").unwrap();
        let b = allocator.allocate(100, "b").unwrap();
        let c = allocator.allocate(2049, "c").unwrap();
        let at = |block: &Block| block.start() as usize - a.start() as usize;
        assert_eq!((at(&b), at(&c)), (1024, 1536));
        // Gaps are filled from the front; a block that does not fit is taken elsewhere.
        drop(b);
        let d = allocator.allocate(513, "d").unwrap();
        assert_eq!(out.load(Ordering::Relaxed), 4096 + 576);
        let b = allocator.allocate(512, "b").unwrap();
        assert_eq!(at(&b), 1024);
        drop((a, b, c, d));
        allocator.begin_holding();
        drop(allocator.allocate(4096, "all").unwrap());
        assert!(allocator.end_holding().unwrap().is_empty());
        assert_eq!(allocator.stats().allocated, 4096);
        drop(apart);
        assert_eq!(allocator.stats().allocated, 0);
        let e = allocator.allocate(4096, "e").unwrap();
        assert_eq!(allocator.stats().allocated, 4096);
        drop(e);
        allocator.trim();
        assert_eq!(out.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn held_blocks_are_given_to_nobody_else() {
        let (allocator, _) = allocator(usize::MAX, usize::MAX);
        let kept = allocator.allocate(5000, "before").unwrap();
        drop((allocator.allocate(1000, "a").unwrap(), allocator.allocate(3000, "b").unwrap()));
        allocator.begin_holding();
        let a = allocator.allocate(1000, "a").unwrap().start();
        assert!(allocator.allocate(90_000, "not there").is_err());
        assert_eq!(allocator.allocate(1000, "again").unwrap().start(), a);
        let still_used = allocator.allocate(3000, "b").unwrap();
        let held = allocator.end_holding().unwrap();
        assert_eq!(held.iter().map(Block::start).collect::<Vec<_>>(), [a]);
        assert_ne!(allocator.allocate(1000, "c").unwrap().start(), a);
        allocator.trim();
        assert_eq!(allocator.stats().reserved, allocator.stats().allocated);
        drop((held, still_used, kept));
        assert_eq!(allocator.stats().allocated, 0);
    }

    #[test]
    fn a_refusal_trims_and_tries_again() {
        for (limit, budget) in [(10_000, usize::MAX), (usize::MAX, 10_000)] {
            let (allocator, out) = allocator(limit, budget);
            drop(allocator.allocate(8192, "a").unwrap());
            // Only possible once the first is given back.
            let b = allocator.allocate(9000, "b").unwrap();
            let error = allocator.allocate(4096, "c").err().unwrap();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory);
            let message = error.message();
            assert!(message.contains("4096 bytes of test memory for c"), "{message}");
            // Only what is limited is said to be.
            assert_eq!(message.contains("the budget is 10000"), budget == 10_000, "{message}");
            assert_eq!(message.contains("10000 are free"), limit == 10_000, "{message}");
            assert!(!message.contains(&usize::MAX.to_string()), "{message}");
            drop(b);
            drop(allocator);
            assert_eq!(out.load(Ordering::Relaxed), 0);
        }
    }
}
