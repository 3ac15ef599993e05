//! Linear layers whose weights and activations are both FP8 on a GPU, against products in f64 of the
//! exact numbers of both.

use std::cell::Cell;
use std::sync::Arc;

use super::quantised::{check_product, Case, Product};
use crate::quantised::{in_e4m3, random_matrix, upload_tiles};
use crate::support::device::{cuda_context, last_place, Bench, HALVES};
use crate::support::rounded;
use xserv::backend::{ComputeContext, ContextBackend, DeviceTensor};
use xserv::error::Result;
use xserv::memory::{DType, Tensor};
use xserv::ops::linear::cuda_fp8::{
    has_linear_fp8, is_fp8_weight, linear_fp8, linear_own_fp8, quantises_inputs,
};
use xserv::ops::linear::Epilogue;
use xserv::ops::quantised::cuda::QuantisedTiles;
use xserv::ops::quantised::cuda_activations::{quantise_inputs, QuantisedInputs};
use xserv::ops::quantised::tiles::TileLayout;
use xserv::ops::quantised::{Code, QuantFormat, QuantisedMatrix};
use xserv::ops::rms_norm::cuda_rounded::rms_norm_rounded;

const EPILOGUES: [Epilogue; 3] = [Epilogue::Store, Epilogue::AddResidual, Epilogue::SwiGlu];
/// For each number of tokens of a block of both kernels, one that fills it and one that does not.
const TOKENS: [usize; 14] = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 130, 200];
const ROW: usize = usize::MAX;

fn format(group_size: usize, scale: DType) -> QuantFormat {
    QuantFormat { code: Code::Fp8, group_size, has_zeros: false, scale, quantises_inputs: true }
}

fn context() -> Option<Arc<ComputeContext>> {
    let context = cuda_context()?;
    if !has_linear_fp8(&context).unwrap() {
        println!("skipped: no tensor cores, or a build without kernels");
        return None;
    }
    Some(context)
}

/// The whole of it: quantises x, and multiplies.
fn multiply(
    context: &Arc<ComputeContext>,
    x: &DeviceTensor,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    is_fixed: bool,
    out: &DeviceTensor,
) -> Result<()> {
    let shape = x.shape();
    let inputs = QuantisedInputs::new(context, shape[0] as usize, shape[1] as usize)?;
    quantise_inputs(context, x, &inputs)?;
    linear_fp8(context, &inputs, weight, bias, epilogue, is_fixed, out)
}

fn check(context: &Arc<ComputeContext>, case: Case, tokens: &[usize]) {
    check_blocks(context, case, 1, tokens);
}

fn check_blocks(context: &Arc<ComputeContext>, case: Case, scale_rows: usize, tokens: &[usize]) {
    let product = Product {
        rounded: &|x, k| x.chunks(k).flat_map(|row| row.chunks(128).flat_map(in_e4m3)).collect(),
        // The FP8 tensor cores cut the sums of 128 terms off after about 14 bits, so that many a result of
        // bf16 and most of f16 are rounded the other way.
        error: &|_, _, root| root * 2f64.powi(-8),
        most_flipped: &|dtype| if dtype == DType::BF16 { 0.25 } else { 1.0 },
        scale_rows,
        multiply: &|x, weight, bias, epilogue, is_fixed, out| {
            multiply(context, x, weight, bias, epilogue, is_fixed, out)
        },
    };
    check_product(context, case, tokens, &product);
}

#[test]
fn products_of_fp8_on_cuda_are_those_of_the_numbers() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (group_size, scale) in
            [(128, DType::BF16), (128, DType::F32), (256, DType::F16), (ROW, DType::F32)]
        {
            let format = format(group_size, scale);
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
fn products_of_fp8_of_any_size_on_cuda() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        let format = format(128, DType::BF16);
        // k of less than a group and of many, whole and not; rows of less than a tile and of many, odd too.
        for size in [(8, 64), (1, 8), (61, 136), (1000, 896), (40, 4104), (7, 12_288), (137, 200)] {
            for epilogue in EPILOGUES {
                let case = Case { dtype, format, epilogue, has_bias: false, size };
                check(&context, case, &[1, 9, 33, 70, 150]);
            }
        }
        // Weights that divide over the whole chip.
        let case = |epilogue, size| Case { dtype, format, epilogue, has_bias: false, size };
        check(&context, case(Epilogue::Store, (6144, 512)), &[1, 3, 16, 64, 130]);
        check(&context, case(Epilogue::AddResidual, (1024, 4104)), &[1, 3, 16, 32, 97]);
        check(&context, case(Epilogue::SwiGlu, (3072, 512)), &[1, 3, 16, 33, 128]);
    }
}

