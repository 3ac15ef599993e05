//! The allocator of the library: the system's, and a reserve for when the system has nothing left.
//!
//! Rust code that grows a vector, formats a message or makes a shared object ends the process when
//! the allocation fails. Allocations of the library whose size depends on its input can fail as
//! errors, but the standard library and the dependencies (tokenizer, regular expressions,
//! JSON, templates) make thousands of small allocations that cannot. So this allocator asks the
//! system first; if that has no memory, and the request is small, it takes a block of the reserve.
//!
//! Buffers that are made in one piece and may fail take nothing from it unless they are small
//! ([`vec_with_capacity`]); those that grow still do.
//!
//! A call that needed the reserve goes on to its end, or to an allocation that can fail. Until all
//! of the reserve has been put back, or the system has as much memory again, functions that begin
//! something new are refused ([`has_room`]), so that those under way find what they need. (Waiting for
//! all of it would not do: a cache in a regular expression of a tokenizer lives as long as its model,
//! and must not make the library useless after memory has come back.)
//!
//! The reserve is a static array, so it is there from the moment that the library is loaded, and
//! takes no physical memory until it is used. It needs no lock: a fork cannot leave it locked in the
//! child. As long as nothing fails it costs one comparison for every block that is freed.
//!
//! The allocator is that of the shared library. A Rust program that links the crate has it too, as
//! a program has only one; one with an allocator of its own turns the feature `reserve` off.
//!
//! A build with debug assertions can tell a test of each allocation, and let it fail ([`watch`]).

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::OnceLock;

/// The block sizes are powers of two, from this one on.
const SMALLEST_BLOCK: usize = 64;
/// The number of block sizes. The largest block, of 512 KiB, has room for the largest single
/// allocation of the dependencies whose size does not follow from their input: 312 KiB, a table in
/// the compiler of regular expressions.
const NUM_CLASSES: usize = 14;
/// Every block size has the same share of the reserve.
const CLASS_BYTES: usize = 512 << 10;
const RESERVE_BYTES: usize = NUM_CLASSES * CLASS_BYTES;
/// The number of words that have a bit for every smallest block.
const CLASS_WORDS: usize = CLASS_BYTES / SMALLEST_BLOCK / 64;
/// The most bytes that a buffer takes from the reserve if its allocation can fail: enough for what a
/// step of a small model needs. If it were more, two threads that read pieces of weights would leave
/// nothing for a third that compiles a regular expression.
const LARGEST_FALLIBLE: usize = 64 << 10;
/// Blocks are aligned to their size, but to no more than this.
const MAX_ALIGN: usize = 4096;

/// Memory in blocks of fixed sizes, which are taken and put back without a lock.
#[repr(C, align(4096))]
struct Reserve {
    bytes: UnsafeCell<[u8; RESERVE_BYTES]>,
    /// For each block size, a bit for every block that is in use.
    in_use: [[AtomicU64; CLASS_WORDS]; NUM_CLASSES],
    /// The total size of the blocks in use.
    bytes_in_use: AtomicUsize,
}

// SAFETY: `bytes` is never accessed here but through a block that one caller of `take` has, as its
// bit says.
unsafe impl Sync for Reserve {}

const fn block_bytes(class: usize) -> usize {
    SMALLEST_BLOCK << class
}

impl Reserve {
    const fn new() -> Self {
        Reserve {
            bytes: UnsafeCell::new([0; RESERVE_BYTES]),
            in_use: [const { [const { AtomicU64::new(0) }; CLASS_WORDS] }; NUM_CLASSES],
            bytes_in_use: AtomicUsize::new(0),
        }
    }

    /// Returns the distance of a pointer from the first byte, if it points into the reserve.
    #[inline]
    fn offset_of(&self, pointer: *const u8) -> Option<usize> {
        let offset = pointer.addr().wrapping_sub(self.bytes.get().addr());
        (offset < RESERVE_BYTES).then_some(offset)
    }

