//! Packed weights on the CPU: dtypes, awkward shapes, and bits that depend on nothing but the row.

use crate::support::{
    assert_close, assert_same_bits, backends, reference, rounded, rounded_all, to_bytes, Guarded,
    Random, Tolerance, DTYPES,
};
use xserv::backend::cpu::{CpuBackend, Streaming};
use xserv::memory::DType;
use xserv::ops::common::packed_matrix::{PackedMatrix, PairOrder};
use xserv::ops::linear::cpu::{gated_mlp, linear, linear_silu_mul, LinearScratch, Store};

/// The types of weights in the orders that they have. Every backend takes all of them.
const FORMS: [(DType, PairOrder); 4] = [
    (DType::F32, PairOrder::Rows),
    (DType::F16, PairOrder::Rows),
    (DType::BF16, PairOrder::Rows),
    (DType::BF16, PairOrder::Tiles),
];

fn packed(weight: &[f32], n: usize, k: usize, form: (DType, PairOrder)) -> PackedMatrix {
    let (dtype, order) = form;
    let mut matrix = PackedMatrix::zeroed(n, k, dtype, order).unwrap();
    matrix.writer().unwrap().pack_rows(0, &to_bytes(weight, dtype), dtype).unwrap();
    matrix
}

fn run(backend: &CpuBackend, x: &[f32], num_tokens: usize, weight: &PackedMatrix) -> Vec<f32> {
    let mut out = Guarded::new(num_tokens * weight.out_features());
    let scratch = &mut LinearScratch::new();
    linear(backend, x, num_tokens, weight, None, out.get(), Store::Overwrite, scratch).unwrap();
    out.checked("linear").to_vec()
}

/// Returns the activations as the weights' type rounds them.
fn activations(x: &[f32], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::BF16 => rounded_all(x, DType::BF16),
        _ => x.to_vec(),
    }
}

#[test]
fn awkward_shapes() {
    let mut random = Random::new(1);
    let backends = backends(&[1, 2]);
    for form in FORMS {
        let dtype = form.0;
        for (k, n) in
            [(1, 1), (2, 63), (31, 64), (32, 65), (33, 130), (97, 31), (256, 33), (1000, 200)]
        {
            let weight = rounded_all(&random.normals(k * n), dtype);
            let matrix = packed(&weight, n, k, form);
            let bias = random.normals(n);
            for num_tokens in [0, 1, 2, 5, 6, 7, 23, 24, 25, 31, 32, 33, 97] {
                let x = random.normals(num_tokens * k);
                let exact = activations(&x, dtype);
                let plain = reference::linear(&exact, &weight, None, k, n);
                let biased = reference::linear(&exact, &weight, Some(&bias), k, n);
                for backend in &backends {
                    let what =
                        format!("linear {form:?} {num_tokens}x{k}x{n} on {}", backend.name());
                    assert_close(
                        &what,
                        &run(backend, &x, num_tokens, &matrix),
                        &plain,
                        Tolerance::Rms(2e-5),
                    );
                    let before = random.normals(num_tokens * n);
                    let mut out = Guarded::of(&before);
                    let (bias, scratch) = (Some(&bias[..]), &mut LinearScratch::new());
                    linear(backend, &x, num_tokens, &matrix, bias, out.get(), Store::Add, scratch)
                        .unwrap();
                    let sums: Vec<f64> =
                        biased.iter().zip(&before).map(|(&r, &b)| r + f64::from(b)).collect();
                    assert_close(&what, out.checked(&what), &sums, Tolerance::Rms(2e-5));
                }
            }
        }
    }
}