#[test]
fn products_of_fp8_with_prompts_on_cuda() {
    let Some(context) = context() else { return };
    for (dtype, epilogue) in HALVES.into_iter().zip([Epilogue::SwiGlu, Epilogue::AddResidual]) {
        let format = format(128, DType::F32);
        let case = Case { dtype, format, epilogue, has_bias: false, size: (72, 392) };
        check(&context, case, &[255, 256, 513, 2048, 2049]);
    }
}

/// Rows that share scales, those of whole blocks of the kernels and not, and tokens and rows that do
/// not fill what a kernel has of them.
#[test]
fn products_of_fp8_in_blocks_on_cuda() {
    let Some(context) = context() else { return };
    for dtype in HALVES {
        for (scale_rows, scale, size) in [
            (128, DType::BF16, (512, 640)),
            (128, DType::F32, (200, 1000)),
            (64, DType::F16, (330, 264)),
            (24, DType::BF16, (256, 512)),
        ] {
            for epilogue in EPILOGUES {
                let format = format(128, scale);
                let case = Case { dtype, format, epilogue, has_bias: false, size };
                check_blocks(&context, case, scale_rows, &[64, 100, 191, 193, 300]);
            }
        }
        let format = format(ROW, DType::BF16);
        for (epilogue, has_bias) in
            [(Epilogue::Store, true), (Epilogue::AddResidual, false), (Epilogue::SwiGlu, false)]
        {
            let case = Case { dtype, format, epilogue, has_bias, size: (401, 776) };
            check(&context, case, &[128, 321]);
        }
    }
}

/// The kernels for prompts have the results of those for few tokens, which are compared with f64 above: with
/// tiles of every shape, whole and not, and where the blocks of a cluster divide the inputs.
#[test]
fn prompts_in_fp8_on_cuda_have_the_results_of_few_tokens() {
    let Some(context) = context() else { return };
    let dtype = DType::BF16;
    let formats = [(128, DType::F32, 128), (128, DType::BF16, 24), (ROW, DType::F32, 1)];
    for (case, (epilogue, (n, k), num_tokens)) in [
        (Epilogue::AddResidual, (4096, 12_288), 512),
        (Epilogue::AddResidual, (4096, 12_288), 300),
        (Epilogue::AddResidual, (4096, 4096), 250),
        (Epilogue::AddResidual, (4096, 4096), 1024),
        (Epilogue::SwiGlu, (12_288, 4096), 500),
        (Epilogue::Store, (6144, 4096), 2050),
        (Epilogue::Store, (4090, 776), 1000),
        (Epilogue::SwiGlu, (2045, 1032), 1000),
    ]
    .into_iter()
    .enumerate()
    {
        // Blocks and rows with every epilogue; the large weights take long to make.
        for (group_size, scale, scale_rows) in [formats[case % 3], formats[(case + 1) % 3]] {
            let what = format!("{epilogue:?} {n} x {k}, groups {group_size}, {num_tokens} tokens");
            let mut bench = Bench::with_room(&context, dtype, (n + k) as u64, 512 << 20);
            let is_gated = epilogue == Epilogue::SwiGlu;
            let rows = if is_gated { 2 * n } else { n };
            let (format, size) = (format(group_size, scale), 1.5 / (k as f64).sqrt());
            let mut matrix = random_matrix(&mut bench.random, rows, k, format, size);
            let num_groups = matrix.num_groups();
            for row in 0..rows {
                let first = row / scale_rows * scale_rows * num_groups;
                matrix.scales.copy_within(first..first + num_groups, row * num_groups);
            }
            let layout = TileLayout::new(rows, k, format, is_gated).expect("a layout");
            let memory = upload_tiles(&mut bench, &layout, &matrix);
            let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
            let (x, _) = bench.filled(&[num_tokens, k], 1.0, 0.0);
            let (bias, _) = bench.filled(&[n], 2.0, 0.0);
            let bias = (epilogue == Epilogue::Store).then_some(&*bias);
            let before: Vec<f64> =
                (0..num_tokens * n).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
            let [all, few] = [(); 2].map(|()| bench.of(&[num_tokens, n], &before));
            multiply(&context, &x, &weight, bias, epilogue, false, &all).expect("a prompt");
            for first in (0..num_tokens).step_by(64) {
                let count = 64.min(num_tokens - first);
                let part = |tensor: &DeviceTensor, width: usize| {
                    tensor.view(first * width, &[count, width], None).expect("a view")
                };
                let (x, out) = (part(&x, k), part(&few, n));
                multiply(&context, &x, &weight, bias, epilogue, false, &out).expect("a few");
            }
            context.synchronize().expect("no fault");
            let (all, few) = (bench.read(&all), bench.read(&few));
            for (i, (all, few)) in all.iter().zip(&few).enumerate() {
                let is_fine = (all - few).abs() <= 0.01 + 2.0 * last_place(dtype) * few.abs();
                assert!(is_fine, "{what}, token {}, column {}: {all}, not {few}", i / n, i % n);
            }
        }
    }
}

