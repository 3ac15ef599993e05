//! Activations, add, mul, cast and transpose over tensors, against f64.

use super::support::tensors::*;
use super::support::{golden, Random};
use xserv::ffi::*;

type Unary = unsafe extern "C" fn(
    *const xserv_context,
    *const xserv_tensor,
    *const xserv_tensor,
) -> xserv_status;
type Binary = unsafe extern "C" fn(
    *const xserv_context,
    *const xserv_tensor,
    *const xserv_tensor,
    *const xserv_tensor,
) -> xserv_status;

/// The error function: its Taylor series, and for large x the continued fraction of erfc.
fn erf(x: f64) -> f64 {
    let z = x.abs();
    if z.is_nan() {
        return x;
    }
    if z > 3.0 {
        let fraction = (1..=60).rev().fold(z, |tail, n| z + f64::from(n) / 2.0 / tail);
        let erfc = (-z * z).exp() / std::f64::consts::PI.sqrt() / fraction;
        return (1.0 - erfc).copysign(x);
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..100 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + erf(x / 2.0f64.sqrt()))
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-2.0 * inner).exp())
}

#[allow(clippy::type_complexity)] // reads best with its tuples written out
const UNARY: [(&str, Unary, fn(f64) -> f64); 3] = [
    ("gelu", xserv_op_gelu, gelu),
    ("gelu_tanh", xserv_op_gelu_tanh, gelu_tanh),
    ("silu", xserv_op_silu, silu),
];
#[allow(clippy::type_complexity)]
const BINARY: [(&str, Binary, fn(f64, f64) -> f64); 2] =
    [("add", xserv_op_add, |a, b| a + b), ("mul", xserv_op_mul, |a, b| a * b)];

/// Shapes, strides and how far the first element is off its alignment.
const LAYOUTS: [(&[i64], &[i64], usize); 12] = [
    (&[0, 8], &[8, 1], 0),
    (&[], &[], 0),
    (&[1], &[1], 0),
    (&[31], &[1], 0),
    (&[33], &[1], 1),
    (&[4, 520], &[520, 1], 0),
    (&[3, 1031], &[1031, 1], 0),
    (&[2, 3, 40], &[160, 48, 1], 0),
    (&[2, 3, 40], &[161, 41, 1], 0),
    (&[7, 16], &[16, 1], 3),
    (&[24, 9], &[1, 24], 0),
    (&[5, 6], &[20, 3], 0),
];

