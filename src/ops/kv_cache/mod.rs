//! The paged KV cache: its layout, and keys and values on their way into it and between host and device.

pub mod cpu;
pub mod cuda;
pub mod cuda_swap;
pub mod layout;

use crate::memory::Tensor;

/// Where keys and values go.
#[derive(Clone, Copy, Debug)]
pub struct KvSlots<'a> {
    /// [num_blocks, block_size, num_kv_heads, head_stride]
    pub k: &'a Tensor,
    /// The same.
    pub v: &'a Tensor,
    /// [num_tokens], of 32 bits without a sign: `block * block_size + offset`. Copied from the host as
    /// [`QkNormRope::positions`].
    pub slots: &'a Tensor,
}
