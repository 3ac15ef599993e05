//! Matrix products: slices of all types, and tensors with every backend that a device has.

use crate::support::tensors::*;
use crate::support::{golden, reference, Random};
use xserv::ffi::xserv_gemm_backend::*;
use xserv::ffi::*;

mod bias;
mod cpu;

/// A product and its factors, as the tests think of it.
#[derive(Clone, Copy, Debug)]
struct Case {
    element: Type,
    m: usize,
    n: usize,
    k: usize,
    transpose_a: bool,
    transpose_b: bool,
    alpha: f32,
    beta: f32,
}

impl Case {
    fn new(element: Type, m: usize, n: usize, k: usize, flags: usize) -> Self {
        let (transpose_a, transpose_b) = (flags & 1 > 0, flags & 2 > 0);
        Case { element, m, n, k, transpose_a, transpose_b, alpha: 1.0, beta: 0.0 }
    }

    fn a_shape(&self) -> [usize; 2] {
        if self.transpose_a {
            [self.k, self.m]
        } else {
            [self.m, self.k]
        }
    }

    fn b_shape(&self) -> [usize; 2] {
        if self.transpose_b {
            [self.n, self.k]
        } else {
            [self.k, self.n]
        }
    }

    /// One matrix of each.
    fn reference(&self, a: &[f64], b: &[f64], c: &[f64]) -> Vec<f64> {
        let transposes = (self.transpose_a, self.transpose_b);
        let strides = (self.a_shape()[1], self.b_shape()[1], self.n);
        let factors = (self.alpha, self.beta);
        reference::gemm((a, b, c), (self.m, self.n, self.k), transposes, strides, factors)
    }

    /// `|got - want| <= bar * (|want| + what sums of k products of unit normals have)`.
    #[track_caller]
    fn close(&self, what: &str, got: &[f64], want: &[f64]) {
        let bar = self.element.bar(4e-6, 7e-4, 5e-3);
        let scale =
            f64::from(self.alpha.abs()) * (self.k as f64).sqrt() + f64::from(self.beta.abs());
        assert_eq!(got.len(), want.len(), "{what}");
        for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
            let fine = (g - w).abs() <= bar * (w.abs() + scale);
            assert!(fine, "{what}: element {i} is {g}, not {w}; {self:?}");
        }
    }

    fn options(&self, backend: xserv_gemm_backend) -> xserv_gemm_options {
        // SAFETY: filled by the call.
        let mut options = unsafe {
            let mut options = std::mem::zeroed();
            xserv_gemm_options_init(&mut options, size_of_val(&options));
            options
        };
        assert_eq!((options.alpha, options.beta, options.backend), (1.0, 0.0, 0));
        options.transpose_a = self.transpose_a.into();
        options.transpose_b = self.transpose_b.into();
        (options.alpha, options.beta) = (self.alpha, self.beta);
        options.backend = backend as u32;
        options
    }

    /// False if the context does not have the backend.
    #[track_caller]
    fn run(
        &self,
        context: &Context,
        backend: xserv_gemm_backend,
        a: &TestTensor,
        b: &TestTensor,
        c: &TestTensor,
    ) -> bool {
        // SAFETY: live tensors of the context.
        let status = unsafe {
            xserv_op_gemm(context.handle, &self.options(backend), &a.view(), &b.view(), &c.view())
        };
        if status == xserv_status::XSERV_STATUS_UNSUPPORTED {
            assert!(!must_serve(context, backend, self.element), "{backend:?}: {}", message());
            assert!(message().starts_with("gemm: "), "{}", message());
            return false;
        }
        ok(status);
        true
    }
}

const BACKENDS: [xserv_gemm_backend; 6] = [
    XSERV_GEMM_AUTO,
    XSERV_GEMM_NAIVE,
    XSERV_GEMM_TILED,
    XSERV_GEMM_CUBLAS,
    XSERV_GEMM_TENSOR_CORE,
    XSERV_GEMM_BLOCKED,
];

fn must_serve(context: &Context, backend: xserv_gemm_backend, element: Type) -> bool {
    let is_cpu = context.name == "cpu";
    match backend {
        XSERV_GEMM_AUTO | XSERV_GEMM_NAIVE => true,
        XSERV_GEMM_TILED => !is_cpu,
        XSERV_GEMM_TENSOR_CORE => !is_cpu && element != Type::F32,
        XSERV_GEMM_BLOCKED => is_cpu,
        XSERV_GEMM_CUBLAS => false,
    }
}

