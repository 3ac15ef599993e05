//! Everything between the projection to q, k, v and the output projection for sequences with one
//! new token: `csrc/ops/attention/fused.cu`.

use crate::backend::cuda::{kernel_struct, Arguments, Launch};
use crate::backend::{Arena, ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::attention::cuda_fused_kernels::{fused_kernel, FusedKernel};
use crate::ops::attention::cuda_params::{window_or_none, GROUP_HEADS, TILE_KEYS};
use crate::ops::common::contiguous::{check, cuda, float};
use crate::ops::kv_cache::{layout, KvSlots};
use crate::ops::qk_norm_rope_append::QkNormRope;

kernel_struct! {
    /// The kernel has the same struct and documents its fields.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct FusedArgs {
        qkv: *mut u8,
        q_norm: *mut u8,
        k_norm: *mut u8,
        cos: *mut u8,
        sin: *mut u8,
        positions: *mut u8,
        slots: *mut u8,
        block_tables: *mut u8,
        context_lens: *mut u8,
        k_cache: *mut u8,
        v_cache: *mut u8,
        out: *mut u8,
        partial_out: *mut u8,
        partial_stats: *mut u8,
        counters: *mut u8,
        fault: *mut u8,
        num_seqs: i32,
        num_heads: i32,
        num_kv_heads: i32,
        heads_per_kv: i32,
        num_blocks: i32,
        max_blocks_per_seq: i32,
        max_position: i32,
        max_chunks: i32,
        chunk_len: i32,
        wait_first: i32,
        eps: f32,
        scale: f32,
        window: i32,
        padding: i32,
    }
}

/// The number of tokens of a block of the cache.
const BLOCK_SIZE: i64 = layout::BLOCK_SIZE as i64;
/// The most chunks of one of many sequences: longer sequences have longer chunks.
const MAX_CHUNKS: i64 = 16;
/// The number of blocks among which the chunks of few sequences are divided: three on each
/// multiprocessor of an H200.
const MAX_BLOCKS: i64 = 3 * 132;
/// The fewest keys of a chunk of few sequences.
const MIN_CHUNK_LEN: i64 = 256;

/// The location of the sequences, and the scale of their scores.
#[derive(Clone, Copy, Debug)]
pub struct DecodeSequences<'a> {
    /// The blocks of each sequence, i32 [num_seqs, max_blocks_per_seq].
    pub block_tables: &'a Tensor,
    /// The length of each sequence, the new token included, i32 [num_seqs]; 0 marks a row that is
    /// not in use.
    pub context_lens: &'a Tensor,
    /// The factor of the scores, 1 / sqrt(head_dim).
    pub scale: f32,
    /// The most keys that a token sees, its own included; `None`: all.
    pub window: Option<usize>,
}

/// Memory for partial results, and counters that are zero between launches.
pub struct DecodeScratch {
    partial_out: DeviceTensor,
    partial_stats: DeviceTensor,
    counters: DeviceTensor,
}

impl DecodeScratch {
    /// Returns the number of partial results for `num_seqs` sequences in chunks.
    fn rows(num_seqs: usize, num_heads: usize) -> usize {
        let rows = num_seqs.saturating_mul(num_heads).saturating_mul(MAX_CHUNKS as usize);
        rows.max((MAX_BLOCKS * GROUP_HEADS) as usize)
    }

    /// Returns the bytes of device memory for batches of up to `num_seqs` sequences.
    pub fn device_bytes(num_seqs: usize, num_heads: usize, head_dim: usize) -> Result<usize> {
        let float = ElementType::Float(DType::F32);
        let rows = Self::rows(num_seqs, num_heads);
        let parts = [
            Arena::bytes_for(float, &[rows, head_dim])?,
            Arena::bytes_for(float, &[rows, 2])?,
            Arena::bytes_for(ElementType::I32, &[num_seqs, num_heads])?,
        ];
        Ok(parts.iter().fold(0usize, |sum, &bytes| sum.saturating_add(bytes)))
    }

    /// Returns the memory of partial results as f32 [rows, width], for another kernel.
    pub fn as_matrix(&self, rows: usize, width: usize) -> Result<DeviceTensor> {
        let room = self.partial_out.num_elements() as usize;
        match rows.checked_mul(width) {
            Some(len) if len <= room => self.partial_out.view(0, &[rows, width], None),
            _ => Err(Error::internal(format!("{rows} x {width} partial results, room for {room}"))),
        }
    }

