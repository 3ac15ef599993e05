//! Linear layers with quantised weights on a GPU, against products in f64 with the exact numbers of the
//! weights, rounded where Transformers rounds.

use std::sync::Arc;

use super::quantised_one::check_one;
use crate::quantised::{are_numbers, random_matrix, upload_tiles};
use crate::support::device::{assert_rounded, cuda_context, last_place, round, Bench, HALVES};
use crate::support::rounded;
use xserv::backend::{ComputeContext, DeviceTensor};
use xserv::error::Result;
use xserv::memory::{DType, Tensor};
use xserv::ops::gemm::{GemmOptions, SumOrder};
use xserv::ops::linear::cuda_numbers::linear_numbers;
use xserv::ops::linear::cuda_quantised::{has_linear_quantised, linear_quantised};
use xserv::ops::linear::cuda_quantised_blocks::is_quantised_weight;
use xserv::ops::linear::cuda_quantised_one::{has_quantised_one, linear_quantised_one};
use xserv::ops::linear::Epilogue;
use xserv::ops::quantised::cuda::QuantisedTiles;
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat};

const EPILOGUES: [Epilogue; 3] = [Epilogue::Store, Epilogue::AddResidual, Epilogue::SwiGlu];
/// For each number of columns of a fragment, of fragments of a block and of blocks, one that fills
/// it and one that does not.
const TOKENS: [usize; 11] = [1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 130];
const ROW: usize = usize::MAX;

/// The parameters of a test.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub dtype: DType,
    pub format: QuantFormat,
    pub epilogue: Epilogue,
    pub has_bias: bool,
    /// Columns of the result, and in_features.
    pub size: (usize, usize),
}

/// An operator, from x and the bias to the result; whether sums have a fixed order.
pub type Multiply<'a> = dyn Fn(
        &DeviceTensor,
        &QuantisedTiles<'_>,
        Option<&Tensor>,
        Epilogue,
        bool,
        &DeviceTensor,
    ) -> Result<()>
    + 'a;

/// A product, the way in which it is computed, and its tolerance.
pub struct Product<'a> {
    /// Rounds activations as the product does: rows of the given length.
    pub rounded: &'a dyn Fn(&[f64], usize) -> Vec<f64>,
    /// The tolerance of a sum before it is rounded: of in_features terms, the sum of their
    /// magnitudes, and the root of that of their squares.
    pub error: &'a dyn Fn(usize, f64, f64) -> f64,
    /// The share of results of a type that may be rounded the other way.
    pub most_flipped: &'a dyn Fn(DType) -> f64,
    /// The rows that share a scale, as they do where a block of a weight has one.
    pub scale_rows: usize,
    /// The operator.
    pub multiply: &'a Multiply<'a>,
}

fn format(code: Code, group_size: usize, has_zeros: bool, scale: DType) -> QuantFormat {
    QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: false }
}

/// Returns the result of one token, and how far each element may be off. `sums` are pairs of a product with a
/// row of the weight and of how far it may be off before the roundings.
fn reference(
    Case { dtype, epilogue, size: (n, _), .. }: Case,
    sums: &[(f64, f64)],
    bias: Option<&[f64]>,
    before: &[f64],
) -> Vec<(f64, f64)> {
    let round = |value| round(dtype, value);
    let error = |row: usize| sums[row].1;
    let place = |value: f64| last_place(dtype) * value.abs() + 1e-7;
    let one = |i: usize| {
        let value = sums[i].0 + bias.map_or(0.0, |bias| bias[i]);
        match epilogue {
            Epilogue::Store => (round(value), error(i) + place(value)),
            Epilogue::AddResidual => {
                let sum = before[i] + round(value);
                (round(sum), error(i) + place(value) + place(sum))
            }
            Epilogue::SwiGlu => {
                let (gate, up) = (round(value), round(sums[n + i].0));
                let want = rounded::silu_mul(dtype, gate, up);
                let silu = gate / (1.0 + (-gate).exp());
                // The slope of silu is at most 1.1, and three roundings may each fall the other way,
                // that of the gate before it.
                let off = 1.1 * (error(i) + place(gate)) * up.abs() + error(n + i) * silu.abs();
                (want, off + 3.0 * place(want))
            }
        }
    };
    (0..n).map(one).collect()
}

fn check(context: &Arc<ComputeContext>, case: Case, tokens: &[usize]) {
    let product = Product {
        rounded: &|x, _| x.to_vec(),
        // The tolerance of f32: tensor cores truncate the sums of a product.
        error: &|k, size, _| size * 2e-7 * (k as f64).log2(),
        most_flipped: &|_| 0.03,
        scale_rows: 1,
        multiply: &|x, weight, bias, epilogue, is_fixed, out| {
            linear_quantised(context, x, weight, bias, epilogue, is_fixed, out)
        },
    };
    check_product(context, case, tokens, &product);
    check_one(context, case, None);
}

