// Activations, elementwise, f32 inside and one rounding at the store:
//   gelu_tanh(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
//   gelu_erf(x)  = x / 2 * (1 + erf(x / sqrt(2)))          (Hendrycks & Gimpel 2016, arXiv:1606.08415)
//   silu(x)      = x / (1 + exp(-x))
//   silu_mul     = silu(gate) * up                          (SwiGLU: Shazeer 2020, arXiv:2002.05202)
// The quotient forms need one exponential and no tanh, keep their relative accuracy for negative x, and come
// out right where the cube or the exponential overflows: x / 1 and x / inf.
//
// x, y: n contiguous elements; _vec: 16 bytes per access, _scalar: unaligned pointers. gate, up, y of
// silu_mul: [num_rows, width] with a stride per row each, so that gate and up may be the halves of one
// [num_rows, 2 * width] matrix. `parts` blocks share a row, neighbours in the grid as they are in memory. y
// may be an operand.
//
// On an H200 they run at the speed of a copy (8192 x 4096 bf16: gelu_tanh and silu 33.5 us, silu_mul of
// 4096 x 12288 71 us = 4.3 TB/s, 73 us with rows as the fast index of the grid); more accesses per thread or
// larger blocks gained nothing.
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

// Without the care for denormals that __expf and __fdividef take: for arguments far from them.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// f32 keeps the library's erf. For 16-bit results, Abramowitz & Stegun 7.1.26 with z = |x| / sqrt(2)
// (|error of erf| < 1.5e-7) takes a third of the instructions: the kernel is bound by arithmetic there.
template <typename T>
__device__ __forceinline__ float gelu_erf(float x) {
  if (sizeof(T) == 4) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  const float size = fminf(fabsf(x), 30.0f);
  const float t = reciprocal(1.0f + 0.23164189f * size);  // 0.3275911 / sqrt(2)
  const float poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f +
                                                                                       t * 1.061405429f))));
  const float erfc = poly * power_of_two(-0.72134752f * size * size);  // e^(-z^2)
  const float positive = x > 0.0f ? x : 0.0f * x;  // NaN stays NaN
  return positive - 0.5f * size * erfc;
}

// Vectors of one element: any alignment.
template <typename T, int N>
__device__ __forceinline__ void silu_mul_row(T* y, const T* gate, const T* up, int width, int parts,
                                             long long y_stride, long long gate_stride,
                                             long long up_stride) {
  using V = Vec<T, N>;
  const unsigned row = blockIdx.x / parts, part = blockIdx.x % parts;
  const V* gates = reinterpret_cast<const V*>(gate + row * gate_stride);
  const V* ups = reinterpret_cast<const V*>(up + row * up_stride);
  V* target = reinterpret_cast<V*>(y + row * y_stride);
  const unsigned num_vecs = width / N, step = parts * blockDim.x;
  for (unsigned v = part * blockDim.x + threadIdx.x; v < num_vecs; v += step) {
    const V g = gates[v], u = ups[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) result[j] = from_float<T>(silu(to_float(g[j])) * to_float(u[j]));
    target[v] = result;
  }
}

}  // namespace xserv

// U: 16-byte accesses per thread under way; where arithmetic takes its time, two hide more of it than one.
#define XSERV_UNARY(SUFFIX, T, NAME, U, FUNCTION)                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_##NAME##_vec_##SUFFIX(T* y, const T* x, long long n) {                                         \
    xserv::map_vectors<T, U, false>(y, x, x, n, [](float a, float) { return xserv::FUNCTION(a); });        \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_##NAME##_scalar_##SUFFIX(T* y, const T* x, long long n) {                                      \
    xserv::map_elements<T, false>(y, x, x, n, [](float a, float) { return xserv::FUNCTION(a); });          \
  }
#define XSERV_SILU_MUL(NAME, T, N)                                                                         \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_silu_mul_##NAME(T* y, const T* gate, const T* up, int width, int parts, long long y_stride,    \
                            long long gate_stride, long long up_stride) {                                  \
    xserv::silu_mul_row<T, N>(y, gate, up, width, parts, y_stride, gate_stride, up_stride);                \
  }
#define XSERV_ACTIVATION(SUFFIX, T)                             \
  XSERV_UNARY(SUFFIX, T, gelu_tanh, 1, gelu_tanh)               \
  XSERV_UNARY(SUFFIX, T, gelu_erf, 2, gelu_erf<T>)              \
  XSERV_UNARY(SUFFIX, T, silu, 1, silu)                         \
  XSERV_SILU_MUL(vec_##SUFFIX, T, xserv::kVec<T>)               \
  XSERV_SILU_MUL(scalar_##SUFFIX, T, 1)
XSERV_FOR_EACH_DTYPE(XSERV_ACTIVATION)
