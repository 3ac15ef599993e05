// Quantised activations: e4m3 codes with a scale for each token and 128 inputs, as the FP8 linear
// layers of Transformers and of DeepSeek's models compute them:
//   scale = max |x| / 448, code = e4m3(x / scale)
// both in f32, rounded to the nearest. Where all of the 128 are 0 the scale and the codes are 0.
// Numbers that are not finite make the scale so, and all products with it.
//
// codes: [num_tokens, 128 * groups], zeros after the end of x; scales: f32 [groups, pitch].
#pragma once

#include <stdint.h>

#include "common/gemv.cuh"
#include "common/e4m3_pair.cuh"

namespace xserv {

// The codes and the scale of 128 inputs, of which each of 16 neighbouring lanes has eight.
__device__ __forceinline__ float quantise_eight(const float (&x)[8], uint32_t (&words)[2]) {
  // As integers sizes have the order of the numbers, and what is no number is larger than all.
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, distance));
  const float largest = __uint_as_float(bits);
  const float scale = largest / 448.0f;
  float quotients[8];
  if (scale >= 0x1p-60f) {
    // Two corrections with the inverse give the quotient that a division rounds to, in half of its
    // instructions; only zeros lose their sign.
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float q = x[i] * inverse;
      q = fmaf(fmaf(-q, scale, x[i]), inverse, q);
      quotients[i] = copysignf(fmaf(fmaf(-q, scale, x[i]), inverse, q), x[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) quotients[i] = x[i] / scale;
  }
  const bool is_zero = scale == 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* q = quotients + i * 4;
    const uint32_t low = e4m3_pair(q[0], q[1]), high = e4m3_pair(q[2], q[3]);
    words[i] = is_zero ? 0 : low | high << 16;
  }
  return scale;
}

// Stores what quantise_eight gives for the eight inputs `eight` of a group.
__device__ __forceinline__ void store_eight(uint8_t* codes, float* scales, int token, int group, int eight,
                                            int num_groups, int pitch, const uint32_t (&words)[2], float scale) {
  uint8_t* target = codes + (static_cast<int64_t>(token) * num_groups + group) * 128 + eight * 8;
  *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  if (eight == 0) scales[static_cast<int64_t>(group) * pitch + token] = scale;
}

}  // namespace xserv
