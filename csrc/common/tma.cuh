// Bulk tensor copies and the barriers they complete on, as sm_90 has them.
// PTX ISA, sections "mbarrier" and "cp.async.bulk.tensor".
#pragma once

#include <stdint.h>

namespace xserv {

// A CUtensorMap; the host fills it with cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
static_assert(sizeof(TensorMap) == 128, "CUtensorMap is 128 bytes");

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers known to the copy engine and to the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase also wait for `bytes` from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity. A copy that never comes must not hang the device: the bound
// is tens of milliseconds at least, where a slot takes microseconds.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
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

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint64_t l2_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t l2_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box of the map into shared memory; coordinates innermost first.
__device__ __forceinline__ void tma_load_2d(uint32_t target, const TensorMap* map, uint32_t barrier, int c0,
                                            int c1, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t target, const TensorMap* map, uint32_t barrier, int c0,
                                            int c1, int c2, int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

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

// Address, in the cluster's window, of what lies at `address` in block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ float4 cluster_load(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// All threads of all blocks of the cluster; what they wrote before is seen after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace xserv