/// Returns a weight of 24 rows, as a layout and as the host has it.
fn small(bench: &mut Bench, k: usize) -> (TileLayout, QuantisedMatrix, DeviceTensor) {
    let format = format(128, DType::F32);
    let matrix = random_matrix(&mut bench.random, 24, k, format, 1.0);
    let layout = TileLayout::new(24, k, format, false).expect("a layout");
    let memory = upload_tiles(bench, &layout, &matrix);
    (layout, matrix, memory)
}

/// Rows of zeros have zeros for results, the largest numbers what they have in float64, and what is
/// no number, or is infinite, makes its own row so and no other.
#[test]
fn extreme_activations_in_fp8_on_cuda() {
    let Some(context) = context() else { return };
    let k = 328;
    for dtype in HALVES {
        let largest = if dtype == DType::BF16 { 2f64.powi(100) } else { 65_504.0 };
        let smallest = if dtype == DType::BF16 { 2f64.powi(-130) } else { 2f64.powi(-24) };
        let mut bench = Bench::new(&context, dtype, 5);
        let (layout, matrix, memory) = small(&mut bench, k);
        let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
        for num_tokens in [7, 16, 40, 150] {
            let (_, mut x) = bench.filled(&[num_tokens, k], 1.0, 0.0);
            x[..k].fill(0.0);
            x[k..k + 128].fill(-0.0);
            x[2 * k + 5] = largest;
            x[3 * k..4 * k].fill(smallest);
            x[4 * k + 300] = f64::NAN;
            x[5 * k + 2] = f64::NEG_INFINITY;
            let tensor = bench.of(&[num_tokens, k], &x);
            // f16 has no room for the largest sums, which become infinite.
            for is_fixed in [false, true] {
                let out = bench.poisoned(&[num_tokens, 24]);
                multiply(&context, &tensor, &weight, None, Epilogue::Store, is_fixed, &out)
                    .expect("the operator");
                let got = bench.read(&out);
                let mut numbers = vec![0.0; k];
                for row in 0..24 {
                    matrix.row_to_f32(row, &mut numbers).expect("a row");
                    for (token, x) in x.chunks_exact(k).enumerate() {
                        let got = got[token * 24 + row];
                        let what =
                            format!("{dtype}, token {token} of {num_tokens}, row {row}: {got}");
                        match token {
                            0 => assert_eq!(got, 0.0, "{what}"),
                            4 | 5 => assert!(!got.is_finite(), "{what}"),
                            _ => {
                                let x: Vec<f64> = x.chunks(128).flat_map(in_e4m3).collect();
                                let terms = x.iter().zip(&numbers).map(|(x, &w)| x * f64::from(w));
                                let (sum, squares) =
                                    terms.fold((0.0, 0.0), |(sum, all), t| (sum + t, all + t * t));
                                let off = squares.sqrt() * 1e-2 + 1e-30;
                                let is_too_large = dtype == DType::F16 && sum.abs() > 60_000.0;
                                let is_near = (got - sum).abs() <= off.max(smallest);
                                assert!(is_near || is_too_large, "{what}, not {sum}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn fp8_products_that_no_kernel_serves_are_refused_on_cuda() {
    let Some(context) = context() else { return };
    let mut bench = Bench::new(&context, DType::BF16, 1);
    let (layout, _, memory) = small(&mut bench, 256);
    let weight = QuantisedTiles::new(layout, &memory).expect("tiles");
    let mut is_served = |k: usize, n: usize, epilogue| {
        let (x, _) = bench.filled(&[2, k], 1.0, 0.0);
        let out = bench.poisoned(&[2, n]);
        multiply(&context, &x, &weight, None, epilogue, false, &out).is_ok()
    };
    assert!(is_served(256, 24, Epilogue::Store));
    assert!(is_served(256, 24, Epilogue::AddResidual));
    assert!(!is_served(256, 24, Epilogue::SwiGlu));
    assert!(!is_served(256, 12, Epilogue::SwiGlu));
    assert!(!is_served(128, 24, Epilogue::Store));
    assert!(!is_served(256, 23, Epilogue::Store));
    assert!(!is_served(250, 24, Epilogue::Store));
    context.synchronize().expect("no fault");
    // Formats that keep their activations, and groups that end inside of 128 inputs.
    for other in
        [QuantFormat { quantises_inputs: false, ..format(128, DType::F32) }, format(64, DType::F32)]
    {
        let layout = TileLayout::new(24, 256, other, false).expect("a layout");
        assert!(!is_fp8_weight(&layout), "{other:?}");
    }
}

/// The number added to the mean of squares: so large that a kernel that forgot it would be seen.
const EPS: f32 = 0.3;

/// Returns the weight of a norm of `width` inputs.
fn norm_weight(
    context: &Arc<ComputeContext>,
    dtype: DType,
    width: usize,
) -> (Bench, DeviceTensor, Vec<f64>) {
    let mut bench = Bench::with_room(context, dtype, width as u64 + 5, 1 << 20);
    let (weight, values) = bench.filled(&[width], 0.3, 1.0);
    (bench, weight, values)
}

/// Whether multiprocessors have the shared memory of data centres' chips.
fn has_large_blocks(context: &ComputeContext) -> bool {
    match context.backend() {
        ContextBackend::Cuda(cuda) => cuda.device().info().shared_memory_bytes > 128 << 10,
        ContextBackend::Cpu { .. } => false,
    }
}

/// RMSNorm of rows, rounded as Transformers rounds it.
fn normalised(dtype: DType, x: &[f64], weight: &[f64]) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| rounded::rms_norm(dtype, row, weight, EPS))
        .collect()
}

/// Blocks quantise few rows themselves, and normalise them where they are told to.
#[test]
fn fp8_products_of_few_rows_on_cuda_make_their_inputs() {
    let Some(context) = context() else { return };
    let in_groups = |x: &[f64], k: usize| -> Vec<f64> {
        x.chunks(k).flat_map(|row| row.chunks(128).flat_map(in_e4m3)).collect()
    };
    let served = Cell::new(0);
    for dtype in HALVES {
        for (group_size, scale, size) in [
            (128, DType::F32, (136, 4096)),
            (128, DType::BF16, (24, 1544)),
            (ROW, DType::F32, (1003, 264)),
            (256, DType::F32, (24, 12_288)),
            (128, DType::F32, (40, 8)),
            (128, DType::BF16, (6144, 1024)),
        ] {
            let (_bench, norm, norm_values) = norm_weight(&context, dtype, size.1);
            for norm in [None, Some((&*norm, EPS))] {
                let product = Product {
                    rounded: &|x, k| match norm {
                        None => in_groups(x, k),
                        Some(_) => in_groups(&normalised(dtype, x, &norm_values), k),
                    },
                    // As in `check`; a norm rounds some inputs, and then their codes, the other way.
                    error: &|_, _, root| root * 2f64.powi(if norm.is_some() { -6 } else { -8 }),
                    most_flipped: &|dtype| if dtype == DType::BF16 { 0.4 } else { 1.0 },
                    scale_rows: 1,
                    multiply: &|x, weight, bias, epilogue, is_fixed, out| {
                        let num_tokens = x.shape()[0] as usize;
                        if !is_fixed && quantises_inputs(&context, num_tokens, weight.layout())? {
                            served.set(served.get() + 1);
                            return linear_own_fp8(&context, x, norm, weight, bias, epilogue, out);
                        }
                        let Some((norm, eps)) = norm else {
                            return multiply(&context, x, weight, bias, epilogue, is_fixed, out);
                        };
                        let shape = [num_tokens, size.1];
                        let normed =
                            DeviceTensor::temporary(&context, x.element(), &shape, "rows")?;
                        rms_norm_rounded(&context, x, norm, eps, &normed)?;
                        multiply(&context, &normed, weight, bias, epilogue, is_fixed, out)
                    },
                };
                for epilogue in EPILOGUES {
                    let has_bias = epilogue == Epilogue::Store;
                    let format = format(group_size, scale);
                    let case = Case { dtype, format, epilogue, has_bias, size };
                    check_product(&context, case, &[1, 2, 3, 4, 5], &product);
                }
            }
        }
    }
    assert!(served.get() > 0 || !has_large_blocks(&context), "no product made its inputs");
}
