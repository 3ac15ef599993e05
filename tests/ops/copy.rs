//! Copies between tensors of any strides, and between slices of one buffer.

use super::support::tensors::*;
use xserv::ffi::*;

/// Distinct for a while, and exact in every type.
fn numbers(len: usize) -> Vec<f64> {
    (0..len).map(|i| (i % 251) as f64).collect()
}

#[test]
fn copies_between_layouts() {
    // A shape, and two layouts for it.
    let cases: [(&[i64], &[i64], &[i64]); 10] = [
        (&[0, 4], &[4, 1], &[4, 1]),
        (&[], &[], &[]),
        (&[33], &[1], &[3]),
        (&[7, 5, 64], &[320, 64, 1], &[64, 512, 1]),
        (&[7, 5, 3], &[15, 3, 1], &[1, 8, 40]),
        (&[40, 70], &[70, 1], &[1, 40]),
        (&[2, 40, 66], &[2640, 66, 1], &[2800, 1, 42]),
        (&[40, 3, 66], &[198, 66, 1], &[1, 42, 130]),
        (&[2, 3, 17, 20], &[1020, 340, 20, 1], &[1100, 360, 1, 18]),
        (&[1, 1, 130], &[999, 7, 1], &[1, 1, 1]),
    ];
    for context in contexts() {
        for element in [Type::F32, Type::F16, Type::BF16, Type::I32, Type::I64] {
            for (shape, one, other) in cases {
                for (from, to, misalign) in
                    [(one, other, 0), (other, one, 0), (one, one, 1), (one, other, 1)]
                {
                    let what = format!("{element:?} {shape:?} {from:?} {to:?} on {}", context.name);
                    let values = numbers(shape.iter().product::<i64>() as usize);
                    let blank = vec![-1.0; values.len()];
                    let source =
                        TestTensor::strided(&context, element, shape, from, misalign, &values);
                    let target = TestTensor::strided(&context, element, shape, to, 0, &blank);
                    // SAFETY: live tensors of the context.
                    unsafe { ok(xserv_op_copy(context.handle, &source.view(), &target.view())) };
                    assert_eq!(target.read(&what), values, "{what}");
                    assert_eq!(source.read(&what), values, "{what}: the source was changed");
                }
            }
        }
    }
}

#[test]
fn slices_of_one_buffer() {
    for context in contexts() {
        let (tokens, heads, head_dim) = (5, 6, 8);
        let row = 2 * heads * head_dim;
        let values = numbers(tokens * row);
        let buffer = TestTensor::new(&context, Type::F32, &[tokens as i64, row as i64], &values);
        let shape = [tokens as i64, (row / 2) as i64];
        let strides = [row as i64, 1];
        let first = slice(&buffer.view(), Type::F32, &shape, &strides, 0);
        let second = slice(&buffer.view(), Type::F32, &shape, &strides, row / 2);
        // SAFETY: live tensors of the context.
        unsafe {
            ok(xserv_op_copy(context.handle, &first, &second));
            ok(xserv_op_copy(context.handle, &first, &first));
            let meeting = slice(&buffer.view(), Type::F32, &shape, &strides, row / 2 - 1);
            let message = refused(xserv_op_copy(context.handle, &first, &meeting));
            assert!(message.starts_with("target overlaps source"), "{message}");
        }
        let got = buffer.read("slices");
        for (got, was) in got.chunks_exact(row).zip(values.chunks_exact(row)) {
            assert_eq!(got[..row / 2], was[..row / 2]);
            assert_eq!(got[row / 2..], was[..row / 2]);
        }
    }
}

#[test]
fn refusals() {
    for context in contexts() {
        let tensor = |element, shape: &[i64]| {
            let len = shape.iter().product::<i64>() as usize;
            TestTensor::new(&context, element, shape, &vec![1.0; len])
        };
        let x = tensor(Type::F32, &[4, 6]);
        let ints = tensor(Type::I32, &[4, 6]);
        let wide = tensor(Type::F32, &[4, 7]);
        let one = tensor(Type::F32, &[6]);
        let repeated = slice(&one.view(), Type::F32, &[4, 6], &[0, 1], 0);
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            for (source, target, start) in [
                (&x.view(), &ints.view(), "target has elements of i32"),
                (&x.view(), &wide.view(), "target has shape [4, 7]"),
                (&x.view(), &repeated, "target has strides [0, 1]"),
            ] {
                let message = refused(xserv_op_copy(context.handle, source, target));
                assert!(message.starts_with(start), "{message}");
            }
            ok(xserv_op_copy(context.handle, &repeated, &x.view()));
            assert!(refused(xserv_op_copy(context.handle, std::ptr::null(), &x.view()))
                .starts_with("source"));
        }
    }
}
