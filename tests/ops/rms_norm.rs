//! RMSNorm, with and without the residual addition: slices of all types, heads inside a fused row,
//! tensors, and the rounding after each step.

use crate::support::device::{assert_rounded, cuda_context, last_place, round, Bench, HALVES};
use crate::support::layouts::{for_all_rows, laid_out};
use crate::support::tensors::*;
use crate::support::typed::{
    close, for_storage, normals, same_bits_on_any_number_of_threads, values, Typed,
};
use crate::support::{
    assert_close, assert_same_bits, backends, golden, reference, rounded, Guarded, Random,
    Tolerance, DTYPES,
};
use xserv::backend::cpu::CpuBackend;
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::rms_norm::cpu;
use xserv::ops::rms_norm::cpu_heads::rms_norm_heads;
use xserv::ops::rms_norm::cuda_rounded::{self, rms_norm_rounded};

const WIDTHS: [usize; 14] = [1, 2, 15, 16, 17, 31, 32, 33, 64, 128, 257, 1000, 1024, 2049];
const ROWS: [usize; 9] = [0, 1, 2, 3, 5, 31, 33, 130, 300];
const EPS: f32 = 1e-6;

fn eps() -> f64 {
    f64::from(EPS)
}

for_storage!(slices, threads);

fn slices<T: Storage>() {
    let mut random = Random::new(40);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let weight: Vec<T> = normals(&mut random, width);
            for rows in ROWS {
                let x: Vec<T> = normals(&mut random, rows * width);
                let y: Vec<T> = normals(&mut random, rows * width);
                let what = format!("rms_norm {rows}x{width} on {}", backend.name());
                let mut out = Typed::new(x.len());
                cpu::rms_norm(&backend, &x, &weight, EPS, out.get()).unwrap();
                let expected = reference::rms_norm(&values(&x), &values(&weight), eps());
                close::<T>(&what, &out.checked(&what), &expected, 2e-6);

                let (mut sums, mut out) = (Typed::new(x.len()), Typed::new(x.len()));
                cpu::add_rms_norm(&backend, &x, &y, &weight, EPS, sums.get(), out.get()).unwrap();
                let added: Vec<T> =
                    x.iter().zip(&y).map(|(x, y)| T::from_f32(x.to_f32() + y.to_f32())).collect();
                assert_same_bits(&what, &sums.checked(&what), &values(&added));
                let expected = reference::rms_norm(&values(&added), &values(&weight), eps());
                close::<T>(&what, &out.checked(&what), &expected, 2e-6);
            }
        }
    }
    let backend = CpuBackend::new(1).unwrap();
    let (x, mut out) = (vec![T::default(); 6], vec![T::default(); 6]);
    assert!(cpu::rms_norm(&backend, &x, &x[..4], EPS, &mut out).is_err());
    assert!(cpu::rms_norm(&backend, &x, &x[..0], EPS, &mut out).is_err());
    assert!(cpu::rms_norm(&backend, &x[..3], &x[..3], EPS, &mut out).is_err());
}

fn threads<T: Storage>() {
    let mut random = Random::new(50);
    let x: Vec<T> = normals(&mut random, 400 * 512);
    let weight: Vec<T> = normals(&mut random, 512);
    same_bits_on_any_number_of_threads(|backend| {
        let [mut a, mut b, mut sums] = [(); 3].map(|()| vec![T::default(); x.len()]);
        cpu::rms_norm(backend, &x, &weight, EPS, &mut a).unwrap();
        cpu::add_rms_norm(backend, &x, &a, &weight, EPS, &mut sums, &mut b).unwrap();
        [values(&b), values(&sums)].concat()
    });
}

#[test]
fn heads_inside_a_fused_row() {
    let mut random = Random::new(21);
    let (num_heads, head_dim, row_stride) = (5, 48, 400);
    let weight = random.normals(head_dim);
    for backend in backends(&[1, 2]) {
        for num_tokens in [0, 1, 200] {
            // As long as it must be: the last row ends with its heads.
            let len = if num_tokens == 0 { 0 } else { (num_tokens - 1) * row_stride + 240 };
            let before = random.normals(len);
            let mut x = Guarded::of(&before);
            rms_norm_heads(&backend, x.get(), num_tokens, row_stride, num_heads, &weight, EPS)
                .unwrap();
            let mut expected: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
            for token in 0..num_tokens {
                let row = token * row_stride..token * row_stride + 240;
                expected[row.clone()].copy_from_slice(&reference::rms_norm(
                    &before[row],
                    &weight,
                    eps(),
                ));
            }
            assert_close("heads", x.checked("heads"), &expected, Tolerance::OnePlus(2e-6));
        }
        let mut short = vec![0.0; 2 * row_stride];
        let call = |x: &mut [f32], tokens, stride| {
            rms_norm_heads(&backend, x, tokens, stride, num_heads, &weight, EPS)
        };
        assert!(call(&mut short, 3, row_stride).is_err());
        assert!(call(&mut short, 2, 239).is_err());
    }
}

