//! Operands of a caller that are no quantised matrix: each is refused in a sentence, and nothing is
//! written. Sizes of 0 and groups that do not divide are not refused.

use super::tensors::or_null;
use crate::support::tensors::*;
use xserv::ffi::*;

const INT4: u32 = xserv_quant_code::XSERV_QUANT_INT4 as u32;
const INT8: u32 = xserv_quant_code::XSERV_QUANT_INT8 as u32;
const FP8: u32 = xserv_quant_code::XSERV_QUANT_FP8 as u32;

#[test]
fn what_is_no_quantised_matrix_is_refused() {
    for context in contexts() {
        let c = context.handle;
        let tensor = |element, shape: &[i64], value: f64| {
            let len = shape.iter().product::<i64>() as usize;
            TestTensor::new(&context, element, shape, &vec![value; len])
        };
        let owned = [
            tensor(Type::I32, &[4, 8], 0.0),
            tensor(Type::F32, &[4, 2], 1.0),
            tensor(Type::I32, &[4, 2], 16.0),
            tensor(Type::F32, &[4, 64], 1.0),
            tensor(Type::F32, &[3, 64], f64::NAN),
            tensor(Type::F32, &[3, 4], 0.0),
            tensor(Type::F16, &[4, 2], 1.0),
            tensor(Type::F32, &[4, 63], 1.0),
        ];
        let views = owned.each_ref().map(TestTensor::view);
        let [codes, scales, zeros, out, nan, product, halves, odd] = &views;
        let null = std::ptr::null();
        // SAFETY: live tensors of the context, and NULL.
        unsafe {
            says(xserv_op_dequantise(c, 3, 1, 32, codes, scales, null, out), "code is 3", "quant");
            says(xserv_op_dequantise(c, 0, 1, 32, null, scales, null, out), "codes", "NULL");
            says(
                xserv_op_dequantise(c, 1, 1, 32, codes, scales, null, out),
                "codes has 8 words",
                "32 codes",
            );
            says(
                xserv_op_dequantise(c, 0, 1, 32, codes, scales, null, odd),
                "codes has 8 words",
                "63",
            );
            says(xserv_op_dequantise(c, 0, 1, 16, codes, scales, null, out), "scales", "[4, 4]");
            says(xserv_op_dequantise(c, 0, 2, 32, codes, scales, null, out), "scales", "[2, 2]");
            says(xserv_op_dequantise(c, 0, 1, 32, scales, scales, null, out), "codes", "i32");
            says(xserv_op_dequantise(c, 0, 1, 32, codes, codes, null, out), "scales", "f32");
            says(xserv_op_dequantise(c, 0, 1, 32, codes, scales, scales, out), "zeros", "i32");
            says(xserv_op_dequantise(c, 0, 1, 32, codes, scales, zeros, out), "zeros has 16", "15");
            says(xserv_op_dequantise(c, 0, 1, 32, codes, scales, null, codes), "out", "f32");
            says(xserv_op_quantise(c, out, 0, 32, codes, scales, null), "zeros is NULL", "4 bits");
            says(xserv_op_quantise(c, out, 0, 32, codes, halves, zeros), "scales", "bf16");
            says(xserv_op_quantise(c, out, 0, 32, codes, scales, scales), "zeros", "i32");
            says(
                xserv_op_quantise(c, out, 0, 32, codes, scales, codes),
                "zeros has shape",
                "[4, 2]",
            );
            let three = slice(codes, Type::I32, &[3, 8], &[8, 1], 0);
            let their = slice(scales, Type::F32, &[3, 2], &[2, 1], 0);
            let zeros = slice(zeros, Type::I32, &[3, 2], &[2, 1], 0);
            says(
                xserv_op_quantise(c, nan, 0, 32, &three, &their, &zeros),
                "x, row 0",
                "not finite",
            );
            let linear = |bias, weight_scales, to| {
                xserv_op_linear_quantised(c, nan, 0, 1, 32, codes, weight_scales, null, bias, to)
            };
            says(linear(scales, scales, product), "bias", "[4]");
            says(linear(null, halves, scales), "out has shape", "[3, 2]");
            says(linear(null, scales, nan), "codes has shape", "[64, 8]");
        }
    }
}

/// A matrix [4, 32] of 4 or 8 bits, in groups of 16, the operands of a product, and what is refused
/// unless one of them is changed.
struct Call<'a> {
    context: &'a Context,
    code: u32,
    group_rows: u32,
    group_size: u32,
    views: [Option<xserv_tensor>; 6],
}

