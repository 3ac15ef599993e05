//! The storage formats of the numbers of a quantised matrix.

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

impl Code {
    /// The bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Code::Int4 => 4,
            Code::Int8 | Code::Fp8 => 8,
        }
    }

    /// The zero of groups that state none: the middle of the integers.
    pub const fn middle(self) -> u8 {
        match self {
            Code::Int4 => 8,
            Code::Int8 => 128,
            Code::Fp8 => 0,
        }
    }

    /// The bytes of `len` codes in a row; a last half byte is filled with zeros.
    pub const fn row_bytes(self, len: usize) -> usize {
        match self {
            Code::Int4 => len.div_ceil(2),
            Code::Int8 | Code::Fp8 => len,
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
    /// Whether products take their activations in e4m3 too, with a scale for each row and 128
    /// inputs ([`activations`](super::activations)). [`Code::Fp8`] alone has this.
    pub quantises_inputs: bool,
}

impl QuantFormat {
    /// The format that holds matrices of both, of `in_features` inputs; `None` if there is none.
    pub fn with(&self, other: &QuantFormat, in_features: usize) -> Option<QuantFormat> {
        let whole = |format: &QuantFormat| format.group_size.min(in_features);
        let is_one = self.code == other.code
            && whole(self) == whole(other)
            && self.quantises_inputs == other.quantises_inputs;
        let scale = if self.scale == other.scale { self.scale } else { DType::F32 };
        let has_zeros = self.has_zeros || other.has_zeros;
        is_one.then_some(QuantFormat { has_zeros, scale, ..*self })
    }

    /// The groups of a row of `in_features` inputs; the last may be partial.
    pub fn num_groups(&self, in_features: usize) -> usize {
        in_features.div_ceil(self.group_size.max(1))
    }
}
