// Products of quantised activations (csrc/ops/quantised/activations.cu) with weights of FP8
// (quantised.cuh) by the FP8 tensor cores of Hopper, for prompts.
//
// A block has 64 tokens for each of its groups of four warps, and some tiles of W. Threads beside
// them copy stages of 128 inputs of both into a ring, where wgmma reads them. The tensor cores sum
// the 128 products of a stage, which are multiplied by the scales of their token and of their row
// and added up in f32: the sums of the tensor cores keep about 14 bits. While one group of warps
// does that, the tensor cores work for the others.
//
// Stages of every shape take as long as a multiprocessor of an H200 needs for 36 to 38 bytes a clock, with
// zeros as operands; with numbers the power of the card limits them. So tiles are as large as the
// registers allow. In those of 256 rows the two halves are multiplied one after the other, as products
// and sums of all rows would not fit. (It does not help that two blocks with the same rows each copy
// one half of W to both, which receive as much, nor that a group has the products of two stages under
// way.)
//
// Tokens are the rows of the products so that a thread has two of them, whose scales stay in registers
// for a stage. Rows of W are the columns, of which a thread has a quarter; a warp beside looks ahead
// whether every 64 rows (32 of the gate and 32 of up) share a scale, as they do with scales for
// blocks of 128 x 128. Where they do not, the scales of all columns are read from shared memory.
// The scale of a row as a whole is multiplied in at the end instead.
//
// A block computes one tile after the other and copies those ahead while it stores. Where so few tiles
// would leave most of the chip idle, the two blocks of a cluster divide the k of one tile; each
// finishes the sums of one group.
//
// Tokens past the last one are not read: what the ring has in their place goes into sums that are not stored.
#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/tma_cluster.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"
#include "ops/linear/quantised.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace xserv {

