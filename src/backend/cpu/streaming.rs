//! How kernels that read a matrix once, for few rows, help the processor to fetch it from memory. It follows
//! from the processor and changes no result.

use super::isa::is_amd;

/// The prefetch distance: how many bytes after the current read a kernel prefetches; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    pub bytes: usize,
    /// Whether it comes into the first-level cache, and not only into the second.
    pub is_near: bool,
}

impl Ahead {
    /// No prefetching.
    pub const NONE: Ahead = Ahead::far(0);

    /// Prefetching into the second-level cache.
    pub const fn far(bytes: usize) -> Self {
        Ahead { bytes, is_near: false }
    }

    /// Prefetches for what is read at `address`, which may be any.
    #[inline(always)]
    pub fn prefetch(self, address: *const u8) {
        let address = address.wrapping_add(self.bytes);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch of any address is only a hint (SSE is in the x86-64 baseline).
        unsafe {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0, _MM_HINT_T1};
            if self.is_near {
                _mm_prefetch::<_MM_HINT_T0>(address.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T1>(address.cast());
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }
}

/// How to prefetch a matrix, by the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streaming {
    /// Float matrices are prefetched into the second-level cache for few rows, and codes for one row (Emerald
    /// Rapids; codes were measured as integers only).
    Other,
    /// The processor follows one stream best by itself: a Zen 4 reads bf16, int4 and int8 for one row 10, 12
    /// and 34 percent faster than with software prefetches. With integers and more rows, whose products take as
    /// long as the reads, the second-level cache is asked, and all rows pass by what is there before the next
    /// bytes come: int4 for 3, 4, 8 and 16 rows is 26, 17, 11 and 6 percent faster, int8 for 3, 8 and 16 8, 8
    /// and 3. (Two rows of int8 at a time still wait for memory: there it costs 11 percent.)
    Zen4,
    /// The first-level cache is asked, and all strips of few rows pass by what is there before the next
    /// bytes come, as the memory would stand still while later strips read the same again. On a Zen 5 one
    /// thread reads bf16 for eight rows at 38 GB/s that way and otherwise at 28, and int4 for one row at 37
    /// and 30. For one or two rows of bf16 it follows the stream best by itself.
    Zen5,
}

/// The prefetch distance in bytes.
const AHEAD_BYTES: usize = 8192;
/// The family of Zen 5.
const ZEN_5: u32 = 0x1a;

/// Returns the family of a processor of AMD's, extended as it has been since the first Zen.
#[cfg(target_arch = "x86_64")]
fn amd_family() -> u32 {
    // Every x86-64 processor has leaf 1.
    let version = std::arch::x86_64::__cpuid(1).eax;
    (version >> 8 & 0xf) + (version >> 20 & 0xff)
}

#[cfg(not(target_arch = "x86_64"))]
fn amd_family() -> u32 {
    0
}

impl Streaming {
    /// All of them.
    pub const ALL: [Streaming; 3] = [Streaming::Other, Streaming::Zen4, Streaming::Zen5];

    /// Returns that of this processor.
    pub fn detect() -> Self {
        match is_amd() {
            true if amd_family() >= ZEN_5 => Streaming::Zen5,
            true => Streaming::Zen4,
            false => Streaming::Other,
        }
    }

    /// Returns how far few rows prefetch a matrix of floats.
    pub(crate) fn floats(self, num_rows: usize) -> Ahead {
        match self {
            Streaming::Other => Ahead::far(AHEAD_BYTES),
            Streaming::Zen5 if num_rows > 2 => Ahead { bytes: AHEAD_BYTES, is_near: true },
            _ => Ahead::NONE,
        }
    }

    /// Returns how far few rows prefetch a matrix of codes.
    pub(crate) fn codes(self, num_rows: usize) -> Ahead {
        match self {
            Streaming::Other if num_rows == 1 => Ahead::far(AHEAD_BYTES),
            Streaming::Zen5 => Ahead { bytes: AHEAD_BYTES, is_near: true },
            _ => Ahead::NONE,
        }
    }

    /// Returns how far few rows prefetch a matrix of integers. `are_waiting` says that the rows that are
    /// multiplied at a time wait for memory more than they multiply.
    pub(crate) fn integers(self, num_rows: usize, are_waiting: bool) -> Ahead {
        match self {
            Streaming::Zen4 if num_rows > 2 && !are_waiting => Ahead::far(AHEAD_BYTES),
            _ => self.codes(num_rows),
        }
    }

    /// Whether all strips of few rows pass by a stretch of a matrix of floats that fits into the first-level
    /// cache before the next stretch.
    pub(crate) fn has_near_stretches(self) -> bool {
        self == Streaming::Zen5
    }
}
