// Combination of partial results of decode attention (ops/attention/fused_unit.cuh): among the
// blocks of a cluster, and among the chunks of a unit in the workspace.
#pragma once

#include "ops/attention/fused.cuh"

namespace xserv {

// The number of float4 from block to block in the data that a block receives: 2 more than its slice,
// which avoids bank conflicts.
constexpr int kReceivePad = 2;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// For the cluster form: combines this block's slice of the output (`own_slice` float4, of `slice`
// from block to block) from what the others sent.
template <typename T, int kThreads>
__device__ __forceinline__ void combine_slice(T* out, int receive_at, int receive_stats_at, uint32_t barrier,
                                              int slice, int own_slice, int num_partials, int rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  // There are 4 lanes per element of the slice, each with every fourth block. The first warp always
  // comes here and waits: a block must not end before what others send it has arrived.
  const auto received = reinterpret_cast<const float*>(fused_shared + receive_at);
  const auto received_stats = reinterpret_cast<const float2*>(fused_shared + receive_stats_at);
#pragma unroll 1
  for (int begin = warp * 32; begin < own_slice * 16; begin += kThreads) {
    const int index = min((begin + lane) >> 2, own_slice * 4 - 1), part = lane & 3;
    mbarrier_wait_bounded(barrier, 0);
    float2 stat[kMaxBlocks / 4];
    float value[kMaxBlocks / 4];
    float m = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kMaxBlocks / 4; ++j) {
      const int from = min(j * 4 + part, num_partials - 1) * (slice + kReceivePad);
      stat[j] = received_stats[from + (index >> 2)];
      value[j] = received[from * 4 + index];
      m = fmaxf(m, stat[j].x);
    }
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
    const float shift = m == kMinusInfinity ? 0.0f : m;
    float l = 0.0f, total = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxBlocks / 4; ++j) {
      const float weight = j * 4 + part < num_partials ? exp2_approx(stat[j].x - shift) : 0.0f;
      l += weight * stat[j].y;
      total += j * 4 + part < num_partials ? weight * value[j] : 0.0f;
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset <<= 1) {
      l += __shfl_xor_sync(kFullWarp, l, offset);
      total += __shfl_xor_sync(kFullWarp, total, offset);
    }
    if (part == 0 && begin + lane < own_slice * 16) {
      out[rank * slice * 4 + index] = from_float<T>(l == 0.0f ? 0.0f : __fdividef(total, l));
    }
  }
}
#endif

template <typename T>
__device__ __forceinline__ void store_out(T* target, const float4& o, float sum) {
  const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
  Vec<T, 4> result;
  result[0] = from_float<T>(o.x * inverse);
  result[1] = from_float<T>(o.y * inverse);
  result[2] = from_float<T>(o.z * inverse);
  result[3] = from_float<T>(o.w * inverse);
  *reinterpret_cast<Vec<T, 4>*>(target) = result;
}

// For the chunked form: all threads call this once the block's (m, l, o) are in the workspace; the last
// block of the unit combines the chunks.
template <typename T, int kHeadDim, int kThreads>
__device__ __forceinline__ void combine_chunks(const FusedArgs& p, T* out, int seq, int group_begin,
                                               int num_group_heads, int num_chunks) {
  constexpr int kVectors = kHeadDim / 4;
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = p.counters + static_cast<long long>(seq) * gridDim.y + blockIdx.y;
    is_last = atomicAdd(counter, 1) == num_chunks - 1;
    if (is_last) *counter = 0;  // no other block arrives before the next launch
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  constexpr int kBatch = 16;  // chunks read at once: each round of reads is a trip to L2, so few rounds
#pragma unroll 1
  for (int index = threadIdx.x; index < num_group_heads * kVectors; index += kThreads) {
    const int head = index / kVectors, column = index % kVectors * 4;
    const long long first = (static_cast<long long>(seq) * p.num_heads + group_begin + head) * p.max_chunks;
    const float* partial = p.partial_out + first * kHeadDim + column;
    const float* stats = p.partial_stats + first * 2;
    float maximum = kMinusInfinity, sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int begin = 0; begin < num_chunks; begin += kBatch) {
      float4 part[kBatch];
      float2 stat[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int chunk = min(begin + i, num_chunks - 1);
        const float* at = partial + static_cast<long long>(chunk) * kHeadDim;
        part[i] = __ldcg(reinterpret_cast<const float4*>(at));
        stat[i] = __ldcg(reinterpret_cast<const float2*>(stats + chunk * 2));
      }
      float next = maximum;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) next = fmaxf(next, stat[i].x);
      const float shift = next == kMinusInfinity ? 0.0f : next;
      const float rescale = exp2_approx(maximum - shift);
      maximum = next;
      sum *= rescale;
      o.x *= rescale;
      o.y *= rescale;
      o.z *= rescale;
      o.w *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i >= num_chunks) break;
        const float weight = exp2_approx(stat[i].x - shift);
        sum += weight * stat[i].y;
        o.x += weight * part[i].x;
        o.y += weight * part[i].y;
        o.z += weight * part[i].z;
        o.w += weight * part[i].w;
      }
    }
    store_out(out + index * 4, o, sum);
  }
}

}  // namespace xserv
