//! Products of one token with quantised weights on Hopper, whose inputs become integers unless the weights
//! are floats, against products in f64 of the same integers, or of the inputs, with the exact numbers of the
//! weights, rounded where Transformers rounds.

use std::sync::Arc;

use super::quantised::{check_product, context, Case, Product};
use crate::support::device::{Bench, HALVES};
use crate::support::rounded;
use xserv::backend::{ComputeContext, DeviceTensor};
use xserv::memory::{DType, Tensor};
use xserv::ops::linear::cuda_quantised_one::{has_quantised_one, linear_quantised_one};
use xserv::ops::linear::Epilogue;
use xserv::ops::quantised::cuda::QuantisedTiles;
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat};

const EPILOGUES: [Epilogue; 3] = [Epilogue::Store, Epilogue::AddResidual, Epilogue::SwiGlu];
const ROW: usize = usize::MAX;
pub const EPS: f32 = 1e-5;

/// Rounds the inputs to multiples of a power of two, of which the largest of 128 inputs is from 8192 up to
/// 16384.
fn in_integers(x: &[f64], k: usize) -> Vec<f64> {
    let rounded = |part: &[f64]| -> Vec<f64> {
        let largest = part.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        let unit = (largest.max(f64::MIN_POSITIVE).log2().floor() - 13.0).exp2();
        part.iter().map(|x| (x / unit).round_ties_even() * unit).collect()
    };
    x.chunks(k).flat_map(|row| row.chunks(128).flat_map(rounded)).collect()
}

fn layout(case: Case) -> TileLayout {
    let is_gated = case.epilogue == Epilogue::SwiGlu;
    let rows = case.size.0 * if is_gated { 2 } else { 1 };
    TileLayout::new(rows, case.size.1, case.format, is_gated).expect("a layout")
}

/// Compares the product of one token with that in f64, if a kernel serves it, and says so.
pub fn check_one(
    context: &Arc<ComputeContext>,
    case: Case,
    norm: Option<(&DeviceTensor, &[f64])>,
) -> bool {
    if !has_quantised_one(context, &layout(case)).unwrap() {
        return false;
    }
    let multiply = |x: &DeviceTensor,
                    weight: &QuantisedTiles<'_>,
                    bias: Option<&Tensor>,
                    epilogue,
                    _,
                    out: &DeviceTensor| {
        let norm = norm.map(|(norm, _)| (&**norm, EPS));
        linear_quantised_one(context, x, norm, weight, bias, epilogue, out)
    };
    let in_integers = |x: &[f64], k: usize| {
        if case.format.code.is_float() {
            x.to_vec()
        } else {
            in_integers(x, k)
        }
    };
    let product = Product {
        rounded: &|x, k| match norm {
            None => in_integers(x, k),
            Some((_, norm)) => {
                let rows = x.chunks(k);
                let normed = rows.flat_map(|row| rounded::rms_norm(case.dtype, row, norm, EPS));
                in_integers(&normed.collect::<Vec<f64>>(), k)
            }
        },
        // A norm in f32 rounds some inputs the other way.
        error: &|k, size, root| {
            let flips = if norm.is_some() { root * last_bits(case.dtype) } else { 0.0 };
            size * 2e-7 * (k as f64).log2() + flips
        },
        most_flipped: &|_| if norm.is_some() { 0.2 } else { 0.03 },
        scale_rows: 1,
        multiply: &multiply,
    };
    check_product(context, case, &[1], &product);
    true
}

pub fn last_bits(dtype: DType) -> f64 {
    if dtype == DType::BF16 {
        2f64.powi(-8)
    } else {
        2f64.powi(-11)
    }
}

#[test]
fn products_of_one_token_are_normalised_first() {
    let Some(context) = context() else { return };
    let mut served = 0;
    for dtype in HALVES {
        for (code, group_size, scale, size) in [
            (Code::Int4, 128, DType::F16, (136, 4096)),
            (Code::Int4, 64, DType::BF16, (24, 1544)),
            (Code::Int4, 32, DType::F32, (6144, 1024)),
            (Code::Int8, ROW, DType::F32, (1003, 264)),
            (Code::Int8, 128, DType::BF16, (40, 8)),
            (Code::Int8, 96, DType::F16, (24, 12_288)),
            (Code::Int4, 256, DType::F16, (2200, 2560)),
            (Code::Fp8, 128, DType::F32, (136, 4096)),
            (Code::Fp8, ROW, DType::BF16, (24, 1544)),
            (Code::Fp8, 256, DType::F16, (6144, 1024)),
        ] {
            let mut bench = Bench::with_room(&context, dtype, size.1 as u64, 1 << 20);
            let (norm, norm_values) = bench.filled(&[size.1], 2.0, 0.0);
            for epilogue in EPILOGUES {
                let has_bias = epilogue == Epilogue::Store;
                let has_zeros = code == Code::Int4;
                let format =
                    QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: false };
                let case = Case { dtype, format, epilogue, has_bias, size };
                served += usize::from(check_one(&context, case, Some((&norm, &norm_values))));
            }
        }
    }
    println!("{served} of 60 products have the kernel for one token");
}

/// The largest and the smallest inputs, and none at all: what is no number is not hidden.
#[test]
fn products_of_one_token_take_inputs_of_any_size() {
    let Some(context) = context() else { return };
    let (n, k) = (16, 512);
    for (dtype, code) in HALVES.iter().flat_map(|&d| [Code::Int4, Code::Fp8].map(|code| (d, code)))
    {
        let format = QuantFormat {
            code,
            group_size: 128,
            has_zeros: !code.is_float(),
            scale: DType::F32,
            quantises_inputs: false,
        };
        let mut bench = Bench::with_room(&context, dtype, 7, 1 << 20);
        let matrix = crate::quantised::random_matrix(&mut bench.random, n, k, format, 1e-3);
        let layout = TileLayout::new(n, k, format, false).expect("a layout");
        if !has_quantised_one(&context, &layout).unwrap() {
            println!("skipped: not a chip that has the kernel");
            return;
        }
        let memory = crate::quantised::upload_tiles(&mut bench, &layout, &matrix);
        let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
        let mut product = |x: &[f64]| {
            let x = bench.of(&[1, k], x);
            let out = bench.poisoned(&[1, n]);
            linear_quantised_one(&context, &x, None, &weight, None, Epilogue::Store, &out)
                .expect("the operator");
            context.synchronize().expect("no fault");
            bench.read(&out)
        };
        assert!(product(&vec![0.0; k]).iter().all(|&y| y == 0.0));
        let mut x = vec![1.0; k];
        let sizes = if dtype == DType::BF16 { [1e30, 1e-30] } else { [3e4, 1e-6] };
        for (part, size) in sizes.into_iter().enumerate() {
            x[200 + part * 128] = size;
        }
        assert!(product(&x).iter().all(|y| y.is_finite()));
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            x[300] = bad;
            assert!(product(&x).iter().all(|y| !y.is_finite()), "{bad} was hidden from {code:?}");
        }
    }
}
