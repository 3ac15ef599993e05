// Shared by the attention kernels: launch parameters, and rows of a tile in shared memory.
#pragma once

#include <stdint.h>

#include "common/exp2.cuh"
#include "common/fault.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"

namespace xserv {

// Strides count elements; the innermost axis (head_dim) is contiguous. The contents of the index arrays
// are not trusted: whatever they are, only elements inside q, k, v and out are read and written.
struct AttentionParams {
  const void* q;  // [batch, q_len, num_heads, head_dim], or packed [num_tokens, num_heads, head_dim]
  const void* k;  // as q with num_kv_heads, or blocks [num_blocks, block_size, num_kv_heads, head_dim]
  const void* v;
  void* out;                // as q
  const int* cu_seqlens_q;  // [num_seqs + 1], or null: then q is not packed
  const int* cu_seqlens_k;  // [num_seqs + 1], or null: then k and v are not packed
  const int* block_tables;  // [num_seqs, max_blocks_per_seq], or null: then k and v are no block cache
  const int* context_lens;  // [num_seqs] keys of each sequence, with block_tables
  FaultRecord* fault;       // may be null
  long long q_batch_stride, q_token_stride, q_head_stride;
  long long k_batch_stride, k_token_stride, k_head_stride;  // batch: of one block where block_tables is given
  long long v_batch_stride, v_token_stride, v_head_stride;
  long long o_batch_stride, o_token_stride, o_head_stride;
  int num_heads, num_kv_heads;
  int q_len, kv_len;  // of each sequence; tokens in all where packed
  int causal;
  int num_blocks, block_size_log2, max_blocks_per_seq;
  float scale;
  int window;  // the most keys that a query sees, with causal; kNoWindow: all
};
XSERV_LAYOUT_AttentionParams;

struct AttentionDecodeParams {
  const void* q;  // [num_seqs, num_heads, head_dim] by strides, or packed with cu_seqlens_q
  const void* k;  // [num_seqs, kv_len, num_kv_heads, head_dim] by strides, or packed, or blocks, as above
  const void* v;
  void* out;             // as q
  float* partial_out;    // [num_seqs, num_heads, max_chunks, head_dim]
  float* partial_stats;  // [num_seqs, num_heads, max_chunks, 2]: running maximum (base 2) and sum
  int* counters;         // [num_seqs, num_kv_heads * head groups], zero before the launch and after it
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* block_tables;
  const int* context_lens;
  FaultRecord* fault;
  long long q_seq_stride, q_head_stride;
  long long k_seq_stride, k_token_stride, k_head_stride;
  long long v_seq_stride, v_token_stride, v_head_stride;
  long long o_seq_stride, o_head_stride;
  int num_heads, num_kv_heads;
  int num_tokens;  // of q where packed
  int kv_len;      // of each sequence; tokens in all where packed
  int max_chunks;
  int num_blocks, block_size_log2, max_blocks_per_seq;
  float scale;
  int window;  // the most keys that a query sees, the last ones; kNoWindow: all
};
XSERV_LAYOUT_AttentionDecodeParams;

// The tokens of a sequence in a packed tensor of num_tokens.
struct TokenRange {
  int begin, len;
};
__device__ __forceinline__ TokenRange token_range(const int* cu_seqlens, int seq, int num_tokens) {
  const int begin = min(max(cu_seqlens[seq], 0), num_tokens);
  const int end = min(max(cu_seqlens[seq + 1], begin), num_tokens);
  return {begin, end - begin};
}

// The number of keys of a sequence in a block cache, which is never more than its row of the block
// table can name. The host refuses tables of more than 2^30 keys a row.
template <typename Params>
__device__ __forceinline__ int context_len(const Params& p, int seq) {
  return min(max(p.context_lens[seq], 0), p.max_blocks_per_seq << p.block_size_log2);
}

// A tile of rows [rows, head_dim] of 16-bit elements. ldmatrix reads 8 rows at one 16-byte column: a
// row whose length is a multiple of 128 bytes is permuted by row % 8, any other row is padded to an odd
// number of 16 bytes.
template <int kHeadDim>
struct TileRows {
  static constexpr bool kSwizzle = kHeadDim % 64 == 0;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kStride = kSwizzle ? kHeadDim * 2 : (kChunks | 1) * 16;

  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return row * kStride + ((kSwizzle ? (chunk ^ (row & 7)) : chunk) << 4);
  }
  // The address 16 * step elements further along the row; tiles start at multiples of kAlign bytes.
  static constexpr int kAlign = kSwizzle ? kStride : 16;
  __device__ __forceinline__ static uint32_t advance(uint32_t address, int step) {
    return kSwizzle ? address ^ (step * 32) : address + step * 32;
  }
};

constexpr float kMinusInfinity = -__builtin_huge_valf();

// The first key that a query sees, where `visible` is the end of its keys. Without a window this needs
// no test of its own: nothing has more than kNoWindow keys, and the difference from the least `visible`,
// 1 - kNoWindow, is an int.
__device__ __forceinline__ int window_begin(int visible, int window) { return max(visible - window, 0); }

// The position of key `key` of a sequence in a block cache; the result is not valid (and the fault
// is reported) if the table names no block of the cache.
struct BlockRow {
  long long block;
  int token;
  bool is_valid;
};
template <typename Params>
__device__ __forceinline__ BlockRow block_row(const Params& p, int seq, int key) {
  const int block = key >> p.block_size_log2;
  const long long index = static_cast<long long>(seq) * p.max_blocks_per_seq + block;
  const int id = __ldg(p.block_tables + index);
  const bool is_valid = static_cast<unsigned>(id) < static_cast<unsigned>(p.num_blocks);
  if (!is_valid) report_fault(p.fault, kFaultBlock, index, id);
  return {is_valid ? id : 0, key & ((1 << p.block_size_log2) - 1), is_valid};
}

}  // namespace xserv
