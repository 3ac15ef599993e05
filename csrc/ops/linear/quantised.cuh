// Shared by the linear layers with quantised weights: W[i, k] = (code[i, k] - zero[i, group]) *
// scale[i, group], in the tiles of src/ops/quantised/tiles.rs. What becomes of the sums is said in
// fragment.cuh.
//
// x: [num_tokens, k], row-major; codes, scales, zeros: the regions of the tiles; bias: [n] or null;
// out: [num_tokens, n], n being half of the rows of W with swiglu. round() is to T, the type of x and out.
#pragma once

#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "ops/linear/fragment.cuh"
#include "ops/quantised/decode.cuh"
#if __CUDA_ARCH__ >= 900
#include "common/cluster.cuh"
#endif

namespace xserv {

struct QuantisedParams {
  const void* x;
  const void* codes;
  const void* scales;
  const void* zeros;  // null: all are the middle of the codes
  void* out;          // residual: read and written
  const void* bias;   // plain only
  int64_t ldo;        // elements from token to token of out
  int num_tokens;
  int n;              // columns of out
  int k;              // a multiple of 8
  int num_tiles;
  int num_chunks;     // of a tile
  int num_groups;     // of a row
  uint32_t group_factor;  // the group of unit u is (2 * u * group_factor) >> 32; a chunk has kScales units
  int scale_type;     // a ScaleType
  int epilogue;       // an Epilogue
  int row_shift;      // log2 of the warps with different rows
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_QuantisedParams;

constexpr int kQuantisedWarps = 8;
// Rank of the block in its cluster, and the blocks of that.
__device__ __forceinline__ int split_rank() {
#if __CUDA_ARCH__ >= 900
  return cluster_rank();
#else
  return 0;
#endif
}
__device__ __forceinline__ int split_count() {
#if __CUDA_ARCH__ >= 900
  return cluster_size();
#else
  return 1;
#endif
}

// Waits for all threads of the block, and of its cluster.
__device__ __forceinline__ void meet(int num_splits) {
#if __CUDA_ARCH__ >= 900
  if (num_splits > 1) {
    cluster_arrive();
    cluster_wait();
    return;
  }
#endif
  __syncthreads();
}

// Copies 16 bytes of weights to shared memory if `is_wanted`; they are the first to leave the L2.
__device__ __forceinline__ void copy_weights(uint32_t target, const char* source, bool is_wanted, uint64_t policy) {
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %2, 0;"
      "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3;}" ::"r"(target),
      "l"(source), "r"(static_cast<int>(is_wanted)), "l"(policy)
      : "memory");
}

// Adds up the sums that all warps of the cluster have left in shared memory, and stores the results.
// staging: [warps along the inputs][all fragments of the block][lane].
template <typename T, Epilogue kEpilogue, int kFragments, int kWarps = kQuantisedWarps, bool kIsExact = true,
          typename Params>
__device__ __forceinline__ void store_quantised(const Params& p, const float4* staging, int first_tile,
                                                int first_token, int num_fragments, int input_warps, int split,
                                                int num_splits) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = split * kWarps + warp; i < num_fragments; i += num_splits * kWarps) {
    const Fragment<T, kEpilogue, kIsExact> fragment(p, (first_tile + i / kFragments) * Params::tile_rows, 0,
                                                    first_token + i % kFragments * 8);
    const uint2 old = fragment.load();
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](float4 part) {
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    };
    const float4* own = staging + i * 32 + lane;
    for (int s = 0; s < num_splits; ++s) {
      for (int w = 0; w < input_warps; ++w) {
        const float4* place = own + w * num_fragments * 32;
#if __CUDA_ARCH__ >= 900
        if (num_splits > 1) {
          add(cluster_load(cluster_address(shared_address(place), s)));
          continue;
        }
#endif
        add(*place);
      }
    }
    fragment.store(total, old);
  }
}

