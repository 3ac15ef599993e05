//! The storage formats of the numbers of a quantised matrix.

use crate::backend::cpu::math::fp8_to_f32;
use crate::memory::DType;

/// The encoding of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// 4 bits: an integer from 0 to 15.
    Int4,
    /// 8 bits: an integer from 0 to 255.
    Int8,
    /// 8 bits: a float with 4 bits of exponent and 3 of mantissa, e4m3fn of the OCP standard (no
    /// infinities; 0x7f and 0xff are no numbers).
    Fp8,
}

// Everything that depends on the code alone is here, so that the files that move codes about ask for
// a property instead of listing the codes again.
impl Code {
    /// All codes.
    pub const ALL: [Code; 3] = [Code::Int4, Code::Int8, Code::Fp8];

    /// Returns the name of the code in files of kept weights and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Code::Int4 => "int4",
            Code::Int8 => "int8",
            Code::Fp8 => "fp8",
        }
    }

    /// Returns the bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Code::Int4 => 4,
            Code::Int8 | Code::Fp8 => 8,
        }
    }

    /// Returns the bits of the mantissa, if codes stand for floats; what is left beside the sign are those
    /// of the exponent.
    pub const fn mantissa_bits(self) -> Option<usize> {
        match self {
            Code::Int4 | Code::Int8 => None,
            Code::Fp8 => Some(3),
        }
    }

    /// Whether codes stand for floats, which have no zeros.
    pub const fn is_float(self) -> bool {
        self.mantissa_bits().is_some()
    }

    /// Returns the zero of groups that state none: the middle of the integers.
    pub const fn middle(self) -> u8 {
        match self {
            Code::Int4 => 8,
            Code::Int8 => 128,
            Code::Fp8 => 0,
        }
    }

    /// Returns the number by which kernels know the code; `csrc/ops/quantised/decode.cuh` has the
    /// same.
    pub(in crate::ops) const fn number(self) -> i32 {
        match self {
            Code::Int4 => 0,
            Code::Int8 => 1,
            Code::Fp8 => 2,
        }
    }

    /// Returns the bytes of `len` codes in a row; a last half byte is filled with zeros.
    pub const fn row_bytes(self, len: usize) -> usize {
        match self.bits() {
            4 => len.div_ceil(2),
            _ => len,
        }
    }

    /// Returns the code at a place of a row of `row_bytes`. Of two codes of 4 bits in a byte the
    /// first is in the low half.
    pub fn at(self, row: &[u8], place: usize) -> u8 {
        match self.bits() {
            4 => row.get(place / 2).map_or(0, |byte| byte >> (place % 2 * 4) & 15),
            _ => row.get(place).copied().unwrap_or(0),
        }
    }

    /// Returns the value of a code in a group with this zero, before it is scaled.
    #[inline(always)]
    pub fn value(self, code: u8, zero: u8) -> f32 {
        match self {
            Code::Int4 | Code::Int8 => f32::from(i16::from(code) - i16::from(zero)),
            Code::Fp8 => fp8_to_f32(code),
        }
    }

    /// Whether a code stands for a number: integers always do.
    pub const fn is_number(self, code: u8) -> bool {
        match self {
            Code::Int4 | Code::Int8 => true,
            Code::Fp8 => code & 0x7f != 0x7f,
        }
    }

    /// Whether all codes of rows stand for numbers.
    pub fn are_numbers(self, codes: &[u8]) -> bool {
        match self {
            Code::Int4 | Code::Int8 => true,
            // Without an early exit the loop is compiled to vector instructions.
            Code::Fp8 => codes.iter().fold(true, |all, &code| all & self.is_number(code)),
        }
    }

    /// Returns the bits of a random byte that are kept for its codes to be numbers of ordinary size.
    pub const fn random_mask(self) -> u8 {
        match self {
            Code::Int4 | Code::Int8 => 0xff,
            // Without the upper half of the exponents.
            Code::Fp8 => 0xbf,
        }
    }

    /// Returns the standard deviation of the values of random codes under [`Code::random_mask`].
    pub const fn random_std(self) -> f32 {
        match self {
            Code::Int4 => 4.6,
            Code::Int8 => 73.9,
            Code::Fp8 => 0.61,
        }
    }
}

/// The format of a quantised matrix W `[out_features, in_features]`:
///
/// ```text
/// W[o, i] = (code[o, i] - zero[o, i / group_size]) * scale[o, i / group_size]
/// ```
///
/// A code of [`Code::Fp8`] stands for its value and has no zero. The values are exact; what rounds
/// is the product with activations, and activations themselves with
/// [`quantises_inputs`](QuantFormat::quantises_inputs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantFormat {
    /// The encoding of the numbers.
    pub code: Code,
    /// The inputs that share a scale, at least 1; in_features or more if a row has a single one.
    pub group_size: usize,
    /// Whether groups have zeros of their own; otherwise all zeros are [`Code::middle`].
    pub has_zeros: bool,
    /// The type that holds all scales without rounding.
    pub scale: DType,
    /// Whether products take their activations in 8 bits too. With [`Code::Fp8`] these are e4m3, with a
    /// scale for each row and 128 inputs ([`activations`](super::activations)). With integers they are
    /// integers: on the CPU with a scale for each row and group, or each 128 inputs of a longer one; on a
    /// GPU in prompts, with a scale for each row, where the weight has one for each of its own
    /// ([`cuda_integers`](super::cuda_integers)).
    pub quantises_inputs: bool,
}

impl QuantFormat {
    /// The format that holds matrices of both, of `in_features` inputs; `None` if there is none. It keeps
    /// activations if either does.
    pub fn with(&self, other: &QuantFormat, in_features: usize) -> Option<QuantFormat> {
        let whole = |format: &QuantFormat| format.group_size.min(in_features);
        let is_one = self.code == other.code && whole(self) == whole(other);
        let scale = if self.scale == other.scale { self.scale } else { DType::F32 };
        let has_zeros = self.has_zeros || other.has_zeros;
        let quantises_inputs = self.quantises_inputs && other.quantises_inputs;
        is_one.then_some(QuantFormat { has_zeros, scale, quantises_inputs, ..*self })
    }

    /// Whether products take their activations in FP8.
    pub fn has_fp8_inputs(&self) -> bool {
        self.quantises_inputs && self.code.is_float()
    }

    /// The groups of a row of `in_features` inputs; the last may be partial.
    pub fn num_groups(&self, in_features: usize) -> usize {
        in_features.div_ceil(self.group_size.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_one_product_keep_activations_if_one_of_them_does() {
        let format = |quantises_inputs, scale| {
            let (code, group_size, has_zeros) = (Code::Fp8, 512, false);
            QuantFormat { code, group_size, has_zeros, scale, quantises_inputs }
        };
        let (both, one) = (format(true, DType::BF16), format(false, DType::BF16));
        assert_eq!(both.with(&both, 512), Some(both));
        assert_eq!(both.with(&one, 512), Some(one));
        assert_eq!(one.with(&format(true, DType::F32), 512), Some(format(false, DType::F32)));
        let halves = QuantFormat { group_size: 256, ..both };
        assert_eq!(both.with(&halves, 512), None);
    }
}