    /// Returns a tensor of the one allocation that holds all of them.
    pub fn memory(&self) -> &DeviceTensor {
        &self.counters
    }

    /// Allocates memory for batches of up to `num_seqs` sequences.
    pub fn new(
        context: &ComputeContext,
        num_seqs: usize,
        num_heads: usize,
        head_dim: usize,
    ) -> Result<Self> {
        let float = ElementType::Float(DType::F32);
        let bytes = Self::device_bytes(num_seqs, num_heads, head_dim)?;
        let mut arena = Arena::new(context, bytes, "partial results of attention")?;
        let rows = Self::rows(num_seqs, num_heads);
        let partial_out = arena.tensor(float, &[rows, head_dim])?;
        let partial_stats = arena.tensor(float, &[rows, 2])?;
        let counters = arena.tensor(ElementType::I32, &[num_seqs, num_heads])?;
        counters.zero(context)?;
        Ok(DecodeScratch { partial_out, partial_stats, counters })
    }
}

/// The division of a sequence's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Division {
    /// Among the blocks of a cluster, which exchange their results.
    Cluster(u32),
    /// In chunks, through memory.
    Chunks {
        /// The number of keys of a chunk, if `max_chunks` of them suffice for a sequence. The keys
        /// of longer ones are divided evenly among this number.
        len: i64,
        max_chunks: i64,
    },
}

/// The longest context of a sequence among many others with which one or two blocks for each of its
/// heads keep up: with longer ones they would still be working when all others are done.
const LONGEST_ALONE: i64 = 8192;
/// The most elements of all query heads of a narrow model.
const NARROW_WIDTH: i64 = 2048;

/// The heads of a sequence.
#[derive(Clone, Copy, Debug)]
struct Heads {
    /// The units of the kernel.
    units: i64,
    num_heads: i64,
    /// The query heads of a kv head.
    per_kv: i64,
    /// The elements of a head.
    dim: i64,
}

impl Division {
    /// Returns the fastest way on an H200 by the number of sequences, of units of each, the longest
    /// possible context, and the query heads of a kv head: between the large products of models
    /// with many of them, clusters of 16 find no room.
    fn choose(num_seqs: i64, heads: &Heads, max_kv_len: i64) -> Self {
        let Heads { units, per_kv: heads_per_kv, .. } = *heads;
        if let Some(blocks) = Self::narrow(num_seqs, heads, max_kv_len) {
            return Division::Cluster(blocks);
        }
        match num_seqs {
            ..=1 if max_kv_len > 2048 && heads_per_kv <= 2 => Division::Cluster(16),
            2 if max_kv_len > LONGEST_ALONE => Division::Cluster(16),
            ..=2 => Division::Cluster(8),
            3..=4 if max_kv_len > LONGEST_ALONE => Division::among_blocks(num_seqs * units),
            3..=4 => Division::Cluster(4),
            5..=8 if max_kv_len > 2048 => Division::of_len(1024, max_kv_len),
            5..=8 => Division::Cluster(2),
            9..=31 if max_kv_len <= LONGEST_ALONE => Division::Cluster(2),
            9..=31 => Division::of_len(2048, max_kv_len),
            _ if max_kv_len <= LONGEST_ALONE => Division::Cluster(1),
            _ => Division::of_len(4096, max_kv_len),
        }
    }

    /// Returns the blocks of a cluster for a few sequences of a narrow model, whose products leave
    /// room for two blocks of heads of 64 elements on a multiprocessor, and for one of 128; `None`
    /// if they are not narrow, not few, or a context is too long. Clusters that find no room begin
    /// when others end: two sequences of Qwen3-0.6B then take 7.4 us a layer where one takes 4
    /// (H200).
    fn narrow(num_seqs: i64, heads: &Heads, max_kv_len: i64) -> Option<u32> {
        let is_narrow = heads.num_heads * heads.dim <= NARROW_WIDTH;
        if !is_narrow || num_seqs == 1 || max_kv_len > LONGEST_ALONE {
            return None;
        }
        Some(match (num_seqs * heads.units, heads.dim) {
            (..=16, 64) => 8,
            (..=32, 64) => 4,
            (..=64, 64) if max_kv_len <= 2048 => 2,
            (_, 64) => return None,
            (..=8, _) => 8,
            (..=16, _) => 4,
            (..=32, _) if max_kv_len > 4096 => 4,
            (..=64, _) if num_seqs < 32 => 2,
            _ => return None,
        })
    }

