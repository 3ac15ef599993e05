//! The one matrix kernel: a tile of up to six rows times up to 64 columns of a panel.
//!
//! A panel holds its columns side by side for each step of k, so that a step reads one contiguous
//! stretch; a panel of bf16 is made of tiles of 16 columns and 16 steps, as units that multiply tiles
//! take them ([`super::tiles`]). Accumulators stay in registers over all of k, and each output is summed
//! in the order of k for any number of rows: a row's result does not depend on its neighbours.

use super::math::round_to_bf16;
use super::simd::Vector16;
pub use super::simd::{Element, Operands, PairElement};
use super::streaming::Ahead;
use std::marker::PhantomData;

/// The most rows of a tile: 6 x 4 accumulators, 4 weight vectors and a broadcast fill 32 registers.
pub const MAX_ROWS: usize = 6;
/// The steps of k of a tile of a panel that lies in tiles.
pub const TILE_STEPS: usize = 16;

/// f32 weights.
pub struct F32<V>(PhantomData<V>);
/// f16 weights, f32 activations.
pub struct F16<V>(PhantomData<V>);
/// bf16 weights in row order, f32 activations.
pub struct Bf16Rows<V>(PhantomData<V>);
/// bf16 weights in pairs of k, activations rounded to bf16 and held as f32.
pub struct Bf16<V>(PhantomData<V>);

// SAFETY: reads 16 weights and one activation.
unsafe impl<V: Vector16> Element for F32<V> {
    type Activation = f32;
    type Weight = f32;
    type Vector = V;
    type Loaded = V;
    type Broadcast = V;
    const K_STEP: usize = 1;
    const IS_F32_MATH: bool = true;
    const ZERO_WEIGHT: f32 = 0.0;

