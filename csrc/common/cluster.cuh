// Access to the blocks of a cluster: their shared memory, stores into it and the barrier of all of
// them. sm_90 and later. PTX ISA, sections "mapa", "st.async", "mbarrier.arrive" and "barrier.cluster".
#pragma once

#include <stdint.h>

namespace xserv {

// Rank and size of the cluster (one-dimensional).
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}

// Returns the address, in the cluster's window, of what lies at `address` in block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// The same for a pointer, which plain loads and stores follow.
template <typename T>
__device__ __forceinline__ T* cluster_pointer(T* own, int rank) {
  uint64_t mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(own), "r"(rank));
  return reinterpret_cast<T*>(mapped);
}

__device__ __forceinline__ float4 cluster_load(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// For all threads of all blocks of the cluster; what they wrote before it is visible after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same without order for the writes: a release waits for every copy under way. Initialised
// mbarriers have a fence of their own.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Arrives at a barrier of another block, by its address in the cluster's window. It is not
// .release.cluster: the arrival only tells that operands have been read, and a release makes each
// arrival wait for all memory of the GPU (3 times slower).
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Writes to the shared memory of a block of the cluster, where `barrier` of the same block counts the bytes.
__device__ __forceinline__ void cluster_store_async(uint32_t address, uint32_t barrier, float4 value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void cluster_store_async(uint32_t address, uint32_t barrier, float2 value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}

}  // namespace xserv