fn len(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

#[test]
fn activations() {
    let mut random = Random::new(21);
    for context in contexts() {
        for (name, op, reference) in UNARY {
            for element in FLOATS {
                for (shape, strides, misalign) in LAYOUTS {
                    let what =
                        format!("{name} {element:?} {shape:?} {strides:?} on {}", context.name);
                    let scaled: Vec<f32> =
                        random.normals(len(shape)).iter().map(|x| 2.5 * x).collect();
                    let x = element.round_all(&scaled);
                    let want: Vec<f64> = x.iter().map(|&x| reference(x)).collect();
                    let bar = element.bar(4e-6, 6e-4, 4.5e-3);
                    let x_tensor =
                        TestTensor::strided(&context, element, shape, strides, misalign, &x);
                    let out = TestTensor::blank(&context, element, shape);
                    let again = TestTensor::blank(&context, element, shape);
                    // SAFETY: live tensors of the context.
                    unsafe {
                        ok(op(context.handle, &x_tensor.view(), &out.view()));
                        ok(op(context.handle, &x_tensor.view(), &again.view()));
                    }
                    let got = out.read(&what);
                    compare(&what, &got, &want, bar);
                    assert_eq!(got, again.read(&what), "{what}: twice");
                    assert_eq!(x_tensor.read(&what), x, "{what}: the input was changed");
                    // In place, with the strides of the input.
                    // SAFETY: as above.
                    unsafe { ok(op(context.handle, &x_tensor.view(), &x_tensor.view())) };
                    compare(&format!("{what} in place"), &x_tensor.read(&what), &want, bar);
                }
            }
        }
    }
}

#[test]
fn activations_of_extreme_values() {
    let x = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 3e4, -3e4, 60.0, -60.0, -5.5];
    for context in contexts() {
        for (name, op, reference) in UNARY {
            for element in FLOATS {
                let x: Vec<f64> = x.iter().map(|&x| element.round(x)).collect();
                let what = format!("{name} {element:?} on {}", context.name);
                let x_tensor = TestTensor::new(&context, element, &[10], &x);
                let out = TestTensor::blank(&context, element, &[10]);
                // SAFETY: live tensors of the context.
                unsafe { ok(op(context.handle, &x_tensor.view(), &out.view())) };
                let got = out.read(&what);
                for (x, got) in x.iter().zip(got) {
                    let want = reference(*x);
                    let close = (got - want).abs() <= 1e-5 + 8e-3 * want.abs();
                    assert!(
                        got == want || close || got.is_nan() && want.is_nan(),
                        "{what}: {x} gives {got}, not {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn golden_activations() {
    for (name, op, _) in &UNARY[1..] {
        let Some(golden) = golden::open(name) else { return };
        for context in contexts() {
            for case in &golden.cases {
                let element = if case.name.ends_with(".bf16") { Type::BF16 } else { Type::F32 };
                let what = format!("{name} {} on {}", case.name, context.name);
                let x = golden.tensor(case, "x");
                let shape: Vec<i64> = x.shape.iter().map(|&n| n as i64).collect();
                let x = TestTensor::new(&context, element, &shape, &x.values);
                let out = TestTensor::blank(&context, element, &shape);
                // SAFETY: live tensors of the context.
                unsafe { ok(op(context.handle, &x.view(), &out.view())) };
                close_to(&what, element, 2e-6, &out.read(&what), &golden.tensor(case, "y").values);
            }
        }
    }
}

/// The bar of the golden vectors: relative to 1 + |want| in f32, one rounding in bf16.
#[track_caller]
fn close_to(what: &str, element: Type, f32_bar: f64, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let bar = f32_bar * (1.0 + w.abs()) + element.bar(0.0, 0.0, 8e-3 * w.abs());
        let same = g == w || g.is_nan() && w.is_nan() || element.round(*w) == *g;
        assert!(same || (g - w).abs() <= bar, "{what}: element {i} is {g}, not {w}");
    }
}

#[test]
fn golden_silu_mul() {
    let Some(golden) = golden::open("silu_mul") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = if case.name.ends_with(".bf16") { Type::BF16 } else { Type::F32 };
            let what = format!("silu_mul {} on {}", case.name, context.name);
            let gate = golden.tensor(case, "gate");
            let shape: Vec<i64> = gate.shape.iter().map(|&n| n as i64).collect();
            let up = TestTensor::new(&context, element, &shape, &golden.tensor(case, "up").values);
            let gate = TestTensor::new(&context, element, &shape, &gate.values);
            let out = TestTensor::blank(&context, element, &shape);
            // SAFETY: live tensors of the context.
            unsafe { ok(xserv_op_silu_mul(context.handle, &gate.view(), &up.view(), &out.view())) };
            close_to(&what, element, 5e-6, &out.read(&what), &golden.tensor(case, "y").values);
        }
    }
}

#[test]
fn silu_mul_of_the_halves_of_a_fused_tensor() {
    let mut random = Random::new(22);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in [(0, 8), (1, 1), (3, 7), (5, 64), (2, 4100), (33, 2048), (3, 1032)]
            {
                let what = format!("silu_mul {element:?} {rows}x{width} on {}", context.name);
                let fused = element.round_all(&random.normals(2 * rows * width));
                let (n, w) = (rows as i64, width as i64);
                let tensor = TestTensor::new(&context, element, &[n, 2 * w], &fused);
                let (shape, strides) = ([n, w], [2 * w, 1]);
                let gate = slice(&tensor.view(), element, &shape, &strides, 0);
                let up = slice(&tensor.view(), element, &shape, &strides, width);
                let mut want = Vec::new();
                for row in fused.chunks_exact(2 * width) {
                    want.extend((0..width).map(|i| silu(row[i]) * row[width + i]));
                }
                let bar = element.bar(4e-6, 6e-4, 4.5e-3);
                let out = TestTensor::blank(&context, element, &shape);
                // Rows that are not vectors.
                let odd = vec![f64::NAN; rows * width];
                let odd = TestTensor::strided(&context, element, &shape, &[w + 1, 1], 1, &odd);
                let before = num_allocations(&context);
                // SAFETY: live tensors of the context.
                unsafe {
                    ok(xserv_op_silu_mul(context.handle, &gate, &up, &out.view()));
                    ok(xserv_op_silu_mul(context.handle, &gate, &up, &odd.view()));
                }
                assert_eq!(num_allocations(&context), before, "{what}: something was copied");
                compare(&what, &out.read(&what), &want, bar);
                compare(&what, &odd.read(&what), &want, bar);
                assert_eq!(tensor.read(&what), fused, "{what}: the input was changed");
                // In place of either half; the other stays.
                // SAFETY: as above.
                unsafe { ok(xserv_op_silu_mul(context.handle, &gate, &up, &up)) };
                let after = tensor.read(&what);
                let (mut gates, mut ups) = (Vec::new(), Vec::new());
                for row in after.chunks_exact(2 * width) {
                    gates.extend_from_slice(&row[..width]);
                    ups.extend_from_slice(&row[width..]);
                }
                compare(&format!("{what} in place"), &ups, &want, bar);
                let untouched = fused.chunks_exact(2 * width).flat_map(|row| &row[..width]);
                assert!(gates.iter().eq(untouched), "{what}: the gate was changed");
            }
        }
    }
}

