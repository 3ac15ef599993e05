// Activations in FP8 (activations.cuh): their codes and scales, also those of rows to be
// normalised, or their numbers.
#include "common/e4m3.cuh"
#include "common/layouts.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "ops/quantised/activations.cuh"

namespace xserv {

// Sixteen lanes have a group of 128 inputs. Lanes without one do as those of the last, for the exchange.
struct GroupOfLane {
  int token, group, eight;  // eight: which eight inputs of the group
  bool is_there;

  __device__ __forceinline__ GroupOfLane(int num_tokens, int num_groups) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 16) + threadIdx.x / 16;
    const int64_t last = static_cast<int64_t>(num_tokens) * num_groups - 1, place = min(index, last);
    // A division of 64 bits takes several times as long.
    token = static_cast<int>(last < INT32_MAX ? static_cast<uint32_t>(place) / num_groups : place / num_groups);
    group = static_cast<int>(place - static_cast<int64_t>(token) * num_groups);
    eight = threadIdx.x & 15;
    is_there = index <= last;
  }
};

// x: [num_tokens, k], row-major, k a multiple of 8.
template <typename T>
__device__ __forceinline__ void quantise_activations(const T* x, uint8_t* codes, float* scales, int num_tokens, int k,
                                                     int num_groups, int pitch) {
  dependency_launch();
  dependency_wait();
  const GroupOfLane at(num_tokens, num_groups);
  const int input = at.group * 128 + at.eight * 8;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (input < k) v = load_activations(x + static_cast<int64_t>(at.token) * k + input);
  float numbers[8];
  unpack<T>(v, numbers);
  uint32_t words[2];
  const float scale = quantise_eight(numbers, words);
  if (at.is_there) store_eight(codes, scales, at.token, at.group, at.eight, num_groups, pitch, words, scale);
}

// RMSNorm of a residual stream, rounded as in ops/rms_norm/add_rounded.cu and to the same bits:
//   residual = round(residual + x)                        left out where x is null
//   codes, scales of round(norm_weight * round(residual / sqrt(mean(residual^2) + eps)))
// x, residual: [num_tokens, k], norm_weight: [k], aligned to 16 bytes, k a multiple of 8. A block
// has a row, and each thread up to kMaxVectors vectors of eight inputs.
template <typename T, int kMaxVectors>
__device__ __forceinline__ void normalise_activations(uint8_t* codes, float* scales, T* residual, const T* x,
                                                      const T* norm_weight, int k, int num_groups, int pitch, float eps) {
  using V = Vec<T, 8>;
  __shared__ float scratch[32];
  const int num_vectors = k / 8, lane = threadIdx.x & 31;
  V* sums = reinterpret_cast<V*>(residual) + static_cast<int64_t>(blockIdx.x) * num_vectors;
  const V* terms = reinterpret_cast<const V*>(x) + static_cast<int64_t>(blockIdx.x) * num_vectors;
  V factors[kMaxVectors] = {}, values[kMaxVectors] = {};
  dependency_launch();
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < num_vectors) factors[i] = reinterpret_cast<const V*>(norm_weight)[v];
  }
  dependency_wait();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v >= num_vectors) continue;
    values[i] = sums[v];
    if (x != nullptr) {
      const V term = terms[v];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[i][j] = from_float<T>(to_float(values[i][j]) + to_float(term[j]));
      sums[v] = values[i];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(to_float(values[i][j]), to_float(values[i][j]), sum);
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum, scratch) / k + eps);
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v - lane >= num_groups * 16) continue;  // the same for all lanes
    float numbers[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float normed = to_float(from_float<T>(to_float(values[i][j]) * scale));
      // Behind the end of the row are zeros.
      numbers[j] = v < num_vectors ? to_float(from_float<T>(normed * to_float(factors[i][j]))) : 0.0f;
    }
    uint32_t words[2];
    const float size = quantise_eight(numbers, words);
    if (v < num_groups * 16) store_eight(codes, scales, blockIdx.x, v / 16, v % 16, num_groups, pitch, words, size);
  }
}

// out: [num_tokens, k], for any k
template <typename T>
__device__ __forceinline__ void round_activations(const T* x, T* out, int num_tokens, int k, int num_groups) {
  dependency_launch();
  dependency_wait();
  const GroupOfLane at(num_tokens, num_groups);
  const int input = at.group * 128 + at.eight * 8;
  const int64_t first = static_cast<int64_t>(at.token) * k + input;
  float numbers[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) numbers[i] = input + i < k ? to_float(x[first + i]) : 0.0f;
  uint32_t words[2];
  const float scale = quantise_eight(numbers, words);
  if (!at.is_there) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float number = e4m3_number(words[i / 4] >> (i % 4 * 8) & 0xff) * scale;
    if (input + i < k) out[first + i] = from_float<T>(number);
  }
}

}  // namespace xserv

#define XSERV_ACTIVATIONS(SUFFIX, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                               \
      xserv_quantise_activations_##SUFFIX(const T* x, uint8_t* codes, float* scales, int num_tokens, int k,       \
                                          int num_groups, int pitch) {                                            \
    xserv::quantise_activations<T>(x, codes, scales, num_tokens, k, num_groups, pitch);                           \
  }
#define XSERV_ROUND(SUFFIX, T)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                               \
      xserv_round_activations_##SUFFIX(const T* x, T* out, int num_tokens, int k, int num_groups) {               \
    xserv::round_activations<T>(x, out, num_tokens, k, num_groups);                                               \
  }
#define XSERV_NORMALISE(SUFFIX, T)                                                                                \
  extern "C" __global__ void __launch_bounds__(1024) xserv_normalise_activations_##SUFFIX(                        \
      uint8_t* codes, float* scales, T* residual, const T* x, const T* norm_weight, int k, int num_groups,        \
      int pitch, float eps) {                                                                                     \
    xserv::normalise_activations<T, 2>(codes, scales, residual, x, norm_weight, k, num_groups, pitch, eps);       \
  }
XSERV_NORMALISE(f16, __half)
XSERV_NORMALISE(bf16, __nv_bfloat16)
XSERV_ACTIVATIONS(f16, __half)
XSERV_ACTIVATIONS(bf16, __nv_bfloat16)
XSERV_FOR_EACH_DTYPE(XSERV_ROUND)
