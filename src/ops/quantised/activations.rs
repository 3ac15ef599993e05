//! Activations in e4m3 with a scale for each row and 128 inputs, as Transformers computes the FP8
//! linear layers of models in blocks of 128 whose config says `"activation_scheme": "dynamic"`:
//!
//! ```text
//! scale = max |x| / 448, code = e4m3(x / scale)
//! ```
//!
//! Both are computed in f32 and rounded to the nearest, ties to even. Where the 128 inputs, or what a
//! row has of the last 128, are all 0, so are the scale and the codes. Inputs that are not finite make
//! their scale so, and with it every result of the row.

pub use crate::backend::cpu::math::fp8_code;
use crate::backend::cpu::math::{round_to_fp8, LARGEST_FP8};

/// The inputs that share a scale.
pub const INPUT_GROUP: usize = 128;

/// Whether activations may be quantised for a weight with a scale for each `group_size` of `in_features`
/// inputs: all that share a scale here must share one there.
pub fn are_inputs_quantised(group_size: usize, in_features: usize) -> bool {
    group_size >= in_features || group_size.is_multiple_of(INPUT_GROUP)
}

/// Returns the scale of some inputs that share one.
pub fn input_scale(x: &[f32]) -> f32 {
    // As integers, sizes have the order of the numbers, and what is no number is larger than all.
    let bits = x.iter().fold(0, |bits, x| (x.to_bits() & 0x7fff_ffff).max(bits));
    f32::from_bits(bits) / LARGEST_FP8
}

/// Replaces inputs that share a scale by the numbers of their codes, and returns the scale.
#[inline(always)]
pub(crate) fn number_inputs(x: &mut [f32]) -> f32 {
    let scale = input_scale(x);
    if !scale.is_finite() {
        x.fill(f32::NAN);
        return f32::NAN;
    }
    if scale == 0.0 {
        x.fill(0.0);
        return 0.0;
    }
    for x in x {
        *x = round_to_fp8(*x / scale);
    }
    scale
}

/// Replaces the inputs of a row by what they are in e4m3: `out[i] = code[i] * scale`, in f32.
pub fn round_inputs(x: &[f32], out: &mut [f32]) {
    let groups = x.chunks(INPUT_GROUP).zip(out.chunks_mut(INPUT_GROUP));
    for (x, out) in groups {
        let out = &mut out[..x.len()];
        out.copy_from_slice(x);
        let scale = number_inputs(out);
        for out in out {
            *out *= scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::math::fp8_to_f32;

    #[test]
    fn numbers_are_rounded_to_those_of_their_codes() {
        let all = (0..=0x7e).map(fp8_to_f32);
        let between = (0..0x7e).map(|code| (fp8_to_f32(code) + fp8_to_f32(code + 1)) / 2.0);
        let near = |x: f32| [x, x.next_up(), x.next_down(), x * 1.01, x * 0.997];
        let far = [0.0, 1e-30, 447.0, 448.0, 470.0, 1e30];
        for x in all.chain(between).flat_map(near).chain(far) {
            for x in [x, -x] {
                let number = fp8_to_f32(fp8_code(x));
                assert_eq!(round_to_fp8(x).to_bits(), number.to_bits(), "{x}");
            }
        }
    }

    #[test]
    fn codes_are_the_nearest_numbers() {
        let all: Vec<(u8, f32)> = (0..=0x7e).map(|code| (code, fp8_to_f32(code))).collect();
        for pair in all.windows(2) {
            let [(low, a), (high, b)] = [pair[0], pair[1]];
            assert_eq!(fp8_code(a), low);
            assert_eq!(fp8_code(-b), high | 0x80);
            let middle = (a + b) / 2.0;
            let even = if low % 2 == 0 { low } else { high };
            assert_eq!(fp8_code(middle), even, "between {a} and {b}");
            assert_eq!(fp8_code(middle.next_down()), low, "below {middle}");
            assert_eq!(fp8_code(middle.next_up()), high, "above {middle}");
        }
        for (x, code) in [(464.0, 0x7e), (1e30, 0x7e), (f32::INFINITY, 0x7e), (f32::NAN, 0x7f)] {
            assert_eq!(fp8_code(x), code);
        }
        assert_eq!(fp8_code(-0.0), 0x80);
        assert_eq!(fp8_code(f32::MIN_POSITIVE), 0);
    }

    #[test]
    fn groups_have_their_own_scales() {
        let mut x: Vec<f32> = (0..300).map(|i| (i as f32 - 150.5) * 0.37).collect();
        x[128..256].fill(0.0);
        let mut out = vec![f32::NAN; x.len()];
        round_inputs(&x, &mut out);
        assert!(out[128..256].iter().all(|&x| x == 0.0));
        for (group, out) in x.chunks(INPUT_GROUP).zip(out.chunks(INPUT_GROUP)) {
            let largest = group.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            for (x, out) in group.iter().zip(out) {
                // Half a step of 1/8 of the number's power of 2, or of the smallest number.
                let bound = (x.abs() / 16.0).max(largest / 448.0 / 1024.0) * 1.0001;
                assert!((x - out).abs() <= bound, "{x} became {out}");
            }
            let has_largest = group
                .iter()
                .zip(out)
                .any(|(x, out)| x.abs() == largest && (x - out).abs() <= largest * f32::EPSILON);
            assert!(has_largest || largest == 0.0);
        }
        x[299] = f32::INFINITY;
        round_inputs(&x, &mut out);
        assert!(out[256..].iter().all(|x| x.is_nan()) && out[..256].iter().all(|x| x.is_finite()));
    }
}
