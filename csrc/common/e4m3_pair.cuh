// Conversions of pairs of e4m3, for which chips from 8.9 on have instructions: what includes this is compiled
// once more for them (csrc/build.rs).
#pragma once

#include <stdint.h>

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

#if __CUDA_ARCH__ >= 890
// The numbers of the lower two codes of a register as f16, and those of the upper two; exactly.
__device__ __forceinline__ void e4m3_to_f16(uint32_t codes, uint32_t& lower, uint32_t& upper) {
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(lower), "=r"(upper)
      : "r"(codes));
}
#endif

}  // namespace xserv
