// The exponential of base 2 by one instruction.
#pragma once

namespace xserv {

constexpr float kLog2E = 1.4426950408889634f;

// 2^x, off by up to 2 units of the last place; results below the smallest normal number become
// zero. NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace xserv
