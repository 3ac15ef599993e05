//! Up to 128 tokens on Hopper, against products in f64 that are rounded where Transformers rounds.

use std::sync::Arc;

use crate::support::device::{assert_rounded, cuda_context, last_place, round, Bench, HALVES};
use crate::support::rounded;
use xserv::backend::ComputeContext;
use xserv::memory::DType;
use xserv::ops::linear::cuda_skinny::{
    has_linear_skinny, is_skinny_weight, linear_skinny, SKINNY_TOKENS,
};
use xserv::ops::linear::Epilogue;

/// Columns of the result and in_features: k in one part, in two and in four, whole stages and not;
/// more tiles than a chip has blocks.
const SIZES: [(usize, usize); 6] =
    [(72, 320), (200, 1088), (64, 2048), (1024, 2048), (8200, 128), (136, 64)];
/// Weights that are large enough for tiles of any number of rows: with k in one part and in two, a
/// stage that is not whole, and several tiles for each block.
const LARGE: [(usize, usize); 6] =
    [(1152, 8192), (2600, 4160), (4616, 2048), (7168, 1280), (10_240, 896), (35_000, 320)];
/// For each number of columns of a tile one that fills it and one that does not.
const TOKENS: [usize; 9] = [1, 5, 16, 17, 33, 64, 70, 97, SKINNY_TOKENS];

/// Returns the result of one token, and how far each element may be off.
fn reference(
    (dtype, result): (DType, Epilogue),
    weight: &[f64],
    bias: Option<&[f64]>,
    x: &[f64],
    before: &[f64],
) -> Vec<(f64, f64)> {
    let n = before.len();
    let round = |value| round(dtype, value);
    // The tolerance of f32 before the roundings.
    let product = |i: usize| {
        let terms = || x.iter().zip(&weight[i * x.len()..]).map(|(a, b)| a * b);
        (terms().sum::<f64>(), 2e-6 * terms().map(f64::abs).sum::<f64>())
    };
    let place = |value: f64| last_place(dtype) * value.abs() + 1e-7;
    let one = |i: usize| {
        let (value, error) = product(i);
        let value = value + bias.map_or(0.0, |bias| bias[i]);
        match result {
            Epilogue::Store => (round(value), error + place(value)),
            Epilogue::AddResidual => {
                let sum = before[i] + round(value);
                (round(sum), error + place(value) + place(sum))
            }
            Epilogue::SwiGlu => {
                let (up, up_error) = product(n + i);
                let (gate, up) = (round(value), round(up));
                let want = rounded::silu_mul(dtype, gate, up);
                // The slope of silu is at most 1.1, and three roundings may each fall the other
                // way.
                let silu = gate / (1.0 + (-gate).exp());
                let error = 1.1 * error * up.abs() + up_error * silu.abs();
                // That of the gate matters as much as silu does, which may be less than the gate.
                let of_gate = 1.1 * place(gate) * up.abs();
                (want, error + of_gate + 3.0 * place(want))
            }
        }
    };
    (0..n).map(one).collect()
}

