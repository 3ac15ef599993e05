//! One source of every kernel for every instruction set.
//!
//! A [`Kernel`] is a body generic over [`Simd`]; [`super::CpuBackend::run`] calls it from a
//! function compiled for the backend's instruction set. The body and all it calls must be
//! `#[inline(always)]`, or the compiler makes a slow baseline copy of it.
//!
//! Elementwise bodies are plain loops over slices and are vectorised by the compiler; matrix tiles
//! use [`Vector16`], sixteen f32 columns, directly.

use super::math;
use super::tile::{tile, Element, Operands};
use super::tiles::{EmulatedTiles, NoTiles, TileUnit};

/// An instruction set, as types.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32 values.
    type Vector: Vector16;
    /// The element type by which a bf16 weight matrix is multiplied.
    type Bf16: Element;
    /// The unit that multiplies tiles of bf16.
    type Tiles: TileUnit;
    /// Returns `a * b + c`: fused where that is one instruction, else rounded twice.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
    /// Writes 32 values as bf16 for [`Simd::Tiles`], rounded to nearest even; NaN stays NaN.
    /// # Safety
    /// The instruction set is there, and `target` is writable for 32 elements.
    #[inline(always)]
    unsafe fn store_bf16(low: Self::Vector, high: Self::Vector, target: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe {
            low.round_to_bf16().store_high_halves(target);
            high.round_to_bf16().store_high_halves(target.add(16));
        }
    }
}

/// A body to be compiled for each instruction set.
pub trait Kernel {
    /// The result of the body.
    type Output;
    /// Runs the body. Must be `#[inline(always)]`.
    fn run<S: Simd>(self) -> Self::Output;
}

/// Sixteen f32 values in registers.
///
/// # Safety
/// Every method needs the instruction set of the implementing type; pointers must be valid for what
/// the method reads or writes, at any alignment.
pub unsafe trait Vector16: Copy {
    /// The number of values of this type that fit into the registers in addition to the operands of
    /// a product.
    const MAX_SUMS: usize;
    /// [`super::tile::tile`], as a function of its own compiled for the instruction set.
    /// # Safety
    /// See the trait; as [`Operands`] says.
    unsafe fn compiled_tile<E: Element<Vector = Self>, const ROWS: usize, const GROUPS: usize>(
        operands: &Operands<E>,
    );
    /// Returns all zeros.
    /// # Safety
    /// See the trait.
    unsafe fn zero() -> Self;
    /// Returns one value in all lanes.
    /// # Safety
    /// See the trait.
    unsafe fn splat(value: f32) -> Self;
    /// Reads 16 f32.
    /// # Safety
    /// See the trait.
    unsafe fn load(source: *const f32) -> Self;
    /// Reads 16 f16.
    /// # Safety
    /// See the trait.
    unsafe fn load_f16(source: *const u16) -> Self;
    /// Reads 16 pairs of bf16: the first of each pair and the second of each pair.
    /// # Safety
    /// See the trait.
    unsafe fn load_bf16_pairs(source: *const u16) -> (Self, Self);
    /// Reads 16 bf16.
    /// # Safety
    /// See the trait.
    unsafe fn load_bf16(source: *const u16) -> Self;
    /// Reads 16 floats of 8 bits, e4m3 as in [`math::fp8_to_f32`].
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn load_fp8(source: *const u8) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads, and has the instruction set.
        unsafe {
            let values = source.cast::<[u8; 16]>().read_unaligned().map(math::fp8_to_f32);
            Self::load(values.as_ptr())
        }
    }
    /// Reads 16 integers in two parts and returns `256 * upper + lower - less`, rounded once.
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn load_parts(upper: *const i32, lower: *const i32, less: i32) -> Self {
        // SAFETY: the caller passes pointers valid for 16 reads, and has the instruction set.
        unsafe {
            let upper = upper.cast::<[i32; 16]>().read_unaligned();
            let mut sums = lower.cast::<[i32; 16]>().read_unaligned();
            sums.iter_mut().zip(upper).for_each(|(sum, upper)| {
                *sum = sum.wrapping_add(upper << 8).wrapping_sub(less);
            });
            Self::load(sums.map(|sum| sum as f32).as_ptr())
        }
    }
    /// Reads 16 integers as [`Vector16::load_parts`] does, less `factor` times each of `others`.
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn load_parts_less(
        upper: *const i32,
        lower: *const i32,
        others: *const i32,
        factor: i32,
    ) -> Self {
        // SAFETY: the caller passes pointers valid for 16 reads, and has the instruction set.
        unsafe {
            let others = others.cast::<[i32; 16]>().read_unaligned();
            let mut sums = lower.cast::<[i32; 16]>().read_unaligned();
            sums.iter_mut().zip(others).for_each(|(sum, other)| {
                *sum = sum.wrapping_sub(other.wrapping_mul(factor));
            });
            Self::load_parts(upper, sums.as_ptr(), 0)
        }
    }
    /// Writes 16 f16, rounded to nearest even.
    /// # Safety
    /// See the trait.
    unsafe fn store_f16(self, target: *mut u16);
    /// Writes the upper halves of the 16 lanes, which for values read by `load_bf16` are the same
    /// bits.
    /// # Safety
    /// See the trait.
    unsafe fn store_high_halves(self, target: *mut u16);
    /// Transposes: lane c of row r becomes lane r of row c.
    /// # Safety
    /// See the trait.
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16];
    /// Writes 16 f32.
    /// # Safety
    /// See the trait.
    unsafe fn store(self, target: *mut f32);
    /// Returns `self * factor + addend`.
    /// # Safety
    /// See the trait.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Returns `self * factor`.
    /// # Safety
    /// See the trait.
    unsafe fn mul(self, factor: Self) -> Self;
    /// Returns `self + other`.
    /// # Safety
    /// See the trait.
    unsafe fn add(self, other: Self) -> Self;
    /// Returns `self - other`.
    /// # Safety
    /// See the trait.
    unsafe fn sub(self, other: Self) -> Self;
    /// Returns the larger of each pair; either one if one of them is NaN.
    /// # Safety
    /// See the trait.
    unsafe fn max(self, other: Self) -> Self;
    /// Returns the largest lane.
    /// # Safety
    /// See the trait.
    unsafe fn max_lane(self) -> f32;
    /// Returns `2^self` to 1e-7 relative for lanes of at most 0; 0 below -126. NaN stays NaN.
    /// # Safety
    /// See the trait.
    unsafe fn exp2_negative(self) -> Self;
    /// Rounds each lane to bf16, to nearest even; NaN stays NaN.
    /// # Safety
    /// See the trait.
    unsafe fn round_to_bf16(self) -> Self;
}