/// Compares products of these numbers of tokens with those in float64, with sums in a fixed order and
/// not.
pub fn check_product(
    context: &Arc<ComputeContext>,
    case: Case,
    tokens: &[usize],
    product: &Product<'_>,
) {
    let Case { dtype, format, epilogue, has_bias, size: (n, k) } = case;
    let mut bench = Bench::with_room(context, dtype, (n + k) as u64, 192 << 20);
    let is_gated = epilogue == Epilogue::SwiGlu;
    let rows = if is_gated { 2 * n } else { n };
    let mut matrix = random_matrix(&mut bench.random, rows, k, format, 1.5 / (k as f64).sqrt());
    let num_groups = matrix.num_groups();
    for row in 0..rows {
        let first = row / product.scale_rows * product.scale_rows * num_groups;
        matrix.scales.copy_within(first..first + num_groups, row * num_groups);
    }
    let layout = TileLayout::new(rows, k, format, is_gated).expect("a layout");
    assert!(is_quantised_weight(&layout), "{case:?}: not what it is for");
    let memory = upload_tiles(&mut bench, &layout, &matrix);
    let weight = QuantisedTiles::new(layout, &memory).expect("tiles");

    let most = tokens.iter().copied().max().expect("one");
    let (_, x_values) = bench.filled(&[most, k], 1.0, 0.0);
    let x_rounded = (product.rounded)(&x_values, k);
    let (_, before) = bench.filled(&[most, n], 1.0, 0.0);
    let (bias, bias_values) = bench.filled(&[n], 2.0, 0.0);
    let biases = has_bias.then_some(&bias_values[..]);
    // Row after row of the weight, as it may be large.
    let mut sums = vec![(0.0, 0.0); most * rows];
    let mut numbers = vec![0.0; k];
    for row in 0..rows {
        matrix.row_to_f32(row, &mut numbers).expect("a row");
        for (token, x) in x_rounded.chunks_exact(k).enumerate() {
            let (mut sum, mut size, mut squares) = (0.0, 0.0, 0.0);
            for (x, &w) in x.iter().zip(&numbers) {
                let term = x * f64::from(w);
                (sum, size, squares) = (sum + term, size + term.abs(), squares + term * term);
            }
            sums[token * rows + row] = (sum, (product.error)(k, size, squares.sqrt()));
        }
    }
    let want: Vec<(f64, f64)> = sums
        .chunks_exact(rows)
        .zip(before.chunks_exact(n))
        .flat_map(|(sums, before)| reference(case, sums, biases, before))
        .collect();

    let mut alone: Vec<f64> = Vec::new();
    for &num_tokens in tokens {
        let x = bench.of(&[num_tokens, k], &x_values[..num_tokens * k]);
        for is_fixed in [false, true] {
            let what = format!("{case:?}, {num_tokens} tokens, fixed: {is_fixed}");
            // Rows after the result, which stay as they are.
            let mut start = before[..num_tokens * n].to_vec();
            start.resize((num_tokens + 16) * n, 7.0);
            let all = bench.of(&[num_tokens + 16, n], &start);
            let out = all.view(0, &[num_tokens, n], None).expect("a view");
            let bias = has_bias.then_some(&*bias);
            (product.multiply)(&x, &weight, bias, epilogue, is_fixed, &out).expect("the operator");
            context.synchronize().expect("no fault");
            let mut got = bench.read(&all);
            let guard = got.split_off(num_tokens * n);
            assert!(guard.iter().all(|&x| x == 7.0), "{what}: rows behind the result");
            // With few results, one or two are a large share.
            let most_flipped = (product.most_flipped)(dtype).max(2.0 / got.len() as f64);
            assert_rounded(&what, dtype, &got, &want[..num_tokens * n], most_flipped);
            // Every token has the same bits beside any others.
            if is_fixed {
                let shared = alone.len().min(got.len());
                assert!(alone[..shared] == got[..shared], "{what}: other bits than alone");
                if got.len() > alone.len() {
                    alone = got;
                }
            }
        }
    }
}

pub fn context() -> Option<Arc<ComputeContext>> {
    let context = cuda_context()?;
    if !has_linear_quantised(&context).unwrap() {
        println!("skipped: no tensor cores, or a build without kernels");
        return None;
    }
    Some(context)
}

/// Every format, with the type of the scales in turn.
fn formats() -> Vec<QuantFormat> {
    let scales = [DType::F16, DType::BF16, DType::F32];
    let mut found = Vec::new();
    for code in Code::ALL {
        for has_zeros in [false, true] {
            for group_size in [32, 64, 128, ROW] {
                if !code.is_float() || !has_zeros {
                    let scale = scales[found.len() % scales.len()];
                    found.push(format(code, group_size, has_zeros, scale));
                }
            }
        }
    }
    found
}

