//! Quantised matrices: to codes and back, and the product.

use crate::error::Result;
use crate::memory::{DType, ElementType};
use crate::ops;
use crate::ops::quantised::tensors::QuantisedTensors;
use crate::ops::quantised::Code;
use crate::self_test::case::{bound, Case, Emit, Output, Values, FLOATS};

const INTEGERS: ElementType = ElementType::I32;
const F32: ElementType = ElementType::Float(DType::F32);

/// Whether a matrix of these codes has zeros here: integers of few bits do.
fn has_zeros(code: Code) -> bool {
    !code.is_float() && code.bits() < 8
}

pub(super) fn emit(emit: &mut Emit<'_>) -> Result<()> {
    for dtype in FLOATS {
        for code in Code::ALL.into_iter().filter(|code| !code.is_float()) {
            emit(quantise(dtype, code))?;
        }
        for code in Code::ALL {
            emit(dequantise(dtype, code))?;
            for (in_features, has_bias) in [(96, true), (24, false)] {
                emit(linear(dtype, code, in_features, has_bias))?;
            }
        }
    }
    Ok(())
}

/// A matrix whose numbers are exact in every type.
struct Matrix {
    code: Code,
    rows: usize,
    columns: usize,
    group_rows: usize,
    group_size: usize,
    codes: Vec<u8>,
    scales: Vec<f64>,
    zeros: Vec<i64>,
}

impl Matrix {
    /// One in which every group of integers has the least code and the greatest.
    fn new(code: Code, rows: usize, columns: usize, group_rows: usize, group_size: usize) -> Self {
        let groups = columns.div_ceil(group_size);
        let (bits, has_zeros) = (code.bits(), has_zeros(code));
        let (least, count) = match code.is_float() {
            // Positive and of middling exponents.
            true => (1 << (bits - 3), 1 << (bits - 2)),
            false if has_zeros => (0, 1 << bits),
            false => (1, (1 << bits) - 1),
        };
        let codes = (0..rows * columns).map(|i| match i % columns % group_size {
            0 => least as u8,
            1 => (least + count - 1) as u8,
            _ => (least + (i * 37 + i / columns * 11) % count) as u8,
        });
        let num_scales = rows.div_ceil(group_rows) * groups;
        let exponents = (0..num_scales).map(|i| 2f64.powi((i * 5 % 7) as i32 - 6));
        let zeros = (0..num_scales).map(|i| match has_zeros {
            true => (i * 7 % (1 << bits)) as i64,
            false => 1 << (bits - 1),
        });
        Matrix {
            code,
            rows,
            columns,
            group_rows,
            group_size,
            codes: codes.collect(),
            scales: exponents.collect(),
            zeros: zeros.collect(),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        let groups = self.columns.div_ceil(self.group_size);
        let number = |(i, &code): (usize, &u8)| {
            let (row, column) = (i / self.columns, i % self.columns);
            let group = row / self.group_rows * groups + column / self.group_size;
            let value = match self.code.mantissa_bits() {
                None => f64::from(code) - self.zeros[group] as f64,
                // Positive and normal, as all of them are.
                Some(bits) => {
                    let bias = (1 << (self.code.bits() - 2 - bits)) - 1;
                    let mantissa = f64::from(code) / 2f64.powi(bits as i32) % 1.0;
                    (1.0 + mantissa) * 2f64.powi(i32::from(code >> bits) - bias)
                }
            };
            value * self.scales[group]
        };
        self.codes.iter().enumerate().map(number).collect()
    }

    fn words(&self) -> Vec<f64> {
        let bits = self.code.bits();
        let word = |codes: &[u8]| {
            let word = codes.iter().rev().fold(0u32, |word, &code| word << bits | u32::from(code));
            f64::from(word as i32)
        };
        self.codes.chunks(32 / bits).map(word).collect()
    }

    fn codes_shape(&self) -> [i64; 2] {
        [self.rows as i64, (self.columns * self.code.bits() / 32) as i64]
    }

    fn groups_shape(&self) -> [i64; 2] {
        let rows = self.rows.div_ceil(self.group_rows);
        [rows as i64, self.columns.div_ceil(self.group_size) as i64]
    }

    /// Codes, scales and, where there are any, zeros.
    fn inputs(&self) -> Vec<Values> {
        let (codes, groups) = (self.codes_shape(), self.groups_shape());
        let mut inputs = vec![
            Values::new(INTEGERS, &codes, self.words()),
            Values::new(F32, &groups, self.scales.clone()),
        ];
        if has_zeros(self.code) {
            inputs.push(Values::integers(INTEGERS, &groups, &self.zeros));
        }
        inputs
    }

    fn said(&self) -> String {
        let Matrix { code, rows, columns, group_rows, group_size, .. } = self;
        format!("{code:?} [{rows}, {columns}], groups of {group_rows} x {group_size}")
    }
}

/// The numbers are those that codes stand for, so that the codes come back.
fn quantise(dtype: DType, code: Code) -> Case {
    let matrix = Matrix::new(code, 5, 72, 1, 32);
    let (codes, groups) = (matrix.codes_shape(), matrix.groups_shape());
    let mut outputs = vec![
        Output::exact(INTEGERS, &codes, matrix.words()),
        Output::exact(F32, &groups, matrix.scales.clone()),
    ];
    if has_zeros(code) {
        let zeros = matrix.zeros.iter().map(|&zero| zero as f64).collect();
        outputs.push(Output::exact(INTEGERS, &groups, zeros));
    }
    let shape = [matrix.rows as i64, matrix.columns as i64];
    Case {
        operator: "quantise",
        what: format!("{dtype} to {}", matrix.said()),
        inputs: vec![Values::new(ElementType::Float(dtype), &shape, matrix.numbers())],
        outputs,
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            let (codes, scales, zeros) = (&o[0], &o[1], o.get(2));
            let matrix =
                QuantisedTensors { code, group_rows: 1, group_size: 32, codes, scales, zeros };
            ops::quantised::tensors::quantise(context, &i[0], &matrix)
        }),
    }
}