    #[inline(always)]
    fn activation(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    unsafe fn store_activations(values: V, target: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { values.store(target) }
    }

    #[inline(always)]
    unsafe fn load(weights: *const f32) -> V {
        // SAFETY: passed on to the caller.
        unsafe { V::load(weights) }
    }

    #[inline(always)]
    unsafe fn broadcast(activations: *const f32) -> V {
        // SAFETY: passed on to the caller.
        unsafe { V::splat(*activations) }
    }

    #[inline(always)]
    unsafe fn widen(weights: *const f32, target: *mut f32, _stride: usize) {
        // SAFETY: passed on to the caller.
        unsafe { Self::load(weights).store(target) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sum: V, broadcast: V, weights: V) -> V {
        // SAFETY: passed on to the caller.
        unsafe { broadcast.mul_add(weights, sum) }
    }

    #[inline(always)]
    unsafe fn compiled_tile<const ROWS: usize, const GROUPS: usize>(operands: &Operands<Self>) {
        // SAFETY: passed on to the caller.
        unsafe { V::compiled_tile::<Self, ROWS, GROUPS>(operands) }
    }
}

/// 16-bit weights that are widened as they are read, with f32 activations.
macro_rules! widened {
    ($name:ident, $load:ident) => {
        // SAFETY: reads 16 weights and one activation.
        unsafe impl<V: Vector16> Element for $name<V> {
            type Activation = f32;
            type Weight = u16;
            type Vector = V;
            type Loaded = V;
            type Broadcast = V;
            const K_STEP: usize = 1;
            const IS_F32_MATH: bool = true;
            const ZERO_WEIGHT: u16 = 0;

            #[inline(always)]
            fn activation(x: f32) -> f32 {
                x
            }

            #[inline(always)]
            unsafe fn store_activations(values: V, target: *mut f32) {
                // SAFETY: passed on to the caller.
                unsafe { values.store(target) }
            }

            #[inline(always)]
            unsafe fn load(weights: *const u16) -> V {
                // SAFETY: passed on to the caller.
                unsafe { V::$load(weights) }
            }

            #[inline(always)]
            unsafe fn broadcast(activations: *const f32) -> V {
                // SAFETY: passed on to the caller.
                unsafe { V::splat(*activations) }
            }

            #[inline(always)]
            unsafe fn widen(weights: *const u16, target: *mut f32, _stride: usize) {
                // SAFETY: passed on to the caller.
                unsafe { Self::load(weights).store(target) }
            }

            #[inline(always)]
            unsafe fn multiply_add(sum: V, broadcast: V, weights: V) -> V {
                // SAFETY: passed on to the caller.
                unsafe { broadcast.mul_add(weights, sum) }
            }

            #[inline(always)]
            unsafe fn compiled_tile<const ROWS: usize, const GROUPS: usize>(
                operands: &Operands<Self>,
            ) {
                // SAFETY: passed on to the caller.
                unsafe { V::compiled_tile::<Self, ROWS, GROUPS>(operands) }
            }
        }
    };
}
widened!(F16, load_f16);
widened!(Bf16Rows, load_bf16);

// SAFETY: reads 32 weights and two activations.
unsafe impl<V: Vector16> Element for Bf16<V> {
    type Activation = f32;
    type Weight = u16;
    type Vector = V;
    type Loaded = (V, V);
    type Broadcast = (V, V);
    const K_STEP: usize = 2;
    const IS_F32_MATH: bool = true;
    const ZERO_WEIGHT: u16 = 0;

    #[inline(always)]
    fn activation(x: f32) -> f32 {
        round_to_bf16(x)
    }

    #[inline(always)]
    unsafe fn store_activations(values: V, target: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { values.round_to_bf16().store(target) }
    }

    #[inline(always)]
    unsafe fn load(weights: *const u16) -> (V, V) {
        // SAFETY: passed on to the caller.
        unsafe { V::load_bf16_pairs(weights) }
    }

    #[inline(always)]
    unsafe fn broadcast(activations: *const f32) -> (V, V) {
        // SAFETY: passed on to the caller.
        unsafe { (V::splat(*activations), V::splat(*activations.add(1))) }
    }

    #[inline(always)]
    unsafe fn widen(weights: *const u16, target: *mut f32, stride: usize) {
        // SAFETY: passed on to the caller.
        unsafe {
            let (first, second) = Self::load(weights);
            first.store(target);
            second.store(target.add(stride));
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(sum: V, broadcast: (V, V), weights: (V, V)) -> V {
        // SAFETY: passed on to the caller.
        unsafe { broadcast.1.mul_add(weights.1, broadcast.0.mul_add(weights.0, sum)) }
    }

    #[inline(always)]
    unsafe fn compiled_tile<const ROWS: usize, const GROUPS: usize>(operands: &Operands<Self>) {
        // SAFETY: passed on to the caller.
        unsafe { V::compiled_tile::<Self, ROWS, GROUPS>(operands) }
    }
}

// SAFETY: reads 16 codes for each vector and place, and writes 32 elements.
unsafe impl<V: Vector16> PairElement for Bf16<V> {
    #[inline(always)]
    unsafe fn load_fp8(first: *const u8, second: *const u8) -> [(V, V); 4] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut numbers = [(V::load_fp8(first), V::load_fp8(second)); 4];
            for (vector, numbers) in numbers.iter_mut().enumerate().skip(1) {
                let column = 16 * vector;
                *numbers = (V::load_fp8(first.add(column)), V::load_fp8(second.add(column)));
            }
            numbers
        }
    }

    #[inline(always)]
    unsafe fn store_pairs((first, second): (V, V), target: *mut u16) {
        let mut halves = [[0_u16; 16]; 2];
        // SAFETY: passed on to the caller.
        unsafe {
            first.store_high_halves(halves[0].as_mut_ptr());
            second.store_high_halves(halves[1].as_mut_ptr());
            let pairs: [[u16; 2]; 16] = std::array::from_fn(|i| [halves[0][i], halves[1][i]]);
            target.cast::<[[u16; 2]; 16]>().write_unaligned(pairs);
        }
    }
}

/// Computes a tile of `ROWS` rows by `GROUPS` groups of 16 columns.
///
/// # Safety
/// `E`'s instruction set is available and the pointers of `operands` cover what its fields say.
#[inline(always)]
pub unsafe fn tile<E: Element, const ROWS: usize, const GROUPS: usize>(operands: &Operands<E>) {
    // The loops have nothing in common but their steps: sums of six rows stay in their registers in a loop
    // of its own, but not in the inner one of two.
    // SAFETY: passed on to the caller.
    unsafe {
        if E::K_STEP > 1 && operands.in_tiles {
            in_tiles::<E, ROWS, GROUPS>(operands);
        } else {
            in_rows::<E, ROWS, GROUPS>(operands);
        }
    }
}

/// Does so where the steps of `b` lie one after another.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn in_rows<E: Element, const ROWS: usize, const GROUPS: usize>(operands: &Operands<E>) {
    let Operands { num_steps, b, b_stride, ahead, .. } = *operands;
    // SAFETY: step s < num_steps and group g < GROUPS stay inside the extents that the caller vouches for.
    unsafe {
        let mut sums = start::<E, ROWS, GROUPS>(operands);
        let a_rows = rows_of::<E, ROWS>(operands);
        let mut b_step = b;
        for step in 0..num_steps {
            if ahead.bytes > 0 {
                for line in 0..step_bytes::<E, GROUPS>().div_ceil(64) {
                    ahead.prefetch(b_step.cast::<u8>().wrapping_add(64 * line));
                }
            }
            add_step::<E, ROWS, GROUPS>(&mut sums, &a_rows, step, b_step, 16 * E::K_STEP);
            b_step = b_step.wrapping_add(b_stride);
        }
        finish(operands, &sums);
    }
}

/// Does so where `b` lies in tiles.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn in_tiles<E: Element, const ROWS: usize, const GROUPS: usize>(operands: &Operands<E>) {
    let Operands { num_steps, b, b_stride, ahead, .. } = *operands;
    let (step_stride, group_stride) = (16 * E::K_STEP, TILE_STEPS * 16 * E::K_STEP);
    // SAFETY: as in `in_rows`.
    unsafe {
        let mut sums = start::<E, ROWS, GROUPS>(operands);
        let a_rows = rows_of::<E, ROWS>(operands);
        let mut b_run = b;
        for first in (0..num_steps).step_by(TILE_STEPS) {
            // The lines of 16 steps are prefetched in their order, which is not that of the reads.
            let mut lines = b_run.cast::<u8>();
            let mut b_step = b_run;
            for step in first..num_steps.min(first + TILE_STEPS) {
                if ahead.bytes > 0 {
                    for line in 0..step_bytes::<E, GROUPS>().div_ceil(64) {
                        ahead.prefetch(lines.wrapping_add(64 * line));
                    }
                    lines = lines.wrapping_add(step_bytes::<E, GROUPS>());
                }
                add_step::<E, ROWS, GROUPS>(&mut sums, &a_rows, step, b_step, group_stride);
                b_step = b_step.wrapping_add(step_stride);
            }
            b_run = b_run.wrapping_add(b_stride);
        }
        finish(operands, &sums);
    }
}

