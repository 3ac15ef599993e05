// Activations, elementwise, f32 inside and one rounding at the store:
//   gelu_tanh(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
//   gelu_erf(x)  = x / 2 * (1 + erf(x / sqrt(2)))          (Hendrycks & Gimpel 2016, arXiv:1606.08415)
//   silu(x)      = x / (1 + exp(-x))
//   silu_mul     = silu(gate) * up                          (SwiGLU: Shazeer 2020, arXiv:2002.05202)
// The quotient forms need one exponential and no tanh, keep their relative accuracy for negative x, and come
// out right where the cube or the exponential overflows: x / 1 and x / inf.
//
// x, y: n contiguous elements. gate, up, y of silu_mul: [num_rows, width] with a stride per row each, so
// that gate and up may be the halves of one [num_rows, 2 * width] matrix. y may be an operand.
#include "common/dtype.cuh"
#include "common/map.cuh"

namespace xserv {

// __fdividef returns 0 for divisors in (2^126, 2^128), where the quotient is below 1e-35 here anyway; an
// infinite divisor gives 0 too.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  const float minus_2u = -kTwoSqrt2OverPi * x * (1.0f + 0.044715f * x * x);
  return __fdividef(x, 1.0f + __expf(minus_2u));
}

// f32 keeps the library's erf. For 16-bit results, Abramowitz & Stegun 7.1.26 (|error of erf| < 1.5e-7) takes
// half the instructions, without which this kernel is bound by arithmetic, not by memory.
template <typename T>
__device__ __forceinline__ float gelu_erf(float x) {
  if (sizeof(T) == 4) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  const float z = fminf(fabsf(x), 30.0f) * 0.70710678118654752f;
  const float t = __fdividef(1.0f, 1.0f + 0.3275911f * z);
  const float poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f +
                                                                                       t * 1.061405429f))));
  const float erfc = poly * __expf(-z * z);
  const float positive = x > 0.0f ? x : 0.0f * x;  // NaN stays NaN
  return positive - z * 0.70710678118654752f * erfc;
}

template <typename T, int U>
__device__ __forceinline__ void silu_mul_vectors(T* y, const T* gate, const T* up, int width, long long y_stride,
                                                 long long gate_stride, long long up_stride) {
  using V = Vec<T, kVec<T>>;
  const long long row = blockIdx.x;
  const int num_vecs = width / kVec<T>;
  const int first = blockIdx.y * blockDim.x * U + threadIdx.x;
  const V* gates = reinterpret_cast<const V*>(gate + row * gate_stride);
  const V* ups = reinterpret_cast<const V*>(up + row * up_stride);
  V* target = reinterpret_cast<V*>(y + row * y_stride);
  V g[U], u[U];
#pragma unroll
  for (int i = 0; i < U; i++) {
    const int v = first + i * blockDim.x;
    if (v < num_vecs) {
      g[i] = gates[v];
      u[i] = ups[v];
    }
  }
#pragma unroll
  for (int i = 0; i < U; i++) {
    const int v = first + i * blockDim.x;
    V result;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      result[j] = from_float<T>(silu(to_float(g[i][j])) * to_float(u[i][j]));
    }
    if (v < num_vecs) target[v] = result;
  }
}

template <typename T>
__device__ __forceinline__ void silu_mul_elements(T* y, const T* gate, const T* up, int width, long long y_stride,
                                                  long long gate_stride, long long up_stride) {
  const long long row = blockIdx.x;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
    y[row * y_stride + i] = from_float<T>(silu(to_float(gate[row * gate_stride + i])) *
                                          to_float(up[row * up_stride + i]));
  }
}

}  // namespace xserv

#define XSERV_UNARY(SUFFIX, T, NAME, U, FUNCTION)                                                      \
  extern "C" __global__ void __launch_bounds__(512) xserv_##NAME##_u##U##_##SUFFIX(T* y, const T* x,   \
                                                                                   long long n) {      \
    xserv::map_vectors<T, U, false>(y, x, x, n, [](float a, float) { return xserv::FUNCTION(a); });    \
  }
#define XSERV_UNARY_SCALAR(SUFFIX, T, NAME, FUNCTION)                                                  \
  extern "C" __global__ void __launch_bounds__(512) xserv_##NAME##_scalar_##SUFFIX(T* y, const T* x,   \
                                                                                   long long n) {      \
    xserv::map_elements<T, false>(y, x, x, n, [](float a, float) { return xserv::FUNCTION(a); });      \
  }
#define XSERV_SILU_MUL(SUFFIX, T, U)                                                                   \
  extern "C" __global__ void __launch_bounds__(512) xserv_silu_mul_u##U##_##SUFFIX(                    \
      T* y, const T* gate, const T* up, int width, long long y_stride, long long gate_stride,          \
      long long up_stride) {                                                                           \
    xserv::silu_mul_vectors<T, U>(y, gate, up, width, y_stride, gate_stride, up_stride);               \
  }

#define XSERV_ACTIVATION(SUFFIX, T)                                                                    \
  XSERV_UNARY(SUFFIX, T, gelu_tanh, 1, gelu_tanh)                                                      \
  XSERV_UNARY(SUFFIX, T, gelu_tanh, 2, gelu_tanh)                                                      \
  XSERV_UNARY(SUFFIX, T, gelu_tanh, 4, gelu_tanh)                                                      \
  XSERV_UNARY_SCALAR(SUFFIX, T, gelu_tanh, gelu_tanh)                                                  \
  XSERV_UNARY(SUFFIX, T, gelu_erf, 1, gelu_erf<T>)                                                     \
  XSERV_UNARY(SUFFIX, T, gelu_erf, 2, gelu_erf<T>)                                                     \
  XSERV_UNARY_SCALAR(SUFFIX, T, gelu_erf, gelu_erf<T>)                                                 \
  XSERV_UNARY(SUFFIX, T, silu, 1, silu)                                                                \
  XSERV_UNARY(SUFFIX, T, silu, 2, silu)                                                                \
  XSERV_UNARY(SUFFIX, T, silu, 4, silu)                                                                \
  XSERV_UNARY_SCALAR(SUFFIX, T, silu, silu)                                                            \
  XSERV_SILU_MUL(SUFFIX, T, 1)                                                                         \
  XSERV_SILU_MUL(SUFFIX, T, 2)                                                                         \
  XSERV_SILU_MUL(SUFFIX, T, 4)                                                                         \
  extern "C" __global__ void __launch_bounds__(512) xserv_silu_mul_scalar_##SUFFIX(                    \
      T* y, const T* gate, const T* up, int width, long long y_stride, long long gate_stride,          \
      long long up_stride) {                                                                           \
    xserv::silu_mul_elements<T>(y, gate, up, width, y_stride, gate_stride, up_stride);                 \
  }
XSERV_FOR_EACH_DTYPE(XSERV_ACTIVATION)
