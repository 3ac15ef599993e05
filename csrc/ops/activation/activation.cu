// Activations, elementwise, f32 inside and one rounding at the store:
//   gelu_tanh(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
//   gelu_erf(x)  = x / 2 * (1 + erf(x / sqrt(2)))          (Hendrycks & Gimpel 2016, arXiv:1606.08415)
//   silu(x)      = x / (1 + exp(-x))
// The quotient forms need one exponential and no tanh, keep their relative accuracy for negative x, and come
// out right where the cube or the exponential overflows: x / 1 and x / inf.
//
// x, y: n contiguous elements; _vec: 16 bytes per access, _scalar: unaligned pointers. y may be x.
//
// On an H200 they run at the speed of a copy (8192 x 4096 bf16: gelu_tanh and silu 33.5 us); more accesses
// per thread or larger blocks gained nothing.
#include "common/dtype.cuh"
#include "common/exp2.cuh"
#include "common/map.cuh"
#include "common/silu.cuh"

namespace xserv {

__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  const float minus_2u = -kTwoSqrt2OverPi * x * (1.0f + 0.044715f * x * x);
  return __fdividef(x, 1.0f + __expf(minus_2u));
}

// Does without the handling of denormals in __expf and __fdividef: the arguments are far from them.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
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
  const float erfc = poly * exp2_approx(-0.72134752f * size * size);  // e^(-z^2)
  const float positive = x > 0.0f ? x : 0.0f * x;  // NaN stays NaN
  return positive - 0.5f * size * erfc;
}

}  // namespace xserv

// U: 16-byte accesses per thread under way; two hide more latency than one where arithmetic takes its time.
#define XSERV_UNARY(SUFFIX, T, NAME, U, FUNCTION)                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_##NAME##_vec_##SUFFIX(T* y, const T* x, long long n) {                                         \
    xserv::map_vectors<T, U, false>(y, x, x, n, [](float a, float) { return xserv::FUNCTION(a); });        \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_##NAME##_scalar_##SUFFIX(T* y, const T* x, long long n) {                                      \
    xserv::map_elements<T, false>(y, x, x, n, [](float a, float) { return xserv::FUNCTION(a); });          \
  }
#define XSERV_ACTIVATION(SUFFIX, T)                             \
  XSERV_UNARY(SUFFIX, T, gelu_tanh, 1, gelu_tanh)               \
  XSERV_UNARY(SUFFIX, T, gelu_erf, 2, gelu_erf<T>)              \
  XSERV_UNARY(SUFFIX, T, silu, 1, silu)
XSERV_FOR_EACH_DTYPE(XSERV_ACTIVATION)
