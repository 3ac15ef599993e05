// Quantised activations: e4m3 codes with a scale for each token and 128 inputs, as the FP8 linear layers of Transformers
// and of DeepSeek's models compute them:
//   scale = max |x| / 448, code = e4m3(x / scale)
// both in f32, rounded to the nearest. Where all of the 128 are 0 the scale and the codes are 0. Numbers that are not
// finite make the scale so, and all products with it.
//
// codes: [num_tokens, 128 * groups], zeros after the end of x; scales: f32 [groups, pitch]. Among every 32 codes, the
// fours 0, 2, 4, 6 of the inputs come first and then the fours 1, 3, 5, 7: a lane t of mma.m16n8k32, and of wgmma, so
// finds the inputs 8 t to 8 t + 7 of a weight's tile (src/ops/quantised/tiles.rs) in its two registers.
#pragma once

#include <stdint.h>

#include "common/gemv.cuh"

namespace xserv {

// Two numbers as e4m3, the first in the lower byte; what is too large becomes 448.
__device__ __forceinline__ uint32_t e4m3_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  const auto code = [](float value) -> uint32_t {
    const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
    const float size = fabsf(value);
    if (!(size <= 448.0f)) return sign | (size > 448.0f ? 0x7e : 0x7f);
    // A multiple of the distance to the next number; at least 2^-9, that of the subnormal ones.
    const int exponent = max(static_cast<int>(__float_as_uint(size) >> 23) - 127, -6);
    const int steps = __float2int_rn(size * __uint_as_float((130 - exponent) << 23));
    return sign | ((exponent + 6) * 8 + steps);
  };
  return code(first) | code(second) << 8;
#endif
}

// The number that a code stands for.
__device__ __forceinline__ float e4m3_number(uint32_t code) {
  const float size = __uint_as_float((code & 0x7f) << 20) * __uint_as_float(247u << 23);  // 2^120
  const float number = (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : size;
  return code & 0x80 ? -number : number;
}

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
  const bool is_zero = scale == 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* v = x + i * 4;
    const uint32_t low = e4m3_pair(v[0] / scale, v[1] / scale), high = e4m3_pair(v[2] / scale, v[3] / scale);
    words[i] = is_zero ? 0 : low | high << 16;
  }
  return scale;
}

// Stores what quantise_eight gives for the eight inputs `eight` of a group.
__device__ __forceinline__ void store_eight(uint8_t* codes, float* scales, int token, int group, int eight,
                                            int num_groups, int pitch, const uint32_t (&words)[2], float scale) {
  uint8_t* target = codes + (static_cast<int64_t>(token) * num_groups + group) * 128 + eight / 4 * 32 + eight % 4 * 4;
  *reinterpret_cast<uint32_t*>(target) = words[0];
  *reinterpret_cast<uint32_t*>(target + 16) = words[1];
  if (eight == 0) scales[static_cast<int64_t>(group) * pitch + token] = scale;
}

}  // namespace xserv
