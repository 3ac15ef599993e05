//! The layout of the KV cache: blocks of 32 tokens, in the panels that the matrix kernel
//! multiplies.
//!
//! Block-major: `[num_blocks][num_layers][num_kv_heads]` of a key panel and a value panel, so that
//! the system commits memory block by block. For one head of one layer:
//!
//! * keys: `[head_dim][32]`, bf16 `[head_dim / 2][32][2]`: scores are q times this panel;
//! * values: `[32][value_columns]`, bf16 `[16][value_columns][2]` (pairs of tokens), with
//!   `value_columns` the head_dim rounded up to 16: the output is the weights times this panel.
//!
//! A cache of 8-bit floats has a byte in the place of each number of the type computed with.

use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Plain};
use std::marker::PhantomData;

/// The number of tokens of a block.
pub const BLOCK_SIZE: usize = 32;
/// The largest head that the attention kernel has room for.
pub const MAX_HEAD_DIM: usize = 256;

/// What the numbers of keys and values are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    /// The type that is computed with.
    #[default]
    Dense,
    /// Floats of 8 bits (e4m3fn of the OCP standard), without a scale: numbers beyond 448 become
    /// 448. Attention makes numbers of the type that is computed with of them, exactly.
    Fp8,
}

/// The shape of a KV cache, from which all its sizes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// The element type that keys and values are computed with.
    pub dtype: DType,
    /// What they are stored as.
    pub format: KvFormat,
    /// The number of layers of the model.
    pub num_layers: usize,
    /// The number of key and value heads of a layer.
    pub num_kv_heads: usize,
    /// The number of elements of a head: even, up to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
}

impl KvLayout {
    /// Checks the head_dim and that all sizes stay far below the address space.
    pub fn validate(&self) -> Result<()> {
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) || self.head_dim > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "head_dim {} is not an even number from 2 to {MAX_HEAD_DIM}",
                self.head_dim
            )));
        }
        let heads = self.num_layers.checked_mul(self.num_kv_heads);
        if heads.is_none_or(|heads| heads == 0 || heads > 1 << 24) {
            return Err(Error::unsupported(format!(
                "a KV cache of {} layers of {} heads",
                self.num_layers, self.num_kv_heads
            )));
        }
        Ok(())
    }

    /// Returns the number of columns of a value panel.
    pub(crate) fn value_columns(&self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Returns the number of elements of a key panel.
    pub(crate) fn key_len(&self) -> usize {
        self.head_dim * BLOCK_SIZE
    }

    /// Returns the number of elements of a key panel and a value panel together.
    pub(crate) fn head_len(&self) -> usize {
        (self.head_dim + self.value_columns()) * BLOCK_SIZE
    }

    /// Returns the bytes of one block: all layers of 32 tokens.
    pub fn block_bytes(&self) -> usize {
        self.num_layers * self.num_kv_heads * self.head_len() * self.element().size_bytes()
    }

    /// Returns what an element is stored as.
    pub fn element(&self) -> ElementType {
        match self.format {
            KvFormat::Dense => ElementType::Float(self.dtype),
            KvFormat::Fp8 => ElementType::Fp8,
        }
    }

    /// Returns the bytes that one token takes.
    pub fn bytes_per_token(&self) -> usize {
        self.block_bytes() / BLOCK_SIZE
    }
}

/// One layer of a KV cache.
pub struct KvBlocks<'a> {
    layout: KvLayout,
    layer: usize,
    num_blocks: usize,
    start: *mut u8,
    _bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view of a `&mut [u8]`, which may be sent; all writing goes through `&mut self`.
unsafe impl Send for KvBlocks<'_> {}
// SAFETY: `&KvBlocks` only gives out `*const` panels.
unsafe impl Sync for KvBlocks<'_> {}

impl<'a> KvBlocks<'a> {
    /// Returns layer `layer` of the cache in `bytes`, which holds whole blocks.
    pub fn new(layout: KvLayout, bytes: &'a mut [u8], layer: usize) -> Result<Self> {
        layout.validate()?;
        if layer >= layout.num_layers {
            return Err(Error::internal(format!(
                "layer {layer} of a KV cache of {} layers",
                layout.num_layers
            )));
        }
        if !(bytes.as_ptr() as usize).is_multiple_of(4) {
            return Err(Error::internal("the KV cache is not aligned to 4 bytes"));
        }
        let num_blocks = bytes.len() / layout.block_bytes();
        Ok(KvBlocks { layout, layer, num_blocks, start: bytes.as_mut_ptr(), _bytes: PhantomData })
    }

    /// Returns the shape of the cache.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Returns the byte offset of the key panel of a head; the value panel follows it.
    ///
    /// # Panics
    /// If the block or the head is out of range: a caller has checked its indices before.
    #[inline(always)]
    fn offset(&self, block: usize, kv_head: usize) -> usize {
        assert!(block < self.num_blocks && kv_head < self.layout.num_kv_heads);
        let head = self.layer * self.layout.num_kv_heads + kv_head;
        block * self.layout.block_bytes()
            + head * self.layout.head_len() * self.layout.element().size_bytes()
    }

    /// Returns the key and the value panel of a head.
    #[inline(always)]
    pub(crate) fn panels<T: Plain>(&self, block: usize, kv_head: usize) -> (&[T], &[T]) {
        debug_assert_eq!(size_of::<T>(), self.layout.element().size_bytes());
        let offset = self.offset(block, kv_head);
        // SAFETY: the range lies in block `block` of the borrowed bytes (checked in `offset`), is
        // aligned (the start to 4, all sizes are multiples of 32 elements), and is not written
        // meanwhile: callers of `panels_mut` have the cache exclusively.
        let both = unsafe {
            std::slice::from_raw_parts(self.start.add(offset).cast::<T>(), self.layout.head_len())
        };
        both.split_at(self.layout.key_len())
    }

    /// Returns the key and the value panel of a head for writing.
    ///
    /// # Safety
    /// No other reference to the panels of this block and head lives at the same time, and the
    /// caller has the cache exclusively (`&mut KvBlocks`).
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn panels_mut<T: Plain>(
        &self,
        block: usize,
        kv_head: usize,
    ) -> (&mut [T], &mut [T]) {
        debug_assert_eq!(size_of::<T>(), self.layout.element().size_bytes());
        let offset = self.offset(block, kv_head);
        // SAFETY: as in `panels`; the caller vouches that nobody else uses these panels.
        let both = unsafe {
            std::slice::from_raw_parts_mut(
                self.start.add(offset).cast::<T>(),
                self.layout.head_len(),
            )
        };
        both.split_at_mut(self.layout.key_len())
    }
}
