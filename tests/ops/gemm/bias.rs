//! Products to whose rows a bias is added: the sum is rounded once, whichever implementation computes it.

use crate::support::device::{assert_rounded, cuda_context, last_place, product, round, Bench};
use crate::support::{Random, DTYPES};
use xserv::backend::ComputeContext;
use xserv::memory::{DType, Device, ElementType, Tensor};
use xserv::ops::gemm::{gemm_with_bias, GemmBackend, GemmOptions, SumOrder};

#[test]
fn a_bias_is_added_before_the_sum_is_rounded() {
    let Some(context) = cuda_context() else { return };
    use GemmBackend::{Auto, Tiled};
    let in_order = (Auto, SumOrder::ByRow);
    for dtype in DTYPES {
        // Of these cuBLAS rounds the products of 16 bits twice where it adds them to C.
        for (m, n, k) in [(1, 64, 72), (5, 1, 64), (33, 1000, 1032), (70, 1024, 512), (130, 24, 8)]
        {
            let mut bench = Bench::new(&context, dtype, (m + n + k) as u64);
            let (a, a_values) = bench.filled(&[m, k], 1.0, 0.0);
            let (b, b_values) = bench.filled(&[n, k], 0.2, 0.0);
            // As large as the products are, so that some sums are much smaller.
            let (bias, bias_values) = bench.filled(&[n], 0.2 * (k as f64).sqrt(), 0.0);
            let want: Vec<(f64, f64)> = a_values
                .chunks_exact(k)
                .flat_map(|x| (0..n).map(move |i| (i, x)))
                .map(|(i, x)| {
                    let row = &b_values[i * k..(i + 1) * k];
                    let terms = || x.iter().zip(row).map(|(x, b)| x * b);
                    let size: f64 = terms().map(f64::abs).sum();
                    let sum = product(&b_values, i, x) + bias_values[i];
                    (round(dtype, sum), size * 1e-6 + last_place(dtype) * sum.abs() + 1e-7)
                })
                .collect();
            for (backend, order) in
                [(Auto, SumOrder::Fastest), in_order, (Tiled, SumOrder::Fastest)]
            {
                let options =
                    GemmOptions { transpose_b: true, backend, order, ..GemmOptions::default() };
                let what = format!("{dtype} {m} x {n} x {k} {backend:?} {order:?}");
                let out = bench.poisoned(&[m, n]);
                gemm_with_bias(&context, &options, &a, &b, &bias, &out).expect("the product");
                context.synchronize().expect("no fault");
                assert_rounded(&what, dtype, &bench.read(&out), &want, 0.03);

                // Some of the columns of a wider matrix.
                let wide = bench.poisoned(&[m, n + 8]);
                let columns = wide.view(8, &[m, n], Some(&[n + 8, 1])).expect("a view");
                gemm_with_bias(&context, &options, &a, &b, &bias, &columns).expect("the product");
                context.synchronize().expect("no fault");
                let got: Vec<f64> = bench
                    .read(&wide)
                    .chunks_exact(n + 8)
                    .flat_map(|row| row[8..].iter().copied())
                    .collect();
                assert_rounded(&format!("{what}, columns"), dtype, &got, &want, 0.03);
            }
        }
    }
}

/// Every second number of a vector, which no library adds by itself.
#[test]
fn a_bias_with_gaps_is_added_on_the_cpu() {
    let context = ComputeContext::cpu(2, usize::MAX).expect("a context");
    let (m, n, k) = (7, 33, 40);
    let mut random = Random::new(5);
    let [mut a, mut b, mut bias] = [m * k, n * k, 2 * n].map(|len| random.normals(len));
    let mut c = vec![f32::NAN; m * n];
    let tensor = |values: &mut [f32], shape: &[usize], strides: Option<&[i64]>| {
        let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let (data, element) = (values.as_mut_ptr().cast(), ElementType::Float(DType::F32));
        // SAFETY: the values are alive until the end of the test, and as many as the layout spans.
        unsafe { Tensor::from_raw(data, element, Device::Cpu, &shape, strides, "a test") }.unwrap()
    };
    let operands = (tensor(&mut a, &[m, k], None), tensor(&mut b, &[n, k], None));
    let (bias_tensor, out) = (tensor(&mut bias, &[n], Some(&[2])), tensor(&mut c, &[m, n], None));
    let options = GemmOptions { transpose_b: true, ..GemmOptions::default() };
    gemm_with_bias(&context, &options, &operands.0, &operands.1, &bias_tensor, &out).unwrap();
    for (i, &got) in c.iter().enumerate() {
        let (x, w) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
        let sum: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
        let want = sum + f64::from(bias[2 * (i % n)]);
        assert!((f64::from(got) - want).abs() <= 4e-6 * (want.abs() + (k as f64).sqrt()), "{i}");
    }
}

#[test]
fn a_bias_that_does_not_fit_is_refused() {
    let Some(context) = cuda_context() else { return };
    let mut bench = Bench::new(&context, DType::F32, 1);
    let ((a, _), (b, _)) = (bench.filled(&[3, 8], 1.0, 0.0), bench.filled(&[5, 8], 1.0, 0.0));
    let ((bias, _), (short, _)) = (bench.filled(&[5], 1.0, 0.0), bench.filled(&[4], 1.0, 0.0));
    let out = bench.poisoned(&[3, 5]);
    let options = GemmOptions { transpose_b: true, ..GemmOptions::default() };
    gemm_with_bias(&context, &options, &a, &b, &bias, &out).expect("it fits");
    for (options, bias) in [(options, &short), (GemmOptions { beta: 1.0, ..options }, &bias)] {
        let error = gemm_with_bias(&context, &options, &a, &b, bias, &out).expect_err("refused");
        assert!(error.to_string().contains("a bias of shape"), "{error}");
    }
}
