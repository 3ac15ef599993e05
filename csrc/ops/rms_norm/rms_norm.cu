// RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4):
//   out = x / sqrt(mean(x^2) + eps) * weight
// and the same after a residual addition:
//   residual_out = x + residual, rounded to T;  out = rms_norm(residual_out) * weight
// x, residual, residual_out, out: [num_rows, width], last axis contiguous; weight: [width].
//
// Computed in f32 with one rounding at the store (Hugging Face rounds to T before the weight as well).
// out may be x, residual_out may be residual or x.
//
// _row: one block per row, the row in registers, 16 elements per thread, so that it is read once and
// all of its loads are under way together. Among 4 to 32 elements per thread, 16 do best on an H200
// overall, for one row and for 8192 rows of 4096, in f32 and bf16; blocks that walk over rows and
// prefetch gain nothing. _stream: the same for results larger than the L2 cache: reads and writes leave
// the caches at once, and the weights are read after the reduction, so that a block needs 32 registers
// a thread and more rows are under way (8192 x 4096 bf16 on an H200: 34.4 to 34.7 us, _row 36.1).
// _group<N>: narrow rows (heads) of at most N vectors, 16 or 32 lanes per row, many rows per block, no
// shared memory. _loop and _scalar: any width; they read the row twice, the second time from the cache.
#include "common/dtype.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace xserv {

template <typename T, int VECS>
__device__ __forceinline__ float sum_of_squares(const Vec<T, kVec<T>> (&row)[VECS]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS; i++) {
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      const float value = to_float(row[i][j]);
      sum += value * value;
    }
  }
  return sum;
}

template <typename T, int VECS>
__device__ __forceinline__ void store_scaled(T* target, const Vec<T, kVec<T>> (&row)[VECS],
                                             const Vec<T, kVec<T>> (&weight)[VECS], float scale,
                                             int num_vecs, int thread, int num_threads) {
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    Vec<T, kVec<T>> result;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      result[j] = from_float<T>(to_float(row[i][j]) * scale * to_float(weight[i][j]));
    }
    const int v = thread + i * num_threads;
    if (v < num_vecs) store_vec(target, v, result);
  }
}

// Rows of at most VECS vectors per thread.
template <typename T, int VECS>
__device__ __forceinline__ void rms_norm_row(T* out, const T* x, const T* weight, int width, float eps,
                                             const KernelRows& out_layout, const KernelRows& x_layout) {
  __shared__ float scratch[32];
  const int num_vecs = width / kVec<T>, thread = threadIdx.x, num_threads = blockDim.x;
  const float inverse_width = 1.0f / width;
  Vec<T, kVec<T>> values[VECS], weights[VECS];
  load_row(values, x + x_layout.offset(blockIdx.x), num_vecs, thread, num_threads);
  load_row_const(weights, weight, num_vecs, thread, num_threads);
  const float sum = block_reduce<Sum>(sum_of_squares(values), scratch);
  const float scale = rsqrtf(sum * inverse_width + eps);
  store_scaled(out + out_layout.offset(blockIdx.x), values, weights, scale, num_vecs, thread, num_threads);
}

template <typename T, int VECS>
__device__ __forceinline__ void rms_norm_stream(T* out, const T* x, const T* weight, int width, float eps,
                                                const KernelRows& out_layout, const KernelRows& x_layout) {
  using V = Vec<T, kVec<T>>;
  __shared__ float scratch[32];
  const int num_vecs = width / kVec<T>, thread = threadIdx.x, num_threads = blockDim.x;
  const float inverse_width = 1.0f / width;
  V values[VECS];
  load_row_once(values, x + x_layout.offset(blockIdx.x), num_vecs, thread, num_threads);
  const float sum = block_reduce<Sum>(sum_of_squares(values), scratch);
  const float scale = rsqrtf(sum * inverse_width + eps);
  V* target = reinterpret_cast<V*>(out + out_layout.offset(blockIdx.x));
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int v = thread + i * num_threads;
    if (v >= num_vecs) continue;
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(weight) + v);
    const V& factors = reinterpret_cast<const V&>(bits);
    V result;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      result[j] = from_float<T>(to_float(values[i][j]) * scale * to_float(factors[j]));
    }
    store_streaming(target + v, result);
  }
}

