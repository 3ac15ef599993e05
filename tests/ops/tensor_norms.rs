//! Normalisations over tensors, against f64.

use super::support::golden;
use super::support::tensors::*;
use super::support::Random;
use xserv::ffi::*;

fn rms_norm_reference(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + eps).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x * scale * w)
        })
        .collect()
}

fn layer_norm_reference(x: &[f64], weight: &[f64], bias: Option<&[f64]>, eps: f64) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let len = row.len() as f64;
            let mean = row.iter().sum::<f64>() / len;
            let var = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / len;
            let scale = 1.0 / (var + eps).sqrt();
            let normed = row.iter().zip(weight).map(move |(x, w)| (x - mean) * scale * w);
            normed.enumerate().map(move |(i, y)| y + bias.map_or(0.0, |bias| bias[i]))
        })
        .collect()
}

/// The sum as it is stored: added in f32, rounded to the type.
fn add_reference(element: Type, x: &[f64], residual: &[f64]) -> Vec<f64> {
    x.iter().zip(residual).map(|(x, r)| element.round(Type::F32.round(x + r))).collect()
}

const EPS: f32 = 1e-6;

fn eps() -> f64 {
    f64::from(EPS)
}

/// Measured on x86: at most 3.5e-7, 4.1e-4 and 3.3e-3.
fn bar(element: Type) -> f64 {
    element.bar(4e-6, 6e-4, 4.5e-3)
}

/// Widths around vectors, warps and the limits between kernels, for vectors of 4 and of 8 elements.
const SHAPES: [(usize, usize); 24] = [
    (1, 1),
    (3, 7),
    (2, 8),
    (33, 31),
    (31, 32),
    (5, 33),
    (17, 64),
    (32, 68),
    (33, 128),
    (9, 132),
    (9, 136),
    (10, 260),
    (7, 264),
    (9, 516),
    (9, 520),
    (3, 1032),
    (2, 2560),
    (1, 4096),
    (2, 4100),
    (1, 16384),
    (2, 16392),
    (1, 20001),
    (0, 16),
    (5, 0),
];

/// A way to lay out rows of some width.
struct Layout {
    name: &'static str,
    shape: Vec<i64>,
    strides: Vec<i64>,
    misalign: usize,
}

fn layouts(rows: usize, width: usize) -> Vec<Layout> {
    let padded = width.next_multiple_of(8) as i64;
    let (rows, width) = (rows as i64, width as i64);
    let mut all = vec![
        Layout {
            name: "contiguous",
            shape: vec![rows, width],
            strides: vec![width, 1],
            misalign: 0,
        },
        Layout {
            name: "misaligned",
            shape: vec![rows, width],
            strides: vec![width + 1, 1],
            misalign: 1,
        },
    ];
    if rows * width > 50_000 || width == 0 {
        return all;
    }
    all.push(Layout {
        name: "row stride of whole vectors",
        shape: vec![rows, width],
        strides: vec![padded + 16, 1],
        misalign: 0,
    });
    all.push(Layout {
        name: "columns",
        shape: vec![rows, width],
        strides: vec![1, rows.max(1)],
        misalign: 0,
    });
    if rows % 3 == 0 && rows > 0 {
        // The heads of one part of a fused projection, then an order that no two levels describe.
        all.push(Layout {
            name: "heads",
            shape: vec![rows / 3, 3, width],
            strides: vec![5 * padded, padded, 1],
            misalign: 0,
        });
        all.push(Layout {
            name: "permuted",
            shape: vec![3, rows / 3, 1, width],
            strides: vec![padded, 3 * padded, 0, 1],
            misalign: 0,
        });
    }
    all
}

fn tensor<'a>(
    context: &'a Context,
    element: Type,
    layout: &Layout,
    values: Option<&[f64]>,
) -> TestTensor<'a> {
    let len: i64 = layout.shape.iter().product();
    let blank = vec![f64::NAN; len as usize];
    let values = values.unwrap_or(&blank);
    TestTensor::strided(context, element, &layout.shape, &layout.strides, layout.misalign, values)
}

