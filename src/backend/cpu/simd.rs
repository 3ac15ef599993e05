//! One source of every kernel for every instruction set.
//!
//! A [`Kernel`] is a body generic over [`Simd`]; [`super::CpuBackend::run`] calls it from a
//! function compiled for the backend's instruction set. The body and all it calls must be
//! `#[inline(always)]`, or the compiler makes a slow baseline copy of it. What multiplies by bf16
//! weights is a [`Bf16Kernel`], what multiplies tiles a [`TileKernel`]: only they are compiled for the
//! instruction sets that have nothing but that of their own, as every copy takes its time and place.
//!
//! Elementwise bodies are plain loops over slices and are vectorised by the compiler; matrix tiles
//! ([`super::tile`]) use [`Vector16`], sixteen f32 columns, directly.

use super::math::fp8_to_f32;
use super::streaming::Ahead;
use super::tiles::TileUnit;
use crate::memory::Plain;

/// An instruction set, as types.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32 values.
    type Vector: Vector16;
    /// Returns `a * b + c`: fused where that is one instruction, else rounded twice.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
    /// Runs a kernel as a function of its own, compiled for the set: for a large part of other kernels, of
    /// which each would else have a copy for every place that it is called from.
    /// # Safety
    /// The instruction set is there.
    unsafe fn run<K: Kernel>(kernel: K) -> K::Output;
    /// Writes 32 values as bf16 for products, rounded to nearest even; NaN stays NaN.
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
    /// Writes 16 pairs of values as [`Simd::store_bf16`] does, the two of a pair beside each other.
    /// # Safety
    /// The instruction set is there, and `target` is writable for 32 elements.
    #[inline(always)]
    unsafe fn store_bf16_pairs(first: Self::Vector, second: Self::Vector, target: *mut u16) {
        let mut halves = [[0_u16; 16]; 2];
        // SAFETY: passed on to the caller.
        unsafe {
            first.round_to_bf16().store_high_halves(halves[0].as_mut_ptr());
            second.round_to_bf16().store_high_halves(halves[1].as_mut_ptr());
            let pairs: [[u16; 2]; 16] = std::array::from_fn(|i| [halves[0][i], halves[1][i]]);
            target.cast::<[[u16; 2]; 16]>().write_unaligned(pairs);
        }
    }
}

/// An instruction set that multiplies by bf16 weights in rows.
pub trait Bf16Simd: Simd {
    /// The element type by which a bf16 weight matrix is multiplied.
    type Bf16: PairElement<Vector = Self::Vector>;
}

/// An instruction set with a unit that multiplies tiles.
pub trait TileSimd: Simd {
    /// The unit that multiplies tiles of bf16.
    type Tiles: TileUnit;
}

/// A body to be compiled for each instruction set.
pub trait Kernel {
    /// The result of the body.
    type Output;
    /// Runs the body. Must be `#[inline(always)]`.
    fn run<S: Simd>(self) -> Self::Output;
}

/// A body to be compiled for each instruction set, with its products of bf16.
pub trait Bf16Kernel {
    /// Runs the body. Must be `#[inline(always)]`.
    fn run<S: Bf16Simd>(self);
}