template <typename T, int VECS>
__device__ __forceinline__ void add_rms_norm_row(T* out, T* residual_out, const T* x, const T* residual,
                                                 const T* weight, int width, float eps, long long out_stride,
                                                 long long residual_out_stride, long long x_stride,
                                                 long long residual_stride) {
  __shared__ float scratch[32];
  const int num_vecs = width / kVec<T>, thread = threadIdx.x, num_threads = blockDim.x;
  const float inverse_width = 1.0f / width;
  const long long row = blockIdx.x;
  Vec<T, kVec<T>> values[VECS], residuals[VECS], weights[VECS], sums[VECS];
  load_row(values, x + row * x_stride, num_vecs, thread, num_threads);
  load_row(residuals, residual + row * residual_stride, num_vecs, thread, num_threads);
  load_row_const(weights, weight, num_vecs, thread, num_threads);
#pragma unroll
  for (int i = 0; i < VECS; i++) {
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      sums[i][j] = from_float<T>(to_float(values[i][j]) + to_float(residuals[i][j]));
    }
    const int v = thread + i * num_threads;
    if (v < num_vecs) store_vec(residual_out + row * residual_out_stride, v, sums[i]);
  }
  const float sum = block_reduce<Sum>(sum_of_squares(sums), scratch);
  const float scale = rsqrtf(sum * inverse_width + eps);
  store_scaled(out + row * out_stride, sums, weights, scale, num_vecs, thread, num_threads);
}

// Rows of at most LANES * VECS vectors. A group without a row keeps the last row's data and stores nothing,
// so that its lanes take part in the shuffles.
template <typename T, int LANES, int VECS>
__device__ __forceinline__ void rms_norm_group(T* out, const T* x, const T* weight, long long num_rows,
                                               int width, float eps, const KernelRows& out_layout,
                                               const KernelRows& x_layout) {
  const int num_vecs = width / kVec<T>, thread = threadIdx.x % LANES;
  const long long wanted = static_cast<long long>(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
  const long long row = wanted < num_rows ? wanted : num_rows - 1;
  Vec<T, kVec<T>> values[VECS], weights[VECS];
  load_row(values, x + x_layout.offset(row), num_vecs, thread, LANES);
  load_row_const(weights, weight, num_vecs, thread, LANES);
  const float sum = group_sum<LANES>(sum_of_squares(values));
  const float scale = rsqrtf(sum / width + eps);
  if (wanted < num_rows) {
    store_scaled(out + out_layout.offset(row), values, weights, scale, num_vecs, thread, LANES);
  }
}

// Any width; N elements per access (1, or kVec<T> where everything is 16-byte aligned).
template <typename T, int N>
__device__ __forceinline__ void rms_norm_loop(T* out, const T* x, const T* weight, int width, float eps,
                                              const KernelRows& out_layout, const KernelRows& x_layout) {
  using V = Vec<T, N>;
  __shared__ float scratch[32];
  const V* source = reinterpret_cast<const V*>(x + x_layout.offset(blockIdx.x));
  V* target = reinterpret_cast<V*>(out + out_layout.offset(blockIdx.x));
  const V* weights = reinterpret_cast<const V*>(weight);
  float sum = 0.0f;
#pragma unroll 4
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v];
#pragma unroll
    for (int j = 0; j < N; j++) sum += to_float(values[j]) * to_float(values[j]);
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum, scratch) / width + eps);
#pragma unroll 2
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v], factors = weights[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) {
      result[j] = from_float<T>(to_float(values[j]) * scale * to_float(factors[j]));
    }
    target[v] = result;
  }
}

