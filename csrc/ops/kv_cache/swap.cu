// Copies blocks of the paged KV cache to host memory and back, bit for bit:
//   host[c][part] = cache[part][block of c]
//   or, the other way round, cache[part][block of c] = host[c][part]
//
// cache: [num_parts, num_blocks, block_units], where the keys and the values of each layer are a part
// each; host[c]: [num_parts, block_units] at an address of its own, pinned and mapped. All are in units
// of 16 bytes.
//
// There is a block of threads for each copy and part. A block of the cache is scattered over all
// layers: one kernel that accesses host memory over the link itself takes as long as the link needs,
// whereas hundreds of transfers of 64 KiB queued one by one would take longer.
#include <cstdint>

#include "common/layouts.cuh"

namespace {

constexpr int kThreads = 256;
// The number of units in flight for each thread: a read over the link takes about two microseconds.
constexpr int kUnits = 8;

struct KvSwapCopy {
  uint4* host;
  int32_t block;
  int32_t padding;
};
XSERV_LAYOUT_KvSwapCopy;

// The host has the same struct (src/ops/kv_cache/cuda_swap.rs).
struct KvSwapParams {
  uint4* cache;
  int64_t part_units;
  int32_t block_units;
  int32_t to_host;
  KvSwapCopy copies[xserv::kMaxSwapCopies];
};
XSERV_LAYOUT_KvSwapParams;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    xserv_kv_cache_swap(const __grid_constant__ KvSwapParams params) {
  const KvSwapCopy copy = params.copies[blockIdx.y];
  const int64_t part = blockIdx.x;
  uint4* cache = params.cache + part * params.part_units + copy.block * int64_t{params.block_units};
  uint4* host = copy.host + part * params.block_units;
  const uint4* source = params.to_host ? cache : host;
  uint4* target = params.to_host ? host : cache;
  for (int first = threadIdx.x; first < params.block_units; first += kThreads * kUnits) {
    uint4 units[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = first + i * kThreads;
      if (at < params.block_units) units[i] = source[at];
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = first + i * kThreads;
      if (at < params.block_units) target[at] = units[i];
    }
  }
}
