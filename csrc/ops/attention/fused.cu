// Everything between the QKV and the O projection for sequences with one new token each: per-head RMSNorm of
// q and k, rotary embedding, append of k and v to the block cache, attention over the cache, in one kernel.
//
//   q, k = rope(rms_norm(q)), rope(rms_norm(k))       rounded as in qk_norm_rope_append.cu
//   s = scale q.k;   p = 2^(log2 e (s - max s));   out = sum p v / sum p       f32, p rounded to T for p.v
//
//   qkv:              [num_seqs, num_heads + 2 num_kv_heads, head_dim], what the projection wrote
//   q_norm, k_norm:   [head_dim];   cos, sin: [max_position, head_dim / 2];   positions: [num_seqs]
//   slots:            [num_seqs], block * 32 + offset of the place of the new key and value
//   k_cache, v_cache: [num_blocks, 32, num_kv_heads, head_dim] through block_tables [num_seqs,
//                     max_blocks_per_seq] and context_lens [num_seqs], which count the new token; with a
//                     length of 0 the row is not in use and its out becomes zero. The caches may store 8-bit
//                     floats: new keys and values then become codes before they are multiplied
//   out:              [num_seqs, num_heads, head_dim]
//
// With a window, tiles of 16 keys before that of the first key that the token sees are not there: blocks and
// chunks share the others as they share all tiles without one.
//
// A unit is a (sequence, kv head) with at most 8 query heads (larger groups take several units). There
// are two forms:
//   cluster:  grid (C, units of a sequence, num_seqs) in clusters of C = 1, 2, 4, 8 or 16 blocks. The blocks
//             of a cluster share a unit, take 16 keys each in turn, and exchange their (m, l, o) through
//             distributed shared memory: every block gets all partial results of its slice of the output and
//             combines them in block order. There is no workspace and only a single one-way trip between
//             blocks, for the latency of small batches. A result depends on the sequence's length and C.
//   chunked:  grid (max_chunks, units of a sequence, num_seqs). A block takes one chunk of a unit; the last
//             block to finish combines the chunks in chunk order through a workspace. A result depends on the
//             length and chunk_len. This form balances large batches of unequal lengths.
// The products are those of split_kv.cu: 16 keys x 8 query heads by mma.m16n8k16, each warp with its
// own ring of cp.async copies. The block that holds the last key puts the new key and value into its
// tile in shared memory; no block reads their place in the cache, and they are written there at the
// end.
//
// With one sequence a layer takes a few microseconds, so what counts is the chain of trips to the L2:
// everything but qkv is read before the wait, small reads first (queued after the keys of all blocks, a
// read takes several microseconds), there are no fences between the reads, and the code is kept short,
// since most of it runs once. H200, bf16, 32 heads over 8, one sequence between streaming kernels: 3.3
// us a layer at 512 keys, 6.6 at 4096 (the two kernels that it replaced: 12.8 and 17.5). 32 sequences
// of 4096 keys by themselves: 4.28 TB/s.
//
// Before griddepcontrol.wait the kernel reads context_lens, block_tables, positions, slots and the keys
// and values of old tokens. The kernel before it writes qkv and nothing else; but as every kernel lets
// the next one begin before its own wait, more than one may still be running. So the host promises
// more: whatever wrote these arrays, and all of the step before, ends before a full edge (the start of
// the step's graph) between them and this kernel. Without that promise, wait_first makes the kernel
// read everything after the wait.
#include "ops/attention/fused_unit.cuh"

// STORED is the type T itself or Fp8, whose kernels are called ..._fp8_...
#define XSERV_DECODE_ATTENTION(form, suffix, T, name, STORED, head_dim, warps, slots, division, min_blocks)        \
  extern "C" __global__ void __launch_bounds__(warps * 32, min_blocks)                                            \
      xserv_attention_fused_##form##_##name##d##head_dim##_##suffix(const __grid_constant__ xserv::FusedArgs args) { \
    using Kernel =                                                                                                \
        xserv::DecodeAttention<T, head_dim, warps, slots, xserv::DecodeForm::division, STORED>;                   \
    static_assert(Kernel::kSharedBytes == xserv::shared_bytes::attention_fused_##form##_##name##d##head_dim);     \
    Kernel::run(args);                                                                                            \
  }
#define XSERV_DECODE_ATTENTION_EACH(form, suffix, T, head_dim, warps, slots, division, min_blocks)                 \
  XSERV_DECODE_ATTENTION(form, suffix, T, , T, head_dim, warps, slots, division, min_blocks)                       \
  XSERV_DECODE_ATTENTION(form, suffix, T, fp8_, xserv::Fp8, head_dim, warps, slots * 2, division, min_blocks)
#define XSERV_DECODE_ATTENTION_HEADS(head_dim, chunked_slots, chunked_blocks, cluster_slots, cluster_blocks)               \
  XSERV_DECODE_ATTENTION_EACH(chunked, f16, __half, head_dim, 4, chunked_slots, kChunked, chunked_blocks)                  \
  XSERV_DECODE_ATTENTION_EACH(chunked, bf16, __nv_bfloat16, head_dim, 4, chunked_slots, kChunked, chunked_blocks)          \
  XSERV_DECODE_ATTENTION_EACH(cluster, f16, __half, head_dim, 8, cluster_slots, kCluster, cluster_blocks)                  \
  XSERV_DECODE_ATTENTION_EACH(cluster, bf16, __nv_bfloat16, head_dim, 8, cluster_slots, kCluster, cluster_blocks)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
XSERV_DECODE_ATTENTION_HEADS(64, 4, 3, 3, 2)
XSERV_DECODE_ATTENTION_HEADS(80, 4, 3, 3, 2)
XSERV_DECODE_ATTENTION_HEADS(96, 4, 3, 3, 2)
XSERV_DECODE_ATTENTION_HEADS(128, 4, 3, 3, 2)
XSERV_DECODE_ATTENTION_HEADS(256, 2, 3, 2, 1)
#endif
