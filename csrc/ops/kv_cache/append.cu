// Copies the keys and values of new tokens into the paged cache, bit for bit, or as 8-bit floats:
//   k_cache[slots[t]] = k[t],  v_cache[slots[t]] = v[t]
//
// qkv: [num_tokens, q_units + 2 * kv_units], where the keys of a token come after its queries and its
// values after its keys; slots: [num_tokens], block * block_size + offset; k_cache, v_cache:
// [num_slots, kv_units]. All are in units of 16 bytes, and of as many numbers in a cache of 8-bit floats.
//
// A token whose slot is outside the cache is not written, and the fault is reported. One block per
// token.
#include "common/fault.cuh"
#include "ops/kv_cache/stored.cuh"

namespace xserv {

// Stored: what the cache has for a number, T or Fp8.
template <typename T, typename Stored>
__device__ __forceinline__ void kv_cache_append(Stored* k_cache, Stored* v_cache, const T* qkv, const unsigned* slots,
                                                FaultRecord* fault, long long num_slots, int q_units, int kv_units) {
  constexpr int kUnit = 16 / sizeof(T);
  using Unit = Vec<T, kUnit>;
  const long long token = blockIdx.x, slot = slots[token];
  if (slot >= num_slots) {
    if (threadIdx.x == 0) report_fault(fault, kFaultBlock, token, slot);
    return;
  }
  const T* source = qkv + (token * (q_units + 2LL * kv_units) + q_units) * kUnit;
  const long long first = slot * kv_units;
  for (int i = threadIdx.x; i < 2 * kv_units; i += blockDim.x) {
    Stored* target = i < kv_units ? k_cache + (first + i) * kUnit : v_cache + (first + (i - kv_units)) * kUnit;
    store_in_cache(target, *reinterpret_cast<const Unit*>(source + static_cast<long long>(i) * kUnit));
  }
}

}  // namespace xserv

// Numbers that are copied as they are need no type.
extern "C" __global__ void __launch_bounds__(512)
    xserv_kv_cache_append(float* k_cache, float* v_cache, const float* qkv, const unsigned* slots,
                          xserv::FaultRecord* fault, long long num_slots, int q_units, int kv_units) {
  xserv::kv_cache_append(k_cache, v_cache, qkv, slots, fault, num_slots, q_units, kv_units);
}
#define XSERV_KERNEL(SUFFIX, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(512) xserv_kv_cache_append_fp8_##SUFFIX(                      \
      xserv::Fp8* k_cache, xserv::Fp8* v_cache, const T* qkv, const unsigned* slots, xserv::FaultRecord* fault, \
      long long num_slots, int q_units, int kv_units) {                                                      \
    xserv::kv_cache_append(k_cache, v_cache, qkv, slots, fault, num_slots, q_units, kv_units);               \
  }
XSERV_FOR_EACH_DTYPE(XSERV_KERNEL)