/// Measured on x86: at most 3.5e-7, 4.1e-4 and 3.3e-3.
fn bar(element: Type) -> f64 {
    element.bar(4e-6, 6e-4, 4.5e-3)
}

/// Returns the sum as it is stored: added in f32, rounded to the type.
fn add_reference(element: Type, x: &[f64], residual: &[f64]) -> Vec<f64> {
    x.iter().zip(residual).map(|(x, r)| element.round(Type::F32.round(x + r))).collect()
}

fn run_rms(
    context: &Context,
    x: &TestTensor<'_>,
    weight: &TestTensor<'_>,
    out: &TestTensor<'_>,
) -> xserv_status {
    // SAFETY: live tensors of the context.
    unsafe { xserv_op_rms_norm(context.handle, &x.view(), &weight.view(), EPS, &out.view()) }
}

fn run_add(
    context: &Context,
    x: &TestTensor<'_>,
    residual: &TestTensor<'_>,
    weight: &TestTensor<'_>,
    residual_out: &TestTensor<'_>,
    out: &TestTensor<'_>,
) -> xserv_status {
    let (x, residual, weight) = (x.view(), residual.view(), weight.view());
    let (residual_out, out) = (residual_out.view(), out.view());
    // SAFETY: live tensors of the context.
    unsafe {
        xserv_op_add_rms_norm(context.handle, &x, &residual, &weight, EPS, &residual_out, &out)
    }
}

#[test]
fn tensors() {
    let mut random = Random::new(1);
    for_all_rows("rms_norm", |context, element, rows, width, layout, what| {
        let x = element.round_all(&random.normals(rows * width));
        let weight = element.round_all(&random.normals(width));
        let x_tensor = laid_out(context, element, layout, Some(&x));
        let weight_tensor = TestTensor::new(context, element, &[width as i64], &weight);
        let out = laid_out(context, element, layout, None);
        ok(run_rms(context, &x_tensor, &weight_tensor, &out));
        let got = out.read(what);
        if width > 0 {
            compare(what, &got, &reference::rms_norm(&x, &weight, eps()), bar(element));
        }
        assert_eq!(x_tensor.read(what), x, "{what}: the input was changed");
        // In place, and so a second time: the same bits.
        ok(run_rms(context, &x_tensor, &weight_tensor, &x_tensor));
        assert_eq!(x_tensor.read(what), got, "{what}: in place");
    });
}

#[test]
fn tensors_and_residuals() {
    let mut random = Random::new(2);
    for_all_rows("add_rms_norm", |context, element, rows, width, layout, what| {
        let x = element.round_all(&random.normals(rows * width));
        let residual = element.round_all(&random.normals(rows * width));
        let weight = element.round_all(&random.normals(width));
        let x_tensor = laid_out(context, element, layout, Some(&x));
        let residual_tensor = laid_out(context, element, layout, Some(&residual));
        let weight_tensor = TestTensor::new(context, element, &[width as i64], &weight);
        let sum = laid_out(context, element, layout, None);
        let out = laid_out(context, element, layout, None);
        ok(run_add(context, &x_tensor, &residual_tensor, &weight_tensor, &sum, &out));
        let (got_sum, got) = (sum.read(what), out.read(what));
        let want_sum = add_reference(element, &x, &residual);
        assert_eq!(got_sum, want_sum, "{what}: residual_out");
        if width > 0 {
            compare(what, &got, &reference::rms_norm(&want_sum, &weight, eps()), bar(element));
        }
        assert_eq!(x_tensor.read(what), x, "{what}: x was changed");
        assert_eq!(residual_tensor.read(what), residual, "{what}: residual was changed");
        // residual_out in the place of x, then both results in the places of their inputs.
        let x_copy = laid_out(context, element, layout, Some(&x));
        let again = laid_out(context, element, layout, None);
        ok(run_add(context, &x_copy, &residual_tensor, &weight_tensor, &x_copy, &again));
        assert_eq!(x_copy.read(what), want_sum, "{what}: residual_out is x");
        assert_eq!(again.read(what), got, "{what}: residual_out is x");
        ok(run_add(
            context,
            &x_tensor,
            &residual_tensor,
            &weight_tensor,
            &residual_tensor,
            &x_tensor,
        ));
        assert_eq!(residual_tensor.read(what), want_sum, "{what}: in place");
        assert_eq!(x_tensor.read(what), got, "{what}: in place");
    });
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
                let zeros = vec![0.0; 4 * width];
                let x_tensor = TestTensor::new(&context, element, &shape, &x);
                let zero_tensor = TestTensor::new(&context, element, &shape, &zeros);
                let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
                let out = TestTensor::blank(&context, element, &shape);
                let sum = TestTensor::blank(&context, element, &shape);
                let want = reference::rms_norm(&x, &weight, eps());
                ok(run_rms(&context, &x_tensor, &weight_tensor, &out));
                compare(&format!("rms_norm {what}"), &out.read(&what), &want, bar(element));
                ok(run_add(&context, &x_tensor, &zero_tensor, &weight_tensor, &sum, &out));
                compare(&format!("add_rms_norm {what}"), &out.read(&what), &want, bar(element));
            }
        }
    }
}

