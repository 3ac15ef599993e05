//! The memory of all keys and values: blocks of [`BLOCK_SIZE`](crate::ops::BLOCK_SIZE) tokens.
//!
//! Which sequence owns which block is the engine's business. A block holds its tokens' keys and
//! values of all layers, so memory is committed by the system block by block, as they are first
//! used.

use crate::error::{Error, Result};
use crate::memory::{HostBuffer, Pages};
use crate::ops::{KvBlocks, KvLayout};

/// The cache of one model.
#[derive(Debug)]
pub struct KvCache {
    layout: KvLayout,
    num_blocks: usize,
    buffer: HostBuffer,
}

impl KvCache {
    /// A cache of `num_blocks` blocks.
    pub fn new(layout: KvLayout, num_blocks: usize) -> Result<Self> {
        layout.validate()?;
        let len_bytes = layout
            .block_bytes()
            .checked_mul(num_blocks)
            .ok_or_else(|| Error::out_of_memory("the KV cache", usize::MAX))?;
        let buffer = HostBuffer::zeroed(len_bytes, Pages::Huge)?;
        Ok(KvCache { layout, num_blocks, buffer })
    }

    /// What a block looks like.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// How many blocks there are.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes reserved.
    pub fn size_bytes(&self) -> usize {
        self.buffer.len_bytes()
    }

    /// The blocks as the ops see them, of one layer.
    pub(super) fn layer(&mut self, layer: usize) -> Result<KvBlocks<'_>> {
        KvBlocks::new(self.layout, self.buffer.as_bytes_mut(), layer)
    }
}