#[test]
fn gated_products() {
    let mut random = Random::new(8);
    let backends = backends(&[1, 3]);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    for form in FORMS {
        let dtype = form.0;
        for (k, width) in [(33, 64), (64, 65), (96, 320), (40, 1)] {
            let n = 2 * width;
            let weight = rounded_all(&random.normals(k * n), dtype);
            let matrix = packed(&weight, n, k, form);
            let bias = random.normals(n);
            for (num_tokens, bias) in
                [(0, None), (1, None), (3, Some(&bias)), (16, None), (17, None), (70, None)]
            {
                let x = random.normals(num_tokens * k);
                let bias = bias.map(|bias| &bias[..]);
                let exact = reference::linear(&activations(&x, dtype), &weight, bias, k, n);
                let expected: Vec<f64> = (0..num_tokens * width)
                    .map(|i| (i / width * n, i % width))
                    .map(|(row, column)| silu(exact[row + column]) * exact[row + width + column])
                    .collect();
                for backend in &backends {
                    let what = format!("{form:?} {num_tokens}x{k}x{width} on {}", backend.name());
                    let (mut products, mut out) =
                        (vec![0.0; num_tokens * n], Guarded::new(num_tokens * width));
                    let scratch = &mut LinearScratch::new();
                    let (products, to) = (&mut products[..], out.get());
                    linear_silu_mul(backend, &x, num_tokens, &matrix, bias, products, to, scratch)
                        .unwrap();
                    assert_close(&what, out.checked(&what), &expected, Tolerance::Rms(4e-5));
                }
            }
        }
    }
}

