//! Products of few tokens on a device, with the norm in front and what follows the product, against plain
//! loops.

use std::sync::Arc;

use crate::support::device::{assert_near, product, round, unit, Bench};
use crate::support::rounded;
use xserv::backend::ComputeContext;
use xserv::error::Result;
use xserv::memory::{DType, Tensor};
use xserv::ops::linear::Epilogue;

pub const EPS: f32 = 1e-6;

/// context, x, norm, weight, bias, result, out
type Linear = fn(
    &ComputeContext,
    &Tensor,
    Option<(&Tensor, f32)>,
    &Tensor,
    Option<&Tensor>,
    Epilogue,
    &Tensor,
) -> Result<()>;

/// The operator, and the most tokens that it serves with a weight.
pub struct Fused {
    pub linear: Linear,
    pub max_tokens: fn(&Tensor, Epilogue) -> usize,
    /// How many units of the result what is added to a residual may be off.
    pub added_units: f64,
}

impl Fused {
    pub fn check(
        &self,
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
        assert!((self.max_tokens)(&weight, result) >= num_tokens, "{what}: not what it is for");

        // One row more than the tokens have, which stays as it is.
        let mut run = |x: &[f64], before: &[f64]| {
            let x = bench.of(&[num_tokens, k], x);
            let guard = vec![7.0; n];
            let all = bench.of(&[num_tokens + 1, n], &[before, &guard].concat());
            let out = all.view(0, &[num_tokens, n], None).expect("a view");
            let norm = has_norm.then_some((&*norm, EPS));
            let bias = has_bias.then_some(&*bias);
            (self.linear)(context, &x, norm, &weight, bias, result, &out).expect("the operator");
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
        match result {
            Epilogue::Store => {}
            Epilogue::AddResidual => bar = self.added_units * unit(dtype),
            Epilogue::SwiGlu => bar = 6.0 * unit(dtype),
        }
        assert_near(&what, &got, &want, bar);

        // Another order of the tokens: the same bits in that order.
        let swapped = |values: &[f64], width: usize| -> Vec<f64> {
            values.chunks_exact(width).rev().flatten().copied().collect()
        };
        let again = run(&swapped(&x_values, k), &swapped(&before, n));
        assert_eq!(again, swapped(&got, n), "{what}: in another order other bits");
    }
}
