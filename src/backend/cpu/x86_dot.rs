//! [`Dots`] of the x86-64 instruction sets.
//!
//! Without a product of bytes (VNNI), the codes of the even and of the odd inputs of a unit become
//! integers of 16 bits. With it, activations are taken as their upper and their lower bytes, both
//! signed, whose sums are put together at the end.

use super::dot::{DotKernel, Dots, UNIT};
use super::x86::{Avx2, Avx512};
use std::arch::x86_64::*;

/// # Safety
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run_avx2<K: DotKernel>(kernel: K) {
    kernel.run::<Avx2, Pairs256>();
}

/// # Safety
/// The machine has AVX-VNNI, and what [`run_avx2`] needs.
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
pub unsafe fn run_avx2_vnni<K: DotKernel>(kernel: K) {
    kernel.run::<Avx2, Bytes256>();
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL, and what [`run_avx2`] needs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn run_avx512<K: DotKernel>(kernel: K) {
    kernel.run::<Avx512, Pairs512>();
}

/// # Safety
/// The machine has AVX-512 VNNI, and what [`run_avx512`] needs.
#[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn run_avx512_vnni<K: DotKernel>(kernel: K) {
    kernel.run::<Avx512, Bytes512>();
}

/// The even activations of a unit below the odd ones, as integers of 16 bits.
#[inline(always)]
fn pairs(a: [i16; UNIT]) -> u64 {
    [a[3], a[1], a[2], a[0]].iter().fold(0, |unit, &a| unit << 16 | u64::from(a as u16))
}

/// The upper bytes of the activations of a unit below their lower ones; an upper byte is what is left
/// when the lower one is a signed number.
#[inline(always)]
fn bytes(a: [i16; UNIT]) -> u64 {
    let (mut upper, mut lower) = (0, 0);
    for (i, a) in a.into_iter().enumerate() {
        let low = a as i8;
        let high = (i32::from(a) - i32::from(low)) >> 8;
        upper |= u32::from(high as u8) << (8 * i);
        lower |= u32::from(low as u8) << (8 * i);
    }
    u64::from(lower) << 32 | u64::from(upper)
}

/// Sums of [`pairs`] in AVX2.
#[derive(Clone, Copy)]
pub struct Pairs256([__m256i; 2]);

/// Sums of [`pairs`] in AVX-512.
#[derive(Clone, Copy)]
pub struct Pairs512(__m512i);

/// Sums of [`bytes`] in AVX-VNNI: the upper ones, then the lower ones.
#[derive(Clone, Copy)]
pub struct Bytes256([[__m256i; 2]; 2]);

/// Sums of [`bytes`] in AVX-512 VNNI: the upper ones, then the lower ones.
#[derive(Clone, Copy)]
pub struct Bytes512([__m512i; 2]);

/// # Safety
/// The machine has AVX2, and `source` is readable for 64 bytes.
#[inline(always)]
unsafe fn load_256(source: *const u8) -> [__m256i; 2] {
    // SAFETY: passed on to the caller.
    unsafe { [_mm256_loadu_si256(source.cast()), _mm256_loadu_si256(source.add(32).cast())] }
}

/// The two halves of a unit, each in all lanes.
///
/// # Safety
/// The machine has AVX2, and `unit` is readable.
#[inline(always)]
unsafe fn halves_256(unit: *const u64) -> [__m256i; 2] {
    let unit = unit.cast::<u8>();
    // SAFETY: passed on to the caller.
    unsafe {
        [
            _mm256_broadcastd_epi32(_mm_loadu_si32(unit)),
            _mm256_broadcastd_epi32(_mm_loadu_si32(unit.add(4))),
        ]
    }
}

/// The two halves of a unit, each in all lanes.
///
/// # Safety
/// The machine has AVX-512 F, and `unit` is readable.
#[inline(always)]
unsafe fn halves_512(unit: *const u64) -> [__m512i; 2] {
    let unit = unit.cast::<u8>();
    // SAFETY: passed on to the caller.
    unsafe {
        [
            _mm512_broadcastd_epi32(_mm_loadu_si32(unit)),
            _mm512_broadcastd_epi32(_mm_loadu_si32(unit.add(4))),
        ]
    }
}

/// Subtracts products with zeros, and converts.
///
/// # Safety
/// The machine has AVX2, and `zeros` is readable for 16 bytes.
#[inline(always)]
unsafe fn finish_256(sums: [__m256i; 2], zeros: *const u8, total: i32) -> [__m256; 2] {
    // SAFETY: passed on to the caller.
    unsafe {
        let zeros = _mm_loadu_si128(zeros.cast());
        let zeros = [_mm256_cvtepu8_epi32(zeros), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(zeros))];
        let total = _mm256_set1_epi32(total);
        let less = |sum, zeros| _mm256_sub_epi32(sum, _mm256_mullo_epi32(zeros, total));
        [less(sums[0], zeros[0]), less(sums[1], zeros[1])].map(|sum| _mm256_cvtepi32_ps(sum))
    }
}

