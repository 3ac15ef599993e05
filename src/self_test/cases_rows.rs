//! Norms and softmax.

use crate::error::Result;
use crate::memory::{DType, ElementType};
use crate::ops;
use crate::self_test::case::{bound, rounded, Case, Emit, Output, Values, FLOATS};
use crate::self_test::reference;

const EPS: f32 = 1e-5;
/// The relative error of a row's result in f32.
const ERROR: f64 = 5e-6;
/// A single element, rows that end inside vectors, and rows that blocks of threads share.
const SHAPES: [[i64; 2]; 4] = [[1, 1], [5, 67], [3, 1025], [2, 5003]];

pub(super) fn emit(emit: &mut Emit<'_>) -> Result<()> {
    for dtype in FLOATS {
        for shape in SHAPES {
            emit(rms_norm(dtype, &shape))?;
            emit(add_rms_norm(dtype, &shape))?;
            emit(layer_norm(dtype, &shape, true))?;
            emit(softmax(dtype, &shape))?;
        }
        emit(layer_norm(dtype, &[3, 129], false))?;
    }
    Ok(())
}

fn named(dtype: DType, shape: &[i64]) -> String {
    format!("{dtype} {shape:?}")
}

fn rms_norm(dtype: DType, shape: &[i64; 2]) -> Case {
    let x = Values::random(dtype, shape, 1);
    let weight = Values::random(dtype, &shape[1..], 2);
    let expected = reference::rms_norm(&x.values, &weight.values, f64::from(EPS));
    Case {
        operator: "rms_norm",
        what: named(dtype, shape),
        inputs: vec![x, weight],
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, ERROR))],
        is_optional: false,
        compute: Box::new(|context, i, o| {
            ops::rms_norm::rms_norm(context, &i[0], &i[1], EPS, &o[0])
        }),
    }
}

fn add_rms_norm(dtype: DType, shape: &[i64; 2]) -> Case {
    let (x, residual) = (Values::random(dtype, shape, 3), Values::random(dtype, shape, 4));
    let weight = Values::random(dtype, &shape[1..], 5);
    // The sum of two numbers in f32, then rounded: what is normed.
    let sums = x.values.iter().zip(&residual.values).map(|(&a, &b)| f64::from(a as f32 + b as f32));
    let sums: Vec<f64> = sums.map(|sum| rounded(ElementType::Float(dtype), sum)).collect();
    let expected = reference::rms_norm(&sums, &weight.values, f64::from(EPS));
    Case {
        operator: "add_rms_norm",
        what: named(dtype, shape),
        inputs: vec![x, residual, weight],
        outputs: vec![
            Output::exact(ElementType::Float(dtype), shape, sums),
            Output::floats(dtype, shape, expected, bound(dtype, ERROR)),
        ],
        is_optional: false,
        compute: Box::new(|context, i, o| {
            let tensors = ops::rms_norm::AddRmsNorm {
                x: &i[0],
                residual: &i[1],
                weight: &i[2],
                residual_out: &o[0],
                out: &o[1],
            };
            ops::rms_norm::add_rms_norm(context, tensors, EPS)
        }),
    }
}

fn layer_norm(dtype: DType, shape: &[i64; 2], has_bias: bool) -> Case {
    let x = Values::random(dtype, shape, 6);
    let weight = Values::random(dtype, &shape[1..], 7);
    let mut inputs = vec![x, weight];
    if has_bias {
        inputs.push(Values::random(dtype, &shape[1..], 8));
    }
    let bias = inputs.get(2).map(|bias| &bias.values[..]);
    let (x, weight) = (&inputs[0].values, &inputs[1].values);
    let expected = reference::layer_norm(x, weight, bias, f64::from(EPS));
    let bias = if has_bias { "" } else { " without bias" };
    Case {
        operator: "layer_norm",
        what: format!("{dtype} {shape:?}{bias}"),
        inputs,
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, ERROR))],
        is_optional: false,
        compute: Box::new(|context, i, o| {
            ops::layer_norm::layer_norm(context, &i[0], &i[1], i.get(2), EPS, &o[0])
        }),
    }
}

fn softmax(dtype: DType, shape: &[i64; 2]) -> Case {
    let mut x = Values::random(dtype, shape, 9);
    // Wider than the results of the noise alone.
    x.values.iter_mut().for_each(|value| *value *= 4.0);
    if shape[0] > 1 {
        // The last row has no token that may be seen.
        let width = shape[1] as usize;
        let start = x.values.len() - width;
        x.values[start..].fill(f64::NEG_INFINITY);
    }
    let expected = reference::softmax(&x.values, shape[1] as usize);
    Case {
        operator: "softmax",
        what: named(dtype, shape),
        inputs: vec![x],
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, 2.0 * ERROR))],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::softmax::softmax(context, &i[0], &o[0])),
    }
}