    /// Takes a block for `layout`; NULL if there is none.
    #[cold]
    fn take(&self, layout: Layout) -> *mut u8 {
        if layout.align() > MAX_ALIGN {
            return std::ptr::null_mut();
        }
        let wanted = layout.size().max(layout.align()).max(SMALLEST_BLOCK);
        let smallest = wanted.div_ceil(SMALLEST_BLOCK).next_power_of_two().trailing_zeros();
        for class in smallest as usize..NUM_CLASSES {
            if let Some(block) = self.claim(class) {
                self.bytes_in_use.fetch_add(block_bytes(class), Ordering::Relaxed);
                let offset = class * CLASS_BYTES + block * block_bytes(class);
                // SAFETY: the block lies within its class, and the class within the reserve.
                return unsafe { self.bytes.get().cast::<u8>().add(offset) };
            }
        }
        std::ptr::null_mut()
    }

    /// Finds a free block of a class and marks it as in use.
    fn claim(&self, class: usize) -> Option<usize> {
        let num_blocks = CLASS_BYTES / block_bytes(class);
        for (index, word) in self.in_use.get(class)?.iter().enumerate() {
            let left = num_blocks.saturating_sub(index * 64).min(64) as u32;
            let existing = u64::MAX.checked_shr(64 - left).unwrap_or(0);
            let mut seen = word.load(Ordering::Relaxed);
            while !seen & existing != 0 {
                let bit = (!seen & existing).trailing_zeros();
                let claimed = seen | 1 << bit;
                // Acquire and, in `put`, release: its last user has finished with the block.
                match word.compare_exchange_weak(
                    seen,
                    claimed,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return Some(index * 64 + bit as usize),
                    Err(now) => seen = now,
                }
            }
        }
        None
    }

    /// Puts the block at `offset` back.
    #[cold]
    fn put(&self, offset: usize) {
        let class = offset / CLASS_BYTES;
        let block = offset % CLASS_BYTES / block_bytes(class);
        if let Some(word) = self.in_use.get(class).and_then(|words| words.get(block / 64)) {
            self.bytes_in_use.fetch_sub(block_bytes(class), Ordering::Relaxed);
            word.fetch_and(!(1 << (block % 64)), Ordering::Release);
        }
    }

    /// Moves a block at `offset` of the reserve to where there is room for `new`.
    ///
    /// # Safety
    /// `pointer` is the block at `offset`, in use and allocated with the layout `old`.
    #[cold]
    unsafe fn grow(&self, pointer: *mut u8, offset: usize, old: Layout, new: Layout) -> *mut u8 {
        if new.size() <= block_bytes(offset / CLASS_BYTES) {
            return pointer;
        }
        // SAFETY: by contract of `GlobalAlloc::realloc` the size is not 0.
        let mut moved = unsafe { System.alloc(new) };
        if moved.is_null() {
            moved = self.take(new);
        }
        if !moved.is_null() {
            // SAFETY: both are valid for the smaller of the sizes, which is the old one as the block
            // was too small for the new one, and a block in use overlaps no other.
            unsafe { pointer.copy_to_nonoverlapping(moved, old.size()) };
            self.put(offset);
        }
        moved
    }
}

static RESERVE: Reserve = Reserve::new();

/// What a test is told of the allocations of all threads. The functions may allocate, but then they
/// are called again.
pub struct Watcher {
    /// Is told the bytes of each allocation, and returns whether it may succeed; else the reserve
    /// does not serve it either.
    pub may_allocate: fn(usize) -> bool,
    /// Is called for each block that is freed.
    pub freed: fn(),
}

static WATCHER: OnceLock<Watcher> = OnceLock::new();

/// Has `watcher` called from now on; one after the first is ignored. Builds without debug
/// assertions, such as the shipped library, call none.
pub fn watch(watcher: Watcher) {
    let _ = WATCHER.set(watcher);
}

#[inline]
fn watcher() -> Option<&'static Watcher> {
    if cfg!(debug_assertions) {
        WATCHER.get()
    } else {
        None
    }
}