    /// Returns chunks that give every multiprocessor its share of few units.
    fn among_blocks(units: i64) -> Self {
        let max_chunks = MAX_BLOCKS.checked_div(units).unwrap_or(1).max(1);
        Division::Chunks { len: MIN_CHUNK_LEN, max_chunks }
    }

    /// Returns chunks of `len` keys, or of longer ones where these are too many.
    fn of_len(mut len: i64, max_kv_len: i64) -> Self {
        while max_kv_len > len * MAX_CHUNKS {
            len *= 2;
        }
        Division::Chunks { len, max_chunks: (max_kv_len as u64).div_ceil(len as u64) as i64 }
    }
}

/// The shared memory of a block on the chips that the kernels are for, which also have clusters of
/// 16: Hopper and its successors in data centres have 227 KiB.
const LEAST_SHARED_BYTES: u32 = 160 << 10;

/// Whether the kernels are compiled for heads of `head_dim` elements.
pub(super) fn is_fused_head_dim(head_dim: usize) -> bool {
    fused_kernel(head_dim as i64, true, false).is_some()
}

/// Whether the chip and the build have the kernels, and they serve heads of `head_dim` elements.
pub fn has_attention_fused(context: &ComputeContext, head_dim: usize) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    let info = cuda.device().info();
    let Some(kernel) = fused_kernel(head_dim as i64, true, false) else { return Ok(false) };
    Ok(info.compute_capability.0 >= 9
        && info.shared_memory_bytes >= LEAST_SHARED_BYTES as usize
        && cuda.has_kernel(kernel.kernel.bf16)?)
}

pub(super) fn size(tensor: &Tensor, dimension: usize) -> i64 {
    tensor.shape().get(dimension).copied().unwrap_or(0)
}

/// The sizes of the attention of a decoding step.
pub(super) struct Sizes {
    pub dtype: DType,
    /// Whether the cache stores floats of 8 bits.
    pub is_fp8: bool,
    pub num_seqs: i64,
    pub num_heads: i64,
    pub num_kv_heads: i64,
    pub head_dim: i64,
    /// The most keys of a sequence that are read: those of the longest context that the tables can
    /// name, or of the window and the rest of the tile in which it begins.
    pub max_kv_len: i64,
}

fn int(value: i64) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::unsupported(format!("a size of {value}")))
}

/// Checks the operands and returns the argument of a kernel that reads them, without output and
/// without memory for chunks.
pub(super) fn arguments(
    context: &ComputeContext,
    qkv: &Tensor,
    how: &QkNormRope<'_>,
    kv: &KvSlots<'_>,
    sequences: &DecodeSequences<'_>,
) -> Result<(FusedArgs, Sizes)> {
    let (element, dtype) = (qkv.element(), float("qkv", qkv)?);
    let (num_seqs, total_heads, head_dim) = (size(qkv, 0), size(qkv, 1), size(qkv, 2));
    let (num_blocks, num_kv_heads) = (size(kv.k, 0), size(kv.k, 2));
    let num_heads = total_heads - 2 * num_kv_heads;
    let max_position = size(how.cos, 0);
    let blocks_per_seq = size(sequences.block_tables, 1);
    check("qkv", qkv, element, &[num_seqs, total_heads, head_dim])?;
    let norms = how.check(element, num_seqs, head_dim)?;
    check("slots", kv.slots, ElementType::I32, &[num_seqs])?;
    let cache_shape = [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim];
    let is_fp8 = kv.is_fp8(element, &cache_shape)?;
    check("block_tables", sequences.block_tables, ElementType::I32, &[num_seqs, blocks_per_seq])?;
    check("context_lens", sequences.context_lens, ElementType::I32, &[num_seqs])?;
    let heads_per_kv = num_heads.checked_div(num_kv_heads).unwrap_or(0);
    if heads_per_kv == 0 || heads_per_kv * num_kv_heads != num_heads || dtype == DType::F32 {
        return Err(Error::internal(format!("attention of {num_heads} over {num_kv_heads} heads")));
    }
    let window = sequences.window.map(|window| i64::try_from(window).unwrap_or(i64::MAX));
    if window == Some(0) {
        return Err(Error::internal("attention in a window of no keys"));
    }
    let arguments = FusedArgs {
        qkv: qkv.data(),
        q_norm: norms.q,
        k_norm: norms.k,
        cos: how.cos.data(),
        sin: how.sin.data(),
        positions: how.positions.data(),
        slots: kv.slots.data(),
        block_tables: sequences.block_tables.data(),
        context_lens: sequences.context_lens.data(),
        k_cache: kv.k.data(),
        v_cache: kv.v.data(),
        out: std::ptr::null_mut(),
        partial_out: std::ptr::null_mut(),
        partial_stats: std::ptr::null_mut(),
        counters: std::ptr::null_mut(),
        fault: cuda(context)?.faults(),
        num_seqs: int(num_seqs)?,
        num_heads: int(num_heads)?,
        num_kv_heads: int(num_kv_heads)?,
        heads_per_kv: int(heads_per_kv)?,
        num_blocks: int(num_blocks)?,
        max_blocks_per_seq: int(blocks_per_seq)?,
        max_position: int(max_position)?,
        max_chunks: 0,
        chunk_len: 0,
        wait_first: 0,
        eps: norms.eps,
        scale: sequences.scale,
        window: window_or_none(window),
        padding: 0,
    };
    let most_seen = window.map_or(i64::MAX, |window| window.saturating_add(TILE_KEYS - 1));
    let max_kv_len = blocks_per_seq.saturating_mul(BLOCK_SIZE).min(most_seen);
    let sizes = Sizes { dtype, is_fp8, num_seqs, num_heads, num_kv_heads, head_dim, max_kv_len };
    Ok((arguments, sizes))
}

