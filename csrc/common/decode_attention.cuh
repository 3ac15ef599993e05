// What the forms of the attention of decoding (ops/decode_attention.cu, ops/decode_attention_o.cu) are made of:
// their parameters, pairs of elements, reads that stay in order, and traffic inside a cluster.
#pragma once

#include "common/attention.cuh"
#include "common/dtype.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

extern __shared__ __align__(256) unsigned char decode_attention_shared[];

namespace xserv {

struct DecodeAttentionArgs {
  const void* qkv;
  const void* q_norm;
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
};
static_assert(sizeof(DecodeAttentionArgs) == 16 * 8 + 10 * 4 + 2 * 4, "the host passes this struct by value");

constexpr int kGroupHeads = 8;
constexpr int kBlockSize = 32;  // keys of a cache block
constexpr int kTileKeys = 16;
constexpr int kMostBlocks = 16;  // of a cluster

// Pairs of T in a register: conversions in pairs are single instructions of full rate, others are not.
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

// Reads that stay where they stand among the other asm statements.
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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Relaxed: a release would wait for every copy under way. What the others must see is the initialised
// mbarrier, and that has its own fence.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
// Writes to another block's shared memory and counts the bytes at that block's mbarrier.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t barrier, float4 value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
      "r"(address), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t barrier, float2 value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void barrier_init_one(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits for the first phase, bounded: a lost block must not hang the device.
__device__ __forceinline__ void barrier_wait(uint32_t barrier) {
#pragma unroll 1
  for (int i = 0; i < (1 << 24); ++i) {
    uint32_t done;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
    if (done) return;
  }
  __trap();
}
#endif

}  // namespace xserv
