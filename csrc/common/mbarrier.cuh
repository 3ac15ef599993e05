// Barriers in shared memory with a phase (mbarrier) and copies of tensor tiles that complete on them.
// PTX ISA, sections "mbarrier" and "cp.async.bulk.tensor". sm_90 and later.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace xserv {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; then a barrier of the block is still needed.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` more of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is over. A fresh barrier counts as having ended phase 1. Without a
// bound that traps: a trap joins the paths of producers and consumers, and ptxas then gives the consumers no
// more registers than the producers (seen with 13.0).
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a tensor with four axes, innermost coordinate first; what lies outside the tensor becomes zero.
__device__ __forceinline__ void copy_tensor_box(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                                int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

}  // namespace xserv
