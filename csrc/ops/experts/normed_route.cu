// What comes before the experts of one or two tokens, in one kernel: the norm of the residual stream, its products with
// the router, and the routes by these.
//   normed[t] = round(weight * round(hidden[t] / sqrt(mean(hidden[t]^2) + eps)))          as rms_norm/rounded.cu
//   logits[t, e] = round(sum_k normed[t, k] * router[e, k])
// with sums in f32; the rest as route.cu. For eight tokens three kernels are faster, as every block normalises all of
// them (H200).
//
// hidden, normed: [num_tokens, width], width a multiple of 8; router: [num_experts, width]; logits: scratch; counter: a
// word of zero, which stays zero. num_tokens <= 2.
//
// Every block normalises all tokens, into shared memory of num_tokens * width numbers, and each of its warps
// has an expert. The block that ends last chooses and sorts.
#include "ops/experts/choose.cuh"

namespace xserv {

constexpr int kMaxTokens = 2;
constexpr int kThreads = 256;
constexpr int kAhead = 8;  // vectors of the router that a lane fetches before it waits

template <typename T>
struct NormedRoute {
  T* normed;
  T* logits;
  unsigned* counter;
  const T* hidden;
  const T* weight;
  const T* router;
  int num_tokens;
  int width;
  float eps;
};

template <typename T>
__device__ __forceinline__ void normed_logits(const NormedRoute<T>& p, int num_experts) {
  using V = Vec<T, 8>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[kMaxTokens][kThreads / 32];
  V* rows = reinterpret_cast<V*>(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, num_vectors = p.width / 8;
  const int expert = blockIdx.x * (kThreads / 32) + warp;
  const V* of_expert = reinterpret_cast<const V*>(p.router) + static_cast<int64_t>(min(expert, num_experts - 1)) * num_vectors;
  V ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (lane + i * 32 < num_vectors) ahead[i] = of_expert[lane + i * 32];
  }
  dependency_launch();
  dependency_wait();
  for (int token = 0; token < p.num_tokens; ++token) {
    const V* x = reinterpret_cast<const V*>(p.hidden) + static_cast<int64_t>(token) * num_vectors;
    float sum = 0.0f;
    for (int v = threadIdx.x; v < num_vectors; v += kThreads) {
      const V values = x[v];
      rows[token * num_vectors + v] = values;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = __fmaf_rn(to_float(values[j]), to_float(values[j]), sum);
    }
    sum = warp_reduce<Sum>(sum);
    if (lane == 0) scratch[token][warp] = sum;
  }
  __syncthreads();
  // A thread normalises what it has copied itself.
  for (int token = 0; token < p.num_tokens; ++token) {
    const float sum = warp_reduce<Sum>(lane < kThreads / 32 ? scratch[token][lane] : 0.0f);
    const float scale = rsqrtf(sum / p.width + p.eps);
    V* row = rows + token * num_vectors;
    for (int v = threadIdx.x; v < num_vectors; v += kThreads) {
      const V factors = reinterpret_cast<const V*>(p.weight)[v];
      V values = row[v];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float value = to_float(from_float<T>(to_float(values[j]) * scale));
        values[j] = from_float<T>(value * to_float(factors[j]));
      }
      row[v] = values;
      if (blockIdx.x == 0) reinterpret_cast<V*>(p.normed)[static_cast<int64_t>(token) * num_vectors + v] = values;
    }
  }
  __syncthreads();
  if (expert >= num_experts) return;
  float sums[kMaxTokens] = {};
  const auto add = [&](const V& weights, int v) {
#pragma unroll
    for (int token = 0; token < kMaxTokens; ++token) {
      if (token >= p.num_tokens) break;
      const V values = rows[token * num_vectors + v];
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[token] = fmaf(to_float(weights[j]), to_float(values[j]), sums[token]);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (lane + i * 32 < num_vectors) add(ahead[i], lane + i * 32);
  }
  for (int v = lane + kAhead * 32; v < num_vectors; v += 32) add(of_expert[v], v);
#pragma unroll
  for (int token = 0; token < kMaxTokens; ++token) {
    if (token >= p.num_tokens) break;
    const float sum = warp_reduce<Sum>(sums[token]);
    if (lane == 0) p.logits[token * num_experts + expert] = from_float<T>(sum);
  }
}

template <typename T>
__device__ __forceinline__ void normed_route(const NormedRoute<T>& p, int* places, int* tokens, SlotTile* tiles,
                                             int* num_tiles, float* weights, int num_experts, int per_token,
                                             int renormalises, int tile_tokens) {
  __shared__ bool is_last;
  normed_logits(p, num_experts);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(p.counter, 1u) == gridDim.x - 1;
    if (is_last) *p.counter = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  // Shared memory is nearer than that for ids.
  __shared__ int near_ids[kMaxTokens * kMaxPerToken];
  const int warp = threadIdx.x >> 5;
  if (warp < p.num_tokens) {
    const int64_t first = static_cast<int64_t>(warp) * per_token;
    choose<T>(near_ids + first, weights + first, p.logits + warp * num_experts, num_experts, per_token, renormalises != 0);
  }
  __syncthreads();
  sort(places, tokens, tiles, num_tiles, near_ids, p.num_tokens * per_token, num_experts, per_token, tile_tokens);
}

}  // namespace xserv

// xserv_experts_normed_route_<dtype>, for blocks of 256 threads, each with eight experts.
#define XSERV_EXPERTS_NORMED_ROUTE(SUFFIX, T)                                                                         \
  extern "C" __global__ void __launch_bounds__(256) xserv_experts_normed_route_##SUFFIX(                              \
      int* places, int* tokens, xserv::SlotTile* tiles, int* num_tiles, float* weights, T* normed,                    \
      T* logits, unsigned* counter, const T* hidden, const T* weight, const T* router, int num_tokens, int width,     \
      float eps, int num_experts, int per_token, int renormalises, int tile_tokens) {                                 \
    const xserv::NormedRoute<T> p{normed, logits, counter, hidden, weight, router, num_tokens, width, eps};           \
    xserv::normed_route<T>(p, places, tokens, tiles, num_tiles, weights, num_experts, per_token, renormalises,        \
                           tile_tokens);                                                                              \
  }
XSERV_EXPERTS_NORMED_ROUTE(f16, __half)
XSERV_EXPERTS_NORMED_ROUTE(bf16, __nv_bfloat16)
