//! Softmax: slices of all types and tensors.

use crate::support::tensors::*;
use crate::support::typed::{
    close, for_storage, normals, same_bits_on_any_number_of_threads, typed, values, Typed,
};
use crate::support::{backends, golden, reference, Random};
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::softmax::cpu;

const WIDTHS: [usize; 14] = [1, 2, 15, 16, 17, 31, 32, 33, 64, 128, 257, 1000, 1024, 2049];
const ROWS: [usize; 9] = [0, 1, 2, 3, 5, 31, 33, 130, 300];

for_storage!(slices, threads);

fn slices<T: Storage>() {
    let mut random = Random::new(43);
    for backend in backends(&[1, 2]) {
        // The last is cut into parts.
        for (width, rows) in
            WIDTHS.into_iter().flat_map(|w| ROWS.map(|r| (w, r))).chain([(40_000, 5)])
        {
            let mut x = random.normals(rows * width);
            for (row, x) in x.chunks_mut(width).enumerate() {
                match row % 4 {
                    1 => x.iter_mut().for_each(|x| *x = *x * 100.0 + 1000.0),
                    2 => x.iter_mut().step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
                    3 => x.fill(f32::NEG_INFINITY),
                    _ => {}
                }
            }
            let x: Vec<T> = typed(&x);
            let what = format!("softmax {rows}x{width} on {}", backend.name());
            let mut out = Typed::new(x.len());
            cpu::softmax(&backend, &x, width, out.get()).unwrap();
            let expected = reference::softmax(&values(&x), width);
            close::<T>(&what, &out.checked(&what), &expected, 2e-6);
        }
        for width in [3, 20_000] {
            let mut x = vec![T::from_f32(1.0); width];
            x[1] = T::from_f32(f32::NAN);
            let mut out = vec![T::default(); width];
            cpu::softmax(&backend, &x, width, &mut out).unwrap();
            assert!(out.iter().all(|x| x.to_f32().is_nan()));
        }
    }
}

fn threads<T: Storage>() {
    let mut random = Random::new(50);
    let x: Vec<T> = normals(&mut random, 400 * 512);
    same_bits_on_any_number_of_threads(|backend| {
        let (mut a, mut b) = (vec![T::default(); x.len()], vec![T::default(); x.len()]);
        cpu::softmax(backend, &x, 512, &mut a).unwrap();
        cpu::softmax(backend, &x, x.len(), &mut b).unwrap();
        [values(&a), values(&b)].concat()
    });
}

/// Measured on x86: at most 1.7e-6, 4.3e-4 and 3.6e-3. On an H200 f32 kept the bar below too.
fn bar(element: Type) -> f64 {
    element.bar(8e-6, 6e-4, 4.5e-3)
}

fn run(context: &Context, x: &TestTensor<'_>, out: &TestTensor<'_>) -> xserv_status {
    // SAFETY: live tensors of the context.
    unsafe { xserv_op_softmax(context.handle, &x.view(), &out.view()) }
}

#[test]
fn tensors() {
    let mut random = Random::new(1);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in [
                (1usize, 1usize),
                (7, 1),
                (3, 7),
                (33, 8),
                (9, 31),
                (9, 32),
                (9, 33),
                (12, 128),
                (3, 1023),
                (2, 4096),
                (2, 4100),
                (1, 8192),
                (1, 8193),
                (1, 16384),
                (1, 16392),
                (1, 32768),
                (1, 32776),
                (1, 40001),
                (0, 8),
                (4, 0),
            ] {
                let (r, w) = (rows as i64, width as i64);
                let padded = width.next_multiple_of(8) as i64;
                let mut layouts = vec![
                    (vec![r, w], vec![w, 1], 0),
                    (vec![r, w], vec![w + 1, 1], 1),
                    (vec![r, w], vec![padded + 8, 1], 0),
                ];
                if rows % 3 == 0 && (1..2000).contains(&width) && rows > 0 {
                    layouts.push((vec![3, r / 3, w], vec![padded, 3 * padded, 1], 0));
                    layouts.push((vec![r, w], vec![1, r], 0));
                }
                let x: Vec<f32> = random.normals(rows * width).iter().map(|x| 4.0 * x).collect();
                let x = element.round_all(&x);
                let want = reference::softmax(&x, width);
                for (shape, strides, misalign) in layouts {
                    let what = format!(
                        "softmax {element:?} {shape:?} strides {strides:?} on {}",
                        context.name
                    );
                    let place = |values: &[f64]| {
                        TestTensor::strided(&context, element, &shape, &strides, misalign, values)
                    };
                    let x_tensor = place(&x);
                    let out = place(&vec![f64::NAN; x.len()]);
                    ok(run(&context, &x_tensor, &out));
                    let got = out.read(&what);
                    compare(&what, &got, &want, bar(element));
                    assert_eq!(x_tensor.read(&what), x, "{what}: the input was changed");
                    ok(run(&context, &x_tensor, &x_tensor));
                    assert_eq!(x_tensor.read(&what), got, "{what}: in place");
                }
            }
        }
    }
}

