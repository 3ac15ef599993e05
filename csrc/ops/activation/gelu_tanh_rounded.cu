// GELU in the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415) with the roundings of
// Transformers' gelu_new, which PyTorch computes step by step:
//   y = round(round(x / 2) * round(1 + t)),  t = round(tanh(round(sqrt(2 / pi) * round(x + round(0.044715 * c))))),
//   c = round(round(x * x) * x)
// where round() is to T. In f32 the roundings do nothing. activation.cu rounds once.
//
// x, y: n contiguous elements; y may be x. _vec: 16 bytes per access, _scalar: unaligned pointers.
#include "common/dtype.cuh"
#include "common/map.cuh"

namespace xserv {

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <typename T>
__device__ __forceinline__ float gelu_tanh_rounded(float x) {
  constexpr float kSqrt2OverPi = 0.7978845608028654f;
  const float cube = rounded<T>(rounded<T>(x * x) * x);
  const float inner = rounded<T>(x + rounded<T>(0.044715f * cube));
  const float tanh = rounded<T>(tanhf(rounded<T>(kSqrt2OverPi * inner)));
  return rounded<T>(0.5f * x) * rounded<T>(1.0f + tanh);
}

}  // namespace xserv

#define XSERV_KERNELS(SUFFIX, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_gelu_tanh_rounded_vec_##SUFFIX(T* y, const T* x, long long n) {                               \
    xserv::map_vectors<T, 1, false>(y, x, x, n,                                                            \
                                    [](float a, float) { return xserv::gelu_tanh_rounded<T>(a); });       \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(512)                                                        \
      xserv_gelu_tanh_rounded_scalar_##SUFFIX(T* y, const T* x, long long n) {                            \
    xserv::map_elements<T, false>(y, x, x, n,                                                              \
                                  [](float a, float) { return xserv::gelu_tanh_rounded<T>(a); });         \
  }
XSERV_FOR_EACH_DTYPE(XSERV_KERNELS)
