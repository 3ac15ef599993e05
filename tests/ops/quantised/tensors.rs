//! Quantised matrices of a caller's, through the C interface: to codes and back, and the product.

use super::codes::c_number;
use super::random_matrix;
use crate::support::tensors::*;
use crate::support::Random;
use xserv::ffi::*;
use xserv::memory::DType;
use xserv::ops::quantised::{Code, QuantFormat, QuantisedMatrix};

fn type_of(dtype: DType) -> Type {
    match dtype {
        DType::F32 => Type::F32,
        DType::F16 => Type::F16,
        DType::BF16 => Type::BF16,
    }
}

/// Returns a number of f32 rounded to a type. Values of f64 would be cut before they are rounded by
/// `half`, so that some just above the middle of two neighbours went to the even one.
fn from_f32(element: Type, x: f64) -> f64 {
    match element {
        Type::F16 => half::f16::from_f32(x as f32).into(),
        Type::BF16 => half::bf16::from_f32(x as f32).into(),
        _ => x,
    }
}

/// Returns the words of the codes, as numbers.
fn words(matrix: &QuantisedMatrix) -> Vec<f64> {
    let word = |bytes: &[u8]| f64::from(i32::from_le_bytes(bytes.try_into().unwrap()));
    matrix.codes.chunks_exact(4).map(word).collect()
}

/// Returns the numbers of a matrix in f64.
fn numbers(matrix: &QuantisedMatrix) -> Vec<f64> {
    let mut row = vec![0.0; matrix.in_features];
    let mut all = Vec::new();
    for index in 0..matrix.out_features {
        matrix.row_to_f32(index, &mut row).expect("a row");
        all.extend(row.iter().map(|&x| f64::from(x)));
    }
    all
}

/// The tensors of a matrix whose scales are those of each `group_rows`-th row; the scales and zeros
/// of the others become equal.
struct Parts<'a> {
    codes: TestTensor<'a>,
    scales: TestTensor<'a>,
    zeros: Option<TestTensor<'a>>,
}

fn parts<'a>(context: &'a Context, matrix: &mut QuantisedMatrix, group_rows: usize) -> Parts<'a> {
    let groups = matrix.num_groups();
    for row in 0..matrix.out_features {
        let first = row / group_rows * group_rows * groups;
        for group in 0..groups {
            matrix.scales[row * groups + group] = matrix.scales[first + group];
            if matrix.format.has_zeros {
                matrix.zeros[row * groups + group] = matrix.zeros[first + group];
            }
        }
    }
    let (rows, bits) = (matrix.out_features, matrix.format.code.bits());
    let num_words = matrix.in_features * bits / 32;
    let own = || (0..rows).step_by(group_rows).flat_map(|row| row * groups..(row + 1) * groups);
    let shape = [rows.div_ceil(group_rows) as i64, groups as i64];
    let scales: Vec<f64> = own().map(|i| f64::from(matrix.scales[i])).collect();
    let zeros: Vec<f64> = match matrix.format.has_zeros {
        true => own().map(|i| f64::from(matrix.zeros[i])).collect(),
        false => Vec::new(),
    };
    let spread = [2 * shape[1] + 1, 2];
    Parts {
        codes: TestTensor::strided(
            context,
            Type::I32,
            &[rows as i64, num_words as i64],
            &[num_words as i64 + 3, 1],
            0,
            &words(matrix),
        ),
        scales: TestTensor::strided(
            context,
            type_of(matrix.format.scale),
            &shape,
            &spread,
            0,
            &scales,
        ),
        zeros: matrix
            .format
            .has_zeros
            .then(|| TestTensor::strided(context, Type::I32, &shape, &spread, 0, &zeros)),
    }
}

impl Parts<'_> {
    fn zeros(&self) -> Option<xserv_tensor> {
        self.zeros.as_ref().map(TestTensor::view)
    }
}

pub fn or_null(view: &Option<xserv_tensor>) -> *const xserv_tensor {
    view.as_ref().map_or(std::ptr::null(), |view| view)
}

fn formats() -> Vec<(QuantFormat, usize)> {
    let mut formats = Vec::new();
    for code in Code::ALL {
        for (group_size, group_rows, scale) in [
            (32, 1, DType::BF16),
            (128, 128, DType::F32),
            (20, 3, DType::F16),
            (usize::MAX, 1, DType::F32),
            (usize::MAX, usize::MAX, DType::BF16),
        ] {
            for has_zeros in [false, true] {
                if !code.is_float() || !has_zeros {
                    let quantises_inputs = false;
                    formats.push((
                        QuantFormat { code, group_size, has_zeros, scale, quantises_inputs },
                        group_rows,
                    ));
                }
            }
        }
    }
    formats
}

