//! Launches of the kernels of `csrc/ops/gemm/*.cu`, and cuBLASLt.

use crate::backend::cuda::{
    kernel_struct, kernels, Arguments, CudaContext, Kernel, KernelByHalf, Launch, MatmulShape,
};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::Block;
use crate::ops::common::copy::copy_unchecked;
use crate::ops::gemm::choice::{Choice, Tile};
use crate::ops::gemm::layout::{matrix_tensor, padded, padded_place, Operand, Product};

kernel_struct! {
    /// `csrc/ops/gemm/tensor_core.cu` has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct GemmParams {
        a: *const u8,
        b: *const u8,
        c: *mut u8,
        workspace: *mut u8,
        lda: i64,
        ldb: i64,
        ldc: i64,
        stride_a: i64,
        stride_b: i64,
        stride_c: i64,
        m: i32,
        n: i32,
        k: i32,
        k_per_split: i32,
        alpha: f32,
        beta: f32,
    }
}

kernel_struct! {
    /// `csrc/ops/gemm/tiled.cu` has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct SimtGemmParams {
        a: *const u8,
        b: *const u8,
        c: *mut u8,
        lda: i64,
        ldb: i64,
        ldc: i64,
        stride_a: i64,
        stride_b: i64,
        stride_c: i64,
        m: i32,
        n: i32,
        k: i32,
        trans_a: i32,
        trans_b: i32,
        alpha: f32,
        beta: f32,
    }
}

kernel_struct! {
    /// `csrc/ops/gemm/gemv.cu` has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct GemvParams {
        x: *const u8,
        w: *const u8,
        out: *mut u8,
        ldx: i64,
        ldw: i64,
        ldo: i64,
        m: i32,
        n: i32,
        k: i32,
        alpha: f32,
        beta: f32,
    }
}

/// The largest m, n and k: the kernels count in i32, and look a tile ahead.
const MOST: i64 = i32::MAX as i64 - 1024;
/// The most batches of one launch.
const BATCHES: i64 = 65_535;

fn too_large(product: &Product) -> Error {
    let Product { m, n, k, .. } = product;
    Error::unsupported(format!("gemm: a product of m {m}, n {n} and k {k} is too large for CUDA"))
}

/// Fails for sizes that no kernel can count.
pub(super) fn check_sizes(product: &Product) -> Result<()> {
    if product.m.max(product.n).max(product.k) <= MOST {
        Ok(())
    } else {
        Err(too_large(product))
    }
}

/// Returns the blocks of a launch that covers C with tiles.
fn num_tiles(product: &Product, rows: i64, columns: i64) -> Result<u32> {
    let count =
        (product.m as u64).div_ceil(rows as u64) * (product.n as u64).div_ceil(columns as u64);
    match u32::try_from(count) {
        Ok(count) if count <= i32::MAX as u32 => Ok(count),
        _ => Err(too_large(product)),
    }
}

/// Queues a product.
pub(super) fn run(
    context: &ComputeContext,
    cuda: &CudaContext,
    choice: Choice,
    product: &Product,
) -> Result<()> {
    match choice {
        Choice::Naive => plain(cuda, product, kernels::GEMM_NAIVE.of(product.dtype), 8, 256),
        Choice::Tiled => plain(cuda, product, kernels::GEMM_TILED.of(product.dtype), 32, 128),
        Choice::Simt => simt(cuda, &InVectors::of(context, product)?.product),
        Choice::TensorCore(tile, splits) => {
            tensor_core(context, cuda, &InVectors::of(context, product)?.product, tile, splits)
        }
        Choice::Parts(parts) => in_parts(cuda, product, parts),
        Choice::Cublas => cublas(cuda, product),
        Choice::Gemv(_) | Choice::GemvTensorCore | Choice::GemvColumns(_) => {
            gemv(cuda, product, choice)
        }
    }
}

/// A product whose operands can be read 16 bytes at a time, as copies where they could not.
struct InVectors {
    product: Product,
    /// The copies go back to the context although the kernel is only queued: work of their next
    /// user is queued after it.
    _copies: [Option<Block>; 2],
}

impl InVectors {
    fn of(context: &ComputeContext, product: &Product) -> Result<Self> {
        let Product { m, n, k, a, b, .. } = *product;
        let (a, a_copy) = in_vectors(context, product, &a, m, k)?;
        let (b, b_copy) = in_vectors(context, product, &b, k, n)?;
        Ok(InVectors { product: Product { a, b, ..*product }, _copies: [a_copy, b_copy] })
    }
}

