// RMS norm (Zhang & Sennrich 2019, eq. 4) before a linear layer, rounded as in Transformers' Qwen3:
//   out = round(weight * round(x / sqrt(mean(x^2) + eps)))
// where round() is to T; sums and the root are in f32. x already has the sum of the residual stream:
// the linear layer before the norm has added its part itself (linear/skinny.cu).
//
// x, out: [num_rows, width], contiguous, 16-byte aligned; width is a multiple of 8 and at most 16 *
// blockDim.x; weight: [width].
//
// One block per row, which it keeps in registers: at most kMaxVectors vectors of 16 bytes per thread.
// The norm weights are loaded before the wait for the preceding kernel. The order of the sum is that of
// add_rounded.cu, to the same bits.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

namespace xserv {

struct RmsNormRoundedParams {
  const void* x;
  const void* weight;
  void* out;
  int width;
  float eps;
};
XSERV_LAYOUT_RmsNormRoundedParams;

template <typename T, int kMaxVectors>
__device__ __forceinline__ void rms_norm_rounded(const RmsNormRoundedParams& p) {
  using V = Vec<T, 8>;
  __shared__ float scratch[32];
  const int num_vectors = p.width / 8;
  const V* x = reinterpret_cast<const V*>(p.x) + static_cast<int64_t>(blockIdx.x) * num_vectors;
  V* out = reinterpret_cast<V*>(p.out) + static_cast<int64_t>(blockIdx.x) * num_vectors;
  const V* weight = reinterpret_cast<const V*>(p.weight);
  V factors[kMaxVectors], values[kMaxVectors];
  dependency_launch();
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < num_vectors) factors[i] = weight[v];
  }
  dependency_wait();
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < num_vectors) values[i] = x[v];
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    if (threadIdx.x + i * blockDim.x < num_vectors) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = __fmaf_rn(to_float(values[i][j]), to_float(values[i][j]), sum);
    }
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum, scratch) / p.width + p.eps);
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < num_vectors) {
      V result;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float normed = to_float(from_float<T>(to_float(values[i][j]) * scale));
        result[j] = from_float<T>(normed * to_float(factors[i][j]));
      }
      out[v] = result;
    }
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T)                                              \
  extern "C" __global__ void __launch_bounds__(1024)                         \
      xserv_rms_norm_rounded_##SUFFIX(const __grid_constant__ xserv::RmsNormRoundedParams params) { \
    xserv::rms_norm_rounded<T, 2>(params);                                      \
  }
XSERV_KERNEL(f16, __half)
XSERV_KERNEL(bf16, __nv_bfloat16)