/// The places of `Call::views`.
const CODES: usize = 0;
const SCALES: usize = 1;
const ZEROS: usize = 2;
const X: usize = 3;
const BIAS: usize = 4;
const OUT: usize = 5;
const NAMES: [&str; 6] = ["codes", "scales", "zeros", "x", "bias", "out"];

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Quantise,
    Dequantise,
    Linear,
}

impl Call<'_> {
    fn with(&self, place: usize, view: Option<xserv_tensor>) -> Self {
        let mut views = self.views;
        views[place] = view;
        Call { views, ..*self }
    }

    fn view(&self, place: usize) -> &xserv_tensor {
        self.views[place].as_ref().expect("a tensor")
    }

    fn make(&self, kind: Kind) -> xserv_status {
        let [codes, scales, zeros, x, bias, out] = self.views.each_ref().map(or_null);
        let (c, code) = (self.context.handle, self.code);
        let (rows, size) = (self.group_rows, self.group_size);
        // SAFETY: views of live tensors of the context, NULL, or descriptors that are refused
        // before their memory is looked at.
        unsafe {
            match kind {
                Kind::Quantise => xserv_op_quantise(c, x, code, size, codes, scales, zeros),
                Kind::Dequantise => {
                    xserv_op_dequantise(c, code, rows, size, codes, scales, zeros, out)
                }
                Kind::Linear => xserv_op_linear_quantised(
                    c, x, code, rows, size, codes, scales, zeros, bias, out,
                ),
            }
        }
    }
}

/// Returns the tensors of a call of each kind, all of which are right.
fn tensors(context: &Context, kind: Kind) -> [TestTensor<'_>; 6] {
    let tensor = |element, shape: &[i64], value: f64| {
        let len = shape.iter().product::<i64>() as usize;
        TestTensor::new(context, element, shape, &vec![value; len])
    };
    let (x, out) = match kind {
        Kind::Quantise => ([4, 32], [1, 1]),
        Kind::Dequantise => ([1, 1], [4, 32]),
        Kind::Linear => ([3, 32], [3, 4]),
    };
    [
        tensor(Type::I32, &[4, 4], 0x5432_1076.into()),
        tensor(Type::F32, &[4, 2], 0.5),
        tensor(Type::I32, &[4, 2], 7.0),
        tensor(Type::F32, &x, 1.0),
        tensor(Type::F32, &[4], 2.0),
        tensor(Type::F32, &out, 9.0),
    ]
}