/// Returns an operand, or a copy of it in rows of whole vectors.
fn in_vectors(
    context: &ComputeContext,
    product: &Product,
    operand: &Operand,
    rows: i64,
    columns: i64,
) -> Result<(Operand, Option<Block>)> {
    if product.in_vectors(operand) {
        return Ok((*operand, None));
    }
    let (lines, width) = if operand.transposed { (columns, rows) } else { (rows, columns) };
    let batch = if operand.batch_stride == 0 { 1 } else { product.batch };
    let stored = matrix_tensor(context, product.dtype, operand, batch, lines, width)?;
    let (place, block) = padded_place(context, &stored)?;
    // SAFETY: the operand is valid for its layout; the new block overlaps nothing.
    unsafe { copy_unchecked(context, &stored, &place) }?;
    let ld = padded(width);
    let batch_stride = if batch == 1 { 0 } else { lines * ld };
    Ok((Operand { data: place.data(), ld, batch_stride, ..*operand }, Some(block)))
}

/// Returns the operands of the batch from `first` on.
fn from_batch(product: &Product, first: i64) -> [*mut u8; 3] {
    let size = product.dtype.size_bytes() as i64;
    [product.a, product.b, product.c]
        .map(|x| x.data.wrapping_add((first * x.batch_stride * size) as usize))
}

/// Calls `launch` with the first index and the count of each run of batches that one launch can do.
fn for_batches(product: &Product, mut launch: impl FnMut(i64, u32) -> Result<()>) -> Result<()> {
    let mut first = 0;
    while first < product.batch {
        let count = (product.batch - first).min(BATCHES);
        launch(first, count as u32)?;
        first += count;
    }
    Ok(())
}

fn simt_params(product: &Product, first: i64) -> SimtGemmParams {
    let Product { m, n, k, a, b, c, alpha, beta, .. } = *product;
    let [a_data, b_data, c_data] = from_batch(product, first);
    SimtGemmParams {
        a: a_data,
        b: b_data,
        c: c_data,
        lda: a.ld,
        ldb: b.ld,
        ldc: c.ld,
        stride_a: a.batch_stride,
        stride_b: b.batch_stride,
        stride_c: c.batch_stride,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        trans_a: i32::from(a.transposed),
        trans_b: i32::from(b.transposed),
        alpha,
        beta,
    }
}

/// Launches gemm_naive or gemm_tiled with tiles of `rows` by 32.
fn plain(
    cuda: &CudaContext,
    product: &Product,
    kernel: Kernel,
    rows: i64,
    block: u32,
) -> Result<()> {
    let tiles = num_tiles(product, rows, 32)?;
    for_batches(product, |first, count| {
        let params = simt_params(product, first);
        let launch = Launch { grid: (tiles, 1, count), block, shared_bytes: 0 };
        // SAFETY: the arguments of these kernels; the matrices were checked.
        unsafe { cuda.launch(kernel, launch, Arguments::new().value(&params)) }
    })
}

/// The dynamic shared memory of the kernels for matrices as they lie (n) or transposed (t), in
/// bytes; they check it.
const SIMT_NN_BYTES: u32 = 55_296;
const SIMT_NT_BYTES: u32 = 61_440;
const SIMT_TN_BYTES: u32 = 49_152;
const SIMT_TT_BYTES: u32 = 55_296;

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for these kernels.
#[cfg(test)]
pub(in crate::ops) fn simt_shared_bytes() -> Vec<(String, u32)> {
    [("nn", SIMT_NN_BYTES), ("nt", SIMT_NT_BYTES), ("tn", SIMT_TN_BYTES), ("tt", SIMT_TT_BYTES)]
        .map(|(name, bytes)| (format!("gemm_simt_{name}"), bytes))
        .into()
}

fn simt(cuda: &CudaContext, product: &Product) -> Result<()> {
    let (kernel, shared_bytes) = match (product.a.transposed, product.b.transposed) {
        (false, false) => (kernels::GEMM_SIMT_NN_F32, SIMT_NN_BYTES),
        (false, true) => (kernels::GEMM_SIMT_NT_F32, SIMT_NT_BYTES),
        (true, false) => (kernels::GEMM_SIMT_TN_F32, SIMT_TN_BYTES),
        (true, true) => (kernels::GEMM_SIMT_TT_F32, SIMT_TT_BYTES),
    };
    let tiles = num_tiles(product, 128, 128)?;
    for_batches(product, |first, count| {
        let params = simt_params(product, first);
        let launch = Launch { grid: (tiles, 1, count), block: 256, shared_bytes };
        // SAFETY: the arguments of the kernel; A and B are in whole vectors.
        unsafe { cuda.launch(kernel, launch, Arguments::new().value(&params)) }
    })
}

