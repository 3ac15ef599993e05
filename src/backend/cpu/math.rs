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

/// Converts f32 to bf16 bits, to nearest even; NaN stays a (quiet) NaN.
#[inline(always)]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

/// Rounds an f32 to bf16, as f32.
#[inline(always)]
pub fn round_to_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

/// Converts bf16 bits to f32.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the value of an e4m3fn code (a float of the OCP standard with 4 bits of exponent and 3 of
/// mantissa, without infinities). Its two codes that are no numbers become 480 and -480; whoever
/// reads codes from outside refuses them.
#[inline(always)]
pub fn fp8_to_f32(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f) << 20;
    let sign = u32::from(code & 0x80) << 24;
    // 2^120 makes up for the difference of the two biases of exponents.
    f32::from_bits(sign | magnitude) * f32::from_bits(247 << 23)
}

/// Converts f16 bits to f32, branch-free.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    // The exponent moves by a product with 2^112, which also normalises subnormal numbers.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(bits & 0x7fff);
    let value = (f32::from_bits(magnitude << 13) * REBIAS).to_bits();
    let value = if magnitude >= 0x7c00 { value | 0x7f80_0000 } else { value };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// Converts f32 to f16 bits, to nearest even, branch-free; NaN stays a (quiet) NaN.
#[inline(always)]
pub fn f16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let odd = (magnitude >> 13) & 1;
    // The exponent's bias goes from 127 to 15; a carry out of the mantissa is right as it is.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    // Adding 1/2 makes the adder round to multiples of 2^-24, the subnormal step.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let mut result = if magnitude < 0x3880_0000 { subnormal } else { normal };
    // Values of 2^16 and more become infinite.
    result = if magnitude >= 0x4780_0000 { 0x7c00 } else { result };
    result = if magnitude > 0x7f80_0000 { nan } else { result };
    (result | (bits >> 16) & 0x8000) as u16
}

/// Lanes of the sums below: one 512-bit vector, the same on every instruction set.
pub const LANES: usize = 16;

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

/// Returns the sum of `term(x)` over a row, in lanes of sixteen and then a tree: always in the same
/// order.
#[inline(always)]
pub fn sum_over<S: Simd>(row: &[f32], term: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let mut lanes = [0.0f32; LANES];
    add_to_lanes(&mut lanes, row, term);
    sum_lanes(lanes)
}

/// Continues a sum in lanes. The parts of a row, all but the last multiples of [`LANES`] long, give
/// the same bits as the whole.
#[inline(always)]
pub fn add_to_lanes(lanes: &mut [f32; LANES], row: &[f32], term: impl Fn(f32, f32) -> f32 + Copy) {
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = term(lanes[i], chunk[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = term(*lane, x);
    }
}

/// Returns the largest element of a row; NaN if there is one, -infinity if the row is empty.
#[inline(always)]
pub fn maximum(row: &[f32]) -> f32 {
    // Four vectors side by side hide the latency of the comparison.
    const WIDTH: usize = 4 * LANES;
    // A NaN stays: no comparison with it is true.
    let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; WIDTH];
    let (chunks, rest) = row.as_chunks::<WIDTH>();
    for chunk in chunks {
        for i in 0..WIDTH {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, x);
    }
    let mut width = WIDTH / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = larger(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}
