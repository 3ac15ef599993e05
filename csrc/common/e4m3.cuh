// Numbers of eight bits with a sign, four bits of exponent and three of fraction (e4m3fn of the
// OCP's 8-bit floating point specification): up to 448, without infinities; 0x7f and 0xff are no
// numbers.
#pragma once

#include <stdint.h>

namespace xserv {

// The number that a code stands for.
__device__ __forceinline__ float e4m3_number(uint32_t code) {
  // The bits of a small f32, which differs by a power of 2.
  const float size =
      (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
  return code & 0x80 ? -size : size;
}

// An element of a tensor of such numbers.
struct Fp8 {
  uint8_t code;
};
__device__ __forceinline__ float to_float(Fp8 number) { return e4m3_number(number.code); }

}  // namespace xserv