/// Returns the kernels of a tile for matrices as they lie (n) or transposed (t), A first.
macro_rules! by_transposes {
    ($transposes:expr, $nn:ident, $nt:ident, $tn:ident, $tt:ident) => {
        match $transposes {
            (false, false) => kernels::$nn,
            (false, true) => kernels::$nt,
            (true, false) => kernels::$tn,
            (true, true) => kernels::$tt,
        }
    };
}

fn tensor_core_kernel(tile: Tile, transposes: (bool, bool)) -> KernelByHalf {
    match tile {
        Tile::W128x256 => by_transposes!(
            transposes,
            GEMM_WGMMA_128X256_NN,
            GEMM_WGMMA_128X256_NT,
            GEMM_WGMMA_128X256_TN,
            GEMM_WGMMA_128X256_TT
        ),
        Tile::W128x128 => by_transposes!(
            transposes,
            GEMM_WGMMA_128X128_NN,
            GEMM_WGMMA_128X128_NT,
            GEMM_WGMMA_128X128_TN,
            GEMM_WGMMA_128X128_TT
        ),
        Tile::T128x256 => by_transposes!(
            transposes,
            GEMM_TENSOR_CORE_128X256_NN,
            GEMM_TENSOR_CORE_128X256_NT,
            GEMM_TENSOR_CORE_128X256_TN,
            GEMM_TENSOR_CORE_128X256_TT
        ),
        Tile::T128x128 => by_transposes!(
            transposes,
            GEMM_TENSOR_CORE_128X128_NN,
            GEMM_TENSOR_CORE_128X128_NT,
            GEMM_TENSOR_CORE_128X128_TN,
            GEMM_TENSOR_CORE_128X128_TT
        ),
        Tile::T64x128 => by_transposes!(
            transposes,
            GEMM_TENSOR_CORE_64X128_NN,
            GEMM_TENSOR_CORE_64X128_NT,
            GEMM_TENSOR_CORE_64X128_TN,
            GEMM_TENSOR_CORE_64X128_TT
        ),
        Tile::T64x64 => by_transposes!(
            transposes,
            GEMM_TENSOR_CORE_64X64_NN,
            GEMM_TENSOR_CORE_64X64_NT,
            GEMM_TENSOR_CORE_64X64_TN,
            GEMM_TENSOR_CORE_64X64_TT
        ),
    }
}

fn tensor_core(
    context: &ComputeContext,
    cuda: &CudaContext,
    product: &Product,
    tile: Tile,
    splits: i64,
) -> Result<()> {
    let Product { m, n, k, a, b, c, batch, .. } = *product;
    let kernel = tensor_core_kernel(tile, (a.transposed, b.transposed)).of_half(product.dtype)?;
    let reduce = kernels::GEMM_SPLIT_K_REDUCE.of_half(product.dtype)?;
    // Each part has whole stages of k; rounding may leave fewer parts.
    let k_per_split = (k as u64).div_ceil(splits.max(1) as u64).next_multiple_of(64) as i64;
    let splits = (k as u64).div_ceil(k_per_split as u64) as i64;
    let workspace = match splits {
        1 => None,
        _ => {
            let sums =
                batch.min(BATCHES).checked_mul(splits * 4).and_then(|x| x.checked_mul(m * n));
            let bytes = sums.ok_or_else(|| too_large(product))?;
            Some(context.allocate(bytes as usize, "the partial sums of a product")?)
        }
    };
    let tiles = num_tiles(product, tile.rows(), tile.columns())?;
    for_batches(product, |first, count| {
        let [a_data, b_data, c_data] = from_batch(product, first);
        let params = GemmParams {
            a: a_data,
            b: b_data,
            c: c_data,
            workspace: workspace.as_ref().map_or(std::ptr::null_mut(), Block::start),
            lda: a.ld,
            ldb: b.ld,
            ldc: c.ld,
            stride_a: a.batch_stride,
            stride_b: b.batch_stride,
            stride_c: c.batch_stride,
            m: m as i32,
            n: n as i32,
            k: k as i32,
            k_per_split: k_per_split as i32,
            alpha: product.alpha,
            beta: product.beta,
        };
        let launch = Launch {
            grid: (tiles, splits as u32, count),
            block: tile.threads(),
            shared_bytes: tile.shared_bytes(),
        };
        let arguments = Arguments::new().value(&params);
        // SAFETY: the arguments of the kernel; A and B are in whole vectors, the workspace holds
        // the sums of all parts.
        unsafe { cuda.launch(kernel, launch, arguments) }?;
        if splits == 1 {
            return Ok(());
        }
        let blocks = u32::try_from((m * n) as u64 / 256 + 1).map_err(|_| too_large(product))?;
        let launch = Launch { grid: (blocks, 1, count), block: 256, shared_bytes: 0 };
        let arguments = Arguments::new().value(&params).i32(splits as i32);
        // SAFETY: the arguments of the kernel, which adds what the preceding one wrote.
        unsafe { cuda.launch(reduce, launch, arguments) }
    })
}

