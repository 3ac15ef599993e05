//! Up to 8 tokens of a narrow model on Hopper and weights of 4 or 8 bits, with the norm in front and what
//! follows the product, against products in f64 with the exact numbers of the weights, rounded where
//! Transformers rounds.

use super::quantised::{check_product, Case, Product};
use super::quantised_one::{last_bits, EPS};
use crate::quantised::{random_matrix, upload_tiles};
use crate::support::device::{cuda_context, Bench, HALVES};
use crate::support::rounded;
use std::sync::Arc;
use xserv::backend::ComputeContext;
use xserv::memory::DType;
use xserv::ops::linear::cuda_narrow::{has_linear_narrow, NARROW_TOKENS};
use xserv::ops::linear::cuda_narrow_quantised::{
    linear_narrow_quantised, max_narrow_quantised_tokens,
};
use xserv::ops::linear::Epilogue;
use xserv::ops::quantised::cuda::QuantisedTiles;
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat};

const ROW: usize = usize::MAX;

fn context() -> Option<Arc<ComputeContext>> {
    let context = cuda_context()?;
    if !has_linear_narrow(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return None;
    }
    Some(context)
}

fn format(code: Code, group_size: usize, has_zeros: bool, scale: DType) -> QuantFormat {
    QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: false }
}

/// FP8 whose activations become FP8 for more tokens.
fn fp8(group_size: usize, scale: DType) -> QuantFormat {
    QuantFormat { quantises_inputs: true, ..format(Code::Fp8, group_size, false, scale) }
}

/// Compares products of several numbers of tokens with those in f64.
fn check(context: &Arc<ComputeContext>, case: Case) {
    let Case { dtype, format, epilogue, size: (n, k), .. } = case;
    let is_gated = epilogue == Epilogue::SwiGlu;
    let rows = if is_gated { 2 * n } else { n };
    let layout = TileLayout::new(rows, k, format, is_gated).expect("a layout");
    assert_eq!(max_narrow_quantised_tokens(&layout, epilogue), NARROW_TOKENS, "{case:?}");
    let mut bench = Bench::with_room(context, dtype, k as u64, 1 << 20);
    let (norm, norm_values) = bench.filled(&[k], 2.0, 0.0);
    let has_norm = epilogue != Epilogue::AddResidual;
    let product = Product {
        rounded: &|x, k| match has_norm {
            false => x.to_vec(),
            true => x
                .chunks(k)
                .flat_map(|row| rounded::rms_norm(dtype, row, &norm_values, EPS))
                .collect(),
        },
        // A norm in f32 rounds some inputs the other way.
        error: &|k, size, root| {
            let flips = if has_norm { root * last_bits(dtype) } else { 0.0 };
            size * 2e-7 * (k as f64).log2() + flips
        },
        most_flipped: &|_| if has_norm { 0.3 } else { 0.03 },
        scale_rows: 1,
        multiply: &|x, weight, bias, epilogue, _, out| {
            let norm = has_norm.then_some((&*norm, EPS));
            linear_narrow_quantised(context, x, norm, weight, bias, epilogue, out)
        },
    };
    check_product(context, case, &[1, 2, 5, NARROW_TOKENS], &product);
}

/// One warp and sixteen, chunks and rows of a tile that do not exist, groups that end within a chunk,
/// blocks with one tile and with several.
#[test]
fn products_of_narrow_models_with_quantised_weights_on_cuda() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (code, group_size, has_zeros, scale, size) in [
            (Code::Int4, 128, false, DType::F16, (72, 1024)),
            (Code::Int4, 128, true, DType::BF16, (4104, 1024)),
            (Code::Int4, 32, true, DType::F32, (37, 896)),
            (Code::Int4, 64, false, DType::BF16, (3, 64)),
            (Code::Int4, ROW, true, DType::F32, (2051, 1544)),
            (Code::Int4, 96, false, DType::F16, (130, 2048)),
            (Code::Int8, 128, false, DType::F32, (9000, 96)),
            (Code::Int8, 128, true, DType::BF16, (1003, 1920)),
            (Code::Int8, 32, false, DType::F16, (200, 4096)),
            (Code::Int8, ROW, true, DType::F32, (40, 8)),
            (Code::Fp8, 128, false, DType::F32, (2130, 2056)),
            (Code::Fp8, ROW, false, DType::BF16, (24, 1544)),
            (Code::Fp8, 32, false, DType::F32, (520, 1000)),
            (Code::Fp8, 64, false, DType::BF16, (33, 1024)),
        ] {
            let format = format(code, group_size, has_zeros, scale);
            for has_bias in [false, true] {
                let epilogue = Epilogue::Store;
                check(&context, Case { dtype, format, epilogue, has_bias, size });
            }
            let epilogue = Epilogue::SwiGlu;
            check(&context, Case { dtype, format, epilogue, has_bias: false, size });
        }
        // One pass over in_features and several.
        for (code, group_size, has_zeros, scale, size) in [
            (Code::Int4, 128, false, DType::F16, (1024, 3072)),
            (Code::Int4, 128, true, DType::BF16, (66, 8192)),
            (Code::Int4, 32, true, DType::F32, (5, 64)),
            (Code::Int8, 128, false, DType::F32, (2113, 4864)),
            (Code::Int8, ROW, true, DType::F16, (100, 7048)),
            (Code::Fp8, 64, false, DType::F32, (896, 896)),
            (Code::Fp8, ROW, false, DType::F32, (24, 18_944)),
        ] {
            let (format, epilogue) =
                (format(code, group_size, has_zeros, scale), Epilogue::AddResidual);
            check(&context, Case { dtype, format, epilogue, has_bias: false, size });
        }
    }
}

