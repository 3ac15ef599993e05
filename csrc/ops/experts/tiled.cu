// The products of experts with dense weights of any type and size on any chip; what they compute is said in
// wgmma.cu. Sums run along k in one order.
//
// weight: [num_experts, rows, k], `expert_stride` elements from one expert to the next; grid: (tiles of rows of
// out, the most tiles of slots).
#include "ops/experts/route.cuh"

namespace xserv {

constexpr int kRows = 64, kSlots = 16, kStep = 16, kThreads = 256;
constexpr int kPerThread = kRows * kSlots / kThreads;  // results, of neighbouring rows of one slot

template <typename T, bool kIsGated>
__device__ __forceinline__ void experts_tiled(const T* weight, const T* x, T* out, const SlotTile* tiles,
                                              const int* num_tiles, const int* tokens, int n, int k,
                                              int64_t expert_stride) {
  constexpr int kHalves = kIsGated ? 2 : 1;
  // Rows are one longer, so that those of a warp lie in different banks.
  __shared__ float weights[kHalves][kStep][kRows + 1], inputs[kStep][kSlots + 1];
  dependency_launch();
  dependency_wait();
  if (static_cast<int>(blockIdx.y) >= __ldcg(num_tiles)) return;
  const SlotTile tile = load_tile(tiles, blockIdx.y);
  const int first_row = blockIdx.x * kRows, thread = threadIdx.x;
  const int my_slot = thread % kSlots, my_row = thread / kSlots * kPerThread;
  weight += tile.expert * expert_stride;
  for (int first = 0; first < tile.num_slots; first += kSlots) {
    float sums[kHalves][kPerThread] = {};
    for (int k0 = 0; k0 < k; k0 += kStep) {
      for (int i = thread; i < kHalves * kRows * kStep; i += kThreads) {
        const int input = i % kStep, row = i / kStep % kRows, half = i / (kStep * kRows);
        const bool exists = first_row + row < n && k0 + input < k;
        const int64_t place = (static_cast<int64_t>(half) * n + first_row + row) * k + k0 + input;
        weights[half][input][row] = exists ? to_float(weight[place]) : 0.0f;
      }
      {
        static_assert(kThreads == kSlots * kStep, "a number of x for each thread");
        const int input = thread % kStep, slot = first + thread / kStep;
        float value = 0.0f;
        if (slot < tile.num_slots && k0 + input < k) {
          const int row = tile.first_slot + slot;
          value = to_float(x[static_cast<int64_t>(tokens != nullptr ? tokens[row] : row) * k + k0 + input]);
        }
        inputs[input][thread / kStep] = value;
      }
      __syncthreads();
#pragma unroll
      for (int input = 0; input < kStep; ++input) {
        const float value = inputs[input][my_slot];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) {
            sums[half][i] = fmaf(weights[half][input][my_row + i], value, sums[half][i]);
          }
        }
      }
      __syncthreads();
    }
    if (first + my_slot >= tile.num_slots) continue;
    T* row = out + static_cast<int64_t>(tile.first_slot + first + my_slot) * n;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int column = first_row + my_row + i;
      if (column >= n) break;
      float result = sums[0][i];
      if constexpr (kIsGated) {
        const float gate = to_float(from_float<T>(result)), up = to_float(from_float<T>(sums[1][i]));
        result = to_float(from_float<T>(gate / (1.0f + expf(-gate)))) * up;
      }
      row[column] = from_float<T>(result);
    }
  }
}

}  // namespace xserv

// xserv_experts_tiled_<epilogue>_<dtype>, for blocks of 256 threads.
#define XSERV_EXPERTS_TILED(NAME, IS_GATED, SUFFIX, T)                                                              \
  extern "C" __global__ void __launch_bounds__(256) xserv_experts_tiled_##NAME##_##SUFFIX(                          \
      const T* weight, const T* x, T* out, const xserv::SlotTile* tiles, const int* num_tiles, const int* tokens,   \
      int n, int k, int64_t expert_stride) {                                                                        \
    xserv::experts_tiled<T, IS_GATED>(weight, x, out, tiles, num_tiles, tokens, n, k, expert_stride);               \
  }
#define XSERV_EXPERTS_TILED_BOTH(SUFFIX, T)       \
  XSERV_EXPERTS_TILED(plain, false, SUFFIX, T)    \
  XSERV_EXPERTS_TILED(swiglu, true, SUFFIX, T)
XSERV_FOR_EACH_DTYPE(XSERV_EXPERTS_TILED_BOTH)
