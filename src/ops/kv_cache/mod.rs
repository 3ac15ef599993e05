//! The paged KV cache: its layout, and keys and values on their way into it and between host and
//! device.

pub mod cpu;
pub mod cuda;
pub mod cuda_swap;
pub mod layout;
pub mod widen;

use crate::error::Result;
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::check;

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

impl KvSlots<'_> {
    /// Checks that both caches have `shape`, and elements of the new keys and values or floats of 8
    /// bits; returns whether the latter.
    pub(in crate::ops) fn is_fp8(&self, element: ElementType, shape: &[i64]) -> Result<bool> {
        let stored = match self.k.element() {
            ElementType::Fp8 => ElementType::Fp8,
            _ => element,
        };
        check("the key cache", self.k, stored, shape)?;
        check("the value cache", self.v, stored, shape)?;
        Ok(stored == ElementType::Fp8)
    }
}
