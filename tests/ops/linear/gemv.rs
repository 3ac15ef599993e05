//! One and two tokens on Hopper, with the norm in front and what follows the product, against plain
//! loops.

use std::sync::Arc;

use crate::support::device::{assert_near, cuda_context, product, round, unit, Bench, HALVES};
use crate::support::rounded;
use xserv::backend::ComputeContext;
use xserv::memory::DType;
use xserv::ops::linear::cuda_gemv::{has_linear_gemv, linear_gemv, max_gemv_tokens, GEMV_TOKENS};
use xserv::ops::linear::Epilogue;

const EPS: f32 = 1e-6;

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

fn check(
    context: &Arc<ComputeContext>,
    dtype: DType,
    num_tokens: usize,
    (result, has_bias): (Epilogue, bool),
    (n, k): (usize, usize),
) {
    let what = format!("{dtype} {result:?} {num_tokens} x {n} x {k}, bias: {has_bias}");
    let mut bench = Bench::new(context, dtype, (n + k) as u64);
    let rows = if result == Epilogue::SwiGlu { 2 * n } else { n };
    let (norm, norm_values) = bench.filled(&[k], 0.3, 1.0);
    let (weight, weight_values) = bench.filled(&[rows, k], 0.05, 0.0);
    let (bias, bias_values) = bench.filled(&[n], 2.0, 0.0);
    let has_norm = result != Epilogue::AddResidual;
    let (_, x_values) = bench.filled(&[num_tokens, k], if has_norm { 3.0 } else { 1.0 }, 0.0);
    let (_, before) = bench.filled(&[num_tokens, n], 1.0, 0.0);
    assert!(max_gemv_tokens(&weight, result) >= num_tokens, "{what}: not what it is for");

    // One row more than the tokens have, which stays as it is.
    let mut run = |x: &[f64], before: &[f64]| {
        let x = bench.of(&[num_tokens, k], x);
        let guard = vec![7.0; n];
        let all = bench.of(&[num_tokens + 1, n], &[before, &guard].concat());
        let out = all.view(0, &[num_tokens, n], None).expect("a view");
        let norm = has_norm.then_some((&*norm, EPS));
        let bias = has_bias.then_some(&*bias);
        linear_gemv(context, &x, norm, &weight, bias, result, &out).expect("the operator");
        let mut got = bench.read(&all);
        assert_eq!(got.split_off(num_tokens * n), guard, "{what}: the row behind the result");
        got
    };
    let got = run(&x_values, &before);
    let (mut want, mut bar) = (Vec::new(), 2.0 * unit(dtype));
    for (x, before) in x_values.chunks_exact(k).zip(before.chunks_exact(n)) {
        let h = match has_norm {
            true => rounded::rms_norm(dtype, x, &norm_values, EPS),
            false => x.to_vec(),
        };
        want.extend((0..n).map(|i| {
            let value = product(&weight_values, i, &h);
            match result {
                Epilogue::Store if has_bias => value + bias_values[i],
                Epilogue::Store => value,
                Epilogue::AddResidual => before[i] + round(dtype, value),
                Epilogue::SwiGlu => {
                    let up = round(dtype, product(&weight_values, n + i, &h));
                    rounded::silu_mul(dtype, round(dtype, value), up)
                }
            }
        }));
    }
    if result == Epilogue::SwiGlu {
        bar = 6.0 * unit(dtype);
    }
    assert_near(&what, &got, &want, bar);

    // Another order of the tokens: the same bits in that order.
    let swapped = |values: &[f64], width: usize| -> Vec<f64> {
        values.chunks_exact(width).rev().flatten().copied().collect()
    };
    let again = run(&swapped(&x_values, k), &swapped(&before, n));
    assert_eq!(again, swapped(&got, n), "{what}: in another order other bits");
}

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
                    check(&context, dtype, num_tokens, (Epilogue::Store, has_bias), sizes);
                }
                check(&context, dtype, num_tokens, (Epilogue::SwiGlu, false), sizes);
            }
            for sizes in ADDED {
                check(&context, dtype, num_tokens, (Epilogue::AddResidual, false), sizes);
            }
        }
        for sizes in NORMED_ALONE {
            for has_bias in [false, true] {
                check(&context, dtype, 1, (Epilogue::Store, has_bias), sizes);
            }
            check(&context, dtype, 1, (Epilogue::SwiGlu, false), sizes);
        }
        for sizes in ADDED_ALONE {
            check(&context, dtype, 1, (Epilogue::AddResidual, false), sizes);
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
