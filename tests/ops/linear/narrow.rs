//! Up to 8 tokens of a narrow model on Hopper, with the norm in front and what follows the product,
//! against plain loops.

use super::fused::{Fused, EPS};
use crate::support::device::{cuda_context, Bench, HALVES};
use xserv::ops::linear::cuda_narrow::{
    has_linear_narrow, linear_narrow, max_narrow_tokens, NARROW_TOKENS,
};
use xserv::ops::linear::Epilogue;

/// A product p is rounded to the other side now and then, which is up to 2 |p| units, and the
/// result by one of its own; here p is often larger than the result.
const FUSED: Fused =
    Fused { linear: linear_narrow, max_tokens: max_narrow_tokens, added_units: 4.0 };

/// out_features and in_features: one warp and sixteen, steps and rows of a tile that do not exist, tiles of 8
/// rows and of 16, blocks with one tile and with several.
const NORMED: [(usize, usize); 12] = [
    (72, 1024),
    (4104, 1024),
    (37, 896),
    (3, 64),
    (2051, 1536),
    (2200, 32),
    (1001, 1920),
    (9000, 96),
    (130, 2048),
    (5000, 2016),
    (200, 4096),
    (2130, 2560),
];
/// One pass over in_features and several.
const ADDED: [(usize, usize); 9] = [
    (896, 896),
    (5, 64),
    (2051, 1536),
    (1024, 3072),
    (2200, 2080),
    (100, 7040),
    (2130, 4864),
    (66, 18_944),
    (2113, 8192),
];

#[test]
fn products_of_narrow_models_on_cuda() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_narrow(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for dtype in HALVES {
        for num_tokens in [1, 2, 5, NARROW_TOKENS] {
            for sizes in NORMED {
                for has_bias in [false, true] {
                    FUSED.check(&context, dtype, num_tokens, (Epilogue::Store, has_bias), sizes);
                }
                FUSED.check(&context, dtype, num_tokens, (Epilogue::SwiGlu, false), sizes);
            }
            for sizes in ADDED {
                FUSED.check(&context, dtype, num_tokens, (Epilogue::AddResidual, false), sizes);
            }
        }
        // Products that no kernel serves are refused.
        let mut bench = Bench::new(&context, dtype, 1);
        let mut is_served = |num_tokens, k, has_norm: bool, result, has_bias: bool| {
            let (x, _) = bench.filled(&[num_tokens, k], 1.0, 0.0);
            let (norm, _) = bench.filled(&[k], 1.0, 0.0);
            let (weight, _) = bench.filled(&[32, k], 1.0, 0.0);
            let out = bench.poisoned(&[num_tokens, 32]);
            let norm = has_norm.then_some((&*norm, EPS));
            let (bias, _) = bench.filled(&[32], 1.0, 0.0);
            let bias = has_bias.then_some(&*bias);
            linear_narrow(&context, &x, norm, &weight, bias, result, &out).is_ok()
        };
        assert!(is_served(8, 1024, true, Epilogue::Store, true));
        assert!(!is_served(9, 1024, true, Epilogue::Store, false));
        assert!(!is_served(9, 1024, false, Epilogue::AddResidual, false));
        assert!(!is_served(8, 4160, true, Epilogue::Store, false));
        assert!(!is_served(1, 1000, true, Epilogue::Store, false));
        assert!(!is_served(1, 1024, false, Epilogue::Store, false));
        assert!(!is_served(1, 1024, true, Epilogue::AddResidual, false));
        assert!(!is_served(1, 1024, false, Epilogue::AddResidual, true));
        context.synchronize().expect("no fault");
    }
}
