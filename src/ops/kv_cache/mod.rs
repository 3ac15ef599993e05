//! The paged KV cache: its layout, and keys and values on their way into it and between host and
//! device.

pub mod cpu;
pub mod cuda;
pub mod cuda_swap;
pub mod layout;

use crate::memory::Tensor;

/// The destination of keys and values.
#[derive(Clone, Copy, Debug)]
pub struct KvSlots<'a> {
    /// The keys, [num_blocks, block_size, num_kv_heads, head_stride].
    pub k: &'a Tensor,
    /// The values, of the same shape.
    pub v: &'a Tensor,
    /// The slot of each token, `block * block_size + offset`, [num_tokens], unsigned 32-bit
    /// numbers. Copied from the host like [`QkNormRope::positions`].
    pub slots: &'a Tensor,
}
