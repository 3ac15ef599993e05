// Bulk tensor copies into all blocks of a pair, and barriers and stores across a cluster. sm_90 and later.
// PTX ISA, sections "cp.async.bulk.tensor" (.multicast::cluster), "mbarrier.arrive" and "mapa".
#pragma once

#include "common/tma.cuh"

namespace xserv {

__device__ __forceinline__ uint64_t l2_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box of the map to the same place in the blocks of `ranks` (a bit each); each block's own barrier at the
// same place counts the bytes that it gets.
__device__ __forceinline__ void tma_multicast_2d(uint32_t target, const TensorMap* map, uint32_t barrier, int c0,
                                                 int c1, uint16_t ranks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(ranks), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_multicast_4d(uint32_t target, const TensorMap* map, uint32_t barrier, int c0,
                                                 int c1, int c2, int c3, uint16_t ranks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ranks), "l"(policy)
      : "memory");
}

// Fetches a box into the L2 cache.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1)
               : "memory");
}

__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Arrives at a barrier of another block, by its address in the cluster's window. Not .release.cluster: what it
// tells is that operands have been read, and with it each arrival waits for all memory of the GPU (3 times slower).
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// All threads of all blocks of the cluster that have not ended come here before cluster_wait() lets one pass;
// without order for what they wrote.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Writes to a block of the cluster, where `barrier` of the same block counts the 16 bytes.
__device__ __forceinline__ void cluster_store_async(uint32_t address, uint32_t barrier, float4 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

}  // namespace xserv