fn call<'a>(context: &'a Context, tensors: &[TestTensor<'_>; 6]) -> Call<'a> {
    let views = tensors.each_ref().map(|tensor| Some(tensor.view()));
    Call { context, code: INT4, group_rows: 1, group_size: 16, views }
}

/// Returns the places of the tensors of a call, those that it writes first.
fn places(kind: Kind) -> (&'static [usize], &'static [usize]) {
    match kind {
        Kind::Quantise => (&[CODES, SCALES, ZEROS], &[X]),
        Kind::Dequantise => (&[OUT], &[CODES, SCALES, ZEROS]),
        Kind::Linear => (&[OUT], &[CODES, SCALES, ZEROS, X, BIAS]),
    }
}

#[test]
fn every_tensor_is_checked() {
    for context in contexts() {
        for kind in [Kind::Quantise, Kind::Dequantise, Kind::Linear] {
            let tensors = tensors(&context, kind);
            let good = call(&context, &tensors);
            let (written, read) = places(kind);
            let before: Vec<Vec<f64>> = tensors.iter().map(|tensor| tensor.read("it")).collect();
            for &place in written.iter().chain(read) {
                let (name, view) = (NAMES[place], *good.view(place));
                let says = |changed: Option<xserv_tensor>, words: &[&str]| {
                    let message = refused(good.with(place, changed).make(kind));
                    let named = message.contains(name) && words.iter().all(|w| message.contains(w));
                    assert!(named, "{kind:?}, {name}: {message}");
                    assert!(message.len() < 250 && !message.contains('\n'), "{message}");
                };
                // Without a bias there is none, and without zeros they are 8.
                if ![ZEROS, BIAS].contains(&place) || kind == Kind::Quantise {
                    says(None, &["NULL"]);
                }
                let shape: Vec<i64> = tensors[place].shape.clone();
                let own = tensors[place].strides.clone();
                let strided = |shape: &[i64], strides: &[i64]| {
                    Some(slice(&view, Type::F32, shape, strides, 0))
                };
                // A tensor of another type, which no other tensor has.
                says(
                    Some(xserv_tensor {
                        dtype: xserv_tensor_dtype { code: 0, bits: 64, lanes: 1 },
                        shape: vec![1; shape.len()].leak().as_mut_ptr(),
                        ..view
                    }),
                    &["i64"],
                );
                // With another number of dimensions, and one more or less in each of its own.
                says(strided(&[1, 1, 1], &[1, 1, 1]), &["[1, 1, 1]"]);
                says(strided(&[], &[]), &["[]"]);
                // No memory has this many elements to read.
                let last = shape.len() - 1;
                for (axis, size) in [(0, shape[0] - 1), (last, shape[last] - 1), (last, 1 << 40)] {
                    let mut other = shape.clone();
                    other[axis] = size;
                    if place == X || place == OUT {
                        // Then it is another tensor that does not fit.
                        let strides = if size < shape[axis] { own.clone() } else { vec![0; 2] };
                        let changed = good.with(place, strided(&other, &strides));
                        let message = refused(changed.make(kind));
                        assert!(message.len() < 250, "{message}");
                    } else {
                        let strides =
                            if size < shape[axis] { own.clone() } else { vec![0; own.len()] };
                        says(strided(&other, &strides), &[]);
                    }
                }
                // On another device.
                let device_type = if context.name == "cpu" { 2 } else { 1 };
                let device = xserv_tensor_device { device_type, device_id: 0 };
                says(Some(xserv_tensor { device, ..view }), &["lies on", "works on"]);
                // With a stride that leads backwards, and beside its alignment.
                let mut backwards = own.clone();
                backwards[0] = -1;
                says(strided(&shape, &backwards), &["stride"]);
                says(Some(xserv_tensor { byte_offset: view.byte_offset + 1, ..view }), &["align"]);
            }
            for &place in written {
                let (name, view) = (NAMES[place], good.view(place));
                let shape = &tensors[place].shape;
                let same = slice(view, Type::F32, shape, &vec![0; shape.len()], 0);
                let message = refused(good.with(place, Some(same)).make(kind));
                assert!(message.contains(name) && message.contains("share"), "{message}");
                for &other in read.iter().chain(written).filter(|&&other| other != place) {
                    // The memory of the other, in the type and the shape of the result.
                    let shared = good.view(other);
                    let over = xserv_tensor {
                        data: shared.data,
                        byte_offset: shared.byte_offset,
                        ..*view
                    };
                    let message = refused(good.with(place, Some(over)).make(kind));
                    let named = message.contains(name) && message.contains(NAMES[other]);
                    assert!(named && message.contains("overlaps"), "{kind:?}: {message}");
                }
            }
            for (tensor, before) in tensors.iter().zip(&before) {
                assert_eq!(tensor.read("it"), *before, "{kind:?} wrote something");
            }
            ok(good.make(kind));
        }
    }
}

/// Scales may be 0 or negative, as those of folders may.
#[test]
fn scales_are_finite_and_codes_are_numbers() {
    for context in contexts() {
        for element in FLOATS {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                for kind in [Kind::Dequantise, Kind::Linear] {
                    let tensors = tensors(&context, kind);
                    let mut values = [0.5; 8];
                    values[5] = bad;
                    let scales = TestTensor::new(&context, element, &[4, 2], &values);
                    let call = call(&context, &tensors).with(SCALES, Some(scales.view()));
                    let word = if bad.is_nan() { "NaN".to_owned() } else { format!("{bad}") };
                    says(call.make(kind), &format!("scales has {word} at [2, 1]"), "finite");
                    assert!(tensors[OUT].read("out").iter().all(|&x| x == 9.0));
                }
            }
            let tensors = tensors(&context, Kind::Dequantise);
            let values = [0.0, -2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0];
            let scales = TestTensor::new(&context, element, &[4, 2], &values);
            ok(call(&context, &tensors).with(SCALES, Some(scales.view())).make(Kind::Dequantise));
            let out = tensors[OUT].read("out");
            // The first words are 0x54321076, the zeros are 7.
            let codes = [6.0, 7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
            for (place, &got) in out[..64].iter().enumerate() {
                assert_eq!(got, (codes[place % 8] - 7.0) * values[place / 16], "[{place}]");
            }
        }
        // The two codes of FP8 that are no numbers; zeros are not of floats.
        for bad in [0x3838_7f38_u32, 0xff38_3838] {
            let tensors = tensors(&context, Kind::Dequantise);
            let mut words = vec![f64::from(0x3838_3838); 32];
            words[12] = f64::from(bad as i32);
            let codes = TestTensor::new(&context, Type::I32, &[4, 8], &words);
            let good = call(&context, &tensors).with(CODES, Some(codes.view()));
            let with_zeros = Call { code: FP8, ..good };
            says(with_zeros.make(Kind::Dequantise), "zeros were given", "floats");
            let place = if bad >> 24 == 0xff { "[1, 19]" } else { "[1, 17]" };
            let without = with_zeros.with(ZEROS, None);
            says(without.make(Kind::Dequantise), "codes has no number", place);
            assert!(tensors[OUT].read("out").iter().all(|&x| x == 9.0));
        }
    }
}

#[test]
fn zeros_are_codes() {
    for context in contexts() {
        for (code, words, bad) in [(INT4, 4, 16.0), (INT4, 4, -1.0), (INT8, 8, 256.0)] {
            for kind in [Kind::Dequantise, Kind::Linear] {
                let tensors = tensors(&context, kind);
                let mut values = [3.0; 8];
                values[7] = bad;
                let codes = TestTensor::new(
                    &context,
                    Type::I32,
                    &[4, words],
                    &vec![1.0; 4 * words as usize],
                );
                let zeros = TestTensor::new(&context, Type::I32, &[4, 2], &values);
                let good = call(&context, &tensors).with(CODES, Some(codes.view()));
                let call = Call { code, ..good.with(ZEROS, Some(zeros.view())) };
                says(call.make(kind), &format!("zeros has {bad} at [3, 1]"), "codes");
                assert!(tensors[OUT].read("out").iter().all(|&x| x == 9.0));
            }
        }
    }
}

/// Groups that are larger than the matrix are the matrix, and the last of others is what is left.
#[test]
fn groups_need_not_divide() {
    for context in contexts() {
        for kind in [Kind::Dequantise, Kind::Linear] {
            let tensors = tensors(&context, kind);
            let scale =
                |shape: &[i64], values: &[f64]| TestTensor::new(&context, Type::F32, shape, values);
            let get = |call: Call<'_>| {
                ok(call.make(kind));
                tensors[OUT].read("out")
            };
            let all = scale(&[1, 1], &[0.5]);
            let good = call(&context, &tensors).with(ZEROS, None);
            let whole = good.with(SCALES, Some(all.view()));
            let want = get(Call { group_rows: 4, group_size: 0, ..whole.with(ZEROS, None) });
            let most = Call { group_rows: u32::MAX, group_size: u32::MAX, ..whole };
            assert_eq!(get(most), want, "{kind:?}");
            // Groups of 3 rows and of 20 inputs, of which the last have 1 and 12.
            let four = scale(&[2, 2], &[0.5; 4]);
            let odd = good.with(SCALES, Some(four.view()));
            let got = get(Call { group_rows: 3, group_size: 20, ..odd });
            compare("uneven groups", &got, &want, 1e-3);
            let odd = Call { group_rows: 3, group_size: 20, ..good.with(SCALES, Some(all.view())) };
            says(odd.make(kind), "scales has shape [1, 1]", "[2, 2]");
        }
    }
}

