//! Large zeroed host allocations that are committed page by page as they are touched.

use crate::error::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;

/// The pages that a [`HostBuffer`] asks the system for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The system's default.
    Default,
    /// Huge pages where the system has them: one thread reads weights a third faster from 2 MiB
    /// pages than from 4 KiB pages. The system may refuse them.
    Huge,
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
    impl Sealed for f32 {}
}

/// Element types for which every bit pattern is a value, so that bytes may be viewed as them.
pub trait Plain: sealed::Sealed + Copy + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed bytes at an address that is a multiple of 64 (of 2 MiB for large [`Pages::Huge`]
/// buffers).
///
/// Memory is reserved at once and committed by the system when it is first touched.
#[derive(Debug)]
pub struct HostBuffer {
    start: NonNull<u8>,
    len_bytes: usize,
    /// The buffer that this one is a part of, which has the memory released; no other part overlaps.
    whole: Option<Arc<HostBuffer>>,
}

// SAFETY: the buffer owns its memory alone, as a `Vec<u8>` does; shared access only reads.
unsafe impl Send for HostBuffer {}
// SAFETY: as above: `&HostBuffer` gives out `&[T]` only.
unsafe impl Sync for HostBuffer {}

impl Default for HostBuffer {
    fn default() -> Self {
        Self::empty()
    }
}

impl HostBuffer {
    /// Allocates `len_bytes` zero bytes, or fails with [`crate::error::ErrorKind::OutOfMemory`].
    pub fn zeroed(len_bytes: usize, pages: Pages) -> Result<Self> {
        if len_bytes == 0 {
            return Ok(Self::empty());
        }
        if len_bytes > isize::MAX as usize - 2 * HUGE_PAGE_BYTES {
            return Err(Error::out_of_memory("a buffer", len_bytes));
        }
        let start = os::reserve(len_bytes, pages)
            .ok_or_else(|| Error::out_of_memory("a buffer", len_bytes))?;
        Ok(HostBuffer { start, len_bytes, whole: None })
    }

    /// Makes a buffer of no bytes, without asking the system for anything.
    pub const fn empty() -> Self {
        HostBuffer { start: DANGLING, len_bytes: 0, whole: None }
    }

    /// Restores a buffer from its address and length.
    ///
    /// # Safety
    /// Both are those of one [`HostBuffer::zeroed`] that was forgotten, and that nobody else
    /// restores.
    pub unsafe fn from_raw_parts(start: NonNull<u8>, len_bytes: usize) -> Self {
        HostBuffer { start, len_bytes, whole: None }
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Keeps this memory from processes that are forked later: there it is not mapped.
    pub fn keep_from_children(&self) {
        if self.len_bytes > 0 {
            os::keep_from_children(self.start, self.len_bytes);
        }
    }

    /// Returns all bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.as_slice()
    }

    /// Returns all bytes, for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }

    /// Returns the whole buffer as elements of `T`; a rest smaller than an element is left out.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        // SAFETY: `start` is valid for `len_bytes` initialised (zeroed) bytes for the lifetime of
        // self and aligned to 64 >= align_of::<T>(); every bit pattern is a `T`; `&self` forbids
        // writes.
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len_bytes / size_of::<T>())
        }
    }

    /// Returns the whole buffer as elements of `T`, for writing.
    pub fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`; `&mut self` makes the view unique.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.start.as_ptr().cast(),
                self.len_bytes / size_of::<T>(),
            )
        }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.len_bytes > 0 && self.whole.is_none() {
            // SAFETY: `start` and `len_bytes` come from `os::reserve`, and nothing borrows self.
            unsafe { os::release(self.start, self.len_bytes) };
        }
    }
}

/// Buffers of huge pages that are handed out in parts, one after the other. A buffer by itself has its
/// end, or if it is smaller than a huge page all of it, on small pages, which are slower to read.
///
/// The memory of a buffer is released when all its parts are dropped.
#[derive(Debug)]
pub struct HostArena {
    region_bytes: usize,
    region: Arc<HostBuffer>,
    used: usize,
}

impl HostArena {
    /// The size of a buffer, unless all parts are expected to be smaller. Parts of more than a quarter
    /// have one of their own, as what such parts leave over at its end adds up.
    const REGION_BYTES: usize = 64 << 20;
    /// The alignment of parts: that of the smallest pages.
    const ALIGNMENT: usize = 4096;

    /// Makes an arena that takes no memory yet, for parts of so many bytes altogether.
    pub fn new(expected_bytes: usize) -> Self {
        HostArena {
            region_bytes: expected_bytes.min(Self::REGION_BYTES),
            region: Arc::new(HostBuffer::empty()),
            used: 0,
        }
    }

    /// Returns a part of `len_bytes` zero bytes, or fails with
    /// [`crate::error::ErrorKind::OutOfMemory`].
    pub fn zeroed(&mut self, len_bytes: usize) -> Result<HostBuffer> {
        let taken = len_bytes.checked_next_multiple_of(Self::ALIGNMENT);
        let taken = taken.ok_or_else(|| Error::out_of_memory("a buffer", len_bytes))?;
        let room = self.region.len_bytes() - self.used;
        if taken <= room {
            // SAFETY: there is room for it, and earlier parts end before.
            let part = unsafe { part_of(&self.region, self.used, len_bytes) };
            self.used += taken;
            return Ok(part);
        }
        let bytes = if taken > self.region_bytes / 4 { taken } else { self.region_bytes };
        let region = Arc::new(HostBuffer::zeroed(bytes, Pages::Huge)?);
        // SAFETY: it has no other part yet, and is no smaller.
        let part = unsafe { part_of(&region, 0, len_bytes) };
        // The one with more room left is that of the next parts.
        if bytes - taken >= room {
            (self.region, self.used) = (region, taken);
        }
        Ok(part)
    }
}

/// Returns a part of `whole`, from `first` on.
///
/// # Safety
/// The whole has these bytes, and no other part has any of them.
unsafe fn part_of(whole: &Arc<HostBuffer>, first: usize, len_bytes: usize) -> HostBuffer {
    if len_bytes == 0 {
        return HostBuffer::empty();
    }
    // SAFETY: the whole has these bytes, as the caller vouches.
    let start = unsafe { whole.start.add(first) };
    HostBuffer { start, len_bytes, whole: Some(whole.clone()) }
}

/// A non-null, 64-byte-aligned address of nothing.
const DANGLING: NonNull<u8> = match std::num::NonZeroUsize::new(64) {
    Some(alignment) => NonNull::without_provenance(alignment),
    None => NonNull::dangling(),
};

#[cfg(unix)]
mod os {
    use super::{Pages, HUGE_PAGE_BYTES};
    use std::ptr::NonNull;

    fn round_up_to_page(len: usize) -> usize {
        // 64 KiB is a multiple of every page size in use, so that all trims are page-aligned.
        const GRANULE: usize = 64 << 10;
        len.div_ceil(GRANULE) * GRANULE
    }

    /// Reserves at least `len` bytes of zeroed memory, page-aligned.
    pub fn reserve(len: usize, pages: Pages) -> Option<NonNull<u8>> {
        let len = round_up_to_page(len);
        let huge = pages == Pages::Huge && len >= HUGE_PAGE_BYTES;
        // Over-allocates and trims: mmap itself promises no more than page alignment.
        let reserved = if huge { len + HUGE_PAGE_BYTES } else { len };
        // SAFETY: a fresh private anonymous mapping at an address of the system's choice touches
        // no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = base.cast::<u8>();
        if !huge {
            return NonNull::new(base);
        }
        let head = base.align_offset(HUGE_PAGE_BYTES);
        let tail = HUGE_PAGE_BYTES - head;
        // SAFETY: head + len + tail = reserved; the parts cut off lie inside the mapping just made,
        // are page-aligned (the granule divides them) and are used by nobody.
        unsafe {
            let start = base.add(head);
            if head > 0 {
                libc::munmap(base.cast(), head);
            }
            if tail > 0 {
                libc::munmap(start.add(len).cast(), tail);
            }
            // This is only advice: where huge pages are off the buffer works all the same.
            #[cfg(target_os = "linux")]
            libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
            NonNull::new(start)
        }
    }

    /// Keeps the memory from forked children. Only advice: without it a child shares the pages.
    pub fn keep_from_children(start: NonNull<u8>, len: usize) {
        #[cfg(target_os = "linux")]
        // SAFETY: a mapping of `reserve`, which spans `len` rounded up; nothing changes in this
        // process.
        unsafe {
            libc::madvise(start.as_ptr().cast(), round_up_to_page(len), libc::MADV_DONTFORK);
        }
    }

    /// # Safety
    /// `start` and `len` are those of one [`reserve`], not yet released, with no references left.
    pub unsafe fn release(start: NonNull<u8>, len: usize) {
        // SAFETY: the caller vouches for it; the mapping spans `len` rounded up as reserved.
        unsafe { libc::munmap(start.as_ptr().cast(), round_up_to_page(len)) };
    }
}

#[cfg(not(unix))]
mod os {
    use super::Pages;
    use std::alloc::Layout;
    use std::ptr::NonNull;

    pub fn keep_from_children(_start: NonNull<u8>, _len: usize) {}

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len, 64).ok()
    }

    pub fn reserve(len: usize, _pages: Pages) -> Option<NonNull<u8>> {
        // SAFETY: `len` is not zero.
        NonNull::new(unsafe { std::alloc::alloc_zeroed(layout(len)?) })
    }

    /// # Safety
    /// As for the unix half.
    pub unsafe fn release(start: NonNull<u8>, len: usize) {
        if let Some(layout) = layout(len) {
            // SAFETY: allocated by `reserve` with the same layout.
            unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zeroed_aligned_and_writable() {
        for len in [0, 1, 63, 4096, 100_000, (2 << 20) - 1, 5 << 20] {
            for pages in [Pages::Default, Pages::Huge] {
                let mut buffer = HostBuffer::zeroed(len, pages).unwrap();
                assert_eq!(buffer.len_bytes(), len);
                assert!(buffer.as_bytes().iter().all(|&b| b == 0));
                assert_eq!(buffer.as_bytes().as_ptr() as usize % 64, 0);
                buffer.as_bytes_mut().fill(7);
                assert_eq!(buffer.as_slice::<f32>().len(), len / 4);
                assert!(buffer.as_slice::<u16>().iter().all(|&v| v == 0x0707));
            }
        }
    }

    #[test]
    fn parts_of_an_arena_are_apart_and_outlive_it() {
        let mut arena = HostArena::new(10 << 20);
        let sizes = [1, 5000, 0, 3 << 20, 100 << 20, 4096, 6 << 20, 2 << 20, 77];
        let mut parts: Vec<HostBuffer> =
            sizes.iter().map(|&len| arena.zeroed(len).unwrap()).collect();
        drop(arena);
        for (index, (part, &len)) in parts.iter_mut().zip(&sizes).enumerate() {
            assert_eq!(part.len_bytes(), len);
            assert_eq!(part.as_bytes().as_ptr() as usize % 64, 0);
            assert!(part.as_bytes().iter().all(|&b| b == 0));
            part.as_bytes_mut().fill(index as u8 + 1);
        }
        // In one order and the other.
        parts.swap(0, 6);
        while let Some(part) = parts.pop() {
            let first = part.as_bytes().first().copied().unwrap_or(0);
            assert!(part.as_bytes().iter().all(|&b| b == first));
        }
        assert!(HostArena::new(0).zeroed(usize::MAX).is_err());
        assert!(HostArena::new(usize::MAX).zeroed(isize::MAX as usize).is_err());
    }

    #[test]
    fn absurd_sizes_are_an_error() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 62] {
            assert!(HostBuffer::zeroed(len, Pages::Huge).is_err());
        }
    }
}
