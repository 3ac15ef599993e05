//! Layer normalisation: slices of all types and tensors.

use crate::support::layouts::{for_all_rows, laid_out};
use crate::support::tensors::*;
use crate::support::typed::{
    close, for_storage, normals, same_bits_on_any_number_of_threads, values, Typed,
};
use crate::support::{backends, golden, reference, Random};
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::layer_norm::cpu;

const WIDTHS: [usize; 14] = [1, 2, 15, 16, 17, 31, 32, 33, 64, 128, 257, 1000, 1024, 2049];
const ROWS: [usize; 9] = [0, 1, 2, 3, 5, 31, 33, 130, 300];
const EPS: f32 = 1e-6;

fn eps() -> f64 {
    f64::from(EPS)
}

for_storage!(slices, threads);

fn slices<T: Storage>() {
    let mut random = Random::new(41);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let weight: Vec<T> = normals(&mut random, width);
            let bias: Vec<T> = normals(&mut random, width);
            for rows in ROWS {
                let x: Vec<T> = normals(&mut random, rows * width);
                for bias in [None, Some(&bias[..])] {
                    let what = format!("layer_norm {rows}x{width} on {}", backend.name());
                    let mut out = Typed::new(x.len());
                    cpu::layer_norm(&backend, &x, &weight, bias, 1e-5, out.get()).unwrap();
                    let (bias, x, weight) = (bias.map(values), values(&x), values(&weight));
                    let expected = reference::layer_norm(&x, &weight, bias.as_deref(), 1e-5);
                    close::<T>(&what, &out.checked(&what), &expected, 2e-5);
                }
            }
        }
    }
}

fn threads<T: Storage>() {
    let mut random = Random::new(50);
    let x: Vec<T> = normals(&mut random, 400 * 512);
    let weight: Vec<T> = normals(&mut random, 512);
    same_bits_on_any_number_of_threads(|backend| {
        let (mut a, mut b) = (vec![T::default(); x.len()], vec![T::default(); x.len()]);
        cpu::layer_norm(backend, &x, &weight, Some(&weight), EPS, &mut a).unwrap();
        cpu::layer_norm(backend, &a, &weight, None, EPS, &mut b).unwrap();
        values(&b)
    });
}

/// Measured on x86: at most 3.5e-7, 4.1e-4 and 3.3e-3.
fn bar(element: Type) -> f64 {
    element.bar(4e-6, 6e-4, 4.5e-3)
}

fn run_layer(
    context: &Context,
    x: &TestTensor<'_>,
    weight: &TestTensor<'_>,
    bias: Option<&TestTensor<'_>>,
    out: &TestTensor<'_>,
) -> xserv_status {
    let bias = bias.map(TestTensor::view);
    let bias = bias.as_ref().map_or(std::ptr::null(), |bias| bias as *const xserv_tensor);
    let (x, weight, out) = (x.view(), weight.view(), out.view());
    // SAFETY: live tensors of the context, or NULL for the bias.
    unsafe { xserv_op_layer_norm(context.handle, &x, &weight, bias, EPS, &out) }
}

#[test]
fn tensors() {
    let mut random = Random::new(3);
    for_all_rows("layer_norm", |context, element, rows, width, layout, what| {
        let x = element.round_all(&random.normals(rows * width));
        let weight = element.round_all(&random.normals(width));
        let bias = element.round_all(&random.normals(width));
        let x_tensor = laid_out(context, element, layout, Some(&x));
        let weight_tensor = TestTensor::new(context, element, &[width as i64], &weight);
        let bias_tensor = TestTensor::new(context, element, &[width as i64], &bias);
        let out = laid_out(context, element, layout, None);
        let without = laid_out(context, element, layout, None);
        ok(run_layer(context, &x_tensor, &weight_tensor, Some(&bias_tensor), &out));
        ok(run_layer(context, &x_tensor, &weight_tensor, None, &without));
        let got = out.read(what);
        if width > 0 {
            let want = reference::layer_norm(&x, &weight, Some(&bias), eps());
            compare(what, &got, &want, bar(element));
            let want = reference::layer_norm(&x, &weight, None, eps());
            compare(what, &without.read(what), &want, bar(element));
        }
        assert_eq!(x_tensor.read(what), x, "{what}: the input was changed");
        ok(run_layer(context, &x_tensor, &weight_tensor, Some(&bias_tensor), &x_tensor));
        assert_eq!(x_tensor.read(what), got, "{what}: in place");
    });
}

