// Barriers in shared memory with a phase, on which copies complete. PTX ISA, section "mbarrier". sm_90
// and later.
#pragma once

#include <stdint.h>

namespace xserv {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster; a barrier of the block or
// cluster must still tell the threads that wait on them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is over. A fresh barrier counts as having ended phase 1. The
// wait has no bound that traps: a trap joins the paths of producers and consumers, and ptxas then gives
// the consumers no more registers than the producers (seen with 13.0).
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

// The same, but traps where the phase does not end: a copy that never comes must not hang the device.
// The bound is tens of milliseconds at least, where a phase takes microseconds.
__device__ __forceinline__ void mbarrier_wait_bounded(uint32_t barrier, uint32_t parity) {
#pragma unroll 1
  for (int tries = 0; tries < 1 << 22; ++tries) {
    uint32_t done;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
  }
  __trap();
}

}  // namespace xserv