#[inline]
fn may_allocate(bytes: usize) -> bool {
    watcher().is_none_or(|watcher| (watcher.may_allocate)(bytes))
}

/// The system's allocator with the reserve behind it.
pub struct Allocator;

// SAFETY: memory is the system's or a block of the reserve that nobody else has, which is as large
// and as aligned as asked for; which of the two it is follows from the address.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !may_allocate(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises.
        let pointer = unsafe { System.alloc(layout) };
        if pointer.is_null() {
            return RESERVE.take(layout);
        }
        pointer
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !may_allocate(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if pointer.is_null() {
            let block = RESERVE.take(layout);
            if !block.is_null() {
                // SAFETY: a block has at least the size of the layout.
                unsafe { block.write_bytes(0, layout.size()) };
            }
            return block;
        }
        pointer
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if let Some(watcher) = watcher() {
            (watcher.freed)();
        }
        match RESERVE.offset_of(pointer) {
            Some(offset) => RESERVE.put(offset),
            // SAFETY: the caller's promises; what is not of the reserve is of the system.
            None => unsafe { System.dealloc(pointer, layout) },
        }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !may_allocate(new_size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller promises that the size, rounded up to the alignment, is no more than
        // isize::MAX.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        if let Some(offset) = RESERVE.offset_of(pointer) {
            // SAFETY: the caller's promises.
            return unsafe { RESERVE.grow(pointer, offset, layout, new) };
        }
        // SAFETY: the caller's promises.
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        if !moved.is_null() {
            return moved;
        }
        if new_size <= layout.size() {
            // It is large enough as it is.
            return pointer;
        }
        let block = RESERVE.take(new);
        if !block.is_null() {
            // SAFETY: a block has more bytes than the old layout, which are valid until it is freed.
            unsafe {
                pointer.copy_to_nonoverlapping(block, layout.size());
                System.dealloc(pointer, layout);
            }
        }
        block
    }
}

#[cfg(feature = "reserve")]
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Makes a vector with room for `capacity` elements: of the system's memory, unless it is small.
/// Returns `None` where there is none.
pub(crate) fn vec_with_capacity<T>(capacity: usize) -> Option<Vec<T>> {
    let layout = Layout::array::<T>(capacity).ok()?;
    if cfg!(feature = "reserve") && layout.size() > LARGEST_FALLIBLE {
        if !may_allocate(layout.size()) {
            return None;
        }
        // SAFETY: the size is not 0.
        let pointer = unsafe { System.alloc(layout) };
        // SAFETY: the memory is as large and as aligned as `capacity` elements need, and `ALLOCATOR`,
        // which frees it, gives back to the system what does not lie in the reserve.
        return (!pointer.is_null())
            .then(|| unsafe { Vec::from_raw_parts(pointer.cast(), 0, capacity) });
    }
    let mut empty = Vec::new();
    empty.try_reserve_exact(capacity).ok()?;
    Some(empty)
}

/// Returns the bytes of the reserve that are in use.
pub fn bytes_in_use() -> usize {
    RESERVE.bytes_in_use.load(Ordering::Relaxed)
}

/// Whether something new may begin: none of the reserve is in use, or the system has as much memory as
/// the whole reserve. To be asked before any work, and before an object that lives long is given to the
/// caller.
#[inline]
pub fn has_room() -> bool {
    bytes_in_use() == 0 || has_system()
}

