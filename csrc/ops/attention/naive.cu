// Attention with its scores in memory: softmax(scale * Q K^T + mask) V, as a reference and for odd
// head_dims.
//
//   q, out: [batch, q_len, num_heads, head_dim] by strides
//   k, v:   [batch, kv_len, num_kv_heads, head_dim] by strides
//   scores: f32 [batch, num_heads, q_len, kv_len] (workspace)
// Head h reads kv head h / (num_heads / num_kv_heads). Causal: query i sees keys 0 .. kv_len - q_len + i, of
// these the last p.window.
// Three launches: scores (a block computes 16 x 16 of them), softmax in place (a block per row), output
// (a block computes 16 rows x 16 dims). The weights are rounded to T before the second product, as the fused
// kernels do. Source: Vaswani et al. 2017, equation 1.
#include "ops/attention/attention.cuh"
#include "common/dtype.cuh"
#include "common/reduce.cuh"

namespace xserv {

constexpr int kNaiveTile = 16;

template <typename T>
__device__ void naive_scores(const AttentionParams& p, float* __restrict__ scores, int head_dim) {
  __shared__ float q_tile[kNaiveTile][kNaiveTile + 1], k_tile[kNaiveTile][kNaiveTile + 1];
  const int batch = blockIdx.z / p.num_heads, head = blockIdx.z % p.num_heads;
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  const int x = threadIdx.x % kNaiveTile, y = threadIdx.x / kNaiveTile;
  const int key_begin = blockIdx.x * kNaiveTile, query_begin = blockIdx.y * kNaiveTile;
  const T* q = static_cast<const T*>(p.q) + batch * p.q_batch_stride + head * p.q_head_stride;
  const T* k = static_cast<const T*>(p.k) + batch * p.k_batch_stride + kv_head * p.k_head_stride;
  float sum = 0.0f;
  // Keys that lie before the window of the first query are masked, and not read.
  const int first_key = p.causal ? window_begin(p.kv_len - p.q_len + query_begin + 1, p.window) : 0;
  const int used_dims = key_begin + kNaiveTile > first_key ? head_dim : 0;
  for (int d = 0; d < used_dims; d += kNaiveTile) {
    const bool in_dim = d + x < head_dim;
    q_tile[y][x] = in_dim && query_begin + y < p.q_len
                       ? to_float(q[(query_begin + y) * p.q_token_stride + d + x]) : 0.0f;
    k_tile[y][x] = in_dim && key_begin + y < p.kv_len
                       ? to_float(k[(key_begin + y) * p.k_token_stride + d + x]) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNaiveTile; ++i) sum += q_tile[y][i] * k_tile[x][i];
    __syncthreads();
  }
  const int query = query_begin + y, key = key_begin + x;
  if (query >= p.q_len || key >= p.kv_len) return;
  const int position = p.kv_len - p.q_len + query;
  const bool is_visible = !p.causal || (key <= position && key > position - p.window);
  scores[(static_cast<long long>(blockIdx.z) * p.q_len + query) * p.kv_len + key] =
      is_visible ? sum * p.scale : kMinusInfinity;
}

template <typename T>
__device__ void naive_output(const AttentionParams& p, const float* __restrict__ weights, int head_dim) {
  __shared__ float w_tile[kNaiveTile][kNaiveTile + 1], v_tile[kNaiveTile][kNaiveTile + 1];
  const int batch = blockIdx.z / p.num_heads, head = blockIdx.z % p.num_heads;
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  const int x = threadIdx.x % kNaiveTile, y = threadIdx.x / kNaiveTile;
  const int query = blockIdx.y * kNaiveTile + y, dim = blockIdx.x * kNaiveTile + x;
  const T* v = static_cast<const T*>(p.v) + batch * p.v_batch_stride + kv_head * p.v_head_stride;
  const float* row = weights + (static_cast<long long>(blockIdx.z) * p.q_len + query) * p.kv_len;
  float sum = 0.0f;
  const int first_key =
      p.causal ? window_begin(p.kv_len - p.q_len + static_cast<int>(blockIdx.y) * kNaiveTile + 1, p.window) : 0;
  for (int key = first_key / kNaiveTile * kNaiveTile; key < p.kv_len; key += kNaiveTile) {
    w_tile[y][x] = query < p.q_len && key + x < p.kv_len ? to_float(from_float<T>(row[key + x])) : 0.0f;
    v_tile[y][x] = dim < head_dim && key + y < p.kv_len
                       ? to_float(v[(key + y) * p.v_token_stride + dim]) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNaiveTile; ++i) sum += w_tile[y][i] * v_tile[i][x];
    __syncthreads();
  }
  if (query >= p.q_len || dim >= head_dim) return;
  static_cast<T*>(p.out)[batch * p.o_batch_stride + query * p.o_token_stride + head * p.o_head_stride + dim] =
      from_float<T>(sum);
}

}  // namespace xserv

// A row without a visible key becomes zeros.
extern "C" __global__ void __launch_bounds__(256)
    xserv_attention_naive_softmax(float* __restrict__ scores, int kv_len) {
  using namespace xserv;
  __shared__ float scratch[2][32];
  float* row = scores + static_cast<long long>(blockIdx.x) * kv_len;
  float maximum = kMinusInfinity;
  for (int i = threadIdx.x; i < kv_len; i += blockDim.x) maximum = Max::combine(maximum, row[i]);
  maximum = block_reduce<Max>(maximum, scratch[0]);
  if (maximum == kMinusInfinity) maximum = 0.0f;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < kv_len; i += blockDim.x) sum += row[i] = expf(row[i] - maximum);
  sum = block_reduce<Sum>(sum, scratch[1]);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int i = threadIdx.x; i < kv_len; i += blockDim.x) row[i] *= inverse;
}

#define XSERV_ATTENTION_NAIVE(suffix, T)                                                              \
  extern "C" __global__ void __launch_bounds__(256) xserv_attention_naive_scores_##suffix(            \
      const __grid_constant__ xserv::AttentionParams p, float* __restrict__ scores, int head_dim) {   \
    xserv::naive_scores<T>(p, scores, head_dim);                                                      \
  }                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) xserv_attention_naive_output_##suffix(            \
      const __grid_constant__ xserv::AttentionParams p, const float* __restrict__ weights,            \
      int head_dim) {                                                                                 \
    xserv::naive_output<T>(p, weights, head_dim);                                                     \
  }
XSERV_FOR_EACH_DTYPE(XSERV_ATTENTION_NAIVE)
