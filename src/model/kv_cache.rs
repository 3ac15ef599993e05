//! The memory of all keys and values: blocks of [`BLOCK_SIZE`](crate::ops::BLOCK_SIZE) tokens.
//!
//! Which sequence owns which block is the engine's business. On the host a block holds its tokens'
//! keys and values of all layers, so memory is committed by the system block by block, as they are
//! first used. On a device each layer has its keys and its values,
//! `[num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]`.

use crate::backend::{Arena, ComputeContext, DeviceTensor};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{HostBuffer, Pages};
use crate::ops::kv_cache::cuda_swap::KvParts;
use crate::ops::kv_cache::layout::{KvBlocks, KvLayout, BLOCK_SIZE};

/// The cache of one model.
#[derive(Debug)]
pub struct KvCache {
    layout: KvLayout,
    num_blocks: usize,
    memory: KvMemory,
}

#[derive(Debug)]
enum KvMemory {
    Host(HostBuffer),
    Device { layers: Vec<DeviceKvLayer>, len_bytes: usize },
}

/// The keys and the values of one layer on a device,
/// `[num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]`.
#[derive(Debug)]
pub(super) struct DeviceKvLayer {
    pub k: DeviceTensor,
    pub v: DeviceTensor,
}

/// The number of blocks on a device that no sequence gets: padding rows of a batch write to them.
const SPARE_BLOCKS: usize = 1;

fn len_bytes(layout: &KvLayout, num_blocks: usize) -> Result<usize> {
    layout.validate()?;
    layout
        .block_bytes()
        .checked_mul(num_blocks)
        .ok_or_else(|| Error::out_of_memory("the KV cache", usize::MAX))
}

impl KvCache {
    /// Allocates a cache of `num_blocks` blocks on the host.
    pub fn new(layout: KvLayout, num_blocks: usize) -> Result<Self> {
        let buffer = HostBuffer::zeroed(len_bytes(&layout, num_blocks)?, Pages::Huge)?;
        Ok(KvCache { layout, num_blocks, memory: KvMemory::Host(buffer) })
    }

    /// Allocates a cache of `num_blocks` blocks on the device of `context`.
    pub(super) fn on_device(
        context: &ComputeContext,
        layout: KvLayout,
        num_blocks: usize,
    ) -> Result<Self> {
        // Heads are whole vectors, so the layout's sizes are those of the device.
        let all_blocks = num_blocks.saturating_add(SPARE_BLOCKS);
        let len_bytes = len_bytes(&layout, all_blocks)?;
        let element = layout.element();
        let shape = [all_blocks, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim];
        let planned = Arena::bytes_for(element, &shape)?.checked_mul(2 * layout.num_layers);
        if planned != Some(len_bytes) {
            return Err(Error::internal("a KV cache with gaps"));
        }
        let mut arena = Arena::new(context, len_bytes, "the KV cache")?;
        let mut layers = try_with_capacity(layout.num_layers, "the KV cache")?;
        for _ in 0..layout.num_layers {
            let (k, v) = (arena.tensor(element, &shape)?, arena.tensor(element, &shape)?);
            layers.push(DeviceKvLayer { k, v });
        }
        Ok(KvCache { layout, num_blocks, memory: KvMemory::Device { layers, len_bytes } })
    }

    /// Returns the bytes of a cache on a device besides those of its blocks.
    pub(super) fn spare_bytes(layout: &KvLayout) -> usize {
        layout.block_bytes().saturating_mul(SPARE_BLOCKS)
    }

    /// Returns the layout of a block.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Returns the block on a device that no sequence gets.
    pub(super) fn spare_block(&self) -> u32 {
        self.num_blocks as u32
    }

    /// Returns the number of bytes reserved.
    pub fn size_bytes(&self) -> usize {
        match &self.memory {
            KvMemory::Host(buffer) => buffer.len_bytes(),
            KvMemory::Device { len_bytes, .. } => *len_bytes,
        }
    }

    /// Returns one layer of the blocks on the host, as the ops see them.
    pub(super) fn layer(&mut self, layer: usize) -> Result<KvBlocks<'_>> {
        match &mut self.memory {
            KvMemory::Host(buffer) => KvBlocks::new(self.layout, buffer.as_bytes_mut(), layer),
            KvMemory::Device { .. } => Err(Error::internal("the KV cache lies on a device")),
        }
    }

    /// Returns all layers of a block on the host.
    pub(super) fn host_block(&mut self, block: u32) -> Result<&mut [u8]> {
        let KvMemory::Host(buffer) = &mut self.memory else {
            return Err(Error::internal("the KV cache lies on a device"));
        };
        let bytes = self.layout.block_bytes();
        let start = (block as usize).saturating_mul(bytes);
        let block_bytes = buffer.as_bytes_mut().get_mut(start..start.saturating_add(bytes));
        block_bytes.ok_or_else(|| Error::internal(format!("block {block} of the KV cache")))
    }

    /// Returns the keys and values of all layers on a device.
    pub(super) fn device_parts(&self) -> Result<KvParts<'_>> {
        match &self.memory {
            KvMemory::Device { layers, .. } => {
                KvParts::new(layers.iter().flat_map(|layer| [&*layer.k, &*layer.v]))
            }
            KvMemory::Host(_) => Err(Error::internal("the KV cache lies on the host")),
        }
    }

    /// Returns one layer of the blocks on a device.
    pub(super) fn device_layer(&self, layer: usize) -> Result<&DeviceKvLayer> {
        match &self.memory {
            KvMemory::Device { layers, .. } => layers
                .get(layer)
                .ok_or_else(|| Error::internal(format!("layer {layer} of the KV cache"))),
            KvMemory::Host(_) => Err(Error::internal("the KV cache lies on the host")),
        }
    }
}
