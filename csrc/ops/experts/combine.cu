// Adds the results of every token's experts to the residual stream:
//   out[t, i] = round(out[t, i] + round(sum_j weights[t, j] * y[places[t, j], i]))
// in f32, in the order of the token's choices; round() is to T.
//
// out: [num_tokens, width]; y: [num_tokens * per_token, width], a row for each slot; places, weights:
// [num_tokens, per_token].
#include "ops/experts/route.cuh"

namespace xserv {

// kWidth: neighbouring columns of a thread.
template <typename T, int kWidth>
__device__ __forceinline__ void combine(T* out, const T* y, const int* places, const float* weights, int width,
                                        int per_token) {
  dependency_launch();
  dependency_wait();
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (column >= width) return;
  const int64_t token = blockIdx.x;
  places += token * per_token, weights += token * per_token;
  using Columns = Vec<T, kWidth>;
  Columns* target = reinterpret_cast<Columns*>(out + token * width + column);
  const Columns old = *target;
  float sums[kWidth] = {};
#pragma unroll 8
  for (int j = 0; j < per_token; ++j) {
    const Columns part = *reinterpret_cast<const Columns*>(y + static_cast<int64_t>(places[j]) * width + column);
    const float weight = weights[j];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] = fmaf(weight, to_float(part[i]), sums[i]);
  }
  Columns result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    result[i] = from_float<T>(to_float(old[i]) + to_float(from_float<T>(sums[i])));
  }
  *target = result;
}

}  // namespace xserv

// xserv_experts_combine_<vec or one>_<dtype>: grid (tokens, columns); vec: 16 bytes of columns a thread.
#define XSERV_EXPERTS_COMBINE(SUFFIX, T)                                                                          \
  extern "C" __global__ void __launch_bounds__(256) xserv_experts_combine_vec_##SUFFIX(                           \
      T* out, const T* y, const int* places, const float* weights, int width, int per_token) {                    \
    xserv::combine<T, xserv::kVec<T>>(out, y, places, weights, width, per_token);                                 \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(256) xserv_experts_combine_one_##SUFFIX(                           \
      T* out, const T* y, const int* places, const float* weights, int width, int per_token) {                    \
    xserv::combine<T, 1>(out, y, places, weights, width, per_token);                                              \
  }
XSERV_FOR_EACH_DTYPE(XSERV_EXPERTS_COMBINE)
