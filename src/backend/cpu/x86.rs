//! The x86-64 instruction sets of [`super::simd`].

use super::amx::Amx;
use super::exponential::{EXP2_FRACTION_TERMS, EXP2_TERMS};
use super::simd::{Bf16Kernel, Bf16Simd, Kernel, Simd, TileKernel, TileSimd, Vector16};
use super::tile::{tile, Bf16, Element, Operands};
use super::x86_bf16::{store_bf16, store_bf16_pairs, Bf16Dot};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2;

/// AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub struct Avx512;

/// [`Avx512`] with bf16 dot products, and VBMI.
#[derive(Clone, Copy)]
pub struct Avx512Bf16;

/// [`Avx512`] with the bf16 tiles of AMX.
#[derive(Clone, Copy)]
pub struct Avx512Amx;

/// # Safety
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL, and what [`run_avx2`] needs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// # Safety
/// The machine has AVX-512 BF16 and VBMI, and what [`run_avx512`] needs.
#[target_feature(enable = "avx512vbmi,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512Bf16>()
}

/// # Safety
/// [`super::amx::is_available`], and the machine has AVX-512 BF16 and what [`run_avx512`] needs.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512_amx<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512Amx>()
}

/// # Safety
/// As [`run_avx2`].
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run_products_avx2<K: Bf16Kernel>(kernel: K) {
    kernel.run::<Avx2>();
}

/// # Safety
/// As [`run_avx512`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn run_products_avx512<K: Bf16Kernel>(kernel: K) {
    kernel.run::<Avx512>();
}

/// # Safety
/// As [`run_avx512_bf16`].
#[target_feature(enable = "avx512vbmi,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn run_products_avx512_bf16<K: Bf16Kernel>(kernel: K) {
    kernel.run::<Avx512Bf16>();
}

/// # Safety
/// As [`run_avx512_amx`].
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn run_tiles_avx512_amx<K: TileKernel>(kernel: K) {
    kernel.run::<Avx512Amx>();
}

/// # Safety
/// As [`run_avx2`], and as [`Operands`] says.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn tile_avx2<E: Element, const ROWS: usize, const GROUPS: usize>(operands: &Operands<E>) {
    // SAFETY: passed on to the caller.
    unsafe { tile::<E, ROWS, GROUPS>(operands) }
}

/// # Safety
/// As [`run_avx512`], and as [`Operands`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline(never)]
unsafe fn tile_avx512<E: Element, const ROWS: usize, const GROUPS: usize>(operands: &Operands<E>) {
    // SAFETY: passed on to the caller.
    unsafe { tile::<E, ROWS, GROUPS>(operands) }
}

macro_rules! fused {
    ($isa:ty, $vector:ty, $run:ident) => {
        impl Simd for $isa {
            type Vector = $vector;

            #[inline(always)]
            fn mul_add(a: f32, b: f32, c: f32) -> f32 {
                a.mul_add(b, c)
            }

            #[inline(always)]
            unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
                // SAFETY: passed on to the caller.
                unsafe { $run(kernel) }
            }
        }
    };
}
fused!(Avx2, [__m256; 2], run_avx2);
fused!(Avx512, __m512, run_avx512);

/// An instruction set with the conversions of AVX-512 BF16.
macro_rules! with_bf16 {
    ($isa:ty, $run:ident) => {
        impl Simd for $isa {
            type Vector = __m512;

            #[inline(always)]
            fn mul_add(a: f32, b: f32, c: f32) -> f32 {
                a.mul_add(b, c)
            }

            #[inline(always)]
            unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
                // SAFETY: passed on to the caller.
                unsafe { $run(kernel) }
            }

            #[inline(always)]
            unsafe fn store_bf16(low: __m512, high: __m512, target: *mut u16) {
                // SAFETY: passed on to the caller.
                unsafe { store_bf16(low, high, target) }
            }

            #[inline(always)]
            unsafe fn store_bf16_pairs(first: __m512, second: __m512, target: *mut u16) {
                // SAFETY: passed on to the caller.
                unsafe { store_bf16_pairs(first, second, target) }
            }
        }
    };
}
with_bf16!(Avx512Bf16, run_avx512_bf16);
with_bf16!(Avx512Amx, run_avx512_amx);

