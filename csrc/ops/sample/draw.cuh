// Random draws from a row: the token with the best sum of log-probability and Gumbel noise.
#pragma once

#include "ops/sample/random.cuh"
#include "ops/sample/row.cuh"

namespace xserv {

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Returns the random bits of the tokens 4 * group to 4 * group + 3.
__device__ __forceinline__ uint4 noise_bits(const SampleRow& how, int group) {
  return philox(how.seed, make_uint4(static_cast<uint32_t>(how.index), static_cast<uint32_t>(how.index >> 32),
                                     group, 0));
}

// The logarithm of base 2 of 1.01.
constexpr float kSlack = 0.0143553f;

// Returns the best score in the groups first, first + step, ... of the tokens with values of at
// least `least_value` that `is_eligible(value, id)` leaves. Some such token of the row must have a
// score of at least `lowest`. All threads of the block call it.
template <typename T, typename Eligible>
__device__ __forceinline__ uint64_t best_score(const LogitsRow<T>& row, const SampleRow& how, float maximum,
                                               float lowest, float least_value, int first, int step,
                                               const Eligible& is_eligible) {
  uint64_t best = 0;
  const float per_unit = fminf(kLog2E / how.temperature, 0x1p127f);
  row.template for_each_group<2>(first, step, [&](int group, const float (&values)[4], int count) {
    // The noise is at most -log(uniform()), so a token reaches `lowest` only where its random
    // number is below a limit. Most are not; the limits, of which these are the logarithms of base
    // 2, make do without the expensive logarithms of the noise. They are a hundredth too high, and
    // so on the safe side of what they approximate.
    const float limit_at_maximum = kSlack - lowest * kLog2E;
    float limits[4], largest = -__builtin_huge_valf();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      limits[i] = fmaf(values[i] - maximum, per_unit, limit_at_maximum);
      if (values[i] < least_value) limits[i] = -__builtin_huge_valf();
      largest = fmaxf(largest, limits[i]);
    }
    if (count > 0 && largest >= -(kMaxGumbel + 0.1f) * kLog2E) {
      const uint4 bits = noise_bits(how, group);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float number = fmaf(static_cast<float>(word(bits, i)), 0x1p-32f, 0x1p-33f);  // uniform(), or nearly 1
        if (i >= count || number > exp2_approx(limits[i])) continue;
        if (!is_eligible(values[i], group * 4 + i)) continue;
        const float score = (values[i] - maximum) / how.temperature + gumbel(word(bits, i));
        best = larger(best, pair_key(score, group * 4 + i));
        lowest = fmaxf(lowest, score);
      }
    }
    lowest = value_of_key(__reduce_max_sync(kFullWarp, order_key(lowest)));
  });
  return best;
}

// Returns the score of the most likely token, which passes every filter.
__device__ __forceinline__ float likeliest_score(const SampleRow& how, int likeliest) {
  __shared__ float score;
  if (threadIdx.x == 0) score = gumbel(word(noise_bits(how, likeliest / 4), likeliest % 4));
  __syncthreads();
  return score;
}

}  // namespace xserv
