//! Mixtures of experts on a GPU: every kernel, for few tokens and many.

use super::{Case, Inputs};
use crate::linear::cpu_quantised::weights;
use crate::quantised::{random_matrix, upload_tiles};
use crate::support::device::{assert_near, cuda_context, round, unit, Bench};
use crate::support::{rounded, rounded_all, Random, DTYPES};
use std::sync::Arc;
use xserv::backend::{ComputeContext, DeviceTensor};
use xserv::memory::DType;
use xserv::ops::experts::{
    check_experts, experts, has_normed_experts, normed_experts, ExpertKernels, ExpertLayer, Stream,
    StridedMatrices,
};
use xserv::ops::linear::{Matrix, MatrixLayout, ShardAxis};
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Of each kernel and each number of tokens for which others are taken; sizes that the copy engine cannot
/// take, and pieces of tokens.
const CASES: [Case; 15] = [
    Case::new((8, 2, true), (64, 48), 1),
    Case::new((8, 2, true), (1024, 512), 3),
    Case::new((128, 8, true), (256, 768), 4),
    Case::new((128, 8, false), (128, 96), 33),
    Case::new((4, 4, true), (128, 64), 16),
    Case::new((8, 2, true), (192, 136), 60),
    Case::new((8, 3, false), (512, 96), 130),
    Case::new((4, 2, true), (512, 256), 200),
    Case::new((4, 1, true), (96, 264), 700),
    Case::new((1, 1, true), (128, 64), 40),
    Case::new((130, 32, true), (64, 16), 9),
    Case::new((6, 3, false), (31, 65), 20),
    Case::new((1000, 2, true), (64, 40), 150),
    Case::new((4, 2, true), (72, 24), 4200),
    Case::new((8, 2, true), (64, 48), 0),
];

struct Layer {
    gate_up: Vec<Matrix>,
    down: Vec<Matrix>,
}

impl Layer {
    fn dense(bench: &mut Bench, case: &Case, inputs: &Inputs) -> Layer {
        let dtype = bench.dtype;
        let mut all = |matrices: &[Vec<f32>], columns: usize| {
            let mut of = |matrix: &Vec<f32>| {
                let values: Vec<f64> = matrix.iter().map(|&v| f64::from(v)).collect();
                let data = bench.of(&[matrix.len() / columns, columns], &values);
                Matrix::dense(data, dtype, MatrixLayout::Rows, ShardAxis::None)
            };
            matrices.iter().map(&mut of).collect()
        };
        Layer { gate_up: all(&inputs.gate_up, case.hidden), down: all(&inputs.down, case.width) }
    }

    fn of(&self, context: &ComputeContext, case: &Case, is_deterministic: bool) -> ExpertLayer<'_> {
        for matrices in [&self.gate_up, &self.down] {
            StridedMatrices::check(matrices).expect("matrices at equal distances");
        }
        ExpertLayer {
            routing: case.routing(),
            gate_up: StridedMatrices::new(&self.gate_up).expect("experts"),
            down: StridedMatrices::new(&self.down).expect("experts"),
            kernels: ExpertKernels::find(context, is_deterministic).expect("kernels"),
        }
    }
}

/// The tokens of a case on the device.
struct Tokens {
    x: DeviceTensor,
    logits: DeviceTensor,
    out: DeviceTensor,
    /// As the device has them.
    logit_values: Vec<f64>,
}

impl Tokens {
    fn new(bench: &mut Bench, case: &Case, inputs: &Inputs) -> Tokens {
        let dtype = bench.dtype;
        let logit_values: Vec<f64> =
            case.logits(inputs).into_iter().map(|logit| round(dtype, logit)).collect();
        let shape = [case.num_tokens, case.hidden];
        let values = |v: &[f32]| -> Vec<f64> { v.iter().map(|&v| f64::from(v)).collect() };
        Tokens {
            x: bench.of(&shape, &values(&inputs.x)),
            logits: bench.of(&[case.num_tokens, case.num_experts], &logit_values),
            out: bench.of(&shape, &values(&inputs.out)),
            logit_values,
        }
    }

    fn run(&self, context: &Arc<ComputeContext>, layer: &ExpertLayer<'_>) {
        experts(context, layer, &self.x, &self.logits, &self.out).expect("experts");
    }
}

/// Returns inputs whose tokens have the type too.
fn inputs(case: &Case, random: &mut Random, dtype: DType) -> Inputs {
    let inputs = case.inputs(random, dtype);
    Inputs { x: rounded_all(&inputs.x, dtype), out: rounded_all(&inputs.out, dtype), ..inputs }
}

/// Compares results with those in f64. The root mean square of the differences counts: a product of two large
/// numbers is rounded like a small one, and may be cancelled by others. One row of a hundred that is wrong is
/// ten times as much.
fn assert_close(what: &str, dtype: DType, got: &[f64], want: &[f64]) {
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        (values.map(|v| v * v).sum::<f64>() / want.len() as f64).sqrt()
    };
    assert!(got.len() == want.len() && !got.is_empty(), "{what}");
    let off = rms(&mut got.iter().zip(want).map(|(got, want)| got - want));
    let off = off / rms(&mut want.iter().copied());
    let bar = if dtype == DType::F32 { 1e-5 } else { 2.0 * unit(dtype) };
    assert!(off <= bar, "{what}: {off:.2e} of {bar:.2e}");
}