#[test]
fn a_gated_mlp_has_the_bits_of_its_products() {
    let mut random = Random::new(12);
    let backends = backends(&[1, 3]);
    for form in FORMS {
        for (k, width, n) in
            [(33, 64, 50), (64, 128, 64), (1100, 320, 33), (40, 1, 8), (5600, 64, 9)]
        {
            let gate_up = packed(&random.normals(2 * width * k), 2 * width, k, form);
            let down = packed(&random.normals(n * width), n, width, form);
            let bias = random.normals(n);
            for num_tokens in [0, 1, 15, 16, 17, 33, 70] {
                let x = random.normals(num_tokens * k);
                let before = random.normals(num_tokens * n);
                for (backend, bias) in backends
                    .iter()
                    .flat_map(|backend| [(backend, None), (backend, Some(&bias[..]))])
                {
                    let what =
                        format!("{form:?} {num_tokens}x{k}x{width}x{n} on {}", backend.name());
                    let scratch = &mut LinearScratch::new();
                    let mut products = vec![f32::NAN; 2 * num_tokens * width];
                    let mut activated = vec![f32::NAN; num_tokens * width];
                    let mut expected = before.clone();
                    linear_silu_mul(
                        backend,
                        &x,
                        num_tokens,
                        &gate_up,
                        None,
                        &mut products,
                        &mut activated,
                        scratch,
                    )
                    .unwrap();
                    linear(
                        backend,
                        &activated,
                        num_tokens,
                        &down,
                        bias,
                        &mut expected,
                        Store::Add,
                        scratch,
                    )
                    .unwrap();
                    let mut out = Guarded::of(&before);
                    let mut activated = Guarded::new(num_tokens * width);
                    gated_mlp(
                        backend,
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
}

/// Results of a MiB and more at a multiple of 64 bytes are written past the caches.
#[test]
fn large_results_have_the_bits_of_small_ones() {
    let mut random = Random::new(13);
    let (k, num_tokens) = (70, 301);
    for form in FORMS {
        for n in [1024, 1040] {
            let matrix = packed(&random.normals(n * k), n, k, form);
            let bias = random.normals(n);
            let x = random.normals(num_tokens * k);
            for (backend, bias) in
                backends(&[1, 2]).iter().flat_map(|b| [(b, None), (b, Some(&bias[..]))])
            {
                let scratch = &mut LinearScratch::new();
                let mut product = |first: usize, count: usize, out: &mut [f32]| {
                    let x = &x[first * k..(first + count) * k];
                    let store = Store::Overwrite;
                    linear(backend, x, count, &matrix, bias, out, store, scratch).unwrap();
                };
                let mut room = vec![f32::NAN; num_tokens * n + 16];
                let aligned = room.as_ptr().align_offset(64);
                let out = &mut room[aligned..][..num_tokens * n];
                product(0, num_tokens, out);
                let mut row_alone = vec![0.0; n];
                for (row, out) in out.chunks_exact(n).enumerate().step_by(25) {
                    product(row, 1, &mut row_alone);
                    assert_same_bits(&format!("{form:?} {n} {}", backend.name()), out, &row_alone);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads() {
    let mut random = Random::new(2);
    for form in FORMS {
        let (k, n, num_tokens) = (301, 259, 67);
        let matrix = packed(&random.normals(k * n), n, k, form);
        let x = random.normals(num_tokens * k);
        for isa in backends(&[1]) {
            let whole = run(&isa, &x, num_tokens, &matrix);
            for num_threads in [2, 3, 5] {
                let other = CpuBackend::with_isa(num_threads, isa.isa()).unwrap();
                assert_same_bits("threads", &whole, &run(&other, &x, num_tokens, &matrix));
            }
            for (first, count) in [(0, 1), (66, 1), (13, 1), (5, 6), (20, 23), (3, 24), (40, 27)] {
                let part = run(&isa, &x[first * k..(first + count) * k], count, &matrix);
                let what = format!("{form:?} rows {first}+{count} on {}", isa.name());
                assert_same_bits(&what, &part, &whole[first * n..(first + count) * n]);
            }
        }
    }
}

/// Many rows of many inputs are summed in stretches of k; a row alone is not.
#[test]
fn long_rows_have_the_same_bits_in_stretches_and_in_one_go() {
    let mut random = Random::new(7);
    for form in FORMS {
        let dtype = form.0;
        // Three stretches, the last one short and odd; two row runs.
        let (k, n, num_tokens) = (4999, 65, 131);
        let weight = rounded_all(&random.normals(k * n), dtype);
        let matrix = packed(&weight, n, k, form);
        let x = random.normals(num_tokens * k);
        let exact = reference::linear(&activations(&x, dtype), &weight, None, k, n);
        for backend in backends(&[1, 2]) {
            let what = format!("{form:?} on {}", backend.name());
            let whole = run(&backend, &x, num_tokens, &matrix);
            assert_close(&what, &whole, &exact, Tolerance::Rms(2e-5));
            for row in [0, 5, 77, 130] {
                let alone = run(&backend, &x[row * k..(row + 1) * k], 1, &matrix);
                assert_same_bits(&what, &alone, &whole[row * n..(row + 1) * n]);
            }
        }
    }
}

/// Every processor prefetches in its way, and some multiply few rows in stretches.
#[test]
fn few_rows_have_the_same_bits_however_weights_are_fetched() {
    let mut random = Random::new(8);
    for form in FORMS {
        // Whole stretches and a part, which ends within a tile.
        let (k, n) = (301, 70);
        let matrix = packed(&random.normals(k * n), n, k, form);
        for num_tokens in [2, 3, 6, 7, 8, 12, 13] {
            let x = random.normals(num_tokens * k);
            for mut backend in backends(&[1]) {
                let expected = run(&backend, &x, num_tokens, &matrix);
                for streaming in Streaming::ALL {
                    backend = backend.with_streaming(streaming);
                    let what = format!("{form:?}, {num_tokens} rows, {streaming:?}");
                    assert_same_bits(&what, &run(&backend, &x, num_tokens, &matrix), &expected);
                }
            }
        }
    }
}

#[test]
fn converts_while_packing() {
    let mut random = Random::new(3);
    let (n, k) = (70, 19);
    let values = random.normals(n * k);
    for source in DTYPES {
        for form in FORMS {
            let dtype = form.0;
            let mut matrix = PackedMatrix::zeroed(n, k, dtype, form.1).unwrap();
            let bytes = to_bytes(&values, source);
            let writer = matrix.writer().unwrap();
            // In pieces that do not begin at panels, last piece first.
            for (first, end) in [(65, 70), (10, 65), (0, 10)] {
                let size = k * source.size_bytes();
                writer.pack_rows(first, &bytes[first * size..end * size], source).unwrap();
            }
            drop(writer);
            for row in 0..n {
                let mut out = vec![f32::NAN; k];
                matrix.row_to_f32(row, &mut out).unwrap();
                let expected: Vec<f32> = values[row * k..(row + 1) * k]
                    .iter()
                    .map(|&v| rounded(rounded(v, source), dtype))
                    .collect();
                assert_same_bits(&format!("{source} to {dtype}, row {row}"), &out, &expected);
            }
        }
    }
}

#[test]
fn packs_columns_in_pieces_and_from_several_threads() {
    let mut random = Random::new(4);
    let (k, n) = (38, 200);
    for form in FORMS {
        let dtype = form.0;
        let by_rows = rounded_all(&random.normals(n * k), dtype);
        let expected = packed(&by_rows, n, k, form);
        let mut matrix = PackedMatrix::zeroed(n, k, dtype, form.1).unwrap();
        let writer = matrix.writer().unwrap();
        // Two tensors beside each other, [k, 130] and [k, 70], in pieces of even k.
        std::thread::scope(|scope| {
            for (offset, columns) in [(0, 130), (130, 70)] {
                let (writer, by_rows) = (&writer, &by_rows);
                scope.spawn(move || {
                    for first_k in [0, 10, 20] {
                        let num_k = if first_k == 20 { 18 } else { 10 };
                        let values: Vec<f32> = (first_k..first_k + num_k)
                            .flat_map(|i| {
                                (offset..offset + columns).map(move |o| by_rows[o * k + i])
                            })
                            .collect();
                        let bytes = to_bytes(&values, dtype);
                        writer.pack_columns(first_k, num_k, offset, &bytes, dtype).unwrap();
                    }
                });
            }
        });
        drop(writer);
        for row in 0..n {
            let (mut got, mut want) = (vec![0.0; k], vec![0.0; k]);
            matrix.row_to_f32(row, &mut got).unwrap();
            expected.row_to_f32(row, &mut want).unwrap();
            assert_same_bits(&format!("{dtype} row {row}"), &got, &want);
        }
    }
}

#[test]
fn refuses_wrong_shapes() {
    let backend = CpuBackend::new(1).unwrap();
    let mut matrix = PackedMatrix::zeroed(10, 4, DType::BF16, PairOrder::Rows).unwrap();
    let scratch = &mut LinearScratch::new();
    let store = Store::Overwrite;
    let mut out = [0.0; 10];
    assert!(linear(&backend, &[0.0; 5], 1, &matrix, None, &mut out, store, scratch).is_err());
    assert!(linear(&backend, &[0.0; 4], 1, &matrix, None, &mut out[..9], store, scratch).is_err());
    assert!(linear(&backend, &[0.0; 4], 2, &matrix, None, &mut out, store, scratch).is_err());
    let bias = Some(&[0.0; 9][..]);
    assert!(linear(&backend, &[0.0; 4], 1, &matrix, bias, &mut out, store, scratch).is_err());
    assert!(linear(&backend, &[], usize::MAX, &matrix, None, &mut out, store, scratch).is_err());
    assert!(matrix.row_to_f32(10, &mut out[..4]).is_err());
    assert!(matrix.row_to_f32(0, &mut out[..5]).is_err());
    let writer = matrix.writer().unwrap();
    assert!(writer.pack_rows(7, &[0; 4 * 2 * 4], DType::BF16).is_err());
    assert!(writer.pack_rows(0, &[0; 7], DType::BF16).is_err());
    assert!(writer.pack_rows(usize::MAX, &[0; 8], DType::BF16).is_err());
    assert!(writer.pack_columns(1, 1, 0, &[0; 20], DType::BF16).is_err());
    assert!(writer.pack_columns(0, 6, 0, &[0; 120], DType::BF16).is_err());
    assert!(writer.pack_columns(0, 1, 1, &[0; 20], DType::BF16).is_err());
    assert!(PackedMatrix::zeroed(usize::MAX, 2, DType::F32, PairOrder::Rows).is_err());
    assert!(PackedMatrix::zeroed(1 << 40, 1 << 20, DType::F32, PairOrder::Rows).is_err());
}