impl Bf16Simd for Avx2 {
    type Bf16 = Bf16<[__m256; 2]>;
}

impl Bf16Simd for Avx512 {
    type Bf16 = Bf16<__m512>;
}

impl Bf16Simd for Avx512Bf16 {
    type Bf16 = Bf16Dot;
}

impl TileSimd for Avx512Amx {
    type Tiles = Amx;
}

/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn transpose_8x8(rows: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let mut pairs = rows;
        for r in (0..8).step_by(2) {
            pairs[r] = _mm256_unpacklo_ps(rows[r], rows[r + 1]);
            pairs[r + 1] = _mm256_unpackhi_ps(rows[r], rows[r + 1]);
        }
        // Half h of fours[4 g + j] is column 4 h + j of rows 4 g..4 g + 4.
        let mut fours = rows;
        for r in [0, 4] {
            for j in 0..2 {
                let (a, b) = (pairs[r + j], pairs[r + j + 2]);
                fours[r + 2 * j] = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
                fours[r + 2 * j + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, b);
            }
        }
        let mut columns = rows;
        for j in 0..4 {
            columns[j] = _mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]);
            columns[4 + j] = _mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]);
        }
        columns
    }
}

// SAFETY: each method reads or writes exactly 16 elements (32 for the pairs), unaligned.
unsafe impl Vector16 for [__m256; 2] {
    const MAX_SUMS: usize = 6;