template <typename T, int N>
__device__ __forceinline__ void add_rms_norm_loop(T* out, T* residual_out, const T* x, const T* residual,
                                                  const T* weight, int width, float eps, long long out_stride,
                                                  long long residual_out_stride, long long x_stride,
                                                  long long residual_stride) {
  using V = Vec<T, N>;
  __shared__ float scratch[32];
  const long long row = blockIdx.x;
  const V* source = reinterpret_cast<const V*>(x + row * x_stride);
  const V* residual_source = reinterpret_cast<const V*>(residual + row * residual_stride);
  V* residual_target = reinterpret_cast<V*>(residual_out + row * residual_out_stride);
  V* target = reinterpret_cast<V*>(out + row * out_stride);
  const V* weights = reinterpret_cast<const V*>(weight);
  float sum = 0.0f;
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v], residuals = residual_source[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) {
      result[j] = from_float<T>(to_float(values[j]) + to_float(residuals[j]));
      sum += to_float(result[j]) * to_float(result[j]);
    }
    residual_target[v] = result;
  }
  const float scale = rsqrtf(block_reduce<Sum>(sum, scratch) / width + eps);
  // Each thread reads back what it wrote itself.
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = residual_target[v], factors = weights[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) {
      result[j] = from_float<T>(to_float(values[j]) * scale * to_float(factors[j]));
    }
    target[v] = result;
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T, NAME, MAX_THREADS, CALL)                                                   \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS) xserv_rms_norm_##NAME##_##SUFFIX(              \
      T* out, const T* x, const T* __restrict__ weight, long long num_rows, int width, float eps,          \
      xserv::KernelRows out_layout, xserv::KernelRows x_layout) {                                            \
    CALL;                                                                                                  \
  }
#define XSERV_ADD_KERNEL(SUFFIX, T, NAME, MAX_THREADS, FUNCTION, N)                                        \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS) xserv_add_rms_norm_##NAME##_##SUFFIX(          \
      T* out, T* residual_out, const T* x, const T* residual, const T* __restrict__ weight, int width,     \
      float eps, long long out_stride, long long residual_out_stride, long long x_stride,                  \
      long long residual_stride) {                                                                         \
    xserv::FUNCTION<T, N>(out, residual_out, x, residual, weight, width, eps, out_stride,                  \
                          residual_out_stride, x_stride, residual_stride);                                 \
  }

// Two blocks of 1024 threads, where a multiprocessor is known to have room for two.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XSERV_STREAM_BLOCKS 2
#else
#define XSERV_STREAM_BLOCKS 1
#endif

// Rows of up to 16384 elements: 1024 threads may use 64 registers each, which is enough.
#define XSERV_ROW(SUFFIX, T)                                                                               \
  XSERV_KERNEL(SUFFIX, T, row, 1024,                                                                        \
               (xserv::rms_norm_row<T, 16 / xserv::kVec<T>>(out, x, weight, width, eps, out_layout,        \
                                                            x_layout)))                                    \
  extern "C" __global__ void __launch_bounds__(1024, XSERV_STREAM_BLOCKS)                                  \
  xserv_rms_norm_stream_##SUFFIX(                                                                          \
      T* out, const T* x, const T* __restrict__ weight, long long num_rows, int width, float eps,          \
      xserv::KernelRows out_layout, xserv::KernelRows x_layout) {                                            \
    xserv::rms_norm_stream<T, 16 / xserv::kVec<T>>(out, x, weight, width, eps, out_layout, x_layout);      \
  }                                                                                                        \
  XSERV_ADD_KERNEL(SUFFIX, T, row, 1024, add_rms_norm_row, 16 / xserv::kVec<T>)

#define XSERV_GROUP(SUFFIX, T, NAME, LANES, VECS)                                                          \
  XSERV_KERNEL(SUFFIX, T, NAME, 256,                                                                       \
               (xserv::rms_norm_group<T, LANES, VECS>(out, x, weight, num_rows, width, eps, out_layout,    \
                                                      x_layout)))

#define XSERV_LOOP(SUFFIX, T, NAME, N)                                                                     \
  XSERV_KERNEL(SUFFIX, T, NAME, 1024,                                                                      \
               (xserv::rms_norm_loop<T, N>(out, x, weight, width, eps, out_layout, x_layout)))             \
  XSERV_ADD_KERNEL(SUFFIX, T, NAME, 1024, add_rms_norm_loop, N)

#define XSERV_RMS_NORM(SUFFIX, T)                 \
  XSERV_ROW(SUFFIX, T)                            \
  XSERV_GROUP(SUFFIX, T, group16, 16, 1)          \
  XSERV_GROUP(SUFFIX, T, group32, 32, 1)          \
  XSERV_GROUP(SUFFIX, T, group64, 32, 2)          \
  XSERV_GROUP(SUFFIX, T, group128, 32, 4)         \
  XSERV_LOOP(SUFFIX, T, loop, xserv::kVec<T>)     \
  XSERV_LOOP(SUFFIX, T, scalar, 1)
XSERV_FOR_EACH_DTYPE(XSERV_RMS_NORM)
