//! Quantises rows of numbers to integers, each group of inputs by itself.
//!
//! * 8 bits: `scale = max |x| / 127`, so that the largest number of a group is kept, and zero is.
//! * 4 bits: a zero and a scale for each group. Of the ranges that are tried, from that of the numbers to 60 % of
//!   it, the one is taken with the least sum of squared errors, after its scale has been fitted to the codes by
//!   least squares: a range that is a little too small costs the outermost numbers something and makes all
//!   others finer.
//!
//! Scales are rounded to bf16, which has the exponents of f32, before codes are chosen: so codes make up for
//! the rounding.

use super::format::{Code, QuantFormat};
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::memory::DType;

/// The ranges that are tried for a group of 4 bits are fractions of the full one, this far apart.
const RANGE_STEP: f32 = 0.04;
/// How many ranges are tried.
const NUM_RANGES: usize = 11;

/// Returns the format that [`quantise_row`] writes.
pub fn quantised_format(code: Code, group_size: usize) -> QuantFormat {
    QuantFormat {
        code,
        group_size,
        has_zeros: code == Code::Int4,
        scale: DType::BF16,
        quantises_inputs: false,
    }
}

/// Where a row is written: see [`super::QuantisedMatrix`].
pub struct RowOut<'a> {
    /// [code.row_bytes(in_features)]
    pub codes: &'a mut [u8],
    /// [num_groups]
    pub scales: &'a mut [f32],
    /// [num_groups], or empty where the format has no zeros.
    pub zeros: &'a mut [u8],
}

/// Quantises a row to a format of [`quantised_format`] with integers. Codes of 4 bits are added to what is there:
/// zeros. Numbers that are not finite are an error.
pub fn quantise_row(
    backend: &CpuBackend,
    row: &[f32],
    format: &QuantFormat,
    out: RowOut<'_>,
) -> Result<()> {
    backend.run(QuantiseRow { row, format, out })
}

struct QuantiseRow<'a> {
    row: &'a [f32],
    format: &'a QuantFormat,
    out: RowOut<'a>,
}

impl Kernel for QuantiseRow<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run<S: Simd>(self) -> Result<()> {
        let QuantiseRow { row, format, out: RowOut { codes, scales, zeros } } = self;
        quantise_groups(row, format, codes, scales, zeros)
    }
}

#[inline(always)]
fn quantise_groups(
    row: &[f32],
    format: &QuantFormat,
    codes: &mut [u8],
    scales: &mut [f32],
    zeros: &mut [u8],
) -> Result<()> {
    let group_size = format.group_size.max(1);
    let groups = row.chunks(group_size).zip(scales.iter_mut()).enumerate();
    for (group, (numbers, scale)) in groups {
        if let Some(place) = numbers.iter().position(|x| !x.is_finite()) {
            let input = group * group_size + place;
            return Err(Error::invalid_file(format!(
                "a number that is not finite at input {input} cannot be quantised"
            )));
        }
        let first = group * group_size;
        match format.code {
            Code::Int8 => {
                *scale = eight_bits(numbers, codes.get_mut(first..).unwrap_or_default());
            }
            Code::Int4 => {
                let found = four_bits(numbers);
                *scale = found.scale;
                if let Some(zero) = zeros.get_mut(group) {
                    *zero = found.zero as u8;
                }
                for (place, &x) in (first..).zip(numbers) {
                    if let Some(byte) = codes.get_mut(place / 2) {
                        *byte |= (found.code(x) as u8) << (place % 2 * 4);
                    }
                }
            }
            Code::Fp8 => return Err(Error::internal("rows are quantised to integers alone")),
        }
    }
    Ok(())
}

/// Rounds to bf16, away from zero, so that what was divided by it does not grow.
#[inline(always)]
fn round_up_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits & 0xffff_0000) + if bits & 0xffff != 0 { 0x1_0000 } else { 0 })
}

/// Returns the integer nearest to x, of at most 2^22, ties to even. Without a call, so that loops are vectorised.
#[inline(always)]
fn nearest(x: f32) -> f32 {
    /// 1.5 * 2^23, which leaves no room for fractions.
    const ROUND: f32 = 12_582_912.0;
    (x + ROUND) - ROUND
}

#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale > 0.0 {
        1.0 / scale
    } else {
        0.0
    }
}

/// Writes the codes of a group and returns its scale.
#[inline(always)]
fn eight_bits(numbers: &[f32], codes: &mut [u8]) -> f32 {
    let largest = numbers.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let scale = round_up_to_bf16(largest / 127.0);
    // The reciprocal of a number below 2^-126 is infinite.
    let scale = if inverse(scale).is_finite() { scale } else { 0.0 };
    let inverse = inverse(scale);
    for (code, x) in codes.iter_mut().zip(numbers) {
        *code = (nearest(x * inverse).clamp(-127.0, 127.0) + 128.0) as u8;
    }
    scale
}

/// The scale and the zero of a group of 4 bits.
#[derive(Clone, Copy)]
struct FourBits {
    scale: f32,
    inverse: f32,
    zero: f32,
}

impl FourBits {
    /// The scale, rounded, and a zero for it.
    #[inline(always)]
    fn of(scale: f32, least: f32) -> Self {
        let scale = half::bf16::from_f32(scale).to_f32();
        let inverse = inverse(scale);
        if !inverse.is_finite() || scale == 0.0 {
            return FourBits { scale: 0.0, inverse: 0.0, zero: 0.0 };
        }
        let zero = nearest(-least * inverse).clamp(0.0, 15.0);
        FourBits { scale, inverse, zero }
    }

    #[inline(always)]
    fn code(&self, x: f32) -> f32 {
        nearest(x * self.inverse + self.zero).clamp(0.0, 15.0)
    }

    /// Returns the sum of squared errors, and the scale that fits the codes best.
    #[inline(always)]
    fn try_on(&self, numbers: &[f32]) -> (f32, f32) {
        // Sixteen sums each, so that the loop is vectorised.
        let mut sums = [[0.0_f32; 16]; 3];
        for chunk in numbers.chunks(16) {
            for (lane, &x) in chunk.iter().enumerate() {
                let q = self.code(x) - self.zero;
                let error = q * self.scale - x;
                sums[0][lane] += error * error;
                sums[1][lane] += q * x;
                sums[2][lane] += q * q;
            }
        }
        let [error, products, squares] = sums.map(|lanes| lanes.iter().sum::<f32>());
        (error, if squares > 0.0 { products / squares } else { self.scale })
    }
}

/// Finds the scale and the zero of a group.
#[inline(always)]
fn four_bits(numbers: &[f32]) -> FourBits {
    let (least, most) =
        numbers.iter().fold((0.0_f32, 0.0_f32), |(least, most), &x| (least.min(x), most.max(x)));
    let range = most - least;
    let mut best = FourBits::of(range / 15.0, least);
    if range == 0.0 || !range.is_finite() {
        return best;
    }
    let (mut least_error, mut fitted) = best.try_on(numbers);
    let mut try_it = |candidate: FourBits| {
        let (error, fit) = candidate.try_on(numbers);
        if error < least_error {
            (least_error, best) = (error, candidate);
        }
        fit
    };
    for step in 0..NUM_RANGES {
        let fraction = 1.0 - RANGE_STEP * step as f32;
        if step > 0 {
            fitted = try_it(FourBits::of(range * fraction / 15.0, least * fraction));
        }
        try_it(FourBits::of(fitted, least * fraction));
    }
    best
}
