// y = a + b and y = a * b, computed in f32, rounded once at the store.
//
// _vec: same shape, contiguous: 16 bytes per access. _scalar: the same for unaligned pointers. _strided: any
// strides and broadcasting (stride 0) over up to 8 axes; _strided_vec the same where the innermost axis is
// contiguous in all three and everything is 16-byte aligned. y may be a or b, with the same layout.
#include "common/dtype.cuh"
#include "common/map.cuh"
#include "common/strided.cuh"

namespace xserv {

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Mul {
  __device__ __forceinline__ float operator()(float a, float b) const { return a * b; }
};

template <typename T, int N, typename F>
__device__ __forceinline__ void map_strided(T* y, const T* a, const T* b, const StridedLayout& layout, F f) {
  using V = Vec<T, N>;
  const unsigned unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= static_cast<unsigned>(layout.num_units)) return;
  long long offsets[3];
  strided_offsets(layout, unit, offsets);
  const V left = reinterpret_cast<const V*>(a)[offsets[1]];
  const V right = reinterpret_cast<const V*>(b)[offsets[2]];
  V result;
#pragma unroll
  for (int j = 0; j < N; j++) result[j] = from_float<T>(f(to_float(left[j]), to_float(right[j])));
  reinterpret_cast<V*>(y)[offsets[0]] = result;
}

}  // namespace xserv

#define XSERV_BINARY(SUFFIX, T, NAME, F)                                                 \
  extern "C" __global__ void __launch_bounds__(512)                                      \
      xserv_##NAME##_vec_##SUFFIX(T* y, const T* a, const T* b, long long n) {           \
    xserv::map_vectors<T, 1, true>(y, a, b, n, F{});                                     \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(512)                                      \
      xserv_##NAME##_scalar_##SUFFIX(T* y, const T* a, const T* b, long long n) {        \
    xserv::map_elements<T, true>(y, a, b, n, F{});                                       \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(512) xserv_##NAME##_strided_##SUFFIX(     \
      T* y, const T* a, const T* b, xserv::StridedLayout layout) {                       \
    xserv::map_strided<T, 1>(y, a, b, layout, F{});                                      \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(512) xserv_##NAME##_strided_vec_##SUFFIX( \
      T* y, const T* a, const T* b, xserv::StridedLayout layout) {                       \
    xserv::map_strided<T, xserv::kVec<T>>(y, a, b, layout, F{});                         \
  }
#define XSERV_ELEMENTWISE(SUFFIX, T)       \
  XSERV_BINARY(SUFFIX, T, add, xserv::Add) \
  XSERV_BINARY(SUFFIX, T, mul, xserv::Mul)
XSERV_FOR_EACH_DTYPE(XSERV_ELEMENTWISE)
