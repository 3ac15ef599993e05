// Linear layers for few tokens (up to 128) on Hopper: the weights stream, the tokens stay.
//   out[t, i] = round(sum_k x[t, k] * weight[i, k] + bias[i])                                  plain
//   out[t, i] = round(out[t, i] + round(sum_k ...))                                            residual
//   out[t, i] = round(round(silu(round(gate[t, i]))) * round(up[t, i]))                        swiglu
// where round() is to T, sums in f32, silu(g) = g / (1 + e^-g), and gate and up are the products with rows i
// and intermediate_size + i of weight [2 * intermediate_size, k]. The roundings are those of Transformers.
//
// x: [num_tokens, k]; weight: [n, k], row-major as the checkpoint has it; bias: [n] or null; out:
// [num_tokens, n].
//
// The kernel computes the transpose, D^T = weight * x^T: with the weights as the A operand of wgmma (64
// rows per warpgroup) and the tokens as B, a tile of 16 tokens has no unused rows, and a stage of
// weights goes from the copy engine to the tensor cores without passing through registers. A block has
// kRows rows of weight, all tokens up to kTokens, and one producer warp. A stage is kBoxes boxes of 64
// along k. One block per SM with a ring of about 200 KB was faster than two with 110 KB (Qwen3-8B, 16
// tokens, a step without attention on an H200: 3.8 and 4.3 ms, each with its best tiles). Under
// programmatic launch the next kernel's block begins where this kernel's block ends, and fills its ring
// before the wait; it touches only weights before the wait.
//
// Along k the work may be split over the blocks of a cluster, in parts that depend on k alone; their
// sums are added through distributed shared memory in the order of the ranks. So there is no workspace,
// and with the same number of splits a token's result depends neither on the other tokens nor on the
// variant.
//
// A tile may have fewer rows than the variant (tile_rows), so that tiles can be made that divide the rows
// of any weight evenly among the multiprocessors: the rest of the fragments is computed from what the ring
// holds, and not stored. Tiles are fetched in boxes as large as they are: boxes of 8 rows are too many for
// the copy engine (o and down of Qwen3-4B at 45 % of the memory's rate; H200).
//
// Without a split the grid may have fewer blocks than there are tiles of rows: a block then takes
// several tiles in turn, and the ring runs on across the epilogue. blockIdx.y selects the group of
// kTokens tokens.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "common/cluster.cuh"
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"
#include "ops/linear/fragment.cuh"

