// Bulk tensor copies into several blocks of a cluster. sm_90 and later.
// PTX ISA, section "cp.async.bulk.tensor" (.multicast::cluster).
#pragma once

#include "common/tma.cuh"

namespace xserv {

__device__ __forceinline__ uint64_t l2_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies one box of the map to the same place in the blocks of `ranks` (a bit each); each block's own
// barrier at the same place counts the bytes that the block gets.
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

}  // namespace xserv
