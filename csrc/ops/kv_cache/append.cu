// Copies the keys and values of new tokens into the paged cache, bit for bit:
//   k_cache[slots[t]] = k[t],  v_cache[slots[t]] = v[t]
//
// qkv: [num_tokens, q_units + 2 * kv_units], where the keys of a token come after its queries and its
// values after its keys; slots: [num_tokens], block * block_size + offset; k_cache, v_cache:
// [num_slots, kv_units]. All are in units of 16 bytes.
//
// A token whose slot is outside the cache is not written, and the fault is reported. One block per
// token.
#include "common/fault.cuh"

extern "C" __global__ void __launch_bounds__(512)
    xserv_kv_cache_append(uint4* k_cache, uint4* v_cache, const uint4* qkv, const unsigned* slots,
                          xserv::FaultRecord* fault, long long num_slots, int q_units, int kv_units) {
  const long long token = blockIdx.x, slot = slots[token];
  if (slot >= num_slots) {
    if (threadIdx.x == 0) xserv::report_fault(fault, xserv::kFaultBlock, token, slot);
    return;
  }
  const uint4* source = qkv + token * (q_units + 2LL * kv_units) + q_units;
  const long long first = slot * kv_units;
  for (int i = threadIdx.x; i < 2 * kv_units; i += blockDim.x) {
    uint4* target = i < kv_units ? k_cache + first + i : v_cache + first + (i - kv_units);
    *target = source[i];
  }
}
