// Shared by the linear layers of decode for few tokens: reads of weights and activations, and the norm
// of pairs.
#pragma once

#include <stdint.h>

#include "common/dtype.cuh"

namespace xserv {

__device__ __forceinline__ uint4 load_weight(const char* source, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source), "l"(policy));
  return v;
}
// The same in the order of the program: ptxas (13.0) moves reads of the read-only path past a wait,
// to their first use, as it cannot know that they belong before it for speed; a step of a small
// model took a third longer that way.
__device__ __forceinline__ uint4 load_weight_in_order(const char* source, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source), "l"(policy)
               : "memory");
  return v;
}
// The same if row < num_rows and chunk < num_chunks; else zero.
__device__ __forceinline__ uint4 load_weight_within(int row, int num_rows, int chunk, int num_chunks,
                                                    const char* source, uint64_t policy) {
  uint4 v;
  asm volatile(
      "{.reg .pred p, q; setp.lt.s32 q, %6, %7; setp.lt.and.s32 p, %8, %9, q;"
      "@!p mov.b32 %0, 0; @!p mov.b32 %1, 0; @!p mov.b32 %2, 0; @!p mov.b32 %3, 0;"
      "@p ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(source), "l"(policy), "r"(row), "r"(num_rows), "r"(chunk), "r"(num_chunks)
      : "memory");
  return v;
}
// Reads what an earlier kernel of the chain wrote: not through the read-only path, whose data may be
// older than the wait.
__device__ __forceinline__ uint4 load_activations(const void* source) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}
// The policy makes weights leave the L2 first, which saves 2 % of a step of Qwen3-8B (H200).
__device__ __forceinline__ uint64_t weight_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ float2 unpack_pair(uint32_t word, __nv_bfloat16) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack_pair(uint32_t word, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}
template <typename T>
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair(words[i], T());
    f[2 * i] = pair.x, f[2 * i + 1] = pair.y;
  }
}
// round(weight * round(x * scale)): the product of two T is exact in f32 and rounded once.
__device__ __forceinline__ uint32_t normalize_pair(float2 x, float scale, uint32_t weight, __nv_bfloat16) {
  const __nv_bfloat162 c = __hmul2_rn(__floats2bfloat162_rn(x.x * scale, x.y * scale),
                                      reinterpret_cast<const __nv_bfloat162&>(weight));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ uint32_t normalize_pair(float2 x, float scale, uint32_t weight, __half) {
  const __half2 c =
      __hmul2_rn(__floats2half2_rn(x.x * scale, x.y * scale), reinterpret_cast<const __half2&>(weight));
  return reinterpret_cast<const uint32_t&>(c);
}

}  // namespace xserv