// The same for a cluster of blocks whose warps have all inputs of their rows, four fragments at a
// time: a warp waits once for all that it reads of other blocks and of the residual stream. With
// few fragments the longer code costs more.
template <typename T, Epilogue kEpilogue, int kFragments, int kWarps, typename Params>
__device__ __forceinline__ void store_many_fragments(const Params& p, const float4* staging, int first_tile,
                                                     int first_token, int num_fragments, int split, int num_splits) {
#if __CUDA_ARCH__ >= 900
  constexpr int kBatch = 4;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, step = num_splits * kWarps;
  const auto fragment = [&](int i) {
    return Fragment<T, kEpilogue, false>(p, (first_tile + i / kFragments) * Params::tile_rows, 0,
                                         first_token + i % kFragments * 8);
  };
  for (int first = split * kWarps + warp; first < num_fragments; first += kBatch * step) {
    uint2 old[kBatch];
    float4 total[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      total[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + i * step < num_fragments) old[i] = fragment(first + i * step).load();
    }
    for (int s = 0; s < num_splits; ++s) {
      const uint32_t source = cluster_address(shared_address(staging + first * 32 + lane), s);
      float4 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i * step < num_fragments) part[i] = cluster_load(source + i * step * 512);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        total[i].x += part[i].x, total[i].y += part[i].y, total[i].z += part[i].z, total[i].w += part[i].w;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < num_fragments) fragment(first + i * step).store(total[i], old[i]);
    }
  }
#endif
}

// Whichever of the two is faster for that many fragments of a tile's 16 rows.
template <typename T, Epilogue kEpilogue, int kFragments, int kWarps, typename Params>
__device__ __forceinline__ void store_cluster(const Params& p, const float4* staging, int first_tile, int first_token,
                                              int num_fragments, int split, int num_splits) {
  if constexpr (kFragments < 16) {
    store_quantised<T, kEpilogue, kFragments, kWarps, false>(p, staging, first_tile, first_token, num_fragments, 1,
                                                             split, num_splits);
  } else {
    store_many_fragments<T, kEpilogue, kFragments, kWarps>(p, staging, first_tile, first_token, num_fragments, split,
                                                           num_splits);
  }
}

template <Epilogue kEpilogue>
struct EpilogueTag {
  static constexpr Epilogue value = kEpilogue;
};

// Adds up and stores the sums of all warps of the cluster. staging: where a warp leaves its sums, after
// everyone has read what was there; each fragment is 512 bytes.
template <typename T, int kTiles, int kFragments, bool kIsExact = true, typename Params>
__device__ __forceinline__ void finish_quantised(const Params& p, float4* staging,
                                                 const float (&sum)[kTiles][kFragments][4], int first_tile,
                                                 int first_token) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row_warps = 1 << p.row_shift, input_warps = kQuantisedWarps >> p.row_shift;
  const int split = split_rank(), num_splits = split_count();
  const int num_fragments = row_warps * kTiles * kFragments;
  float4* own = staging + warp * kTiles * kFragments * 32 + lane;
#pragma unroll
  for (int i = 0; i < kTiles * kFragments; ++i) {
    const float(&v)[4] = sum[i / kFragments][i % kFragments];
    own[i * 32] = make_float4(v[0], v[1], v[2], v[3]);
  }
  meet(num_splits);
  const auto store = [&](auto epilogue) {
    store_quantised<T, decltype(epilogue)::value, kFragments, kQuantisedWarps, kIsExact>(
        p, staging, first_tile, first_token, num_fragments, input_warps, split, num_splits);
  };
  switch (static_cast<Epilogue>(p.epilogue)) {
    case Epilogue::kPlain: store(EpilogueTag<Epilogue::kPlain>()); break;
    case Epilogue::kResidual: store(EpilogueTag<Epilogue::kResidual>()); break;
    case Epilogue::kSwiglu: store(EpilogueTag<Epilogue::kSwiglu>()); break;
  }
  // No block leaves while another may read its sums.
  if (num_splits > 1) meet(num_splits);
}

__device__ __forceinline__ uint4 shared_words(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// Two scales: two words of f32, or one of 16-bit numbers.
__device__ __forceinline__ uint2 shared_pair(uint32_t address, bool is_f32) {
  uint2 v = make_uint2(0, 0);
  if (is_f32) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.x) : "r"(address) : "memory");
  }
  return v;
}
__device__ __forceinline__ float2 shared_floats(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float shared_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t shared_half(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

}  // namespace xserv