/// Sizes of 0 are valid, and a product over nothing is the bias.
#[test]
fn matrices_without_numbers() {
    for context in contexts() {
        let c = context.handle;
        let ints = |shape: &[i64; 2]| TestTensor::blank(&context, Type::I32, shape);
        let floats = |shape: &[i64; 2]| TestTensor::blank(&context, Type::F32, shape);
        for (n, k) in [(0, 64), (4, 0), (0, 0)] {
            let groups = k / 32;
            let (codes, scales, zeros) =
                (ints(&[n, k / 8]), floats(&[n, groups]), ints(&[n, groups]));
            let (codes, scales, zeros) = (codes.view(), scales.view(), zeros.view());
            let out = floats(&[n, k]);
            // SAFETY: live tensors of the context.
            unsafe {
                ok(xserv_op_quantise(c, &out.view(), INT4, 32, &codes, &scales, &zeros));
                ok(xserv_op_dequantise(c, INT4, 1, 32, &codes, &scales, &zeros, &out.view()));
            }
            for tokens in [0, 3] {
                for has_bias in [false, true] {
                    let (x, out) = (floats(&[tokens, k]), floats(&[tokens, n]));
                    let numbers: Vec<f64> = (0..n).map(|row| row as f64 - 1.5).collect();
                    let bias = TestTensor::new(&context, Type::F32, &[n], &numbers);
                    let bias = has_bias.then(|| bias.view());
                    // SAFETY: as before.
                    unsafe {
                        ok(xserv_op_linear_quantised(
                            c,
                            &x.view(),
                            INT4,
                            1,
                            32,
                            &codes,
                            &scales,
                            &zeros,
                            or_null(&bias),
                            &out.view(),
                        ));
                    }
                    let got = out.read("a product over nothing");
                    for (place, got) in got.iter().enumerate() {
                        let row = place % n as usize;
                        assert_eq!(*got, if has_bias { numbers[row] } else { 0.0 });
                    }
                }
            }
        }
    }
}