#[test]
fn silu_mul_of_other_layouts() {
    let mut random = Random::new(23);
    for context in contexts() {
        for (shape, strides, misalign) in LAYOUTS.into_iter().filter(|layout| !layout.0.is_empty())
        {
            let what = format!("silu_mul {shape:?} {strides:?} on {}", context.name);
            let gate = Type::F32.round_all(&random.normals(len(shape)));
            let up = Type::F32.round_all(&random.normals(len(shape)));
            let want: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
            let gate = TestTensor::strided(&context, Type::F32, shape, strides, misalign, &gate);
            let up = TestTensor::new(&context, Type::F32, shape, &up);
            let blank = vec![f64::NAN; len(shape)];
            let out = TestTensor::strided(&context, Type::F32, shape, strides, 0, &blank);
            // SAFETY: live tensors of the context.
            unsafe { ok(xserv_op_silu_mul(context.handle, &gate.view(), &up.view(), &out.view())) };
            compare(&what, &out.read(&what), &want, 4e-6);
        }
    }
}

#[test]
fn add_and_mul() {
    let mut random = Random::new(24);
    for context in contexts() {
        for (name, op, reference) in BINARY {
            for element in FLOATS {
                for (shape, strides, misalign) in LAYOUTS {
                    let what =
                        format!("{name} {element:?} {shape:?} {strides:?} on {}", context.name);
                    let a = element.round_all(&random.normals(len(shape)));
                    let b = element.round_all(&random.normals(len(shape)));
                    let want: Vec<f64> =
                        a.iter().zip(&b).map(|(a, b)| element.round(reference(*a, *b))).collect();
                    // One f32 rounding before that of the type moves a few by one unit.
                    let bar = element.bar(1e-7, 5e-4, 4e-3);
                    let a_tensor =
                        TestTensor::strided(&context, element, shape, strides, misalign, &a);
                    let b_tensor = TestTensor::new(&context, element, shape, &b);
                    let out = TestTensor::blank(&context, element, shape);
                    let blank = vec![f64::NAN; len(shape)];
                    let strided =
                        TestTensor::strided(&context, element, shape, strides, misalign, &blank);
                    // SAFETY: live tensors of the context.
                    unsafe {
                        let (a_view, b_view) = (a_tensor.view(), b_tensor.view());
                        ok(op(context.handle, &a_view, &b_view, &out.view()));
                        ok(op(context.handle, &b_view, &a_view, &strided.view()));
                        compare(&what, &out.read(&what), &want, bar);
                        assert_eq!(out.read(&what), strided.read(&what), "{what}: layouts differ");
                        assert_eq!(a_tensor.read(&what), a, "{what}: an input was changed");
                        ok(op(context.handle, &a_view, &b_view, &a_view));
                        ok(op(context.handle, &out.view(), &out.view(), &out.view()));
                    }
                    compare(&format!("{what} in place"), &a_tensor.read(&what), &want, bar);
                    let twice: Vec<f64> =
                        want.iter().map(|&x| element.round(reference(x, x))).collect();
                    compare(&format!("{what} of itself"), &out.read(&what), &twice, 2.5 * bar);
                }
            }
        }
    }
}

