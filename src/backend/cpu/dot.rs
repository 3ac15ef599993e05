//! Products of codes of up to 8 bits with integers of 16 bits, for sixteen columns at a time. The sums
//! are exact, so that every instruction set finds the same ones.

use super::simd::{Simd, Vector16};

/// The inputs that are multiplied together: their codes for one column are neighbours.
pub const UNIT: usize = 4;

/// What the activations of a unit are at most, up or down: their upper bytes, less what their lower
/// bytes are as signed numbers, must be signed bytes too.
pub const MAX_ACTIVATION: i16 = 127 << 8;

/// What they are at most where activations are integers of 8 bits.
pub const MAX_BYTE_ACTIVATION: i16 = 127;

/// The inputs that may be summed up before [`Dots::finish`]: the sums of `UNIT` bytes of 255 with the
/// largest activations, less those of zeros, must fit into 32 bits.
pub const MAX_SUMMED: usize = 128;

/// A body to be compiled for each instruction set, with its products.
pub trait DotKernel {
    /// Runs the body. Must be `#[inline(always)]`.
    fn run<S: Simd, D: Dots<Vector = S::Vector>>(self);
}

/// Sixteen sums of products in registers.
///
/// # Safety
/// Every method needs the instruction set of the implementing type; pointers must be valid for what
/// the method reads, at any alignment.
pub unsafe trait Dots: Copy {
    /// Sixteen f32 values of the same instruction set.
    type Vector: Vector16;
    /// The codes of sixteen columns for a unit of inputs.
    type Codes: Copy;
    /// The pairs of vectors, of the two of a panel, whose sums are kept at a time: with both, codes are
    /// one stream.
    const PAIRS: usize;
    /// The rows, at most 4, whose sums then fit into the registers.
    const MAX_ROWS: usize;
    /// The same where codes share bytes, whose parts need registers too.
    const MAX_NIBBLE_ROWS: usize = Self::MAX_ROWS;
    /// The same of both where activations are integers of 8 bits.
    const MAX_BYTE_ROWS: usize = Self::MAX_NIBBLE_ROWS;
    /// Brings the activations of a unit into the form in which [`Dots::add_products`] reads them.
    fn unit(activations: [i16; UNIT]) -> u64;
    /// Returns all zeros.
    /// # Safety
    /// See the trait.
    unsafe fn zero() -> Self;
    /// Reads the codes of a unit, 64 bytes: `UNIT` for each of sixteen columns.
    /// # Safety
    /// See the trait.
    unsafe fn load(source: *const u8) -> Self::Codes;
    /// Reads 64 bytes whose low halves are the codes of a unit for sixteen columns, and their high
    /// halves those for sixteen others.
    /// # Safety
    /// See the trait.
    unsafe fn load_nibbles(source: *const u8) -> (Self::Codes, Self::Codes);
    /// Adds to the sum of each column the products of its codes with the activations.
    /// # Safety
    /// See the trait; `activations` is what [`Dots::unit`] returned.
    unsafe fn add_products(self, codes: Self::Codes, activations: *const u64) -> Self;
    /// Does the same with activations of up to [`MAX_BYTE_ACTIVATION`], up or down.
    /// # Safety
    /// See the trait; `activations` is what [`Dots::unit`] returned.
    #[inline(always)]
    unsafe fn add_byte_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { self.add_products(codes, activations) }
    }
    /// Returns the sums, less the products of sixteen zeros, which are bytes, with `total`, the sum of
    /// the activations.
    /// # Safety
    /// See the trait.
    unsafe fn finish(self, zeros: *const u8, total: i32) -> Self::Vector;
}

// SAFETY: plain Rust, no instruction set needed; reads what the trait says.
unsafe impl Dots for [i32; 16] {
    type Vector = [f32; 16];
    type Codes = [[u8; UNIT]; 16];
    const PAIRS: usize = 1;
    const MAX_ROWS: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };

    #[inline(always)]
    fn unit(activations: [i16; UNIT]) -> u64 {
        activations.iter().rev().fold(0, |unit, &a| unit << 16 | u64::from(a as u16))
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        [0; 16]
    }

    #[inline(always)]
    unsafe fn load(source: *const u8) -> Self::Codes {
        // SAFETY: the caller passes a pointer valid for 64 reads.
        unsafe { source.cast::<Self::Codes>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_nibbles(source: *const u8) -> (Self::Codes, Self::Codes) {
        // SAFETY: the caller passes a pointer valid for 64 reads.
        let bytes = unsafe { source.cast::<Self::Codes>().read_unaligned() };
        (bytes.map(|unit| unit.map(|byte| byte & 15)), bytes.map(|unit| unit.map(|byte| byte >> 4)))
    }

    #[inline(always)]
    unsafe fn add_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller passes a pointer valid for a read.
        let unit = unsafe { activations.read_unaligned() };
        let mut sums = self;
        for (sum, codes) in sums.iter_mut().zip(&codes) {
            for (i, &code) in codes.iter().enumerate() {
                *sum += i32::from(code) * i32::from((unit >> (16 * i)) as i16);
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn finish(self, zeros: *const u8, total: i32) -> [f32; 16] {
        // SAFETY: the caller passes a pointer valid for 16 reads.
        let zeros = unsafe { zeros.cast::<[u8; 16]>().read_unaligned() };
        let mut sums = [0.0; 16];
        for ((to, sum), zero) in sums.iter_mut().zip(self).zip(zeros) {
            *to = sum.wrapping_sub(i32::from(zero).wrapping_mul(total)) as f32;
        }
        sums
    }
}
