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

// Returns the best score in the groups first, first + step, ... of the tokens with values of at least `least_value`
// that `is_eligible(value, id)` leaves. Some such token of the row must have a score of at least `lowest`. All threads
// of the block call it.
template <typename T, typename Eligible>
__device__ __forceinline__ uint64_t best_score(const LogitsRow<T>& row, const SampleRow& how, float maximum,
                                               float lowest, float least_value, int first, int step,
                                               const Eligible& is_eligible) {
  uint64_t best = 0;
  const float per_temperature = 1.0f / how.temperature;
  row.template for_each_group<2>(first, step, [&](int group, const float (&values)[4], int count) {
    // The noise that each token needs to reach `lowest`, approximately.
    float needed[4], least = __builtin_huge_valf();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      needed[i] = lowest - (values[i] - maximum) * per_temperature;
      if (values[i] < least_value) needed[i] = __builtin_huge_valf();
      least = fminf(least, needed[i]);
    }
    if (count > 0 && least <= kMaxGumbel + 0.1f) {
      const uint4 bits = noise_bits(how, group);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The noise is at most -log(uniform), which is too little most of the time; this test avoids
        // the more expensive logarithms.
        if (i >= count || uniform(word(bits, i)) > 1.01f * __expf(-needed[i])) continue;
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