/// Subtracts products with zeros, and converts.
///
/// # Safety
/// The machine has AVX-512 F, and `zeros` is readable for 16 bytes.
#[inline(always)]
unsafe fn finish_512(sums: __m512i, zeros: *const u8, total: i32) -> __m512 {
    // SAFETY: passed on to the caller.
    unsafe {
        let zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros.cast()));
        let less = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(total));
        _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, less))
    }
}

// SAFETY: each method reads what the trait says, unaligned.
unsafe impl Dots for Pairs256 {
    type Vector = [__m256; 2];
    /// Those of the even inputs, then those of the odd ones.
    type Codes = [[__m256i; 2]; 2];
    const PAIRS: usize = 2;
    const MAX_ROWS: usize = 1;

    #[inline(always)]
    fn unit(activations: [i16; UNIT]) -> u64 {
        pairs(activations)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { Pairs256([_mm256_setzero_si256(); 2]) }
    }

    #[inline(always)]
    unsafe fn load(source: *const u8) -> Self::Codes {
        // SAFETY: the caller has AVX2 and 64 readable bytes.
        unsafe {
            let codes = load_256(source);
            let low = _mm256_set1_epi16(0xff);
            [
                codes.map(|codes| _mm256_and_si256(codes, low)),
                codes.map(|codes| _mm256_srli_epi16::<8>(codes)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(source: *const u8) -> (Self::Codes, Self::Codes) {
        // SAFETY: the caller has AVX2 and 64 readable bytes.
        unsafe {
            let bytes = load_256(source);
            let low = _mm256_set1_epi16(15);
            let (mut first, mut second) = ([bytes; 2], [bytes; 2]);
            for i in 0..2 {
                first[0][i] = _mm256_and_si256(bytes[i], low);
                second[0][i] = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes[i]), low);
                first[1][i] = _mm256_and_si256(_mm256_srli_epi16::<8>(bytes[i]), low);
                second[1][i] = _mm256_srli_epi16::<12>(bytes[i]);
            }
            (first, second)
        }
    }

    #[inline(always)]
    unsafe fn add_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller has AVX2 and a readable unit.
        unsafe {
            let [even, odd] = halves_256(activations);
            let mut sums = self.0;
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(codes[0][i], even));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(codes[1][i], odd));
            }
            Pairs256(sums)
        }
    }

    #[inline(always)]
    unsafe fn finish(self, zeros: *const u8, total: i32) -> Self::Vector {
        // SAFETY: the caller has AVX2 and 16 readable bytes.
        unsafe { finish_256(self.0, zeros, total) }
    }
}

// SAFETY: as above.
unsafe impl Dots for Pairs512 {
    type Vector = __m512;
    /// Those of the even inputs, then those of the odd ones.
    type Codes = [__m512i; 2];
    const PAIRS: usize = 2;
    const MAX_ROWS: usize = 4;

    #[inline(always)]
    fn unit(activations: [i16; UNIT]) -> u64 {
        pairs(activations)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { Pairs512(_mm512_setzero_si512()) }
    }

