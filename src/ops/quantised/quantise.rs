//! Quantises rows of numbers to integers, each group of inputs by itself.
//!
//! * 8 bits: `scale = max |x| / 127`, so that the largest number of a group is kept, and zero is.
//! * 4 bits: a zero and a scale for each group. Among the ranges that are tried, from that of the numbers to
//!   60 % of it, the one with the least sum of squared errors is taken, after its scale has been fitted to the codes by
//!   least squares: a range that is a little too small costs the outermost numbers something and makes all
//!   others finer.
//!
//! Scales are rounded to bf16, which has the exponents of f32, before codes are chosen: so codes make up for
//! the rounding.

use super::format::{Code, QuantFormat};
use super::four_bits::{code, inverse, nearest, search, Lanes, LANES};
use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::CpuBackend;
use crate::error::{try_filled, Error, Result};
use crate::memory::DType;

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

/// The destination of a row: see [`super::QuantisedMatrix`].
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
    // The bits of numbers that are not finite are the largest. Most rows have none, and this loop has no exit.
    let largest = row.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
    if !f32::from_bits(largest).is_finite() {
        let input = row.iter().position(|x| !x.is_finite()).unwrap_or(0);
        return Err(Error::invalid_file(format!(
            "a number that is not finite at input {input} cannot be quantised"
        )));
    }
    let group_size = format.group_size.clamp(1, row.len().max(1));
    match format.code {
        Code::Int8 => {
            let groups = row.chunks(group_size).zip(codes.chunks_mut(group_size));
            for ((numbers, codes), scale) in groups.zip(scales) {
                *scale = eight_bits(numbers, codes);
            }
        }
        Code::Int4 => {
            let mut numbers = try_filled(group_size, [0.0; LANES], "groups of numbers")?;
            let groups = row.chunks(group_size * LANES).zip(scales.chunks_mut(LANES));
            for ((i, (row, scales)), zeros) in groups.enumerate().zip(zeros.chunks_mut(LANES)) {
                let first = i * group_size * LANES;
                four_bits(row, group_size, &mut numbers, first, codes, scales, zeros);
            }
        }
        _ => return Err(Error::internal("rows are quantised to integers alone")),
    }
    Ok(())
}

/// Rounds to bf16, away from zero, so that what was divided by it does not grow.
#[inline(always)]
fn round_up_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits & 0xffff_0000) + if bits & 0xffff != 0 { 0x1_0000 } else { 0 })
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

/// Adds the codes of up to [`LANES`] groups, which begin at input `first`, to `codes`, and writes their scales and
/// zeros. `numbers` has `group_size` places, for their numbers.
#[inline(always)]
fn four_bits(
    row: &[f32],
    group_size: usize,
    numbers: &mut [Lanes],
    first: usize,
    codes: &mut [u8],
    scales: &mut [f32],
    zeros: &mut [u8],
) {
    if row.len() < group_size * LANES {
        numbers.fill([0.0; LANES]);
    }
    for (lane, group) in row.chunks(group_size).enumerate() {
        for (place, &x) in numbers.iter_mut().zip(group) {
            place[lane] = x;
        }
    }
    let found = search(numbers);
    let groups = row.chunks(group_size).zip(scales).zip(zeros);
    for (lane, ((group, scale), to_zero)) in groups.enumerate() {
        let (inverse, zero) = (found.inverse[lane], found.zero[lane]);
        (*scale, *to_zero) = (found.scale[lane], zero as u8);
        let first = first + lane * group_size;
        // A group may begin within a byte.
        let (alone, pairs) = group.split_at(first % 2);
        if let (Some(&x), Some(byte)) = (alone.first(), codes.get_mut(first / 2)) {
            *byte |= (code(x, inverse, zero) as u8) << 4;
        }
        let bytes = codes.get_mut(first.div_ceil(2)..).unwrap_or_default();
        let whole = pairs.chunks_exact(2);
        if let (&[x], Some(byte)) = (whole.remainder(), bytes.get_mut(pairs.len() / 2)) {
            *byte |= code(x, inverse, zero) as u8;
        }
        for (byte, pair) in bytes.iter_mut().zip(whole) {
            let (low, high) = (code(pair[0], inverse, zero), code(pair[1], inverse, zero));
            // Codes below 16 are exact sums of f32.
            *byte |= (low + 16.0 * high) as u8;
        }
    }
}