/// Computes the attention of one new token per sequence; see the head of the file. qkv [num_seqs,
/// num_heads + 2 num_kv_heads, head_dim], as the projection wrote it; out [num_seqs, num_heads,
/// head_dim]; of f16 or bf16, heads of 64, 80, 96, 128 or 256 elements without gaps, blocks of 32
/// tokens, in the cache also of 8-bit floats.
///
/// Block tables, lengths, positions and slots, and whatever wrote the cache before, must be
/// separated from this kernel by one that does not overlap with those before it.
pub fn attention_fused(
    context: &ComputeContext,
    qkv: &Tensor,
    how: &QkNormRope<'_>,
    kv: &KvSlots<'_>,
    sequences: &DecodeSequences<'_>,
    scratch: &DecodeScratch,
    out: &Tensor,
) -> Result<()> {
    let (arguments, sizes) = arguments(context, qkv, how, kv, sequences)?;
    let Sizes { dtype, is_fp8, num_seqs, num_heads, num_kv_heads, head_dim, max_kv_len } = sizes;
    check("out", out, qkv.element(), &[num_seqs, num_heads, head_dim])?;
    if num_seqs == 0 {
        return Ok(());
    }
    let heads_per_kv = i64::from(arguments.heads_per_kv);
    let groups = (heads_per_kv as u64).div_ceil(GROUP_HEADS as u64) as i64;
    let units = num_kv_heads * groups;
    let heads = Heads { units, num_heads, per_kv: heads_per_kv, dim: head_dim };
    let division = Division::choose(num_seqs, &heads, max_kv_len);
    let (cluster, chunk_len, max_chunks) = match division {
        Division::Cluster(blocks) => (blocks, 0, 0),
        Division::Chunks { len, max_chunks } => (1, len, max_chunks),
    };
    let rows = num_seqs.saturating_mul(num_heads).saturating_mul(max_chunks);
    if rows > size(&scratch.partial_stats, 0) || num_seqs > size(&scratch.counters, 0) {
        return Err(Error::internal("too little memory for partial results of attention"));
    }
    let cuda = cuda(context)?;
    let arguments = FusedArgs {
        out: out.data(),
        partial_out: scratch.partial_out.data(),
        partial_stats: scratch.partial_stats.data(),
        counters: scratch.counters.data(),
        max_chunks: int(max_chunks)?,
        chunk_len: int(chunk_len)?,
        ..arguments
    };
    let is_cluster = matches!(division, Division::Cluster(_));
    let Some(found) = fused_kernel(head_dim, is_cluster, is_fp8) else {
        return Err(Error::internal(format!("fused attention of heads of {head_dim} elements")));
    };
    let FusedKernel { kernel, threads, shared_bytes } = found;
    let kernel = kernel.of_half(dtype)?;
    let units = int(units)? as u32;
    let first = if is_cluster { cluster } else { max_chunks as u32 };
    if units > 65535 || num_seqs > 65535 {
        return Err(Error::unsupported(format!("{num_seqs} sequences of {num_heads} heads")));
    }
    let launch = Launch { grid: (first, units, num_seqs as u32), block: threads, shared_bytes };
    let arguments = Arguments::new().value(&arguments);
    // SAFETY: the argument of the kernel; the shapes were checked above, the partial results have
    // their places, and the kernel follows no block, slot or position beyond the cache and the
    // tables.
    unsafe { cuda.launch_clusters(kernel, launch, cluster, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::choice::KERNEL_HEAD_DIMS;

    #[test]
    fn few_sequences_have_many_blocks_each() {
        let chunks = |len, max_chunks| Division::Chunks { len, max_chunks };
        let choose = |num_seqs, units, max_kv_len, per_kv| {
            let heads = Heads { units, num_heads: units * per_kv, per_kv, dim: 128 };
            Division::choose(num_seqs, &heads, max_kv_len)
        };
        assert_eq!(choose(1, 8, 512, 4), Division::Cluster(8));
        assert_eq!(choose(1, 8, 4096, 4), Division::Cluster(8));
        assert_eq!(choose(1, 8, 4096, 2), Division::Cluster(16));
        assert_eq!(choose(1, 8, 32768, 4), Division::Cluster(8));
        assert_eq!(choose(2, 16, 8192, 4), Division::Cluster(8));
        assert_eq!(choose(2, 16, 32768, 4), Division::Cluster(16));
        assert_eq!(choose(4, 8, 32768, 4), chunks(256, 12));
        assert_eq!(choose(3, 1, 32768, 8), chunks(256, 132));
        assert_eq!(choose(4, 512, 32768, 1), chunks(256, 1));
        assert_eq!(choose(4, 8, 4096, 4), Division::Cluster(4));
        assert_eq!(choose(4, 8, 8192, 4), Division::Cluster(4));
        assert_eq!(choose(8, 8, 512, 4), Division::Cluster(2));
        assert_eq!(choose(8, 8, 4096, 4), chunks(1024, 4));
        assert_eq!(choose(16, 8, 4096, 4), Division::Cluster(2));
        assert_eq!(choose(16, 8, 32768, 4), chunks(2048, 16));
        assert_eq!(choose(128, 8, 8192, 4), Division::Cluster(1));
        assert_eq!(choose(128, 8, 32768, 4), chunks(4096, 8));
        // Narrow models: Qwen3-0.6B, Llama-3.2-1B.
        for (num_seqs, max_kv_len, blocks) in
            [(2, 8192, 4), (4, 4096, 2), (4, 8192, 4), (8, 8192, 2), (16, 8192, 2)]
        {
            assert_eq!(choose(num_seqs, 8, max_kv_len, 2), Division::Cluster(blocks));
        }
        assert_eq!(choose(4, 8, 32768, 2), chunks(256, 12));
        assert_eq!(choose(16, 2, 1024, 6), Division::Cluster(2));
        assert_eq!(choose(32, 2, 1024, 6), Division::Cluster(1));
        let heads = Heads { units: 8, num_heads: 32, per_kv: 4, dim: 64 };
        assert_eq!(Division::choose(2, &heads, 1024), Division::Cluster(8));
        assert_eq!(Division::choose(8, &heads, 4096), chunks(1024, 4));
    }

    #[test]
    fn every_kernel_fits_the_chips_that_have_them() {
        for head_dim in KERNEL_HEAD_DIMS {
            for (is_cluster, is_fp8) in [(false, false), (false, true), (true, false), (true, true)]
            {
                let kernel = fused_kernel(head_dim, is_cluster, is_fp8).expect("a kernel");
                assert!(kernel.shared_bytes <= LEAST_SHARED_BYTES, "{head_dim}");
            }
        }
        assert!(!is_fused_head_dim(72));
    }

    #[test]
    fn the_partial_results_of_few_sequences_have_room() {
        for (num_heads, num_kv_heads) in [(1, 1), (8, 8), (16, 1), (32, 8), (40, 8), (28, 4)] {
            let groups = (num_heads as u64 / num_kv_heads).div_ceil(GROUP_HEADS as u64);
            for num_seqs in 1..=4 {
                let units = num_seqs as i64 * (num_kv_heads * groups) as i64;
                let Division::Chunks { max_chunks, .. } = Division::among_blocks(units) else {
                    panic!("chunks of few sequences");
                };
                let rows = num_seqs * num_heads * max_chunks as usize;
                assert!(rows <= DecodeScratch::rows(num_seqs, num_heads));
            }
        }
    }
}