#[test]
fn extreme_rows() {
    for context in contexts() {
        for element in FLOATS {
            let big = element.bar(3e38, 6e4, 3e38);
            let big = element.round(big);
            let inf = f64::INFINITY;
            for width in [3usize, 40, 4096, 16392, 32776] {
                let at = |i: usize| i % width;
                let mut rows = vec![vec![-inf; width], vec![1000.0; width]];
                let alternating: Vec<f64> =
                    (0..width).map(|i| if i % 2 == 0 { 1000.0 } else { -1000.0 }).collect();
                rows.push(alternating);
                rows.push((0..width).map(|i| if i % 3 == 0 { big } else { -big }).collect());
                // One value that is not masked: first, last, in the middle.
                for place in [0, width - 1, width / 2] {
                    let mut row = vec![-inf; width];
                    row[place] = -big;
                    rows.push(row);
                }
                let mut half_masked: Vec<f64> = (0..width).map(|i| (i % 5) as f64).collect();
                half_masked[..width / 2].fill(-inf);
                rows.push(half_masked);
                for (place, value) in [(at(7), f64::NAN), (0, f64::NAN), (at(5), inf)] {
                    let mut row = vec![0.5; width];
                    row[place] = value;
                    rows.push(row);
                }
                let mut masked_nan = vec![-inf; width];
                masked_nan[at(33)] = f64::NAN;
                rows.push(masked_nan);
                rows.push(vec![0.25; width]);
                let x: Vec<f64> = rows.concat();
                let shape = [rows.len() as i64, width as i64];
                let x_tensor = TestTensor::new(&context, element, &shape, &x);
                let out = TestTensor::blank(&context, element, &shape);
                ok(run(&context, &x_tensor, &out));
                let what = format!("softmax {element:?} width {width} on {}", context.name);
                let got = out.read(&what);
                for (index, (got, x)) in got.chunks(width).zip(&rows).enumerate() {
                    let what = format!("{what}, row {index}");
                    compare(&what, got, &reference::softmax(x, width), bar(element));
                }
            }
        }
    }
}

#[test]
fn rows_sum_to_one() {
    let mut random = Random::new(2);
    for context in contexts() {
        for width in [5, 100, 4096, 20000, 151_936] {
            let x = Type::F32.round_all(&random.normals(width));
            let shape = [1, width as i64];
            let x_tensor = TestTensor::new(&context, Type::F32, &shape, &x);
            ok(run(&context, &x_tensor, &x_tensor));
            let what = format!("softmax {width} on {}", context.name);
            let sum: f64 = x_tensor.read(&what).iter().sum();
            assert!((sum - 1.0).abs() < 1e-5, "{what}: sum {sum}");
        }
    }
}

#[test]
fn golden_vectors() {
    let Some(golden) = golden::open("softmax") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let what = format!("softmax {} on {}", case.name, context.name);
            let element = golden_type(&case.name);
            let x = golden.tensor(case, "x");
            let shape: Vec<i64> = x.shape.iter().map(|&n| n as i64).collect();
            let x = TestTensor::new(&context, element, &shape, &x.values);
            let out = TestTensor::blank(&context, element, &shape);
            ok(run(&context, &x, &out));
            // A row that is masked altogether is NaN in the reference and zeros here.
            let mut want = golden.tensor(case, "y").values;
            want.iter_mut().filter(|y| y.is_nan()).for_each(|y| *y = 0.0);
            compare(&what, &out.read(&what), &want, bar(element));
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
        let (x, out, halves) =
            (new(Type::F32, &[4, 8]), new(Type::F32, &[4, 8]), new(Type::F16, &[4, 8]));
        let (integers, other_shape, scalar) =
            (new(Type::I64, &[4, 8]), new(Type::F32, &[8, 4]), new(Type::F32, &[]));
        let mut broadcast_strides = [0i64, 1];
        let broadcast = xserv_tensor { strides: broadcast_strides.as_mut_ptr(), ..out.view() };
        let mut three_rows = [3i64, 8];
        let upper = xserv_tensor { shape: three_rows.as_mut_ptr(), ..x.view() };
        let below = xserv_tensor { byte_offset: upper.byte_offset + 32, ..upper };
        let (xv, ov) = (x.view(), out.view());
        let null = std::ptr::null();
        // SAFETY: descriptors of live memory, or NULL.
        let softmax = |x: *const xserv_tensor, out: *const xserv_tensor| unsafe {
            xserv_op_softmax(context.handle, x, out)
        };
        let says = |status, name: &str| {
            let text = refused(status);
            assert!(text.contains(name), "{text:?} does not name {name}");
        };
        says(softmax(null, &ov), "x");
        says(softmax(&xv, null), "out");
        says(softmax(&integers.view(), &ov), "x has elements of i64");
        says(softmax(&xv, &halves.view()), "out has elements of f16");
        says(softmax(&xv, &other_shape.view()), "out has shape [8, 4], but x has [4, 8]");
        says(softmax(&scalar.view(), &scalar.view()), "x has no dimensions");
        says(softmax(&xv, &broadcast), "out has strides [0, 1]");
        says(softmax(&upper, &below), "out overlaps x");
        // A row that is broadcast may be read, though.
        ok(softmax(&broadcast, &xv));
    }
}
