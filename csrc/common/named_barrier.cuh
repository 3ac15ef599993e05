// Barriers of a block by number, from 1 to 15: 0 is that of __syncthreads(). PTX ISA, section "bar".
#pragma once

namespace xserv {

// Waits until `threads` threads, a multiple of 32, have come to the barrier.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as having come, and goes on.
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace xserv
