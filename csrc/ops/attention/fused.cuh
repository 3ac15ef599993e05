// Building blocks of the variants of decode attention (ops/attention/fused.cu,
// ops/attention/fused_project.cu): their parameters, pairs of elements, reads that stay in order,
// and exchange inside a cluster.
#pragma once

#include "ops/attention/attention.cuh"
#include "common/cluster.cuh"
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

// Tiles of the longest heads lie at multiples of this.
constexpr int kSharedAlign = 512;
extern __shared__ __align__(kSharedAlign) unsigned char fused_shared[];

namespace xserv {

struct FusedArgs {
  const void* qkv;
  const void* q_norm;  // null, with k_norm: heads are not normalised
  const void* k_norm;
  const void* cos;
  const void* sin;
  const int* positions;
  const unsigned* slots;
  const int* block_tables;
  const int* context_lens;
  void* k_cache;
  void* v_cache;
  void* out;
  float* partial_out;    // chunked: [num_seqs, num_heads, max_chunks, head_dim]
  float* partial_stats;  // chunked: [num_seqs, num_heads, max_chunks, 2], maximum (base 2) and sum
  int* counters;         // chunked: [num_seqs, num_kv_heads * head groups], zero before and after
  FaultRecord* fault;    // may be null
  int num_seqs, num_heads, num_kv_heads;
  int heads_per_kv;  // num_heads / num_kv_heads
  int num_blocks, max_blocks_per_seq, max_position;
  int max_chunks;  // chunked: chunks of the longest sequence, also grid.x
  int chunk_len;   // chunked: keys of a chunk, a multiple of 64
  int wait_first;  // not 0: nothing is read before the wait
  float eps, scale;
  int window;  // the most keys that the token sees, itself included; kNoWindow: all
  int padding;
};
XSERV_LAYOUT_FusedArgs;

constexpr int kBlockSize = kBlockTokens;  // keys of a cache block
constexpr int kTileKeys = 16;
constexpr int kMaxBlocks = 16;  // the largest cluster

// Pairs of T in a register: conversions of pairs are single instructions of full rate, other
// conversions are not.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <typename T>
__device__ __forceinline__ float2 round_pair(float x, float y) {
  return unpack_pair<T>(pack_pair<T>(x, y));
}

__device__ __forceinline__ uint32_t movmatrix_8x8(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Reads that the compiler keeps in their place among the other asm statements.
__device__ __forceinline__ int load_here(const int* source) {
  int v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
  return v;
}
__device__ __forceinline__ Vec<uint32_t, 1> load_here(const Vec<uint32_t, 1>* source) {
  Vec<uint32_t, 1> v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v[0]) : "l"(source) : "memory");
  return v;
}
__device__ __forceinline__ Vec<uint32_t, 2> load_here(const Vec<uint32_t, 2>* source) {
  Vec<uint32_t, 2> v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(source) : "memory");
  return v;
}

}  // namespace xserv
