//! The k largest: slices of all types, and tensors.

use crate::support::tensors::*;
use crate::support::typed::{for_storage, tied_rows, values, Typed};
use crate::support::{assert_same_bits, backends, reference, Random};
use xserv::ffi::*;
use xserv::ops::common::storage::Storage;
use xserv::ops::top_k::cpu;

const WIDTHS: [usize; 10] = [1, 2, 15, 17, 31, 32, 33, 257, 1000, 2049];

for_storage!(slices);

fn slices<T: Storage>() {
    let mut random = Random::new(49);
    for backend in backends(&[1, 2]) {
        for width in WIDTHS {
            let rows = 21;
            let x: Vec<T> = tied_rows(&mut random, rows, width);
            for k in [1, 2, 7, 40, width] {
                let k = k.min(width);
                let expected: Vec<i64> = values(&x)
                    .chunks(width)
                    .flat_map(|row| reference::largest(row, k))
                    .map(|i| i as i64)
                    .collect();
                let (mut best, mut indices) = (Typed::<T>::new(rows * k), vec![-1i64; rows * k]);
                cpu::top_k(&backend, &x, width, k, best.get(), &mut indices).unwrap();
                assert_eq!(indices, expected, "top {k} of {width}");
                let found: Vec<T> = (indices.iter().enumerate())
                    .map(|(i, &index)| x[i / k * width + index as usize])
                    .collect();
                assert_same_bits("top_k", &best.checked("top_k"), &values(&found));
            }
        }
        let lowest = vec![T::from_f32(f32::NEG_INFINITY); 3];
        let mut best = vec![T::default(); 4];
        assert!(cpu::top_k(&backend, &lowest, 3, 4, &mut best, &mut [0i64; 4]).is_err());
    }
}

#[test]
fn tensors() {
    let mut random = Random::new(35);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width, k) in [
                (0, 5, 2),
                (4, 9, 0),
                (1, 1, 1),
                (6, 33, 33),
                (7, 1030, 1024),
                (3, 16_384, 50),
                (2, 16_385, 1),
                (6, 20_001, 77),
                (3, 9, 5),
                (4, 16_384, 20),
                (5, 151_936, 20),
                (2, 151_937, 32),
                (2, 70_000, 33),
                (1, 300_000, 1024),
            ] {
                let what = format!("top_k {element:?} {rows}x{width} k {k} on {}", context.name);
                let mut x = logits(&mut random, element, rows, width);
                // Rows whose largest lie side by side.
                if rows > 4 {
                    x[..width].sort_unstable_by(|a, b| b.total_cmp(a));
                    x[4 * width..5 * width].sort_unstable_by(f64::total_cmp);
                }
                let mut want = (Vec::new(), Vec::new());
                for row in x.chunks_exact(width) {
                    let places = reference::largest(row, k);
                    want.0.extend(places.iter().map(|&i| row[i].to_bits()));
                    want.1.extend(places.iter().map(|&i| i as f64));
                }
                let (n, w) = (rows as i64, width as i64);
                let inputs = [
                    TestTensor::new(&context, element, &[n, w], &x),
                    TestTensor::strided(
                        &context,
                        element,
                        &[n, w],
                        &[(w + 7) / 8 * 8 + 8, 1],
                        0,
                        &x,
                    ),
                    TestTensor::strided(&context, element, &[n, w], &[w + 1, 1], 1, &x),
                ];
                for input in inputs {
                    let shape = [n, k as i64];
                    let values = TestTensor::blank(&context, element, &shape);
                    let strides = [1, n.max(1)];
                    let blank = vec![-1.0; rows * k];
                    let indices =
                        TestTensor::strided(&context, Type::I32, &shape, &strides, 0, &blank);
                    // SAFETY: live tensors of the context.
                    unsafe {
                        let views = (input.view(), values.view(), indices.view());
                        ok(xserv_op_top_k(context.handle, &views.0, &views.1, &views.2));
                    }
                    assert_eq!(indices.read(&what), want.1, "{what} {:?}", input.strides);
                    let got = values.read(&what);
                    assert_eq!(got.len(), want.0.len(), "{what}");
                    for (got, &want) in got.iter().zip(&want.0) {
                        let want = f64::from_bits(want);
                        assert!(
                            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                            "{what}: {got}, not {want}"
                        );
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
            tensor(Type::F16, &[3, 8]),
            tensor(Type::F32, &[3, 0]),
            tensor(Type::I32, &[3, 8]),
            tensor(Type::I64, &[3, 8]),
        ];
        let views = owned.each_ref().map(TestTensor::view);
        let [table, out, ids, half, nothing, ints, longs] = &views;
        // SAFETY: live tensors of the context.
        unsafe {
            says(xserv_op_top_k(c, ids, out, ints), "x has elements of i32", "f32");
            says(xserv_op_top_k(c, table, half, ints), "values has elements of f16", "f32");
            says(xserv_op_top_k(c, out, out, longs), "indices has elements of i64", "i32");
            says(xserv_op_top_k(c, table, out, ints), "values has shape [3, 8]", "[10, 8]");
            says(xserv_op_top_k(c, out, out, ints), "values overlaps x", "no memory");
            says(xserv_op_top_k(c, nothing, out, ints), "values has shape [3, 8]", "at most 0");
            says(xserv_op_top_k(c, out, nothing, ints), "indices has shape [3, 8]", "[3, 0]");
        }
        let wide = tensor(Type::F32, &[1, 1100]);
        let values = tensor(Type::F32, &[1, 1025]);
        let indices = tensor(Type::I32, &[1, 1025]);
        // SAFETY: as above.
        unsafe {
            let status = xserv_op_top_k(c, &wide.view(), &values.view(), &indices.view());
            says(status, "values has shape [1, 1025]", "1024");
        }
    }
}