/// Row-major strides of [batch, rows, columns] with a gap after each row and each matrix.
fn gapped(batch: usize, shape: [usize; 2], gap: usize) -> ([i64; 3], [i64; 3]) {
    let ld = shape[1] + gap;
    let size = [batch as i64, shape[0] as i64, shape[1] as i64];
    (size, [(shape[0] * ld + gap) as i64, ld as i64, 1])
}

/// Returns a matrix of the last two of three sizes.
fn matrix<'a>(
    context: &'a Context,
    element: Type,
    shape: [usize; 2],
    gap: usize,
    misalign: usize,
    values: &[f64],
) -> TestTensor<'a> {
    let (size, strides) = gapped(1, shape, gap);
    TestTensor::strided(context, element, &size[1..], &strides[1..], misalign, values)
}

#[test]
fn backends_transposes_strides_and_factors() {
    let contexts = contexts();
    let shapes = [
        (1, 1, 1),
        (1, 257, 129),
        (1, 129, 1000),
        (2, 63, 264),
        (3, 127, 64),
        (7, 17, 31),
        (8, 33, 1032),
        (17, 65, 7),
        (31, 1, 257),
        (33, 31, 33),
        (63, 129, 65),
        (65, 7, 127),
        (127, 63, 17),
        (129, 257, 63),
        (257, 127, 40),
        (16, 64, 2048),
    ];
    let mut random = Random::new(70);
    for (index, (m, n, k)) in shapes.into_iter().enumerate() {
        for element in FLOATS {
            for flags in 0..4 {
                let variant = index + flags;
                // Gaps that keep and that break alignment; factors with and without the old C.
                let (gap, misalign) = ([0, 3, 8][variant % 3], [0, 0, 1, 0][variant % 4]);
                let (alpha, beta) = [(1.0, 0.0), (0.5, -2.0), (-1.5, 0.0), (1.0, 1.0)][variant % 4];
                let case = Case { alpha, beta, ..Case::new(element, m, n, k, flags) };
                let a = element.round_all(&random.normals(m * k));
                let b = element.round_all(&random.normals(n * k));
                let old = match beta == 0.0 {
                    true => vec![f64::NAN; m * n],
                    false => element.round_all(&random.normals(m * n)),
                };
                let want = case.reference(&a, &b, &old);
                for context in &contexts {
                    let a_tensor = matrix(context, element, case.a_shape(), gap, misalign, &a);
                    let b_tensor = matrix(context, element, case.b_shape(), gap, misalign, &b);
                    for backend in BACKENDS {
                        let what = format!("{backend:?} gap {gap} off {misalign} {}", context.name);
                        let c = matrix(context, element, [m, n], gap, misalign, &old);
                        if case.run(context, backend, &a_tensor, &b_tensor, &c) {
                            case.close(&what, &c.read(&what), &want);
                        }
                    }
                    assert_eq!(a_tensor.read("a"), a, "a was changed");
                    assert_eq!(b_tensor.read("b"), b, "b was changed");
                }
            }
        }
    }
}

/// A size at which cuBLASLt has kernels that the small shapes do not reach.
#[test]
fn cublas_at_1024() {
    let size = 1024;
    let mut random = Random::new(76);
    for element in FLOATS {
        let case = Case::new(element, size, size, size, 2);
        let a = element.round_all(&random.normals(size * size));
        let b = element.round_all(&random.normals(size * size));
        let mut want = None;
        for context in contexts().iter().filter(|context| context.name != "cpu") {
            let a_tensor = matrix(context, element, case.a_shape(), 0, 0, &a);
            let b_tensor = matrix(context, element, case.b_shape(), 0, 0, &b);
            let c = TestTensor::blank(context, element, &[size as i64, size as i64]);
            if case.run(context, XSERV_GEMM_CUBLAS, &a_tensor, &b_tensor, &c) {
                let want = want
                    .get_or_insert_with(|| case.reference(&a, &b, &vec![f64::NAN; size * size]));
                case.close("cuBLAS at 1024", &c.read("cuBLAS at 1024"), want);
            }
        }
    }
}

