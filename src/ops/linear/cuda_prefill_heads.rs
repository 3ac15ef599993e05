//! The projection to queries, keys and values for prompts on Hopper, fused with what is done to the
//! heads next: the product of [`super::linear_prefill`], whose sums are treated as by
//! [`super::qk_norm_rope_append()`].

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Kernel, Launch, TensorMap};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::kv_cache::KvSlots;
use crate::ops::linear::cuda_prefill::{is_prefill_faster, PrefillParams, Shape};
use crate::ops::linear::cuda_skinny::{is_skinny_weight, weight_map};
use crate::ops::linear::Epilogue;
use crate::ops::qk_norm_rope_append::QkNormRope;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct PrefillHeadsParams {
        gemm: PrefillParams,
        q_norm: *mut u8,
        k_norm: *mut u8,
        cos: *mut u8,
        sin: *mut u8,
        positions: *mut u8,
        slots: *mut u8,
        k_cache: *mut u8,
        v_cache: *mut u8,
        bias: *mut u8,
        fault: *mut u8,
        num_slots: i64,
        num_heads: i32,
        num_kv_heads: i32,
        max_position: i32,
        eps: f32,
        padding: [i32; 6],
    }
}

/// The number of elements of a head, and of rows of a tile.
const HEAD_DIM: i64 = 128;

/// Returns the shape of the kernel for `num_tokens` tokens, if the tiles that are best for the
/// product are heads.
fn shape(num_tokens: i64, rows: i64, k: i64, num_multiprocessors: i64) -> Option<Shape> {
    let shape = Shape::choose(num_tokens, rows, k, true, num_multiprocessors);
    (shape.rows == HEAD_DIM).then_some(shape)
}

fn kernel(shape: Shape, dtype: DType) -> Option<Kernel> {
    match shape.name {
        "128x128_m" => kernels::LINEAR_PREFILL_HEADS_128X128_M.of(dtype),
        "128x128_n" => kernels::LINEAR_PREFILL_HEADS_128X128_N.of(dtype),
        _ => None,
    }
}

/// Whether [`linear_prefill_heads`] serves this number of tokens, the weight and heads of `head_dim`
/// elements, `head_stride` apart, and is faster than the product and the rest as separate kernels.
/// Measured on an H100 with the layers of Qwen3-0.6B.
pub fn is_prefill_heads_faster(
    context: &ComputeContext,
    num_tokens: usize,
    weight: &Tensor,
    head_dim: usize,
    head_stride: usize,
) -> bool {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    let Ok(cuda) = cuda(context) else { return false };
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    [head_dim, head_stride].map(|size| size as i64) == [HEAD_DIM; 2]
        && is_prefill_faster(num_tokens, weight, Epilogue::Store)
        && shape(num_tokens as i64, rows, k, processors).is_some()
}

/// Computes the product of x [num_tokens, in_features] and `weight` [(num_heads + 2 num_kv_heads) *
/// 128, in_features], with `bias` [out_features] added where heads have one and no norms, rounded, and
/// treats its heads as [`super::qk_norm_rope_append()`] does:
/// normalised and rotated queries go to qkv [num_tokens, num_heads + 2 num_kv_heads, 128], the rest
/// of which stays as it is; normalised and rotated keys, and values, go to the cache. All are of
/// f16 or bf16. A token's bits depend only on the token, its position and the weights.
pub fn linear_prefill_heads(
    context: &ComputeContext,
    x: &Tensor,
    weight: &DeviceTensor,
    bias: Option<&Tensor>,
    how: &QkNormRope<'_>,
    kv: &KvSlots<'_>,
    qkv: &Tensor,
) -> Result<()> {
    let (element, dtype) = (qkv.element(), float("qkv", qkv)?);
    let ((num_tokens, k), (n, _)) = (matrix_size("x", x)?, matrix_size("weight", weight)?);
    let size = |tensor: &Tensor, i: usize| tensor.shape().get(i).copied().unwrap_or(0);
    let (max_position, num_blocks, block_size) = (size(how.cos, 0), size(kv.k, 0), size(kv.k, 1));
    let num_kv_heads = size(kv.k, 2);
    let total_heads = i64::from(n) / HEAD_DIM;
    let num_heads = total_heads - 2 * num_kv_heads;
    check("x", x, element, &[num_tokens.into(), k.into()])?;
    check("weight", weight, element, &[total_heads * HEAD_DIM, k.into()])?;
    check("qkv", qkv, element, &[num_tokens.into(), total_heads, HEAD_DIM])?;
    let norms = how.check(element, num_tokens.into(), HEAD_DIM)?;
    if let Some(bias) = bias {
        check("bias", bias, element, &[n.into()])?;
        if how.norms.is_some() {
            return Err(Error::internal("a bias of heads that are normalised"));
        }
    }
    check("slots", kv.slots, ElementType::I32, &[num_tokens.into()])?;
    let cache_shape = [num_blocks, block_size, num_kv_heads, HEAD_DIM];
    check("the key cache", kv.k, element, &cache_shape)?;
    check("the value cache", kv.v, element, &cache_shape)?;
    if num_tokens == 0 {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let shape = shape(num_tokens.into(), n.into(), k.into(), processors);
    let found = shape.and_then(|shape| Some((shape, kernel(shape, dtype)?)));
    let is_served = is_skinny_weight(weight, Epilogue::Store) && num_heads >= 0;
    let int = |value: i64| i32::try_from(value).ok();
    let sizes = (int(num_heads), int(num_kv_heads), int(max_position));
    let (Some((shape, kernel)), true, (Some(num_heads), Some(num_kv_heads), Some(max_position))) =
        (found, is_served, sizes)
    else {
        return Err(Error::internal(format!(
            "no kernel for the heads of {num_tokens} x {n} x {k}"
        )));
    };
    let params = PrefillHeadsParams {
        gemm: PrefillParams {
            weight: weight_map(cuda, weight, n as usize, k as usize, false)?,
            x: TensorMap::new(cuda, x, &[shape.token_box(), 64])?,
            out: qkv.data(),
            ldo: n.into(),
            num_tokens: num_tokens as i32,
            n: n as i32,
            k,
            padding: [0; 7],
        },
        q_norm: norms.q,
        k_norm: norms.k,
        cos: how.cos.data(),
        sin: how.sin.data(),
        positions: how.positions.data(),
        slots: kv.slots.data(),
        k_cache: kv.k.data(),
        v_cache: kv.v.data(),
        bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
        fault: cuda.faults(),
        num_slots: num_blocks * block_size,
        num_heads,
        num_kv_heads,
        max_position,
        eps: norms.eps,
        padding: [0; 6],
    };
    let launch: Launch = shape.launch(num_tokens.into(), n.into(), processors);
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
    // maps, the stores are bounded by num_tokens and n, and the kernel follows no position or slot
    // beyond the shapes checked above.
    unsafe { cuda.launch_clusters(kernel, launch, shape.blocks() as u32, arguments) }
}
