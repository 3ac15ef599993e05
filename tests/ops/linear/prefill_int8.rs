//! Prompts on Hopper whose weights and activations are both integers of 8 bits, against products in f64 of
//! the exact numbers of both.

use std::sync::Arc;

use super::quantised::{check_product, Case, Product};
use crate::quantised::{random_matrix, upload_tiles};
use crate::support::device::{cuda_context, download, Bench, HALVES};
use xserv::backend::{ComputeContext, DeviceTensor};
use xserv::memory::DType;
use xserv::ops::linear::cuda_prefill_int8::{
    has_prefill_int8, is_prefill_int8_weight, linear_prefill_int8,
};
use xserv::ops::linear::Epilogue;
use xserv::ops::quantised::cuda::QuantisedTiles;
use xserv::ops::quantised::cuda_integers::integers;
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat};

const ROW: usize = usize::MAX;

fn format(scale: DType) -> QuantFormat {
    let (code, group_size, has_zeros) = (Code::Int8, ROW, false);
    QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: true }
}

fn context() -> Option<Arc<ComputeContext>> {
    let context = cuda_context()?;
    if !has_prefill_int8(&context).unwrap() {
        println!("skipped: no chip of compute capability 9.0, or a build without its kernels");
        return None;
    }
    Some(context)
}

/// The integers of a row and their scale: the scale and the quotients are f32.
fn on_host(x: &[f64]) -> (Vec<f64>, f64) {
    let largest = x.iter().fold(0.0_f64, |largest, x| largest.max(x.abs())) as f32;
    let inverse = 127.0 / largest;
    if !inverse.is_finite() {
        return (vec![0.0; x.len()], f64::from(largest / 127.0));
    }
    let codes = x.iter().map(|&x| f64::from((x as f32 * inverse).round_ties_even())).collect();
    (codes, f64::from(largest / 127.0))
}

fn numbers(x: &[f64]) -> Vec<f64> {
    let (codes, scale) = on_host(x);
    codes.into_iter().map(|code| code * scale).collect()
}

fn check(context: &Arc<ComputeContext>, case: Case, tokens: &[usize]) {
    let product = Product {
        rounded: &|x, k| x.chunks(k).flat_map(numbers).collect(),
        // Sums of integers are exact: what is left are the roundings of three numbers of f32.
        error: &|_, size, _| size * 5e-7,
        most_flipped: &|_| 0.01,
        scale_rows: 1,
        multiply: &|x, weight, bias, epilogue, _, out| {
            assert!(is_prefill_int8_weight(weight.layout()), "{case:?}: not what it is for");
            linear_prefill_int8(context, x, weight, bias, epilogue, out)
        },
    };
    check_product(context, case, tokens, &product);
}

/// Tokens that fill a tile, a pair of tiles and a group of warps, and those that do not; rows of less than a
/// tile and of many, in_features of less than a stage and of many, whole and not.
#[test]
fn prompts_of_integers_on_cuda_are_products_of_the_numbers() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (scale, size) in [
            (DType::BF16, (24, 896)),
            (DType::F32, (8, 16)),
            (DType::F16, (264, 272)),
            (DType::BF16, (1000, 144)),
            (DType::F32, (136, 4112)),
        ] {
            for (epilogue, has_bias) in
                [(Epilogue::Store, false), (Epilogue::Store, true), (Epilogue::SwiGlu, false)]
            {
                let case = Case { dtype, format: format(scale), epilogue, has_bias, size };
                check(&context, case, &[1, 63, 64, 129, 300, 513]);
            }
        }
    }
}

/// Every shape of tiles, and more tiles than the chip holds at a time.
#[test]
fn prompts_of_integers_of_many_tiles_on_cuda() {
    let Some(context) = context() else { return };
    for (dtype, scale) in HALVES.into_iter().zip([DType::BF16, DType::F32]) {
        for (epilogue, size) in [
            (Epilogue::Store, (4096, 192)),
            (Epilogue::Store, (6144, 128)),
            (Epilogue::SwiGlu, (3072, 128)),
            (Epilogue::SwiGlu, (2056, 64)),
        ] {
            let case = Case { dtype, format: format(scale), epilogue, has_bias: false, size };
            check(&context, case, &[257, 384, 512, 640, 1100, 2048]);
        }
    }
}