#[test]
fn dense_experts_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(11);
    for case in CASES {
        for dtype in DTYPES {
            let mut bench = Bench::with_room(&context, dtype, 1, 512 << 20);
            let inputs = inputs(&case, &mut random, dtype);
            let layer = Layer::dense(&mut bench, &case, &inputs);
            let tokens = Tokens::new(&mut bench, &case, &inputs);
            let of_layer = layer.of(&context, &case, false);
            check_experts(&context, &of_layer, dtype).expect("dense experts");
            tokens.run(&context, &of_layer);
            let want = case.reference_by(&inputs, &tokens.logit_values);
            let got = bench.read(&tokens.out);
            if case.num_tokens > 0 {
                assert_close(&format!("{case:?} {dtype}"), dtype, &got, &want);
            }
        }
    }
}

/// The norm, the router and the experts of a few tokens in fewer kernels.
#[test]
fn experts_of_a_stream_on_cuda() {
    let Some(context) = cuda_context() else { return };
    const EPS: f32 = 1e-6;
    let mut random = Random::new(15);
    for case in [
        Case::new((8, 2, true), (64, 48), 1),
        Case::new((128, 8, true), (256, 96), 2),
        Case::new((130, 4, false), (2056, 24), 1),
        Case::new((1000, 2, true), (4096, 8), 2),
        Case::new((1, 1, true), (128, 64), 2),
        Case::new((8, 2, true), (64, 48), 0),
    ] {
        for dtype in HALVES {
            let mut bench = Bench::with_room(&context, dtype, 1, 512 << 20);
            let inputs = inputs(&case, &mut random, dtype);
            let values: Vec<f64> = inputs.x.iter().map(|&v| f64::from(v)).collect();
            let factors = vec![2.0; case.hidden];
            let normed: Vec<f64> = values
                .chunks(case.hidden)
                .flat_map(|row| rounded::rms_norm(dtype, row, &factors, EPS))
                .collect();
            let inputs = Inputs {
                x: normed.iter().map(|&v| v as f32).collect(),
                out: inputs.x.clone(),
                ..inputs
            };
            let logits: Vec<f64> =
                case.logits(&inputs).into_iter().map(|logit| round(dtype, logit)).collect();
            let layer = Layer::dense(&mut bench, &case, &inputs);
            let shape = [case.num_tokens, case.hidden];
            let hidden = bench.of(&shape, &values);
            let normed_tensor = bench.poisoned(&shape);
            let factors = bench.of(&[case.hidden], &factors);
            let router: Vec<f64> = inputs.router.iter().map(|&v| f64::from(v)).collect();
            let router = bench.of(&[case.num_experts, case.hidden], &router);
            let stream = Stream {
                hidden: &hidden,
                norm: (&factors, EPS),
                router: &router,
                normed: &normed_tensor,
            };
            assert!(has_normed_experts(&stream), "{case:?}");
            let want = case.reference_by(&inputs, &logits);
            normed_experts(&context, &layer.of(&context, &case, false), &stream).expect("experts");
            let what = format!("{case:?} {dtype}");
            if case.num_tokens == 0 {
                continue;
            }
            assert_close(&what, dtype, &bench.read(&hidden), &want);
            assert_near(&what, &bench.read(&normed_tensor), &normed, 2.0 * unit(dtype));
            let again = bench.of(&shape, &values);
            let stream = Stream { hidden: &again, ..stream };
            normed_experts(&context, &layer.of(&context, &case, false), &stream).expect("experts");
            // The kernel has left what it counts in as it was.
            assert_eq!(bench.read(&again), bench.read(&hidden), "{what}, again");
        }
    }
}

/// Matrices of few bits, all of one format.
fn quantised(
    bench: &mut Bench,
    case: &Case,
    random: &mut Random,
    format: QuantFormat,
    inputs: &mut Inputs,
) -> Layer {
    let mut all = |rows: usize, columns: usize, is_gated: bool| {
        let size = 1.0 / (columns as f64).sqrt();
        let layout = TileLayout::new(rows, columns, format, is_gated).expect("a layout");
        let matrices = 0..case.num_experts;
        let matrices = matrices.map(|_| random_matrix(random, rows, columns, format, size));
        let (numbers, matrices): (Vec<_>, Vec<_>) = matrices
            .map(|matrix| {
                let data = upload_tiles(bench, &layout, &matrix);
                (weights(&matrix), Matrix::quantised(data, layout, ShardAxis::None))
            })
            .unzip();
        (numbers, matrices)
    };
    let (gate_up_numbers, gate_up) = all(2 * case.width, case.hidden, true);
    let (down_numbers, down) = all(case.hidden, case.width, false);
    (inputs.gate_up, inputs.down) = (gate_up_numbers, down_numbers);
    Layer { gate_up, down }
}