#[test]
fn products_with_every_format_on_cuda_are_rounded_as_in_transformers() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for format in formats() {
            for epilogue in EPILOGUES {
                let case = Case { dtype, format, epilogue, has_bias: false, size: (24, 896) };
                check(&context, case, &TOKENS);
            }
            let epilogue = Epilogue::Store;
            let case = Case { dtype, format, epilogue, has_bias: true, size: (1000, 64) };
            check(&context, case, &[1, 17, 65]);
        }
    }
}

#[test]
fn quantised_products_of_any_size_on_cuda_are_rounded_as_in_transformers() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (code, group_size) in [
            (Code::Int4, 32),
            (Code::Int4, 128),
            (Code::Int4, 96),
            (Code::Int8, 64),
            (Code::Fp8, 128),
            (Code::Fp8, ROW),
        ] {
            let has_zeros = !code.is_float();
            let format = format(code, group_size, has_zeros, dtype);
            // k of one chunk and of many, whole and not; rows of less than a tile and of many.
            for size in
                [(8, 64), (8, 8), (24, 1536), (1000, 896), (40, 4104), (8, 12_288), (136, 200)]
            {
                for epilogue in EPILOGUES {
                    let case = Case { dtype, format, epilogue, has_bias: false, size };
                    check(&context, case, &[1, 9, 33, 70]);
                }
            }
        }
        // Weights that divide over the whole chip.
        for code in [Code::Int4, Code::Fp8] {
            let format = format(code, 128, code == Code::Int4, DType::BF16);
            let case = |epilogue, size| Case { dtype, format, epilogue, has_bias: false, size };
            check(&context, case(Epilogue::Store, (6144, 1024)), &[1, 3, 16, 64, 130]);
            check(&context, case(Epilogue::AddResidual, (1024, 4104)), &[1, 3, 16, 32, 97]);
            check(&context, case(Epilogue::SwiGlu, (3072, 1024)), &[1, 3, 16, 33, 128]);
        }
    }
}

/// Rows that whole waves of blocks leave over are computed by a second launch: for these sizes,
/// says a test of the division.
#[test]
fn quantised_products_in_two_launches_on_cuda() {
    let Some(context) = context() else { return };
    for (code, size, epilogue, tokens) in [
        (Code::Int4, (8750, 512), Epilogue::SwiGlu, 101),
        (Code::Int8, (8501, 512), Epilogue::AddResidual, 200),
        (Code::Fp8, (34_100, 512), Epilogue::Store, 20),
    ] {
        let format = format(code, 128, false, DType::F16);
        let has_bias = epilogue == Epilogue::Store;
        check(&context, Case { dtype: DType::BF16, format, epilogue, has_bias, size }, &[tokens]);
    }
}

/// Vocabularies have any number of rows: results of an odd number of columns, of a number that is no
/// multiple of 8, and of fewer than a pair has.
#[test]
fn quantised_products_of_any_number_of_columns_on_cuda() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (code, group_size) in [(Code::Int8, 128), (Code::Int4, 32), (Code::Fp8, 128)] {
            let format = format(code, group_size, code == Code::Int4, DType::BF16);
            for n in [1, 7, 9, 30, 61, 501, 1003, 5026] {
                for epilogue in EPILOGUES {
                    let has_bias = epilogue == Epilogue::Store && n > 9;
                    let case = Case { dtype, format, epilogue, has_bias, size: (n, 768) };
                    check(&context, case, &[1, 3, 9, 16, 17, 40, 130]);
                }
            }
        }
    }
}

/// The numbers of a weight are multiplied in pieces where it is tall, whatever its rows are multiples of.
#[test]
fn products_with_the_numbers_of_tall_weights_on_cuda() {
    let Some(context) = context() else { return };
    let (n, k, num_tokens) = (66_001, 72, 3);
    for dtype in [DType::F32, DType::BF16] {
        for order in [SumOrder::Fastest, SumOrder::ByRow] {
            let format = format(Code::Int8, 24, false, DType::BF16);
            let mut bench = Bench::with_room(&context, dtype, 1, 64 << 20);
            let matrix = random_matrix(&mut bench.random, n, k, format, 0.1);
            let layout = TileLayout::new(n, k, format, false).expect("a layout");
            let memory = upload_tiles(&mut bench, &layout, &matrix);
            let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
            let (x, x_values) = bench.filled(&[num_tokens, k], 1.0, 0.0);
            let out = bench.poisoned(&[num_tokens, n]);
            let options = GemmOptions { transpose_b: true, ..GemmOptions::default() };
            linear_numbers(&context, &x, &weight, options, &|_| order, None, &out)
                .expect("the operator");
            context.synchronize().expect("no fault");
            let mut want = vec![(0.0, 0.0); num_tokens * n];
            let mut numbers = vec![0.0; k];
            for row in 0..n {
                matrix.row_to_f32(row, &mut numbers).expect("a row");
                for (token, x) in x_values.chunks_exact(k).enumerate() {
                    let terms = |number: &dyn Fn(f32) -> f64| -> Vec<f64> {
                        x.iter().zip(&numbers).map(|(x, &w)| x * number(w)).collect()
                    };
                    // Numbers are rounded to the type before they are multiplied.
                    let rounded = terms(&|w| round(dtype, f64::from(w)));
                    let size: f64 = rounded.iter().map(|term| term.abs()).sum();
                    let sum = rounded.iter().sum::<f64>();
                    let off = size * 1e-6 + last_place(dtype) * sum.abs() + 1e-7;
                    want[token * n + row] = (round(dtype, sum), off);
                }
            }
            let what = format!("{dtype} {order:?}");
            assert_rounded(&what, dtype, &bench.read(&out), &want, 0.03);
        }
    }
}

