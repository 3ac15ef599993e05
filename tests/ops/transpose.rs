//! The transpose: slices of all types and tensors.

use crate::support::tensors::*;
use crate::support::typed::{for_storage, normals, values, Typed};
use crate::support::{assert_same_bits, backends, reference, Random};
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::transpose::cpu;

for_storage!(slices);

fn slices<T: Storage>() {
    let mut random = Random::new(46);
    for backend in backends(&[1, 2]) {
        for (rows, columns) in
            [(0, 3), (1, 1), (1, 40), (40, 1), (16, 16), (31, 33), (33, 65), (100, 257), (400, 300)]
        {
            let x: Vec<T> = normals(&mut random, rows * columns);
            let mut out = Typed::new(x.len());
            cpu::transpose(&backend, &x, rows, columns, out.get()).unwrap();
            let expected = reference::transpose(&values(&x), rows, columns);
            assert_same_bits("transpose", &out.checked("transpose"), &expected);
        }
        assert!(cpu::transpose(&backend, &[T::default(); 6], 4, 2, &mut [T::default(); 6]).is_err());
    }
}

#[test]
fn tensors() {
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
                let (rows, columns) = (rows as usize, columns as usize);
                let want: Vec<f64> = x
                    .chunks(rows.max(1) * columns)
                    .flat_map(|matrix| reference::transpose(matrix, rows, columns))
                    .collect();
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
            let len = shape.iter().product::<i64>() as usize;
            TestTensor::new(&context, element, shape, &vec![1.0; len])
        };
        let x = tensor(Type::F32, &[4, 6]);
        let other = tensor(Type::F32, &[4, 6]);
        let half = tensor(Type::F16, &[4, 6]);
        let flat = tensor(Type::F32, &[24]);
        let [x, other, half, flat] = [&x, &other, &half, &flat].map(TestTensor::view);
        // SAFETY: live tensors of the context.
        unsafe {
            says(xserv_op_transpose(c, &x, &other), "out has shape [4, 6]", "[6, 4]");
            says(xserv_op_transpose(c, &flat, &flat), "x has 1 dimensions", "two");
            says(xserv_op_transpose(c, &half, &x), "out has elements of f32", "f16");
            let turned = slice(&x, Type::F32, &[6, 4], &[1, 6], 0);
            says(xserv_op_transpose(c, &x, &turned), "out overlaps x", "no memory");
        }
    }
}