    #[inline(always)]
    unsafe fn load(source: *const u8) -> Self::Codes {
        // SAFETY: the caller has AVX-512 BW and 64 readable bytes.
        unsafe {
            let codes = _mm512_loadu_si512(source.cast());
            [_mm512_and_si512(codes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(codes)]
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(source: *const u8) -> (Self::Codes, Self::Codes) {
        // SAFETY: the caller has AVX-512 BW and 64 readable bytes.
        unsafe {
            let bytes = _mm512_loadu_si512(source.cast());
            let low = _mm512_set1_epi16(15);
            let first = [
                _mm512_and_si512(bytes, low),
                _mm512_and_si512(_mm512_srli_epi16::<8>(bytes), low),
            ];
            let second = [
                _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
                _mm512_srli_epi16::<12>(bytes),
            ];
            (first, second)
        }
    }

    #[inline(always)]
    unsafe fn add_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller has AVX-512 BW and a readable unit.
        unsafe {
            let [even, odd] = halves_512(activations);
            let sum = _mm512_add_epi32(self.0, _mm512_madd_epi16(codes[0], even));
            Pairs512(_mm512_add_epi32(sum, _mm512_madd_epi16(codes[1], odd)))
        }
    }

    #[inline(always)]
    unsafe fn finish(self, zeros: *const u8, total: i32) -> __m512 {
        // SAFETY: the caller has AVX-512 F and 16 readable bytes.
        unsafe { finish_512(self.0, zeros, total) }
    }
}

// SAFETY: as above.
unsafe impl Dots for Bytes256 {
    type Vector = [__m256; 2];
    type Codes = [__m256i; 2];
    const PAIRS: usize = 1;
    const MAX_ROWS: usize = 1;

    #[inline(always)]
    fn unit(activations: [i16; UNIT]) -> u64 {
        bytes(activations)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { Bytes256([[_mm256_setzero_si256(); 2]; 2]) }
    }

    #[inline(always)]
    unsafe fn load(source: *const u8) -> Self::Codes {
        // SAFETY: the caller has AVX2 and 64 readable bytes.
        unsafe { load_256(source) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(source: *const u8) -> (Self::Codes, Self::Codes) {
        // SAFETY: the caller has AVX2 and 64 readable bytes.
        unsafe {
            let bytes = load_256(source);
            let low = _mm256_set1_epi8(15);
            (
                bytes.map(|bytes| _mm256_and_si256(bytes, low)),
                bytes.map(|bytes| _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low)),
            )
        }
    }

    #[inline(always)]
    unsafe fn add_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller has AVX-VNNI and a readable unit.
        unsafe {
            let halves = halves_256(activations);
            let mut sums = self.0;
            for (sums, half) in sums.iter_mut().zip(halves) {
                for (sum, codes) in sums.iter_mut().zip(codes) {
                    *sum = _mm256_dpbusd_avx_epi32(*sum, codes, half);
                }
            }
            Bytes256(sums)
        }
    }

    #[inline(always)]
    unsafe fn add_byte_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller has AVX-VNNI and a readable unit.
        unsafe {
            let [_, lower] = halves_256(activations);
            let mut sums = self.0;
            for (sum, codes) in sums[1].iter_mut().zip(codes) {
                *sum = _mm256_dpbusd_avx_epi32(*sum, codes, lower);
            }
            Bytes256(sums)
        }
    }

    #[inline(always)]
    unsafe fn finish(self, zeros: *const u8, total: i32) -> Self::Vector {
        // SAFETY: the caller has AVX2 and 16 readable bytes.
        unsafe {
            let [upper, lower] = self.0;
            let sum = |upper, lower| _mm256_add_epi32(_mm256_slli_epi32::<8>(upper), lower);
            finish_256([sum(upper[0], lower[0]), sum(upper[1], lower[1])], zeros, total)
        }
    }
}

// SAFETY: as above.
unsafe impl Dots for Bytes512 {
    type Vector = __m512;
    type Codes = __m512i;
    const PAIRS: usize = 2;
    const MAX_ROWS: usize = 3;
    const MAX_NIBBLE_ROWS: usize = 2;
    const MAX_BYTE_ROWS: usize = 4;

    #[inline(always)]
    fn unit(activations: [i16; UNIT]) -> u64 {
        bytes(activations)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX-512 F.
        unsafe { Bytes512([_mm512_setzero_si512(); 2]) }
    }

    #[inline(always)]
    unsafe fn load(source: *const u8) -> Self::Codes {
        // SAFETY: the caller has AVX-512 F and 64 readable bytes.
        unsafe { _mm512_loadu_si512(source.cast()) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(source: *const u8) -> (Self::Codes, Self::Codes) {
        // SAFETY: the caller has AVX-512 BW and 64 readable bytes.
        unsafe {
            let bytes = _mm512_loadu_si512(source.cast());
            let low = _mm512_set1_epi8(15);
            (_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low))
        }
    }

    #[inline(always)]
    unsafe fn add_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller has AVX-512 VNNI and a readable unit.
        unsafe {
            let [upper, lower] = halves_512(activations);
            Bytes512([
                _mm512_dpbusd_epi32(self.0[0], codes, upper),
                _mm512_dpbusd_epi32(self.0[1], codes, lower),
            ])
        }
    }

    #[inline(always)]
    unsafe fn add_byte_products(self, codes: Self::Codes, activations: *const u64) -> Self {
        // SAFETY: the caller has AVX-512 VNNI and a readable unit.
        unsafe {
            let [_, lower] = halves_512(activations);
            Bytes512([self.0[0], _mm512_dpbusd_epi32(self.0[1], codes, lower)])
        }
    }

    #[inline(always)]
    unsafe fn finish(self, zeros: *const u8, total: i32) -> __m512 {
        // SAFETY: the caller has AVX-512 F and 16 readable bytes.
        unsafe {
            let [upper, lower] = self.0;
            let sums = _mm512_add_epi32(_mm512_slli_epi32::<8>(upper), lower);
            finish_512(sums, zeros, total)
        }
    }
}
