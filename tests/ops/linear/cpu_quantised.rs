//! Quantised weights on the CPU: every code, awkward shapes, and bits that depend on nothing but the
//! row.

use crate::quantised::{in_e4m3, random_matrix};
use crate::support::{
    assert_close, assert_same_bits, backends, reference, rounded_all, Guarded, Random, Tolerance,
};
use xserv::backend::cpu::{CpuBackend, Isa, Streaming};
use xserv::memory::DType;
use xserv::ops::linear::cpu::{gated_mlp, linear, linear_silu_mul, LinearScratch, Store};
use xserv::ops::quantised::{Code, QuantFormat, QuantisedMatrix, QuantisedPanels};

/// About how large the numbers of a matrix are.
const SIZE: f64 = 0.05;

/// Returns the numbers of a matrix, row after row.
pub fn weights(matrix: &QuantisedMatrix) -> Vec<f32> {
    let mut all = vec![0.0; matrix.out_features * matrix.in_features];
    for (row, out) in all.chunks_exact_mut(matrix.in_features).enumerate() {
        matrix.row_to_f32(row, out).unwrap();
    }
    all
}

/// All formats with zeros or without, in groups of these sizes.
pub fn formats(group_sizes: &[usize]) -> Vec<QuantFormat> {
    let mut all = Vec::new();
    for code in Code::ALL {
        for &group_size in group_sizes {
            for (has_zeros, scale) in
                [(false, DType::F16), (false, DType::F32), (!code.is_float(), DType::BF16)]
            {
                // Floats with quantised inputs have cases of their own.
                for quantises_inputs in [false, !code.is_float()] {
                    let format =
                        QuantFormat { code, group_size, has_zeros, scale, quantises_inputs };
                    if !all.contains(&format) {
                        all.push(format);
                    }
                }
            }
        }
    }
    all
}

fn run(backend: &CpuBackend, x: &[f32], num_tokens: usize, weight: &QuantisedPanels) -> Vec<f32> {
    let mut out = Guarded::new(num_tokens * weight.out_features());
    let scratch = &mut LinearScratch::new();
    linear(backend, x, num_tokens, weight, None, out.get(), Store::Overwrite, scratch).unwrap();
    out.checked("linear").to_vec()
}

/// Returns the backends of all instruction sets, with and without the product of bytes.
fn all_backends(num_threads: &[usize]) -> Vec<CpuBackend> {
    let without = backends(num_threads).into_iter().map(CpuBackend::without_byte_dot);
    backends(num_threads).into_iter().chain(without).collect()
}

/// Returns the backends that make tiles of quantised weights for several rows.
fn tiled_backends(num_threads: &[usize]) -> Vec<CpuBackend> {
    let is_tiled =
        |backend: &CpuBackend| [Isa::EmulatedAmx, Isa::Avx512Amx].contains(&backend.isa());
    backends(num_threads).into_iter().filter(is_tiled).collect()
}

/// Returns the backends that multiply bf16 by bf16 in vectors.
fn vector_backends(num_threads: &[usize]) -> Vec<CpuBackend> {
    let is_such = |backend: &CpuBackend| backend.isa() == Isa::Avx512Bf16;
    backends(num_threads).into_iter().filter(is_such).collect()
}

/// The format of weights in FP8 whose activations are quantised too.
const IN_FP8: QuantFormat = QuantFormat {
    code: Code::Fp8,
    group_size: 128,
    has_zeros: false,
    scale: DType::F32,
    quantises_inputs: true,
};

/// Whether a product with a weight that may be rounded is one of numbers in bf16; else its codes are multiplied.
fn takes_bf16(backend: &CpuBackend, num_tokens: usize, k: usize, format: &QuantFormat) -> bool {
    let is_short = format.group_size.min(k) < 64;
    if backend.isa() == Isa::Avx512Bf16 {
        let min_tokens = if is_short { 24 } else { 64 };
        return !format.code.is_float() && !format.quantises_inputs && num_tokens >= min_tokens;
    }
    match (format.code.is_float(), is_short) {
        (true, _) => num_tokens >= 4,
        (false, true) => num_tokens >= 12,
        (false, false) => num_tokens >= 32 && !format.quantises_inputs,
    }
}

