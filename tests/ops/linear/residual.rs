//! The residual stream: what a product has finished waits beside it, and is added once by the norm
//! that reads the stream next.

use crate::support::device::{assert_near, cuda_context, product, round, unit, Bench};
use crate::support::{reference, rounded, DTYPES};
use xserv::memory::DType;
use xserv::ops::linear::{
    Layer, LinearPlan, Matrix, MatrixLayout, Norm, ResidualStream, ShardAxis, ShardUnit,
};

const EPS: f32 = 1e-5;

fn is_near(what: &str, dtype: DType, got: &[f64], want: &[f64], units: f64) {
    let bar = if dtype == DType::F32 { 2e-5 } else { units * unit(dtype) };
    assert_near(what, got, want, bar);
}

#[test]
fn a_product_is_added_to_the_stream_once_by_the_next_norm() {
    let Some(context) = cuda_context() else { return };
    // A plan without kernels of its own, whose products never add themselves to the stream.
    let plan = LinearPlan::default();
    for dtype in DTYPES {
        for (rows, width, inputs) in [(1, 64, 96), (3, 264, 128), (70, 1024, 512)] {
            for (is_rms, has_bias) in [(true, false), (true, true), (false, true)] {
                let what = format!("{dtype} {rows} x {width} x {inputs}, RMSNorm: {is_rms}");
                let mut bench = Bench::new(&context, dtype, (rows + width + inputs) as u64);
                let (hidden, hidden_values) = bench.filled(&[rows, width], 4.0, 0.25);
                let [normed, projected] = [(); 2].map(|()| bench.poisoned(&[rows, width]));
                let (x, x_values) = bench.filled(&[rows, inputs], 1.0, 0.0);
                let (weight, weight_values) = bench.filled(&[width, inputs], 0.2, 0.0);
                let (bias, bias_values) = bench.filled(&[width], 2.0, 0.0);
                let (factors, factor_values) = bench.filled(&[width], 0.5, 1.0);
                let (shift, shift_values) = bench.filled(&[width], 0.5, 0.0);
                let axis = ShardAxis::In(ShardUnit::Feature);
                let weight = Matrix::dense(weight, dtype, MatrixLayout::Rows, axis);
                let layer =
                    Layer { name: "o_proj", weight: &weight, bias: has_bias.then_some(&bias) };
                let norm = if is_rms {
                    Norm::Rms { weight: &factors, eps: EPS }
                } else {
                    Norm::Layer { weight: &factors, bias: Some(&shift), eps: EPS }
                };
                let norm_of = |stream: &[f64]| -> Vec<f64> {
                    if !is_rms {
                        let (factors, shift) = (&factor_values, Some(&shift_values[..]));
                        return reference::layer_norm(stream, factors, shift, f64::from(EPS));
                    }
                    let rows = stream.chunks_exact(width);
                    rows.flat_map(|row| rounded::rms_norm(dtype, row, &factor_values, EPS))
                        .collect()
                };
                let pass = plan.of_rows(&context, rows).expect("a pass");
                let mut stream = ResidualStream::new(hidden, normed, projected);

                // Nothing is pending.
                pass.normalise(&mut stream, &norm).expect("the norm");
                assert_eq!(bench.read(&stream.hidden), hidden_values, "{what}: nothing to add");
                let got = bench.read(&stream.normed);
                is_near(&what, dtype, &got, &norm_of(&hidden_values), 4.0);

                // The product is finished, and the stream waits for it.
                pass.add_to(&mut stream, &x, &layer).expect("the product");
                assert_eq!(bench.read(&stream.hidden), hidden_values, "{what}: added too early");
                let want: Vec<f64> = x_values
                    .chunks_exact(inputs)
                    .flat_map(|x| {
                        let added = |i: usize| if has_bias { bias_values[i] } else { 0.0 };
                        (0..width)
                            .map(|i| product(&weight_values, i, x) + added(i))
                            .collect::<Vec<_>>()
                    })
                    .collect();
                let finished = bench.read(&stream.projected);
                is_near(&format!("{what}, product"), dtype, &finished, &want, 2.0);

                // The norm adds it, and takes the sum.
                pass.normalise(&mut stream, &norm).expect("the norm");
                let sums: Vec<f64> = hidden_values
                    .iter()
                    .zip(&finished)
                    .map(|(stream, product)| round(dtype, stream + product))
                    .collect();
                assert_eq!(bench.read(&stream.hidden), sums, "{what}: the sum");
                let got = bench.read(&stream.normed);
                is_near(&what, dtype, &got, &norm_of(&sums), 4.0);

                // Only once.
                pass.normalise(&mut stream, &norm).expect("the norm");
                assert_eq!(bench.read(&stream.hidden), sums, "{what}: added twice");
                assert_eq!(bench.read(&stream.normed), got, "{what}: another norm of it");
            }
        }
    }
}
