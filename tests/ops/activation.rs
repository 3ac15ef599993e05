//! Activations: slices of all types, tensors, and the rounding after each step.

use crate::support::device::{cuda_context, decode, download, round, upload};
use crate::support::layouts::{len, LAYOUTS};
use crate::support::tensors::*;
use crate::support::typed::{
    close, for_storage, normals, same_bits_on_any_number_of_threads, typed, values, Typed,
};
use crate::support::{assert_same_bits, backends, golden, reference, Random};
use xserv::backend::Arena;
use xserv::ffi::*;
use xserv::memory::{DType, ElementType};
use xserv::ops::activation::cpu::{
    activation, activation_in_place, gelu_erf, gelu_tanh, silu, Activation,
};
use xserv::ops::activation::cuda_rounded;
use xserv::ops::common::storage::Storage;

for_storage!(slices, threads);

fn slices<T: Storage>() {
    let extremes = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 87.0, -87.5, 88.5, -88.5, -104.0]
        .into_iter()
        .chain([6e4, -6e4, 1e10, -1e10, 1e30, -1e30, f32::MAX, f32::MIN]);
    let mut x: Vec<f32> = extremes.collect();
    x.extend((-4000..4000).map(|i| i as f32 / 250.0));
    x.extend((-4000..4000).map(|i| i as f32 / 100.0));
    let x: Vec<T> = typed::<T>(&x).into_iter().filter(|x| x.to_f32().is_finite()).collect();
    type Exact = fn(f64) -> f64;
    let cases: [(Activation, Exact); 3] = [
        (Activation::GeluTanh, reference::gelu_tanh),
        (Activation::GeluErf, reference::gelu),
        (Activation::Silu, reference::silu),
    ];
    for backend in backends(&[1, 2]) {
        for (function, exact) in cases {
            for len in [0, 1, 15, 16, 17, 33, 257, x.len()] {
                let x = &x[..len];
                let what = format!("{function:?} of {len} on {}", backend.name());
                let expected: Vec<f64> = values(x).into_iter().map(|x| exact(x.into())).collect();
                let mut out = Typed::new(len);
                activation(&backend, function, x, out.get()).unwrap();
                let got = out.checked(&what);
                close::<T>(&what, &got, &expected, 5e-7);
                let mut in_place = Typed::of(x);
                activation_in_place(&backend, function, in_place.get()).unwrap();
                assert_same_bits(&what, &got, &in_place.checked(&what));
            }
            let mut special = typed::<T>(&[f32::INFINITY, f32::NAN]);
            activation_in_place(&backend, function, &mut special).unwrap();
            assert_eq!(special[0].to_f32(), f32::INFINITY);
            assert!(special[1].to_f32().is_nan());
            let mut nan = typed::<T>(&[f32::NAN; 20]);
            activation_in_place(&backend, function, &mut nan).unwrap();
            assert!(nan.iter().all(|x| x.to_f32().is_nan()));
        }
        assert!(silu(&backend, &x, &mut []).is_err());
    }
}

fn threads<T: Storage>() {
    let mut random = Random::new(50);
    let x: Vec<T> = normals(&mut random, 400 * 512);
    same_bits_on_any_number_of_threads(|backend| {
        let (mut a, mut b) = (vec![T::default(); x.len()], vec![T::default(); x.len()]);
        gelu_erf(backend, &x, &mut a).unwrap();
        gelu_tanh(backend, &a, &mut b).unwrap();
        silu(backend, &b, &mut a).unwrap();
        activation_in_place(backend, Activation::GeluTanh, &mut a).unwrap();
        values(&a)
    });
}

type Unary = unsafe extern "C" fn(
    *const xserv_context,
    *const xserv_tensor,
    *const xserv_tensor,
) -> xserv_status;

#[allow(clippy::type_complexity)] // reads best with its tuples written out
const UNARY: [(&str, Unary, fn(f64) -> f64); 3] = [
    ("gelu", xserv_op_gelu, reference::gelu),
    ("gelu_tanh", xserv_op_gelu_tanh, reference::gelu_tanh),
    ("silu", xserv_op_silu, reference::silu),
];