struct Fp8PrefillParams {
  TensorMap x;         // e4m3 [num_tokens, 128 * num_stages]; boxes of 64 tokens and 128 inputs, swizzled
  TensorMap x_scales;  // f32 [num_stages, tokens]; boxes of the tokens of a block
  TensorMap codes;     // [num_tiles, bytes of a tile]; boxes of the tiles of a block and a stage
  TensorMap scales;    // [num_tiles, num_groups, 16]; boxes of the tiles of a block and a group
  void* out;           // residual: read and written
  const void* bias;    // plain only
  const void* row_scales;  // those of all tiles
  int64_t ldo;         // elements from token to token of out
  int num_tokens;
  int n;             // columns of out
  int num_tiles;     // of W
  int num_stages;    // of a tile
  int num_groups;    // of a row
  int group_stages;  // of a group
  int scale_type;    // a ScaleType
  int epilogue;      // an Epilogue
  int row_tiles;     // the tiles of blocks along the rows
  int token_tiles;   // likewise along the tokens
  int token_group;   // so many of these are computed before the next rows
  int padding;
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_Fp8PrefillParams;

// kRows: of W in a block; kGroups: of four warps; kPartRows: of W that are multiplied at once.
template <int kRows_, int kGroups_, int kPartRows_>
struct Fp8Prefill {
  static constexpr int kRows = kRows_, kGroups = kGroups_, kTokens = 64 * kGroups, kWarps = kGroups * 4;
  static constexpr int kTiles = kRows / 16, kSums = kRows / 2, kSegments = kRows / 64;
  static constexpr int kPartRows = kPartRows_, kParts = kRows / kPartRows, kProducts = kPartRows / 2;
  static constexpr int kThreads = (kWarps + 4) * 32, kOtherRegisters = 32;
  // A block begins with as many registers for each thread; the others divide what those that copy give back.
  static constexpr int kRegisters =
      (65536 / kThreads / 8 * 8 * (kGroups + 1) - kOtherRegisters) / kGroups / 8 * 8;
  static constexpr uint32_t kTokenBytes = kTokens * 128, kTileBytes = 2048;
  static constexpr uint32_t kCodes = kTokenBytes, kScales = kCodes + kTiles * kTileBytes;
  static constexpr uint32_t kTokenScales = kScales + kTiles * 64;
  // The scales of even and odd eights of the rows of a segment, and whether there are such.
  static constexpr uint32_t kFactors = kTokenScales + kTokens * 4, kFlag = kFactors + kSegments * 8;
  static constexpr uint32_t kStageBytes = (kFlag + 4 + 1023) / 1024 * 1024;
  static constexpr int kStages = (226 * 1024) / kStageBytes;
  static constexpr uint32_t kBarriers = kStages * kStageBytes;
  // Of each stage, whether it is filled, whether its factors are there, and whether it has been read.
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 24;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The scales of rows 2q, 2q + 1 of a tile, and of those 8 further: x, z and y, w.
__device__ __forceinline__ float4 scale_four(uint4 v, ScaleType type) {
  if (type == ScaleType::kF32) return *reinterpret_cast<const float4*>(&v);
  const float2 first = scale_pair(make_uint2(v.x, 0), type), second = scale_pair(make_uint2(v.y, 0), type);
  return make_float4(first.x, first.y, second.x, second.y);
}

template <typename T, typename S>
__device__ __forceinline__ void fp8_prefill(const Fp8PrefillParams& p) {
  constexpr int kStages = S::kStages, kSums = S::kSums;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + S::kBarriers;
  const uint32_t ready = full + kStages * 8, empty = ready + kStages * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int num_units = p.row_tiles * p.token_tiles;
  // A block of a cluster has a part of k.
  const int num_splits = S::kGroups == 2 ? cluster_size() : 1, split = S::kGroups == 2 ? cluster_rank() : 0;
  const int first_stage = split * p.num_stages / num_splits;
  const int num_stages = (split + 1) * p.num_stages / num_splits - first_stage;
  const int first_unit = blockIdx.x / num_splits, unit_step = gridDim.x / num_splits;
  // The first tile (of 16 rows) and the first token of unit `unit` of the work.
  const auto place = [&](int unit, int& tile, int& token) {
    const int group = unit / (p.row_tiles * p.token_group), first = group * p.token_group;
    const int width = min(p.token_group, p.token_tiles - first), rest = unit - p.row_tiles * first;
    tile = rest / width * S::kTiles;
    token = (first + rest % width) * S::kTokens;
  };

  if (threadIdx.x == S::kWarps * 32) {
    tensor_map_prefetch(&p.codes);
    tensor_map_prefetch(&p.x);
    tensor_map_prefetch(&p.scales);
    tensor_map_prefetch(&p.x_scales);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
      mbarrier_init(full + slot * 8, 2);
      mbarrier_init(ready + slot * 8, 1);
      mbarrier_init(empty + slot * 8, S::kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const bool is_f32 = scale_type == ScaleType::kF32;
  // Whether the scales of rows are multiplied in at the end.
  const bool has_one_group = p.num_groups == 1;
  if (warp >= S::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kOtherRegisters));
    // One thread copies weights and another one x; a warp looks at the scales.
    const bool copies_weights = warp == S::kWarps;
    if (lane == 0 && warp < S::kWarps + 2) {
      // Both are read again by other blocks.
      const uint64_t policy = copies_weights ? l2_evict_normal() : l2_evict_last();
      if (!copies_weights) dependency_wait();
      int slot = 0, filled = 0;
      uint32_t parity = 1;  // of slots that were never filled
      for (int unit = first_unit; unit < num_units; unit += unit_step) {
        int tile, token;
        place(unit, tile, token);
        for (int stage = first_stage; stage < first_stage + num_stages; ++stage) {
          const uint32_t barrier = full + slot * 8, target = ring + slot * S::kStageBytes;
          mbarrier_wait(empty + slot * 8, parity);
          if (copies_weights) {
            mbarrier_arrive_expect(barrier, S::kTiles * (S::kTileBytes + (is_f32 ? 64 : 32)));
            tma_load_2d(target + S::kCodes, &p.codes, barrier, stage * 256, tile, policy);
            tma_load_3d(target + S::kScales, &p.scales, barrier, 0, min(stage / p.group_stages, p.num_groups - 1), tile,
                        policy);
            if (++filled == kStages) dependency_launch();
          } else {
            mbarrier_arrive_expect(barrier, S::kTokenBytes + S::kTokens * 4);
#pragma unroll
            for (int i = 0; i < S::kGroups; ++i) {
              tma_load_2d(target + i * 64 * 128, &p.x, barrier, stage * 128, token + i * 64, policy);
            }
            tma_load_2d(target + S::kTokenScales, &p.x_scales, barrier, token, stage, policy);
          }
          if (++slot == kStages) slot = 0, parity ^= 1;
        }
      }
    } else if (warp == S::kWarps + 2) {
      uint32_t stage = ring, barrier = full, parity = 0;
      for (int unit = first_unit; unit < num_units; unit += unit_step) {
        for (int left = num_stages; left > 0; --left) {
          mbarrier_wait(barrier, parity);
          bool is_shared = true;
#pragma unroll
          for (int s = 0; s < S::kSegments; ++s) {
            // Eight rows of four tiles, and those 8 further: a lane has the scales of two pairs.
            const uint32_t scales = stage + S::kScales + s * (is_f32 ? 256 : 128), size = is_f32 ? 8 : 4;
            const uint2 first = shared_pair(scales, is_f32), own = shared_pair(scales + lane * size, is_f32);
            is_shared &= own.x == first.x && own.y == first.y;
            float2 factor = make_float2(1.0f, 1.0f);
            if (!has_one_group) factor = scale_pair(first, scale_type);
            if (lane == 0) {
              asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(stage + S::kFactors + s * 8), "f"(factor.x),
                           "f"(factor.y)
                           : "memory");
            }
          }
          is_shared = __all_sync(0xffffffff, is_shared) || has_one_group;
          if (lane == 0) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + S::kFlag), "r"(static_cast<int>(is_shared)) : "memory");
            mbarrier_arrive(barrier + kStages * 8);
          }
          stage += S::kStageBytes, barrier += 8;
          if (barrier == ready) stage = ring, barrier = full, parity ^= 1;
        }
      }
    }
    if (num_splits > 1) {  // as below
      __syncwarp();
      cluster_arrive_relaxed();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    // x in rows of 128 bytes, swizzled; W in eights of rows 1024 bytes apart, of 128 bytes for each
    // 16 inputs.
    constexpr uint64_t kTokenLayout = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    constexpr uint64_t kCodeLayout = static_cast<uint64_t>(128 >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32;
    const int row = (warp & 3) * 16 + (lane >> 2), quarter = lane & 3;
    const uint32_t tokens = warp / 4 * (64 * 128);
    const uint32_t token_scales = S::kTokenScales + (warp / 4 * 64 + row) * 4;
    float products[S::kProducts], total[kSums];
    uint32_t stage = ring, barrier = full, parity = 0;  // of the stage that is read next
    int tile = 0, token = 0;
    for (int unit = first_unit; unit < num_units; unit += unit_step) {
      place(unit, tile, token);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] = 0.0f;
      for (int left = num_stages; left > 0; --left) {
        mbarrier_wait(barrier, parity);
        const uint64_t a = ((stage + tokens) & 0x3ffff) >> 4 | kTokenLayout;
        const uint64_t b = ((stage + S::kCodes) & 0x3ffff) >> 4 | kCodeLayout;
        float low, high;
        bool is_shared;
        float4 factors[S::kSegments];  // of even eights: of both tokens, then of odd ones
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            const uint64_t rows = b + part * (S::kPartRows / 16 * S::kTileBytes >> 4);
            wgmma_e4m3<S::kPartRows>(products, a + step * 2, rows + step * 16, step > 0);
          }
          wgmma_commit();
          if (part == 0) {  // meanwhile
            low = shared_float(stage + token_scales), high = shared_float(stage + token_scales + 32);
            mbarrier_wait(barrier + kStages * 8, parity);
            is_shared = shared_word(stage + S::kFlag) != 0;
#pragma unroll
            for (int s = 0; s < S::kSegments; ++s) {
              const float2 v = shared_floats(stage + S::kFactors + s * 8);
              factors[s] = make_float4(low * v.x, high * v.x, low * v.y, high * v.y);
            }
          }
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < S::kProducts; ++i) asm volatile("" : "+f"(products[i])::"memory");  // not before the wait
          float* sums = total + part * S::kProducts;
          if (!is_shared) {
#pragma unroll
            for (int t = 0; t < S::kPartRows / 16; ++t) {
              const uint32_t scales = stage + S::kScales + part * (S::kPartRows * (is_f32 ? 4 : 2));
              const uint32_t place = scales + (t * 16 + quarter * 4) * (is_f32 ? 4 : 2);
              const uint4 four =
                  is_f32 ? shared_words(place) : make_uint4(shared_word(place), shared_word(place + 4), 0, 0);
              const float4 f = scale_four(four, scale_type);
              const float* v = products + t * 8;
              float* sum = sums + t * 8;
              sum[0] = fmaf(v[0], low * f.x, sum[0]), sum[1] = fmaf(v[1], low * f.z, sum[1]);
              sum[2] = fmaf(v[2], high * f.x, sum[2]), sum[3] = fmaf(v[3], high * f.z, sum[3]);
              sum[4] = fmaf(v[4], low * f.y, sum[4]), sum[5] = fmaf(v[5], low * f.w, sum[5]);
              sum[6] = fmaf(v[6], high * f.y, sum[6]), sum[7] = fmaf(v[7], high * f.w, sum[7]);
            }
          }
          if (part == S::kParts - 1) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barrier + 2 * kStages * 8);
          }
          if (is_shared) {
#pragma unroll
            for (int i = 0; i < S::kProducts; i += 8) {
              const float4 f = factors[part * (S::kPartRows / 64) + i / 32];
              const float* v = products + i;
              float* sum = sums + i;
              sum[0] = fmaf(v[0], f.x, sum[0]), sum[1] = fmaf(v[1], f.x, sum[1]);
              sum[2] = fmaf(v[2], f.y, sum[2]), sum[3] = fmaf(v[3], f.y, sum[3]);
              sum[4] = fmaf(v[4], f.z, sum[4]), sum[5] = fmaf(v[5], f.z, sum[5]);
              sum[6] = fmaf(v[6], f.w, sum[6]), sum[7] = fmaf(v[7], f.w, sum[7]);
            }
          }
        }
        stage += S::kStageBytes, barrier += 8;
        if (barrier == ready) stage = ring, barrier = full, parity ^= 1;
      }
      if constexpr (S::kGroups == 2) {
        if (num_splits > 1) {
          // Block i finishes the sums of group i: the other block sends its own to where the ring was, once
          // both have read theirs.
          const int group = warp / 4;
          float4* received = reinterpret_cast<float4*>(shared) + (threadIdx.x & 127);
          cluster_arrive_relaxed();
          cluster_wait();
          if (group != split) {
            float4* there = cluster_pointer(received, group);
#pragma unroll
            for (int i = 0; i < kSums / 4; ++i) {
              there[i * 128] = make_float4(total[i * 4], total[i * 4 + 1], total[i * 4 + 2], total[i * 4 + 3]);
            }
          }
          cluster_arrive();
          cluster_wait();
          if (group != split) break;  // the cluster has one unit
#pragma unroll
          for (int i = 0; i < kSums / 4; ++i) {
            const float4 v = received[i * 128];
            total[i * 4] += v.x, total[i * 4 + 1] += v.y, total[i * 4 + 2] += v.z, total[i * 4 + 3] += v.w;
          }
        }
      }
      // Of a part, all that is read is read at once: between the stores each would be waited for.
      constexpr int kPartTiles = S::kPartRows / 16;
      if (has_one_group) {
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          uint4 fours[kPartTiles];
          const auto place = [&](int t) {
            return static_cast<int64_t>(min(tile + part * kPartTiles + t, p.num_tiles - 1)) * 4 + quarter;
          };
          if (is_f32) {
#pragma unroll
            for (int t = 0; t < kPartTiles; ++t) fours[t] = static_cast<const uint4*>(p.row_scales)[place(t)];
          } else {
#pragma unroll
            for (int t = 0; t < kPartTiles; ++t) {
              const uint2 two = static_cast<const uint2*>(p.row_scales)[place(t)];
              fours[t] = make_uint4(two.x, two.y, 0, 0);
            }
          }
#pragma unroll
          for (int t = 0; t < kPartTiles; ++t) {
            float* v = total + (part * kPartTiles + t) * 8;
            const float4 f = scale_four(fours[t], scale_type);
            v[0] *= f.x, v[1] *= f.z, v[2] *= f.x, v[3] *= f.z, v[4] *= f.y, v[5] *= f.w, v[6] *= f.y, v[7] *= f.w;
          }
        }
      }
      dependency_wait();
      const auto store = [&](auto epilogue) {
        using Row = TokenRow<T, decltype(epilogue)::value>;
        const int first = token + warp / 4 * 64 + row;
        const Row rows[2] = {{p, first}, {p, first + 8}};
#pragma unroll
        for (int part = 0; part < S::kTiles; part += kPartTiles) {
          uint4 old[kPartTiles / Row::kTiles][2];
#pragma unroll
          for (int t = 0; t < kPartTiles; t += Row::kTiles) {
#pragma unroll
            for (int second = 0; second < 2; ++second) old[t / Row::kTiles][second] = rows[second].load(p, tile + part + t);
          }
#pragma unroll
          for (int t = 0; t < kPartTiles; t += Row::kTiles) {
#pragma unroll
            for (int second = 0; second < 2; ++second) {
              float4 sums[Row::kTiles];
#pragma unroll
              for (int i = 0; i < Row::kTiles; ++i) {
                const float* v = total + (part + t + i) * 8 + second * 2;
                sums[i] = make_float4(v[0], v[1], v[4], v[5]);
              }
              rows[second].store(p, tile + part + t, sums, old[t / Row::kTiles][second]);
            }
          }
        }
      };
      switch (static_cast<Epilogue>(p.epilogue)) {
        case Epilogue::kPlain: store(EpilogueTag<Epilogue::kPlain>()); break;
        case Epilogue::kResidual: store(EpilogueTag<Epilogue::kResidual>()); break;
        case Epilogue::kSwiglu: store(EpilogueTag<Epilogue::kSwiglu>()); break;
      }
    }
  }
}

}  // namespace xserv

// xserv_linear_fp8_prefill_<rows>x<groups of four warps>_<dtype>
#define XSERV_FP8_PREFILL(ROWS, GROUPS, PART, SUFFIX, T)                        \
  extern "C" __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)           \
      xserv_linear_fp8_prefill_##ROWS##x##GROUPS##_##SUFFIX(                    \
          const __grid_constant__ xserv::Fp8PrefillParams params) {             \
    xserv::fp8_prefill<T, xserv::Fp8Prefill<ROWS, GROUPS, PART>>(params);       \
  }
#define XSERV_FP8_PREFILL_ALL(SUFFIX, T)    \
  XSERV_FP8_PREFILL(128, 2, 128, SUFFIX, T) \
  XSERV_FP8_PREFILL(128, 3, 128, SUFFIX, T) \
  XSERV_FP8_PREFILL(192, 2, 192, SUFFIX, T) \
  XSERV_FP8_PREFILL(256, 2, 128, SUFFIX, T)
XSERV_FP8_PREFILL_ALL(f16, __half)
XSERV_FP8_PREFILL_ALL(bf16, __nv_bfloat16)
#endif
