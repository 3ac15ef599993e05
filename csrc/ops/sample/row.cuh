// A row of logits, and what the threads of a block do with it together: sums, maxima, sorts and the
// weights of tokens.
#pragma once

#include "common/dtype.cuh"
#include "common/exp2.cuh"
#include "common/layouts.cuh"
#include "common/order.cuh"
#include "common/reduce.cuh"

namespace xserv {

// The host uploads these with every step (src/ops/sample/mod.rs has the same layout).
struct SampleRow {
  uint64_t seed, index;
  float temperature;  // 0: greedy; negative: the caller chooses
  float top_p, min_p;
  int top_k;          // 0: all
  float typical_p;    // 0 or 1: all
  uint32_t reserved;  // 0
};
XSERV_LAYOUT_SampleRow;

// Whether typical-p removes tokens.
__device__ __forceinline__ bool is_typical(const SampleRow& how) { return how.typical_p > 0.0f && how.typical_p < 1.0f; }

constexpr int kThreads = 512;
// The logarithm of base 2 of a weight of 1 in fixed point; the sum of 2^20 of them fits 64 bits.
constexpr float kLogOne = 40.0f;

// Tokens come in groups of four; one call of the generator makes the noise of a group.
template <typename T>
struct LogitsRow {
  const T* row;
  int vocab_size;
  bool is_aligned;

  __device__ __forceinline__ LogitsRow(const void* logits, int vocab_size, int index)
      : row(static_cast<const T*>(logits) + static_cast<int64_t>(index) * vocab_size),
        vocab_size(vocab_size),
        is_aligned(reinterpret_cast<uintptr_t>(row) % sizeof(Vec<T, 4>) == 0) {}

  __device__ __forceinline__ int num_groups() const { return (vocab_size + 3) / 4; }

  // Returns how many of the group's four tokens exist.
  __device__ __forceinline__ int load(int group, float (&values)[4]) const {
    const int first = group * 4, count = min(4, vocab_size - first);
    if (is_aligned && count == 4) {
      const Vec<T, 4> v = *reinterpret_cast<const Vec<T, 4>*>(row + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = to_float(v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = i < count ? to_float(row[first + i]) : -__builtin_huge_valf();
    }
    return count;
  }

  // Calls visit(group, values, count) for the groups first, first + step, ... in all lanes of a warp,
  // with a count of 0 past the end of the row. Tokens that do not exist are minus infinity. kAhead
  // groups are loaded at a time where all of them are whole; loads after branches would wait for each other.
  template <int kAhead, typename Visit>
  __device__ __forceinline__ void for_each_group(int first, int step, const Visit& visit) const {
    using V = Vec<T, 4>;
    const int lane = threadIdx.x & 31;
    const int num_whole = is_aligned ? vocab_size / 4 : 0;
    for (; first - lane + 31 + (kAhead - 1) * step < num_whole; first += kAhead * step) {
      V loaded[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) loaded[u] = reinterpret_cast<const V*>(row)[first + u * step];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = to_float(loaded[u][i]);
        visit(first + u * step, values, 4);
      }
    }
#pragma unroll 1
    for (; first - lane < num_groups(); first += step) {
      float values[4];
      int count = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = -__builtin_huge_valf();
      if (first < num_groups()) count = load(first, values);
      visit(first, values, count);
    }
  }
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Returns the maximum over the block to all threads.
__device__ __forceinline__ uint64_t block_max(uint64_t best) {
  __shared__ uint64_t scratch[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) best = larger(best, __shfl_xor_sync(kFullWarp, best, offset));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) best = larger(best, scratch[i]);
  return best;
}

// Returns the sum over the block to all threads.
__device__ __forceinline__ unsigned long long block_sum(unsigned long long own) {
  __shared__ unsigned long long scratch[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) own += __shfl_xor_sync(kFullWarp, own, offset);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = own;
  __syncthreads();
  unsigned long long sum = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += scratch[i];
  return sum;
}

// Returns the sum of the values of all threads before this one.
__device__ unsigned long long sum_before(unsigned long long own) {
  __shared__ unsigned long long warps[kThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned long long sum = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned long long before = __shfl_up_sync(kFullWarp, sum, offset);
    if (lane >= offset) sum += before;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += warps[i];
  return sum - own;
}

// Returns how far a token lies below the likeliest, in units of the temperature: minus the
// logarithm of its weight.
__device__ __forceinline__ float fall_of(const SampleRow& how, float value, float maximum) {
  // Often the temperature is 1, and a division takes as long as the exponential.
  const float fall = maximum - value;
  return how.temperature == 1.0f ? fall : fall / how.temperature;
}

// Gives the weights of a row's tokens in fixed point; the most likely token has 2^kLogOne. An
// exponential of base 2 is one instruction where expf is many. Its argument of up to 40 is rounded
// to 24 bits, so a weight is off by some millionths, but by the same ones wherever it is computed.
struct Weights {
  float maximum;
  float per_unit;  // of the logarithm of base 2

  __device__ __forceinline__ Weights(const SampleRow& how, float maximum)
      : maximum(maximum), per_unit(fminf(kLog2E / how.temperature, 0x1p127f)) {}

  __device__ __forceinline__ unsigned long long of(float value) const {
    return static_cast<unsigned long long>(exp2_approx(fmaf(value - maximum, per_unit, kLogOne)));
  }
};

// Sorts the first `size` (a power of two) pairs in shared memory, the largest first, by a bitonic network.
__device__ void sort_pairs(uint64_t* pairs, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const bool is_descending = (low & run) == 0;
        const uint64_t a = pairs[low], b = pairs[high];
        if ((a < b) == is_descending) pairs[low] = b, pairs[high] = a;
      }
    }
  }
  __syncthreads();
}

// Whether a token passes the filters that look at it and the likeliest token alone: min-p.
__device__ __forceinline__ bool passes_alone(const SampleRow& how, float value, float maximum) {
  return how.min_p <= 0.0f || expf((value - maximum) / how.temperature) >= how.min_p;
}

}  // namespace xserv