#[test]
fn many_rows() {
    // More rows than a GPU holds at once, for blocks of one and of two warps.
    let mut random = Random::new(4);
    for context in contexts() {
        for (element, rows, width) in
            [(Type::BF16, 7001, 8), (Type::F16, 2001, 264), (Type::BF16, 1701, 520)]
        {
            let what = format!("layer_norm {element:?} {rows}x{width} on {}", context.name);
            let shape = [rows as i64, width as i64];
            let x = element.round_all(&random.normals(rows * width));
            let weight = element.round_all(&random.normals(width));
            let x_tensor = TestTensor::new(&context, element, &shape, &x);
            let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
            ok(run_layer(&context, &x_tensor, &weight_tensor, Some(&weight_tensor), &x_tensor));
            let want = reference::layer_norm(&x, &weight, Some(&weight), eps());
            compare(&what, &x_tensor.read(&what), &want, bar(element));
        }
    }
}

#[test]
fn a_large_mean_loses_nothing() {
    let mut random = Random::new(5);
    for context in contexts() {
        for (rows, width, mean) in
            [(5, 33, 100.0), (9, 1032, 100.0), (2, 4096, -100.0), (1, 20000, 100.0), (3, 8, 300.0)]
        {
            let what = format!("layer_norm {rows}x{width} mean {mean} on {}", context.name);
            let shape = [rows as i64, width as i64];
            let x: Vec<f32> = random.normals(rows * width).iter().map(|x| x + mean).collect();
            let x = Type::F32.round_all(&x);
            let weight = vec![1.0; width];
            let x_tensor = TestTensor::new(&context, Type::F32, &shape, &x);
            let weight_tensor = TestTensor::new(&context, Type::F32, &shape[1..], &weight);
            let out = TestTensor::blank(&context, Type::F32, &shape);
            ok(run_layer(&context, &x_tensor, &weight_tensor, None, &out));
            let want = reference::layer_norm(&x, &weight, None, eps());
            // The mean rounded to f32, once.
            let bar = 1e-6 + f64::from(mean).abs() * 1.2e-7;
            compare(&what, &out.read(&what), &want, bar);
        }
    }
}

#[test]
fn outliers_and_constants() {
    // One value far from all others is the first of its thread, of its warp, of the row; or
    // somewhere else.
    for context in contexts() {
        for width in [40, 4096, 4097] {
            for place in [0, 1, 31, width / 2, width - 1] {
                let what = format!("layer_norm {width}, outlier at {place} on {}", context.name);
                let mut x: Vec<f64> = (0..width)
                    .map(|i| Type::F32.round(0.37 * f64::from((i % 7) as i32 - 3)))
                    .collect();
                x[place] = 1e5;
                let shape = [1, width as i64];
                let weight = vec![1.0; width];
                let x_tensor = TestTensor::new(&context, Type::F32, &shape, &x);
                let weight_tensor = TestTensor::new(&context, Type::F32, &shape[1..], &weight);
                let out = TestTensor::blank(&context, Type::F32, &shape);
                ok(run_layer(&context, &x_tensor, &weight_tensor, None, &out));
                let want = reference::layer_norm(&x, &weight, None, eps());
                compare(&what, &out.read(&what), &want, 1e-5);
            }
            let what = format!("layer_norm {width}, all the same, on {}", context.name);
            for element in FLOATS {
                let shape = [2, width as i64];
                let value = element.round(0.1);
                let x_tensor = TestTensor::new(&context, element, &shape, &vec![value; 2 * width]);
                let weight: Vec<f64> = (0..width).map(|i| (i % 5) as f64).collect();
                let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
                let out = TestTensor::blank(&context, element, &shape);
                ok(run_layer(&context, &x_tensor, &weight_tensor, Some(&weight_tensor), &out));
                let want: Vec<f64> = [weight.as_slice(), &weight].concat();
                // Nothing of the deviations is left but rounding, divided by sqrt(eps).
                compare(&what, &out.read(&what), &want, bar(element));
            }
        }
    }
}

#[test]
fn nan_and_infinity_stay_in_their_rows() {
    let mut random = Random::new(6);
    for context in contexts() {
        for element in FLOATS {
            for width in [33, 136, 1040, 4096] {
                let what = format!("{element:?} width {width} on {}", context.name);
                let shape = [4, width as i64];
                let mut x = element.round_all(&random.normals(4 * width));
                x[width + 5] = f64::NAN;
                x[2 * width + 7] = f64::INFINITY;
                let weight: Vec<f64> = vec![1.0; width];
                let x_tensor = TestTensor::new(&context, element, &shape, &x);
                let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
                let out = TestTensor::blank(&context, element, &shape);
                let want = reference::layer_norm(&x, &weight, None, eps());
                ok(run_layer(&context, &x_tensor, &weight_tensor, None, &out));
                compare(&format!("layer_norm {what}"), &out.read(&what), &want, bar(element));
            }
        }
    }
}

