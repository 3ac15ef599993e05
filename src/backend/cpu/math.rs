//! Dtype conversions and fixed-order sums for the kernels, branch-free so that loops over them are
//! vectorised.

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

/// The largest number of e4m3.
pub const LARGEST_FP8: f32 = 448.0;

/// Returns the e4m3 code nearest to a number, of two the even one; those beyond 448 become 448.
pub fn fp8_code(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = x.abs();
    if size.is_nan() {
        return sign | 0x7f;
    }
    if size >= LARGEST_FP8 {
        return sign | 0x7e;
    }
    // In steps between neighbouring numbers: 8 of them begin at every power of 2, and below 2^-6
    // they stay the same. A carry goes to the exponent, as it should.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-6);
    let step = f32::from_bits((130 - exponent) as u32 * (1 << 23));
    let steps = (size * step).round_ties_even() as i32;
    sign | ((exponent + 6) * 8 + steps).clamp(0, 0x7e) as u8
}

/// Returns the number of e4m3 nearest to a finite number, which is that of [`fp8_code`], branch-free.
#[inline(always)]
pub fn round_to_fp8(x: f32) -> f32 {
    const SMALLEST_NORMAL: f32 = f32::from_bits((127 - 6) << 23);
    // Beside it f32 has the steps of e4m3's subnormal numbers, 2^-9.
    const SUBNORMAL_STEPS: f32 = 1.5 * (1 << 14) as f32;
    let size = x.abs();
    let bits = size.to_bits();
    let even = bits >> 20 & 1;
    let normal = f32::from_bits(bits.wrapping_add(0x7_ffff + even) & !0xf_ffff);
    let subnormal = (size + SUBNORMAL_STEPS) - SUBNORMAL_STEPS;
    let rounded = if size < SMALLEST_NORMAL { subnormal } else { normal };
    let bounded = if rounded > LARGEST_FP8 { LARGEST_FP8 } else { rounded };
    bounded.copysign(x)
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
pub fn sum_over(row: &[f32], term: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
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
