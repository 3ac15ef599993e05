// Reductions over a warp and over a block, in a fixed order: the same inputs give the same bits.
#pragma once

namespace xserv {

constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  static constexpr float kIdentity = 0.0f;
  __device__ __forceinline__ static float combine(float a, float b) { return a + b; }
};

struct Max {
  // NaN wins, so that it is not lost on the way.
  static constexpr float kIdentity = -__builtin_huge_valf();
  __device__ __forceinline__ static float combine(float a, float b) {
    return (a > b || a != a) ? a : b;
  }
};

// All lanes get the result.
template <typename Op>
__device__ __forceinline__ float warp_reduce(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    value = Op::combine(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// All threads get the result. `scratch` is shared memory for 32 floats of this reduction alone; a
// second use of the same scratch needs a __syncthreads() in between. blockDim.x is a multiple of 32.
template <typename Op>
__device__ __forceinline__ float block_reduce(float value, float* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  value = warp_reduce<Op>(value);
  if (num_warps == 1) return value;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = lane < num_warps ? scratch[lane] : Op::kIdentity;
  return warp_reduce<Op>(value);
}

}  // namespace xserv
