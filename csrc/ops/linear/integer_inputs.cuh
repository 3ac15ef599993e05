// One row of x as integers of 16 bits, made by the warps of a product for themselves: the numbers of 128 inputs are
// multiples of a power of two, of which the largest is from 8192 up to 16384. So a number that is at least a 64th of
// the largest loses nothing in bf16, and none is off by more than 2^-14 of the largest. The high and the low bytes of
// the integers are two columns of a product of bytes on tensor cores.
#pragma once

#include "common/cluster.cuh"
#include "common/gemv.cuh"
#include "common/reduce.cuh"
#include "ops/linear/quantised.cuh"

namespace xserv {

__device__ __forceinline__ void store_shared_pair(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// kUnits: parts of 128 inputs whose sums are wanted. A warp has the inputs from stage `begin` up to `end`, each of 128
// (zeros behind the end of the row), and leaves in shared memory
// * at `bytes`, for every 64 inputs, two columns of 64 bytes: the high bytes and the low ones. In a column lane
//   quarter t finds its 16 bytes beside each other: of either half of the 64 inputs those from 8 t on.
// * at `sums`, for every unit, the sum of its integers and the power of two, as i32 and f32.
// With kIsPaired the second and the third of four bytes change places, as in words of codes of 4 bits (decode.cuh).
template <typename T, int kUnits, bool kIsPaired>
struct IntegerInputs {
  static constexpr int kAhead = 2;  // vectors of eight inputs that a lane keeps
  static constexpr int kStageEights = 16, kUnitEights = kStageEights / kUnits;

  const T* norm_weight;  // null: x is taken as it is
  int num_eights, first, end;
  uint32_t bytes, sums;
  uint4 factors[kAhead];

  // Reads weights only.
  __device__ __forceinline__ IntegerInputs(const void* norm_weight, int k, int begin, int end, uint32_t bytes, uint32_t sums)
      : norm_weight(static_cast<const T*>(norm_weight)),
        num_eights(k / 8),
        first(begin * kStageEights),
        end(end * kStageEights),
        bytes(bytes),
        sums(sums) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) factors[i] = factor_of(first + (threadIdx.x & 31) + i * 32);
  }

  __device__ __forceinline__ uint4 load(const T* from, int eight) const {
    return eight < min(end, num_eights) ? load_activations(from + eight * 8) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ uint4 factor_of(int eight) const {
    return norm_weight != nullptr ? load(norm_weight, eight) : make_uint4(0, 0, 0, 0);
  }

  // Makes the integers of the eight inputs v of every lane; f are the weights of their norm.
  __device__ __forceinline__ void make(int eight, uint4 v, const uint4& f, float scale) const {
    if (norm_weight != nullptr) {
      v = make_uint4(normalize_pair(unpack_pair(v.x, T()), scale, f.x, T()),
                     normalize_pair(unpack_pair(v.y, T()), scale, f.y, T()),
                     normalize_pair(unpack_pair(v.z, T()), scale, f.z, T()),
                     normalize_pair(unpack_pair(v.w, T()), scale, f.w, T()));
    }
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
    const float up = is_finite ? __uint_as_float((267 - exponent) << 23) : 0.0f;
    // One number that is none makes all sums none.
    const uint32_t down = is_finite ? (exponent - 13) << 23 : 0x7fffffffu;
    float numbers[8];
    unpack<T>(v, numbers);
    uint32_t high[2], low[2];
    int sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The last 16 bits of these are the integers and 128, so that the high byte is that of the nearest multiple of
      // 256, and the low one what is left and 128.
      uint32_t q[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[i] = __float_as_uint(fmaf(is_finite ? numbers[half * 4 + i] : 0.0f, up, 0x1.8p23f + 128.0f));
      }
      const uint32_t a = __byte_perm(q[0], q[kIsPaired ? 2 : 1], 0x5140), b = __byte_perm(q[kIsPaired ? 1 : 2], q[3], 0x5140);
      high[half] = __byte_perm(a, b, 0x7632);
      low[half] = __byte_perm(a, b, 0x5410) ^ 0x80808080u;
      constexpr int kOnes = 0x01010101;
      sum += __dp4a(static_cast<int>(high[half]), kOnes, 0) * 256 + __dp4a(static_cast<int>(low[half]), kOnes, 0);
    }
#pragma unroll
    for (int offset = kUnitEights / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (eight < end) {
      const uint32_t place = bytes + (eight >> 3) * 128 + (eight & 3) * 16 + (eight >> 2 & 1) * 8;
      store_shared_pair(place, high[0], high[1]);
      store_shared_pair(place + 64, low[0], low[1]);
      if (eight % kUnitEights == 0) store_shared_pair(sums + eight / kUnitEights * 8, static_cast<uint32_t>(sum), down);
    }
  }

  // Makes the integers of the warp's part of x: [k]. With a norm they are those of
  //   round(norm_weight * round(x / sqrt(mean(x^2) + eps)))
  // with the roundings of ops/rms_norm/add_rounded.cu; then all warps of the cluster, which together have the whole
  // row, call this together.
  __device__ __forceinline__ void make_all(const void* row, int k, float eps, int num_splits) const {
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
    for (int i = 0; i < kAhead; ++i) make(first + lane + i * 32, kept[i], factors[i], scale);
    for (int next = first + kAhead * 32; next < end; next += 32) {
      make(next + lane, load(x, next + lane), factor_of(next + lane), scale);
    }
    __syncwarp();
  }
};

}  // namespace xserv
