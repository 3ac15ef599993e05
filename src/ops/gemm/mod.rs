//! Matrix product: `C = alpha * op(A) * op(B) + beta * C`, of one matrix or a batch of them, summed
//! in f32 and rounded once (but with beta other than 0 cuBLAS sometimes rounds products of 16 bits before
//! it adds beta * C, too). op(X) is X or its transpose.
//!
//! op(A) [m, k], op(B) [k, n], C [m, n]; with a batch [batch, m, n], where A or B of two dimensions
//! (or of batch stride 0) serves every product. beta = 0 does not read C; alpha = 0 reads neither A
//! nor B.
//!
//! A matrix is used where it lies if one of its two strides is 1: a transposed view only changes
//! which kernel runs. A matrix in any other layout is copied first.

pub mod cpu;
mod cpu_gemv;
mod cpu_scale;
mod cpu_shape;
mod cpu_tiles;
mod cuda;

mod backward;
mod choice;
mod layout;
mod options;

pub use backward::gemm_backward;
#[cfg(test)]
pub(in crate::ops) use choice::shared_bytes as tile_shared_bytes;
#[cfg(test)]
pub(in crate::ops) use cuda::{simt_shared_bytes, GemmParams, GemvParams, SimtGemmParams};
pub use options::{GemmBackend, GemmOptions, SumOrder};

use crate::backend::cuda::{is_cublas_present, CudaContext, MAX_CUBLAS_WORKSPACE_BYTES};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::check::{self, InPlace, Named};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::launch::with_storage;
use crate::ops::common::storage::Storage;
use crate::ops::gemm::choice::{choose, choose_ordered, Choice, Facts};
use crate::ops::gemm::cpu::GemmScratch;
use crate::ops::gemm::layout::{batch_size, matrix_sizes, Operand, Place, Product, Staged, View};

/// Computes the product; see the head of the file. C overlaps neither A nor B.
pub fn gemm(
    context: &ComputeContext,
    options: &GemmOptions,
    a: &Tensor,
    b: &Tensor,
    c: &Tensor,
) -> Result<()> {
    multiply(context, options, a, b, None, c)
}

/// Computes the product of matrices, and adds `bias` [n], which is of their type, to every row of it before
/// it is rounded. beta is 0.
pub fn gemm_with_bias(
    context: &ComputeContext,
    options: &GemmOptions,
    a: &Tensor,
    b: &Tensor,
    bias: &Tensor,
    c: &Tensor,
) -> Result<()> {
    let (_, n) = matrix_sizes(c, false);
    if **bias.shape() != [n] || batch_size(c).is_some() || options.beta != 0.0 {
        return Err(Error::internal(format!(
            "a bias of shape {} for a product of shape {} and beta {}",
            bias.shape(),
            c.shape(),
            options.beta
        )));
    }
    multiply(context, options, a, b, Some(bias), c)
}

/// Checks the tensors and computes the product.
fn multiply(
    context: &ComputeContext,
    options: &GemmOptions,
    a: &Tensor,
    b: &Tensor,
    bias: Option<&Tensor>,
    c: &Tensor,
) -> Result<()> {
    let (a_named, b_named, c_named) = (("a", a), ("b", b), ("c", c));
    // Without a bias A is checked twice.
    let bias_named = ("bias", bias.unwrap_or(a));
    let dtype = check::float(a_named)?;
    check::same_type(&[a_named, b_named, c_named, bias_named])?;
    check_shapes(options, a_named, b_named, c_named)?;
    check_backend(context, options.backend, dtype)?;
    check::reachable(context, &[a_named, b_named, c_named, bias_named])?;
    check::result(c_named, &[a_named, b_named, bias_named], InPlace::Refused)?;
    gemm_unchecked(context, options, a, b, bias, c)
}

/// Writes a bias to every row of a matrix, for a product that is added to it.
fn write_to_rows(context: &ComputeContext, bias: &Tensor, c: &Tensor) -> Result<()> {
    let [stride] = **bias.strides() else {
        return Err(Error::internal("a bias that is no vector"));
    };
    // SAFETY: every row is the bias itself, whose elements are those that its stride spans.
    let rows = unsafe {
        let (data, element, device) = (bias.data(), bias.element(), bias.device());
        Tensor::from_raw(data, element, device, c.shape(), Some(&[0, stride]), "bias")
    }?;
    // SAFETY: both were checked, to be reachable, of one type and without memory in common.
    unsafe { copy_unchecked(context, &rows, c) }
}

