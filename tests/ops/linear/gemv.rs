//! One and two tokens on Hopper, with the norm in front and what follows the product, against plain
//! loops.

use super::fused::{Fused, EPS};
use crate::support::device::{cuda_context, Bench, HALVES};
use xserv::ops::linear::cuda_gemv::{has_linear_gemv, linear_gemv, max_gemv_tokens, GEMV_TOKENS};
use xserv::ops::linear::Epilogue;

const FUSED: Fused = Fused { linear: linear_gemv, max_tokens: max_gemv_tokens, added_units: 2.0 };

/// out_features and in_features. Rows that a thread has in one, two, three or four steps; fewer outputs
/// than a chip has blocks and more; a last tile that is not whole.
const NORMED: [(usize, usize); 6] =
    [(72, 1024), (4104, 1024), (1000, 2560), (200, 4096), (1050, 4096), (2052, 512)];
const ADDED: [(usize, usize); 11] = [
    (72, 2048),
    (2100, 2048),
    (1024, 3072),
    (4100, 1024),
    (1050, 4096),
    (525, 4608),
    (525, 8192),
    (100, 12_288),
    (525, 12_288),
    (100, 14_336),
    (525, 14_336),
];

/// Sizes for one token that are not multiples of what threads have: every number of steps, rows that
/// end within a thread's steps and within a warp, fewer outputs than blocks and several tiles of each.
const NORMED_ALONE: [(usize, usize); 11] = [
    (37, 896),
    (3, 40),
    (2051, 1536),
    (300, 1000),
    (4500, 1920),
    (2057, 2560),
    (1000, 3584),
    (70, 5120),
    (1601, 5128),
    (130, 9216),
    (33, 16_384),
];
const ADDED_ALONE: [(usize, usize); 14] = [
    (896, 896),
    (5, 72),
    (2051, 1536),
    (2560, 4864),
    (100, 7040),
    (2561, 9728),
    (99, 11_008),
    (50, 13_696),
    (1000, 17_408),
    (80, 17_920),
    (500, 18_944),
    (33, 25_600),
    (66, 27_648),
    (2, 32_768),
];

#[test]
fn products_of_few_tokens_on_cuda() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_gemv(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for dtype in HALVES {
        for num_tokens in 1..=GEMV_TOKENS {
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
        for sizes in NORMED_ALONE {
            for has_bias in [false, true] {
                FUSED.check(&context, dtype, 1, (Epilogue::Store, has_bias), sizes);
            }
            FUSED.check(&context, dtype, 1, (Epilogue::SwiGlu, false), sizes);
        }
        for sizes in ADDED_ALONE {
            FUSED.check(&context, dtype, 1, (Epilogue::AddResidual, false), sizes);
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
            linear_gemv(&context, &x, norm, &weight, bias, result, &out).is_ok()
        };
        assert!(is_served(1, 1024, true, Epilogue::Store, true));
        assert!(!is_served(3, 1024, true, Epilogue::Store, false));
        assert!(is_served(1, 1000, true, Epilogue::Store, false));
        assert!(!is_served(2, 1000, true, Epilogue::Store, false));
        assert!(!is_served(1, 1004, true, Epilogue::Store, false));
        assert!(!is_served(1, 16_640, true, Epilogue::Store, false));
        assert!(is_served(1, 16_640, false, Epilogue::AddResidual, false));
        assert!(!is_served(1, 33_024, false, Epilogue::AddResidual, false));
        assert!(!is_served(1, 1024, false, Epilogue::Store, false));
        assert!(!is_served(1, 1024, true, Epilogue::AddResidual, false));
        assert!(is_served(1, 1024, false, Epilogue::AddResidual, false));
        assert!(!is_served(1, 1024, false, Epilogue::AddResidual, true));
        context.synchronize().expect("no fault");
    }
}