fn check(
    context: &Arc<ComputeContext>,
    dtype: DType,
    (result, has_bias): (Epilogue, bool),
    (n, k): (usize, usize),
    tokens: &[usize],
) {
    let mut bench = Bench::with_room(context, dtype, (n + k) as u64, 256 << 20);
    let rows = if result == Epilogue::SwiGlu { 2 * n } else { n };
    let (weight, weight_values) = bench.filled(&[rows, k], 3.0 / (k as f64).sqrt(), 0.0);
    let most = tokens.iter().copied().max().expect("one");
    let (_, x_values) = bench.filled(&[most, k], 1.0, 0.0);
    let (_, before) = bench.filled(&[most, n], 1.0, 0.0);
    let (bias, bias_values) = bench.filled(&[n], 2.0, 0.0);
    let biases = has_bias.then_some(&bias_values[..]);
    assert!(is_skinny_weight(&weight, result), "{n} x {k}: not what it is for");
    let want: Vec<(f64, f64)> = x_values
        .chunks_exact(k)
        .zip(before.chunks_exact(n))
        .flat_map(|(x, before)| reference((dtype, result), &weight_values, biases, x, before))
        .collect();
    let mut alone = Vec::new();
    for &num_tokens in tokens {
        for is_fixed in [false, true] {
            let what = format!(
                "{dtype} {result:?} {num_tokens} x {n} x {k}, bias: {has_bias}, fixed: {is_fixed}"
            );
            let x = bench.of(&[num_tokens, k], &x_values[..num_tokens * k]);
            // Rows after the result, which stay as they are.
            let mut start = before[..num_tokens * n].to_vec();
            start.resize((num_tokens + 16) * n, 7.0);
            let all = bench.of(&[num_tokens + 16, n], &start);
            let out = all.view(0, &[num_tokens, n], None).expect("a view");
            let bias = has_bias.then_some(&*bias);
            linear_skinny(context, &x, &weight, bias, result, is_fixed, &out)
                .expect("the operator");
            context.synchronize().expect("no fault");
            let mut got = bench.read(&all);
            let guard = got.split_off(num_tokens * n);
            assert!(guard.iter().all(|&x| x == 7.0), "{what}: rows behind the result");
            assert_rounded(&what, dtype, &got, &want[..num_tokens * n], 0.02);
            // The first token has the same bits beside any others.
            if is_fixed {
                let first = got[..n].to_vec();
                assert!(alone.is_empty() || alone == first, "{what}: other bits than alone");
                alone = first;
            }
        }
    }
}

#[test]
fn products_of_up_to_128_tokens_on_cuda_are_rounded_as_in_transformers() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_skinny(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for dtype in HALVES {
        for result in [Epilogue::Store, Epilogue::AddResidual, Epilogue::SwiGlu] {
            for sizes in SIZES {
                check(&context, dtype, (result, false), sizes, &TOKENS);
            }
        }
        for sizes in SIZES {
            check(&context, dtype, (Epilogue::Store, true), sizes, &TOKENS);
        }
        for sizes in LARGE {
            check(&context, dtype, (Epilogue::Store, true), sizes, &[1, 16, 20]);
            check(&context, dtype, (Epilogue::AddResidual, false), sizes, &[1, 16, 20]);
            // Sums of long rows fall to the other side of many of its three roundings.
            if sizes.1 <= 1280 {
                check(&context, dtype, (Epilogue::SwiGlu, false), sizes, &[1, 16, 20]);
            }
        }
        check(&context, dtype, (Epilogue::AddResidual, false), (7168, 1280), &[40, 70, 100]);
        // Long rows, whose parts many tokens divide otherwise, and as many rows as a vocabulary
        // has.
        check(&context, dtype, (Epilogue::AddResidual, false), (72, 8192), &[1, 16, SKINNY_TOKENS]);
        check(&context, dtype, (Epilogue::Store, true), (98_312, 64), &[1, 17, SKINNY_TOKENS]);
        // A gate and up whose last wave of large tiles would leave the chip idle.
        let tokens = [5, 33, 64, 70, 96, SKINNY_TOKENS];
        check(&context, dtype, (Epilogue::SwiGlu, false), (14_336, 64), &tokens);
    }
}

#[test]
fn what_no_kernel_serves_is_refused_on_cuda() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_skinny(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    let mut bench = Bench::new(&context, DType::BF16, 1);
    let mut is_served = |num_tokens, n, k| {
        let (x, _) = bench.filled(&[num_tokens, k], 1.0, 0.0);
        let (weight, _) = bench.filled(&[n, k], 1.0, 0.0);
        let out = bench.poisoned(&[num_tokens, n]);
        linear_skinny(&context, &x, &weight, None, Epilogue::Store, false, &out).is_ok()
    };
    assert!(is_served(2, 64, 128));
    assert!(!is_served(SKINNY_TOKENS + 1, 64, 128));
    assert!(!is_served(2, 64, 96));
    assert!(!is_served(2, 60, 128));
    context.synchronize().expect("no fault");
}
