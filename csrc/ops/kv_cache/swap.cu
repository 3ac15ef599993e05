// Blocks of the paged KV cache to memory of the host and back, bit for bit:
//   host[c][part] = cache[part][block of c]     or, the other way round,     cache[part][block of c] = host[c][part]
//
// cache: [num_parts, num_blocks, block_units], the keys and the values of each layer being a part; host[c]: [num_parts,
// block_units] at an address of its own, pinned and mapped. All in units of 16 bytes.
//
// A block of threads for each copy and part. A block of the cache is scattered over all layers: one kernel that goes
// over the link by itself takes as long as the link, hundreds of transfers of 64 KiB queued one by one would not.
#include <cstdint>

#include "common/layouts.cuh"

namespace {

constexpr int kThreads = 256;
// Units in flight for each thread: a read over the link takes about two microseconds.
constexpr int kUnits = 8;

struct KvSwapCopy {
  uint4* host;
  int32_t block;
  int32_t padding;
};
XSERV_LAYOUT_KvSwapCopy;

// The host has the same struct.
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