/// The shape of a weight that [`gemm`] gets as its second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShape {
    /// The number of columns of the result.
    pub out_features: usize,
    /// The number of elements that are summed over.
    pub in_features: usize,
    /// Whether it is stored [out_features, in_features] rather than [in_features, out_features].
    pub transposed: bool,
}

/// Returns the most device memory that [`gemm`] takes on any chip while it is queued, for up to
/// `num_rows` contiguous rows and contiguous weights. `is_ordered` stands for an order other than
/// [`SumOrder::Fastest`].
pub fn gemm_scratch_bytes(
    dtype: DType,
    num_rows: usize,
    weight: &WeightShape,
    is_ordered: bool,
) -> usize {
    let WeightShape { out_features: n, in_features: k, transposed } = *weight;
    let size = dtype.size_bytes();
    // Operands are copied where they cannot be read 16 bytes at a time.
    let copy = |lines: usize, width: usize| {
        if (width * size).is_multiple_of(16) {
            0
        } else {
            lines.saturating_mul(layout::padded(width as i64) as usize * size + 512)
        }
    };
    let copies = copy(num_rows, k).saturating_add(if transposed { copy(n, k) } else { copy(k, n) });
    let results = num_rows.saturating_mul(n).saturating_mul(4);
    if is_ordered {
        copies
    } else {
        choice::most_partial_bytes(dtype, results, k)
            .saturating_add(copies)
            .max(cublas_workspace_bytes(results))
    }
}

/// Returns the workspace of cuBLAS for products of up to `results` bytes in f32: room to sum them
/// up in two parts, and no more than it can use.
fn cublas_workspace_bytes(results: usize) -> usize {
    results.saturating_mul(2).clamp(1 << 20, MAX_CUBLAS_WORKSPACE_BYTES)
}

/// Returns the workspace of cuBLAS for products with weights of up to `out_features`, for up to
/// `num_rows` rows.
pub(crate) fn cublas_workspace_for(num_rows: usize, out_features: usize) -> usize {
    cublas_workspace_bytes(num_rows.saturating_mul(out_features).saturating_mul(4))
}

fn check_rank((name, tensor): Named<'_>) -> Result<()> {
    match tensor.shape().len() {
        2 | 3 => Ok(()),
        found => Err(Error::invalid_argument(format!(
            "{name} has {found} dimensions, shape {}, but a matrix or a batch of matrices is needed",
            tensor.shape()
        ))),
    }
}

fn check_shapes(options: &GemmOptions, a: Named<'_>, b: Named<'_>, c: Named<'_>) -> Result<()> {
    [a, b, c].into_iter().try_for_each(check_rank)?;
    for (name, tensor) in [a, b] {
        let (found, wanted) = (batch_size(tensor), batch_size(c.1));
        if found.is_some() && found != wanted {
            return Err(Error::invalid_argument(format!(
                "{name} has shape {}, but c has {}: the batches differ",
                tensor.shape(),
                c.1.shape()
            )));
        }
    }
    let (m, k) = matrix_sizes(a.1, options.transpose_a);
    let (k_of_b, n) = matrix_sizes(b.1, options.transpose_b);
    let said = |transpose: bool| if transpose { " transposed" } else { "" };
    if k != k_of_b {
        return Err(Error::invalid_argument(format!(
            "b has shape {}{}, but a has {}{}: {k_of_b} rows for {k} columns",
            b.1.shape(),
            said(options.transpose_b),
            a.1.shape(),
            said(options.transpose_a)
        )));
    }
    if matrix_sizes(c.1, false) != (m, n) {
        return Err(Error::invalid_argument(format!(
            "c has shape {}, but the product of a and b is [{m}, {n}]",
            c.1.shape()
        )));
    }
    Ok(())
}

