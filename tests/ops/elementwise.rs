//! Sums, products and casts: slices of all types and tensors.

use crate::support::layouts::{len, LAYOUTS};
use crate::support::tensors::*;
use crate::support::typed::{for_storage, normals, typed, values, Typed};
use crate::support::{assert_same_bits, backends, Random};
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::elementwise::cpu;

for_storage!(sums_and_products, casts);

fn sums_and_products<T: Storage>() {
    let mut random = Random::new(44);
    for backend in backends(&[1, 2]) {
        for len in [0, 1, 31, 33, 1000, 100_001] {
            let (a, b): (Vec<T>, Vec<T>) = (normals(&mut random, len), normals(&mut random, len));
            let (mut sums, mut products) = (Typed::new(len), Typed::new(len));
            cpu::add(&backend, &a, &b, sums.get()).unwrap();
            cpu::mul(&backend, &a, &b, products.get()).unwrap();
            let exact = |f: fn(f32, f32) -> f32| -> Vec<f32> {
                let pairs = a.iter().zip(&b);
                pairs.map(|(a, b)| T::from_f32(f(a.to_f32(), b.to_f32())).to_f32()).collect()
            };
            assert_same_bits("add", &sums.checked("add"), &exact(|a, b| a + b));
            assert_same_bits("mul", &products.checked("mul"), &exact(|a, b| a * b));
        }
        assert!(cpu::add(&backend, &[T::default()], &[], &mut [T::default()]).is_err());
    }
}

/// From every bit pattern of the 16-bit types, and to them against the `half` crate.
fn casts<T: Storage>() {
    let mut random = Random::new(45);
    let mut x: Vec<f32> = (0..=u16::MAX).map(|b| half::f16::from_bits(b).to_f32()).collect();
    x.extend((0..=u16::MAX).map(|b| half::bf16::from_bits(b).to_f32()));
    x.extend((0..200_000).map(|_| f32::from_bits(random.next() as u32)));
    // Ties and their neighbours, around the subnormal numbers and the largest of f16.
    for base in [1.0f32, 6.1e-5, 5.96e-8, 2.98e-8, 65504.0, 65520.0, 3.3e38] {
        x.extend((-3000i32..3000).map(|i| f32::from_bits(base.to_bits().wrapping_add_signed(i))));
    }
    let x: Vec<T> = typed(&x);
    let wide = values(&x);
    let same = |what: &str, got: &[f32], expected: &mut dyn Iterator<Item = f32>| {
        for ((&got, expected), x) in got.iter().zip(expected).zip(&wide) {
            let both_nan = got.is_nan() && expected.is_nan();
            let same = both_nan || got.to_bits() == expected.to_bits();
            assert!(same, "{what}: {x:e} became {got:e}, not {expected:e}");
        }
    };
    for backend in backends(&[1, 2]) {
        let mut out = Typed::<f32>::new(x.len());
        cpu::cast(&backend, &x, out.get()).unwrap();
        same("to f32", &out.checked("cast"), &mut wide.iter().copied());
        let mut out = Typed::<half::f16>::new(x.len());
        cpu::cast(&backend, &x, out.get()).unwrap();
        let expected = wide.iter().map(|&x| half::f16::from_f32(x).to_f32());
        same("to f16", &out.checked("cast"), &mut { expected });
        let mut out = Typed::<half::bf16>::new(x.len());
        cpu::cast(&backend, &x, out.get()).unwrap();
        let expected = wide.iter().map(|&x| half::bf16::from_f32(x).to_f32());
        same("to bf16", &out.checked("cast"), &mut { expected });
    }
}

type Binary = unsafe extern "C" fn(
    *const xserv_context,
    *const xserv_tensor,
    *const xserv_tensor,
    *const xserv_tensor,
) -> xserv_status;

#[allow(clippy::type_complexity)]
const BINARY: [(&str, Binary, fn(f64, f64) -> f64); 2] =
    [("add", xserv_op_add, |a, b| a + b), ("mul", xserv_op_mul, |a, b| a * b)];

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
                    // Through f32, which every value here is: `half` rounds f64 after cutting it
                    // off.
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
        let flat = tensor(Type::F32, &[24]);
        let shifted = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 6);
        let upper = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 0);
        let [x, half, narrow, ints, flat] =
            [&x, &half, &narrow, &ints, &flat].map(TestTensor::view);
        let null = std::ptr::null();
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            for (_, op, _) in BINARY {
                says(op(c, &x, null, &x), "b", "NULL");
                says(op(c, &ints, &x, &x), "a has elements of i32", "f32");
                says(op(c, &x, &half, &x), "b has elements of f16", "f32");
                says(op(c, &x, &narrow, &x), "b has shape [4, 5]", "[4, 6]");
                says(op(c, &x, &x, &flat), "out has shape [24]", "[4, 6]");
                says(op(c, &shifted, &shifted, &upper), "out overlaps a", "");
            }
            says(xserv_op_cast(c, &ints, &x), "source has elements of i32", "bf16");
            says(xserv_op_cast(c, &x, &ints), "target has elements of i32", "bf16");
            says(xserv_op_cast(c, &x, &narrow), "target has shape [4, 5]", "[4, 6]");
            says(xserv_op_cast(c, &shifted, &upper), "target overlaps source", "");
            ok(xserv_op_cast(c, &x, &x));
        }
    }
}
