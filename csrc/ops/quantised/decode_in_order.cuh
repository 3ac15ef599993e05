// Decoding of codes of FP8 in their order. Chips from 8.9 on have an instruction for it, for which sources are
// compiled once more: so it is not in decode.cuh, which more of them include.
#pragma once

#include "common/e4m3_pair.cuh"
#include "ops/quantised/decode.cuh"

namespace xserv {

// Four codes of FP8 in order as two pairs of numbers of T.
__device__ __forceinline__ void decode_in_order(uint32_t word, uint32_t (&pairs)[2], __nv_bfloat16) {
  constexpr uint32_t kScale = 0x7b807b80u;  // 2^120
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);  // each in the upper byte of a half
    pairs[i] = multiply_pairs(masked_or<0x07f007f0u>(high >> 4, high & 0x80008000u), kScale, __nv_bfloat16());
  }
}
__device__ __forceinline__ void decode_in_order(uint32_t word, uint32_t (&pairs)[2], __half) {
#if __CUDA_ARCH__ >= 890
  e4m3_to_f16(word, pairs[0], pairs[1]);
#else
  constexpr uint32_t kScale = 0x5c005c00u;  // 2^8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
    pairs[i] = multiply_pairs(masked_or<0x3f803f80u>(high >> 1, high & 0x80008000u), kScale, __half());
  }
#endif
}

}  // namespace xserv