/// Fails for a backend that the device or the element type does not have.
fn check_backend(context: &ComputeContext, backend: GemmBackend, dtype: DType) -> Result<()> {
    use GemmBackend::{Blocked, Cublas, TensorCore, Tiled};
    let is_cpu = matches!(context.backend(), ContextBackend::Cpu { .. });
    let why = match backend {
        Tiled if is_cpu => "the tiled kernel is one of CUDA, but the context works on the CPU",
        Cublas if is_cpu => "cuBLAS is for CUDA, but the context works on the CPU",
        TensorCore if is_cpu => "tensor cores are for CUDA, but the context works on the CPU",
        Blocked if !is_cpu => "the blocked kernel is one of the CPU, but the context works on CUDA",
        Cublas if !is_cublas_present() => {
            "cuBLASLt is not installed (libcublasLt.so was not found, or XSERV_CUBLAS=0 hides it)"
        }
        TensorCore if dtype == DType::F32 => {
            "the tensor cores multiply f16 and bf16, not f32 without loss"
        }
        _ => return Ok(()),
    };
    Err(Error::unsupported(format!("gemm: {why}")))
}

/// Computes the product of tensors that have been checked.
fn gemm_unchecked(
    context: &ComputeContext,
    options: &GemmOptions,
    a: &Tensor,
    b: &Tensor,
    bias: Option<&Tensor>,
    c: &Tensor,
) -> Result<()> {
    if c.is_empty() {
        return Ok(());
    }
    let dtype = check::float(("c", c))?;
    let ((m, k), (_, n)) =
        (matrix_sizes(a, options.transpose_a), matrix_sizes(b, options.transpose_b));
    let k = if options.alpha == 0.0 { 0 } else { k };
    // A bias that the kernel does not add is in C before.
    let (mut options, mut bias) = (*options, bias);
    if let Some(early) = bias.filter(|bias| !is_epilogue(context, bias, c)) {
        write_to_rows(context, early, c)?;
        (options.beta, bias) = (1.0, None);
    }
    // A single column of C is a row of its transpose: the kernels for few rows serve both.
    let place = Place::of(context, c, options.beta, n == 1 && m > 1)?;
    let (a, b) = match k {
        // The operands are never read, and may have no address.
        0 => (Staged::nothing(m), Staged::nothing(n)),
        _ => (
            Staged::of(context, a, options.transpose_a, false)?,
            Staged::of(context, b, options.transpose_b, true)?,
        ),
    };
    let mut product = Product {
        dtype,
        m,
        n,
        k,
        batch: batch_size(c).unwrap_or(1),
        a: a.operand,
        b: b.operand,
        c: place.operand,
        alpha: options.alpha,
        beta: options.beta,
        bias: std::ptr::null(),
    };
    if product.c.transposed {
        // The product is computed as C^T = op(B)^T op(A)^T.
        let flip = |operand: Operand| Operand { transposed: !operand.transposed, ..operand };
        product = Product {
            m: n,
            n: m,
            a: flip(product.b),
            b: flip(product.a),
            c: flip(product.c),
            ..product
        };
    }
    let product = product.folded();
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            with_storage!(dtype, T => on_host::<T>(backend, options.backend, &product))?
        }
        ContextBackend::Cuda(cuda) => {
            on_cuda(context, cuda, &options, &product, bias.map(|bias| (bias, c)))?;
        }
    }
    place.finish(context)
}

/// Whether cuBLAS can add a bias to the rows of C, which lie in C's own memory then.
fn is_epilogue(context: &ComputeContext, bias: &Tensor, c: &Tensor) -> bool {
    matches!(context.backend(), ContextBackend::Cuda(_))
        && bias.is_contiguous()
        && (bias.data() as usize).is_multiple_of(16)
        && matrix_sizes(c, false).1 > 1
        && View::of(c, false).lines(false).is_some_and(|(are_columns, _)| !are_columns)
}

/// Returns the elements of one stored matrix of a batch.
///
/// # Safety
/// They are host memory of type T.
unsafe fn matrix_slice<'a, T>(x: &Operand, index: i64, lines: i64, width: i64) -> &'a [T] {
    if lines == 0 || width == 0 {
        return &[];
    }
    let len = ((lines - 1) * x.ld + width) as usize;
    // SAFETY: the operand spans this many elements from there on, by contract.
    unsafe {
        std::slice::from_raw_parts(x.data.cast::<T>().add((index * x.batch_stride) as usize), len)
    }
}