    #[inline(always)]
    unsafe fn compiled_tile<E: Element<Vector = Self>, const ROWS: usize, const GROUPS: usize>(
        operands: &Operands<E>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe { tile_avx2::<E, ROWS, GROUPS>(operands) }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller has AVX2 and 16 readable elements.
        unsafe { [_mm256_loadu_ps(source), _mm256_loadu_ps(source.add(8))] }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller has F16C and 16 readable elements.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(source.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(source.add(8).cast())),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u16) -> (Self, Self) {
        // SAFETY: the caller has AVX2 and 32 readable elements.
        unsafe {
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let low_half = _mm256_loadu_si256(source.cast());
            let high_half = _mm256_loadu_si256(source.add(16).cast());
            (
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low_half)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high_half)),
                ],
                [
                    _mm256_castsi256_ps(_mm256_and_si256(low_half, high)),
                    _mm256_castsi256_ps(_mm256_and_si256(high_half, high)),
                ],
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller has AVX2 and 16 readable elements.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_fp8(source: *const u8) -> Self {
        // SAFETY: the caller has AVX2 and 16 readable bytes.
        unsafe {
            let bytes = _mm_loadu_si128(source.cast());
            // The sign is extended to where f32 has it; 2^120 makes up for the difference of the two biases of
            // exponents.
            let kept = _mm256_set1_epi32(0x87f0_0000_u32 as i32);
            let factor = _mm256_castsi256_ps(_mm256_set1_epi32(247 << 23));
            [bytes, _mm_srli_si128::<8>(bytes)].map(|bytes| {
                let v = _mm256_slli_epi32::<20>(_mm256_cvtepi8_epi32(bytes));
                let bits = _mm256_and_si256(v, kept);
                _mm256_mul_ps(_mm256_castsi256_ps(bits), factor)
            })
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        // SAFETY: the caller has F16C and 16 writable elements.
        unsafe {
            _mm_storeu_si128(target.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self[0]));
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self[1]);
            _mm_storeu_si128(target.add(8).cast(), high);
        }
    }

    #[inline(always)]
    unsafe fn store_high_halves(self, target: *mut u16) {
        // SAFETY: the caller has AVX2 and 16 writable elements.
        unsafe {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(self[0]));
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(self[1]));
            // Packing works on each half of the registers, so the quarters are put in order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(target.cast(), packed);
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
        // SAFETY: the caller has AVX2.
        unsafe {
            let mut columns = rows;
            for half in 0..2 {
                for side in 0..2 {
                    let mut square = [rows[0][0]; 8];
                    for r in 0..8 {
                        square[r] = rows[8 * half + r][side];
                    }
                    let square = transpose_8x8(square);
                    for c in 0..8 {
                        columns[8 * side + c][half] = square[c];
                    }
                }
            }
            columns
        }
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller has AVX2 and 16 writable elements.
        unsafe {
            _mm256_storeu_ps(target, self[0]);
            _mm256_storeu_ps(target.add(8), self[1]);
        }
    }

    #[inline(always)]
    unsafe fn stream(self, target: *mut f32) {
        // SAFETY: the caller has AVX2 and 16 writable elements at a multiple of 64.
        unsafe {
            _mm256_stream_ps(target, self[0]);
            _mm256_stream_ps(target.add(8), self[1]);
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the caller has FMA.
        unsafe {
            [
                _mm256_fmadd_ps(self[0], factor[0], addend[0]),
                _mm256_fmadd_ps(self[1], factor[1], addend[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { [_mm256_mul_ps(self[0], factor[0]), _mm256_mul_ps(self[1], factor[1])] }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { [_mm256_add_ps(self[0], other[0]), _mm256_add_ps(self[1], other[1])] }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { [_mm256_sub_ps(self[0], other[0]), _mm256_sub_ps(self[1], other[1])] }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { [_mm256_max_ps(self[0], other[0]), _mm256_max_ps(self[1], other[1])] }
    }

    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: the caller has AVX2.
        unsafe {
            let eight = _mm256_max_ps(self[0], self[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn exp2_negative(self) -> Self {
        // SAFETY: the caller has AVX2 and FMA.
        unsafe {
            let lowest = _mm256_set1_ps(-126.0);
            let mut result = self;
            for x in &mut result {
                let in_range = _mm256_cmp_ps::<_CMP_NLT_UQ>(*x, lowest);
                // max returns its second operand when one is NaN.
                let clamped = _mm256_max_ps(lowest, *x);
                let whole =
                    _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(clamped);
                let f = _mm256_sub_ps(clamped, whole);
                let mut p = _mm256_set1_ps(EXP2_TERMS[0]);
                for term in &EXP2_TERMS[1..] {
                    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(*term));
                }
                // 2^whole, by its exponent bits.
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
                let scale = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
                *x = _mm256_and_ps(_mm256_mul_ps(p, scale), in_range);
            }
            result
        }
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe {
            let mut result = self;
            for x in &mut result {
                let bits = _mm256_castps_si256(*x);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                let rounded = _mm256_and_si256(_mm256_add_epi32(bits, bias), high);
                let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(*x, *x);
                *x = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), *x, is_nan);
            }
            result
        }
    }
}

// SAFETY: each method reads or writes exactly 16 elements (32 for the pairs), unaligned.
unsafe impl Vector16 for __m512 {
    const MAX_SUMS: usize = 24;

    #[inline(always)]
    unsafe fn compiled_tile<E: Element<Vector = Self>, const ROWS: usize, const GROUPS: usize>(
        operands: &Operands<E>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe { tile_avx512::<E, ROWS, GROUPS>(operands) }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable elements.
        unsafe { _mm512_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn load_integers(source: *const i32) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable elements.
        unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(source.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bits<const SHIFT: u32, const MASK: u32>(source: *const u32) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable elements.
        unsafe {
            let words = _mm512_loadu_si512(source.cast());
            let shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128(SHIFT as i32));
            if MASK == 15 {
                // The lowest four bits of a lane choose the number.
                const NUMBERS: [f32; 16] = [
                    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
                    15.0,
                ];
                return _mm512_permutexvar_ps(shifted, _mm512_loadu_ps(NUMBERS.as_ptr()));
            }
            let bits = _mm512_and_si512(shifted, _mm512_set1_epi32(MASK as i32));
            _mm512_cvtepi32_ps(bits)
        }
    }

    #[inline(always)]
    unsafe fn load_parts(upper: *const i32, lower: *const i32, less: i32) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable elements in both places.
        unsafe {
            let upper = _mm512_slli_epi32::<8>(_mm512_loadu_si512(upper.cast()));
            let sums = _mm512_add_epi32(upper, _mm512_loadu_si512(lower.cast()));
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(less)))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable elements.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u16) -> (Self, Self) {
        // SAFETY: the caller has AVX-512 F and 32 readable elements.
        unsafe {
            let pairs = _mm512_loadu_si512(source.cast());
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            (
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
                _mm512_castsi512_ps(_mm512_and_si512(pairs, high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable elements.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_fp8(source: *const u8) -> Self {
        // SAFETY: the caller has AVX-512 F and 16 readable bytes.
        unsafe {
            // The sign is extended to where f32 has it; 2^120 makes up for the difference of the two biases of
            // exponents.
            let kept = _mm512_set1_epi32(0x87f0_0000_u32 as i32);
            let v = _mm512_slli_epi32::<20>(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast())));
            let bits = _mm512_and_si512(v, kept);
            let factor = _mm512_castsi512_ps(_mm512_set1_epi32(247 << 23));
            _mm512_mul_ps(_mm512_castsi512_ps(bits), factor)
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        // SAFETY: the caller has AVX-512 F and 16 writable elements.
        unsafe {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self);
            _mm256_storeu_si256(target.cast(), halves);
        }
    }

    #[inline(always)]
    unsafe fn store_high_halves(self, target: *mut u16) {
        // SAFETY: the caller has AVX-512 F and 16 writable elements.
        unsafe {
            let high = _mm512_srli_epi32::<16>(_mm512_castps_si512(self));
            _mm256_storeu_si256(target.cast(), _mm512_cvtepi32_epi16(high));
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
        // SAFETY: the caller has AVX-512 F.
        unsafe {
            let mut pairs = rows;
            for r in (0..16).step_by(2) {
                pairs[r] = _mm512_unpacklo_ps(rows[r], rows[r + 1]);
                pairs[r + 1] = _mm512_unpackhi_ps(rows[r], rows[r + 1]);
            }
            let double = |v: __m512| _mm512_castps_pd(v);
            // Quarter q of fours[4 g + j] is column 4 q + j of rows 4 g..4 g + 4.
            let mut fours = rows;
            for r in (0..16).step_by(4) {
                for j in 0..2 {
                    let (a, b) = (double(pairs[r + j]), double(pairs[r + j + 2]));
                    fours[r + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    fours[r + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            let mut columns = rows;
            for j in 0..4 {
                let (a, b, c, d) = (fours[j], fours[4 + j], fours[8 + j], fours[12 + j]);
                let even_ab = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let even_cd = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
                let odd_ab = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let odd_cd = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
                columns[j] = _mm512_shuffle_f32x4::<0b10_00_10_00>(even_ab, even_cd);
                columns[4 + j] = _mm512_shuffle_f32x4::<0b10_00_10_00>(odd_ab, odd_cd);
                columns[8 + j] = _mm512_shuffle_f32x4::<0b11_01_11_01>(even_ab, even_cd);
                columns[12 + j] = _mm512_shuffle_f32x4::<0b11_01_11_01>(odd_ab, odd_cd);
            }
            columns
        }
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller has AVX-512 F and 16 writable elements.
        unsafe { _mm512_storeu_ps(target, self) }
    }

    #[inline(always)]
    unsafe fn stream(self, target: *mut f32) {
        // SAFETY: the caller has AVX-512 F and 16 writable elements at a multiple of 64.
        unsafe { _mm512_stream_ps(target, self) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_fmadd_ps(self, factor, addend) }
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_mul_ps(self, factor) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_sub_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_max_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: the caller has AVX-512 F.
        unsafe { _mm512_reduce_max_ps(self) }
    }

    #[inline(always)]
    unsafe fn exp2_negative(self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe {
            let lowest = _mm512_set1_ps(-126.0);
            let in_range = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self, lowest);
            // What is above the next whole number below, to which scalef rounds too.
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(self);
            let mut p = _mm512_set1_ps(EXP2_FRACTION_TERMS[0]);
            for term in &EXP2_FRACTION_TERMS[1..] {
                p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*term));
            }
            _mm512_maskz_scalef_ps(in_range, p, self)
        }
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe {
            let bits = _mm512_castps_si512(self);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let rounded = _mm512_and_si512(_mm512_add_epi32(bits, bias), high);
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self, self);
            _mm512_mask_mov_ps(_mm512_castsi512_ps(rounded), is_nan, self)
        }
    }
}