/// Multiplies with k in parts that are added in their order. The choice has checked the layout; one
/// product, not a batch.
fn in_parts(cuda: &CudaContext, product: &Product, parts: i64) -> Result<()> {
    let kernel = kernels::GEMM_WGMMA_128X128_PARTS_NT.of_half(product.dtype)?;
    let Product { m, n, k, batch, a, b, c, alpha, beta, .. } = *product;
    if batch != 1 {
        return Err(Error::internal("gemm: a batch with k in parts"));
    }
    let tile = Tile::W128x128;
    let params = GemmParams {
        a: a.data,
        b: b.data,
        c: c.data,
        workspace: std::ptr::null_mut(),
        lda: a.ld,
        ldb: b.ld,
        ldc: c.ld,
        stride_a: 0,
        stride_b: 0,
        stride_c: 0,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        k_per_split: parts.clamp(1, 64) as i32,
        alpha,
        beta,
    };
    let launch = Launch {
        grid: (num_tiles(product, tile.rows(), tile.columns())?, 1, 1),
        block: tile.threads(),
        shared_bytes: tile.shared_bytes(),
    };
    // SAFETY: the arguments of the kernel; A and B are in whole vectors.
    unsafe { cuda.launch(kernel, launch, Arguments::new().value(&params)) }
}

fn gemv(cuda: &CudaContext, product: &Product, choice: Choice) -> Result<()> {
    let Product { dtype, m, n, k, a, b, c, alpha, beta, .. } = *product;
    let (kernel, rows, block) = match choice {
        Choice::Gemv(1) => (kernels::GEMV_M1.of(dtype), 2, 128),
        Choice::Gemv(2) => (kernels::GEMV_M2.of(dtype), 2, 128),
        Choice::Gemv(4) => (kernels::GEMV_M4.of(dtype), 2, 128),
        Choice::Gemv(_) => (kernels::GEMV_M8.of(dtype), 2, 128),
        Choice::GemvColumns(most) => (
            match most {
                1 => kernels::GEMV_NN_M1.of(dtype),
                _ => kernels::GEMV_NN_M8.of(dtype),
            },
            64 / dtype.size_bytes() as u64,
            512,
        ),
        _ => (kernels::GEMV_TENSOR_CORE.of_half(dtype)?, 16, 256),
    };
    let params = GemvParams {
        x: a.data,
        w: b.data,
        out: c.data,
        ldx: a.ld,
        ldw: b.ld,
        ldo: c.ld,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        alpha,
        beta,
    };
    let grid = u32::try_from((n as u64).div_ceil(rows)).map_err(|_| too_large(product))?;
    let arguments = Arguments::new().value(&params);
    // SAFETY: the arguments of the kernel; the choice has checked rows and alignment.
    unsafe { cuda.launch(kernel, Launch::linear(grid, block), arguments) }
}

fn cublas(cuda: &CudaContext, product: &Product) -> Result<()> {
    let Product { dtype, m, n, k, batch, a, b, c, alpha, beta, bias } = *product;
    let size = dtype.size_bytes() as i64;
    // These are the addresses and the steps to other addresses, all combined.
    let all = [a, b, c].iter().fold(16, |all, x| {
        let step = if batch == 1 { 0 } else { x.batch_stride * size };
        all | x.data as usize | step as usize
    });
    let shape = MatmulShape {
        dtype,
        transpose_a: a.transposed,
        transpose_b: b.transposed,
        m: m as u64,
        n: n as u64,
        k: k as u64,
        lda: a.ld,
        ldb: b.ld,
        ldc: c.ld,
        batch: i32::try_from(batch).map_err(|_| too_large(product))?,
        batch_stride_a: a.batch_stride,
        batch_stride_b: b.batch_stride,
        batch_stride_c: c.batch_stride,
        has_bias: !bias.is_null(),
        alignment: 1 << all.trailing_zeros(),
    };
    // SAFETY: the matrices and the bias were checked; C overlaps none of them.
    unsafe { cuda.blas()?.matmul(&shape, alpha, a.data, b.data, beta, c.data, bias) }
}