/// Returns the bytes of `b` in a step.
const fn step_bytes<E: Element, const GROUPS: usize>() -> usize {
    GROUPS * 16 * E::K_STEP * size_of::<E::Weight>()
}

/// Returns where each row of `a` begins: with one offset for all, the compiler adds up no addresses in the
/// loop.
#[inline(always)]
fn rows_of<E: Element, const ROWS: usize>(operands: &Operands<E>) -> [*const E::Activation; ROWS] {
    std::array::from_fn(|row| operands.a.wrapping_add(row * operands.a_stride))
}

/// Returns the sums to begin with.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
// The indices have constant extents, which the compiler unrolls into registers.
#[allow(clippy::needless_range_loop)]
unsafe fn start<E: Element, const ROWS: usize, const GROUPS: usize>(
    operands: &Operands<E>,
) -> [[E::Vector; GROUPS]; ROWS] {
    // SAFETY: `out` has ROWS rows of GROUPS groups.
    unsafe {
        let mut sums = [[E::Vector::zero(); GROUPS]; ROWS];
        if operands.accumulate {
            for r in 0..ROWS {
                for g in 0..GROUPS {
                    let from = operands.out.add(r * operands.out_stride + 16 * g);
                    sums[r][g] = E::Vector::load(from);
                }
            }
        }
        sums
    }
}

