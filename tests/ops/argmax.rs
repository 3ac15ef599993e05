//! The place of the largest: slices of all types, rows that must be numbers, tensors.

use crate::support::tensors::*;
use crate::support::typed::{for_storage, tied_rows, values};
use crate::support::{backends, reference, Random};
use xserv::ffi::*;
use xserv::ops::argmax::{cpu, cpu_checked};
use xserv::ops::common::storage::Storage;

const WIDTHS: [usize; 14] = [1, 2, 15, 16, 17, 31, 32, 33, 64, 128, 257, 1000, 1024, 2049];

for_storage!(slices);

fn slices<T: Storage>() {
    let mut random = Random::new(49);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let rows = 21;
            let x: Vec<T> = tied_rows(&mut random, rows, width);
            let rows_of_x = values(&x);
            let expected: Vec<i32> =
                rows_of_x.chunks(width).map(|row| reference::largest(row, 1)[0] as i32).collect();
            let mut out = vec![-1i32; rows];
            cpu::argmax(&backend, &x, width, &mut out).unwrap();
            assert_eq!(out, expected, "argmax of {width}");
        }
        let mut out = [7i64];
        let lowest = vec![T::from_f32(f32::NEG_INFINITY); 3];
        cpu::argmax(&backend, &lowest, 3, &mut out).unwrap();
        assert_eq!(out, [0]);
        assert!(cpu::argmax(&backend, &lowest[..0], 0, &mut out).is_err());
    }
}

#[test]
fn rows_that_must_be_numbers() {
    for backend in backends(&[1]) {
        for width in WIDTHS {
            for at in [0, width / 2, width - 1] {
                let mut x = vec![-1.0; 2 * width];
                x[at] = 5.0;
                x[width - 1] = 5.0;
                let mut out = [9, 9];
                cpu_checked::argmax(&backend, &x, width, &mut out).unwrap();
                assert_eq!(out, [at as u32, 0], "the lowest index of the largest value");
                x[width + at] = f32::NAN;
                assert!(cpu_checked::argmax(&backend, &x, width, &mut out).is_err());
            }
        }
        assert!(cpu_checked::argmax(&backend, &[], 0, &mut [0]).is_err());
        cpu_checked::argmax(&backend, &[f32::NEG_INFINITY; 2], 2, &mut [7]).unwrap();
    }
}

#[test]
fn tensors() {
    let mut random = Random::new(34);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in [
                (0, 5),
                (1, 1),
                (7, 31),
                (6, 33),
                (3, 1023),
                (12, 256),
                (2, 4104),
                (600, 9),
                (2, 40_003),
            ] {
                let what = format!("argmax {element:?} {rows}x{width} on {}", context.name);
                let x = logits(&mut random, element, rows, width);
                let want: Vec<f64> =
                    x.chunks_exact(width).map(|row| reference::largest(row, 1)[0] as f64).collect();
                let (n, w) = (rows as i64, width as i64);
                let inputs = [
                    TestTensor::new(&context, element, &[n, w], &x),
                    TestTensor::strided(&context, element, &[n, w], &[(w + 7) / 8 * 8, 1], 0, &x),
                    TestTensor::strided(&context, element, &[n, w], &[w + 1, 1], 1, &x),
                    TestTensor::strided(&context, element, &[n, w], &[1, n.max(1)], 0, &x),
                ];
                for input in inputs {
                    for index in INDICES {
                        let out = TestTensor::blank(&context, index, &[n]);
                        let spread =
                            TestTensor::strided(&context, index, &[n], &[3], 0, &vec![-1.0; rows]);
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(xserv_op_argmax(context.handle, &input.view(), &out.view()));
                            ok(xserv_op_argmax(context.handle, &input.view(), &spread.view()));
                        }
                        assert_eq!(out.read(&what), want, "{what} {:?}", input.strides);
                        assert_eq!(spread.read(&what), want, "{what} {:?}", input.strides);
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
            let len = shape.iter().product::<i64>() as usize;
            TestTensor::new(&context, element, shape, &vec![0.0; len])
        };
        let owned = [
            tensor(Type::F32, &[10, 8]),
            tensor(Type::F32, &[3, 8]),
            tensor(Type::I32, &[3]),
            tensor(Type::F32, &[3, 0]),
        ];
        let views = owned.each_ref().map(TestTensor::view);
        let [table, out, ids, nothing] = &views;
        // SAFETY: live tensors of the context.
        unsafe {
            says(xserv_op_argmax(c, ids, ids), "x has elements of i32", "f32");
            says(xserv_op_argmax(c, out, out), "out has elements of f32", "i32");
            says(xserv_op_argmax(c, table, ids), "out has shape [3]", "[10]");
            says(xserv_op_argmax(c, nothing, ids), "x has shape [3, 0]", "no elements");
        }
    }
}