/// A body to be compiled for each instruction set with tiles.
pub trait TileKernel {
    /// Runs the body. Must be `#[inline(always)]`.
    fn run<S: TileSimd>(self);
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
    /// Reads 16 floats of 8 bits, e4m3 as in [`fp8_to_f32`].
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn load_fp8(source: *const u8) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads, and has the instruction set.
        unsafe {
            let values = source.cast::<[u8; 16]>().read_unaligned().map(fp8_to_f32);
            Self::load(values.as_ptr())
        }
    }
    /// Reads 16 integers, and rounds them.
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn load_integers(source: *const i32) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads, and has the instruction set.
        unsafe {
            let integers = source.cast::<[i32; 16]>().read_unaligned();
            Self::load(integers.map(|integer| integer as f32).as_ptr())
        }
    }
    /// Reads 16 words, and returns the integers that their bits from `SHIFT` on are, as far as `MASK` has them:
    /// at most 24.
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn load_bits<const SHIFT: u32, const MASK: u32>(source: *const u32) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads, and has the instruction set.
        unsafe {
            let words = source.cast::<[u32; 16]>().read_unaligned();
            Self::load(words.map(|word| (word >> SHIFT & MASK) as f32).as_ptr())
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
    /// Writes 16 f32 past the caches, where the processor can: for what is read again only when the
    /// caches have held much else. Other threads see it after the task of the backend's threads that
    /// wrote it, and must not look for it earlier.
    /// # Safety
    /// See the trait; `target` is a multiple of 64.
    #[inline(always)]
    unsafe fn stream(self, target: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { self.store(target) }
    }
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

/// An element type, and how it is multiplied.
///
/// # Safety
/// Every method needs the instruction set of `Vector`. `load` reads `16 * K_STEP` weights,
/// `broadcast` reads `K_STEP` activations; nothing else is read.
pub unsafe trait Element {
    /// The type that activations must be converted to.
    type Activation: Plain;
    /// The type of the weights in the panel.
    type Weight: Plain;
    /// Sixteen sums.
    type Vector: Vector16;
    /// The weights of sixteen columns for one step.
    type Loaded: Copy;
    /// The activations of one row for one step, in all lanes.
    type Broadcast: Copy;
    /// The number of values of k in one step; for each column they are adjacent.
    const K_STEP: usize;
    /// Whether the products are f32 multiply-adds one k after the other, so that weights widened to
    /// f32 beforehand give the same bits.
    const IS_F32_MATH: bool;

    /// A weight of zero.
    const ZERO_WEIGHT: Self::Weight;

    /// Converts an activation to the form in which this element multiplies it.
    fn activation(x: f32) -> Self::Activation;
    /// Converts and stores sixteen activations.
    /// # Safety
    /// See the trait; `target` is writable for 16 activations.
    unsafe fn store_activations(values: Self::Vector, target: *mut Self::Activation);
    /// # Safety
    /// See the trait.
    unsafe fn load(weights: *const Self::Weight) -> Self::Loaded;
    /// # Safety
    /// See the trait.
    unsafe fn broadcast(activations: *const Self::Activation) -> Self::Broadcast;
    /// Writes the weights of sixteen columns for one step as f32: k after k, `stride` apart. Only
    /// for elements with `IS_F32_MATH`.
    /// # Safety
    /// `target` is writable for 16 elements at each of `K_STEP` multiples of `stride`.
    unsafe fn widen(weights: *const Self::Weight, target: *mut f32, stride: usize);
    /// # Safety
    /// See the trait.
    unsafe fn multiply_add(
        sum: Self::Vector,
        broadcast: Self::Broadcast,
        weights: Self::Loaded,
    ) -> Self::Vector;
    /// [`super::tile::tile`], as a function of its own compiled for the instruction set.
    /// # Safety
    /// As [`Operands`] says.
    unsafe fn compiled_tile<const ROWS: usize, const GROUPS: usize>(operands: &Operands<Self>)
    where
        Self: Sized;
}

/// An element of bf16 weights in pairs of k.
///
/// # Safety
/// As for [`Element`]; `load_fp8` reads 64 bytes at each of its places, `store_pairs` writes 32 elements.
pub unsafe trait PairElement: Element<Weight = u16> {
    /// Returns the numbers of codes of e4m3, as in [`fp8_to_f32`], of 64 columns for a value of k and for the
    /// next one: bf16 holds them exactly.
    /// # Safety
    /// See the trait.
    unsafe fn load_fp8(first: *const u8, second: *const u8) -> [Self::Loaded; 4];
    /// Writes weights of sixteen columns as [`Element::load`] reads them.
    /// # Safety
    /// See the trait.
    unsafe fn store_pairs(weights: Self::Loaded, target: *mut u16);
}

/// The operands of a tile, for `E`: `sums[r][c] = initial + sum over k of a[r][k] * b[k][c]`.
pub struct Operands<E: Element> {
    /// [rows, num_steps * K_STEP], rows `a_stride` elements apart.
    pub a: *const E::Activation,
    /// Elements from row to row of `a`.
    pub a_stride: usize,
    /// Steps of k.
    pub num_steps: usize,
    /// [num_steps, 16 * groups, K_STEP], steps `b_stride` elements apart; `in_tiles`
    /// [num_steps / 16, groups, 16 steps, 16, K_STEP], the steps of a group without gaps and each 16
    /// steps `b_stride` elements apart.
    pub b: *const E::Weight,
    /// Elements from step to step of `b`, or from 16 steps to the next.
    pub b_stride: usize,
    /// Whether `b` lies in tiles of 16 steps by 16 columns.
    pub in_tiles: bool,
    /// How far `b` is prefetched.
    pub ahead: Ahead,
    /// [rows, 16 * groups] f32, rows `out_stride` elements apart.
    pub out: *mut f32,
    /// Elements from row to row of `out`.
    pub out_stride: usize,
    /// Whether to start from the sums that `out` holds, rather than from zero.
    pub accumulate: bool,
}

impl<E: Element> Clone for Operands<E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E: Element> Copy for Operands<E> {}