#[test]
fn add_and_mul_broadcast() {
    let mut random = Random::new(25);
    for context in contexts() {
        for (name, op, reference) in BINARY {
            for element in FLOATS {
                for (rows, width) in [(3, 7), (5, 64), (130, 1024), (2, 520)] {
                    let what = format!("{name} {element:?} {rows}x{width} on {}", context.name);
                    let a = element.round_all(&random.normals(rows * width));
                    let row = element.round_all(&random.normals(width));
                    let column = element.round_all(&random.normals(rows));
                    let shape = [rows as i64, width as i64];
                    let a_tensor = TestTensor::new(&context, element, &shape, &a);
                    let row_tensor = TestTensor::new(&context, element, &shape[1..], &row);
                    let column_tensor = TestTensor::new(&context, element, &shape[..1], &column);
                    let by_row = slice(&row_tensor.view(), element, &shape, &[0, 1], 0);
                    let by_column = slice(&column_tensor.view(), element, &shape, &[1, 0], 0);
                    let scalar = slice(&column_tensor.view(), element, &shape, &[0, 0], 0);
                    let value = |b: &dyn Fn(usize) -> f64| -> Vec<f64> {
                        let at = |i: usize| element.round(reference(a[i], b(i)));
                        (0..a.len()).map(at).collect()
                    };
                    let cases = [
                        (by_row, value(&|i| row[i % width])),
                        (by_column, value(&|i| column[i / width])),
                        (scalar, value(&|_| column[0])),
                    ];
                    for (b, want) in cases {
                        let out = TestTensor::blank(&context, element, &shape);
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(op(context.handle, &a_tensor.view(), &b, &out.view()));
                            compare(&what, &out.read(&what), &want, element.bar(1e-7, 5e-4, 4e-3));
                            let refused = refused(op(context.handle, &a_tensor.view(), &b, &b));
                            assert!(refused.starts_with("out has strides"), "{refused}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn casts_round_once() {
    let mut random = Random::new(26);
    for context in contexts() {
        for from in FLOATS {
            for to in FLOATS {
                for (shape, strides, misalign) in LAYOUTS {
                    let what =
                        format!("cast {from:?} {to:?} {shape:?} {strides:?} on {}", context.name);
                    let mut x = from.round_all(&random.normals(len(shape)));
                    let odd = [f64::NAN, f64::INFINITY, -0.0, 1e5, -1e30, 6e-8, 65519.0, 1e-40];
                    x.iter_mut().zip(odd).for_each(|(x, odd)| *x = from.round(odd));
                    // Through f32, which every value here is: `half` rounds f64 after cutting it off.
                    let want = x.iter().map(|&x| match to {
                        Type::F16 => half::f16::from_f32(x as f32).to_f64(),
                        Type::BF16 => half::bf16::from_f32(x as f32).to_f64(),
                        _ => x,
                    });
                    let want: Vec<f64> = want.collect();
                    let x = TestTensor::strided(&context, from, shape, strides, misalign, &x);
                    let out = TestTensor::blank(&context, to, shape);
                    let blank = vec![f64::NAN; len(shape)];
                    let strided =
                        TestTensor::strided(&context, to, shape, strides, misalign, &blank);
                    // SAFETY: live tensors of the context.
                    unsafe {
                        ok(xserv_op_cast(context.handle, &x.view(), &out.view()));
                        ok(xserv_op_cast(context.handle, &x.view(), &strided.view()));
                    }
                    for got in [out.read(&what), strided.read(&what)] {
                        for (got, want) in got.iter().zip(&want) {
                            let same =
                                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                            assert!(same, "{what}: {got}, not {want}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn transpose() {
    let elements = [Type::F32, Type::F16, Type::BF16, Type::I32, Type::I64];
    for context in contexts() {
        for element in elements {
            for (batch, rows, columns) in [
                (1, 1, 1),
                (2, 3, 5),
                (1, 64, 64),
                (3, 33, 65),
                (2, 130, 66),
                (1, 0, 4),
                (1, 17, 16),
                (4, 31, 32),
            ] {
                let what =
                    format!("transpose {element:?} {batch}x{rows}x{columns} on {}", context.name);
                // Every value of a small tensor its own, and exact in every type.
                let x: Vec<f64> = (0..batch * rows * columns).map(|i| f64::from(i % 251)).collect();
                let shape = [batch.into(), rows.into(), i64::from(columns)];
                let turned = [batch.into(), columns.into(), i64::from(rows)];
                let mut want = Vec::new();
                for matrix in 0..batch {
                    for c in 0..columns {
                        want.extend(
                            (0..rows).map(|r| x[((matrix * rows + r) * columns + c) as usize]),
                        );
                    }
                }
                let strides = [(shape[1] + 1) * (shape[2] + 3), shape[2] + 3, 1];
                let out_strides = [(turned[1] + 2) * (turned[2] + 2), turned[2] + 2, 1];
                let blank = vec![-1.0; want.len()];
                let inputs = [
                    TestTensor::new(&context, element, &shape, &x),
                    TestTensor::strided(&context, element, &shape, &strides, 1, &x),
                    TestTensor::strided(
                        &context,
                        element,
                        &shape,
                        &[1, shape[0] * shape[2], shape[0]],
                        0,
                        &x,
                    ),
                ];
                for input in inputs {
                    let outputs = [
                        TestTensor::new(&context, element, &turned, &blank),
                        TestTensor::strided(&context, element, &turned, &out_strides, 0, &blank),
                    ];
                    for out in outputs {
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(xserv_op_transpose(context.handle, &input.view(), &out.view()))
                        };
                        assert_eq!(
                            out.read(&what),
                            want,
                            "{what} {:?} {:?}",
                            input.strides,
                            out.strides
                        );
                    }
                    assert_eq!(input.read(&what), x, "{what}: the input was changed");
                }
            }
        }
    }
}

#[test]
fn refusals() {
    for context in contexts() {
        let c = context.handle;
        let tensor = |element, shape: &[i64]| {
            TestTensor::new(&context, element, shape, &vec![1.0; len(shape)])
        };
        let x = tensor(Type::F32, &[4, 6]);
        let other = tensor(Type::F32, &[4, 6]);
        let half = tensor(Type::F16, &[4, 6]);
        let narrow = tensor(Type::F32, &[4, 5]);
        let ints = tensor(Type::I32, &[4, 6]);
        let flat = tensor(Type::F32, &[24]);
        let scalar = tensor(Type::F32, &[]);
        let shifted = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 6);
        let upper = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 0);
        let [x, other, half, narrow, ints, flat, scalar] =
            [&x, &other, &half, &narrow, &ints, &flat, &scalar].map(TestTensor::view);
        let null = std::ptr::null();
        let says = |message: String, start: &str, also: &str| {
            assert!(message.starts_with(start) && message.contains(also), "{message}");
        };
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            for (_, op, _) in UNARY {
                says(refused(op(c, null, &x)), "x", "NULL");
                says(refused(op(c, &ints, &x)), "x has elements of i32", "f32");
                says(refused(op(c, &x, &half)), "out has elements of f16", "f32");
                says(refused(op(c, &x, &narrow)), "out has shape [4, 5]", "[4, 6]");
                says(refused(op(c, &shifted, &upper)), "out overlaps x", "same view");
            }
            for (op, a, b) in [
                (BINARY[0].1, "a", "b"),
                (BINARY[1].1, "a", "b"),
                (xserv_op_silu_mul as Binary, "gate", "up"),
            ] {
                says(refused(op(c, &x, null, &x)), b, "NULL");
                says(refused(op(c, &ints, &x, &x)), &format!("{a} has elements of i32"), "f32");
                says(refused(op(c, &x, &half, &x)), &format!("{b} has elements of f16"), "f32");
                says(refused(op(c, &x, &narrow, &x)), &format!("{b} has shape [4, 5]"), "[4, 6]");
                says(refused(op(c, &x, &x, &flat)), "out has shape [24]", "[4, 6]");
                says(refused(op(c, &shifted, &shifted, &upper)), &format!("out overlaps {a}"), "");
            }
            says(
                refused(xserv_op_silu_mul(c, &scalar, &scalar, &scalar)),
                "gate has no dimensions",
                "",
            );
            says(refused(xserv_op_cast(c, &ints, &x)), "source has elements of i32", "bf16");
            says(refused(xserv_op_cast(c, &x, &ints)), "target has elements of i32", "bf16");
            says(refused(xserv_op_cast(c, &x, &narrow)), "target has shape [4, 5]", "[4, 6]");
            says(refused(xserv_op_cast(c, &shifted, &upper)), "target overlaps source", "");
            ok(xserv_op_cast(c, &x, &x));
            says(refused(xserv_op_transpose(c, &x, &other)), "out has shape [4, 6]", "[6, 4]");
            says(refused(xserv_op_transpose(c, &flat, &flat)), "x has 1 dimensions", "two");
            says(refused(xserv_op_transpose(c, &half, &x)), "out has elements of f32", "f16");
            let turned = slice(&x, Type::F32, &[6, 4], &[1, 6], 0);
            says(refused(xserv_op_transpose(c, &x, &turned)), "out overlaps x", "no memory");
        }
    }
}