/// Calls `check` for every device, element type, shape and layout.
fn for_all(op: &str, mut check: impl FnMut(&Context, Type, usize, usize, &Layout, &str)) {
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in SHAPES {
                for layout in layouts(rows, width) {
                    let what = format!(
                        "{op} {element:?} {rows}x{width} {} on {}",
                        layout.name, context.name
                    );
                    check(&context, element, rows, width, &layout, &what);
                }
            }
        }
    }
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
fn rms_norm() {
    let mut random = Random::new(1);
    for_all("rms_norm", |context, element, rows, width, layout, what| {
        let x = element.round_all(&random.normals(rows * width));
        let weight = element.round_all(&random.normals(width));
        let x_tensor = tensor(context, element, layout, Some(&x));
        let weight_tensor = TestTensor::new(context, element, &[width as i64], &weight);
        let out = tensor(context, element, layout, None);
        ok(run_rms(context, &x_tensor, &weight_tensor, &out));
        let got = out.read(what);
        if width > 0 {
            compare(what, &got, &rms_norm_reference(&x, &weight, eps()), bar(element));
        }
        assert_eq!(x_tensor.read(what), x, "{what}: the input was changed");
        // In place, and so a second time: the same bits.
        ok(run_rms(context, &x_tensor, &weight_tensor, &x_tensor));
        assert_eq!(x_tensor.read(what), got, "{what}: in place");
    });
}

#[test]
fn add_rms_norm() {
    let mut random = Random::new(2);
    for_all("add_rms_norm", |context, element, rows, width, layout, what| {
        let x = element.round_all(&random.normals(rows * width));
        let residual = element.round_all(&random.normals(rows * width));
        let weight = element.round_all(&random.normals(width));
        let x_tensor = tensor(context, element, layout, Some(&x));
        let residual_tensor = tensor(context, element, layout, Some(&residual));
        let weight_tensor = TestTensor::new(context, element, &[width as i64], &weight);
        let sum = tensor(context, element, layout, None);
        let out = tensor(context, element, layout, None);
        ok(run_add(context, &x_tensor, &residual_tensor, &weight_tensor, &sum, &out));
        let (got_sum, got) = (sum.read(what), out.read(what));
        let want_sum = add_reference(element, &x, &residual);
        assert_eq!(got_sum, want_sum, "{what}: residual_out");
        if width > 0 {
            compare(what, &got, &rms_norm_reference(&want_sum, &weight, eps()), bar(element));
        }
        assert_eq!(x_tensor.read(what), x, "{what}: x was changed");
        assert_eq!(residual_tensor.read(what), residual, "{what}: residual was changed");
        // residual_out in the place of x, then both results in the places of their inputs.
        let x_copy = tensor(context, element, layout, Some(&x));
        let again = tensor(context, element, layout, None);
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
fn layer_norm() {
    let mut random = Random::new(3);
    for_all("layer_norm", |context, element, rows, width, layout, what| {
        let x = element.round_all(&random.normals(rows * width));
        let weight = element.round_all(&random.normals(width));
        let bias = element.round_all(&random.normals(width));
        let x_tensor = tensor(context, element, layout, Some(&x));
        let weight_tensor = TestTensor::new(context, element, &[width as i64], &weight);
        let bias_tensor = TestTensor::new(context, element, &[width as i64], &bias);
        let out = tensor(context, element, layout, None);
        let without = tensor(context, element, layout, None);
        ok(run_layer(context, &x_tensor, &weight_tensor, Some(&bias_tensor), &out));
        ok(run_layer(context, &x_tensor, &weight_tensor, None, &without));
        let got = out.read(what);
        if width > 0 {
            let want = layer_norm_reference(&x, &weight, Some(&bias), eps());
            compare(what, &got, &want, bar(element));
            let want = layer_norm_reference(&x, &weight, None, eps());
            compare(what, &without.read(what), &want, bar(element));
        }
        assert_eq!(x_tensor.read(what), x, "{what}: the input was changed");
        ok(run_layer(context, &x_tensor, &weight_tensor, Some(&bias_tensor), &x_tensor));
        assert_eq!(x_tensor.read(what), got, "{what}: in place");
    });
}

#[test]
fn layer_norm_of_many_rows() {
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
            let want = layer_norm_reference(&x, &weight, Some(&weight), eps());
            compare(&what, &x_tensor.read(&what), &want, bar(element));
        }
    }
}

#[test]
fn layer_norm_of_a_large_mean_loses_nothing() {
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
            let want = layer_norm_reference(&x, &weight, None, eps());
            // The mean rounded to f32, once.
            let bar = 1e-6 + f64::from(mean).abs() * 1.2e-7;
            compare(&what, &out.read(&what), &want, bar);
        }
    }
}