fn on_host<T: Storage>(
    backend: &crate::backend::cpu::CpuBackend,
    choice: GemmBackend,
    product: &Product,
) -> Result<()> {
    let Product { m, n, k, batch, a, b, c, alpha, beta, .. } = *product;
    let shape = cpu::Gemm {
        m: m as usize,
        n: n as usize,
        k: k as usize,
        transpose_a: a.transposed,
        transpose_b: b.transposed,
        lda: a.ld as usize,
        ldb: b.ld as usize,
        ldc: c.ld as usize,
        alpha,
        beta,
    };
    let stored = |x: &Operand, rows: i64, columns: i64| {
        if x.transposed {
            (columns, rows)
        } else {
            (rows, columns)
        }
    };
    let ((a_lines, a_width), (b_lines, b_width)) = (stored(&a, m, k), stored(&b, k, n));
    let mut scratch = GemmScratch::new();
    for index in 0..batch {
        // SAFETY: the tensors were checked to be on the host and of type T; C shares no element
        // with A or B, and the host kernels write to its rows only, not between them.
        let (a, b, c) = unsafe {
            let start = c.data.cast::<T>().add((index * c.batch_stride) as usize);
            (
                matrix_slice::<T>(&a, index, a_lines, a_width),
                matrix_slice::<T>(&b, index, b_lines, b_width),
                std::slice::from_raw_parts_mut(start, ((m - 1) * c.ld + n) as usize),
            )
        };
        match choice {
            GemmBackend::Naive => cpu::gemm_naive(backend, &shape, a, b, c)?,
            _ => cpu::gemm(backend, &shape, a, b, c, &mut scratch)?,
        }
    }
    Ok(())
}

fn on_cuda(
    context: &ComputeContext,
    cuda: &CudaContext,
    options: &GemmOptions,
    product: &Product,
    bias: Option<(&Tensor, &Tensor)>,
) -> Result<()> {
    let backend = options.backend;
    cuda::check_sizes(product)?;
    let run = |choice: Choice| {
        let with_bias = match bias {
            None => *product,
            Some((bias, _)) if choice == Choice::Cublas => {
                Product { bias: bias.data().cast_const(), ..*product }
            }
            Some((bias, c)) => {
                write_to_rows(context, bias, c)?;
                Product { beta: 1.0, ..*product }
            }
        };
        cuda::run(context, cuda, choice, &with_bias)
    };
    let info = cuda.device().info();
    let facts = Facts {
        dtype: product.dtype,
        m: product.m,
        n: product.n,
        k: product.k,
        batch: product.batch,
        transpose_a: product.a.transposed,
        transpose_b: product.b.transposed,
        a_in_vectors: product.in_vectors(&product.a),
        b_in_vectors: product.in_vectors(&product.b),
        has_cublas: is_cublas_present(),
        num_multiprocessors: i64::from(info.num_multiprocessors).max(1),
        shared_memory_bytes: info.shared_memory_bytes,
        has_wgmma: info.compute_capability == (9, 0),
    };
    if options.order != SumOrder::Fastest {
        // Another kernel would add in another order, so there is no second choice.
        return run(choose_ordered(options.order, &facts)?);
    }
    let choice = choose(backend, &facts);
    let done = run(choice);
    match done {
        // A library that was built without machine code for this chip has no kernels for wgmma.
        Err(error)
            if matches!(choice, Choice::TensorCore(tile, _) if tile.is_wgmma())
                && error.kind() != ErrorKind::DeviceLost =>
        {
            let other = choose(backend, &Facts { has_wgmma: false, ..facts });
            run(other)
        }
        // cuBLAS may lack an algorithm for a shape, or memory for its workspace; this library's
        // kernels do not.
        Err(error)
            if choice == Choice::Cublas
                && backend == GemmBackend::Auto
                && error.kind() != ErrorKind::DeviceLost =>
        {
            let own = choose(backend, &Facts { has_cublas: false, ..facts });
            run(own)
        }
        done => done,
    }
}