#[test]
fn golden_vectors() {
    let Some(golden) = golden::open("rmsnorm") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let what = format!("rmsnorm {} on {}", case.name, context.name);
            let element = golden_type(&case.name);
            let make = |name: &str| {
                let from = golden.tensor(case, name);
                let shape: Vec<i64> = from.shape.iter().map(|&n| n as i64).collect();
                TestTensor::new(&context, element, &shape, &from.values)
            };
            let (x, weight) = (make("x"), make("weight"));
            let out = TestTensor::blank(&context, element, &x.shape);
            let eps = case.params["eps"].as_f64().unwrap() as f32;
            // SAFETY: live tensors of the context.
            unsafe {
                let (x, weight, out) = (x.view(), weight.view(), out.view());
                ok(xserv_op_rms_norm(context.handle, &x, &weight, eps, &out));
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
        let (x, residual) = (f32s(&[4, 8]), f32s(&[4, 8]));
        let (weight, sum, out) = (f32s(&[8]), f32s(&[4, 8]), f32s(&[4, 8]));
        let (integers, halves, other_shape, scalar) =
            (new(Type::I32, &[4, 8]), new(Type::F16, &[4, 8]), f32s(&[8, 4]), f32s(&[]));
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
        let (xv, rv, wv, sv, ov) =
            (x.view(), residual.view(), weight.view(), sum.view(), out.view());
        let null = std::ptr::null();

        // SAFETY: descriptors of live memory, or NULL.
        let rms = |x: *const xserv_tensor, weight, eps, out| unsafe {
            xserv_op_rms_norm(context.handle, x, weight, eps, out)
        };
        // SAFETY: as above.
        let add = |x: *const xserv_tensor, residual, weight, eps, sum, out| unsafe {
            xserv_op_add_rms_norm(context.handle, x, residual, weight, eps, sum, out)
        };
        let says = |status, name: &str| {
            let text = refused(status);
            assert!(text.contains(name), "{text:?} does not name {name}");
        };

        says(rms(null, &wv, EPS, &ov), "x");
        says(rms(&xv, null, EPS, &ov), "weight");
        says(rms(&xv, &wv, EPS, null), "out");
        says(rms(&integers.view(), &wv, EPS, &ov), "x has elements of i32");
        says(rms(&halves.view(), &wv, EPS, &ov), "weight has elements of f32");
        says(rms(&xv, &half_weight.view(), EPS, &ov), "weight has elements of f16");
        says(rms(&xv, &wv, EPS, &halves.view()), "out has elements of f16");
        says(rms(&xv, &wv, EPS, &other_shape.view()), "out has shape [8, 4], but x has [4, 8]");
        says(rms(&xv, &short.view(), EPS, &ov), "weight has shape [7]");
        says(rms(&scalar.view(), &wv, EPS, &scalar.view()), "x has no dimensions");
        for eps in [-1.0, f32::NAN, f32::INFINITY] {
            says(rms(&xv, &wv, eps, &ov), "eps");
            says(add(&xv, &rv, &wv, eps, &sv, &ov), "eps");
        }
        says(rms(&xv, &wv, EPS, &broadcast), "out has strides [0, 1]");
        says(rms(&upper, &wv, EPS, &below), "out overlaps x");
        says(rms(&ov, &weight_row, EPS, &xv), "out overlaps weight");

        says(add(null, &rv, &wv, EPS, &sv, &ov), "x");
        says(add(&xv, null, &wv, EPS, &sv, &ov), "residual");
        says(add(&xv, &rv, null, EPS, &sv, &ov), "weight");
        says(add(&xv, &rv, &wv, EPS, null, &ov), "residual_out");
        says(add(&xv, &rv, &wv, EPS, &sv, null), "out");
        says(add(&integers.view(), &rv, &wv, EPS, &sv, &ov), "x has elements of i32");
        says(add(&xv, &halves.view(), &wv, EPS, &sv, &ov), "residual has elements of f16");
        says(add(&xv, &rv, &wv, EPS, &halves.view(), &ov), "residual_out has elements of f16");
        says(add(&xv, &other_shape.view(), &wv, EPS, &sv, &ov), "residual has shape [8, 4]");
        says(add(&xv, &rv, &wv, EPS, &other_shape.view(), &ov), "residual_out has shape [8, 4]");
        says(add(&xv, &rv, &wv, EPS, &sv, &other_shape.view()), "out has shape [8, 4]");
        says(add(&xv, &rv, &short.view(), EPS, &sv, &ov), "weight has shape [7]");
        says(add(&scalar.view(), &scalar.view(), &wv, EPS, &sv, &ov), "x has");
        says(add(&xv, &rv, &wv, EPS, &broadcast, &sv), "residual_out has strides [0, 1]");
        says(add(&xv, &rv, &wv, EPS, &sv, &sv), "out overlaps residual_out");
        says(add(&xv, &rv, &wv, EPS, &xv, &xv), "out overlaps residual_out");
        says(add(&xv, &rv, &wv, EPS, &sv, &rv), "out overlaps residual");
        says(add(&rv, &ov, &weight_row, EPS, &xv, &sv), "residual_out overlaps weight");
        says(add(&rv, &ov, &weight_row, EPS, &sv, &xv), "out overlaps weight");
    }
}

