//! What tests know of each code by themselves: its numbers in f64, random ones, and its name in C.

use crate::support::Random;
use xserv::ffi::xserv_quant_code;
use xserv::ops::quantised::Code;

/// Returns the number that a code stands for in a group with this zero, before it is scaled; of e4m3fn
/// any but its two codes that stand for none.
pub fn number(code: Code, bits: u8, zero: u8) -> f64 {
    match code {
        Code::Int4 | Code::Int8 => f64::from(bits) - f64::from(zero),
        Code::Fp8 => {
            let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
            let size = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            if bits & 0x80 != 0 {
                -size
            } else {
                size
            }
        }
    }
}

/// Whether all codes of a byte stand for numbers.
pub fn are_numbers(code: Code, byte: u8) -> bool {
    code != Code::Fp8 || byte & 0x7f != 0x7f
}

/// Returns a byte of random codes that stand for numbers.
pub fn random_codes(random: &mut Random, code: Code) -> u8 {
    match random.next() as u8 {
        byte if are_numbers(code, byte) => byte,
        _ => 0x38,
    }
}

/// Returns about how large the numbers of random codes are.
pub fn typical_size(code: Code) -> f64 {
    match code {
        Code::Int4 => 4.0,
        Code::Int8 => 64.0,
        Code::Fp8 => 30.0,
    }
}

/// Returns the number of the code in C.
pub fn c_number(code: Code) -> u32 {
    (match code {
        Code::Int4 => xserv_quant_code::XSERV_QUANT_INT4,
        Code::Int8 => xserv_quant_code::XSERV_QUANT_INT8,
        Code::Fp8 => xserv_quant_code::XSERV_QUANT_FP8,
    }) as u32
}
