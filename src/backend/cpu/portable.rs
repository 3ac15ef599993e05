//! The baseline instruction set of the target, in plain Rust.

use super::exponential::exp2;
use super::math::{bf16_to_f32, f16_bits, f16_to_f32, round_to_bf16};
use super::simd::{Bf16Simd, Element, Kernel, Operands, Simd, TileSimd, Vector16};
use super::tile::{tile, Bf16};
use super::tiles::EmulatedTiles;

/// The baseline instruction set of the target.
#[derive(Clone, Copy)]
pub struct Portable;

/// The baseline of aarch64 has a fused multiply-add; that of x86-64 does not.
const FUSED_BASELINE: bool = cfg!(target_arch = "aarch64");

impl Simd for Portable {
    type Vector = [f32; 16];

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        if FUSED_BASELINE {
            a.mul_add(b, c)
        } else {
            a * b + c
        }
    }

    #[inline(never)]
    unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}

impl Bf16Simd for Portable {
    type Bf16 = Bf16<[f32; 16]>;
}

/// [`Portable`] with tiles in plain Rust.
#[derive(Clone, Copy)]
pub struct Emulated;

impl Simd for Emulated {
    type Vector = [f32; 16];

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        Portable::mul_add(a, b, c)
    }

    unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: it needs no instruction set.
        unsafe { Portable::run(kernel) }
    }
}

impl TileSimd for Emulated {
    type Tiles = EmulatedTiles;
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
            values[i] = f16_to_f32(bits[i]);
        }
        values
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller passes a pointer valid for 16 reads.
        let bits = unsafe { source.cast::<[u16; 16]>().read_unaligned() };
        bits.map(bf16_to_f32)
    }

    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        let mut bits = [0; 16];
        for i in 0..16 {
            bits[i] = f16_bits(self[i]);
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
            *value = exp2::<Portable>(*value);
        }
        result
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        let mut result = self;
        for value in &mut result {
            *value = round_to_bf16(*value);
        }
        result
    }
}