/// Rounds rows of `k` activations as a product does before it multiplies: with integer weights to
/// 16 or 8 bits, by the largest of up to 128 inputs of a group.
fn rounded_rows(x: &[f32], k: usize, format: &QuantFormat) -> Vec<f32> {
    if format.quantises_inputs && format.code.is_float() {
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let groups = wide.chunks_exact(k).flat_map(|row| row.chunks(128));
        return groups.flat_map(in_e4m3).map(|x| x as f32).collect();
    }
    if format.code.is_float() {
        return x.to_vec();
    }
    let most: f32 = if format.quantises_inputs { 127.0 } else { 32512.0 };
    let mut rounded = Vec::new();
    for row in x.chunks_exact(k) {
        for segment in row.chunks(format.group_size).flat_map(|group| group.chunks(128)) {
            let largest = segment.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            let inverse = most / largest;
            let scale = f64::from(largest) / f64::from(most);
            rounded.extend(
                segment.iter().map(|x| (f64::from((x * inverse).round_ties_even()) * scale) as f32),
            );
        }
    }
    rounded
}

#[test]
fn awkward_shapes_of_quantised_weights() {
    let mut random = Random::new(21);
    let backends = all_backends(&[1, 2]);
    for format in formats(&[1, 32, 100, 200]).into_iter().chain([IN_FP8]) {
        for (k, n) in [(1, 1), (31, 64), (33, 65), (97, 130), (330, 31)] {
            let matrix = random_matrix(&mut random, n, k, format, SIZE);
            let exact = weights(&matrix);
            let bias = random.normals(n);
            for num_tokens in [0, 1, 2, 3, 4, 5, 8, 9, 33, 66] {
                let x = random.normals(num_tokens * k);
                let unrounded = reference::linear(&x, &exact, None, k, n);
                let rounded = rounded_rows(&x, k, &format);
                let plain = reference::linear(&rounded, &exact, None, k, n);
                let biased = reference::linear(&rounded, &exact, Some(&bias), k, n);
                // Not for each instruction set: what comes after would depend on the processor.
                let before = random.normals(num_tokens * n);
                for backend in &backends {
                    let packed = QuantisedPanels::pack(backend, &matrix).unwrap();
                    let what = format!("{format:?} {num_tokens}x{k}x{n} on {}", backend.name());
                    let out = run(backend, &x, num_tokens, &packed);
                    assert_close(&what, &out, &plain, Tolerance::Rms(2e-5));
                    // A code of e4m3 is wrong by up to a sixteenth of its number, typically by a fortieth.
                    let rounding = if format.quantises_inputs { 0.15 } else { 2e-4 };
                    assert_close(&what, &out, &unrounded, Tolerance::Rms(rounding));
                    let mut out = Guarded::of(&before);
                    let (bias, scratch) = (Some(&bias[..]), &mut LinearScratch::new());
                    linear(backend, &x, num_tokens, &packed, bias, out.get(), Store::Add, scratch)
                        .unwrap();
                    let sums: Vec<f64> =
                        biased.iter().zip(&before).map(|(a, &b)| a + f64::from(b)).collect();
                    assert_close(&what, out.checked(&what), &sums, Tolerance::Rms(2e-5));
                }
            }
        }
    }
}

