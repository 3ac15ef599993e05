//! The gate of SwiGLU: slices of all types, stacked halves, tensors, and the rounding after each
//! step.

use crate::support::device::{assert_rounded, cuda_context, last_place, Bench};
use crate::support::layouts::{len, LAYOUTS};
use crate::support::tensors::*;
use crate::support::typed::{close, for_storage, normals, Typed};
use crate::support::{
    assert_close, backends, golden, reference, rounded, Guarded, Random, Tolerance, DTYPES,
};
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::silu_mul::cpu::silu_mul;
use xserv::ops::silu_mul::{cpu_stacked, cuda_rounded};

for_storage!(slices);

fn slices<T: Storage>() {
    let mut random = Random::new(42);
    for backend in backends(&[1, 2]) {
        for (rows, width, gate_stride, up_stride) in
            [(0, 3, 3, 3), (1, 1, 0, 0), (3, 33, 66, 35), (40, 3072, 6144, 6144), (5, 300, 300, 0)]
        {
            let what = format!("silu_mul {rows}x{width} on {}", backend.name());
            let len = |stride: usize| if rows == 0 { 0 } else { (rows - 1) * stride + width };
            let gate: Vec<T> = normals(&mut random, len(gate_stride));
            let up: Vec<T> = normals(&mut random, len(up_stride));
            let mut out = Typed::new(rows * width);
            silu_mul(&backend, &gate, gate_stride, &up, up_stride, width, out.get()).unwrap();
            let mut expected = Vec::new();
            for r in 0..rows {
                for i in 0..width {
                    let gate = f64::from(gate[r * gate_stride + i].to_f32());
                    let up = up[r * up_stride + i].to_f32();
                    expected.push(reference::silu(gate) * f64::from(up));
                }
            }
            close::<T>(&what, &out.checked(&what), &expected, 2e-6);
        }
        let x = vec![T::default(); 10];
        let mut out = vec![T::default(); 6];
        assert!(silu_mul(&backend, &x, 8, &x, 3, 3, &mut out).is_err());
        assert!(silu_mul(&backend, &x, 3, &x, usize::MAX, 3, &mut out).is_err());
        assert!(silu_mul(&backend, &x, 3, &x, 3, 0, &mut out).is_err());
    }
}

#[test]
fn stacked_halves() {
    let mut random = Random::new(23);
    for backend in backends(&[1, 2]) {
        for (rows, width) in [(0, 3), (1, 1), (3, 33), (40, 3072)] {
            let gate_up: Vec<f32> = random.normals(2 * rows * width);
            let mut out = Guarded::new(rows * width);
            cpu_stacked::silu_mul(&backend, &gate_up, width, out.get()).unwrap();
            let expected: Vec<f64> = gate_up
                .chunks(2 * width)
                .flat_map(|row| {
                    row[..width]
                        .iter()
                        .zip(&row[width..])
                        .map(|(&g, &u)| reference::silu(g.into()) * f64::from(u))
                })
                .collect();
            assert_close("silu_mul", out.checked("silu_mul"), &expected, Tolerance::OnePlus(2e-6));
        }
        // The largest values: no NaN, and zero where the gate closes.
        let mut out = [f32::NAN; 2];
        cpu_stacked::silu_mul(&backend, &[1e30, -1e30, 1.0, 1e30], 2, &mut out).unwrap();
        assert_eq!(out, [1e30, 0.0]);
    }
}

#[test]
fn the_halves_of_a_fused_tensor() {
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
                    want.extend((0..width).map(|i| reference::silu(row[i]) * row[width + i]));
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
fn other_layouts() {
    let mut random = Random::new(23);
    for context in contexts() {
        for (shape, strides, misalign) in LAYOUTS.into_iter().filter(|layout| !layout.0.is_empty())
        {
            let what = format!("silu_mul {shape:?} {strides:?} on {}", context.name);
            let gate = Type::F32.round_all(&random.normals(len(shape)));
            let up = Type::F32.round_all(&random.normals(len(shape)));
            let want: Vec<f64> =
                gate.iter().zip(&up).map(|(g, u)| reference::silu(*g) * u).collect();
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
fn golden_vectors() {
    let Some(golden) = golden::open("silu_mul") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = golden_type(&case.name);
            let what = format!("silu_mul {} on {}", case.name, context.name);
            let gate = golden.tensor(case, "gate");
            let shape: Vec<i64> = gate.shape.iter().map(|&n| n as i64).collect();
            let up = TestTensor::new(&context, element, &shape, &golden.tensor(case, "up").values);
            let gate = TestTensor::new(&context, element, &shape, &gate.values);
            let out = TestTensor::blank(&context, element, &shape);
            // SAFETY: live tensors of the context.
            unsafe { ok(xserv_op_silu_mul(context.handle, &gate.view(), &up.view(), &out.view())) };
            close_to_golden(
                &what,
                element,
                5e-6,
                &out.read(&what),
                &golden.tensor(case, "y").values,
            );
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
        let scalar = tensor(Type::F32, &[]);
        let shifted = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 6);
        let upper = slice(&x.view(), Type::F32, &[3, 6], &[6, 1], 0);
        let [x, half, narrow, ints, flat, scalar] =
            [&x, &half, &narrow, &ints, &flat, &scalar].map(TestTensor::view);
        let null = std::ptr::null();
        let op = xserv_op_silu_mul;
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            says(op(c, &x, null, &x), "up", "NULL");
            says(op(c, &ints, &x, &x), "gate has elements of i32", "f32");
            says(op(c, &x, &half, &x), "up has elements of f16", "f32");
            says(op(c, &x, &narrow, &x), "up has shape [4, 5]", "[4, 6]");
            says(op(c, &x, &x, &flat), "out has shape [24]", "[4, 6]");
            says(op(c, &shifted, &shifted, &upper), "out overlaps gate", "");
            says(op(c, &scalar, &scalar, &scalar), "gate has no dimensions", "");
        }
    }
}

/// Rows of whole vectors and not, rows wider than a block of threads, and an address off its
/// alignment.
#[test]
fn on_cuda_it_is_rounded_after_each_step() {
    let Some(context) = cuda_context() else { return };
    for dtype in DTYPES {
        for (rows, width) in [(1, 1), (3, 33), (2, 3072), (70, 264), (1, 12_288), (2, 4099)] {
            let mut bench = Bench::new(&context, dtype, (rows * width) as u64);
            let (gate_up, values) = bench.filled(&[rows, 2 * width], 6.0, 0.0);
            let out = bench.poisoned(&[rows, width]);
            cuda_rounded::silu_mul(&context, &gate_up, &out).expect("the operator");
            let mut want = Vec::new();
            for row in values.chunks_exact(2 * width) {
                for (&gate, &up) in row[..width].iter().zip(&row[width..]) {
                    let y = rounded::silu_mul(dtype, gate, up);
                    want.push((y, 2.0 * last_place(dtype) * y.abs() + 2e-7));
                }
            }
            let what = format!("{dtype} silu_mul {rows}x{width}");
            assert_rounded(&what, dtype, &bench.read(&out), &want, 0.01);
        }
    }
}
