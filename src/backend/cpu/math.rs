//! Exponentials, dtype conversions and fixed-order sums for the kernels, branch-free so that loops
//! over them are vectorised.

use super::simd::Simd;

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// 2^f on [-1/2, 1/2]: the Taylor series in f ln 2, highest power first. The first term left out is
/// below 6e-9.
pub const EXP2_TERMS: [f32; 8] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    2.402_265e-1,
    6.931_472e-1,
    1.0,
];

/// `2^x` to 1e-7 relative; 0 below -126, infinity from 127.5 on. NaN stays NaN.
#[inline(always)]
pub fn exp2<S: Simd>(x: f32) -> f32 {
    // Comparisons that are false for NaN, so that it goes through; f32::clamp would too, but
    // min/max would swallow it.
    let low = if x < -126.0 { -126.0 } else { x };
    let clamped = if low > 127.5 { 127.5 } else { low };
    let shifted = clamped + ROUND;
    let whole = shifted - ROUND;
    let f = clamped - whole;
    let mut p = EXP2_TERMS[0];
    for term in &EXP2_TERMS[1..] {
        p = S::mul_add(p, f, *term);
    }
    // The low bits of `shifted` are the integer; move it to the exponent.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let value = p * scale;
    let value = if x < -126.0 { 0.0 } else { value };
    if x >= 127.5 {
        f32::INFINITY
    } else {
        value
    }
}

/// `e^x`: relative error below 2e-7 on [-87, 88]; 0 below, infinity above. NaN stays NaN.
#[inline(always)]
pub fn exp<S: Simd>(x: f32) -> f32 {
    // ln 2 in two parts: the product of the first with a whole number below 2^8 is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let low = if x < -87.336 { -87.336 } else { x };
    let clamped = if low > 88.37 { 88.37 } else { low };
    let shifted = S::mul_add(clamped, std::f32::consts::LOG2_E, ROUND);
    let whole = shifted - ROUND;
    let r = S::mul_add(whole, -LN2_LOW, S::mul_add(whole, -LN2_HIGH, clamped));
    // Taylor to degree 7 on |r| <= 0.347: the next term is below 6e-9.
    let mut p = 1.984_127e-4;
    p = S::mul_add(p, r, 1.388_888_9e-3);
    p = S::mul_add(p, r, 8.333_333e-3);
    p = S::mul_add(p, r, 4.166_666_8e-2);
    p = S::mul_add(p, r, 1.666_666_7e-1);
    p = S::mul_add(p, r, 0.5);
    p = S::mul_add(p, r, 1.0);
    p = S::mul_add(p, r, 1.0);
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let value = p * scale;
    let value = if x < -87.336 { 0.0 } else { value };
    if x > 88.37 {
        f32::INFINITY
    } else {
        value
    }
}

/// f32 to bf16 bits, to nearest even; NaN stays a (quiet) NaN.
#[inline(always)]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

/// f32 rounded to bf16, as f32.
#[inline(always)]
pub fn round_to_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

/// bf16 bits to f32.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Lanes of the sums below: one 512-bit vector, the same on every instruction set.
const LANES: usize = 16;

/// Adds sixteen partial sums in a fixed tree.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of `term(x)` over a row, in lanes of sixteen and then a tree: the same order always.
#[inline(always)]
pub fn sum_over<S: Simd>(row: &[f32], term: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = term(lanes[i], chunk[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = term(*lane, x);
    }
    sum_lanes(lanes)
}

/// The largest element of a row; NaN if there is one, -infinity if the row is empty.
#[inline(always)]
pub fn maximum(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            // A NaN stays: no comparison with it is true.
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    let mut result = f32::NEG_INFINITY;
    for &x in lanes.iter().chain(rest) {
        result = larger(result, x);
    }
    result
}