/// The baseline instruction set of the target.
#[derive(Clone, Copy)]
pub struct Portable;

/// The baseline of aarch64 has a fused multiply-add; that of x86-64 does not.
const FUSED_BASELINE: bool = cfg!(target_arch = "aarch64");

impl Simd for Portable {
    type Vector = [f32; 16];
    type Bf16 = super::tile::Bf16<[f32; 16]>;
    type Tiles = NoTiles;

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        if FUSED_BASELINE {
            a.mul_add(b, c)
        } else {
            a * b + c
        }
    }
}

/// [`Portable`] with tiles in plain Rust.
#[derive(Clone, Copy)]
pub struct Emulated;

impl Simd for Emulated {
    type Vector = [f32; 16];
    type Bf16 = super::tile::Bf16<[f32; 16]>;
    type Tiles = EmulatedTiles;

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        Portable::mul_add(a, b, c)
    }
}

// SAFETY: plain Rust, no instruction set needed; reads and writes 16 elements as the trait says.
unsafe impl Vector16 for [f32; 16] {
    // Four 128-bit registers each: of 32 on aarch64, of 16 on x86-64.
    const MAX_SUMS: usize = if cfg!(target_arch = "aarch64") { 6 } else { 2 };

    #[inline(never)]
    unsafe fn compiled_tile<E: Element<Vector = Self>, const ROWS: usize, const GROUPS: usize>(
        operands: &Operands<E>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe { tile::<E, ROWS, GROUPS>(operands) }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; 16]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        [value; 16]
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads.
        unsafe { source.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads.
        let bits = unsafe { source.cast::<[u16; 16]>().read_unaligned() };
        let mut values = [0.0; 16];
        for i in 0..16 {
            values[i] = math::f16_to_f32(bits[i]);
        }
        values
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads.
        let bits = unsafe { source.cast::<[u16; 16]>().read_unaligned() };
        bits.map(math::bf16_to_f32)
    }

    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        let mut bits = [0; 16];
        for i in 0..16 {
            bits[i] = math::f16_bits(self[i]);
        }
        // SAFETY: the caller passes a pointer valid for 16 writes.
        unsafe { target.cast::<[u16; 16]>().write_unaligned(bits) }
    }

    #[inline(always)]
    unsafe fn store_high_halves(self, target: *mut u16) {
        let mut bits = [0; 16];
        for i in 0..16 {
            bits[i] = (self[i].to_bits() >> 16) as u16;
        }
        // SAFETY: the caller passes a pointer valid for 16 writes.
        unsafe { target.cast::<[u16; 16]>().write_unaligned(bits) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
        let mut columns = rows;
        for r in 0..16 {
            for c in 0..16 {
                columns[c][r] = rows[r][c];
            }
        }
        columns
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u16) -> (Self, Self) {
        // SAFETY: the caller passes a pointer valid for 32 reads.
        let bits = unsafe { source.cast::<[[u16; 2]; 16]>().read_unaligned() };
        let (mut first, mut second) = ([0.0; 16], [0.0; 16]);
        for i in 0..16 {
            first[i] = f32::from_bits(u32::from(bits[i][0]) << 16);
            second[i] = f32::from_bits(u32::from(bits[i][1]) << 16);
        }
        (first, second)
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller passes a pointer valid for 16 writes.
        unsafe { target.cast::<Self>().write_unaligned(self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        let mut result = addend;
        for i in 0..16 {
            result[i] = Portable::mul_add(self[i], factor[i], addend[i]);
        }
        result
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        let mut result = self;
        for i in 0..16 {
            result[i] *= factor[i];
        }
        result
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        let mut result = self;
        for i in 0..16 {
            result[i] += other[i];
        }
        result
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        let mut result = self;
        for i in 0..16 {
            result[i] -= other[i];
        }
        result
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        let mut result = self;
        for i in 0..16 {
            result[i] = if self[i] > other[i] { self[i] } else { other[i] };
        }
        result
    }

    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let mut result = self[0];
        for value in self {
            result = if value > result { value } else { result };
        }
        result
    }

    #[inline(always)]
    unsafe fn exp2_negative(self) -> Self {
        let mut result = self;
        for value in &mut result {
            *value = math::exp2::<Portable>(*value);
        }
        result
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        let mut result = self;
        for value in &mut result {
            *value = math::round_to_bf16(*value);
        }
        result
    }
}
