//! bf16 by the instructions of AVX-512 BF16, and floats of 8 bits as such by those of VBMI.

use super::math::bf16_bits;
use super::simd::{Element, Operands, PairElement, Vector16};
use super::tile::{tile, Bf16};
use std::arch::x86_64::*;

/// [`Simd::store_bf16`](super::simd::Simd::store_bf16). Subnormal numbers become zeros, as which products of bf16 take them anyway.
///
/// # Safety
/// The machine has AVX-512 BF16, and `target` is writable for 32 elements.
#[inline(always)]
pub(super) unsafe fn store_bf16(low: __m512, high: __m512, target: *mut u16) {
    // SAFETY: passed on to the caller.
    unsafe {
        let both = _mm512_cvtne2ps_pbh(high, low);
        _mm512_storeu_si512(target.cast(), std::mem::transmute::<__m512bh, __m512i>(both));
    }
}

/// [`Simd::store_bf16_pairs`](super::simd::Simd::store_bf16_pairs), of subnormal numbers as [`store_bf16`] does.
///
/// # Safety
/// The machine has AVX-512 BF16 and BW, and `target` is writable for 32 elements.
#[inline(always)]
pub(super) unsafe fn store_bf16_pairs(first: __m512, second: __m512, target: *mut u16) {
    const PAIRS: [u16; 32] = {
        let mut places = [0; 32];
        let mut i = 0;
        while i < 32 {
            places[i] = (i / 2 + 16 * (i % 2)) as u16;
            i += 1;
        }
        places
    };
    // SAFETY: passed on to the caller.
    unsafe {
        let both = _mm512_cvtne2ps_pbh(second, first);
        let both = std::mem::transmute::<__m512bh, __m512i>(both);
        let places = _mm512_loadu_si512(PAIRS.as_ptr().cast());
        _mm512_storeu_si512(target.cast(), _mm512_permutexvar_epi16(places, both));
    }
}

/// # Safety
/// The machine has AVX-512 BF16, F, BW, DQ and VL, AVX2, FMA and F16C, and as [`Operands`] says.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline(never)]
unsafe fn tile_avx512_bf16<E: Element, const ROWS: usize, const GROUPS: usize>(
    operands: &Operands<E>,
) {
    // SAFETY: passed on to the caller.
    unsafe { tile::<E, ROWS, GROUPS>(operands) }
}

/// bf16 by the bf16 dot product: two products and two additions an instruction.
#[derive(Clone, Copy)]
pub struct Bf16Dot;

// SAFETY: `load` reads 32 weights, `broadcast` two activations.
unsafe impl Element for Bf16Dot {
    type Activation = u16;
    type Weight = u16;
    type Vector = __m512;
    type Loaded = __m512bh;
    type Broadcast = __m512bh;
    const K_STEP: usize = 2;
    const IS_F32_MATH: bool = false;
    const ZERO_WEIGHT: u16 = 0;

    #[inline(always)]
    fn activation(x: f32) -> u16 {
        bf16_bits(x)
    }

    #[inline(always)]
    unsafe fn store_activations(values: __m512, target: *mut u16) {
        // SAFETY: the caller has AVX-512 F and 16 writable elements.
        unsafe {
            let bits = _mm512_castps_si512(values.round_to_bf16());
            let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
            _mm256_storeu_si256(target.cast(), halves);
        }
    }

    #[inline(always)]
    unsafe fn load(weights: *const u16) -> __m512bh {
        // SAFETY: the caller has AVX-512 F and 32 readable elements.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(weights.cast())) }
    }

