//! Copies, activations, add, mul, cast and transpose.

use crate::error::Result;
use crate::memory::{DType, ElementType};
use crate::ops;
use crate::ops::activation::cpu::Activation;
use crate::self_test::case::{bound, rounded, Case, Emit, Output, Values, FLOATS};
use crate::self_test::reference;

/// The relative error of an activation in f32.
const ERROR: f64 = 5e-6;
/// A single element, less than a vector with a rest, and several blocks of threads.
const SHAPES: [[i64; 2]; 3] = [[1, 1], [3, 37], [7, 1031]];

const ELEMENTS: [ElementType; 5] = [
    ElementType::Float(DType::F32),
    ElementType::Float(DType::F16),
    ElementType::Float(DType::BF16),
    ElementType::I32,
    ElementType::I64,
];

pub(super) fn emit(emit: &mut Emit<'_>) -> Result<()> {
    for element in ELEMENTS {
        for shape in SHAPES {
            emit(copy(element, &shape))?;
            emit(transpose(element, &shape))?;
        }
    }
    for dtype in FLOATS {
        for to in FLOATS {
            emit(cast(dtype, to))?;
        }
        for shape in SHAPES {
            for (operator, function, reference) in ACTIVATIONS {
                emit(activation(dtype, &shape, operator, function, reference))?;
            }
            emit(silu_mul(dtype, &shape))?;
            emit(add(dtype, &shape))?;
            emit(mul(dtype, &shape))?;
        }
    }
    Ok(())
}

/// The name, the operator and its reference.
type NamedActivation = (&'static str, Activation, fn(f64) -> f64);

const ACTIVATIONS: [NamedActivation; 3] = [
    ("gelu", Activation::GeluErf, reference::gelu),
    ("gelu_tanh", Activation::GeluTanh, reference::gelu_tanh),
    ("silu", Activation::Silu, reference::silu),
];

/// Numbers of any type, whose low bits are not zero.
fn any(element: ElementType, shape: &[i64], seed: u64) -> Values {
    match element {
        ElementType::Float(dtype) => Values::random(dtype, shape, seed),
        ElementType::Fp8 | ElementType::I32 | ElementType::I64 => {
            let noise = Values::random(DType::F32, shape, seed);
            let values = noise.values.iter().map(|value| value * 2e9).collect();
            Values::new(element, shape, values)
        }
    }
}

fn named(element: ElementType, shape: &[i64]) -> String {
    format!("{element} {shape:?}")
}

fn copy(element: ElementType, shape: &[i64; 2]) -> Case {
    let source = any(element, shape, 20);
    let expected = source.values.clone();
    Case {
        operator: "copy",
        what: named(element, shape),
        inputs: vec![source],
        outputs: vec![Output::exact(element, shape, expected)],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::copy::copy(context, &i[0], &o[0])),
    }
}

fn transpose(element: ElementType, shape: &[i64; 2]) -> Case {
    let x = any(element, shape, 21);
    let [rows, columns] = *shape;
    let expected = reference::transpose(&x.values, rows as usize, columns as usize);
    Case {
        operator: "transpose",
        what: named(element, shape),
        inputs: vec![x],
        outputs: vec![Output::exact(element, &[columns, rows], expected)],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::transpose::transpose(context, &i[0], &o[0])),
    }
}

fn cast(from: DType, to: DType) -> Case {
    let shape = [5, 67];
    let mut source = Values::random(from, &shape, 22);
    // Ties, subnormal numbers of f16, and the largest number of it.
    for (value, special) in source.values.iter_mut().zip([1.00048828125, 6e-8, -65504.0, 0.0]) {
        *value = rounded(ElementType::Float(from), special);
    }
    let target = ElementType::Float(to);
    let expected = source.values.iter().map(|&value| rounded(target, value)).collect();
    Case {
        operator: "cast",
        what: format!("{from} to {to} {shape:?}"),
        inputs: vec![source],
        outputs: vec![Output::exact(target, &shape, expected)],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::elementwise::cast(context, &i[0], &o[0])),
    }
}

fn activation(
    dtype: DType,
    shape: &[i64; 2],
    operator: &'static str,
    function: Activation,
    reference: fn(f64) -> f64,
) -> Case {
    let mut x = Values::random(dtype, shape, 23);
    x.values.iter_mut().for_each(|value| *value *= 4.0);
    let expected = x.values.iter().map(|&value| reference(value)).collect();
    Case {
        operator,
        what: named(ElementType::Float(dtype), shape),
        inputs: vec![x],
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, ERROR))],
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            ops::activation::activation(context, function, &i[0], &o[0])
        }),
    }
}

/// Two tensors of a shape, and a function of their elements.
fn pair(
    dtype: DType,
    shape: &[i64],
    seed: u64,
    function: fn(f64, f64) -> f64,
) -> (Vec<Values>, Vec<f64>) {
    let inputs = vec![Values::random(dtype, shape, seed), Values::random(dtype, shape, seed + 1)];
    let pairs = inputs[0].values.iter().zip(&inputs[1].values);
    let expected = pairs.map(|(&a, &b)| function(a, b)).collect();
    (inputs, expected)
}

fn silu_mul(dtype: DType, shape: &[i64; 2]) -> Case {
    let (inputs, expected) = pair(dtype, shape, 24, |gate, up| reference::silu(gate) * up);
    Case {
        operator: "silu_mul",
        what: named(ElementType::Float(dtype), shape),
        inputs,
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, ERROR))],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::silu_mul::silu_mul(context, &i[0], &i[1], &o[0])),
    }
}

fn add(dtype: DType, shape: &[i64; 2]) -> Case {
    let (inputs, expected) = pair(dtype, shape, 26, |a, b| a + b);
    Case {
        operator: "add",
        what: named(ElementType::Float(dtype), shape),
        inputs,
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, 1e-7))],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::elementwise::add(context, &i[0], &i[1], &o[0])),
    }
}

fn mul(dtype: DType, shape: &[i64; 2]) -> Case {
    let (inputs, expected) = pair(dtype, shape, 28, |a, b| a * b);
    Case {
        operator: "mul",
        what: named(ElementType::Float(dtype), shape),
        inputs,
        outputs: vec![Output::floats(dtype, shape, expected, bound(dtype, 1e-7))],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::elementwise::mul(context, &i[0], &i[1], &o[0])),
    }
}
