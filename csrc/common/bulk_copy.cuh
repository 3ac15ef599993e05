// Bulk copies of sm_90 without a tensor map. PTX ISA, section "cp.async.bulk".
#pragma once

#include <stdint.h>

namespace xserv {

// Copies `bytes`, a multiple of 16, from global to shared memory, both aligned to 16 bytes;
// `barrier` counts them.
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace xserv
