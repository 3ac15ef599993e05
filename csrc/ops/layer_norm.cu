// Layer norm (Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 4):
//   out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
// x, out: [num_rows, width], last axis contiguous; weight, bias: [width], bias may be null. The variance is
// that of the population. f32 inside, one rounding at the store. out may be x.
//
// The mean and the sum of squared deviations M2 of parts are merged as in Chan, Golub & LeVeque 1979
// (eq. 2.1), so a row with a large mean loses nothing to cancellation:
// _v<VECS>: one block per row at a time, the row in registers. Each warp computes the mean of its part, then
// M2 about that mean; one exchange through shared memory merges the warps. The _p form fetches the next
// row before it reduces the present one.
// _loop and _scalar: any width; Welford's update per thread, then the same merging. They read twice.
#include "common/dtype.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace xserv {

struct Moments {
  float mean;
  float m2;
};

// Moments of the whole block from those of its warps; `count` is the warp's number of elements.
__device__ __forceinline__ Moments merge_warps(float count, Moments part, float inverse_width,
                                               float (&scratch)[3][32]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  if (num_warps == 1) return part;
  if (lane == 0) {
    scratch[0][warp] = count;
    scratch[1][warp] = part.mean;
    scratch[2][warp] = part.m2;
  }
  __syncthreads();
  const bool is_valid = lane < num_warps;
  count = is_valid ? scratch[0][lane] : 0.0f;
  part.mean = is_valid ? scratch[1][lane] : 0.0f;
  part.m2 = is_valid ? scratch[2][lane] : 0.0f;
  Moments whole;
  whole.mean = warp_reduce<Sum>(count * inverse_width * part.mean);
  const float deviation = part.mean - whole.mean;
  whole.m2 = warp_reduce<Sum>(part.m2 + count * deviation * deviation);
  return whole;
}

template <typename T, int VECS>
__device__ __forceinline__ Moments row_moments(const Vec<T, kVec<T>> (&row)[VECS], int num_vecs, int thread,
                                               int num_threads, float inverse_width, float (&scratch)[3][32]) {
  const int first = thread & ~31;  // the warp's first thread
  int count = 0;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    count += min(max(num_vecs - first - i * num_threads, 0), 32);
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) sum += to_float(row[i][j]);
  }
  count *= kVec<T>;
  Moments part;
  part.mean = warp_reduce<Sum>(sum) / max(count, 1);
  part.m2 = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    if (thread + i * num_threads < num_vecs) {
#pragma unroll
      for (int j = 0; j < kVec<T>; j++) {
        const float deviation = to_float(row[i][j]) - part.mean;
        part.m2 += deviation * deviation;
      }
    }
  }
  part.m2 = warp_reduce<Sum>(part.m2);
  return merge_warps(static_cast<float>(count), part, inverse_width, scratch);
}

template <typename T, int VECS, bool PREFETCH>
__device__ __forceinline__ void layer_norm_rows(T* out, const T* x, const T* weight, const T* bias,
                                                long long num_rows, int width, float eps, long long out_stride,
                                                long long x_stride) {
  __shared__ float scratch[2][3][32];
  const int num_vecs = width / kVec<T>, thread = threadIdx.x, num_threads = blockDim.x;
  const float inverse_width = 1.0f / width;
  long long row = blockIdx.x;
  Vec<T, kVec<T>> values[VECS], next_values[VECS], weights[VECS], biases[VECS];
  load_row(values, x + row * x_stride, num_vecs, thread, num_threads);
  load_row_const(weights, weight, num_vecs, thread, num_threads);
  load_row_const(biases, bias, bias != nullptr ? num_vecs : 0, thread, num_threads);
  for (int parity = 0;; parity ^= 1) {
    const long long next_row = row + gridDim.x;
    if (PREFETCH && next_row < num_rows) {
      load_row(next_values, x + next_row * x_stride, num_vecs, thread, num_threads);
    }
    const Moments moments =
        row_moments<T, VECS>(values, num_vecs, thread, num_threads, inverse_width, scratch[parity]);
    const float scale = rsqrtf(moments.m2 * inverse_width + eps);
    T* target = out + row * out_stride;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
      Vec<T, kVec<T>> result;
#pragma unroll
      for (int j = 0; j < kVec<T>; j++) {
        const float normalized = (to_float(values[i][j]) - moments.mean) * scale;
        result[j] = from_float<T>(normalized * to_float(weights[i][j]) + to_float(biases[i][j]));
      }
      const int v = thread + i * num_threads;
      if (v < num_vecs) store_vec(target, v, result);
    }
    row = next_row;
    if (row >= num_rows) break;
    if (PREFETCH) {
#pragma unroll
      for (int i = 0; i < VECS; i++) values[i] = next_values[i];
    } else {
      load_row(values, x + row * x_stride, num_vecs, thread, num_threads);
    }
  }
}