const FORMATS: [(Code, usize, bool, DType); 6] = [
    (Code::Int4, 32, true, DType::F16),
    (Code::Int4, 128, false, DType::BF16),
    (Code::Int8, 128, true, DType::F32),
    (Code::Int8, usize::MAX, false, DType::F16),
    (Code::Fp8, 128, false, DType::F32),
    (Code::Fp8, usize::MAX, false, DType::BF16),
];

#[test]
fn quantised_experts_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(12);
    for case in CASES {
        // These kernels read eight inputs at a time.
        if !case.hidden.is_multiple_of(8) || !case.width.is_multiple_of(8) || case.num_tokens > 1000
        {
            continue;
        }
        for (code, group_size, has_zeros, scale) in FORMATS {
            let format =
                QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: false };
            for dtype in HALVES {
                let mut bench = Bench::with_room(&context, dtype, 1, 512 << 20);
                let mut inputs = inputs(&case, &mut random, dtype);
                let layer = quantised(&mut bench, &case, &mut random, format, &mut inputs);
                let tokens = Tokens::new(&mut bench, &case, &inputs);
                let of_layer = layer.of(&context, &case, false);
                check_experts(&context, &of_layer, dtype).expect("quantised experts");
                tokens.run(&context, &of_layer);
                let want = case.reference_by(&inputs, &tokens.logit_values);
                let got = bench.read(&tokens.out);
                if case.num_tokens > 0 {
                    let what = format!("{case:?} {format:?} {dtype}");
                    assert_close(&what, dtype, &got, &want);
                }
            }
        }
    }
}

/// A token's bits are those that it has alone, whatever kernel takes the others.
#[test]
fn bits_of_a_token_are_its_own_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(13);
    let format = QuantFormat {
        code: Code::Int4,
        group_size: 32,
        has_zeros: true,
        scale: DType::F32,
        quantises_inputs: false,
    };
    for case in [Case::new((8, 2, true), (1024, 512), 100), Case::new((4, 2, true), (256, 96), 400)]
    {
        for (dtype, is_quantised) in
            [(DType::F32, false), (DType::F16, false), (DType::BF16, false), (DType::BF16, true)]
        {
            let mut bench = Bench::with_room(&context, dtype, 1, 512 << 20);
            let mut inputs = inputs(&case, &mut random, dtype);
            let layer = match is_quantised {
                true => quantised(&mut bench, &case, &mut random, format, &mut inputs),
                false => Layer::dense(&mut bench, &case, &inputs),
            };
            let of_layer = layer.of(&context, &case, true);
            let mut run = |rows: std::ops::Range<usize>| {
                let part = rows.start * case.hidden..rows.end * case.hidden;
                let some = Inputs {
                    x: inputs.x[part.clone()].to_vec(),
                    out: inputs.out[part].to_vec(),
                    ..inputs.clone()
                };
                let case = Case { num_tokens: rows.len(), ..case };
                let tokens = Tokens::new(&mut bench, &case, &some);
                tokens.run(&context, &of_layer);
                bench.read(&tokens.out)
            };
            let all = run(0..case.num_tokens);
            for rows in [0..1, 37..38, 10..17, 20..60] {
                let part = rows.start * case.hidden..rows.end * case.hidden;
                let what = format!("{case:?} {dtype}, quantised: {is_quantised}, {rows:?}");
                assert_eq!(run(rows), all[part], "{what}");
            }
        }
    }
}

/// Experts of equal logits are the first ones, and what is no number gives a choice within range.
#[test]
fn logits_of_any_kind_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(14);
    let case = Case::new((40, 3, true), (64, 32), 6);
    let mut bench = Bench::new(&context, DType::F32, 1);
    let inputs = inputs(&case, &mut random, DType::F32);
    let layer = Layer::dense(&mut bench, &case, &inputs);
    let mut tokens = Tokens::new(&mut bench, &case, &inputs);
    let mut logits = tokens.logit_values.clone();
    let rows: Vec<&mut [f64]> = logits.chunks_mut(40).collect();
    let [equal, later, nan, one_nan, low, high] = rows.try_into().expect("six rows");
    equal.fill(2.0);
    later.iter_mut().enumerate().for_each(|(i, v)| *v = if i < 7 { 0.0 } else { 5.0 });
    nan.fill(f64::NAN);
    one_nan[3] = f64::NAN;
    low.fill(f64::NEG_INFINITY);
    high[9] = f64::INFINITY;
    tokens.logits = bench.of(&[6, 40], &logits);
    tokens.run(&context, &layer.of(&context, &case, false));
    context.synchronize().expect("nothing out of range");
    let got = bench.read(&tokens.out);
    let want = case.reference_by(&inputs, &logits);
    assert_near("equal logits", &got[..128], &want[..128], 1e-5);
}
