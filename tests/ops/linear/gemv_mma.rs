//! One token of a small model on Hopper, against plain loops.

use crate::support::device::{assert_near, cuda_context, product, round, unit, Bench, HALVES};
use crate::support::rounded;
use xserv::ops::linear::cuda_gemv_mma::{
    has_linear_gemv_mma, linear_gemv_mma, OneTokenLinear, NUM_SUMS,
};

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 3072;
const NUM_KV_HEADS: usize = 8;
const EPS: f32 = 1e-6;

#[test]
fn layers_of_one_token_on_cuda_are_products() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_gemv_mma(&context, HIDDEN, INTERMEDIATE, NUM_KV_HEADS).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for dtype in HALVES {
        let mut bench = Bench::new(&context, dtype, 3);
        let unit = unit(dtype);
        let (norm, norm_values) = bench.filled(&[HIDDEN], 0.3, 1.0);
        let (x, x_values) = bench.filled(&[1, HIDDEN], 3.0, 0.0);

        for num_outs in [32, 4096] {
            let (weight, values) = bench.filled(&[num_outs, HIDDEN], 0.05, 0.0);
            let out = bench.poisoned(&[1, num_outs]);
            let layer = OneTokenLinear::Norm { norm: &norm, eps: EPS };
            linear_gemv_mma(&context, &x, layer, &weight, &out).expect("the operator");
            let h = rounded::rms_norm(dtype, &x_values, &norm_values, EPS);
            let want: Vec<f64> = (0..num_outs).map(|row| product(&values, row, &h)).collect();
            let got = bench.read(&out);
            assert_near(&format!("{dtype} norm, {num_outs}"), &got, &want, 2.0 * unit);
        }

        let parts: Vec<f64> =
            (0..NUM_SUMS * HIDDEN).map(|_| f64::from(bench.random.signed() as f32)).collect();
        let sums = bench.f32s(&[NUM_SUMS, HIDDEN], &parts);
        let (weight, values) = bench.filled(&[2 * INTERMEDIATE, HIDDEN], 0.05, 0.0);
        let hidden = bench.poisoned(&[1, HIDDEN]);
        let out = bench.poisoned(&[1, INTERMEDIATE]);
        let layer =
            OneTokenLinear::SumsSwiGlu { norm: &norm, eps: EPS, sums: &sums, hidden: &hidden };
        linear_gemv_mma(&context, &x, layer, &weight, &out).expect("the operator");
        let mid: Vec<f64> = (0..HIDDEN)
            .map(|i| {
                let sum: f64 = (0..NUM_SUMS).map(|g| parts[g * HIDDEN + i]).sum();
                round(dtype, x_values[i] + round(dtype, sum))
            })
            .collect();
        let got = bench.read(&hidden);
        assert_near(&format!("{dtype} the residual stream"), &got, &mid, unit);
        let h = rounded::rms_norm(dtype, &mid, &norm_values, EPS);
        let want: Vec<f64> = (0..INTERMEDIATE)
            .map(|row| {
                let gate = round(dtype, product(&values, row, &h));
                let up = round(dtype, product(&values, INTERMEDIATE + row, &h));
                round(dtype, gate / (1.0 + (-gate).exp())) * up
            })
            .collect();
        let got = bench.read(&out);
        assert_near(&format!("{dtype} sums and SwiGLU"), &got, &want, 6.0 * unit);

        let (act, act_values) = bench.filled(&[1, INTERMEDIATE], 1.0, 0.0);
        let (weight, values) = bench.filled(&[HIDDEN, INTERMEDIATE], 0.05, 0.0);
        let out = bench.poisoned(&[1, HIDDEN]);
        let layer = OneTokenLinear::Residual { residual: &x };
        linear_gemv_mma(&context, &act, layer, &weight, &out).expect("the operator");
        let want: Vec<f64> = (0..HIDDEN)
            .map(|row| x_values[row] + round(dtype, product(&values, row, &act_values)))
            .collect();
        let got = bench.read(&out);
        assert_near(&format!("{dtype} residual"), &got, &want, 2.0 * unit);

        // Products that the kernels do not serve are refused.
        let odd = bench.poisoned(&[1, 24]);
        let (weight, _) = bench.filled(&[24, HIDDEN], 0.05, 0.0);
        let layer = OneTokenLinear::Norm { norm: &norm, eps: EPS };
        assert!(linear_gemv_mma(&context, &x, layer, &weight, &odd).is_err());
    }
}
