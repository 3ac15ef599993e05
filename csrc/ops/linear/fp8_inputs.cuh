// One row of x as numbers of f16 for products with weights of FP8, made by the warps of a product
// for themselves: x times a power of two for 128 inputs. Numbers of bf16 that are at least 2^-30 of
// the largest lose nothing, nor do those of f16 that are at least 2^-27 of it.
#pragma once

#include "ops/linear/warp_inputs.cuh"

namespace xserv {

// A warp leaves in shared memory
// * at `numbers` the numbers, in the order of x;
// * at `scales`, for every 128 inputs, the inverse of the power of two, eight bytes apart.
template <typename T>
struct Fp8Inputs : WarpInputs<T> {
  uint32_t numbers, scales;

  __device__ __forceinline__ Fp8Inputs(const void* norm_weight, int k, int begin, int end, uint32_t numbers, uint32_t scales)
      : WarpInputs<T>(norm_weight, k, begin, end), numbers(numbers), scales(scales) {}

  // Makes the numbers of the eight inputs v of every lane.
  __device__ __forceinline__ void make(int eight, const uint4& v) const {
    float x[8];
    unpack<T>(v, x);
    uint32_t pairs[4];
    const auto [is_finite, up, down] = stage_power<T>(v);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = is_finite ? pack_pair<__half>(x[2 * i] * up, x[2 * i + 1] * up) : 0;
    if (eight >= this->end) return;
    const uint32_t place = numbers + eight * 16;
    store_shared_pair(place, pairs[0], pairs[1]);
    store_shared_pair(place + 8, pairs[2], pairs[3]);
    if (eight % kStageEights == 0) store_shared_pair(scales + eight / kStageEights * 8, down, 0);
  }

  // See WarpInputs::use_all().
  __device__ __forceinline__ void make_all(const void* row, int k, float eps, int num_splits) const {
    this->use_all(row, k, eps, num_splits, [&](int eight, const uint4& v) { make(eight, v); });
  }
};

}  // namespace xserv