#[test]
fn packed_rows_are_the_rows() {
    let mut random = Random::new(22);
    for backend in backends(&[2]) {
        for format in formats(&[1, 32, 100]) {
            let (n, k) = (70, 103);
            let mut matrix = random_matrix(&mut random, n, k, format, SIZE);
            if format.group_size == 32 {
                matrix.order = (0..k as u32).map(|place| place * 7 % k as u32).collect();
            }
            let packed = QuantisedPanels::pack(&backend, &matrix).unwrap();
            assert_eq!(
                Some(packed.size_bytes()),
                QuantisedPanels::bytes_for(n, k, &format, !matrix.order.is_empty())
            );
            let mut row_of_panels = vec![0.0; k];
            let all = weights(&matrix);
            for (row, expected) in all.chunks_exact(k).enumerate() {
                packed.row_to_f32(row, &mut row_of_panels).unwrap();
                assert_same_bits(&format!("{format:?} row {row}"), &row_of_panels, expected);
            }
            assert!(packed.row_to_f32(n, &mut row_of_panels).is_err());
        }
    }
}

#[test]
fn a_row_of_quantised_weights_has_the_same_bits_alone_and_in_a_batch() {
    let mut random = Random::new(23);
    let (k, n) = (3000, 130);
    for format in formats(&[32, 128, 3000]).into_iter().chain([IN_FP8]) {
        let mut matrix = random_matrix(&mut random, n, k, format, SIZE);
        if format.scale == DType::F16 {
            matrix.order = (0..k as u32).rev().collect();
        }
        let x = random.normals(70 * k);
        for backend in all_backends(&[1, 3]) {
            let packed = QuantisedPanels::pack(&backend, &matrix).unwrap();
            let alone = run(&backend, &x[..k], 1, &packed);
            for num_tokens in [2, 3, 4, 7, 8, 9, 40, 70] {
                let batch = run(&backend, &x[..num_tokens * k], num_tokens, &packed);
                let what = format!("{format:?} in {num_tokens} on {}", backend.name());
                assert_same_bits(&what, &batch[..n], &alone);
            }
        }
    }
}

#[test]
fn gated_products_of_quantised_weights() {
    let mut random = Random::new(24);
    let format = QuantFormat {
        code: Code::Int4,
        group_size: 32,
        has_zeros: true,
        scale: DType::BF16,
        quantises_inputs: false,
    };
    let (k, width) = (96, 128);
    let matrix = random_matrix(&mut random, 2 * width, k, format, SIZE);
    for backend in backends(&[2]) {
        let packed = QuantisedPanels::pack(&backend, &matrix).unwrap();
        for num_tokens in [1, 20, 70] {
            let x = random.normals(num_tokens * k);
            let rounded = rounded_rows(&x, k, &format);
            let products = reference::linear(&rounded, &weights(&matrix), None, k, 2 * width);
            let expected: Vec<f64> = products
                .chunks_exact(2 * width)
                .flat_map(|row| {
                    (0..width).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[width + i])
                })
                .collect();
            let (mut room, mut out) =
                (vec![0.0; num_tokens * 2 * width], vec![0.0; num_tokens * width]);
            let scratch = &mut LinearScratch::new();
            linear_silu_mul(&backend, &x, num_tokens, &packed, None, &mut room, &mut out, scratch)
                .unwrap();
            assert_close("gated", &out, &expected, Tolerance::Rms(2e-5));
        }
    }
}

#[test]
fn integers_have_the_same_sums_with_and_without_the_product_of_bytes() {
    let mut random = Random::new(25);
    let (k, n, num_tokens) = (777, 130, 71);
    for format in formats(&[32, 777]).into_iter().filter(|format| !format.code.is_float()) {
        let matrix = random_matrix(&mut random, n, k, format, SIZE);
        let x = random.normals(num_tokens * k);
        for (backend, plain) in backends(&[1]).into_iter().zip(backends(&[2])) {
            let plain = plain.without_byte_dot();
            let packed = QuantisedPanels::pack(&backend, &matrix).unwrap();
            let what = format!("{format:?} on {}", backend.name());
            let out = run(&backend, &x, num_tokens, &packed);
            assert_same_bits(&what, &out, &run(&plain, &x, num_tokens, &packed));
        }
    }
}