#[cold]
fn has_system() -> bool {
    let layout = Layout::new::<[u8; RESERVE_BYTES]>();
    // SAFETY: the size is not 0; the memory is freed as it was allocated. The compiler must not
    // assume that the allocation succeeds.
    unsafe {
        let pointer = std::hint::black_box(System.alloc(layout));
        if !pointer.is_null() {
            System.dealloc(pointer, layout);
        }
        !pointer.is_null()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    #[test]
    fn blocks_are_disjoint_aligned_and_put_back() {
        static OWN: Reserve = Reserve::new();
        let sizes = [1, 64, 65, 1000, 4096, 70_000, 512 << 10];
        let mut blocks = Vec::new();
        for align in [1, 64, 4096] {
            for size in sizes {
                let block = OWN.take(layout(size, align));
                let offset = OWN.offset_of(block).unwrap();
                assert!(offset + size <= RESERVE_BYTES);
                assert_eq!(block.addr() % align, 0);
                blocks.push((offset, size, block));
                if size == 512 << 10 {
                    // There is one of this size.
                    assert!(OWN.take(layout(size, align)).is_null());
                    OWN.put(offset);
                    blocks.pop();
                }
            }
        }
        blocks.sort();
        assert!(blocks.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert!(OWN.bytes_in_use.load(Ordering::Relaxed) > 0);
        blocks.iter().for_each(|(offset, ..)| OWN.put(*offset));
        assert_eq!(OWN.bytes_in_use.load(Ordering::Relaxed), 0);
        assert!(OWN.take(layout(1, 8192)).is_null());
        assert!(OWN.take(layout((512 << 10) + 1, 1)).is_null());
        assert_eq!(OWN.offset_of((&raw const sizes).cast()), None);
    }

    #[test]
    fn long_vectors_are_freed_and_grow_as_others_do() {
        let long = LARGEST_FALLIBLE / 4 + 1;
        for capacity in [0, 1, long] {
            let mut numbers = vec_with_capacity::<u32>(capacity).unwrap();
            assert!(numbers.capacity() >= capacity);
            numbers.extend(0..capacity as u32);
            numbers.extend(0..long as u32);
            assert_eq!(numbers.len(), capacity + long);
            assert_eq!(numbers.first(), Some(&0));
        }
        assert!(vec_with_capacity::<u32>(isize::MAX as usize / 4).is_none());
        assert!(vec_with_capacity::<u32>(usize::MAX).is_none());
    }

    #[test]
    fn every_block_can_be_taken_and_grows_into_another() {
        static OWN: Reserve = Reserve::new();
        let small = layout(24, 8);
        let mut blocks = Vec::new();
        loop {
            let block = OWN.take(small);
            if block.is_null() {
                break;
            }
            // SAFETY: the block has 64 bytes.
            unsafe { block.write_bytes(blocks.len() as u8, 24) };
            blocks.push(block);
        }
        // All small ones, and all larger ones as well.
        assert_eq!(OWN.bytes_in_use.load(Ordering::Relaxed), RESERVE_BYTES);
        assert!(blocks.len() > CLASS_BYTES / SMALLEST_BLOCK);
        for (number, block) in blocks.into_iter().enumerate() {
            let offset = OWN.offset_of(block).unwrap();
            // SAFETY: the block is in use and of this layout.
            let moved = unsafe { OWN.grow(block, offset, small, layout(8 << 20, 8)) };
            // SAFETY: the new block has more bytes than that.
            let bytes = unsafe { std::slice::from_raw_parts(moved, 24) };
            assert!(bytes.iter().all(|byte| *byte == number as u8));
            assert!(OWN.offset_of(moved).is_none());
            // SAFETY: the block is the system's, as the reserve has none of that size.
            unsafe { System.dealloc(moved, layout(8 << 20, 8)) };
        }
        assert_eq!(OWN.bytes_in_use.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn threads_do_not_get_the_same_block() {
        static OWN: Reserve = Reserve::new();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                scope.spawn(move || {
                    for round in 0..2000usize {
                        let wanted = layout(1 + round * 37 % 5000, 1);
                        let block = OWN.take(wanted);
                        // SAFETY: the block has that size, and is this thread's until it is put back.
                        unsafe {
                            block.write_bytes(thread, wanted.size());
                            std::thread::yield_now();
                            let bytes = std::slice::from_raw_parts(block, wanted.size());
                            assert!(bytes.iter().all(|byte| *byte == thread));
                        }
                        OWN.put(OWN.offset_of(block).unwrap());
                    }
                });
            }
        });
        assert_eq!(OWN.bytes_in_use.load(Ordering::Relaxed), 0);
    }
}
