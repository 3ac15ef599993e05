// Copies logits as f32, or leaves them where they are, and bans the tokens that masks forbid
// (src/ops/adjust_logits/mod.rs).
//
//   source: [num_rows, vocab_size]; target: the same as f32, or the source itself;
//   indices: [num_rows] the mask of each row, negative if it has none;
//   masks: [_, words] whose bit id % 32 of the word id / 32 is set for a token that may come
//
// A token that is banned gets the lowest finite number of the target, unless its logit is no finite
// number, so that damage is still detected.
#include <stdint.h>

#include "common/dtype.cuh"

namespace xserv {

constexpr float kLargest = 3.4028234663852886e38f;

// The lowest finite number of a type.
template <typename T>
constexpr float kLowest = -kLargest;
template <>
constexpr float kLowest<__nv_bfloat16> = -3.3895313892515355e38f;

template <typename T, typename Target>
__device__ __forceinline__ void mask_logits(const T* source, Target* target, const int* indices, const uint32_t* masks,
                                            int vocab_size, int words) {
  const int index = indices[blockIdx.y];
  const bool in_place = static_cast<const void*>(source) == static_cast<const void*>(target);
  if (index < 0 && in_place) return;
  const uint32_t* mask = index < 0 ? nullptr : masks + static_cast<int64_t>(index) * words;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * vocab_size;
  source += begin;
  target += begin;
  const bool is_aligned = reinterpret_cast<uintptr_t>(source) % sizeof(Vec<T, 4>) == 0 &&
                          reinterpret_cast<uintptr_t>(target) % sizeof(Vec<Target, 4>) == 0;
  // Four tokens at a time, whose bits lie in one word.
  const int num_groups = (vocab_size + 3) / 4;
  for (int group = blockIdx.x * blockDim.x + threadIdx.x; group < num_groups; group += gridDim.x * blockDim.x) {
    const uint32_t bits = mask == nullptr ? 0xf : mask[group / 8] >> (group % 8 * 4) & 0xf;
    if (bits == 0xf && in_place) continue;
    const int first = group * 4, count = min(4, vocab_size - first);
    float values[4];
    if (is_aligned && count == 4) {
      const Vec<T, 4> loaded = *reinterpret_cast<const Vec<T, 4>*>(source + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = to_float(loaded[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = i < count ? to_float(source[first + i]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((bits >> i & 1) == 0 && fabsf(values[i]) <= kLargest) values[i] = kLowest<Target>;
    }
    if (is_aligned && count == 4) {
      Vec<Target, 4> stored;
#pragma unroll
      for (int i = 0; i < 4; ++i) stored[i] = from_float<Target>(values[i]);
      *reinterpret_cast<Vec<Target, 4>*>(target + first) = stored;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) target[first + i] = from_float<Target>(values[i]);
      }
    }
  }
}

}  // namespace xserv

#define XSERV_MASK_LOGITS(SUFFIX, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(512)                                                             \
      xserv_mask_logits_##SUFFIX(const T* source, float* target, const int* indices, const uint32_t* masks,     \
                                 int vocab_size, int words) {                                                   \
    xserv::mask_logits<T>(source, target, indices, masks, vocab_size, words);                                   \
  }
XSERV_FOR_EACH_DTYPE(XSERV_MASK_LOGITS)

// Only bf16 has this variant: the lowest number of f16 is not low enough to be unlikely at every
// temperature.
extern "C" __global__ void __launch_bounds__(512)
    xserv_mask_in_place_bf16(__nv_bfloat16* logits, const int* indices, const uint32_t* masks, int vocab_size,
                             int words) {
  xserv::mask_logits<__nv_bfloat16>(logits, logits, indices, masks, vocab_size, words);
}
