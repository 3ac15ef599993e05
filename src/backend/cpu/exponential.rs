//! Exponentials for the kernels, branch-free so that loops over them are vectorised.

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

/// 2^f on [0, 1]: the polynomial of this degree with the least relative error, 2e-9, among those
/// that are 1 at 0 (by the Remez algorithm), highest power first. In f32 it is good to 7e-8.
#[cfg(target_arch = "x86_64")]
pub const EXP2_FRACTION_TERMS: [f32; 7] = [
    2.161_291_5e-4,
    1.246_784_7e-3,
    9.675_452e-3,
    5.548_528e-2,
    2.402_293_1e-1,
    6.931_470_6e-1,
    1.0,
];

/// Returns `2^x` to 1e-7 relative; 0 below -126, infinity from 127.5 on. NaN stays NaN.
#[inline(always)]
pub fn exp2<S: Simd>(x: f32) -> f32 {
    // These comparisons are false for NaN, so that it passes through; f32::clamp would do so too,
    // but min/max would swallow it.
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

/// Returns `e^x`: relative error below 2e-7 on [-87, 88]; 0 below, infinity above. NaN stays NaN.
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