#[test]
fn numbers_and_products_of_a_callers_matrix() {
    let mut random = Random::new(3);
    for context in contexts() {
        for (format, group_rows) in formats() {
            for (n, k, tokens) in [(37, 96, 3), (150, 256, 1), (8, 8, 20), (5, 40, 0)] {
                let group_rows = group_rows.min(n);
                let mut matrix = random_matrix(&mut random, n, k, format, 0.3);
                let parts = parts(&context, &mut matrix, group_rows);
                let want = numbers(&matrix);
                let zeros = parts.zeros();
                let size = if format.group_size >= k { 0 } else { format.group_size as u32 };
                let (rows, code) = (group_rows as u32, c_number(format.code));
                let (codes, scales) = (parts.codes.view(), parts.scales.view());
                for element in FLOATS {
                    let what =
                        format!("{format:?} {n}x{k} of {tokens} {element:?} on {}", context.name);
                    let (n, k, t) = (n as i64, k as i64, tokens as i64);
                    let blank = vec![f64::NAN; want.len()];
                    for out in [
                        TestTensor::new(&context, element, &[n, k], &blank),
                        TestTensor::strided(&context, element, &[n, k], &[1, n], 1, &blank),
                    ] {
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(xserv_op_dequantise(
                                context.handle,
                                code,
                                rows,
                                size,
                                &codes,
                                &scales,
                                or_null(&zeros),
                                &out.view(),
                            ));
                        }
                        let rounded: Vec<f64> =
                            want.iter().map(|&x| from_f32(element, x)).collect();
                        assert_eq!(out.read(&what), rounded, "{what}");
                    }
                    let x = element.round_all(&random.normals(tokens * k as usize));
                    let bias = element.round_all(&random.normals(n as usize));
                    let bias_tensor = TestTensor::new(&context, element, &[n], &bias);
                    for has_bias in [false, true] {
                        let given =
                            TestTensor::strided(&context, element, &[t, k], &[k + 3, 1], 1, &x);
                        let blank = vec![f64::NAN; tokens * n as usize];
                        let out = TestTensor::strided(
                            &context,
                            element,
                            &[t, n],
                            &[2 * n + 1, 2],
                            0,
                            &blank,
                        );
                        let bias_view = has_bias.then(|| bias_tensor.view());
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(xserv_op_linear_quantised(
                                context.handle,
                                &given.view(),
                                code,
                                rows,
                                size,
                                &codes,
                                &scales,
                                or_null(&zeros),
                                or_null(&bias_view),
                                &out.view(),
                            ));
                        }
                        let got = out.read(&what);
                        for (place, got) in got.iter().enumerate() {
                            let (token, row) = (place / n as usize, place % n as usize);
                            let (x, w) = (
                                &x[token * k as usize..][..k as usize],
                                &want[row * k as usize..][..k as usize],
                            );
                            let terms = || x.iter().zip(w).map(|(x, w)| x * w);
                            let bias = if has_bias { bias[row] } else { 0.0 };
                            let sum = terms().sum::<f64>() + bias;
                            // Weights are rounded where no kernel multiplies the codes, and
                            // activations to 16 bits on the CPU.
                            let size: f64 = terms().map(f64::abs).sum::<f64>() + bias.abs();
                            let off = size * element.bar(3e-4, 8e-4, 5e-3)
                                + sum.abs() * element.bar(0.0, 1e-3, 8e-3);
                            assert!((got - sum).abs() <= off, "{what} [{place}]: {got}, not {sum}");
                        }
                    }
                }
            }
        }
    }
}

/// Codes, scales and zeros are those with which models are quantised, so that their numbers are as
/// close.
#[test]
fn quantised_numbers_come_back() {
    let mut random = Random::new(9);
    for context in contexts() {
        for (code, bar) in [(Code::Int4, 0.12), (Code::Int8, 0.008)] {
            for element in FLOATS {
                for (n, k, group_size) in [(37, 96, 32), (5, 64, 0), (3, 40, 24)] {
                    let x = element.round_all(&random.normals(n * k));
                    let bits = code.bits();
                    let groups = if group_size == 0 { 1 } else { k.div_ceil(group_size) };
                    let shape = [n as i64, groups as i64];
                    let given = TestTensor::new(&context, element, &[n as i64, k as i64], &x);
                    let codes =
                        TestTensor::blank(&context, Type::I32, &[n as i64, (k * bits / 32) as i64]);
                    let scales = TestTensor::blank(&context, Type::BF16, &shape);
                    let zeros = (code == Code::Int4)
                        .then(|| TestTensor::blank(&context, Type::I32, &shape));
                    let zeros = zeros.as_ref().map(TestTensor::view);
                    let back = TestTensor::blank(&context, Type::F32, &[n as i64, k as i64]);
                    let number = c_number(code);
                    let (c, size) = (context.handle, group_size as u32);
                    let (codes, scales) = (codes.view(), scales.view());
                    // SAFETY: live tensors of the context.
                    unsafe {
                        let zeros = or_null(&zeros);
                        ok(xserv_op_quantise(
                            c,
                            &given.view(),
                            number,
                            size,
                            &codes,
                            &scales,
                            zeros,
                        ));
                        ok(xserv_op_dequantise(
                            c,
                            number,
                            1,
                            size,
                            &codes,
                            &scales,
                            zeros,
                            &back.view(),
                        ));
                    }
                    let got = back.read("quantise");
                    let square = |x: f64| x * x;
                    let off: f64 = got.iter().zip(&x).map(|(a, b)| square(a - b)).sum();
                    let whole: f64 = x.iter().copied().map(square).sum();
                    let off = (off / whole).sqrt();
                    println!("{code:?} {element:?} {n}x{k}: off by {off:.4}");
                    assert!(off > 1e-4 && off < bar, "{code:?} {element:?} {n}x{k}: {off}");
                }
            }
        }
    }
}