namespace xserv {

struct SkinnyParams {
  TensorMap weight;
  TensorMap x;
  void* out;   // residual: read and written
  const void* bias;  // plain only
  int64_t ldo;  // elements from token to token of out
  int num_tokens;
  int n;       // columns of out; swiglu: intermediate_size
  int k;
  // Of weight in a tile, and in a box of its map: at most kRows, a multiple of 8 (swiglu: of 16).
  int tile_rows;
  int padding[4];
};
XSERV_LAYOUT_SkinnyParams;

constexpr int kBox = 64;     // of k: 128 bytes, the widest swizzle
constexpr int kUnitK = 256;  // parts of k are multiples of this, whatever the variant

// The size of the dynamic shared memory in bytes.
template <int kTokens, int kRows, int kBoxes, int kWeightStages, int kTokenStages>
constexpr int kSkinnySharedBytes =
    (kWeightStages * kRows + kTokenStages * kTokens) * kBoxes * kBox * 2 + kWeightStages * 16;

template <typename T, Epilogue kEpilogue, int kTokens, int kRows, int kBoxes, int kWeightStages,
          int kTokenStages>
__device__ __forceinline__ void skinny(const SkinnyParams& p) {
  constexpr int kWarps = kRows / 16, kFragments = kTokens / 8, kAllFragments = kWarps * kFragments;
  constexpr uint32_t kWeightBoxBytes = kRows * kBox * 2, kTokenBoxBytes = kTokens * kBox * 2;
  constexpr uint32_t kWeightBytes = kWeightBoxBytes * kBoxes, kTokenBytes = kTokenBoxBytes * kBoxes;
  static_assert(kRows % 64 == 0 && kTokenStages <= kWeightStages && kTokenBytes % 1024 == 0);
  static_assert(kAllFragments * 512 <= kWeightStages * kWeightBytes + kTokenStages * kTokenBytes);
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t weight_ring = shared_address(shared);
  const uint32_t token_ring = weight_ring + kWeightStages * kWeightBytes;
  const uint32_t full = token_ring + kTokenStages * kTokenBytes, empty = full + kWeightStages * 8;

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int split = cluster_rank(), num_splits = cluster_size();
  const int first_tile = blockIdx.x / num_splits, tile_step = gridDim.x / num_splits;
  const int num_rows = kEpilogue == Epilogue::kSwiglu ? 2 * p.n : p.n;
  const int num_tiles = (num_rows + p.tile_rows - 1) / p.tile_rows;
  // The parts of k are whole units whatever the variant.
  constexpr int kUnit = kUnitK / (kBox * kBoxes);
  const int num_units = (p.k + kUnitK - 1) / kUnitK;
  const int chunk_begin = split * num_units / num_splits * kUnit;
  const int num_chunks = (split + 1) * num_units / num_splits * kUnit - chunk_begin;
  const int first_token = blockIdx.y * kTokens;

  // For the producer: slot s of the weights takes the chunks s, s + kWeightStages, ..., and its barrier
  // also counts the tokens of the chunk, which arrive in a ring of their own.
  const int my_tiles = (num_tiles - first_tile + tile_step - 1) / tile_step;
  const int total = my_tiles * num_chunks;
  const uint64_t stream = l2_evict_first(), keep = l2_evict_last();
  struct {
    int tile, chunk, slot;
  } next_weights = {first_tile, 0, 0};
  struct {
    int chunk, slot, barrier;
  } next_tokens = {0, 0, 0};
  const auto load_weights = [&]() {
    const uint32_t barrier = full + next_weights.slot * 8, target = weight_ring + next_weights.slot * kWeightBytes;
    mbarrier_arrive_expect(barrier, p.tile_rows * (kBox * 2 * kBoxes));
    const int row = next_weights.tile * p.tile_rows;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32_t place = target + box * kWeightBoxBytes;
      const int column = ((chunk_begin + next_weights.chunk) * kBoxes + box) * kBox;
      if constexpr (kEpilogue == Epilogue::kSwiglu) {
        tma_load_4d(place, &p.weight, barrier, column, 0, 0, row / 16, stream);
      } else {
        tma_load_2d(place, &p.weight, barrier, column, row, stream);
      }
    }
    if (++next_weights.slot == kWeightStages) next_weights.slot = 0;
    if (++next_weights.chunk == num_chunks) next_weights.chunk = 0, next_weights.tile += tile_step;
  };
  const auto load_tokens = [&]() {
    const uint32_t barrier = full + next_tokens.barrier * 8, target = token_ring + next_tokens.slot * kTokenBytes;
    mbarrier_arrive_expect(barrier, kTokenBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      tma_load_2d(target + box * kTokenBoxBytes, &p.x, barrier,
                  ((chunk_begin + next_tokens.chunk) * kBoxes + box) * kBox, first_token, keep);
    }
    if (++next_tokens.slot == kTokenStages) next_tokens.slot = 0;
    if (++next_tokens.barrier == kWeightStages) next_tokens.barrier = 0;
    if (++next_tokens.chunk == num_chunks) next_tokens.chunk = 0;
  };
  if (warp == kWarps && lane == 0) {
    tensor_map_prefetch(&p.weight);
    tensor_map_prefetch(&p.x);
#pragma unroll
    for (int slot = 0; slot < kWeightStages; ++slot) {
      mbarrier_init(full + slot * 8, 2);
      mbarrier_init(empty + slot * 8, kWarps);
    }
    mbarrier_init_fence();
    for (int i = 0; i < min(kWeightStages, total); ++i) load_weights();
    dependency_launch();
  }
  __syncwarp();
  __syncthreads();
  if (warp == kWarps) {
    if (lane == 0) {
      dependency_wait();
      for (int i = 0; i < min(kTokenStages, total); ++i) load_tokens();
      int slot = 0;
      uint32_t parity = 0;
      for (int i = 0; i + kTokenStages < total; ++i) {
        mbarrier_wait_bounded(empty + slot * 8, parity);
        load_tokens();
        if (i + kWeightStages < total) load_weights();
        if (++slot == kWeightStages) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (num_splits > 1) {
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  dependency_wait();
  // Start, (unused), distance of eight lines, swizzle of 128 bytes.
  constexpr uint64_t kFixed = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
  int slot = 0, token_slot = 0;
  uint32_t parity = 0;
  float sum[kTokens / 2];
  for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
    int previous = -1;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      mbarrier_wait_bounded(full + slot * 8, parity);
      const uint32_t rows = weight_ring + slot * kWeightBytes + warp / 4 * (64 * kBox * 2);
      const uint64_t a = (rows & 0x3ffff) >> 4 | kFixed;
      const uint64_t b = ((token_ring + token_slot * kTokenBytes) & 0x3ffff) >> 4 | kFixed;
      wgmma_fence();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
        for (int step = 0; step < kBox / 16; ++step) {
          wgmma_along_k<T, kTokens>(sum, a + (box * kWeightBoxBytes >> 4) + step * 2,
                                    b + (box * kTokenBoxBytes >> 4) + step * 2,
                                    chunk > 0 || box > 0 || step > 0);
        }
      }
      wgmma_commit();
      if (previous >= 0) {
        wgmma_wait<1>();
        if (lane == 0) mbarrier_arrive(empty + previous * 8);
      }
      previous = slot;
      if (++slot == kWeightStages) slot = 0, parity ^= 1;
      if (++token_slot == kTokenStages) token_slot = 0;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");  // not before the wait
    if (lane == 0) mbarrier_arrive(empty + previous * 8);

    const int tile_row = tile * p.tile_rows;
    if (num_splits == 1) {
      constexpr int kBatch = 4 < kFragments ? 4 : kFragments;
#pragma unroll
      for (int j0 = 0; j0 < kFragments; j0 += kBatch) {
        uint2 old[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          old[j] = Fragment<T, kEpilogue>(p, tile_row, warp * 16, first_token + (j0 + j) * 8).load();
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float* v = sum + (j0 + j) * 4;
          Fragment<T, kEpilogue>(p, tile_row, warp * 16, first_token + (j0 + j) * 8)
              .store(make_float4(v[0], v[1], v[2], v[3]), old[j]);
        }
      }
      continue;
    }

    // When all consumers are done with the ring, it takes the sums, one fragment after the other. The
    // fragments are distributed over the warps of the cluster; each warp adds its own over the splits.
    constexpr int kMaxMine = (kFragments + 1) / 2;
    const auto mine = [&](int i) { return (i * num_splits + split) * kWarps + warp; };
    const auto fragment = [&](int index) {
      return Fragment<T, kEpilogue>(p, tile_row, index / kFragments * 16,
                                    first_token + index % kFragments * 8);
    };
    asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");
    float4* staging = reinterpret_cast<float4*>(shared) + lane;
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const float* v = sum + j * 4;
      staging[(warp * kFragments + j) * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
    cluster_arrive();
    uint2 old[kMaxMine];
    if constexpr (kEpilogue == Epilogue::kResidual) {
#pragma unroll
      for (int i = 0; i < kMaxMine; ++i) {
        if (mine(i) < kAllFragments) old[i] = fragment(mine(i)).load();
      }
    }
    cluster_wait();
#pragma unroll
    for (int i = 0; i < kMaxMine; ++i) {
      if (mine(i) >= kAllFragments) break;
      const uint32_t address = shared_address(staging + mine(i) * 32);
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int s0 = 0; s0 < num_splits; s0 += 4) {
        float4 part[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          if (s0 + s < num_splits) part[s] = cluster_load(cluster_address(address, s0 + s));
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          if (s0 + s < num_splits) {
            total.x += part[s].x;
            total.y += part[s].y;
            total.z += part[s].z;
            total.w += part[s].w;
          }
        }
      }
      fragment(mine(i)).store(total, old[i]);
    }
    // No block leaves while another may read its sums.
    cluster_arrive();
    cluster_wait();
    break;
  }
}

}  // namespace xserv

// xserv_linear_skinny_<epilogue>_<rows>x<tokens>_<dtype>; 172 to 229 KB of shared memory.
#define XSERV_SKINNY(NAME, EPILOGUE, ROWS, TOKENS, BOXES, WEIGHT_STAGES, TOKEN_STAGES, SUFFIX, T) \
  extern "C" __global__ void __launch_bounds__(ROWS * 2 + 32, 1)                                  \
      xserv_linear_skinny_##NAME##_##ROWS##x##TOKENS##_##SUFFIX(                                    \
          const __grid_constant__ xserv::SkinnyParams params) {                               \
    xserv::skinny<T, xserv::Epilogue::EPILOGUE, TOKENS, ROWS, BOXES, WEIGHT_STAGES,          \
                       TOKEN_STAGES>(params);                                                     \
  }
