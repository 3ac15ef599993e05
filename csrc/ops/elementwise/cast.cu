// y = x in another element type, rounded to nearest even; f16 overflows to infinity.
//
// Contiguous: U groups of 4 elements per thread, so that an f32 access is 16 bytes and a 16-bit one 8.
// _strided: up to 8 axes, strides in elements of each side.
#include "common/dtype.cuh"
#include "common/strided.cuh"

namespace xserv {

constexpr int kCastUnroll = 4;

// Grid: ceil(n / (blockDim.x * 16)) blocks, x and y aligned to 4 elements; the last block takes the
// last n % 4 elements.
template <typename To, typename From>
__device__ __forceinline__ void cast_vectors(To* __restrict__ y, const From* __restrict__ x, long long n) {
  const long long num_groups = n / 4;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x * kCastUnroll + threadIdx.x;
  Vec<From, 4> values[kCastUnroll];
#pragma unroll
  for (int i = 0; i < kCastUnroll; i++) {
    const long long group = first + i * blockDim.x;
    if (group < num_groups) values[i] = reinterpret_cast<const Vec<From, 4>*>(x)[group];
  }
#pragma unroll
  for (int i = 0; i < kCastUnroll; i++) {
    const long long group = first + i * blockDim.x;
    Vec<To, 4> result;
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] = from_float<To>(to_float(values[i][j]));
    if (group < num_groups) reinterpret_cast<Vec<To, 4>*>(y)[group] = result;
  }
  const long long i = num_groups * 4 + threadIdx.x;
  if (blockIdx.x + 1 == gridDim.x && i < n) y[i] = from_float<To>(to_float(x[i]));
}

template <typename To, typename From>
__device__ __forceinline__ void cast_strided(To* __restrict__ y, const From* __restrict__ x,
                                             const StridedLayout& layout) {
  const unsigned unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= static_cast<unsigned>(layout.num_units)) return;
  long long offsets[2];
  strided_offsets(layout, unit, offsets);
  y[offsets[0]] = from_float<To>(to_float(x[offsets[1]]));
}

}  // namespace xserv

#define XSERV_CAST(FROM_SUFFIX, From, TO_SUFFIX, To)                         \
  extern "C" __global__ void __launch_bounds__(512)                          \
      xserv_cast_##FROM_SUFFIX##_##TO_SUFFIX(To* y, const From* x, long long n) { \
    xserv::cast_vectors<To, From>(y, x, n);                                  \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(512)                          \
      xserv_cast_strided_##FROM_SUFFIX##_##TO_SUFFIX(To* y, const From* x,   \
                                                     xserv::StridedLayout layout) { \
    xserv::cast_strided<To, From>(y, x, layout);                             \
  }
XSERV_CAST(f32, float, f16, __half)
XSERV_CAST(f32, float, bf16, __nv_bfloat16)
XSERV_CAST(f16, __half, f32, float)
XSERV_CAST(f16, __half, bf16, __nv_bfloat16)
XSERV_CAST(bf16, __nv_bfloat16, f32, float)
XSERV_CAST(bf16, __nv_bfloat16, f16, __half)
