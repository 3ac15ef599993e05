// One row of x as integers of 16 bits, made by the warps of a product for themselves: the numbers
// of 128 inputs are multiples of a power of two, of which the largest is from 8192 up to 16384. So
// a number that is at least a 64th of the largest loses nothing in bf16, and none is off by more
// than 2^-14 of the largest. The high and the low bytes of the integers are two columns of a
// product of bytes on tensor cores.
#pragma once

#include "ops/linear/warp_inputs.cuh"

namespace xserv {

// kUnits: parts of 128 inputs whose sums are wanted. A warp leaves in shared memory
// * at `bytes`, for every 64 inputs, two columns of 64 bytes: the high bytes and the low ones. In a
//   column lane quarter t finds its 16 bytes beside each other: of either half of the 64 inputs
//   those from 8 t on.
// * at `sums`, for every unit, the sum of its integers and the power of two, as i32 and f32. With
//   kIsPaired the second and the third of four bytes change places, as in words of codes of 4 bits
//   (decode.cuh).
template <typename T, int kUnits, bool kIsPaired>
struct IntegerInputs : WarpInputs<T> {
  static constexpr int kUnitEights = kStageEights / kUnits;

  uint32_t bytes, sums;

  __device__ __forceinline__ IntegerInputs(const void* norm_weight, int k, int begin, int end, uint32_t bytes, uint32_t sums)
      : WarpInputs<T>(norm_weight, k, begin, end), bytes(bytes), sums(sums) {}

  // Makes the integers of the eight inputs v of every lane.
  __device__ __forceinline__ void make(int eight, const uint4& v) const {
    const auto [is_finite, up, down] = stage_power<T>(v);
    float numbers[8];
    unpack<T>(v, numbers);
    uint32_t high[2], low[2];
    int sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The last 16 bits of these are the integers and 128, so that the high byte is that of the
      // nearest multiple of 256, and the low one what is left and 128.
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
    if (eight < this->end) {
      const uint32_t place = bytes + (eight >> 3) * 128 + (eight & 3) * 16 + (eight >> 2 & 1) * 8;
      store_shared_pair(place, high[0], high[1]);
      store_shared_pair(place + 64, low[0], low[1]);
      if (eight % kUnitEights == 0) store_shared_pair(sums + eight / kUnitEights * 8, static_cast<uint32_t>(sum), down);
    }
  }

  // See WarpInputs::use_all().
  __device__ __forceinline__ void make_all(const void* row, int k, float eps, int num_splits) const {
    this->use_all(row, k, eps, num_splits, [&](int eight, const uint4& v) { make(eight, v); });
  }
};

}  // namespace xserv
