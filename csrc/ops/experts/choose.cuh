// The choice of experts by logits, and the order of tokens by expert; route.cu says what the operands are.
#pragma once

#include "ops/experts/route.cuh"

namespace xserv {

constexpr int kMaxExperts = 1024;
constexpr int kMaxPerToken = 32;

// A number past the first-level cache, which other blocks have written.
template <typename T>
__device__ __forceinline__ float load_fresh(const T* source) {
  if constexpr (sizeof(T) == 4) {
    return __ldcg(source);
  } else {
    const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(source));
    return to_float(reinterpret_cast<const T&>(bits));
  }
}

// The larger of two values, of equal ones the one with the lower index.
__device__ __forceinline__ void keep_larger(float& value, int& index, float other, int other_index) {
  if (other > value || (other == value && other_index < index)) value = other, index = other_index;
}

// kPerLane: experts of a lane, lane + 32 * i.
template <typename T, int kPerLane>
__device__ __forceinline__ void choose_of(int* ids, float* weights, const T* logits, int num_experts, int per_token,
                                          bool renormalises) {
  const int lane = threadIdx.x & 31;
  float values[kPerLane];
  float largest = -__builtin_huge_valf();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    float value = expert < num_experts ? load_fresh(logits + expert) : -__builtin_huge_valf();
    // No number is never chosen before one.
    if (value != value) value = -__builtin_huge_valf();
    values[i] = value;
    largest = fmaxf(largest, value);
  }
  largest = warp_reduce<Max>(largest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += expf(values[i] - largest);
  sum = warp_reduce<Sum>(sum);
  // Lane j keeps the j-th choice. A bit says which of a lane's experts are left.
  uint32_t left = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) left |= (lane + 32 * i < num_experts ? 1u : 0u) << i;
  float chosen = 0.0f, total = 0.0f;
  int chosen_id = 0;
  for (int j = 0; j < per_token; ++j) {
    float best = -__builtin_huge_valf();
    int index = kMaxExperts;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (left >> i & 1) keep_larger(best, index, values[i], lane + 32 * i);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
      const float other = __shfl_xor_sync(kFullWarp, best, offset);
      const int other_index = __shfl_xor_sync(kFullWarp, index, offset);
      keep_larger(best, index, other, other_index);
    }
    if ((index & 31) == lane) left &= ~(1u << (index >> 5));
    const float p = expf(best - largest) / sum;
    total += p;
    if (lane == j) chosen = p, chosen_id = index;
  }
  if (lane < per_token) {
    ids[lane] = chosen_id;
    weights[lane] = to_float(from_float<T>(renormalises ? chosen / total : chosen));
  }
}

// The same by one of two kinds of code.
template <typename T>
__device__ __forceinline__ void choose(int* ids, float* weights, const T* logits, int num_experts, int per_token,
                                       bool renormalises) {
  if (num_experts <= 128) {
    choose_of<T, 4>(ids, weights, logits, num_experts, per_token, renormalises);
  } else {
    choose_of<T, kMaxExperts / 32>(ids, weights, logits, num_experts, per_token, renormalises);
  }
}

template <typename T>
__device__ __forceinline__ void choose_all(int* ids, float* weights, const T* logits, int num_tokens, int num_experts,
                                           int per_token, bool renormalises) {
  const int num_warps = blockDim.x >> 5;
  for (int token = blockIdx.x * num_warps + (threadIdx.x >> 5); token < num_tokens; token += gridDim.x * num_warps) {
    const int64_t first = static_cast<int64_t>(token) * per_token;
    const T* row = logits + static_cast<int64_t>(token) * num_experts;
    choose<T>(ids + first, weights + first, row, num_experts, per_token, renormalises);
  }
}

// Inclusive sums over the threads of a block; `all`: that of all of them.
__device__ __forceinline__ int block_scan(int value, int* scratch, int& all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  const auto warp_scan = [&](int v) {
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int other = __shfl_up_sync(kFullWarp, v, offset);
      if (lane >= offset) v += other;
    }
    return v;
  };
  value = warp_scan(value);
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) scratch[lane] = warp_scan(lane < num_warps ? scratch[lane] : 0);
  __syncthreads();
  if (warp > 0) value += scratch[warp - 1];
  all = scratch[num_warps - 1];
  __syncthreads();
  return value;
}

// For one block.
__device__ __forceinline__ void sort(int* places, int* tokens, SlotTile* tiles, int* num_tiles, const int* ids,
                                     unsigned num_assignments, unsigned num_experts, unsigned per_token,
                                     int tile_tokens) {
  __shared__ int counts[kMaxExperts], scratch[32];
  for (unsigned i = threadIdx.x; i < num_experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < num_assignments; i += blockDim.x) atomicAdd(&counts[ids[i]], 1);
  __syncthreads();
  int slots_before = 0, tiles_before = 0;
  for (unsigned first = 0; first < num_experts; first += blockDim.x) {
    const unsigned expert = first + threadIdx.x;
    const int count = expert < num_experts ? counts[expert] : 0, own_tiles = (count + tile_tokens - 1) / tile_tokens;
    int all_slots, all_tiles;
    const int slot = slots_before + block_scan(count, scratch, all_slots) - count;
    const int tile = tiles_before + block_scan(own_tiles, scratch, all_tiles) - own_tiles;
    if (expert < num_experts) counts[expert] = slot;  // the expert's next one
    for (int i = 0; i < own_tiles; ++i) {
      const int begin = i * tile_tokens;
      tiles[tile + i] = {static_cast<int>(expert), slot + begin, min(count - begin, tile_tokens), 0};
    }
    slots_before += all_slots, tiles_before += all_tiles;
  }
  if (threadIdx.x == 0) *num_tiles = tiles_before;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < num_assignments; i += blockDim.x) {
    const int slot = atomicAdd(&counts[ids[i]], 1);
    places[i] = slot;
    tokens[slot] = static_cast<int>(i / per_token);
  }
}

}  // namespace xserv
