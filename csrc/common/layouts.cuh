// The definitions that the kernels and the library (src/) share: the layout of the structs that kernels take, and
// numbers. Generated from the Rust side: `NVCC=none XSERV_BLESS=1 cargo test --lib layouts` rewrites it, and without
// that variable the test fails if it is out of date. A kernel's source says XSERV_LAYOUT_<struct>; after the struct.
#pragma once

#include <stddef.h>

namespace xserv {

constexpr int kBlockTokens = 32;  // of a block of the paged cache
constexpr int kGroupHeads = 8;  // query heads that a block serves
constexpr int kSegmentKeys = 1024;  // of a segment of flash_wgmma
constexpr int kNoWindow = 1073741824;  // keys of a window that hides none
constexpr int kMaxSwapCopies = 240;  // of a launch of kv_cache/swap
constexpr int kNumSums = 8;  // that gemv_mma adds up
constexpr int kMaxRank = 8;  // axes of a tensor
constexpr int kMaxNormedHeadDim = 256;  // of q and k
constexpr int kMaxSampleParts = 64;  // blocks that share a row of logits
constexpr int kMaxCandidates = 1024;  // of a row of logits
constexpr int kMaxTeamBlocks = 8;  // that search a row of logits together
constexpr int kSampleCounterWords = 8;  // of 32 bits, of a row of logits

// Dynamic shared memory that the library asks for, by kernel.
namespace shared_bytes {
constexpr int attention_flash_d64_f32 = 30336;
constexpr int attention_flash_d64 = 49152;
constexpr int attention_flash_d64_short = 40960;
constexpr int attention_flash_d80_f32 = 36480;
constexpr int attention_flash_d80 = 67584;
constexpr int attention_flash_d96_f32 = 42624;
constexpr int attention_flash_d96 = 79872;
constexpr int attention_flash_d128_f32 = 54912;
constexpr int attention_flash_d128 = 98304;
constexpr int attention_flash_d128_short = 81920;
constexpr int attention_flash_d256_f32 = 68736;
constexpr int attention_flash_d256 = 98304;
constexpr int attention_split_kv_d64 = 65536;
constexpr int attention_split_kv_fp8_d64 = 81920;
constexpr int attention_split_kv_d80 = 90112;
constexpr int attention_split_kv_fp8_d80 = 81920;
constexpr int attention_split_kv_d96 = 79872;
constexpr int attention_split_kv_fp8_d96 = 86016;
constexpr int attention_split_kv_d128 = 65536;
constexpr int attention_split_kv_fp8_d128 = 65536;
constexpr int attention_split_kv_d256 = 98304;
constexpr int attention_split_kv_fp8_d256 = 98304;
constexpr int attention_flash_wgmma_64_1 = 82208;
constexpr int attention_flash_wgmma_64_2 = 98592;
constexpr int attention_flash_wgmma_128_1 = 164128;
constexpr int attention_flash_wgmma_128_2 = 196896;
constexpr int attention_fused_chunked_d64 = 34224;
constexpr int attention_fused_chunked_d80 = 46832;
constexpr int attention_fused_chunked_d96 = 55344;
constexpr int attention_fused_chunked_d128 = 68272;
constexpr int attention_fused_chunked_d256 = 70832;
constexpr int attention_fused_chunked_fp8_d64 = 42416;
constexpr int attention_fused_chunked_fp8_d80 = 42736;
constexpr int attention_fused_chunked_fp8_d96 = 59440;
constexpr int attention_fused_chunked_fp8_d128 = 68272;
constexpr int attention_fused_chunked_fp8_d256 = 70832;
constexpr int attention_fused_cluster_d64 = 54448;
constexpr int attention_fused_cluster_d80 = 74352;
constexpr int attention_fused_cluster_d96 = 87728;
constexpr int attention_fused_cluster_d128 = 107952;
constexpr int attention_fused_cluster_d256 = 149424;
constexpr int attention_fused_cluster_fp8_d64 = 66736;
constexpr int attention_fused_cluster_fp8_d80 = 68208;
constexpr int attention_fused_cluster_fp8_d96 = 93872;
constexpr int attention_fused_cluster_fp8_d128 = 107952;
constexpr int attention_fused_cluster_fp8_d256 = 149424;
constexpr int attention_fused_project_2 = 144704;
constexpr int attention_fused_project_3 = 177472;
constexpr int gemm_simt_nn = 55296;
constexpr int gemm_simt_nt = 61440;
constexpr int gemm_simt_tn = 49152;
constexpr int gemm_simt_tt = 55296;
constexpr int gemm_wgmma_128x256 = 196608;
constexpr int gemm_wgmma_128x128 = 196608;
constexpr int gemm_tensor_core_128x256 = 196608;
constexpr int gemm_tensor_core_128x128 = 65536;
constexpr int gemm_tensor_core_64x128 = 73728;
constexpr int gemm_tensor_core_64x64 = 65536;
constexpr int linear_prefill_128x256_m = 213064;
constexpr int linear_prefill_128x192_m = 221272;
constexpr int linear_prefill_128x128_n = 213096;
constexpr int linear_prefill_128x128_m = 213096;
constexpr int linear_prefill_128x256_n = 213064;
constexpr int linear_prefill_128x192_n = 221272;
constexpr int linear_prefill_64x64_n_s2 = 196792;
constexpr int linear_prefill_64x128_m_s2 = 221320;
constexpr int linear_prefill_64x128_m = 204936;
constexpr int linear_skinny_64x16 = 204880;
constexpr int linear_skinny_64x32 = 196672;
constexpr int linear_skinny_64x64 = 213104;
constexpr int linear_skinny_64x96 = 204880;
constexpr int linear_skinny_64x128 = 196672;
constexpr int linear_skinny_128x64 = 196672;
constexpr int linear_skinny_128x96 = 229504;
constexpr int linear_skinny_128x128 = 229488;
constexpr int linear_skinny_192x16 = 213056;
constexpr int linear_skinny_192x32 = 172080;
constexpr int linear_skinny_192x64 = 196656;
constexpr int linear_skinny_192x96 = 208992;
constexpr int linear_skinny_192x128 = 204880;
}  // namespace shared_bytes

}  // namespace xserv

// The head dims that the fused kernels of attention are compiled for.
#define XSERV_FOR_HEAD_DIMS(KERNEL) KERNEL(64) KERNEL(80) KERNEL(96) KERNEL(128) KERNEL(256)

