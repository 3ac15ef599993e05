//! Keys and values of new tokens into the paged cache, bit for bit or as 8-bit floats: for models
//! whose heads are neither normalised nor rotated before.

use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float};
use crate::ops::kv_cache::KvSlots;

/// The number of bytes of an access.
const UNIT_BYTES: i64 = 16;

/// Computes `k_cache[slots[t]] = k[t]`, and the same for v. qkv [num_tokens, num_heads + 2
/// num_kv_heads, head_stride], contiguous, with heads of whole 16-byte units.
pub fn kv_cache_append(context: &ComputeContext, qkv: &Tensor, kv: &KvSlots<'_>) -> Result<()> {
    let (element, dtype) = (qkv.element(), float("qkv", qkv)?);
    let (&[num_tokens, total_heads, stride], &[num_blocks, block_size, num_kv_heads, _]) =
        (&**qkv.shape(), &**kv.k.shape())
    else {
        return Err(Error::internal(format!(
            "qkv has shape {} and the key cache {}",
            qkv.shape(),
            kv.k.shape()
        )));
    };
    check("qkv", qkv, element, &[num_tokens, total_heads, stride])?;
    check("slots", kv.slots, ElementType::I32, &[num_tokens])?;
    let cache_shape = [num_blocks, block_size, num_kv_heads, stride];
    let is_fp8 = kv.is_fp8(element, &cache_shape)?;
    let (num_heads, head_bytes) =
        (total_heads - 2 * num_kv_heads, stride * dtype.size_bytes() as i64);
    let are_units = [qkv, kv.k, kv.v]
        .iter()
        .all(|tensor| (tensor.data() as usize).is_multiple_of(UNIT_BYTES as usize));
    if num_heads < 0 || head_bytes % UNIT_BYTES != 0 || !are_units {
        return Err(Error::internal(format!("{total_heads} heads, {stride} elements apart")));
    }
    if num_tokens == 0 || num_kv_heads == 0 {
        return Ok(());
    }
    let int = |value: i64| {
        i32::try_from(value).map_err(|_| Error::unsupported(format!("a size of {value}")))
    };
    let units = |heads: i64| int(heads * head_bytes / UNIT_BYTES);
    let (q_units, kv_units) = (units(num_heads)?, units(num_kv_heads)?);
    // The kernel counts the units of keys and values together.
    let both_units = units(2 * num_kv_heads)?;
    let cuda = cuda(context)?;
    let arguments = Arguments::new()
        .tensor(kv.k)
        .tensor(kv.v)
        .tensor(qkv)
        .tensor(kv.slots)
        .pointer(cuda.faults())
        .i64(num_blocks * block_size)
        .i32(q_units)
        .i32(kv_units);
    let block = (both_units as u32).clamp(1, 512).next_multiple_of(32);
    let launch = Launch::linear(int(num_tokens)? as u32, block);
    let kernel =
        if is_fp8 { kernels::KV_CACHE_APPEND_FP8.of(dtype) } else { kernels::KV_CACHE_APPEND };
    // SAFETY: the arguments of the kernel; the shapes were checked above, and the kernel follows no
    // slot beyond the caches.
    unsafe { cuda.launch(kernel, launch, arguments) }
}
