//! How kernels that read a matrix once, for few rows, help the processor to fetch it from memory. It follows
//! from the processor and changes no result.

use super::isa::is_amd;

/// Prefetching of what lies so many bytes behind what is read; 0: none.
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

/// The ways of processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streaming {
    /// The second-level cache is asked for matrices of floats by which few rows are multiplied, and of codes by
    /// which one is (Emerald Rapids, integers).
    Far,
    /// The processor follows one stream best by itself: a Zen 4 reads bf16, int4 and int8 for one row 10, 12
    /// and 34 percent faster than when it is asked.
    ByItself,
    /// The first-level cache is asked, and all strips of few rows pass by what is there before the next
    /// bytes come, as the memory would stand still while later strips read the same again. On a Zen 5 one
    /// thread reads bf16 for eight rows at 38 GB/s that way and otherwise at 28, and int4 for one row at 37
    /// and 30. For one or two rows of bf16 it follows the stream best by itself.
    Near,
}

/// How far ahead.
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
    /// Returns the way of this processor.
    pub fn detect() -> Self {
        match is_amd() {
            true if amd_family() >= ZEN_5 => Streaming::Near,
            true => Streaming::ByItself,
            false => Streaming::Far,
        }
    }

    /// Returns how far few rows prefetch a matrix of floats.
    pub fn floats(self, num_rows: usize) -> Ahead {
        match self {
            Streaming::Far => Ahead::far(AHEAD_BYTES),
            Streaming::Near if num_rows > 2 => Ahead { bytes: AHEAD_BYTES, is_near: true },
            _ => Ahead::NONE,
        }
    }

    /// Returns how far few rows prefetch a matrix of codes.
    pub fn codes(self, num_rows: usize) -> Ahead {
        match self {
            Streaming::Far if num_rows == 1 => Ahead::far(AHEAD_BYTES),
            Streaming::Near => Ahead { bytes: AHEAD_BYTES, is_near: true },
            _ => Ahead::NONE,
        }
    }

    /// Whether all strips of few rows pass by a stretch of the matrix that fits into the first-level cache
    /// before the next stretch.
    pub fn has_near_stretches(self) -> bool {
        self == Streaming::Near
    }
}