#[test]
fn codes_are_decoded_exactly_on_cuda() {
    let Some(context) = context() else { return };
    // A row for every code, and tokens that are 1 at one input: the results are the numbers themselves.
    for dtype in HALVES {
        for (code, has_zeros) in [
            (Code::Int4, false),
            (Code::Int4, true),
            (Code::Int8, false),
            (Code::Int8, true),
            (Code::Fp8, false),
        ] {
            let format = format(code, 32, has_zeros, DType::F32);
            let (rows, k) = (256, 64);
            let mut bench = Bench::new(&context, dtype, 1);
            let mut matrix = random_matrix(&mut bench.random, rows, k, format, 1.0);
            matrix.scales.fill(1.0);
            let row_bytes = code.row_bytes(k);
            for (row, codes) in matrix.codes.chunks_exact_mut(row_bytes).enumerate() {
                // Not those that are no numbers.
                let byte = row as u8;
                codes.fill(if are_numbers(code, byte) { byte } else { 0 });
            }
            let layout = TileLayout::new(rows, k, format, false).expect("a layout");
            let memory = upload_tiles(&mut bench, &layout, &matrix);
            let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
            let ones: Vec<f64> =
                (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
            // All at once and in parts, for the kernels for many tokens, for few and for one.
            for part in [k, 16, 8, 1] {
                let mut got = Vec::new();
                for ones in ones.chunks(part * k) {
                    let x = bench.of(&[part, k], ones);
                    let out = bench.poisoned(&[part, rows]);
                    let store = Epilogue::Store;
                    if part == 1 && has_quantised_one(&context, &layout).unwrap() {
                        linear_quantised_one(&context, &x, None, &weight, None, store, &out)
                    } else {
                        linear_quantised(&context, &x, &weight, None, store, false, &out)
                    }
                    .expect("the operator");
                    got.extend(bench.read(&out));
                }
                let mut numbers = vec![0.0; k];
                for row in 0..rows {
                    matrix.row_to_f32(row, &mut numbers).expect("a row");
                    for (input, &number) in numbers.iter().enumerate() {
                        // -255 to 255 and the floats of 8 bits are numbers of both types.
                        assert_eq!(
                            got[input * rows + row],
                            f64::from(number),
                            "{dtype} {format:?}, row {row}, input {input}, {part} tokens"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn quantised_products_that_no_kernel_serves_are_refused_on_cuda() {
    let Some(context) = context() else { return };
    let dtype = DType::BF16;
    let mut bench = Bench::new(&context, dtype, 1);
    let mut is_served = |n: usize, k: usize, group_size, is_gated: bool, epilogue| {
        let rows = if is_gated { 2 * n } else { n };
        let format = format(Code::Int4, group_size, false, DType::F16);
        let matrix = random_matrix(&mut bench.random, rows, k, format, 1.0);
        let layout = TileLayout::new(rows, k, format, is_gated).expect("a layout");
        let memory = upload_tiles(&mut bench, &layout, &matrix);
        let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
        let (x, _) = bench.filled(&[2, k], 1.0, 0.0);
        let out = bench.poisoned(&[2, n]);
        linear_quantised(&context, &x, &weight, None, epilogue, false, &out).is_ok()
    };
    assert!(is_served(64, 128, 32, false, Epilogue::Store));
    assert!(is_served(64, 128, 32, true, Epilogue::SwiGlu));
    assert!(!is_served(64, 128, 32, true, Epilogue::Store));
    assert!(!is_served(64, 128, 32, false, Epilogue::SwiGlu));
    assert!(is_served(61, 128, 32, false, Epilogue::Store));
    assert!(is_served(61, 128, 32, true, Epilogue::SwiGlu));
    assert!(!is_served(64, 100, 32, false, Epilogue::Store));
    assert!(!is_served(64, 128, 48, false, Epilogue::Store));
    context.synchronize().expect("no fault");
}