#[test]
fn layer_norm_of_outliers_and_constants() {
    // One value far from all others is the first of its thread, of its warp, of the row; or somewhere else.
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
                let want = layer_norm_reference(&x, &weight, None, eps());
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
                let zeros = vec![0.0; 4 * width];
                let x_tensor = TestTensor::new(&context, element, &shape, &x);
                let zero_tensor = TestTensor::new(&context, element, &shape, &zeros);
                let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
                let out = TestTensor::blank(&context, element, &shape);
                let sum = TestTensor::blank(&context, element, &shape);
                let want = rms_norm_reference(&x, &weight, eps());
                ok(run_rms(&context, &x_tensor, &weight_tensor, &out));
                compare(&format!("rms_norm {what}"), &out.read(&what), &want, bar(element));
                ok(run_add(&context, &x_tensor, &zero_tensor, &weight_tensor, &sum, &out));
                compare(&format!("add_rms_norm {what}"), &out.read(&what), &want, bar(element));
                let want = layer_norm_reference(&x, &weight, None, eps());
                ok(run_layer(&context, &x_tensor, &weight_tensor, None, &out));
                compare(&format!("layer_norm {what}"), &out.read(&what), &want, bar(element));
            }
        }
    }
}

#[test]
fn golden_vectors() {
    for (op, with_bias) in [("rmsnorm", false), ("layernorm", true)] {
        let Some(golden) = golden::open(op) else { return };
        for context in contexts() {
            for case in &golden.cases {
                let what = format!("{op} {} on {}", case.name, context.name);
                let element = match case.name.rsplit('.').next() {
                    Some("f32") => Type::F32,
                    Some("bf16") => Type::BF16,
                    other => panic!("{what}: a case of type {other:?}"),
                };
                let make = |name: &str| {
                    let from = golden.tensor(case, name);
                    let shape: Vec<i64> = from.shape.iter().map(|&n| n as i64).collect();
                    TestTensor::new(&context, element, &shape, &from.values)
                };
                let (x, weight) = (make("x"), make("weight"));
                let bias = with_bias.then(|| make("bias"));
                let out = TestTensor::blank(&context, element, &x.shape);
                let eps = case.params["eps"].as_f64().unwrap() as f32;
                let bias_view = bias.as_ref().map(TestTensor::view);
                // SAFETY: live tensors of the context.
                unsafe {
                    let (x, weight, out) = (x.view(), weight.view(), out.view());
                    ok(match &bias_view {
                        Some(bias) => {
                            xserv_op_layer_norm(context.handle, &x, &weight, bias, eps, &out)
                        }
                        None => xserv_op_rms_norm(context.handle, &x, &weight, eps, &out),
                    });
                }
                let want = golden.tensor(case, "y").values;
                compare(&what, &out.read(&what), &want, element.bar(2e-5, 6e-4, 4.5e-3));
            }
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
        let layer = |x: *const xserv_tensor, weight, bias, eps, out| unsafe {
            xserv_op_layer_norm(context.handle, x, weight, bias, eps, out)
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
            says(layer(&xv, &wv, null, eps, &ov), "eps");
            says(add(&xv, &rv, &wv, eps, &sv, &ov), "eps");
        }
        says(rms(&xv, &wv, EPS, &broadcast), "out has strides [0, 1]");
        says(rms(&upper, &wv, EPS, &below), "out overlaps x");
        says(rms(&ov, &weight_row, EPS, &xv), "out overlaps weight");

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
        let want = rms_norm_reference(&twice, &x, eps());
        compare("broadcast rows", &out.read("out"), &want, 1e-5);
    }
}

/// Results larger than the second-level cache have a kernel of their own.
#[test]
fn rms_norm_of_more_than_the_cache_holds() {
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