#define XSERV_SKINNY_DTYPES(NAME, EPILOGUE, ...)         \
  XSERV_SKINNY(NAME, EPILOGUE, __VA_ARGS__, f16, __half) \
  XSERV_SKINNY(NAME, EPILOGUE, __VA_ARGS__, bf16, __nv_bfloat16)
#define XSERV_SKINNY_BYTES(ROWS, TOKENS, ...)                      \
  static_assert(xserv::kSkinnySharedBytes<TOKENS, ROWS, __VA_ARGS__> == \
                xserv::shared_bytes::linear_skinny_##ROWS##x##TOKENS);
#define XSERV_SKINNY_ALL(...)                           \
  XSERV_SKINNY_BYTES(__VA_ARGS__)                       \
  XSERV_SKINNY_DTYPES(plain, kPlain, __VA_ARGS__)       \
  XSERV_SKINNY_DTYPES(residual, kResidual, __VA_ARGS__) \
  XSERV_SKINNY_DTYPES(swiglu, kSwiglu, __VA_ARGS__)
// rows, tokens, boxes, stages of weights, stages of tokens
XSERV_SKINNY_ALL(64, 16, 4, 5, 5)
XSERV_SKINNY_ALL(64, 32, 4, 4, 4)
XSERV_SKINNY_ALL(64, 64, 2, 7, 6)
XSERV_SKINNY_ALL(64, 96, 2, 5, 5)
XSERV_SKINNY_ALL(64, 128, 2, 4, 4)
XSERV_SKINNY_ALL(128, 64, 2, 4, 4)
XSERV_SKINNY_ALL(128, 96, 1, 8, 8)
XSERV_SKINNY_ALL(128, 128, 1, 7, 7)
XSERV_SKINNY_ALL(192, 16, 2, 4, 4)
XSERV_SKINNY_ALL(192, 32, 2, 3, 3)
XSERV_SKINNY_ALL(192, 64, 2, 3, 3)
XSERV_SKINNY_ALL(192, 96, 1, 6, 5)
XSERV_SKINNY_ALL(192, 128, 1, 5, 5)
#endif