    #[inline(always)]
    unsafe fn broadcast(activations: *const u16) -> __m512bh {
        // SAFETY: the caller has AVX-512 F and two readable elements.
        unsafe {
            let pair = activations.cast::<i32>().read_unaligned();
            std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair))
        }
    }

    #[inline(always)]
    unsafe fn widen(weights: *const u16, target: *mut f32, stride: usize) {
        // SAFETY: passed on to the caller.
        unsafe { Bf16::<__m512>::widen(weights, target, stride) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sum: __m512, broadcast: __m512bh, weights: __m512bh) -> __m512 {
        // SAFETY: the caller has AVX-512 BF16.
        unsafe { _mm512_dpbf16_ps(sum, broadcast, weights) }
    }
    #[inline(always)]
    unsafe fn compiled_tile<const ROWS: usize, const GROUPS: usize>(operands: &Operands<Self>) {
        // SAFETY: passed on to the caller.
        unsafe { tile_avx512_bf16::<Self, ROWS, GROUPS>(operands) }
    }
}

/// The upper and the lower bytes of the bf16 numbers that codes of e4m3 without a sign stand for.
struct Fp8Tables {
    upper: [u8; 128],
    lower: [u8; 128],
}

static FP8_TABLES: Fp8Tables = {
    let mut tables = Fp8Tables { upper: [0; 128], lower: [0; 128] };
    let mut code = 1;
    while code < 128 {
        let (exponent, mantissa) = (code as u16 >> 3, code as u16 & 7);
        let bits = if code == 0x7f {
            0x7fc0
        } else if exponent > 0 {
            (exponent + 120) << 7 | mantissa << 4
        } else {
            // A number below the smallest normal one, mantissa / 2^9: its first bit becomes the implicit one.
            let first = mantissa.ilog2() as u16;
            (118 + first) << 7 | (mantissa << (7 - first) & 0x7f)
        };
        tables.upper[code] = (bits >> 8) as u8;
        tables.lower[code] = bits as u8;
        code += 1;
    }
    tables
};

// SAFETY: reads 64 bytes at each place, and writes 32 elements.
unsafe impl PairElement for Bf16Dot {
    #[inline(always)]
    unsafe fn load_fp8(first: *const u8, second: *const u8) -> [__m512bh; 4] {
        /// Four bytes `4 * j + i` come to place `4 * i + j`, from where the unpacking of halves brings them to
        /// place `i` of vector `j`.
        const FOURS: [i32; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
        // SAFETY: the caller has AVX-512 F, BW and VBMI, and 64 readable bytes at both places.
        unsafe {
            let fours = _mm512_loadu_si512(FOURS.as_ptr().cast());
            let (upper, lower) = (FP8_TABLES.upper.as_ptr(), FP8_TABLES.lower.as_ptr());
            let upper =
                [_mm512_loadu_si512(upper.cast()), _mm512_loadu_si512(upper.add(64).cast())];
            let lower =
                [_mm512_loadu_si512(lower.cast()), _mm512_loadu_si512(lower.add(64).cast())];
            let sign = _mm512_set1_epi8(0x80_u8 as i8);
            let mut words = [[fours; 2]; 2];
            for (words, place) in words.iter_mut().zip([first, second]) {
                let codes = _mm512_permutexvar_epi32(fours, _mm512_loadu_si512(place.cast()));
                let high = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
                // high | codes & sign
                let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, sign);
                let low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
                *words = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
            }
            let [first, second] = words;
            let pairs = [
                _mm512_unpacklo_epi16(first[0], second[0]),
                _mm512_unpackhi_epi16(first[0], second[0]),
                _mm512_unpacklo_epi16(first[1], second[1]),
                _mm512_unpackhi_epi16(first[1], second[1]),
            ];
            std::mem::transmute::<[__m512i; 4], [__m512bh; 4]>(pairs)
        }
    }

    #[inline(always)]
    unsafe fn store_pairs(weights: __m512bh, target: *mut u16) {
        // SAFETY: the caller has AVX-512 F and 32 writable elements.
        unsafe {
            let bits = std::mem::transmute::<__m512bh, __m512i>(weights);
            _mm512_storeu_si512(target.cast(), bits);
        }
    }
}
