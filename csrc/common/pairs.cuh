// Two elements of 16 bits in a word.
#pragma once

#include <type_traits>

#include "common/dtype.cuh"
#include "common/mma.cuh"
#include "common/silu.cuh"

namespace xserv {

// Operations on two elements each, whose results are rounded; they are never fused.
template <typename T>
struct Pairs {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  __device__ __forceinline__ static Pair of(uint32_t v) { return reinterpret_cast<const Pair&>(v); }
  __device__ __forceinline__ static uint32_t bits(Pair v) { return reinterpret_cast<const uint32_t&>(v); }
  __device__ __forceinline__ static uint32_t multiply(uint32_t a, uint32_t b) {
    return bits(__hmul2_rn(of(a), of(b)));
  }
  __device__ __forceinline__ static uint32_t add(uint32_t a, uint32_t b) {
    return bits(__hadd2_rn(of(a), of(b)));
  }
  __device__ __forceinline__ static uint32_t subtract(uint32_t a, uint32_t b) {
    return bits(__hsub2_rn(of(a), of(b)));
  }
  __device__ __forceinline__ static float2 floats(uint32_t v) {
    const Vec<T, 2> pair = reinterpret_cast<const Vec<T, 2>&>(v);
    return make_float2(to_float(pair[0]), to_float(pair[1]));
  }
};

// Computes two elements of round(round(silu(round(gate))) * round(up)). The quotient and the exponential of
// silu are those of the hardware, within 2 units in the last place of f32.
template <typename T>
__device__ __forceinline__ uint32_t gated(float gate0, float gate1, float up0, float up1) {
  // The gate is rounded as a pair: ptxas (13.0) turns single conversions to f16 into ones that keep the
  // products of the next tile from overlapping.
  const float2 gate = Pairs<T>::floats(pack_pair<T>(gate0, gate1));
  const uint32_t activated = pack_pair<T>(silu(gate.x), silu(gate.y));
  return Pairs<T>::multiply(activated, pack_pair<T>(up0, up1));
}

}  // namespace xserv