/// The same where activations become FP8 for more tokens: inputs of a part of a step, of whole steps and of several
/// passes.
#[test]
fn products_of_narrow_models_in_fp8_on_cuda() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (group_size, scale, size) in [
            (128, DType::F32, (72, 1024)),
            (128, DType::BF16, (4104, 2048)),
            (256, DType::F16, (37, 904)),
            (ROW, DType::F32, (1003, 1544)),
            (ROW, DType::BF16, (24, 8)),
            (128, DType::BF16, (130, 4096)),
        ] {
            let format = fp8(group_size, scale);
            for (epilogue, has_bias) in [
                (Epilogue::Store, false),
                (Epilogue::Store, true),
                (Epilogue::SwiGlu, false),
                (Epilogue::AddResidual, false),
            ] {
                check(&context, Case { dtype, format, epilogue, has_bias, size });
            }
        }
        for (group_size, scale, size) in [
            (128, DType::F32, (1024, 3072)),
            (ROW, DType::BF16, (66, 8192)),
            (384, DType::F32, (5, 18_944)),
            (128, DType::BF16, (2113, 6152)),
        ] {
            let (format, epilogue) = (fp8(group_size, scale), Epilogue::AddResidual);
            check(&context, Case { dtype, format, epilogue, has_bias: false, size });
        }
    }
}

#[test]
fn quantised_products_of_narrow_models_that_no_kernel_serves_are_refused_on_cuda() {
    let Some(context) = context() else { return };
    let mut bench = Bench::with_room(&context, DType::BF16, 1, 8 << 20);
    let mut is_served = |num_tokens: usize, k: usize, has_norm: bool, epilogue, has_bias: bool| {
        let format = format(Code::Int4, 128, false, DType::F16);
        let layout = TileLayout::new(32, k, format, false).expect("a layout");
        let matrix = random_matrix(&mut bench.random, 32, k, format, 0.1);
        let memory = upload_tiles(&mut bench, &layout, &matrix);
        let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
        let (x, _) = bench.filled(&[num_tokens, k], 1.0, 0.0);
        let (norm, _) = bench.filled(&[k], 1.0, 0.0);
        let (bias, _) = bench.filled(&[32], 1.0, 0.0);
        let out = bench.poisoned(&[num_tokens, 32]);
        let (norm, bias) = (has_norm.then_some((&*norm, EPS)), has_bias.then_some(&*bias));
        linear_narrow_quantised(&context, &x, norm, &weight, bias, epilogue, &out).is_ok()
    };
    assert!(is_served(8, 1024, true, Epilogue::Store, true));
    assert!(!is_served(NARROW_TOKENS + 1, 1024, true, Epilogue::Store, false));
    assert!(!is_served(NARROW_TOKENS + 1, 1024, false, Epilogue::AddResidual, false));
    assert!(!is_served(8, 4160, true, Epilogue::Store, false));
    assert!(!is_served(1, 1028, true, Epilogue::Store, false));
    assert!(!is_served(1, 1024, false, Epilogue::Store, false));
    assert!(!is_served(1, 1024, true, Epilogue::AddResidual, false));
    assert!(!is_served(1, 1024, false, Epilogue::AddResidual, true));
    assert!(!is_served(1, 1024, true, Epilogue::SwiGlu, false));
    context.synchronize().expect("no fault");
}