/// The rows of a weight, and tokens: zeros, the largest numbers, and what is no number, which makes its own
/// token so and no other.
#[test]
fn integers_of_tokens_and_rows_on_cuda_are_those_of_the_host() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        let mut bench = Bench::new(&context, dtype, 9);
        let (n, k, num_tokens) = (40, 1040, 70);
        let (_, mut x) = bench.filled(&[num_tokens, k], 1.0, 0.0);
        x[..k].fill(0.0);
        x[k + 7] = if dtype == DType::BF16 { 2f64.powi(100) } else { 65_504.0 };
        x[2 * k..3 * k].fill(if dtype == DType::BF16 { 2f64.powi(-120) } else { 2f64.powi(-24) });
        if dtype == DType::BF16 {
            // Smaller than what f32 can invert.
            x[5 * k..6 * k].fill(2f64.powi(-124));
        }
        x[3 * k + 1000] = f64::NAN;
        x[4 * k] = f64::NEG_INFINITY;
        let tensor = bench.of(&[num_tokens, k], &x);
        let scale = |bytes: &[u8], start: usize, row: usize| {
            let at = start + row * 4;
            f64::from(f32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes")))
        };
        for is_gated in [false, true] {
            let format = format(DType::F32);
            let matrix = random_matrix(&mut bench.random, n, k, format, 1.0);
            let layout = TileLayout::new(n, k, format, is_gated).expect("a layout");
            let memory = upload_tiles(&mut bench, &layout, &matrix);
            let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
            let (tokens, rows) = integers(&context, &tensor, &weight).expect("the operator");
            let bytes = download(&context, tokens.words());
            for (token, x) in x.chunks_exact(k).enumerate() {
                let got: Vec<f64> =
                    bytes[token * k..(token + 1) * k].iter().map(|&b| f64::from(b as i8)).collect();
                let got_scale = scale(&bytes, tokens.scales_start(), token);
                if [3, 4].contains(&token) {
                    assert!(!got_scale.is_finite(), "{dtype} token {token}: {got_scale}");
                    continue;
                }
                let (codes, scale) = on_host(x);
                assert_eq!(got, codes, "{dtype} token {token}");
                assert!((got_scale - scale).abs() <= scale * 2e-7, "{dtype} {token}: {got_scale}");
            }
            let bytes = download(&context, rows.words());
            for tile in 0..layout.num_tiles() {
                for place in 0..16 {
                    let Some(row) = layout.row(tile, place) else { continue };
                    let at = tile * 16 + place;
                    let got: Vec<u8> =
                        bytes[at * k..(at + 1) * k].iter().map(|&b| b ^ 128).collect();
                    assert_eq!(got, matrix.codes[row * k..(row + 1) * k], "row {row}: {is_gated}");
                    let got = scale(&bytes, rows.scales_start(), at);
                    assert_eq!(got, f64::from(matrix.scales[row]), "row {row}: {is_gated}");
                }
            }
        }
    }
}

/// A product reads the rows of its own weight, though the kernel that makes them runs just before it.
#[test]
fn products_of_integers_that_follow_each_other_on_cuda_have_their_own_weights() {
    let Some(context) = context() else { return };
    let (n, k, num_tokens) = (512, 256, 257);
    let mut bench = Bench::new(&context, DType::BF16, 3);
    let layout = TileLayout::new(n, k, format(DType::F32), false).expect("a layout");
    let memories = [(); 3].map(|()| {
        let matrix = random_matrix(&mut bench.random, n, k, format(DType::F32), 1.0);
        upload_tiles(&mut bench, &layout, &matrix)
    });
    let (x, _) = bench.filled(&[num_tokens, k], 1.0, 0.0);
    let multiply = |weight: usize, out: &DeviceTensor| {
        let weight = QuantisedTiles::new(layout, &memories[weight]).expect("tiles");
        linear_prefill_int8(&context, &x, &weight, None, Epilogue::Store, out).expect("a product");
    };
    let out = bench.poisoned(&[num_tokens, n]);
    let want: Vec<Vec<f64>> = (0..memories.len())
        .map(|weight| {
            multiply(weight, &out);
            context.synchronize().expect("no fault");
            bench.read(&out)
        })
        .collect();
    assert!(want[0] != want[1] && want[1] != want[2]);
    let outs: Vec<DeviceTensor> = (0..24).map(|_| bench.poisoned(&[num_tokens, n])).collect();
    for round in 0..40 {
        outs.iter().enumerate().for_each(|(i, out)| multiply((i + round) % 3, out));
        context.synchronize().expect("no fault");
        for (i, out) in outs.iter().enumerate() {
            assert!(bench.read(out) == want[(i + round) % 3], "round {round}, product {i}");
        }
    }
}

#[test]
fn products_of_integers_that_no_kernel_serves_are_refused_on_cuda() {
    let Some(context) = context() else { return };
    let usual = format(DType::F32);
    let is_served = |n, k, format| {
        is_prefill_int8_weight(&TileLayout::new(n, k, format, false).expect("a layout"))
    };
    assert!(is_served(24, 256, usual));
    assert!(!is_served(23, 256, usual), "odd rows");
    assert!(!is_served(24, 264, usual), "odd inputs");
    assert!(!is_served(24, 200_000, usual), "sums that might not fit");
    assert!(!is_served(24, 256, QuantFormat { group_size: 128, ..usual }));
    assert!(!is_served(24, 256, QuantFormat { has_zeros: true, ..usual }));
    assert!(!is_served(24, 256, QuantFormat { code: Code::Int4, ..usual }));
    let mut bench = Bench::new(&context, DType::BF16, 1);
    let matrix = random_matrix(&mut bench.random, 24, 256, usual, 1.0);
    let layout = TileLayout::new(24, 256, usual, false).expect("a layout");
    let memory = upload_tiles(&mut bench, &layout, &matrix);
    let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
    for (k, n, epilogue, is_right) in [
        (256, 24, Epilogue::Store, true),
        (256, 24, Epilogue::AddResidual, false),
        (256, 12, Epilogue::SwiGlu, false),
        (240, 24, Epilogue::Store, false),
        (256, 16, Epilogue::Store, false),
    ] {
        let (x, _) = bench.filled(&[2, k], 1.0, 0.0);
        let out = bench.poisoned(&[2, n]);
        let done = linear_prefill_int8(&context, &x, &weight, None, epilogue, &out);
        assert_eq!(done.is_ok(), is_right, "{k} {n} {epilogue:?}");
    }
    context.synchronize().expect("no fault");
}
