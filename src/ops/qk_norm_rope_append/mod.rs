//! The steps between the projection and the attention, rounded after each: RMSNorm of each head of q
//! and k where a model has it, rotary embedding (Su et al., 2021, split-half pairs), and keys and
//! values into the cache.

pub mod cpu;

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float};
use crate::ops::kv_cache::KvSlots;

/// The normalisation and rotation of heads. All tensors but the positions have the heads' type.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// The norms; without them heads are only rotated.
    pub norms: Option<QkNorms<'a>>,
    /// The cosines, [max_position, head_dim / 2], from [`rope_tables`].
    pub cos: &'a Tensor,
    /// The sines, of the same shape.
    pub sin: &'a Tensor,
    /// The position of each token, i32 [num_tokens], copied from the host: they are read while
    /// preceding kernels are still running.
    pub positions: &'a Tensor,
}

/// The RMSNorms of heads.
#[derive(Clone, Copy, Debug)]
pub struct QkNorms<'a> {
    /// The weight of the norm of q, [head_dim].
    pub q: &'a Tensor,
    /// The weight of the norm of k, [head_dim].
    pub k: &'a Tensor,
    /// The epsilon, inside the root.
    pub eps: f32,
}

/// The norms as kernels take them: null where there are none.
#[derive(Clone, Copy)]
pub(in crate::ops) struct NormPointers {
    pub q: *mut u8,
    pub k: *mut u8,
    pub eps: f32,
}

impl QkNormRope<'_> {
    /// Returns the number of elements of a head.
    pub(in crate::ops) fn head_dim(&self) -> i64 {
        2 * self.cos.width()
    }

    /// Checks the tensors against heads of `element` for `num_tokens` tokens, and returns the norms
    /// as kernels take them.
    pub(in crate::ops) fn check(
        &self,
        element: ElementType,
        num_tokens: i64,
        head_dim: i64,
    ) -> Result<NormPointers> {
        let max_position = size(self.cos, 0);
        check("cos", self.cos, element, &[max_position, head_dim / 2])?;
        check("sin", self.sin, element, &[max_position, head_dim / 2])?;
        check("positions", self.positions, ElementType::I32, &[num_tokens])?;
        let Some(QkNorms { q, k, eps }) = self.norms else {
            let none = std::ptr::null_mut();
            return Ok(NormPointers { q: none, k: none, eps: 0.0 });
        };
        check("q_norm", q, element, &[head_dim])?;
        check("k_norm", k, element, &[head_dim])?;
        Ok(NormPointers { q: q.data(), k: k.data(), eps })
    }
}

kernel_struct! {
    /// `csrc/ops/qk_norm_rope_append/qk_norm_rope_append.cu` has the same struct and documents its
    /// fields.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct QkNormRopeAppendArgs {
        qkv: *mut u8,
        q_norm: *mut u8,
        k_norm: *mut u8,
        cos: *mut u8,
        sin: *mut u8,
        positions: *mut u8,
        slots: *mut u8,
        k_cache: *mut u8,
        v_cache: *mut u8,
        fault: *mut u8,
        num_slots: i64,
        num_heads: i32,
        num_kv_heads: i32,
        head_dim: i32,
        head_stride: i32,
        max_position: i32,
        eps: f32,
    }
}

/// The number of threads of a block.
const THREADS: u32 = 256;
/// The longest head that a warp holds; the kernel takes it from here.
pub(in crate::ops) const MAX_HEAD_DIM: i64 = 256;

fn size(tensor: &Tensor, dimension: usize) -> i64 {
    tensor.shape().get(dimension).copied().unwrap_or(0)
}

/// Normalises (where there are norms) and rotates the heads and appends to the cache; see the head of
/// the file. qkv
/// [num_tokens, num_heads + 2 num_kv_heads, head_stride] is contiguous: q becomes the rotated
/// queries, k and v stay. Only the first head_dim elements of each head are in use, the others are
/// zero.
pub fn qk_norm_rope_append(
    context: &ComputeContext,
    qkv: &Tensor,
    how: &QkNormRope<'_>,
    kv: &KvSlots<'_>,
) -> Result<()> {
    let (element, dtype) = (qkv.element(), float("qkv", qkv)?);
    let (num_tokens, total_heads, stride) = (size(qkv, 0), size(qkv, 1), size(qkv, 2));
    let (head_dim, max_position) = (how.head_dim(), size(how.cos, 0));
    let (num_blocks, block_size, num_kv_heads) = (size(kv.k, 0), size(kv.k, 1), size(kv.k, 2));
    let num_heads = total_heads - 2 * num_kv_heads;
    check("qkv", qkv, element, &[num_tokens, total_heads, stride])?;
    let norms = how.check(element, num_tokens, head_dim)?;
    check("slots", kv.slots, ElementType::I32, &[num_tokens])?;
    let cache_shape = [num_blocks, block_size, num_kv_heads, stride];
    let is_fp8 = kv.is_fp8(element, &cache_shape)?;
    if num_heads < 0 || head_dim > stride.min(MAX_HEAD_DIM) || head_dim % 2 != 0 || stride % 4 != 0
    {
        return Err(Error::internal(format!("heads of {head_dim} elements, {stride} apart")));
    }
    if num_tokens == 0 || total_heads == 0 {
        return Ok(());
    }
    let int = |value: i64| {
        i32::try_from(value).map_err(|_| Error::unsupported(format!("a size of {value}")))
    };
    let cuda = cuda(context)?;
    let arguments = QkNormRopeAppendArgs {
        qkv: qkv.data(),
        q_norm: norms.q,
        k_norm: norms.k,
        cos: how.cos.data(),
        sin: how.sin.data(),
        positions: how.positions.data(),
        slots: kv.slots.data(),
        k_cache: kv.k.data(),
        v_cache: kv.v.data(),
        fault: cuda.faults(),
        num_slots: num_blocks * block_size,
        num_heads: int(num_heads)?,
        num_kv_heads: int(num_kv_heads)?,
        head_dim: int(head_dim)?,
        head_stride: int(stride)?,
        max_position: int(max_position)?,
        eps: norms.eps,
    };
    use kernels::*;
    let (dense, fp8, lanes) = match head_dim {
        128 if stride == 128 => (QK_NORM_ROPE_APPEND_128, QK_NORM_ROPE_APPEND_FP8_128, 16),
        64 if stride == 64 => (QK_NORM_ROPE_APPEND_64, QK_NORM_ROPE_APPEND_FP8_64, 8),
        _ if head_dim % 4 == 0 => (QK_NORM_ROPE_APPEND_VEC, QK_NORM_ROPE_APPEND_FP8_VEC, 32),
        _ => (QK_NORM_ROPE_APPEND_SCALAR, QK_NORM_ROPE_APPEND_FP8_SCALAR, 32),
    };
    let kernel = if is_fp8 { fp8 } else { dense };
    let parts = (int(total_heads)? as u32).div_ceil(THREADS / lanes);
    if parts > 65535 {
        return Err(Error::unsupported(format!("{total_heads} heads are too many")));
    }
    let launch =
        Launch { grid: (int(num_tokens)? as u32, parts, 1), block: THREADS, shared_bytes: 0 };
    // SAFETY: the argument of the kernel; the shapes were checked above, and the kernel follows no
    // position or slot beyond them.
    unsafe {
        let arguments = Arguments::new().value(&arguments);
        cuda.launch_overlapping(kernel.of(dtype), launch, arguments)
    }
}
