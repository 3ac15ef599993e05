//! Numbers quantised at load: how far they are from the numbers, and what is refused.

use super::codes::{are_numbers, number};
use crate::support::{backends, Random};
use xserv::memory::DType;
use xserv::ops::quantised::{
    fp8_to_f32, quantise_row, quantised_format, Code, QuantFormat, QuantisedMatrix, RowOut,
};

fn quantise(row: &[f32], format: QuantFormat) -> QuantisedMatrix {
    let mut matrix = QuantisedMatrix::empty(1, row.len(), format).unwrap();
    let QuantisedMatrix { codes, scales, zeros, .. } = &mut matrix;
    let out = RowOut { codes, scales, zeros };
    quantise_row(&backends(&[1])[0], row, &format, out).unwrap();
    matrix
}

fn values(matrix: &QuantisedMatrix) -> Vec<f32> {
    let mut row = vec![0.0; matrix.in_features];
    matrix.row_to_f32(0, &mut row).unwrap();
    row
}

fn squared_error(row: &[f32], values: &[f32]) -> f64 {
    row.iter().zip(values).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
}

#[test]
fn eight_bits_are_within_half_a_step() {
    let mut random = Random::new(31);
    for magnitude in [1e-30, 1e-5, 0.02, 3.0, 1e30] {
        for len in [1, 31, 128, 300] {
            let row: Vec<f32> = random.normals(len).iter().map(|x| x * magnitude).collect();
            for group_size in [32, 128] {
                let matrix = quantise(&row, quantised_format(Code::Int8, group_size));
                let values = values(&matrix);
                for (group, numbers) in row.chunks(group_size).enumerate() {
                    let scale = matrix.scales[group];
                    assert_eq!(half::bf16::from_f32(scale).to_f32(), scale);
                    let largest = numbers.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                    assert!(scale <= largest / 127.0 * 1.01, "{scale} {largest}");
                    for (i, x) in numbers.iter().enumerate() {
                        let error = (values[group * group_size + i] - x).abs();
                        assert!(error <= scale * 0.5001, "{x} by {error}, step {scale}");
                    }
                }
            }
        }
    }
}

#[test]
fn four_bits_are_better_than_the_whole_range_in_fifteen_steps() {
    let mut random = Random::new(32);
    for group_size in [32, 64, 128] {
        let row: Vec<f32> = random.normals(4096).iter().map(|x| x * 0.03 + 0.005).collect();
        let matrix = quantise(&row, quantised_format(Code::Int4, group_size));
        let plain: Vec<f32> = row
            .chunks(group_size)
            .flat_map(|group| {
                let least = group.iter().copied().fold(0.0_f32, f32::min);
                let most = group.iter().copied().fold(0.0_f32, f32::max);
                let scale = (most - least) / 15.0;
                let zero = (-least / scale).round();
                group
                    .iter()
                    .map(move |x| ((x / scale + zero).round().clamp(0.0, 15.0) - zero) * scale)
                    .collect::<Vec<_>>()
            })
            .collect();
        let ratio = squared_error(&row, &values(&matrix)) / squared_error(&row, &plain);
        assert!(ratio < 0.95, "groups of {group_size}: {ratio} of the plain error");
    }
}

#[test]
fn groups_of_four_bits_do_not_depend_on_their_neighbours() {
    let mut random = Random::new(33);
    // Sixteen groups are searched at a time: less, more, and a last one that is shorter. With 33, groups
    // begin within bytes.
    for group_size in [32, 33, 128] {
        for len in [5, 15 * group_size, 16 * group_size, 37 * group_size + 7] {
            let mut row: Vec<f32> = random.normals(len).iter().map(|x| x * 0.02).collect();
            row.iter_mut().skip(group_size).step_by(5).for_each(|x| *x *= 1e4);
            let matrix = quantise(&row, quantised_format(Code::Int4, group_size));
            let values = values(&matrix);
            for (group, numbers) in row.chunks(group_size).enumerate() {
                let alone = quantise(numbers, quantised_format(Code::Int4, group_size));
                assert_eq!(matrix.scales[group], alone.scales[0], "{len} by {group_size}");
                assert_eq!(matrix.zeros[group], alone.zeros[0], "{len} by {group_size}");
                let first = group * group_size;
                assert_eq!(values[first..first + numbers.len()], self::values(&alone));
            }
        }
    }
}

#[test]
fn numbers_that_four_bits_hold_are_kept() {
    // All sixteen values of a group with this scale and zero occur.
    let row: Vec<f32> = (0..64).map(|i| ((i % 16) as f32 - 5.0) * 0.25).collect();
    let matrix = quantise(&row, quantised_format(Code::Int4, 32));
    assert_eq!(values(&matrix), row);
    for constant in [0.0, 1e-40] {
        let zeros = quantise(&[constant; 40], quantised_format(Code::Int4, 32));
        assert!(values(&zeros).iter().all(|x| x.abs() <= constant), "{constant}");
    }
}

#[test]
fn what_is_not_finite_is_refused() {
    for bad in [f32::NAN, f32::INFINITY] {
        for code in [Code::Int4, Code::Int8] {
            let mut row = [0.5; 40];
            row[37] = bad;
            let format = quantised_format(code, 32);
            let mut matrix = QuantisedMatrix::empty(1, 40, format).unwrap();
            let QuantisedMatrix { codes, scales, zeros, .. } = &mut matrix;
            let out = RowOut { codes, scales, zeros };
            let error = quantise_row(&backends(&[1])[0], &row, &format, out).unwrap_err();
            assert!(error.message().contains("input 37"), "{error}");
        }
    }
}

#[test]
fn floats_of_eight_bits_are_those_of_the_standard() {
    for code in (0..=255_u8).filter(|&code| are_numbers(Code::Fp8, code)) {
        assert_eq!(f64::from(fp8_to_f32(code)), number(Code::Fp8, code, 0), "{code:#x}");
    }
    assert_eq!(fp8_to_f32(0x7e), 448.0);
    let format = QuantFormat {
        code: Code::Fp8,
        group_size: 128,
        has_zeros: false,
        scale: DType::F32,
        quantises_inputs: false,
    };
    assert_eq!(format.num_groups(300), 3);
}
