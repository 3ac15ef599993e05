//! Matrix products and their gradients.

use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::{DType, Device};
use crate::ops;
use crate::ops::gemm::{GemmBackend, GemmOptions};
use crate::self_test::case::{bound, Case, Emit, Output, Values, FLOATS};
use crate::self_test::reference;

/// The error in f32, in units of the results' mean.
const ERROR: f64 = 1e-5;

/// m, n and k: one row; rests on every side; tiles of every kernel, exactly.
const SIZES: [[i64; 3]; 4] = [[1, 67, 129], [17, 33, 65], [129, 70, 71], [128, 128, 64]];

const CPU: [(GemmBackend, &str); 3] =
    [(GemmBackend::Auto, "auto"), (GemmBackend::Naive, "naive"), (GemmBackend::Blocked, "blocked")];
const CUDA: [(GemmBackend, &str); 5] = [
    (GemmBackend::Auto, "auto"),
    (GemmBackend::Naive, "naive"),
    (GemmBackend::Tiled, "tiled"),
    (GemmBackend::Cublas, "cublas"),
    (GemmBackend::TensorCore, "tensor_core"),
];

pub(super) fn emit(device: Device, emit: &mut Emit<'_>) -> Result<()> {
    let backends = match device {
        Device::Cpu => &CPU[..],
        Device::Cuda(_) => &CUDA[..],
    };
    for dtype in FLOATS {
        for &(backend, name) in backends {
            for (index, sizes) in SIZES.into_iter().enumerate() {
                // All four layouts, over the sizes.
                let (transpose_a, transpose_b) = (index == 2, index != 1);
                emit(gemm(dtype, sizes, (backend, name), transpose_a, transpose_b))?;
            }
            emit(gemm(dtype, [19, 21, 23], (backend, name), false, false))?;
        }
        emit(batched(dtype))?;
        for transpose_kernels in [false, true] {
            emit(gemm_backward(dtype, transpose_kernels))?;
        }
    }
    Ok(())
}

/// Returns the implementation on this context: the CPU lacks those of CUDA.
fn on(context: &ComputeContext, backend: GemmBackend) -> GemmBackend {
    match (context.device(), backend) {
        (Device::Cpu, GemmBackend::Naive | GemmBackend::Blocked) => backend,
        (Device::Cpu, _) => GemmBackend::Auto,
        (Device::Cuda(_), _) => backend,
    }
}

fn gemm(
    dtype: DType,
    [m, n, k]: [i64; 3],
    (backend, name): (GemmBackend, &str),
    transpose_a: bool,
    transpose_b: bool,
) -> Case {
    let (alpha, beta) = (1.5, 0.5);
    let a_shape = if transpose_a { [k, m] } else { [m, k] };
    let b_shape = if transpose_b { [n, k] } else { [k, n] };
    let (a, b) = (Values::random(dtype, &a_shape, 60), Values::random(dtype, &b_shape, 61));
    let c = Values::random(dtype, &[m, n], 62);
    let expected = reference::gemm(
        (&a.values, &b.values, &c.values),
        (m as usize, n as usize, k as usize),
        (transpose_a, transpose_b),
        (a_shape[1] as usize, b_shape[1] as usize, n as usize),
        (alpha, beta),
    );
    let output = Output::floats(dtype, &[m, n], expected, bound(dtype, ERROR));
    let layout = |is_transposed| if is_transposed { "^T" } else { "" };
    Case {
        operator: "gemm",
        what: format!(
            "{dtype} {name} [{m}, {k}]{} x [{k}, {n}]{}",
            layout(transpose_a),
            layout(transpose_b)
        ),
        inputs: vec![a, b],
        outputs: vec![Output { initial: Some(c.values), ..output }],
        is_optional: backend != GemmBackend::Auto,
        compute: Box::new(move |context, i, o| {
            let backend = on(context, backend);
            let options = GemmOptions {
                transpose_a,
                transpose_b,
                alpha,
                beta,
                backend,
                ..GemmOptions::default()
            };
            ops::gemm::gemm(context, &options, &i[0], &i[1], &o[0])
        }),
    }
}

/// Returns the product of two matrices of `m * k` and `k * n` elements.
fn product(a: &[f64], b: &[f64], (m, n, k): (usize, usize, usize)) -> Vec<f64> {
    reference::gemm((a, b, &[]), (m, n, k), (false, false), (k, n, n), (1.0, 0.0))
}

fn batched(dtype: DType) -> Case {
    let (batch, m, n, k) = (3, 5, 33, 17);
    let a = Values::random(dtype, &[batch, m, k], 63);
    let b = Values::random(dtype, &[batch, k, n], 64);
    let sizes = (m as usize, n as usize, k as usize);
    let matrices = a.values.chunks((m * k) as usize).zip(b.values.chunks((k * n) as usize));
    let expected = matrices.flat_map(|(a, b)| product(a, b, sizes)).collect();
    Case {
        operator: "gemm",
        what: format!("{dtype} auto [{batch}, {m}, {k}] x [{batch}, {k}, {n}]"),
        inputs: vec![a, b],
        outputs: vec![Output::floats(dtype, &[batch, m, n], expected, bound(dtype, ERROR))],
        is_optional: false,
        compute: Box::new(|context, i, o| {
            ops::gemm::gemm(context, &GemmOptions::default(), &i[0], &i[1], &o[0])
        }),
    }
}

fn gemm_backward(dtype: DType, transpose_kernels: bool) -> Case {
    let (m, n, k) = (17, 33, 65);
    let (a, b) = (Values::random(dtype, &[m, k], 65), Values::random(dtype, &[k, n], 66));
    let dc = Values::random(dtype, &[m, n], 67);
    let sizes = (m as usize, n as usize, k as usize);
    let turned_a = reference::transpose(&a.values, sizes.0, sizes.2);
    let turned_b = reference::transpose(&b.values, sizes.2, sizes.1);
    let da = product(&dc.values, &turned_b, (sizes.0, sizes.2, sizes.1));
    let db = product(&turned_a, &dc.values, (sizes.2, sizes.1, sizes.0));
    let form = if transpose_kernels { "with transposes in memory" } else { "in place" };
    let bound = bound(dtype, ERROR);
    Case {
        operator: "gemm_backward",
        what: format!("{dtype} [{m}, {k}] x [{k}, {n}] {form}"),
        inputs: vec![a, b, dc],
        outputs: vec![
            Output::floats(dtype, &[m, k], da, bound),
            Output::floats(dtype, &[k, n], db, bound),
        ],
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            let (da, db) = (Some(&o[0]), Some(&o[1]));
            ops::gemm::gemm_backward(context, &i[0], &i[1], &i[2], transpose_kernels, da, db)
        }),
    }
}