#[test]
fn inputs_may_share_memory() {
    // x, residual and weight are only read: any of them may be the same, or a broadcast row.
    for context in contexts() {
        let x: Vec<f64> = (0..16).map(|i| f64::from(i) - 7.0).collect();
        let rows: Vec<f64> = [x.as_slice(), &x, &x].concat();
        let weight = TestTensor::new(&context, Type::F32, &[16], &x);
        let mut shape = [3i64, 16];
        let mut strides = [0i64, 1];
        let row = xserv_tensor {
            ndim: 2,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            ..weight.view()
        };
        let out = TestTensor::blank(&context, Type::F32, &[3, 16]);
        let sum = TestTensor::blank(&context, Type::F32, &[3, 16]);
        // SAFETY: descriptors of live memory.
        unsafe {
            let (weight, sum, out) = (weight.view(), sum.view(), out.view());
            ok(xserv_op_add_rms_norm(context.handle, &row, &row, &weight, EPS, &sum, &out));
        }
        let twice: Vec<f64> = rows.iter().map(|x| 2.0 * x).collect();
        assert_eq!(sum.read("sum"), twice);
        let want = reference::rms_norm(&twice, &x, eps());
        compare("broadcast rows", &out.read("out"), &want, 1e-5);
    }
}

/// Results larger than the second-level cache have a kernel of their own.
#[test]
fn more_than_the_cache_holds_on_cuda() {
    let Some(context) = cuda() else { return };
    let (rows, width) = (2200, 16_384);
    let mut random = Random::new(77);
    let element = Type::BF16;
    let line = element.round_all(&random.normals(width));
    let weight = element.round_all(&random.normals(width));
    // Each row is the same but for a factor, so that a reference is cheap.
    let factor = |row: usize| f64::from(1u32 << (row % 5));
    let x: Vec<f64> = (0..rows).flat_map(|row| line.iter().map(move |x| x * factor(row))).collect();
    let shape = [rows as i64, width as i64];
    let x = TestTensor::new(&context, element, &shape, &x);
    let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
    let out = TestTensor::blank(&context, element, &shape);
    // SAFETY: live tensors of the context.
    unsafe {
        let (x, weight, out) = (x.view(), weight_tensor.view(), out.view());
        ok(xserv_op_rms_norm(context.handle, &x, &weight, 1e-6, &out));
    }
    let out = out.read("rms_norm");
    for (row, got) in out.chunks_exact(width).enumerate() {
        let x: Vec<f64> = line.iter().map(|x| x * factor(row)).collect();
        let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + f64::from(1e-6f32)).sqrt();
        let want: Vec<f64> = x.iter().zip(&weight).map(|(x, w)| x * scale * w).collect();
        compare(&format!("row {row}"), got, &want, 4.5e-3);
    }
}

