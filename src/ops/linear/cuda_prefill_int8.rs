//! Linear layers of prompts on Hopper whose weights and activations are both integers of 8 bits:
//! `csrc/ops/linear/prefill_int8.cu`. The rows of the weight are made for the time of the product.

use super::cuda_prefill::{PrefillParams, Shape};
use crate::backend::cuda::{kernel_struct, kernels, Arguments, Kernel, TensorMap};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::Epilogue;
use crate::ops::quantised::cuda::QuantisedTiles;
use crate::ops::quantised::cuda_integers::{has_integers, integer_rows_bytes, integers};
use crate::ops::quantised::tiles::{TileLayout, TILE_ROWS};

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct PrefillInt8Params {
        gemm: PrefillParams,
        x_scales: *mut u8,
        scales: *mut u8,
        bias: *mut u8,
        num_rows: i32,
        padding: [i32; 9],
    }
}

/// From this many tokens on a product takes less time than one by the codes of the weight with activations as
/// they are: with the layers of Qwen3-8B and 1.7B as long at 256, of 14B at 200, of 0.6B at 300 (H200).
pub const MIN_INT8_TOKENS: usize = 257;
/// The rows of a weight in a box that one block copies.
const WEIGHT_BOX: usize = 64;
/// The most products that a sum may have: beyond, the largest codes might not fit into it.
const MAX_INPUTS: usize = (i32::MAX / (127 * 128)) as usize;

/// Whether the chip and the build have the kernels of this file.
pub fn has_prefill_int8(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability == (9, 0)
        && cuda.has_kernel(kernels::LINEAR_PREFILL_INT8_PLAIN_128X128_M.bf16)?)
}

/// Whether [`linear_prefill_int8`] serves a weight.
pub fn is_prefill_int8_weight(layout: &TileLayout) -> bool {
    let n = layout.out_features() / if layout.is_gated() { 2 } else { 1 };
    has_integers(layout) && layout.in_features() <= MAX_INPUTS && n.is_multiple_of(8) && n > 0
}

/// Returns the device memory of a product of `num_rows` rows and a weight of these sizes.
pub(super) fn prefill_int8_bytes(
    num_rows: usize,
    out_features: usize,
    in_features: usize,
) -> usize {
    // Gate and up may both end within a tile. The allocator rounds up to multiples of 512 bytes.
    let rows = out_features.saturating_add(2 * TILE_ROWS);
    integer_rows_bytes(rows, in_features)
        .saturating_add(integer_rows_bytes(num_rows, in_features))
        .saturating_add(1024)
}

fn kernel(shape: &str, dtype: DType, is_gated: bool) -> Option<Kernel> {
    let kernel = match (shape, is_gated) {
        ("128x256_m", true) => kernels::LINEAR_PREFILL_INT8_SWIGLU_128X256_M,
        ("128x256_n", true) => kernels::LINEAR_PREFILL_INT8_SWIGLU_128X256_N,
        ("128x192_m", true) => kernels::LINEAR_PREFILL_INT8_SWIGLU_128X192_M,
        ("128x192_n", true) => kernels::LINEAR_PREFILL_INT8_SWIGLU_128X192_N,
        ("128x128_m", true) => kernels::LINEAR_PREFILL_INT8_SWIGLU_128X128_M,
        ("128x128_n", true) => kernels::LINEAR_PREFILL_INT8_SWIGLU_128X128_N,
        ("128x256_m", false) => kernels::LINEAR_PREFILL_INT8_PLAIN_128X256_M,
        ("128x256_n", false) => kernels::LINEAR_PREFILL_INT8_PLAIN_128X256_N,
        ("128x192_m", false) => kernels::LINEAR_PREFILL_INT8_PLAIN_128X192_M,
        ("128x192_n", false) => kernels::LINEAR_PREFILL_INT8_PLAIN_128X192_N,
        ("128x128_m", false) => kernels::LINEAR_PREFILL_INT8_PLAIN_128X128_M,
        ("128x128_n", false) => kernels::LINEAR_PREFILL_INT8_PLAIN_128X128_N,
        _ => return None,
    };
    kernel.of(dtype)
}

/// Computes the product of x [num_tokens, in_features], which is quantised with a scale for each token,
/// and a weight that [`is_prefill_int8_weight`] accepts into out [num_tokens, out_features] (half of them
/// with [`Epilogue::SwiGlu`]; not with [`Epilogue::AddResidual`]), of f16 or bf16. A bias is for
/// [`Epilogue::Store`]. A token's bits depend on the token and the weight alone.
pub fn linear_prefill_int8(
    context: &ComputeContext,
    x: &Tensor,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let layout = weight.layout();
    let k = layout.in_features();
    check("x", x, out.element(), &[num_tokens.into(), k as i64])?;
    let is_gated = epilogue == Epilogue::SwiGlu;
    let expected = if is_gated { 2 * i64::from(n) } else { i64::from(n) };
    if let Some(bias) = bias {
        check("bias", bias, out.element(), &[n.into()])?;
    }
    let is_served = is_prefill_int8_weight(layout)
        && layout.out_features() as i64 == expected
        && layout.is_gated() == is_gated
        && epilogue != Epilogue::AddResidual
        && (bias.is_none() || epilogue == Epilogue::Store)
        && (out.data() as usize | bias.map_or(0, |bias| bias.data() as usize)).is_multiple_of(16);
    if !is_served {
        return Err(Error::internal(format!(
            "no product of integers of {num_tokens} tokens with {layout:?} in {dtype}"
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let shape = Shape::choose_wide(num_tokens.into(), expected, processors);
    let Some(kernel) = kernel(shape.name, dtype, is_gated) else {
        return Err(Error::internal(format!("no kernel {} for integers", shape.name)));
    };
    let (tokens, rows) = integers(context, x, weight)?;
    // SAFETY: the codes of both have these sizes; both are kept until the product is queued, and what is
    // queued later on the stream takes their memory.
    let (weight_map, x_map) = unsafe {
        let token_box = shape.token_box() as usize;
        (
            TensorMap::swizzled_bytes(cuda, rows.codes(), [rows.num_rows(), k], WEIGHT_BOX)?,
            TensorMap::swizzled_bytes(cuda, tokens.codes(), [tokens.num_rows(), k], token_box)?,
        )
    };
    let params = PrefillInt8Params {
        gemm: PrefillParams {
            weight: weight_map,
            x: x_map,
            out: out.data(),
            ldo: n.into(),
            num_tokens: num_tokens as i32,
            n,
            k: k as i32,
            padding: [0; 7],
        },
        x_scales: tokens.scales(),
        scales: rows.scales(),
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        num_rows: rows.num_rows() as i32,
        padding: [0; 9],
    };
    let launch = shape.launch(num_tokens.into(), expected, processors);
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
    // maps, the scales are those of their rows, and the stores are bounded by num_tokens and n.
    unsafe { cuda.launch_clusters(kernel, launch, shape.blocks() as u32, arguments) }
}
