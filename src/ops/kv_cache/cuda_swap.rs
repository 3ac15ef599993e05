//! Blocks of the paged cache to pinned memory of the host and back: `csrc/ops/kv_cache/swap.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::{ComputeContext, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::Tensor;
use crate::ops::common::contiguous::{check, cuda};

/// The number of threads of a block of the kernel.
const THREADS: u32 = 256;
/// The most copies of a launch: kernels take 4 KiB of arguments.
pub const MAX_KV_COPIES: usize = 240;
/// The number of bytes of an access.
const UNIT_BYTES: usize = 16;

kernel_struct! {
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct KvSwapCopy {
        host: u64,
        block: i32,
        padding: i32,
    }
}

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct KvSwapParams {
        cache: *mut u8,
        part_units: i64,
        block_units: i32,
        to_host: i32,
        copies: [KvSwapCopy; MAX_KV_COPIES],
    }
}

/// The blocks of a cache on a device: `[num_parts, num_blocks, block_bytes]`, where the keys and
/// the values of each layer are a part each.
#[derive(Clone, Copy, Debug)]
pub struct KvParts<'a> {
    first: &'a Tensor,
    num_parts: usize,
    num_blocks: usize,
    /// The bytes of a block in one part.
    block_bytes: usize,
}

impl<'a> KvParts<'a> {
    /// The parts are tensors `[num_blocks, ...]` of one shape, contiguous, one after another
    /// without gaps.
    pub fn new(mut parts: impl Iterator<Item = &'a Tensor>) -> Result<Self> {
        let none = || Error::internal("a KV cache without layers");
        let first = parts.next().ok_or_else(none)?;
        let num_blocks = first.shape().first().map_or(0, |&n| n as usize);
        let len = first.size_bytes();
        let block_bytes = len.checked_div(num_blocks).ok_or_else(none)?;
        check("the keys", first, first.element(), first.shape())?;
        let mut num_parts = 1;
        for part in parts {
            check("keys or values", part, first.element(), first.shape())?;
            if part.data() as usize != first.data() as usize + num_parts * len {
                return Err(Error::internal("a KV cache with gaps"));
            }
            num_parts += 1;
        }
        Ok(KvParts { first, num_parts, num_blocks, block_bytes })
    }

    /// Returns the bytes of a block in all parts.
    pub fn place_bytes(&self) -> usize {
        self.num_parts * self.block_bytes
    }
}

/// A block, and its place on the host: `[num_parts, block_bytes]` from byte `offset` of a buffer
/// on.
#[derive(Clone, Copy, Debug)]
pub struct KvCopy {
    /// Its number in the cache.
    pub block: u32,
    /// The number of its buffer on the host.
    pub buffer: usize,
    /// The byte at which it begins in the buffer.
    pub offset: usize,
}

/// Queues the copies of up to [`MAX_KV_COPIES`] blocks to or from their places in `buffers`, in no
/// order: a place that is written twice may end up with either.
pub fn kv_cache_swap(
    context: &ComputeContext,
    parts: &KvParts<'_>,
    buffers: &mut [PinnedBuffer],
    copies: &[KvCopy],
    to_host: bool,
) -> Result<()> {
    let wrong = || Error::internal(format!("{} copies of blocks of {parts:?}", copies.len()));
    let num_parts = u32::try_from(parts.num_parts).map_err(|_| wrong())?;
    let block_units = i32::try_from(parts.block_bytes / UNIT_BYTES).map_err(|_| wrong())?;
    let start = parts.first.data();
    let are_units = (start as usize | parts.block_bytes).is_multiple_of(UNIT_BYTES);
    if copies.len() > MAX_KV_COPIES || !are_units {
        return Err(wrong());
    }
    if copies.is_empty() || block_units == 0 {
        return Ok(());
    }
    let mut params = KvSwapParams {
        cache: start,
        part_units: (parts.num_blocks * parts.block_bytes / UNIT_BYTES) as i64,
        block_units,
        to_host: i32::from(to_host),
        copies: [KvSwapCopy { host: 0, block: 0, padding: 0 }; MAX_KV_COPIES],
    };
    for (slot, copy) in params.copies.iter_mut().zip(copies) {
        let buffer = buffers.get_mut(copy.buffer).ok_or_else(wrong)?;
        let end = copy.offset.checked_add(parts.place_bytes());
        let fits = end.is_some_and(|end| end <= buffer.len_bytes())
            && (copy.block as usize) < parts.num_blocks;
        if !fits {
            return Err(wrong());
        }
        let host = buffer.device_address(copy.offset);
        if !host.is_multiple_of(UNIT_BYTES as u64) {
            return Err(wrong());
        }
        // This comes before the kernel is queued: the memory must not be freed before the kernel is
        // done, whatever happens here.
        buffer.set_in_use_unmarked();
        *slot = KvSwapCopy { host, block: copy.block as i32, padding: 0 };
    }
    let launch =
        Launch { grid: (num_parts, copies.len() as u32, 1), block: THREADS, shared_bytes: 0 };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel. The blocks are in the cache, whose parts lie as the
    // kernel expects and whose memory is reused only in the order of the stream; the places are in
    // their buffers, which wait for the device before anybody else uses them.
    unsafe { cuda(context)?.launch(kernels::KV_CACHE_SWAP, launch, arguments) }
}