/// Every processor prefetches in its way, and some multiply few rows in stretches.
#[test]
fn few_rows_have_the_same_bits_however_codes_are_fetched() {
    let mut random = Random::new(26);
    let (k, n) = (777, 70);
    for format in formats(&[32, 128, 777]) {
        let matrix = random_matrix(&mut random, n, k, format, SIZE);
        for num_tokens in [1, 2, 3, 4, 5, 8, 31] {
            let x = random.normals(num_tokens * k);
            for mut backend in backends(&[1]) {
                let packed = QuantisedPanels::pack(&backend, &matrix).unwrap().rounding(true);
                let expected = run(&backend, &x, num_tokens, &packed);
                for streaming in Streaming::ALL {
                    backend = backend.with_streaming(streaming);
                    let what = format!("{format:?}, {num_tokens} rows, {streaming:?}");
                    assert_same_bits(&what, &run(&backend, &x, num_tokens, &packed), &expected);
                }
            }
        }
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_overflow() {
    let (k, n) = (256, 16);
    for (code, largest, group_size) in
        [(Code::Int4, 15, 256), (Code::Int4, 15, 32), (Code::Int8, 255, 256)]
    {
        for zero in [0, largest] {
            let format = QuantFormat {
                code,
                group_size,
                has_zeros: true,
                scale: DType::F32,
                quantises_inputs: false,
            };
            let mut matrix = QuantisedMatrix::empty(n, k, format).unwrap();
            matrix.codes.fill(if zero == 0 { 255 } else { 0 });
            matrix.zeros.fill(zero);
            matrix.scales.fill(1.0);
            for (sign, num_tokens) in [(1.0, 1), (-1.0, 1), (1.0, 70), (-1.0, 70)] {
                let x = vec![sign * 3.0; num_tokens * k];
                let expected = reference::linear(&x, &weights(&matrix), None, k, n);
                for backend in all_backends(&[1]) {
                    let packed = QuantisedPanels::pack(&backend, &matrix).unwrap();
                    let what = format!("{format:?} less {zero} times {sign} on {}", backend.name());
                    let out = run(&backend, &x, num_tokens, &packed);
                    assert_close(&what, &out, &expected, Tolerance::Rms(1e-6));
                }
            }
        }
    }
}

#[test]
fn activations_that_are_not_finite_are_not_hidden() {
    let mut random = Random::new(26);
    let (k, n) = (256, 64);
    for format in formats(&[64]) {
        let matrix = random_matrix(&mut random, n, k, format, SIZE);
        for backend in all_backends(&[1]) {
            let packed = QuantisedPanels::pack(&backend, &matrix).unwrap();
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = random.normals(2 * k);
                x[100] = wrong;
                let out = run(&backend, &x, 2, &packed);
                let what = format!("{format:?} {wrong} on {}", backend.name());
                assert!(out[..n].iter().all(|sum| !sum.is_finite()), "{what}");
                assert!(out[n..].iter().all(|sum| sum.is_finite()), "{what}");
            }
            let x = vec![1e-36; k];
            assert!(run(&backend, &x, 1, &packed).iter().all(|sum| sum.abs() < 1e-30));
        }
    }
}

/// Several rows: both operands are rounded to bf16, the weight after its numbers have been scaled.
#[test]
fn quantised_weights_in_bf16() {
    let mut random = Random::new(27);
    let backends = [tiled_backends(&[1, 3]), vector_backends(&[1, 3])];
    for format in formats(&[32, 96, 5000]).into_iter().chain([IN_FP8]) {
        for (k, n) in [(1, 1), (31, 64), (33, 65), (97, 130), (330, 31), (1100, 70)] {
            for is_ordered in [false, true] {
                if is_ordered && (format.quantises_inputs || format.scale != DType::F16) {
                    continue;
                }
                let mut matrix = random_matrix(&mut random, n, k, format, SIZE);
                if is_ordered {
                    matrix.order = (0..k as u32).rev().collect();
                }
                let exact = weights(&matrix);
                let rounded = rounded_all(&exact, DType::BF16);
                let bias = random.normals(n);
                for num_tokens in [4, 12, 16, 24, 33, 66] {
                    let takes_bf16 =
                        |backend: &&CpuBackend| takes_bf16(backend, num_tokens, k, &format);
                    if !backends.iter().flatten().any(|backend| takes_bf16(&backend)) {
                        continue;
                    }
                    let x = random.normals(num_tokens * k);
                    let is_e4m3 = format.quantises_inputs && format.code.is_float();
                    let taken = if is_e4m3 { rounded_rows(&x, k, &format) } else { x.clone() };
                    let taken = rounded_all(&taken, DType::BF16);
                    let expected = reference::linear(&taken, &rounded, Some(&bias), k, n);
                    let unrounded = reference::linear(&x, &exact, Some(&bias), k, n);
                    let before = random.normals(num_tokens * n);
                    let sums: Vec<f64> =
                        expected.iter().zip(&before).map(|(a, &b)| a + f64::from(b)).collect();
                    let mut bits_of_one_thread: [Option<Vec<f32>>; 2] = [None, None];
                    // Tiles and vectors have their orders of sums.
                    for (kind, backend) in backends.iter().enumerate().flat_map(|(kind, all)| {
                        all.iter().filter(takes_bf16).map(move |backend| (kind, backend))
                    }) {
                        let packed =
                            QuantisedPanels::pack(backend, &matrix).unwrap().rounding(true);
                        let what = format!("{format:?} {num_tokens}x{k}x{n} on {}", backend.name());
                        let scratch = &mut LinearScratch::new();
                        let mut out = Guarded::new(num_tokens * n);
                        let (bias, to) = (Some(&bias[..]), out.get());
                        let overwrite = Store::Overwrite;
                        linear(backend, &x, num_tokens, &packed, bias, to, overwrite, scratch)
                            .unwrap();
                        let out = out.checked(&what);
                        assert_close(&what, out, &expected, Tolerance::Rms(2e-5));
                        let rounding = if is_e4m3 { 0.15 } else { 1.5e-2 };
                        assert_close(&what, out, &unrounded, Tolerance::Rms(rounding));
                        let first = bits_of_one_thread[kind].get_or_insert_with(|| out.to_vec());
                        assert_same_bits(&what, out, first);
                        let mut out = Guarded::of(&before);
                        let to = out.get();
                        linear(backend, &x, num_tokens, &packed, bias, to, Store::Add, scratch)
                            .unwrap();
                        assert_close(&what, out.checked(&what), &sums, Tolerance::Rms(2e-5));
                    }
                }
            }
        }
    }
}

/// The MLP of a layer of quantised weights, of dense ones beside them, and of weights that take no plain
/// rows: each has the bits of its products.
#[test]
fn a_gated_mlp_of_quantised_weights_has_the_bits_of_its_products() {
    let mut random = Random::new(28);
    let (k, width, n) = (1100, 128, 33);
    for format in formats(&[32, 128]).into_iter().filter(|format| format.scale == DType::F16) {
        let stacked = random_matrix(&mut random, 2 * width, k, format, SIZE);
        let mut narrowing = random_matrix(&mut random, n, width, format, SIZE);
        if format.group_size == 32 {
            narrowing.order = (0..width as u32).rev().collect();
        }
        let bias = random.normals(n);
        for backend in tiled_backends(&[1, 3]) {
            let gate_up = QuantisedPanels::pack(&backend, &stacked).unwrap().rounding(true);
            let down = QuantisedPanels::pack(&backend, &narrowing).unwrap().rounding(true);
            for num_tokens in [1, 13, 16, 33, 70] {
                let what = format!("{format:?} {num_tokens} on {}", backend.name());
                let x = random.normals(num_tokens * k);
                let before = random.normals(num_tokens * n);
                let scratch = &mut LinearScratch::new();
                let mut products = vec![f32::NAN; 2 * num_tokens * width];
                let mut activated = vec![f32::NAN; num_tokens * width];
                let mut expected = before.clone();
                let (room, to) = (&mut products[..], &mut activated[..]);
                linear_silu_mul(&backend, &x, num_tokens, &gate_up, None, room, to, scratch)
                    .unwrap();
                let (bias, to) = (Some(&bias[..]), &mut expected[..]);
                linear(&backend, &activated, num_tokens, &down, bias, to, Store::Add, scratch)
                    .unwrap();
                let mut out = Guarded::of(&before);
                let mut activated = Guarded::new(num_tokens * width);
                gated_mlp(
                    &backend,
                    &x,
                    num_tokens,
                    ((&gate_up).into(), None),
                    ((&down).into(), bias),
                    &mut products,
                    activated.get(),
                    out.get(),
                    scratch,
                )
                .unwrap();
                assert_same_bits(&what, out.checked(&what), &expected);
                activated.checked(&what);
            }
        }
    }
}

/// Without tiles, codes of e4m3 are multiplied as bf16, which they are exactly, by activations that are rounded
/// to it.
#[test]
fn floats_of_8_bits_in_bf16_vectors() {
    let mut random = Random::new(29);
    let backends = vector_backends(&[1, 3]);
    if backends.is_empty() {
        eprintln!("skipped: no bf16 instructions here");
        return;
    }
    let all = formats(&[1, 32, 96, 128, 200, 5000]);
    for format in all.into_iter().filter(|format| format.code.is_float()).chain([IN_FP8]) {
        for (k, width, is_ordered) in
            [(1, 64, false), (31, 64, true), (130, 192, false), (330, 64, true), (1100, 128, false)]
        {
            let mut matrix = random_matrix(&mut random, 2 * width, k, format, SIZE);
            if is_ordered {
                matrix.order = (0..k as u32).rev().collect();
            }
            let exact = weights(&matrix);
            let num_tokens = 66;
            let x = random.normals(num_tokens * k);
            let ordered: Vec<f32> = match is_ordered {
                true => x.chunks_exact(k).flat_map(|row| row.iter().rev().copied()).collect(),
                false => x.clone(),
            };
            // Activations are quantised in the order of the weight.
            let taken = rounded_rows(&ordered, k, &format);
            let mut taken =
                if format.quantises_inputs { taken } else { rounded_all(&taken, DType::BF16) };
            if is_ordered {
                taken.chunks_exact_mut(k).for_each(<[f32]>::reverse);
            }
            let products = reference::linear(&taken, &exact, None, k, 2 * width);
            let gated: Vec<f64> = products
                .chunks_exact(2 * width)
                .flat_map(|row| {
                    (0..width).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[width + i])
                })
                .collect();
            for backend in &backends {
                let packed = QuantisedPanels::pack(backend, &matrix).unwrap().rounding(true);
                let whole = run(backend, &x, num_tokens, &packed);
                let what = format!("{format:?} {k}x{width} on {}", backend.name());
                assert_close(&what, &whole, &products, Tolerance::Rms(2e-5));
                for n in [1, 2, 3, 4, 5, 6, 7, 24, 25] {
                    let out = run(backend, &x[..n * k], n, &packed);
                    assert_same_bits(&what, &out, &whole[..n * 2 * width]);
                    let (mut room, scratch) = (vec![0.0; n * 2 * width], &mut LinearScratch::new());
                    let mut out = Guarded::new(n * width);
                    let (x, to) = (&x[..n * k], out.get());
                    linear_silu_mul(backend, x, n, &packed, None, &mut room, to, scratch).unwrap();
                    let expected = &gated[..n * width];
                    assert_close(&what, out.checked(&what), expected, Tolerance::Rms(2e-5));
                }
            }
        }
    }
}