/// Rows of whole vectors and not, rows of several accesses a thread.
const ROUNDED_SHAPES: [(usize, usize); 10] = [
    (1, 1),
    (3, 7),
    (5, 33),
    (1, 8),
    (70, 1024),
    (2, 4096),
    (3, 2560),
    (1, 16_384),
    (2, 4100),
    (1, 20_008),
];

/// Returns the norm of each row of x, and how far each element may be off: two roundings.
fn rounded_rows(bench: &Bench, x: &[f64], weight: &[f64]) -> Vec<(f64, f64)> {
    let rows = x.chunks_exact(weight.len());
    let normed = rows.flat_map(|row| rounded::rms_norm(bench.dtype, row, weight, EPS));
    normed.map(|y| (y, 2.0 * last_place(bench.dtype) * y.abs() + 2e-7)).collect()
}

#[test]
fn with_a_residual_on_cuda_it_is_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for (rows, width) in ROUNDED_SHAPES {
            let what = format!("{dtype} add_rms_norm {rows}x{width}");
            let mut bench = Bench::new(&context, dtype, (rows * width) as u64);
            let (x, x_values) = bench.filled(&[rows, width], 3.0, 0.0);
            let (residual, values) = bench.filled(&[rows, width], 20.0, 0.5);
            let (weight, weight_values) = bench.filled(&[width], 0.5, 1.0);
            let out = bench.poisoned(&[rows, width]);
            let add = |x| cuda_rounded::add_rms_norm(&context, x, &residual, &weight, EPS, &out);

            // Without x nothing is added.
            add(None).expect("the operator");
            let want = rounded_rows(&bench, &values, &weight_values);
            assert_rounded(&format!("{what}, no x"), dtype, &bench.read(&out), &want, 0.01);
            assert_eq!(bench.read(&residual), values, "{what}: the residual was changed");

            add(Some(&x)).expect("the operator");
            // Two numbers of the type are added in f32 and rounded: nothing depends on an order.
            let sums: Vec<f64> =
                x_values.iter().zip(&values).map(|(x, r)| round(dtype, x + r)).collect();
            assert_eq!(bench.read(&residual), sums, "{what}: the residual");
            let want = rounded_rows(&bench, &sums, &weight_values);
            assert_rounded(&what, dtype, &bench.read(&out), &want, 0.01);
            assert_eq!(bench.read(&x), x_values, "{what}: x was changed");
        }
    }
}

#[test]
fn in_front_of_a_linear_layer_on_cuda_it_is_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    for dtype in HALVES {
        for (rows, width) in [(1, 8), (3, 264), (70, 1024), (2, 4096), (3, 2560), (5, 16_384)] {
            let what = format!("{dtype} rms_norm_rounded {rows}x{width}");
            let mut bench = Bench::new(&context, dtype, (rows * width) as u64);
            let (x, values) = bench.filled(&[rows, width], 3.0, 0.25);
            let (weight, weight_values) = bench.filled(&[width], 0.5, 1.0);
            let [out, other] = [(); 2].map(|()| bench.poisoned(&[rows, width]));
            rms_norm_rounded(&context, &x, &weight, EPS, &out).expect("the operator");
            let got = bench.read(&out);
            let want = rounded_rows(&bench, &values, &weight_values);
            assert_rounded(&what, dtype, &got, &want, 0.01);
            assert_eq!(bench.read(&x), values, "{what}: x was changed");
            // The sums of both kernels have one order.
            cuda_rounded::add_rms_norm(&context, None, &x, &weight, EPS, &other)
                .expect("the operator");
            assert_eq!(bench.read(&other), got, "{what}: not the bits of add_rms_norm");
        }
        // Widths that the kernel does not serve are refused.
        let mut bench = Bench::new(&context, dtype, 1);
        for width in [12, 16_392] {
            let (x, _) = bench.filled(&[1, width], 1.0, 0.0);
            let (weight, _) = bench.filled(&[width], 1.0, 0.0);
            let out = bench.poisoned(&[1, width]);
            assert!(rms_norm_rounded(&context, &x, &weight, EPS, &out).is_err(), "{width}");
        }
    }
}