#define XSERV_FIELD(T, field, offset, bytes)                              \
  static_assert(offsetof(T, field) == offset && sizeof(T::field) == bytes, \
                #T "::" #field " lies elsewhere in Rust")

#define XSERV_LAYOUT_FaultRecord \
  XSERV_FIELD(FaultRecord, code, 0, 4); \
  XSERV_FIELD(FaultRecord, _padding, 4, 4); \
  XSERV_FIELD(FaultRecord, index, 8, 8); \
  XSERV_FIELD(FaultRecord, value, 16, 8); \
  static_assert(sizeof(FaultRecord) == 24, "FaultRecord has another size in Rust")

#define XSERV_LAYOUT_TensorMap \
  XSERV_FIELD(TensorMap, words, 0, 128); \
  static_assert(sizeof(TensorMap) == 128, "TensorMap has another size in Rust")

#define XSERV_LAYOUT_KernelRows \
  XSERV_FIELD(KernelRows, inner, 0, 8); \
  XSERV_FIELD(KernelRows, outer_stride, 8, 8); \
  XSERV_FIELD(KernelRows, inner_stride, 16, 8); \
  static_assert(sizeof(KernelRows) == 24, "KernelRows has another size in Rust")

#define XSERV_LAYOUT_StridedLayout \
  XSERV_FIELD(StridedLayout, rank, 0, 4); \
  XSERV_FIELD(StridedLayout, num_units, 4, 4); \
  XSERV_FIELD(StridedLayout, sizes, 8, 32); \
  XSERV_FIELD(StridedLayout, multipliers, 40, 32); \
  XSERV_FIELD(StridedLayout, shifts, 72, 32); \
  XSERV_FIELD(StridedLayout, strides, 104, 192); \
  static_assert(sizeof(StridedLayout) == 296, "StridedLayout has another size in Rust")

#define XSERV_LAYOUT_AttentionParams \
  XSERV_FIELD(AttentionParams, q, 0, 8); \
  XSERV_FIELD(AttentionParams, k, 8, 8); \
  XSERV_FIELD(AttentionParams, v, 16, 8); \
  XSERV_FIELD(AttentionParams, out, 24, 8); \
  XSERV_FIELD(AttentionParams, cu_seqlens_q, 32, 8); \
  XSERV_FIELD(AttentionParams, cu_seqlens_k, 40, 8); \
  XSERV_FIELD(AttentionParams, block_tables, 48, 8); \
  XSERV_FIELD(AttentionParams, context_lens, 56, 8); \
  XSERV_FIELD(AttentionParams, fault, 64, 8); \
  XSERV_FIELD(AttentionParams, q_batch_stride, 72, 8); \
  XSERV_FIELD(AttentionParams, q_token_stride, 80, 8); \
  XSERV_FIELD(AttentionParams, q_head_stride, 88, 8); \
  XSERV_FIELD(AttentionParams, k_batch_stride, 96, 8); \
  XSERV_FIELD(AttentionParams, k_token_stride, 104, 8); \
  XSERV_FIELD(AttentionParams, k_head_stride, 112, 8); \
  XSERV_FIELD(AttentionParams, v_batch_stride, 120, 8); \
  XSERV_FIELD(AttentionParams, v_token_stride, 128, 8); \
  XSERV_FIELD(AttentionParams, v_head_stride, 136, 8); \
  XSERV_FIELD(AttentionParams, o_batch_stride, 144, 8); \
  XSERV_FIELD(AttentionParams, o_token_stride, 152, 8); \
  XSERV_FIELD(AttentionParams, o_head_stride, 160, 8); \
  XSERV_FIELD(AttentionParams, num_heads, 168, 4); \
  XSERV_FIELD(AttentionParams, num_kv_heads, 172, 4); \
  XSERV_FIELD(AttentionParams, q_len, 176, 4); \
  XSERV_FIELD(AttentionParams, kv_len, 180, 4); \
  XSERV_FIELD(AttentionParams, causal, 184, 4); \
  XSERV_FIELD(AttentionParams, num_blocks, 188, 4); \
  XSERV_FIELD(AttentionParams, block_size_log2, 192, 4); \
  XSERV_FIELD(AttentionParams, max_blocks_per_seq, 196, 4); \
  XSERV_FIELD(AttentionParams, scale, 200, 4); \
  XSERV_FIELD(AttentionParams, window, 204, 4); \
  static_assert(sizeof(AttentionParams) == 208, "AttentionParams has another size in Rust")

#define XSERV_LAYOUT_AttentionDecodeParams \
  XSERV_FIELD(AttentionDecodeParams, q, 0, 8); \
  XSERV_FIELD(AttentionDecodeParams, k, 8, 8); \
  XSERV_FIELD(AttentionDecodeParams, v, 16, 8); \
  XSERV_FIELD(AttentionDecodeParams, out, 24, 8); \
  XSERV_FIELD(AttentionDecodeParams, partial_out, 32, 8); \
  XSERV_FIELD(AttentionDecodeParams, partial_stats, 40, 8); \
  XSERV_FIELD(AttentionDecodeParams, counters, 48, 8); \
  XSERV_FIELD(AttentionDecodeParams, cu_seqlens_q, 56, 8); \
  XSERV_FIELD(AttentionDecodeParams, cu_seqlens_k, 64, 8); \
  XSERV_FIELD(AttentionDecodeParams, block_tables, 72, 8); \
  XSERV_FIELD(AttentionDecodeParams, context_lens, 80, 8); \
  XSERV_FIELD(AttentionDecodeParams, fault, 88, 8); \
  XSERV_FIELD(AttentionDecodeParams, q_seq_stride, 96, 8); \
  XSERV_FIELD(AttentionDecodeParams, q_head_stride, 104, 8); \
  XSERV_FIELD(AttentionDecodeParams, k_seq_stride, 112, 8); \
  XSERV_FIELD(AttentionDecodeParams, k_token_stride, 120, 8); \
  XSERV_FIELD(AttentionDecodeParams, k_head_stride, 128, 8); \
  XSERV_FIELD(AttentionDecodeParams, v_seq_stride, 136, 8); \
  XSERV_FIELD(AttentionDecodeParams, v_token_stride, 144, 8); \
  XSERV_FIELD(AttentionDecodeParams, v_head_stride, 152, 8); \
  XSERV_FIELD(AttentionDecodeParams, o_seq_stride, 160, 8); \
  XSERV_FIELD(AttentionDecodeParams, o_head_stride, 168, 8); \
  XSERV_FIELD(AttentionDecodeParams, num_heads, 176, 4); \
  XSERV_FIELD(AttentionDecodeParams, num_kv_heads, 180, 4); \
  XSERV_FIELD(AttentionDecodeParams, num_tokens, 184, 4); \
  XSERV_FIELD(AttentionDecodeParams, kv_len, 188, 4); \
  XSERV_FIELD(AttentionDecodeParams, max_chunks, 192, 4); \
  XSERV_FIELD(AttentionDecodeParams, num_blocks, 196, 4); \
  XSERV_FIELD(AttentionDecodeParams, block_size_log2, 200, 4); \
  XSERV_FIELD(AttentionDecodeParams, max_blocks_per_seq, 204, 4); \
  XSERV_FIELD(AttentionDecodeParams, scale, 208, 4); \
  XSERV_FIELD(AttentionDecodeParams, window, 212, 4); \
  static_assert(sizeof(AttentionDecodeParams) == 216, "AttentionDecodeParams has another size in Rust")

#define XSERV_LAYOUT_AttentionFlashWgmmaParams \
  XSERV_FIELD(AttentionFlashWgmmaParams, q, 0, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, out, 8, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, cu_seqlens_q, 16, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, cu_seqlens_k, 24, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, block_tables, 32, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, context_lens, 40, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, fault, 48, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, counter, 56, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, partial_out, 64, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, partial_stats, 72, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, running, 80, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, q_batch_stride, 88, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, q_token_stride, 96, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, q_head_stride, 104, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, q_row_stride, 112, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, o_batch_stride, 120, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, o_token_stride, 128, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, o_head_stride, 136, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, o_row_stride, 144, 8); \
  XSERV_FIELD(AttentionFlashWgmmaParams, num_heads, 152, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, num_kv_heads, 156, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, q_len, 160, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, kv_len, 164, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, num_seqs, 168, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, num_blocks, 172, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, max_blocks_per_seq, 176, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, causal, 180, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, scale, 184, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, packed_heads, 188, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, max_segments, 192, 4); \
  XSERV_FIELD(AttentionFlashWgmmaParams, window, 196, 4); \
  static_assert(sizeof(AttentionFlashWgmmaParams) == 200, "AttentionFlashWgmmaParams has another size in Rust")

#define XSERV_LAYOUT_FusedArgs \
  XSERV_FIELD(FusedArgs, qkv, 0, 8); \
  XSERV_FIELD(FusedArgs, q_norm, 8, 8); \
  XSERV_FIELD(FusedArgs, k_norm, 16, 8); \
  XSERV_FIELD(FusedArgs, cos, 24, 8); \
  XSERV_FIELD(FusedArgs, sin, 32, 8); \
  XSERV_FIELD(FusedArgs, positions, 40, 8); \
  XSERV_FIELD(FusedArgs, slots, 48, 8); \
  XSERV_FIELD(FusedArgs, block_tables, 56, 8); \
  XSERV_FIELD(FusedArgs, context_lens, 64, 8); \
  XSERV_FIELD(FusedArgs, k_cache, 72, 8); \
  XSERV_FIELD(FusedArgs, v_cache, 80, 8); \
  XSERV_FIELD(FusedArgs, out, 88, 8); \
  XSERV_FIELD(FusedArgs, partial_out, 96, 8); \
  XSERV_FIELD(FusedArgs, partial_stats, 104, 8); \
  XSERV_FIELD(FusedArgs, counters, 112, 8); \
  XSERV_FIELD(FusedArgs, fault, 120, 8); \
  XSERV_FIELD(FusedArgs, num_seqs, 128, 4); \
  XSERV_FIELD(FusedArgs, num_heads, 132, 4); \
  XSERV_FIELD(FusedArgs, num_kv_heads, 136, 4); \
  XSERV_FIELD(FusedArgs, heads_per_kv, 140, 4); \
  XSERV_FIELD(FusedArgs, num_blocks, 144, 4); \
  XSERV_FIELD(FusedArgs, max_blocks_per_seq, 148, 4); \
  XSERV_FIELD(FusedArgs, max_position, 152, 4); \
  XSERV_FIELD(FusedArgs, max_chunks, 156, 4); \
  XSERV_FIELD(FusedArgs, chunk_len, 160, 4); \
  XSERV_FIELD(FusedArgs, wait_first, 164, 4); \
  XSERV_FIELD(FusedArgs, eps, 168, 4); \
  XSERV_FIELD(FusedArgs, scale, 172, 4); \
  XSERV_FIELD(FusedArgs, window, 176, 4); \
  XSERV_FIELD(FusedArgs, padding, 180, 4); \
  static_assert(sizeof(FusedArgs) == 184, "FusedArgs has another size in Rust")

#define XSERV_LAYOUT_OutputProjection \
  XSERV_FIELD(OutputProjection, weight, 0, 8); \
  XSERV_FIELD(OutputProjection, sums, 8, 8); \
  XSERV_FIELD(OutputProjection, hidden_size, 16, 4); \
  XSERV_FIELD(OutputProjection, padding, 20, 4); \
  static_assert(sizeof(OutputProjection) == 24, "OutputProjection has another size in Rust")

#define XSERV_LAYOUT_FusedProjectArgs \
  XSERV_FIELD(FusedProjectArgs, attention, 0, 184); \
  XSERV_FIELD(FusedProjectArgs, projection, 184, 24); \
  static_assert(sizeof(FusedProjectArgs) == 208, "FusedProjectArgs has another size in Rust")

#define XSERV_LAYOUT_EmbeddingQuantisedParams \
  XSERV_FIELD(EmbeddingQuantisedParams, hidden, 0, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, codes, 8, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, scales, 16, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, zeros, 24, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, ids, 32, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, sources, 40, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, chosen, 48, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, fault, 56, 8); \
  XSERV_FIELD(EmbeddingQuantisedParams, vocab_size, 64, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, width, 68, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, num_chunks, 72, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, num_groups, 76, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, group_size, 80, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, code, 84, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, scale_type, 88, 4); \
  XSERV_FIELD(EmbeddingQuantisedParams, are_pieces, 92, 4); \
  static_assert(sizeof(EmbeddingQuantisedParams) == 96, "EmbeddingQuantisedParams has another size in Rust")

#define XSERV_LAYOUT_GemmParams \
  XSERV_FIELD(GemmParams, a, 0, 8); \
  XSERV_FIELD(GemmParams, b, 8, 8); \
  XSERV_FIELD(GemmParams, c, 16, 8); \
  XSERV_FIELD(GemmParams, workspace, 24, 8); \
  XSERV_FIELD(GemmParams, lda, 32, 8); \
  XSERV_FIELD(GemmParams, ldb, 40, 8); \
  XSERV_FIELD(GemmParams, ldc, 48, 8); \
  XSERV_FIELD(GemmParams, stride_a, 56, 8); \
  XSERV_FIELD(GemmParams, stride_b, 64, 8); \
  XSERV_FIELD(GemmParams, stride_c, 72, 8); \
  XSERV_FIELD(GemmParams, m, 80, 4); \
  XSERV_FIELD(GemmParams, n, 84, 4); \
  XSERV_FIELD(GemmParams, k, 88, 4); \
  XSERV_FIELD(GemmParams, k_per_split, 92, 4); \
  XSERV_FIELD(GemmParams, alpha, 96, 4); \
  XSERV_FIELD(GemmParams, beta, 100, 4); \
  static_assert(sizeof(GemmParams) == 104, "GemmParams has another size in Rust")

#define XSERV_LAYOUT_GemvParams \
  XSERV_FIELD(GemvParams, x, 0, 8); \
  XSERV_FIELD(GemvParams, w, 8, 8); \
  XSERV_FIELD(GemvParams, out, 16, 8); \
  XSERV_FIELD(GemvParams, ldx, 24, 8); \
  XSERV_FIELD(GemvParams, ldw, 32, 8); \
  XSERV_FIELD(GemvParams, ldo, 40, 8); \
  XSERV_FIELD(GemvParams, m, 48, 4); \
  XSERV_FIELD(GemvParams, n, 52, 4); \
  XSERV_FIELD(GemvParams, k, 56, 4); \
  XSERV_FIELD(GemvParams, alpha, 60, 4); \
  XSERV_FIELD(GemvParams, beta, 64, 4); \
  static_assert(sizeof(GemvParams) == 72, "GemvParams has another size in Rust")

#define XSERV_LAYOUT_SimtGemmParams \
  XSERV_FIELD(SimtGemmParams, a, 0, 8); \
  XSERV_FIELD(SimtGemmParams, b, 8, 8); \
  XSERV_FIELD(SimtGemmParams, c, 16, 8); \
  XSERV_FIELD(SimtGemmParams, lda, 24, 8); \
  XSERV_FIELD(SimtGemmParams, ldb, 32, 8); \
  XSERV_FIELD(SimtGemmParams, ldc, 40, 8); \
  XSERV_FIELD(SimtGemmParams, stride_a, 48, 8); \
  XSERV_FIELD(SimtGemmParams, stride_b, 56, 8); \
  XSERV_FIELD(SimtGemmParams, stride_c, 64, 8); \
  XSERV_FIELD(SimtGemmParams, m, 72, 4); \
  XSERV_FIELD(SimtGemmParams, n, 76, 4); \
  XSERV_FIELD(SimtGemmParams, k, 80, 4); \
  XSERV_FIELD(SimtGemmParams, trans_a, 84, 4); \
  XSERV_FIELD(SimtGemmParams, trans_b, 88, 4); \
  XSERV_FIELD(SimtGemmParams, alpha, 92, 4); \
  XSERV_FIELD(SimtGemmParams, beta, 96, 4); \
  static_assert(sizeof(SimtGemmParams) == 104, "SimtGemmParams has another size in Rust")

#define XSERV_LAYOUT_KvSwapCopy \
  XSERV_FIELD(KvSwapCopy, host, 0, 8); \
  XSERV_FIELD(KvSwapCopy, block, 8, 4); \
  XSERV_FIELD(KvSwapCopy, padding, 12, 4); \
  static_assert(sizeof(KvSwapCopy) == 16, "KvSwapCopy has another size in Rust")

#define XSERV_LAYOUT_KvSwapParams \
  XSERV_FIELD(KvSwapParams, cache, 0, 8); \
  XSERV_FIELD(KvSwapParams, part_units, 8, 8); \
  XSERV_FIELD(KvSwapParams, block_units, 16, 4); \
  XSERV_FIELD(KvSwapParams, to_host, 20, 4); \
  XSERV_FIELD(KvSwapParams, copies, 24, 3840); \
  static_assert(sizeof(KvSwapParams) == 3864, "KvSwapParams has another size in Rust")

#define XSERV_LAYOUT_LinearGemvParams \
  XSERV_FIELD(LinearGemvParams, x, 0, 8); \
  XSERV_FIELD(LinearGemvParams, norm_weight, 8, 8); \
  XSERV_FIELD(LinearGemvParams, weight, 16, 8); \
  XSERV_FIELD(LinearGemvParams, bias, 24, 8); \
  XSERV_FIELD(LinearGemvParams, out, 32, 8); \
  XSERV_FIELD(LinearGemvParams, ldx, 40, 8); \
  XSERV_FIELD(LinearGemvParams, ldw, 48, 8); \
  XSERV_FIELD(LinearGemvParams, ldo, 56, 8); \
  XSERV_FIELD(LinearGemvParams, num_tokens, 64, 4); \
  XSERV_FIELD(LinearGemvParams, out_features, 68, 4); \
  XSERV_FIELD(LinearGemvParams, in_features, 72, 4); \
  XSERV_FIELD(LinearGemvParams, prefetch_blocks, 76, 4); \
  XSERV_FIELD(LinearGemvParams, prefetch_rows, 80, 4); \
  XSERV_FIELD(LinearGemvParams, eps, 84, 4); \
  static_assert(sizeof(LinearGemvParams) == 88, "LinearGemvParams has another size in Rust")

#define XSERV_LAYOUT_GemvMmaParams \
  XSERV_FIELD(GemvMmaParams, x, 0, 8); \
  XSERV_FIELD(GemvMmaParams, norm_weight, 8, 8); \
  XSERV_FIELD(GemvMmaParams, weight, 16, 8); \
  XSERV_FIELD(GemvMmaParams, sums, 24, 8); \
  XSERV_FIELD(GemvMmaParams, residual, 32, 8); \
  XSERV_FIELD(GemvMmaParams, hidden, 40, 8); \
  XSERV_FIELD(GemvMmaParams, out, 48, 8); \
  XSERV_FIELD(GemvMmaParams, out_features, 56, 4); \
  XSERV_FIELD(GemvMmaParams, eps, 60, 4); \
  static_assert(sizeof(GemvMmaParams) == 64, "GemvMmaParams has another size in Rust")

#define XSERV_LAYOUT_LinearNarrowParams \
  XSERV_FIELD(LinearNarrowParams, x, 0, 8); \
  XSERV_FIELD(LinearNarrowParams, norm_weight, 8, 8); \
  XSERV_FIELD(LinearNarrowParams, weight, 16, 8); \
  XSERV_FIELD(LinearNarrowParams, bias, 24, 8); \
  XSERV_FIELD(LinearNarrowParams, out, 32, 8); \
  XSERV_FIELD(LinearNarrowParams, ldx, 40, 8); \
  XSERV_FIELD(LinearNarrowParams, ldw, 48, 8); \
  XSERV_FIELD(LinearNarrowParams, ldo, 56, 8); \
  XSERV_FIELD(LinearNarrowParams, num_tokens, 64, 4); \
  XSERV_FIELD(LinearNarrowParams, out_features, 68, 4); \
  XSERV_FIELD(LinearNarrowParams, in_features, 72, 4); \
  XSERV_FIELD(LinearNarrowParams, steps, 76, 4); \
  XSERV_FIELD(LinearNarrowParams, num_passes, 80, 4); \
  XSERV_FIELD(LinearNarrowParams, eps, 84, 4); \
  static_assert(sizeof(LinearNarrowParams) == 88, "LinearNarrowParams has another size in Rust")

#define XSERV_LAYOUT_LinearNarrowQuantisedParams \
  XSERV_FIELD(LinearNarrowQuantisedParams, x, 0, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, norm_weight, 8, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, codes, 16, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, scales, 24, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, zeros, 32, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, bias, 40, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, out, 48, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, ldx, 56, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, ldo, 64, 8); \
  XSERV_FIELD(LinearNarrowQuantisedParams, num_tokens, 72, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, out_features, 76, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, in_features, 80, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, steps, 84, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, num_passes, 88, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, num_groups, 92, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, group_factor, 96, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, scale_type, 100, 4); \
  XSERV_FIELD(LinearNarrowQuantisedParams, eps, 104, 4); \
  static_assert(sizeof(LinearNarrowQuantisedParams) == 112, "LinearNarrowQuantisedParams has another size in Rust")

#define XSERV_LAYOUT_PrefillParams \
  XSERV_FIELD(PrefillParams, weight, 0, 128); \
  XSERV_FIELD(PrefillParams, x, 128, 128); \
  XSERV_FIELD(PrefillParams, out, 256, 8); \
  XSERV_FIELD(PrefillParams, ldo, 264, 8); \
  XSERV_FIELD(PrefillParams, num_tokens, 272, 4); \
  XSERV_FIELD(PrefillParams, n, 276, 4); \
  XSERV_FIELD(PrefillParams, k, 280, 4); \
  XSERV_FIELD(PrefillParams, padding, 284, 28); \
  static_assert(sizeof(PrefillParams) == 320, "PrefillParams has another size in Rust")

#define XSERV_LAYOUT_PrefillHeadsParams \
  XSERV_FIELD(PrefillHeadsParams, gemm, 0, 320); \
  XSERV_FIELD(PrefillHeadsParams, q_norm, 320, 8); \
  XSERV_FIELD(PrefillHeadsParams, k_norm, 328, 8); \
  XSERV_FIELD(PrefillHeadsParams, cos, 336, 8); \
  XSERV_FIELD(PrefillHeadsParams, sin, 344, 8); \
  XSERV_FIELD(PrefillHeadsParams, positions, 352, 8); \
  XSERV_FIELD(PrefillHeadsParams, slots, 360, 8); \
  XSERV_FIELD(PrefillHeadsParams, k_cache, 368, 8); \
  XSERV_FIELD(PrefillHeadsParams, v_cache, 376, 8); \
  XSERV_FIELD(PrefillHeadsParams, bias, 384, 8); \
  XSERV_FIELD(PrefillHeadsParams, fault, 392, 8); \
  XSERV_FIELD(PrefillHeadsParams, num_slots, 400, 8); \
  XSERV_FIELD(PrefillHeadsParams, num_heads, 408, 4); \
  XSERV_FIELD(PrefillHeadsParams, num_kv_heads, 412, 4); \
  XSERV_FIELD(PrefillHeadsParams, max_position, 416, 4); \
  XSERV_FIELD(PrefillHeadsParams, eps, 420, 4); \
  XSERV_FIELD(PrefillHeadsParams, padding, 424, 24); \
  static_assert(sizeof(PrefillHeadsParams) == 448, "PrefillHeadsParams has another size in Rust")

#define XSERV_LAYOUT_PrefillInt8Params \
  XSERV_FIELD(PrefillInt8Params, gemm, 0, 320); \
  XSERV_FIELD(PrefillInt8Params, x_scales, 320, 8); \
  XSERV_FIELD(PrefillInt8Params, scales, 328, 8); \
  XSERV_FIELD(PrefillInt8Params, bias, 336, 8); \
  XSERV_FIELD(PrefillInt8Params, num_rows, 344, 4); \
  XSERV_FIELD(PrefillInt8Params, padding, 348, 36); \
  static_assert(sizeof(PrefillInt8Params) == 384, "PrefillInt8Params has another size in Rust")

#define XSERV_LAYOUT_IntegersParams \
  XSERV_FIELD(IntegersParams, x, 0, 8); \
  XSERV_FIELD(IntegersParams, tokens, 8, 8); \
  XSERV_FIELD(IntegersParams, x_scales, 16, 8); \
  XSERV_FIELD(IntegersParams, codes, 24, 8); \
  XSERV_FIELD(IntegersParams, scales, 32, 8); \
  XSERV_FIELD(IntegersParams, rows, 40, 8); \
  XSERV_FIELD(IntegersParams, row_scales, 48, 8); \
  XSERV_FIELD(IntegersParams, num_tokens, 56, 4); \
  XSERV_FIELD(IntegersParams, k, 60, 4); \
  XSERV_FIELD(IntegersParams, num_chunks, 64, 4); \
  XSERV_FIELD(IntegersParams, tile_blocks, 68, 4); \
  XSERV_FIELD(IntegersParams, scale_type, 72, 4); \
  XSERV_FIELD(IntegersParams, are_pieces, 76, 4); \
  static_assert(sizeof(IntegersParams) == 80, "IntegersParams has another size in Rust")

#define XSERV_LAYOUT_Fp8Params \
  XSERV_FIELD(Fp8Params, x, 0, 8); \
  XSERV_FIELD(Fp8Params, x_scales, 8, 8); \
  XSERV_FIELD(Fp8Params, codes, 16, 8); \
  XSERV_FIELD(Fp8Params, scales, 24, 8); \
  XSERV_FIELD(Fp8Params, out, 32, 8); \
  XSERV_FIELD(Fp8Params, bias, 40, 8); \
  XSERV_FIELD(Fp8Params, ldo, 48, 8); \
  XSERV_FIELD(Fp8Params, num_tokens, 56, 4); \
  XSERV_FIELD(Fp8Params, n, 60, 4); \
  XSERV_FIELD(Fp8Params, num_tiles, 64, 4); \
  XSERV_FIELD(Fp8Params, num_chunks, 68, 4); \
  XSERV_FIELD(Fp8Params, num_groups, 72, 4); \
  XSERV_FIELD(Fp8Params, group_stages, 76, 4); \
  XSERV_FIELD(Fp8Params, x_pitch, 80, 4); \
  XSERV_FIELD(Fp8Params, scale_type, 84, 4); \
  XSERV_FIELD(Fp8Params, epilogue, 88, 4); \
  XSERV_FIELD(Fp8Params, row_shift, 92, 4); \
  XSERV_FIELD(Fp8Params, k, 96, 4); \
  XSERV_FIELD(Fp8Params, eps, 100, 4); \
  XSERV_FIELD(Fp8Params, norm_weight, 104, 8); \
  static_assert(sizeof(Fp8Params) == 112, "Fp8Params has another size in Rust")

#define XSERV_LAYOUT_Fp8ManyParams \
  XSERV_FIELD(Fp8ManyParams, x, 0, 128); \
  XSERV_FIELD(Fp8ManyParams, x_scales, 128, 128); \
  XSERV_FIELD(Fp8ManyParams, codes, 256, 128); \
  XSERV_FIELD(Fp8ManyParams, scales, 384, 128); \
  XSERV_FIELD(Fp8ManyParams, out, 512, 8); \
  XSERV_FIELD(Fp8ManyParams, bias, 520, 8); \
  XSERV_FIELD(Fp8ManyParams, ldo, 528, 8); \
  XSERV_FIELD(Fp8ManyParams, num_tokens, 536, 4); \
  XSERV_FIELD(Fp8ManyParams, n, 540, 4); \
  XSERV_FIELD(Fp8ManyParams, num_stages, 544, 4); \
  XSERV_FIELD(Fp8ManyParams, group_stages, 548, 4); \
  XSERV_FIELD(Fp8ManyParams, token_box, 552, 4); \
  XSERV_FIELD(Fp8ManyParams, scale_type, 556, 4); \
  XSERV_FIELD(Fp8ManyParams, epilogue, 560, 4); \
  XSERV_FIELD(Fp8ManyParams, row_tiles, 564, 4); \
  XSERV_FIELD(Fp8ManyParams, token_tiles, 568, 4); \
  XSERV_FIELD(Fp8ManyParams, token_group, 572, 4); \
  static_assert(sizeof(Fp8ManyParams) == 576, "Fp8ManyParams has another size in Rust")

#define XSERV_LAYOUT_Fp8PrefillParams \
  XSERV_FIELD(Fp8PrefillParams, x, 0, 128); \
  XSERV_FIELD(Fp8PrefillParams, x_scales, 128, 128); \
  XSERV_FIELD(Fp8PrefillParams, codes, 256, 128); \
  XSERV_FIELD(Fp8PrefillParams, scales, 384, 128); \
  XSERV_FIELD(Fp8PrefillParams, out, 512, 8); \
  XSERV_FIELD(Fp8PrefillParams, bias, 520, 8); \
  XSERV_FIELD(Fp8PrefillParams, row_scales, 528, 8); \
  XSERV_FIELD(Fp8PrefillParams, ldo, 536, 8); \
  XSERV_FIELD(Fp8PrefillParams, num_tokens, 544, 4); \
  XSERV_FIELD(Fp8PrefillParams, n, 548, 4); \
  XSERV_FIELD(Fp8PrefillParams, num_tiles, 552, 4); \
  XSERV_FIELD(Fp8PrefillParams, num_stages, 556, 4); \
  XSERV_FIELD(Fp8PrefillParams, num_groups, 560, 4); \
  XSERV_FIELD(Fp8PrefillParams, group_stages, 564, 4); \
  XSERV_FIELD(Fp8PrefillParams, scale_type, 568, 4); \
  XSERV_FIELD(Fp8PrefillParams, epilogue, 572, 4); \
  XSERV_FIELD(Fp8PrefillParams, row_tiles, 576, 4); \
  XSERV_FIELD(Fp8PrefillParams, token_tiles, 580, 4); \
  XSERV_FIELD(Fp8PrefillParams, token_group, 584, 4); \
  XSERV_FIELD(Fp8PrefillParams, padding, 588, 4); \
  static_assert(sizeof(Fp8PrefillParams) == 640, "Fp8PrefillParams has another size in Rust")

#define XSERV_LAYOUT_QuantisedParams \
  XSERV_FIELD(QuantisedParams, x, 0, 8); \
  XSERV_FIELD(QuantisedParams, codes, 8, 8); \
  XSERV_FIELD(QuantisedParams, scales, 16, 8); \
  XSERV_FIELD(QuantisedParams, zeros, 24, 8); \
  XSERV_FIELD(QuantisedParams, out, 32, 8); \
  XSERV_FIELD(QuantisedParams, bias, 40, 8); \
  XSERV_FIELD(QuantisedParams, ldo, 48, 8); \
  XSERV_FIELD(QuantisedParams, num_tokens, 56, 4); \
  XSERV_FIELD(QuantisedParams, n, 60, 4); \
  XSERV_FIELD(QuantisedParams, k, 64, 4); \
  XSERV_FIELD(QuantisedParams, num_tiles, 68, 4); \
  XSERV_FIELD(QuantisedParams, num_chunks, 72, 4); \
  XSERV_FIELD(QuantisedParams, num_groups, 76, 4); \
  XSERV_FIELD(QuantisedParams, group_factor, 80, 4); \
  XSERV_FIELD(QuantisedParams, scale_type, 84, 4); \
  XSERV_FIELD(QuantisedParams, epilogue, 88, 4); \
  XSERV_FIELD(QuantisedParams, row_shift, 92, 4); \
  static_assert(sizeof(QuantisedParams) == 96, "QuantisedParams has another size in Rust")

#define XSERV_LAYOUT_QuantisedManyParams \
  XSERV_FIELD(QuantisedManyParams, x, 0, 128); \
  XSERV_FIELD(QuantisedManyParams, codes, 128, 128); \
  XSERV_FIELD(QuantisedManyParams, scales, 256, 128); \
  XSERV_FIELD(QuantisedManyParams, zeros, 384, 128); \
  XSERV_FIELD(QuantisedManyParams, out, 512, 8); \
  XSERV_FIELD(QuantisedManyParams, bias, 520, 8); \
  XSERV_FIELD(QuantisedManyParams, ldo, 528, 8); \
  XSERV_FIELD(QuantisedManyParams, num_tokens, 536, 4); \
  XSERV_FIELD(QuantisedManyParams, n, 540, 4); \
  XSERV_FIELD(QuantisedManyParams, num_stages, 544, 4); \
  XSERV_FIELD(QuantisedManyParams, group_pieces, 548, 4); \
  XSERV_FIELD(QuantisedManyParams, sum_pieces, 552, 4); \
  XSERV_FIELD(QuantisedManyParams, unit_shift, 556, 4); \
  XSERV_FIELD(QuantisedManyParams, token_box, 560, 4); \
  XSERV_FIELD(QuantisedManyParams, scale_type, 564, 4); \
  XSERV_FIELD(QuantisedManyParams, epilogue, 568, 4); \
  XSERV_FIELD(QuantisedManyParams, has_zeros, 572, 4); \
  XSERV_FIELD(QuantisedManyParams, first_tile, 576, 4); \
  XSERV_FIELD(QuantisedManyParams, padding, 580, 60); \
  static_assert(sizeof(QuantisedManyParams) == 640, "QuantisedManyParams has another size in Rust")

#define XSERV_LAYOUT_QuantisedOneParams \
  XSERV_FIELD(QuantisedOneParams, x, 0, 8); \
  XSERV_FIELD(QuantisedOneParams, norm_weight, 8, 8); \
  XSERV_FIELD(QuantisedOneParams, codes, 16, 8); \
  XSERV_FIELD(QuantisedOneParams, scales, 24, 8); \
  XSERV_FIELD(QuantisedOneParams, zeros, 32, 8); \
  XSERV_FIELD(QuantisedOneParams, out, 40, 8); \
  XSERV_FIELD(QuantisedOneParams, bias, 48, 8); \
  XSERV_FIELD(QuantisedOneParams, ldo, 56, 8); \
  XSERV_FIELD(QuantisedOneParams, num_tokens, 64, 4); \
  XSERV_FIELD(QuantisedOneParams, n, 68, 4); \
  XSERV_FIELD(QuantisedOneParams, k, 72, 4); \
  XSERV_FIELD(QuantisedOneParams, num_tiles, 76, 4); \
  XSERV_FIELD(QuantisedOneParams, num_chunks, 80, 4); \
  XSERV_FIELD(QuantisedOneParams, num_groups, 84, 4); \
  XSERV_FIELD(QuantisedOneParams, group_factor, 88, 4); \
  XSERV_FIELD(QuantisedOneParams, scale_type, 92, 4); \
  XSERV_FIELD(QuantisedOneParams, epilogue, 96, 4); \
  XSERV_FIELD(QuantisedOneParams, num_slots, 100, 4); \
  XSERV_FIELD(QuantisedOneParams, slot_stages, 104, 4); \
  XSERV_FIELD(QuantisedOneParams, is_group_a_unit, 108, 4); \
  XSERV_FIELD(QuantisedOneParams, eps, 112, 4); \
  static_assert(sizeof(QuantisedOneParams) == 120, "QuantisedOneParams has another size in Rust")

#define XSERV_LAYOUT_SkinnyParams \
  XSERV_FIELD(SkinnyParams, weight, 0, 128); \
  XSERV_FIELD(SkinnyParams, x, 128, 128); \
  XSERV_FIELD(SkinnyParams, out, 256, 8); \
  XSERV_FIELD(SkinnyParams, bias, 264, 8); \
  XSERV_FIELD(SkinnyParams, ldo, 272, 8); \
  XSERV_FIELD(SkinnyParams, num_tokens, 280, 4); \
  XSERV_FIELD(SkinnyParams, n, 284, 4); \
  XSERV_FIELD(SkinnyParams, k, 288, 4); \
  XSERV_FIELD(SkinnyParams, tile_rows, 292, 4); \
  XSERV_FIELD(SkinnyParams, padding, 296, 16); \
  static_assert(sizeof(SkinnyParams) == 320, "SkinnyParams has another size in Rust")

#define XSERV_LAYOUT_QkNormRopeAppendArgs \
  XSERV_FIELD(QkNormRopeAppendArgs, qkv, 0, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, q_norm, 8, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, k_norm, 16, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, cos, 24, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, sin, 32, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, positions, 40, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, slots, 48, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, k_cache, 56, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, v_cache, 64, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, fault, 72, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, num_slots, 80, 8); \
  XSERV_FIELD(QkNormRopeAppendArgs, num_heads, 88, 4); \
  XSERV_FIELD(QkNormRopeAppendArgs, num_kv_heads, 92, 4); \
  XSERV_FIELD(QkNormRopeAppendArgs, head_dim, 96, 4); \
  XSERV_FIELD(QkNormRopeAppendArgs, head_stride, 100, 4); \
  XSERV_FIELD(QkNormRopeAppendArgs, max_position, 104, 4); \
  XSERV_FIELD(QkNormRopeAppendArgs, eps, 108, 4); \
  static_assert(sizeof(QkNormRopeAppendArgs) == 112, "QkNormRopeAppendArgs has another size in Rust")

#define XSERV_LAYOUT_DequantiseParams \
  XSERV_FIELD(DequantiseParams, codes, 0, 8); \
  XSERV_FIELD(DequantiseParams, scales, 8, 8); \
  XSERV_FIELD(DequantiseParams, zeros, 16, 8); \
  XSERV_FIELD(DequantiseParams, out, 24, 8); \
  XSERV_FIELD(DequantiseParams, first_tile, 32, 4); \
  XSERV_FIELD(DequantiseParams, first_row, 36, 4); \
  XSERV_FIELD(DequantiseParams, num_rows, 40, 4); \
  XSERV_FIELD(DequantiseParams, k, 44, 4); \
  XSERV_FIELD(DequantiseParams, num_chunks, 48, 4); \
  XSERV_FIELD(DequantiseParams, num_groups, 52, 4); \
  XSERV_FIELD(DequantiseParams, group_size, 56, 4); \
  XSERV_FIELD(DequantiseParams, tile_rows, 60, 4); \
  XSERV_FIELD(DequantiseParams, pair_rows, 64, 4); \
  XSERV_FIELD(DequantiseParams, pairs_end, 68, 4); \
  XSERV_FIELD(DequantiseParams, code, 72, 4); \
  XSERV_FIELD(DequantiseParams, scale_type, 76, 4); \
  XSERV_FIELD(DequantiseParams, are_pieces, 80, 4); \
  static_assert(sizeof(DequantiseParams) == 88, "DequantiseParams has another size in Rust")

#define XSERV_LAYOUT_RmsNormRoundedParams \
  XSERV_FIELD(RmsNormRoundedParams, x, 0, 8); \
  XSERV_FIELD(RmsNormRoundedParams, weight, 8, 8); \
  XSERV_FIELD(RmsNormRoundedParams, out, 16, 8); \
  XSERV_FIELD(RmsNormRoundedParams, width, 24, 4); \
  XSERV_FIELD(RmsNormRoundedParams, eps, 28, 4); \
  static_assert(sizeof(RmsNormRoundedParams) == 32, "RmsNormRoundedParams has another size in Rust")

#define XSERV_LAYOUT_RopeArgs \
  XSERV_FIELD(RopeArgs, q, 0, 8); \
  XSERV_FIELD(RopeArgs, q_out, 8, 8); \
  XSERV_FIELD(RopeArgs, k, 16, 8); \
  XSERV_FIELD(RopeArgs, k_out, 24, 8); \
  XSERV_FIELD(RopeArgs, positions, 32, 8); \
  XSERV_FIELD(RopeArgs, cos, 40, 8); \
  XSERV_FIELD(RopeArgs, sin, 48, 8); \
  XSERV_FIELD(RopeArgs, fault, 56, 8); \
  XSERV_FIELD(RopeArgs, q_token_stride, 64, 8); \
  XSERV_FIELD(RopeArgs, q_head_stride, 72, 8); \
  XSERV_FIELD(RopeArgs, q_out_token_stride, 80, 8); \
  XSERV_FIELD(RopeArgs, q_out_head_stride, 88, 8); \
  XSERV_FIELD(RopeArgs, k_token_stride, 96, 8); \
  XSERV_FIELD(RopeArgs, k_head_stride, 104, 8); \
  XSERV_FIELD(RopeArgs, k_out_token_stride, 112, 8); \
  XSERV_FIELD(RopeArgs, k_out_head_stride, 120, 8); \
  XSERV_FIELD(RopeArgs, num_heads, 128, 4); \
  XSERV_FIELD(RopeArgs, num_kv_heads, 132, 4); \
  XSERV_FIELD(RopeArgs, head_dim, 136, 4); \
  XSERV_FIELD(RopeArgs, max_position, 140, 4); \
  XSERV_FIELD(RopeArgs, lanes, 144, 4); \
  XSERV_FIELD(RopeArgs, lanes_multiplier, 148, 4); \
  XSERV_FIELD(RopeArgs, heads_at_a_time, 152, 4); \
  XSERV_FIELD(RopeArgs, padding, 156, 4); \
  static_assert(sizeof(RopeArgs) == 160, "RopeArgs has another size in Rust")

#define XSERV_LAYOUT_Adjustment \
  XSERV_FIELD(Adjustment, token_id, 0, 4); \
  XSERV_FIELD(Adjustment, num_generated, 4, 4); \
  XSERV_FIELD(Adjustment, flags, 8, 4); \
  XSERV_FIELD(Adjustment, bias, 12, 4); \
  static_assert(sizeof(Adjustment) == 16, "Adjustment has another size in Rust")

#define XSERV_LAYOUT_AdjustedRow \
  XSERV_FIELD(AdjustedRow, first, 0, 4); \
  XSERV_FIELD(AdjustedRow, count, 4, 4); \
  XSERV_FIELD(AdjustedRow, pending, 8, 4); \
  XSERV_FIELD(AdjustedRow, bans_ends, 12, 4); \
  XSERV_FIELD(AdjustedRow, repetition_penalty, 16, 4); \
  XSERV_FIELD(AdjustedRow, presence_penalty, 20, 4); \
  XSERV_FIELD(AdjustedRow, frequency_penalty, 24, 4); \
  XSERV_FIELD(AdjustedRow, reserved, 28, 4); \
  static_assert(sizeof(AdjustedRow) == 32, "AdjustedRow has another size in Rust")

#define XSERV_LAYOUT_SampleRow \
  XSERV_FIELD(SampleRow, seed, 0, 8); \
  XSERV_FIELD(SampleRow, index, 8, 8); \
  XSERV_FIELD(SampleRow, temperature, 16, 4); \
  XSERV_FIELD(SampleRow, top_p, 20, 4); \
  XSERV_FIELD(SampleRow, min_p, 24, 4); \
  XSERV_FIELD(SampleRow, top_k, 28, 4); \
  XSERV_FIELD(SampleRow, typical_p, 32, 4); \
  XSERV_FIELD(SampleRow, reserved, 36, 4); \
  static_assert(sizeof(SampleRow) == 40, "SampleRow has another size in Rust")

#define XSERV_LAYOUT_SampleArgs \
  XSERV_FIELD(SampleArgs, logits, 0, 8); \
  XSERV_FIELD(SampleArgs, rows, 8, 8); \
  XSERV_FIELD(SampleArgs, tokens, 16, 8); \
  XSERV_FIELD(SampleArgs, host_tokens, 24, 8); \
  XSERV_FIELD(SampleArgs, partials, 32, 8); \
  XSERV_FIELD(SampleArgs, counters, 40, 8); \
  XSERV_FIELD(SampleArgs, vocab_size, 48, 4); \
  XSERV_FIELD(SampleArgs, parts, 52, 4); \
  static_assert(sizeof(SampleArgs) == 56, "SampleArgs has another size in Rust")
