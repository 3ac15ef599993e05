// The output projection inside the decode attention kernel (ops/attention/fused_project.cu): what this
// kernel has beyond the cluster form. A cluster of kRanks blocks has one kv head g and its kHeads query
// heads; a block has, in shared memory, the rows [rank * rows, (rank + 1) * rows) of W_o, restricted to
// the columns of these heads.
//
// Partial results of the attention go from every block to every block of the cluster, so that after one
// trip between blocks each of them has the whole output of the heads. A warp multiplies 16 rows with
// it: a row's sum is that of one warp, with no exchange after the product.
#pragma once

#include "ops/attention/fused.cuh"
#include "common/bulk_copy.cuh"
#include "common/gemv.cuh"
#include "common/layouts.cuh"

namespace xserv {

struct OutputProjection {
  const void* weight;  // [hidden_size, num_heads * head_dim]
  float* sums;         // [num_kv_heads, hidden_size]
  int hidden_size;     // a multiple of 16 kRanks, at most kRanks * kMaxRows
  int padding;
};
XSERV_LAYOUT_OutputProjection;

template <typename T, int kHeadDim, int kWarps>
struct ProjectedHeads {
  static constexpr int kHeads = 2, kRanks = 8, kMaxRows = kWarps * 16;
  // The output of the heads has one element for each thread.
  static constexpr int kThreads = kWarps * 32, kWidth = kHeads * kHeadDim;
  static constexpr int kVectors = kWidth / 4;                // float4 in the partial result of a block
  static constexpr int kPartialBytes = kWidth * 4 + kHeads * 8;  // what a block sends to each: o, and (m, l)
  // Rows of W_o in shared memory lie 16 bytes further apart than their length: conflict-free for
  // ldmatrix.
  static constexpr int kPitch = kWidth * 2 + 16;
  // Offsets from the beginning of the part of shared memory that is for the projection.
  static constexpr int kStatsAt = kRanks * kWidth * 4;
  static constexpr int kBarrierAt = kStatsAt + kRanks * kHeads * 8;
  static constexpr int kOutAt = kBarrierAt + 16;  // the output of the heads, in T
  static constexpr int kWeightAt = kOutAt + kWidth * 2;
  static constexpr int kSharedBytes = kWeightAt + kMaxRows * kPitch;

  __device__ __forceinline__ static int num_rows(const OutputProjection& p) { return p.hidden_size / kRanks; }

  // Writes the result of a block for a sequence without keys.
  __device__ __forceinline__ static void write_zeros(const OutputProjection& p, int kv_head, int rank) {
    float* const sums = p.sums + static_cast<long long>(kv_head) * p.hidden_size + rank * num_rows(p);
    for (int i = threadIdx.x; i < num_rows(p); i += kThreads) sums[i] = 0.0f;
  }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // Requests the block's part of W_o, before the wait, since no kernel writes weights.
  __device__ __forceinline__ static void load_weight(const OutputProjection& p, uint32_t shared, int first_head,
                                                     int num_heads, int rank) {
    const uint32_t barrier = shared + kBarrierAt;
    const int rows = num_rows(p);
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, rows * kWidth * 2);
    const uint64_t policy = weight_policy();
    const T* const source = static_cast<const T*>(p.weight) + static_cast<long long>(first_head) * kHeadDim;
    for (int row = threadIdx.x; row < rows; row += kThreads) {
      bulk_copy(shared + kWeightAt + row * kPitch,
                source + static_cast<long long>(rank * rows + row) * num_heads * kHeadDim, kWidth * 2, barrier, policy);
    }
  }

  // Sends the float4 with index `index` of this block's partial result, and the (m, l) of its head.
  // Thread i and the threads a multiple of kVectors from it have the same values, and each sends them
  // to some of the blocks.
  __device__ __forceinline__ static void send(uint32_t shared, uint32_t barrier, int rank, int index, float4 o, float m,
                                              float l) {
    constexpr int kSenders = kThreads / kVectors;
#pragma unroll
    for (int i = 0; i < kRanks; i += kSenders) {
      // The order differs, so that not all send to the same block at once.
      const int to = (i + static_cast<int>(threadIdx.x) / kVectors + rank) % kRanks;
      const uint32_t remote = cluster_address(shared, to), remote_barrier = cluster_address(barrier, to);
      cluster_store_async(remote + (rank * kVectors + index) * 16, remote_barrier, o);
      if (index % (kHeadDim / 4) == 0) {
        const int head = index / (kHeadDim / 4);
        cluster_store_async(remote + kStatsAt + (rank * kHeads + head) * 8, remote_barrier, make_float2(m, l));
      }
    }
  }

  // Multiplies what has arrived from the blocks that have keys by W_o, into the sums. All threads call
  // it.
  __device__ __forceinline__ static void finish(const OutputProjection& p, int base, uint32_t barrier, int num_partials,
                                                int kv_head, int rank) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t shared = shared_address(fused_shared) + base;
    const auto received = reinterpret_cast<const float*>(fused_shared + base);
    const auto received_stats = reinterpret_cast<const float2*>(fused_shared + base + kStatsAt);
    T* const out = reinterpret_cast<T*>(fused_shared + base + kOutAt);
    // The block's part of W_o has arrived: it is loaded into registers while the others' results are on
    // their way.
    mbarrier_wait_bounded(shared + kBarrierAt, 0);
    const int row = warp * 16;
    const uint32_t weight_at = shared + kWeightAt + (row + (lane & 15)) * kPitch + (lane >> 4) * 16;
    uint32_t weight[kWidth / 16][4];
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) ldmatrix_x4(weight[i], weight_at + i * 32);
    // A block must not end before what others send it has arrived, so all threads wait.
    mbarrier_wait_bounded(barrier, 0);
    {
      const int head = threadIdx.x / kHeadDim;
      float2 stat[kRanks];
      float value[kRanks];
      float m = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < kRanks; ++i) {
        const int from = min(i, num_partials - 1);
        stat[i] = received_stats[from * kHeads + head];
        value[i] = received[from * kWidth + threadIdx.x];
        m = fmaxf(m, stat[i].x);
      }
      const float shift = m == kMinusInfinity ? 0.0f : m;
      float l = 0.0f, total = 0.0f;
#pragma unroll
      for (int i = 0; i < kRanks; ++i) {
        const float weight = i < num_partials ? exp2_approx(stat[i].x - shift) : 0.0f;
        l += weight * stat[i].y;
        total += i < num_partials ? weight * value[i] : 0.0f;
      }
      out[threadIdx.x] = from_float<T>(l == 0.0f ? 0.0f : total * __fdividef(1.0f, l));
    }
    __syncthreads();
    if (row >= num_rows(p)) return;
    // Every lane reads the same elements as the lanes of equal lane % 4; only column 0 of the product
    // counts.
    const uint32_t out_at = shared + kOutAt + (lane >> 3) * 16;
    float sums[4][4] = {};
#pragma unroll
    for (int i = 0; i < kWidth / 16; i += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, out_at + i * 32);
      mma_m16n8k16<T>(sums[i % 4], weight[i], b[0], b[1]);
      mma_m16n8k16<T>(sums[i % 4 + 1], weight[i + 1], b[2], b[3]);
    }
    if (lane % 4 == 0) {
      float* const target =
          p.sums + static_cast<long long>(kv_head) * p.hidden_size + rank * num_rows(p) + row + (lane >> 2);
      target[0] = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
      target[8] = (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
    }
  }
#endif
};

}  // namespace xserv