#[test]
fn golden_vectors() {
    let Some(golden) = golden::open("layernorm") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let what = format!("layernorm {} on {}", case.name, context.name);
            let element = golden_type(&case.name);
            let make = |name: &str| {
                let from = golden.tensor(case, name);
                let shape: Vec<i64> = from.shape.iter().map(|&n| n as i64).collect();
                TestTensor::new(&context, element, &shape, &from.values)
            };
            let (x, weight, bias) = (make("x"), make("weight"), make("bias"));
            let out = TestTensor::blank(&context, element, &x.shape);
            let eps = case.params["eps"].as_f64().unwrap() as f32;
            // SAFETY: live tensors of the context.
            unsafe {
                let (x, weight, bias, out) = (x.view(), weight.view(), bias.view(), out.view());
                ok(xserv_op_layer_norm(context.handle, &x, &weight, &bias, eps, &out));
            }
            let want = golden.tensor(case, "y").values;
            compare(&what, &out.read(&what), &want, element.bar(2e-5, 6e-4, 4.5e-3));
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    for context in contexts() {
        let new = |element, shape: &[i64]| {
            let len: i64 = shape.iter().product();
            TestTensor::new(&context, element, shape, &vec![1.0; len as usize])
        };
        let f32s = |shape: &[i64]| new(Type::F32, shape);
        let (x, weight, out) = (f32s(&[4, 8]), f32s(&[8]), f32s(&[4, 8]));
        let (integers, other_shape, scalar) = (new(Type::I32, &[4, 8]), f32s(&[8, 4]), f32s(&[]));
        let (short, half_weight) = (f32s(&[7]), new(Type::F16, &[8]));
        let mut broadcast_strides = [0i64, 1];
        let broadcast = xserv_tensor { strides: broadcast_strides.as_mut_ptr(), ..out.view() };
        // Three rows from the first and from the second on.
        let mut three_rows = [3i64, 8];
        let upper = xserv_tensor { shape: three_rows.as_mut_ptr(), ..x.view() };
        let below = xserv_tensor { byte_offset: upper.byte_offset + 32, ..upper };
        let weight_row = {
            let from = x.view();
            xserv_tensor {
                ndim: 1,
                shape: weight.shape.as_ptr().cast_mut(),
                strides: std::ptr::null_mut(),
                ..from
            }
        };
        let (xv, wv, ov) = (x.view(), weight.view(), out.view());
        let null = std::ptr::null();

        // SAFETY: descriptors of live memory, or NULL.
        let layer = |x: *const xserv_tensor, weight, bias, eps, out| unsafe {
            xserv_op_layer_norm(context.handle, x, weight, bias, eps, out)
        };
        let says = |status, name: &str| {
            let text = refused(status);
            assert!(text.contains(name), "{text:?} does not name {name}");
        };

        for eps in [-1.0, f32::NAN, f32::INFINITY] {
            says(layer(&xv, &wv, null, eps, &ov), "eps");
        }

        says(layer(null, &wv, null, EPS, &ov), "x");
        says(layer(&xv, null, null, EPS, &ov), "weight");
        says(layer(&xv, &wv, null, EPS, null), "out");
        says(layer(&integers.view(), &wv, null, EPS, &ov), "x has elements of i32");
        says(layer(&xv, &half_weight.view(), null, EPS, &ov), "weight has elements of f16");
        says(layer(&xv, &wv, &half_weight.view(), EPS, &ov), "bias has elements of f16");
        says(layer(&xv, &wv, &short.view(), EPS, &ov), "bias has shape [7]");
        says(layer(&xv, &short.view(), null, EPS, &ov), "weight has shape [7]");
        says(layer(&xv, &wv, null, EPS, &other_shape.view()), "out has shape [8, 4]");
        says(layer(&scalar.view(), &wv, null, EPS, &scalar.view()), "x has no dimensions");
        says(layer(&xv, &wv, null, EPS, &broadcast), "out has strides [0, 1]");
        says(layer(&upper, &wv, null, EPS, &below), "out overlaps x");
        says(layer(&ov, &weight_row, null, EPS, &xv), "out overlaps weight");
        says(layer(&ov, &wv, &weight_row, EPS, &xv), "out overlaps bias");
    }
}