/// Stores the sums.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn finish<E: Element, const ROWS: usize, const GROUPS: usize>(
    operands: &Operands<E>,
    sums: &[[E::Vector; GROUPS]; ROWS],
) {
    for (r, sums) in sums.iter().enumerate() {
        for (g, sum) in sums.iter().enumerate() {
            // SAFETY: `out` has ROWS rows of GROUPS groups.
            unsafe { sum.store(operands.out.add(r * operands.out_stride + 16 * g)) };
        }
    }
}

/// Adds the products of one step; the groups of `b` are `group_stride` elements apart.
///
/// # Safety
/// The step lies inside `a_rows` and `b`, and `E`'s instruction set is available.
#[inline(always)]
// The indices have constant extents, which the compiler unrolls into registers.
#[allow(clippy::needless_range_loop)]
unsafe fn add_step<E: Element, const ROWS: usize, const GROUPS: usize>(
    sums: &mut [[E::Vector; GROUPS]; ROWS],
    a_rows: &[*const E::Activation; ROWS],
    step: usize,
    b: *const E::Weight,
    group_stride: usize,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut weights = [E::load(b); GROUPS];
        for g in 1..GROUPS {
            weights[g] = E::load(b.add(group_stride * g));
        }
        for r in 0..ROWS {
            let activation = E::broadcast(a_rows[r].add(step * E::K_STEP));
            for g in 0..GROUPS {
                sums[r][g] = E::multiply_add(sums[r][g], activation, weights[g]);
            }
        }
    }
}

/// Prefetches the line of an address, which may be any, into the second-level cache: four percent faster
/// than into the first, whose few fill buffers the loads need (Emerald Rapids, 16.0 against 15.5 GB/s).
#[inline(always)]
pub fn prefetch(address: *const u8) {
    Ahead::far(0).prefetch(address);
}

/// Computes a tile of `rows` (1 to [`MAX_ROWS`]) by `16 * GROUPS` columns, where GROUPS is 1, 2 or
/// 4.
///
/// # Safety
/// As [`Operands`] says; `E`'s instruction set is available.
#[inline(always)]
pub unsafe fn tile_rows<E: Element, const GROUPS: usize>(rows: usize, operands: &Operands<E>) {
    // SAFETY: passed on to the caller.
    unsafe {
        match rows {
            1 => fitting::<E, 1, GROUPS>(operands),
            2 => fitting::<E, 2, GROUPS>(operands),
            3 => fitting::<E, 3, GROUPS>(operands),
            4 => fitting::<E, 4, GROUPS>(operands),
            5 => fitting::<E, 5, GROUPS>(operands),
            _ => fitting::<E, 6, GROUPS>(operands),
        }
    }
}

/// Cuts a tile into parts whose sums fit into the registers. The order of each sum is unchanged.
///
/// # Safety
/// As for [`tile_rows`].
#[inline(always)]
unsafe fn fitting<E: Element, const ROWS: usize, const GROUPS: usize>(operands: &Operands<E>) {
    let max = E::Vector::MAX_SUMS;
    let group_stride = if operands.in_tiles { TILE_STEPS * 16 } else { 16 } * E::K_STEP;
    let columns = |first_group: usize| Operands::<E> {
        b: operands.b.wrapping_add(group_stride * first_group),
        out: operands.out.wrapping_add(16 * first_group),
        ..*operands
    };
    // SAFETY: the parts lie inside the tile.
    unsafe {
        if ROWS * GROUPS <= max {
            E::compiled_tile::<ROWS, GROUPS>(operands);
        } else if GROUPS == 4 && 2 * ROWS <= max {
            E::compiled_tile::<ROWS, 2>(operands);
            E::compiled_tile::<ROWS, 2>(&columns(2));
        } else if ROWS <= max {
            for group in 0..GROUPS {
                E::compiled_tile::<ROWS, 1>(&columns(group));
            }
        } else {
            for group in 0..GROUPS {
                for row in 0..ROWS {
                    let mut part = columns(group);
                    part.a = part.a.wrapping_add(row * part.a_stride);
                    part.out = part.out.wrapping_add(row * part.out_stride);
                    E::compiled_tile::<1, 1>(&part);
                }
            }
        }
    }
}
