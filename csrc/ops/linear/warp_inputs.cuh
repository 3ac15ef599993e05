// The part of one row of x that a warp of a product makes for itself, out of numbers that nobody
// has normalised or quantised yet, so that without a norm no warp waits for another.
#pragma once

#include "common/cluster.cuh"
#include "common/gemv.cuh"
#include "common/reduce.cuh"
#include "ops/linear/quantised.cuh"

namespace xserv {

constexpr int kStageEights = 16;  // vectors of eight inputs of a stage

__device__ __forceinline__ void store_shared_pair(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// A power of two by which inputs are multiplied so that the largest of 128 is from 8192 up to 16384.
struct StagePower {
  bool is_finite;  // whether all of them are numbers
  float up;
  uint32_t down;  // bits of 1 / up, which is none if one of them is
};

// Each of sixteen neighbouring lanes has eight of the inputs.
template <typename T>
__device__ __forceinline__ StagePower stage_power(const uint4& v) {
  // The bits of magnitudes are in their order; NaN has the largest.
  constexpr uint32_t kMagnitudes = 0x7fff7fffu;
  uint32_t largest =
      __vmaxu2(__vmaxu2(v.x & kMagnitudes, v.y & kMagnitudes), __vmaxu2(v.z & kMagnitudes, v.w & kMagnitudes));
  largest = max(largest & 0xffffu, largest >> 16);
#pragma unroll
  for (int offset = kStageEights / 2; offset > 0; offset >>= 1) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  const uint32_t exponent = max(__float_as_uint(unpack_pair(largest, T()).x) >> 23, 14u);
  const bool is_finite = exponent < 255;
  return {is_finite, is_finite ? __uint_as_float((267 - exponent) << 23) : 0.0f,
          is_finite ? (exponent - 13) << 23 : 0x7fffffffu};
}

// A warp has the inputs from stage `begin` up to `end`, each of 128; past the end of the row they are zeros.
template <typename T>
struct WarpInputs {
  static constexpr int kAhead = 2;  // vectors of eight inputs that a lane keeps

  const T* norm_weight;  // null: x is taken as it is
  int num_eights, first, end;
  uint4 factors[kAhead];

  // Reads weights only.
  __device__ __forceinline__ WarpInputs(const void* norm_weight, int k, int begin, int end)
      : norm_weight(static_cast<const T*>(norm_weight)),
        num_eights(k / 8),
        first(begin * kStageEights),
        end(end * kStageEights) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) factors[i] = factor_of(first + (threadIdx.x & 31) + i * 32);
  }

  __device__ __forceinline__ uint4 load(const T* from, int eight) const {
    return eight < min(end, num_eights) ? load_activations(from + eight * 8) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ uint4 factor_of(int eight) const {
    return norm_weight != nullptr ? load(norm_weight, eight) : make_uint4(0, 0, 0, 0);
  }

  // f: the weights of the norm.
  __device__ __forceinline__ uint4 normalised(const uint4& v, const uint4& f, float scale) const {
    if (norm_weight == nullptr) return v;
    return make_uint4(normalize_pair(unpack_pair(v.x, T()), scale, f.x, T()),
                      normalize_pair(unpack_pair(v.y, T()), scale, f.y, T()),
                      normalize_pair(unpack_pair(v.z, T()), scale, f.z, T()),
                      normalize_pair(unpack_pair(v.w, T()), scale, f.w, T()));
  }

  // Calls use(eight, inputs) for the warp's part of x: [k], all lanes together; an eight from `end`
  // on is not the warp's. With a norm the inputs are those of
  //   round(norm_weight * round(x / sqrt(mean(x^2) + eps)))
  // with the roundings of ops/rms_norm/add_rounded.cu; then all warps of the cluster, which
  // together have the whole row, call this together.
  template <typename Use>
  __device__ __forceinline__ void use_all(const void* row, int k, float eps, int num_splits, const Use& use) const {
    __shared__ __align__(16) float squares[kQuantisedWarps];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const T* const x = static_cast<const T*>(row);
    uint4 kept[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) kept[i] = load(x, first + lane + i * 32);
    float scale = 1.0f;
    if (norm_weight != nullptr) {
      float sum = 0.0f;
      const auto add = [&](const uint4& v) {
        float numbers[8];
        unpack<T>(v, numbers);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(numbers[i], numbers[i], sum);
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) add(kept[i]);
      for (int next = first + kAhead * 32; next < end; next += 32) add(load(x, next + lane));
      sum = warp_reduce<Sum>(sum);
      if (lane == 0) squares[warp] = sum;
      meet(num_splits);
      float total = 0.0f;
      for (int s = 0; s < num_splits; ++s) {
#pragma unroll
        for (int w = 0; w < kQuantisedWarps; w += 4) {
          const float4 v = num_splits == 1 ? *reinterpret_cast<const float4*>(squares + w)
                                           : cluster_load(cluster_address(shared_address(squares + w), s));
          total += (v.x + v.y) + (v.z + v.w);
        }
      }
      scale = rsqrtf(total / k + eps);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) use(first + lane + i * 32, normalised(kept[i], factors[i], scale));
    for (int next = first + kAhead * 32; next < end; next += 32) {
      use(next + lane, normalised(load(x, next + lane), factor_of(next + lane), scale));
    }
    __syncwarp();
  }
};

}  // namespace xserv