#[test]
fn batches_and_shared_operands() {
    let mut random = Random::new(71);
    for context in contexts() {
        for element in FLOATS {
            for (index, (m, n, k)) in
                [(1, 40, 64), (5, 9, 3), (17, 33, 31), (64, 64, 64)].into_iter().enumerate()
            {
                // Which of A and B is shared, and how the tensor says so.
                for (share_a, share_b) in [
                    (None, None),
                    (None, Some(2)),
                    (Some(2), None),
                    (None, Some(3)),
                    (Some(3), None),
                ] {
                    for gap in [0, 5] {
                        let batch = 3;
                        let (alpha, beta) = [(1.0, 0.0), (0.5, 1.5)][index % 2];
                        let flags = (index + gap) % 4;
                        let case = Case { alpha, beta, ..Case::new(element, m, n, k, flags) };
                        let mut operand = |shape: [usize; 2], share: Option<usize>| {
                            let len = shape[0] * shape[1];
                            let (size, mut strides) = gapped(batch, shape, gap);
                            let mut values = match share {
                                None => element.round_all(&random.normals(batch * len)),
                                Some(_) => element.round_all(&random.normals(len)).repeat(batch),
                            };
                            let tensor = if share == Some(2) {
                                values.truncate(len);
                                let (size, strides) = (&size[1..], &strides[1..]);
                                TestTensor::strided(&context, element, size, strides, 0, &values)
                            } else {
                                if share == Some(3) {
                                    strides[0] = 0;
                                }
                                TestTensor::strided(&context, element, &size, &strides, 0, &values)
                            };
                            if share == Some(2) {
                                values = values.repeat(batch);
                            }
                            (values, tensor)
                        };
                        let (a, a_tensor) = operand(case.a_shape(), share_a);
                        let (b, b_tensor) = operand(case.b_shape(), share_b);
                        let old = match beta == 0.0 {
                            true => vec![f64::NAN; batch * m * n],
                            false => element.round_all(&random.normals(batch * m * n)),
                        };
                        let want: Vec<f64> = (0..batch)
                            .flat_map(|i| {
                                case.reference(
                                    &a[i * m * k..][..m * k],
                                    &b[i * n * k..][..n * k],
                                    &old[i * m * n..][..m * n],
                                )
                            })
                            .collect();
                        for backend in BACKENDS {
                            let what = format!("{backend:?} batch, shared {share_a:?} {share_b:?}");
                            let (size, strides) = gapped(batch, [m, n], gap);
                            let c =
                                TestTensor::strided(&context, element, &size, &strides, 0, &old);
                            if case.run(&context, backend, &a_tensor, &b_tensor, &c) {
                                case.close(&what, &c.read(&what), &want);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Layouts that no flag describes: C by columns, steps between neighbours, rows that are one row.
#[test]
fn views() {
    let mut random = Random::new(72);
    for context in contexts() {
        for element in FLOATS {
            for (m, n, k) in [(9, 33, 20), (65, 1, 40), (1, 7, 3), (40, 48, 64)] {
                let (lm, ln, lk) = (m as i64, n as i64, k as i64);
                let case = Case { alpha: 0.5, beta: 2.0, ..Case::new(element, m, n, k, 0) };
                let a = element.round_all(&random.normals(m * k));
                let b = element.round_all(&random.normals(n * k));
                let old = element.round_all(&random.normals(m * n));
                let want = case.reference(&a, &b, &old);
                for (a_strides, b_strides, c_strides) in [
                    ([1, lm], [1, lk], [1, lm]),
                    ([1, lm + 3], [ln, 1], [1, lm + 8]),
                    ([2 * lk, 2], [2, 2 * lk + 1], [ln, 1]),
                    ([lk, 1], [1, lk + 1], [3 * ln, 3]),
                    ([lk, 1], [ln + 5, 1], [2, 2 * lm + 2]),
                ] {
                    let tensor = |shape: [i64; 2], strides: [i64; 2], values: &[f64]| {
                        TestTensor::strided(&context, element, &shape, &strides, 0, values)
                    };
                    let a_tensor = tensor([lm, lk], a_strides, &a);
                    let b_tensor = tensor([lk, ln], b_strides, &b);
                    for backend in BACKENDS {
                        let what = format!("{backend:?} {a_strides:?} {b_strides:?} {c_strides:?}");
                        let c = tensor([lm, ln], c_strides, &old);
                        if case.run(&context, backend, &a_tensor, &b_tensor, &c) {
                            case.close(&what, &c.read(&what), &want);
                        }
                    }
                }
                // Every row of A the same one.
                let row = &a[..k];
                let case = Case { alpha: 1.0, beta: 0.0, ..case };
                let want = case.reference(&row.repeat(m), &b, &old);
                let strides = [0, 1];
                let a_tensor =
                    TestTensor::strided(&context, element, &[lm, lk], &strides, 0, &row.repeat(m));
                let b_tensor = TestTensor::new(&context, element, &[lk, ln], &b);
                let c = TestTensor::blank(&context, element, &[lm, ln]);
                case.run(&context, XSERV_GEMM_AUTO, &a_tensor, &b_tensor, &c);
                case.close("one row", &c.read("one row"), &want);
            }
        }
    }
}

#[test]
fn nothing_pointless_is_read() {
    for context in contexts() {
        for element in FLOATS {
            let (m, n) = (5usize, 24usize);
            let old: Vec<f64> = (0..m * n).map(|i| i as f64).collect();
            for backend in BACKENDS {
                for (k, alpha, beta) in
                    [(0, 1.0, 0.0), (0, 1.0, 2.0), (8, 0.0, 0.0), (8, 0.0, -1.0)]
                {
                    let case = Case { alpha, beta, ..Case::new(element, m, n, k, 2) };
                    let a = TestTensor::blank(&context, element, &[m as i64, k as i64]);
                    let b = TestTensor::blank(&context, element, &[n as i64, k as i64]);
                    let c = matrix(&context, element, [m, n], 3, 0, &old);
                    if case.run(&context, backend, &a, &b, &c) {
                        let want: Vec<f64> =
                            old.iter().map(|x| x * f64::from(beta) + 0.0).collect();
                        assert_eq!(c.read("scaled"), want, "{backend:?} {case:?}");
                    }
                }
                for (m, n) in [(0, 4), (4, 0), (0, 0)] {
                    let case = Case::new(element, m, n, 3, 0);
                    let a = TestTensor::blank(&context, element, &[m as i64, 3]);
                    let b = TestTensor::blank(&context, element, &[3, n as i64]);
                    let c = TestTensor::blank(&context, element, &[m as i64, n as i64]);
                    case.run(&context, backend, &a, &b, &c);
                }
            }
        }
    }
}

/// A NaN of A spoils its row of C, an infinity of B its column, and nothing else.
#[test]
fn nan_and_infinity_stay_where_they_belong() {
    for context in contexts() {
        for element in FLOATS {
            for (m, n, k, flags) in
                [(1, 40, 64, 2), (8, 40, 64, 2), (40, 72, 48, 0), (33, 65, 129, 3)]
            {
                let case = Case::new(element, m, n, k, flags);
                let (mut a, mut b) = (vec![1.0; m * k], vec![0.5; n * k]);
                let (row, column) = (m / 2, n / 3);
                let of_a = if case.transpose_a { 3 * m + row } else { row * k + 3 };
                let of_b = if case.transpose_b { column * k + 5 } else { 5 * n + column };
                (a[of_a], b[of_b]) = (f64::NAN, f64::INFINITY);
                let want: Vec<f64> = (0..m * n)
                    .map(|i| match (i / n == row, i % n == column) {
                        (true, _) => f64::NAN,
                        (_, true) => f64::INFINITY,
                        _ => 0.5 * k as f64,
                    })
                    .collect();
                let a_tensor = matrix(&context, element, case.a_shape(), 0, 0, &a);
                let b_tensor = matrix(&context, element, case.b_shape(), 0, 0, &b);
                for backend in BACKENDS {
                    let what = format!("{backend:?} {case:?}");
                    let c = TestTensor::blank(&context, element, &[m as i64, n as i64]);
                    if case.run(&context, backend, &a_tensor, &b_tensor, &c) {
                        compare(&what, &c.read(&what), &want, 1e-6);
                    }
                }
            }
        }
    }
}

#[test]
fn same_bits_twice() {
    let mut random = Random::new(73);
    for context in contexts() {
        for element in FLOATS {
            for (m, n, k) in [(1, 300, 520), (4, 300, 520), (16, 64, 4096), (130, 70, 96)] {
                let case = Case::new(element, m, n, k, 2);
                let a = element.round_all(&random.normals(m * k));
                let b = element.round_all(&random.normals(n * k));
                let a_tensor = matrix(&context, element, case.a_shape(), 0, 0, &a);
                let b_tensor = matrix(&context, element, case.b_shape(), 0, 0, &b);
                for backend in BACKENDS {
                    let mut results = Vec::new();
                    for _ in 0..2 {
                        let c = TestTensor::blank(&context, element, &[m as i64, n as i64]);
                        if case.run(&context, backend, &a_tensor, &b_tensor, &c) {
                            results.push(c.read("again"));
                        }
                    }
                    assert!(results.windows(2).all(|r| r[0] == r[1]), "{backend:?} {case:?}");
                }
            }
        }
    }
}

/// The tiles that only large products take, on CUDA: some rows of each.
#[test]
fn large_products() {
    let Some(context) = cuda() else { return };
    let mut random = Random::new(74);
    for (element, flags) in
        [(Type::BF16, 0), (Type::BF16, 1), (Type::BF16, 2), (Type::BF16, 3), (Type::F16, 2)]
    {
        // On an H200 these take the tiles 128x256, 128x128 and 64x128.
        for (m, n, k) in [(2048, 4096, 200), (2048, 3072, 72), (1000, 2500, 72)] {
            let case = Case::new(element, m, n, k, flags);
            let a = element.round_all(&random.normals(m * k));
            let b = element.round_all(&random.normals(n * k));
            let a_tensor = matrix(&context, element, case.a_shape(), 0, 0, &a);
            let b_tensor = matrix(&context, element, case.b_shape(), 0, 0, &b);
            let rows: Vec<usize> = (0..m).step_by(97).chain([m - 1]).collect();
            let few = Case { m: rows.len(), transpose_a: false, ..case };
            let value =
                |i: usize, l: usize| a[if case.transpose_a { l * m + i } else { i * k + l }];
            let few_a: Vec<f64> = rows
                .iter()
                .flat_map(|&i| (0..k).map(move |l| (i, l)))
                .map(|(i, l)| value(i, l))
                .collect();
            let want = few.reference(&few_a, &b, &[]);
            for backend in [XSERV_GEMM_TENSOR_CORE, XSERV_GEMM_AUTO] {
                if backend == XSERV_GEMM_AUTO && m > 1000 {
                    continue;
                }
                let what = format!("{backend:?} large");
                let c = TestTensor::blank(&context, element, &[m as i64, n as i64]);
                if case.run(&context, backend, &a_tensor, &b_tensor, &c) {
                    let all = c.read(&what);
                    assert!(all.iter().all(|x| x.is_finite()), "{what}: not all was written");
                    let got: Vec<f64> =
                        rows.iter().flat_map(|&i| all[i * n..(i + 1) * n].to_vec()).collect();
                    few.close(&what, &got, &want);
                }
            }
        }
    }
}

/// Within the bars of the golden data of the reference, rounded to the type as it is stored.
#[track_caller]
fn close_to_the_golden_data(what: &str, element: Type, got: &[f64], want: &[f64]) {
    compare(what, got, want, element.bar(2e-5, 2e-3, 1.6e-2));
}

#[test]
fn golden_vectors() {
    let Some(gemm) = golden::open("gemm") else { return };
    let Some(linear) = golden::open("linear") else { return };
    for context in contexts() {
        for (golden, names, transpose_b) in
            [(&gemm, ["a", "b", "c"], false), (&linear, ["x", "weight", "y"], true)]
        {
            for case in &golden.cases {
                let element = golden_type(&case.name);
                let [a, b, c] = names.map(|name| golden.tensor(case, name));
                let (m, n) = (c.shape[0], c.shape[1]);
                let product = Case::new(element, m, n, a.shape[1], 2 * usize::from(transpose_b));
                let a = matrix(&context, element, product.a_shape(), 0, 0, &a.values);
                let b = matrix(&context, element, product.b_shape(), 0, 0, &b.values);
                for backend in BACKENDS {
                    let what = format!("{} {backend:?} on {}", case.name, context.name);
                    let out = TestTensor::blank(&context, element, &[m as i64, n as i64]);
                    if product.run(&context, backend, &a, &b, &out) {
                        close_to_the_golden_data(&what, element, &out.read(&what), &c.values);
                    }
                }
            }
        }
    }
}

#[test]
fn backward_golden_vectors() {
    let Some(golden) = golden::open("gemm") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = golden_type(&case.name);
            let load = |name: &str| {
                let tensor = golden.tensor(case, name);
                matrix(&context, element, [tensor.shape[0], tensor.shape[1]], 0, 0, &tensor.values)
            };
            let (a, b, dc) = (load("a"), load("b"), load("dc"));
            for transpose_kernels in 0..2 {
                let what = format!("backward {} {transpose_kernels} {}", case.name, context.name);
                let da = TestTensor::blank(&context, element, &a.shape);
                let db = TestTensor::blank(&context, element, &b.shape);
                // SAFETY: live tensors of the context.
                unsafe {
                    ok(xserv_op_gemm_backward(
                        context.handle,
                        &a.view(),
                        &b.view(),
                        &dc.view(),
                        transpose_kernels,
                        &da.view(),
                        &db.view(),
                    ));
                }
                for (out, name) in [(&da, "da"), (&db, "db")] {
                    let want = golden.tensor(case, name).values;
                    close_to_the_golden_data(
                        &format!("{what} {name}"),
                        element,
                        &out.read(&what),
                        &want,
                    );
                }
            }
        }
    }
}

#[test]
fn backward_of_batches_and_views() {
    let mut random = Random::new(75);
    for context in contexts() {
        for element in FLOATS {
            for (batch, m, n, k) in
                [(1, 7, 33, 12), (3, 34, 10, 66), (2, 64, 32, 128), (2, 1, 5, 9)]
            {
                for gap in [0, 1, 4] {
                    let mut operand = |shape: [usize; 2]| {
                        let values =
                            element.round_all(&random.normals(batch * shape[0] * shape[1]));
                        let (size, strides) = gapped(batch, shape, gap);
                        let tensor = TestTensor::strided(
                            &context,
                            element,
                            &size,
                            &strides,
                            gap % 4,
                            &values,
                        );
                        (values, tensor)
                    };
                    let (a, a_tensor) = operand([m, k]);
                    let (b, b_tensor) = operand([k, n]);
                    let (dc, dc_tensor) = operand([m, n]);
                    let for_a = Case::new(element, m, k, n, 2);
                    let for_b = Case::new(element, k, n, m, 1);
                    let part = |x: &[f64], i: usize, len: usize| x[i * len..(i + 1) * len].to_vec();
                    let (mut want_a, mut want_b) = (Vec::new(), Vec::new());
                    for i in 0..batch {
                        let (a, b, dc) =
                            (part(&a, i, m * k), part(&b, i, k * n), part(&dc, i, m * n));
                        want_a.extend(for_a.reference(&dc, &b, &[]));
                        want_b.extend(for_b.reference(&a, &dc, &[]));
                    }
                    for (transpose_kernels, asked) in [(0, 3), (1, 3), (0, 1), (1, 2), (0, 0)] {
                        let what = format!("backward {transpose_kernels} {asked} gap {gap}");
                        let da = TestTensor::blank(&context, element, &a_tensor.shape);
                        let db = TestTensor::blank(&context, element, &b_tensor.shape);
                        let (da_view, db_view) = (da.view(), db.view());
                        let given = |bit: u32, view: &xserv_tensor| match asked & bit > 0 {
                            true => std::ptr::from_ref(view),
                            false => std::ptr::null(),
                        };
                        // SAFETY: live tensors of the context.
                        unsafe {
                            ok(xserv_op_gemm_backward(
                                context.handle,
                                &a_tensor.view(),
                                &b_tensor.view(),
                                &dc_tensor.view(),
                                transpose_kernels,
                                given(1, &da_view),
                                given(2, &db_view),
                            ));
                        }
                        if asked & 1 > 0 {
                            for_a.close(&what, &da.read(&what), &want_a);
                        }
                        if asked & 2 > 0 {
                            for_b.close(&what, &db.read(&what), &want_b);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn refusals() {
    for context in contexts() {
        let tensor = |element, shape: &[i64]| TestTensor::blank(&context, element, shape);
        let call = |options: Option<&xserv_gemm_options>,
                    a: &TestTensor,
                    b: &TestTensor,
                    c: &TestTensor| {
            let options = options.map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: live tensors of the context.
            unsafe { xserv_op_gemm(context.handle, options, &a.view(), &b.view(), &c.view()) }
        };
        let (a, b, c) =
            (tensor(Type::F32, &[3, 4]), tensor(Type::F32, &[4, 5]), tensor(Type::F32, &[3, 5]));
        ok(call(None, &a, &b, &c));
        for (a, b, c, said) in [
            (&a, &a, &c, "b has shape [3, 4], but a has [3, 4]: 3 rows for 4 columns"),
            (&a, &b, &a, "c has shape [3, 4], but the product of a and b is [3, 5]"),
            (&tensor(Type::F16, &[3, 4]), &b, &c, "b has elements of f32, but a of f16"),
            (&tensor(Type::I32, &[3, 4]), &b, &c, "a has elements of i32"),
            (&tensor(Type::F32, &[4]), &b, &c, "a has 1 dimensions"),
            (&a, &b, &tensor(Type::F32, &[1, 1, 3, 5]), "c has 4 dimensions"),
            (&tensor(Type::F32, &[2, 3, 4]), &b, &c, "the batches differ"),
            (
                &tensor(Type::F32, &[2, 3, 4]),
                &b,
                &tensor(Type::F32, &[3, 3, 5]),
                "the batches differ",
            ),
        ] {
            let message = refused(call(None, a, b, c));
            assert!(message.contains(said), "{message}");
        }
        let square = tensor(Type::F32, &[4, 4]);
        let other = tensor(Type::F32, &[4, 4]);
        assert!(refused(call(None, &square, &other, &square)).contains("c overlaps a"));
        assert!(refused(call(None, &other, &square, &square)).contains("c overlaps b"));
        let values = [0.0; 16];
        let broadcast = TestTensor::strided(&context, Type::F32, &[4, 4], &[0, 1], 0, &values);
        assert!(refused(call(None, &square, &other, &broadcast)).contains("share one place"));

        let good = Case::new(Type::F32, 3, 5, 4, 0).options(XSERV_GEMM_AUTO);
        for (options, said) in [
            (xserv_gemm_options { backend: 6, ..good }, "options.backend is 6"),
            (xserv_gemm_options { transpose_a: 2, ..good }, "options.transpose_a is 2"),
            (xserv_gemm_options { transpose_b: 7, ..good }, "options.transpose_b is 7"),
            (xserv_gemm_options { struct_size: 8, ..good }, "struct_size is 8"),
            (xserv_gemm_options { struct_size: 800, ..good }, "struct_size is 800"),
        ] {
            let message = refused(call(Some(&options), &a, &b, &c));
            assert!(message.contains(said), "{message}");
        }
        // SAFETY: live tensors; NULL where it is refused.
        unsafe {
            let null = std::ptr::null();
            let (a, b, c) = (a.view(), b.view(), c.view());
            assert!(refused(xserv_op_gemm(context.handle, null, null.cast(), &b, &c)).contains("a"));
            let wrong = xserv_op_gemm_backward(context.handle, &a, &b, &a, 0, &a, &b);
            assert!(refused(wrong).contains("dc has shape [3, 4]"));
            let wrong =
                xserv_op_gemm_backward(context.handle, &a, &b, &c, 2, null.cast(), null.cast());
            assert!(refused(wrong).contains("transpose_kernels is 2"));
            let wrong = xserv_op_gemm_backward(context.handle, &a, &b, &c, 0, &a, null.cast());
            assert!(refused(wrong).contains("da overlaps a"));
            let wrong = xserv_op_gemm_backward(context.handle, &a, &b, &c, 0, &c, null.cast());
            assert!(refused(wrong).contains("da has shape [3, 5], but a has [3, 4]"));
        }
    }
}
