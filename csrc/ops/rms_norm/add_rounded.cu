// Residual addition and RMS norm (Zhang & Sennrich 2019, eq. 4) with the roundings of Transformers' Qwen3:
//   residual = round(residual + x)                        left out where x is null
//   out = round(weight * round(residual / sqrt(mean(residual^2) + eps)))
// where round() is to T; sums and the root are in f32. In f32 the roundings do nothing. rms_norm.cu
// rounds once, which is closer to the exact value, but therefore does not give the tokens that
// Transformers gives.
//
// x, residual, out: [num_rows, width], contiguous; weight: [width]. out is neither x nor residual.
//
// One block per row. N elements per access: 1, or kVec<T> where rows are whole vectors of 16 bytes.
// Data that does not stay in registers is read again from the cache for the second pass: each thread
// reads what it wrote itself.
#include "common/dtype.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

namespace xserv {

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <typename T, int N>
__device__ __forceinline__ void add_rms_norm_rounded(T* out, T* residual, const T* x, const T* weight,
                                                      int width, float eps) {
  using V = Vec<T, N>;
  __shared__ float scratch[32];
  const long long first = static_cast<long long>(blockIdx.x) * width;
  V* sums = reinterpret_cast<V*>(residual + first);
  const V* terms = reinterpret_cast<const V*>(x + first);
  const V* weights = reinterpret_cast<const V*>(weight);
  V* target = reinterpret_cast<V*>(out + first);
  // The first access of a thread stays in registers, which is the whole row for rows of up to 1024
  // accesses.
  const int own = threadIdx.x, num_accesses = width / N;
  V kept_weight{}, kept{};
  dependency_launch();
  if (own < num_accesses) kept_weight = weights[own];
  dependency_wait();
  float sum = 0.0f;
  for (int v = own; v < num_accesses; v += blockDim.x) {
    V values = sums[v];
    if (x != nullptr) {
      const V term = terms[v];
#pragma unroll
      for (int j = 0; j < N; j++) values[j] = from_float<T>(to_float(values[j]) + to_float(term[j]));
      sums[v] = values;
    }
#pragma unroll
    for (int j = 0; j < N; j++) sum = __fmaf_rn(to_float(values[j]), to_float(values[j]), sum);
    if (v == own) kept = values;
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum, scratch) / width + eps);
  for (int v = own; v < num_accesses; v += blockDim.x) {
    const V values = v == own ? kept : sums[v], factors = v == own ? kept_weight : weights[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) {
      result[j] = from_float<T>(rounded<T>(to_float(values[j]) * scale) * to_float(factors[j]));
    }
    target[v] = result;
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T, NAME, N)                                                                     \
  extern "C" __global__ void __launch_bounds__(1024) xserv_add_rms_norm_rounded_##NAME##_##SUFFIX(         \
      T* out, T* residual, const T* x, const T* weight, int width, float eps) {                              \
    xserv::add_rms_norm_rounded<T, N>(out, residual, x, weight, width, eps);                                \
  }
#define XSERV_KERNELS(SUFFIX, T)                   \
  XSERV_KERNEL(SUFFIX, T, vec, xserv::kVec<T>)     \
  XSERV_KERNEL(SUFFIX, T, scalar, 1)
XSERV_FOR_EACH_DTYPE(XSERV_KERNELS)
