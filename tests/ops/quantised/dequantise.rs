//! Quantised matrices: their tiles on a GPU against their numbers on the host.

use super::codes::{random_codes, typical_size};
use crate::support::device::{cuda_context, encode, upload, Bench};
use crate::support::Random;
use xserv::backend::DeviceTensor;
use xserv::memory::DType;
use xserv::ops::quantised::cuda::{dequantise, has_dequantise, QuantisedTiles};
use xserv::ops::quantised::tiles::{TileLayout, TileMemory};
use xserv::ops::quantised::{Code, QuantFormat, QuantisedMatrix};

/// Returns a matrix of random codes, whose numbers are about as large as `size`; their scales are numbers of
/// the type of the format.
pub fn random_matrix(
    random: &mut Random,
    out_features: usize,
    in_features: usize,
    format: QuantFormat,
    size: f64,
) -> QuantisedMatrix {
    let mut matrix = QuantisedMatrix::empty(out_features, in_features, format).expect("memory");
    let typical = typical_size(format.code);
    let mask = if format.code.bits() == 4 { 15 } else { 255 };
    for byte in &mut matrix.codes {
        *byte = random_codes(random, format.code);
    }
    for zero in &mut matrix.zeros {
        // About the middle, where those of files are, and sometimes anywhere.
        let middle = usize::from(format.code.middle());
        let near = middle + random.below(middle / 2) - middle / 4;
        *zero = if random.below(8) == 0 { random.next() as u8 & mask } else { near as u8 };
    }
    for scale in &mut matrix.scales {
        let value = (size / typical * (1.0 + 0.5 * random.signed())) as f32;
        *scale = match format.scale {
            DType::F32 => value,
            DType::F16 => half::f16::from_f32(value).to_f32(),
            DType::BF16 => half::bf16::from_f32(value).to_f32(),
        };
    }
    matrix
}

/// Packs a matrix and copies the tiles to the device.
pub fn upload_tiles(
    bench: &mut Bench,
    layout: &TileLayout,
    matrix: &QuantisedMatrix,
) -> DeviceTensor {
    let mut bytes = vec![0xff; layout.len_bytes().next_multiple_of(4)];
    let tiles = 0..layout.num_tiles();
    let place = layout.place(tiles.clone());
    let (codes, rest) = bytes.split_at_mut(place.scales.start);
    let (scales, zeros) = rest.split_at_mut(place.zeros.start - place.scales.start);
    let out = TileMemory {
        codes: &mut codes[..place.codes.len()],
        scales: &mut scales[..place.scales.len()],
        zeros: &mut zeros[..place.zeros.len()],
    };
    layout.pack(matrix, tiles, out).expect("a layout of the matrix");
    let memory = bench.ints(&[bytes.len() / 4], &vec![0; bytes.len() / 4]);
    upload(&bench.context, &memory, &bytes);
    memory
}

#[test]
fn dequantised_rows_on_cuda_have_the_bits_of_the_host() {
    let Some(context) = cuda_context() else { return };
    if !has_dequantise(&context).unwrap() {
        println!("skipped: a build without kernels");
        return;
    }
    for (out_features, in_features) in [(24, 200), (100, 333), (2, 7), (512, 1024)] {
        for code in Code::ALL {
            for (group_size, scale) in [
                (32, DType::F16),
                (128, DType::BF16),
                (20, DType::F32),
                (1, DType::F32),
                (usize::MAX, DType::F32),
            ] {
                for has_zeros in [false, true] {
                    if has_zeros && code.is_float() {
                        continue;
                    }
                    let format =
                        QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: false };
                    for is_gated in [false, true] {
                        for dtype in [DType::F32, DType::F16, DType::BF16] {
                            let mut bench = Bench::with_room(&context, dtype, 1, 16 << 20);
                            let random = &mut bench.random;
                            let matrix =
                                random_matrix(random, out_features, in_features, format, 0.1);
                            let layout =
                                TileLayout::new(out_features, in_features, format, is_gated)
                                    .expect("a layout");
                            let memory = upload_tiles(&mut bench, &layout, &matrix);
                            let tiles = QuantisedTiles::new(layout, &memory).expect("tiles");
                            // All of it, a part of either half, and one over the middle.
                            let (rows, half) = (out_features, out_features / 2);
                            for rows in [0..rows, 0..half, half..rows, half - 1..half + 1, 1..2] {
                                let out = bench.poisoned(&[rows.len(), in_features]);
                                dequantise(&context, &tiles, rows.clone(), &out)
                                    .expect("the operator");
                                context.synchronize().expect("no fault");
                                let got = bench.read(&out);
                                let mut want = vec![0.0; in_features];
                                for (row, got) in rows.zip(got.chunks_exact(in_features)) {
                                    matrix.row_to_f32(row, &mut want).expect("a row");
                                    let want: Vec<f64> =
                                        want.iter().map(|&x| f64::from(x)).collect();
                                    assert!(
                                        encode(dtype, got) == encode(dtype, &want),
                                        "{dtype} {layout:?}, row {row}"
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn dequantised_codes_that_are_no_numbers_are_none() {
    let Some(context) = cuda_context() else { return };
    if !has_dequantise(&context).unwrap() {
        println!("skipped: a build without kernels");
        return;
    }
    let scale = DType::F32;
    let format = QuantFormat {
        code: Code::Fp8,
        group_size: 64,
        has_zeros: false,
        scale,
        quantises_inputs: false,
    };
    let mut bench = Bench::new(&context, DType::BF16, 1);
    let mut matrix = random_matrix(&mut bench.random, 8, 64, format, 1.0);
    matrix.codes[..3].copy_from_slice(&[0x7f, 0xff, 0x7e]);
    let layout = TileLayout::new(8, 64, format, false).expect("a layout");
    let memory = upload_tiles(&mut bench, &layout, &matrix);
    let tiles = QuantisedTiles::new(layout, &memory).expect("tiles");
    let out = bench.poisoned(&[1, 64]);
    dequantise(&context, &tiles, 0..1, &out).expect("the operator");
    let got = bench.read(&out);
    assert!(got[0].is_nan() && got[1].is_nan());
    assert!(got[2..].iter().all(|x| x.is_finite()));
}