fn dequantise(dtype: DType, code: Code) -> Case {
    let matrix = Matrix::new(code, 19, 72, 3, 20);
    let (group_rows, group_size) = (matrix.group_rows, matrix.group_size);
    let shape = [matrix.rows as i64, matrix.columns as i64];
    Case {
        operator: "dequantise",
        what: format!("{} to {dtype}", matrix.said()),
        inputs: matrix.inputs(),
        outputs: vec![Output::exact(ElementType::Float(dtype), &shape, matrix.numbers())],
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            let (codes, scales, zeros) = (&i[0], &i[1], i.get(2));
            let matrix = QuantisedTensors { code, group_rows, group_size, codes, scales, zeros };
            ops::quantised::tensors::dequantise(context, &matrix, &o[0])
        }),
    }
}

fn linear(dtype: DType, code: Code, in_features: usize, has_bias: bool) -> Case {
    let (num_tokens, out_features) = (3, 37);
    let matrix = Matrix::new(code, out_features, in_features, 4, 32);
    let (group_rows, group_size) = (matrix.group_rows, matrix.group_size);
    let x = Values::random(dtype, &[num_tokens, in_features as i64], 60);
    let bias = Values::random(dtype, &[out_features as i64], 61);
    let numbers = matrix.numbers();
    let expected = x.values.chunks_exact(in_features).flat_map(|x| {
        let rows = numbers.chunks_exact(in_features).zip(&bias.values);
        rows.map(move |(row, bias)| {
            let sum: f64 = x.iter().zip(row).map(|(x, w)| x * w).sum();
            sum + if has_bias { *bias } else { 0.0 }
        })
    });
    let expected: Vec<f64> = expected.collect();
    // The CPU rounds activations, of at most 1, to integers of 16 bits with a sign: each is off by
    // at most half of 1/32767, and a result by that times the numbers of its row.
    let sizes =
        numbers.chunks_exact(in_features).map(|row| row.iter().map(|w| w.abs()).sum::<f64>());
    let sizes: Vec<f64> = sizes.collect();
    let results = expected.iter().zip(sizes.iter().cycle());
    let off = results.map(|(sum, size)| size / 65534.0 / sum.abs().max(1.0)).fold(0.0, f64::max);
    let shape = [num_tokens, out_features as i64];
    let what = format!("{dtype} {shape:?}, {}, bias: {has_bias}", matrix.said());
    let mut inputs = vec![x];
    inputs.extend(matrix.inputs());
    inputs.extend(has_bias.then_some(bias));
    let has_zeros = has_zeros(code);
    Case {
        operator: "linear_quantised",
        what,
        inputs,
        outputs: vec![Output::floats(dtype, &shape, expected, bound(dtype, 1e-5 + off))],
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            let (codes, scales) = (&i[1], &i[2]);
            let zeros = i.get(3).filter(|_| has_zeros);
            let bias = i.get(3 + usize::from(has_zeros));
            let weight = QuantisedTensors { code, group_rows, group_size, codes, scales, zeros };
            ops::linear::tensors::linear_tensors(context, &i[0], &weight, bias, &o[0])
        }),
    }
}
