//! Floats of 8 bits (e4m3fn) from their definition: a sign, 4 bits of exponent with a bias of 7 and 3
//! of fraction, without infinities. Numbers beyond the largest, 448, become it.

use std::cmp::Ordering;

/// Returns the size that the lower seven bits of a code stand for.
fn size_of_code(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3), f64::from(code & 7));
    match exponent {
        0 => fraction * 2f64.powi(-9),
        _ => (8.0 + fraction) * 2f64.powi(exponent - 10),
    }
}

/// Returns the code nearest to a number, of two the even one.
pub fn code(x: f64) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    // The codes have the order of their numbers: the nearest is the last that is not above, or the next.
    let (mut below, mut above) = (0, 0x7f);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if size_of_code(middle) <= x.abs() {
            below = middle;
        } else {
            above = middle;
        }
    }
    if below == 0x7e {
        return sign | below;
    }
    let off = |code| (size_of_code(code) - x.abs()).abs();
    let is_above_nearer = match off(above).total_cmp(&off(below)) {
        Ordering::Equal => above % 2 == 0,
        order => order == Ordering::Less,
    };
    sign | if is_above_nearer { above } else { below }
}

/// Returns the number of a code; for the two that are no numbers, NaN.
pub fn number(code: u8) -> f64 {
    let size = if code & 0x7f == 0x7f { f64::NAN } else { size_of_code(code & 0x7f) };
    if code & 0x80 != 0 {
        -size
    } else {
        size
    }
}

/// Returns the nearest number of 8 bits.
pub fn round(x: f64) -> f64 {
    number(code(x))
}

pub fn round_all(x: &[f32]) -> Vec<f32> {
    x.iter().map(|&x| round(x.into()) as f32).collect()
}
