//! Blocks of the paged cache to pinned memory of the host and back: `csrc/ops/kv_cache_swap.cu`.

use super::cuda;
use crate::backend::cuda::{Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};

/// Threads of a block of the kernel.
const THREADS: u32 = 256;
/// The most copies of a launch: kernels take 4 KiB of arguments.
pub const MOST_KV_COPIES: usize = 240;
/// Bytes of an access.
const UNIT_BYTES: usize = 16;

#[repr(C)]
#[derive(Clone, Copy)]
struct KvSwapCopy {
    host: u64,
    block: i32,
    padding: i32,
}

/// The kernel has the same struct.
#[repr(C)]
#[derive(Clone, Copy)]
struct KvSwapParams {
    cache: *mut u8,
    part_units: i64,
    block_units: i32,
    to_host: i32,
    copies: [KvSwapCopy; MOST_KV_COPIES],
}
const _: () = assert!(size_of::<KvSwapParams>() == 24 + 16 * MOST_KV_COPIES);

/// Where the blocks of a cache lie: `[num_parts, num_blocks, block_bytes]`, the keys and the values of each layer
/// being a part.
#[derive(Clone, Copy, Debug)]
pub struct KvParts {
    /// The first byte of the first part, on the device.
    pub start: *mut u8,
    /// Keys and values of all layers.
    pub num_parts: usize,
    /// Blocks of each.
    pub num_blocks: usize,
    /// Bytes of a block of one part.
    pub block_bytes: usize,
}

/// Queues the copies of up to [`MOST_KV_COPIES`] blocks, in no order: each from or to the host's address beside it,
/// `[num_parts, block_bytes]`.
///
/// # Safety
/// The parts are memory of the context's device that holds what [`KvParts`] says; the addresses are pinned memory that
/// kernels of the device reach, of that size, which nobody else uses before the copies are done. No address is
/// there twice, nor is a block that is written.
pub unsafe fn kv_cache_swap(
    context: &ComputeContext,
    parts: &KvParts,
    copies: impl ExactSizeIterator<Item = (u32, u64)>,
    to_host: bool,
) -> Result<()> {
    let num_copies = copies.len();
    let wrong =
        || Err(Error::internal(format!("{num_copies} copies of blocks of the KV cache {parts:?}")));
    let (Ok(num_parts), Ok(block_units)) =
        (u32::try_from(parts.num_parts), i32::try_from(parts.block_bytes / UNIT_BYTES))
    else {
        return wrong();
    };
    let are_units = (parts.start as usize | parts.block_bytes).is_multiple_of(UNIT_BYTES);
    if num_copies > MOST_KV_COPIES || !are_units {
        return wrong();
    }
    if num_copies == 0 || num_parts == 0 || block_units == 0 {
        return Ok(());
    }
    let mut params = KvSwapParams {
        cache: parts.start,
        part_units: (parts.num_blocks * parts.block_bytes / UNIT_BYTES) as i64,
        block_units,
        to_host: i32::from(to_host),
        copies: [KvSwapCopy { host: 0, block: 0, padding: 0 }; MOST_KV_COPIES],
    };
    for (slot, (block, host)) in params.copies.iter_mut().zip(copies) {
        if block as usize >= parts.num_blocks || !host.is_multiple_of(UNIT_BYTES as u64) {
            return wrong();
        }
        *slot = KvSwapCopy { host, block: block as i32, padding: 0 };
    }
    let launch =
        Launch { grid: (num_parts, num_copies as u32, 1), block: THREADS, shared_bytes: 0 };
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; blocks and units were checked, the rest is the caller's promise.
    unsafe { cuda(context)?.launch("kv_cache_swap", "xserv_kv_cache_swap", launch, arguments) }
}