#[test]
fn tensors() {
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
                let element = golden_type(&case.name);
                let what = format!("{name} {} on {}", case.name, context.name);
                let x = golden.tensor(case, "x");
                let shape: Vec<i64> = x.shape.iter().map(|&n| n as i64).collect();
                let x = TestTensor::new(&context, element, &shape, &x.values);
                let out = TestTensor::blank(&context, element, &shape);
                // SAFETY: live tensors of the context.
                unsafe { ok(op(context.handle, &x.view(), &out.view())) };
                close_to_golden(
                    &what,
                    element,
                    2e-6,
                    &out.read(&what),
                    &golden.tensor(case, "y").values,
                );
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
        let half = tensor(Type::F16, &[4, 6]);
        let narrow = tensor(Type::F32, &[4, 5]);
        let ints = tensor(Type::I32, &[4, 6]);
        let shifted = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 6);
        let upper = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 0);
        let [x, half, narrow, ints] = [&x, &half, &narrow, &ints].map(TestTensor::view);
        let null = std::ptr::null();
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            for (_, op, _) in UNARY {
                says(op(c, null, &x), "x", "NULL");
                says(op(c, &ints, &x), "x has elements of i32", "f32");
                says(op(c, &x, &half), "out has elements of f16", "f32");
                says(op(c, &x, &narrow), "out has shape [4, 5]", "[4, 6]");
                says(op(c, &shifted, &upper), "out overlaps x", "same view");
            }
        }
    }
}

/// Transformers' `gelu_new`, as PyTorch evaluates it: each operation in f32, stored in the type.
/// `tanh_error` is what the hyperbolic tangent may be off by.
fn gelu_new(dtype: DType, x: f64, tanh_error: f64) -> f64 {
    let round = |x| round(dtype, x);
    let cube = round(round(x * x) * x);
    let inner = round(x + round(f64::from(0.044715_f32) * cube));
    let angle = round(f64::from((2.0 / std::f64::consts::PI).sqrt() as f32) * inner);
    let tanh = round(angle.tanh() * (1.0 + tanh_error));
    round(round(0.5 * x) * round(1.0 + tanh))
}

/// Every number of 16 bits, and many of 32.
#[test]
fn gelu_tanh_on_cuda_is_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    let mut random = Random::new(3);
    let some: Vec<u8> =
        (0..100_003).flat_map(|_| (8.0 * random.signed() as f32).to_ne_bytes()).collect();
    for (dtype, bytes) in [(DType::BF16, &every), (DType::F16, &every), (DType::F32, &some)] {
        let len = bytes.len() / dtype.size_bytes();
        let element = ElementType::Float(dtype);
        let mut arena = Arena::new(&context, bytes.len() + 4096, "a test").expect("memory");
        let all = arena.tensor(element, &[len + 1]).expect("room");
        // Whole vectors, and an address and a length that are none.
        for (first, len) in [(0, len), (1, len), (0, len - 3)] {
            let x = all.view(first, &[len], None).expect("a view");
            let bytes = &bytes[..len * dtype.size_bytes()];
            upload(&context, &x, bytes);
            cuda_rounded::gelu_tanh(&context, &x).expect("the operator");
            let got = decode(dtype, &download(&context, &x));
            for (x, got) in decode(dtype, bytes).into_iter().zip(got) {
                let [low, high] = [-5e-7, 5e-7].map(|error| gelu_new(dtype, x, error));
                let is_same = match dtype {
                    // A small remainder of 1 + tanh(x) has the absolute error of the tangent.
                    DType::F32 => (got - low).abs() <= 5e-7 * (1.0 + x.abs()),
                    _ => got == low || got == high || (got.is_nan() && low.is_nan()),
                };
                assert!(is_same, "{dtype} gelu({x:e}) = {got:e}, not {low:e} or {high:e}");
            }
        }
    }
}