// Any width; N elements per access (1, or kVec<T> where everything is 16-byte aligned).
template <typename T, int N>
__device__ __forceinline__ void layer_norm_loop(T* out, const T* x, const T* weight, const T* bias, int width,
                                                float eps, long long out_stride, long long x_stride) {
  using V = Vec<T, N>;
  __shared__ float scratch[3][32];
  const V* source = reinterpret_cast<const V*>(x + blockIdx.x * x_stride);
  V* target = reinterpret_cast<V*>(out + blockIdx.x * out_stride);
  float count = 0.0f;
  Moments part = {0.0f, 0.0f};
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v];
    // The vector's own moments first: one division per vector instead of one per element.
    float mean = 0.0f, m2 = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) mean += to_float(values[j]) * (1.0f / N);
#pragma unroll
    for (int j = 0; j < N; j++) m2 += (to_float(values[j]) - mean) * (to_float(values[j]) - mean);
    const float share = N / (count + N), delta = mean - part.mean;
    part.m2 += m2 + delta * delta * count * share;
    part.mean += delta * share;
    count += N;
  }
  const float warp_count = warp_reduce<Sum>(count);
  const float mean = warp_reduce<Sum>(count * part.mean) / fmaxf(warp_count, 1.0f);
  const float deviation = part.mean - mean;
  part.m2 = warp_reduce<Sum>(part.m2 + count * deviation * deviation);
  part.mean = mean;
  const Moments moments = merge_warps(warp_count, part, 1.0f / width, scratch);
  const float scale = rsqrtf(moments.m2 / width + eps);
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v], weights = reinterpret_cast<const V*>(weight)[v];
    V biases, result;
#pragma unroll
    for (int j = 0; j < N; j++) biases[j] = from_float<T>(0.0f);
    if (bias != nullptr) biases = reinterpret_cast<const V*>(bias)[v];
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float normalized = (to_float(values[j]) - moments.mean) * scale;
      result[j] = from_float<T>(normalized * to_float(weights[j]) + to_float(biases[j]));
    }
    target[v] = result;
  }
}

}  // namespace xserv

#define XSERV_ROWS(SUFFIX, T, NAME, VECS, PREFETCH, MAX_THREADS)                                       \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS) xserv_layer_norm_##NAME##_##SUFFIX(        \
      T* out, const T* x, const T* __restrict__ weight, const T* __restrict__ bias, long long num_rows, \
      int width, float eps, long long out_stride, long long x_stride) {                                \
    xserv::layer_norm_rows<T, VECS, PREFETCH>(out, x, weight, bias, num_rows, width, eps, out_stride,  \
                                              x_stride);                                               \
  }

#define XSERV_LOOP(SUFFIX, T, NAME, N)                                                                 \
  extern "C" __global__ void __launch_bounds__(1024) xserv_layer_norm_##NAME##_##SUFFIX(               \
      T* out, const T* x, const T* __restrict__ weight, const T* __restrict__ bias, long long num_rows, \
      int width, float eps, long long out_stride, long long x_stride) {                                \
    xserv::layer_norm_loop<T, N>(out, x, weight, bias, width, eps, out_stride, x_stride);              \
  }

#define XSERV_LAYER_NORM(SUFFIX, T)                  \
  XSERV_ROWS(SUFFIX, T, v1, 1, false, 1024)          \
  XSERV_ROWS(SUFFIX, T, v2, 2, false, 512)           \
  XSERV_ROWS(SUFFIX, T, v4, 4, false, 512)           \
  XSERV_ROWS(SUFFIX, T, v1p, 1, true, 1024)          \
  XSERV_ROWS(SUFFIX, T, v2p, 2, true, 512)           \
  XSERV_ROWS(SUFFIX, T, v4p, 4, true, 256)           \
  XSERV_LOOP(SUFFIX, T, loop, xserv::kVec<T>)        \
  XSERV_LOOP(SUFFIX, T, scalar, 1)
XSERV_FOR_EACH_DTYPE(XSERV_LAYER_NORM)
