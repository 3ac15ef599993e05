// Products of quantised activations (csrc/ops/quantised/activations.cu) with weights of FP8
// (quantised.cuh) by the FP8 tensor cores of Hopper, for more than 16 tokens; fp8_prefill.cu is
// faster for prompts.
//
// A block has 64 rows of W for each of its groups of four warps, all with the same tokens, whose x
// lies in shared memory once for all of them. Two threads copy stages of 128 inputs into a ring:
// the codes of all tiles as they are, x, and the scales of both. wgmma reads both there. The tensor
// cores sum the 128 products of a stage, which are multiplied by the scales of their row and of
// their token and added up in f32: the sums of the tensor cores keep about 14 bits. While warps do
// that, the tensor cores work at the next stage.
//
// There are two ways to divide a product. The blocks of a cluster share a tile and divide its
// inputs; their sums are added in the order of the inputs, through shared memory. Or a block by
// itself computes one tile after the other, and copies those ahead while it stores.
//
// Tokens past the last one are not read: what the ring has in their place goes into sums that are not stored.
#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/pdl.cuh"
#include "common/tma_cluster.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"
#include "ops/linear/quantised.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace xserv {

struct Fp8ManyParams {
  // e4m3 [num_tokens, 128 * num_stages]; boxes of token_box tokens and 128 inputs, swizzled.
  TensorMap x;
  TensorMap x_scales;  // f32 [num_stages, tokens]; boxes of token_box
  TensorMap codes;     // [num_tiles, bytes of a tile]; boxes of the tiles of a block and a stage
  TensorMap scales;    // [num_tiles, num_groups, 16]; boxes of the tiles of a block and a group
  void* out;           // residual: read and written
  const void* bias;    // plain only
  int64_t ldo;         // elements from token to token of out
  int num_tokens;
  int n;             // columns of out
  int num_stages;    // of a tile
  int group_stages;  // of a group
  int token_box;
  int scale_type;    // a ScaleType
  int epilogue;      // an Epilogue
  int row_tiles;     // the tiles of blocks along the rows
  int token_tiles;   // likewise along the tokens
  int token_group;   // so many of these are computed before the next rows
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_Fp8ManyParams;

// kGroups: of four warps.
template <int kTokens_, int kGroups_>
struct Fp8Many {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kSums = kTokens / 2;
  static constexpr int kWarps = kGroups * 4, kTiles = kWarps, kThreads = (kWarps + 4) * 32;
  // A group of four warps copies and needs few registers; the others divide what that gives back.
  static constexpr int kOtherRegisters = 32;
  static constexpr int kRegisters =
      (65536 / kThreads / 8 * 8 * (kGroups + 1) - kOtherRegisters) / kGroups / 8 * 8;
  // Where the registers have room for the products of two stages, one is multiplied while the other
  // is added up; otherwise the groups take turns.
  static constexpr int kBuffers = 3 * kSums + 24 <= kRegisters ? 2 : 1;
  static constexpr uint32_t kTokenBytes = kTokens * 128, kTileBytes = 2048;
  static constexpr uint32_t kCodes = kTokenBytes, kScales = kCodes + kTiles * kTileBytes;
  static constexpr uint32_t kTokenScales = kScales + kTiles * 64;
  static constexpr uint32_t kStageBytes = (kTokenScales + kTokens * 4 + 1023) / 1024 * 1024;
  static constexpr int kMostStages = (226 * 1024) / kStageBytes, kStages = kMostStages < 10 ? kMostStages : 10;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes, kSumBytes = kTiles * kTokens * 64;
  static constexpr uint32_t kBarriers = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 16;
  static_assert(kSharedBytes <= 227 * 1024);
};

template <typename T, typename S>
__device__ __forceinline__ void fp8_many(const Fp8ManyParams& p) {
  constexpr int kTokens = S::kTokens, kStages = S::kStages, kSums = S::kSums, kFragments = kTokens / 8;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + S::kBarriers, empty = full + kStages * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int split = cluster_rank(), num_splits = cluster_size();
  const int begin = split * p.num_stages / num_splits, end = (split + 1) * p.num_stages / num_splits;
  const int cluster = blockIdx.x / num_splits, num_clusters = gridDim.x / num_splits;
  // A cluster of several blocks has a single unit.
  const int num_units = p.row_tiles * p.token_tiles;
  // The first tile (of 16 rows) and the first token of unit `unit` of the work.
  const auto place = [&](int unit, int& tile, int& token) {
    const int group = unit / (p.row_tiles * p.token_group), first = group * p.token_group;
    const int width = min(p.token_group, p.token_tiles - first), rest = unit - p.row_tiles * first;
    tile = rest / width * S::kTiles;
    token = (first + rest % width) * kTokens;
  };

  if (threadIdx.x == S::kWarps * 32) {
    tensor_map_prefetch(&p.codes);
    tensor_map_prefetch(&p.x);
    tensor_map_prefetch(&p.scales);
    tensor_map_prefetch(&p.x_scales);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
      mbarrier_init(full + slot * 8, 2);
      mbarrier_init(empty + slot * 8, S::kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const bool is_f32 = scale_type == ScaleType::kF32;
  if (warp >= S::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kOtherRegisters));
    // One thread copies weights and another one x.
    const bool copies_weights = warp == S::kWarps;
    if (lane == 0 && warp < S::kWarps + 2) {
      // Codes are read again by other groups of tokens.
      const uint64_t policy =
          !copies_weights ? l2_evict_last() : p.token_tiles > 1 ? l2_evict_normal() : l2_evict_first();
      const uint32_t weight_bytes = S::kTiles * (S::kTileBytes + (is_f32 ? 64 : 32));
      const uint32_t token_bytes = p.token_box * (128 + 4);
      if (!copies_weights) dependency_wait();
      int slot = 0, filled = 0;
      uint32_t parity = 1;  // of slots that were never filled
      for (int unit = cluster; unit < num_units; unit += num_clusters) {
        int tile, token;
        place(unit, tile, token);
        for (int stage = begin; stage < end; ++stage) {
          const uint32_t barrier = full + slot * 8, target = ring + slot * S::kStageBytes;
          mbarrier_wait(empty + slot * 8, parity);
          if (copies_weights) {
            mbarrier_arrive_expect(barrier, weight_bytes);
            tma_load_2d(target + S::kCodes, &p.codes, barrier, stage * 256, tile, policy);
            tma_load_3d(target + S::kScales, &p.scales, barrier, 0, stage / p.group_stages, tile, policy);
            if (++filled == min(end - begin, kStages)) dependency_launch();
          } else {
            mbarrier_arrive_expect(barrier, token_bytes);
            tma_load_2d(target, &p.x, barrier, stage * 128, token, policy);
            tma_load_2d(target + S::kTokenScales, &p.x_scales, barrier, token, stage, policy);
          }
          if (++slot == kStages) slot = 0, parity ^= 1;
        }
      }
    }
    // The meetings of the cluster; these warps do not join the others, which have more registers.
    if (num_splits == 1) return;
    meet(num_splits);
    meet(num_splits);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    // x in rows of 128 bytes, swizzled; W in eights of rows 1024 bytes apart, of 128 bytes for each
    // 16 inputs.
    constexpr uint64_t kTokenLayout = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    constexpr uint64_t kCodeLayout = static_cast<uint64_t>(128 >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32;
    const int row = lane >> 2;
    const uint32_t codes = S::kCodes + warp / 4 * (4 * S::kTileBytes);
    const uint32_t pairs = S::kScales + ((warp * 8 + row) << (is_f32 ? 3 : 2));
    const uint32_t token_scales = S::kTokenScales + (lane & 3) * 8;
    float products[S::kBuffers][kSums], total[kSums];
    uint32_t next_stage = ring, next_barrier = full, next_parity = 0;  // of the stage that is multiplied next
    uint32_t last_stage = ring, last_barrier = full;  // of the stage whose products are added next
    // Multiplies a stage.
    const auto issue = [&](float (&d)[kSums]) {
      mbarrier_wait(next_barrier, next_parity);
      const uint64_t rows = ((next_stage + codes) & 0x3ffff) >> 4 | kCodeLayout;
      const uint64_t tokens = (next_stage & 0x3ffff) >> 4 | kTokenLayout;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_e4m3<kTokens>(d, rows + step * 16, tokens + step * 2, step > 0);
      wgmma_commit();
      next_stage += S::kStageBytes, next_barrier += 8;
      if (next_barrier == empty) next_stage = ring, next_barrier = full, next_parity ^= 1;
    };
    // Adds the products of a stage, while the next one is multiplied if `has_next`.
    const auto finish = [&](float (&d)[kSums], bool has_next) {
      const float2 factor = scale_pair(shared_pair(last_stage + pairs, is_f32), scale_type);
      if (has_next) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");  // not before the wait
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const float2 x = shared_floats(last_stage + token_scales + j * 32);
        const float* v = d + j * 4;
        float* t = total + j * 4;
        t[0] = fmaf(v[0], x.x * factor.x, t[0]), t[1] = fmaf(v[1], x.y * factor.x, t[1]);
        t[2] = fmaf(v[2], x.x * factor.y, t[2]), t[3] = fmaf(v[3], x.y * factor.y, t[3]);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(last_barrier + kStages * 8);
      last_stage += S::kStageBytes, last_barrier += 8;
      if (last_barrier == empty) last_stage = ring, last_barrier = full;
    };
    const auto with_epilogue = [&](auto store) {
      switch (static_cast<Epilogue>(p.epilogue)) {
        case Epilogue::kPlain: store(EpilogueTag<Epilogue::kPlain>()); break;
        case Epilogue::kResidual: store(EpilogueTag<Epilogue::kResidual>()); break;
        case Epilogue::kSwiglu: store(EpilogueTag<Epilogue::kSwiglu>()); break;
      }
    };
    int tile = 0, token = 0;
    for (int unit = cluster; unit < num_units; unit += num_clusters) {
      place(unit, tile, token);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] = 0.0f;
      int left = end - begin;
      if constexpr (S::kBuffers == 1) {
        for (; left > 0; --left) {
          issue(products[0]);
          finish(products[0], false);
        }
      } else {
        issue(products[0]);
        for (; left > 2; left -= 2) {
          issue(products[1]);
          finish(products[0], true);
          issue(products[0]);
          finish(products[1], true);
        }
        if (left == 2) {
          issue(products[1]);
          finish(products[0], true);
          finish(products[1], false);
        } else {
          finish(products[0], false);
        }
      }
      dependency_wait();
      if (num_splits == 1) {
        with_epilogue([&](auto epilogue) {
          const auto fragment = [&](int j) {
            return Fragment<T, decltype(epilogue)::value, false>(p, (tile + warp) * p.tile_rows, 0, token + j * 8);
          };
          uint2 old[kFragments];
#pragma unroll
          for (int j = 0; j < kFragments; ++j) old[j] = fragment(j).load();
#pragma unroll
          for (int j = 0; j < kFragments; ++j) {
            const float* v = total + j * 4;
            fragment(j).store(make_float4(v[0], v[1], v[2], v[3]), old[j]);
          }
        });
      }
    }
    if (num_splits == 1) return;
    // The sums take the place of the ring. No copy is under way: every stage has been waited for.
    float4* staging = reinterpret_cast<float4*>(shared);
    named_sync(1, S::kWarps * 32);
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const float* v = total + j * 4;
      staging[(warp * kFragments + j) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
    meet(num_splits);
    with_epilogue([&](auto epilogue) {
      store_cluster<T, decltype(epilogue)::value, kFragments, S::kWarps>(
          p, staging, tile, token, S::kTiles * kFragments, split, num_splits);
    });
    meet(num_splits);
  }
}

}  // namespace xserv

// xserv_linear_fp8_many_<tokens>x<groups of four warps>_<dtype>
#define XSERV_FP8_MANY(TOKENS, GROUPS, SUFFIX, T)                                                     \
  extern "C" __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)                                 \
      xserv_linear_fp8_many_##TOKENS##x##GROUPS##_##SUFFIX(                                           \
          const __grid_constant__ xserv::Fp8ManyParams params) {                                      \
    xserv::fp8_many<T, xserv::Fp8Many<TOKENS, GROUPS>>(params);                                       \
  }
#define XSERV_FP8_MANY_ALL(SUFFIX, T)  \
  XSERV_FP8_MANY(32, 2, SUFFIX, T)     \
  XSERV_FP8_MANY(32, 3, SUFFIX, T)     \
  XSERV_FP8_MANY(64, 2, SUFFIX, T)     \
  XSERV_FP8_MANY(64, 3, SUFFIX, T)     \
  XSERV_FP8_MANY(96, 2, SUFFIX, T)     \
  XSERV_FP8_MANY(96, 3, SUFFIX, T)     \
  XSERV_FP8_MANY(128, 2, SUFFIX, T)    \
  XSERV_FP8_MANY(128, 3, SUFFIX, T)
XSERV_FP8_MANY_ALL(f16, __half)
XSERV_FP8_MANY_ALL(bf16, __nv_bfloat16)
#endif
