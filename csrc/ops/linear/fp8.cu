// Products of quantised activations (csrc/ops/quantised/activations.cu) with weights of FP8
// (quantised.cuh), for any number of tokens; fp8_many.cu is faster for more than 16 on Hopper.
//
// The codes of a weight are the operand A of mma.m16n8k32, of which a lane has 16 neighbouring
// inputs for two products; chips before sm_89, which do not have it, make numbers of f16 of both
// operands, exactly, for mma.m16n8k16. The products of 128 inputs are summed by the tensor cores,
// multiplied by the scales of their row and of their token, and added up in f32.
//
// A warp has a ring in shared memory of stages of 128 inputs: the codes of its tiles, their scales,
// the codes of x and their scales. The stages are divided among p.row_shift's warps and the blocks
// of a cluster as in quantised.cu; which inputs are added up by whom depends on k and on those
// numbers alone.
#include "common/gemv.cuh"
#include "common/pdl.cuh"
#include "ops/linear/own_inputs.cuh"
#include "ops/quantised/activations.cuh"
#include "ops/quantised/decode_in_order.cuh"

namespace xserv {

struct Fp8Params {
  const void* x;          // e4m3 [num_tokens, 128 * num_stages], or T [num_tokens, k]
  const float* x_scales;  // [num_stages, x_pitch]; null: x is of T
  const void* codes;
  const void* scales;
  void* out;         // residual: read and written
  const void* bias;  // plain only
  int64_t ldo;       // elements from token to token of out
  int num_tokens;
  int n;  // columns of out
  int num_tiles;
  int num_chunks;    // of a tile, each of 64 inputs; even
  int num_groups;    // of a row
  int group_stages;  // of a group
  int x_pitch;       // a multiple of 4
  int scale_type;    // a ScaleType
  int epilogue;      // an Epilogue
  int row_shift;     // log2 of the warps with different rows
  int k;                    // of x of T, a multiple of 8
  float eps;                // of the norm of x
  const void* norm_weight;  // [k]; null: x of T is not normalised
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_Fp8Params;

constexpr int kFp8Tiles = 2;  // of a warp

// Hopper has this instruction as several: it makes numbers of f16, as older chips are told to.
#define XSERV_FP8_MMA (__CUDA_ARCH__ >= 890)

// d += a * b of 32 inputs: a is 16 x 32 (row), b 32 x 8 (column), of e4m3; d 16 x 8 in f32.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_16(uint32_t target, const void* source, bool is_wanted) {
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(target),
      "l"(source), "r"(static_cast<int>(is_wanted))
      : "memory");
}

// Where the two halves of a token's codes change places, so that lanes read different banks.
__device__ __forceinline__ int half_of(int token) { return token & 1; }

// kFragments: of 8 tokens; kStages: of the ring of a warp; kIsOwn: whether x is of T, so that each
// block quantises, and normalises, what it multiplies (own_inputs.cuh).
template <typename T, int kFragments, int kStages, bool kIsOwn>
__device__ __forceinline__ void fp8_product(const Fp8Params& p) {
  static_assert(!kIsOwn || kFragments == 1, "a block makes no more rows");
  constexpr int kTileBytes = 2048 + 64;
  extern __shared__ __align__(16) float4 staging[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
  const int split = split_rank(), num_splits = split_count();
  const int row_warps = 1 << p.row_shift, input_warps = kQuantisedWarps >> p.row_shift;
  const int row_warp = warp & (row_warps - 1), input_warp = warp >> p.row_shift;
  const int part = split * input_warps + input_warp, num_parts = num_splits * input_warps;
  const int num_stages = p.num_chunks / 2;
  const int begin = part * num_stages / num_parts, end = (part + 1) * num_stages / num_parts;
  const int block_tile = blockIdx.x / num_splits * row_warps * kFp8Tiles;
  const int warp_tile = block_tile + row_warp * kFp8Tiles;
  const int first_token = blockIdx.y * (kFragments * 8), num_rows = min(p.num_tokens - first_token, kFragments * 8);

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const bool is_f32 = scale_type == ScaleType::kF32;
  const uint64_t policy = weight_policy();
  // A slot of the ring has of each tile the codes and 64 bytes of scales, then of each token 128
  // bytes of codes, then the scales of the tokens. What a block makes of the tokens lies after the
  // rings of all warps, in the same order for each stage.
  const int padded_rows = (num_rows + 3) & ~3;
  const uint32_t token_codes = kIsOwn ? 0 : kFp8Tiles * kTileBytes;
  const uint32_t token_scales = token_codes + num_rows * 128, inputs_bytes = num_rows * 128 + padded_rows * 4;
  const uint32_t slot_bytes = kFp8Tiles * kTileBytes + (kIsOwn ? 0 : inputs_bytes);
  const uint32_t ring = shared_address(staging) + warp * (kStages * slot_bytes);
  const uint32_t own_inputs = shared_address(staging) + kQuantisedWarps * kStages * slot_bytes;

  // Tiles past the last one are read as the last one, and not stored.
  const auto tile_of = [&](int r) { return static_cast<int64_t>(min(warp_tile + r, p.num_tiles - 1)); };
  const char* codes[kFp8Tiles];
#pragma unroll
  for (int r = 0; r < kFp8Tiles; ++r) {
    codes[r] = static_cast<const char*>(p.codes) + tile_of(r) * p.num_chunks * 1024 + lane * 16;
  }
  // Lanes 0 and 1 of every eight (of f32 to 3) copy the scales of a tile.
  const int member = lane & 7, group_shift = is_f32 ? 6 : 5;  // log2 of the bytes of a group
  const bool copies_scales = lane < kFp8Tiles * 8 && member < (is_f32 ? 4 : 2);
  const char* const groups =
      static_cast<const char*>(p.scales) + member * 16 + (tile_of(lane >> 3) * p.num_groups << group_shift);
  // The rows of a piece change places, by the piece, so that the lanes of a load read different banks.
  const uint32_t code_target = (lane & 24) * 16 + (member ^ (lane >> 3) * 2) * 16;
  const uint32_t group_target = (lane >> 3) * kTileBytes + 2048 + member * 16;
  const auto fill_weights = [&](uint32_t slot, int stage) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int64_t place = static_cast<int64_t>(stage) * 2048 + step * 512;
#pragma unroll
      for (int r = 0; r < kFp8Tiles; ++r) {
        copy_weights(slot + r * kTileBytes + step * 512 + code_target, codes[r] + place, true, policy);
      }
    }
    const int group = min(stage / p.group_stages, p.num_groups - 1);
    copy_weights(slot + group_target, groups + (static_cast<int64_t>(group) << group_shift), copies_scales, policy);
  };

#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (begin + i < end) fill_weights(ring + i * slot_bytes, begin + i);
    cp_async_commit();
  }
  dependency_launch();
  // Where the block's inputs begin.
  const int block_begin = split * input_warps * num_stages / num_parts;
  if constexpr (kIsOwn) {
    const OwnInputs<T> own(p.x, p.norm_weight, num_rows, p.k);
    dependency_wait();
    const int block_end = (split + 1) * input_warps * num_stages / num_parts;
    const auto store = [&](int token, int eight, uint4 inputs, bool is_wanted) {
      float numbers[8];
      unpack<T>(inputs, numbers);
      uint32_t words[2];
      const float scale = quantise_eight(numbers, words);
      if (!is_wanted) return;
      const uint32_t stage = own_inputs + (eight / 16 - block_begin) * inputs_bytes, place = eight % 16;
      const uint32_t codes = stage + token * 128 + (place ^ half_of(token) * 8) * 8;
      store_shared(codes, words[0]);
      store_shared(codes + 4, words[1]);
      if (place == 0) store_shared(stage + num_rows * 128 + token * 4, __float_as_uint(scale));
    };
    own.make(block_begin * 16, block_end * 16, p.eps, store);
    __syncthreads();
  } else {
    dependency_wait();
  }

  // Eight lanes copy the codes of a token, and a lane the scales of four.
  const char* const x = static_cast<const char*>(p.x) +
                        static_cast<int64_t>(first_token + (lane >> 3)) * num_stages * 128 + (lane & 7) * 16;
  const auto fill_inputs = [&](uint32_t slot, int stage) {
#pragma unroll
    for (int j = 0; j < kFragments * 2; ++j) {
      const int token = j * 4 + (lane >> 3);
      copy_16(slot + token_codes + token * 128 + ((lane & 7) ^ half_of(token) * 4) * 16,
              x + (static_cast<int64_t>(j) * 4 * num_stages + stage) * 128, token < num_rows);
    }
    copy_16(slot + token_scales + lane * 16, p.x_scales + static_cast<int64_t>(stage) * p.x_pitch + first_token + lane * 4,
            lane * 4 < num_rows);
  };
  if constexpr (!kIsOwn) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (begin + i < end) fill_inputs(ring + i * slot_bytes, begin + i);
      cp_async_commit();
    }
  }

  // Tokens past the last one are read as the last one, and not stored.
  // Of 16 inputs of the first half of a stage, and with bit 6 the other way of the second.
  uint32_t x_places[kFragments];
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
    const int token = min(j * 8 + row, num_rows - 1);
    x_places[j] = token * 128 + (half_of(token) * 4 + quarter) * 16;
  }
  float sum[kFp8Tiles][kFragments][4] = {};
  int slot_index = 0;
  for (int stage = begin; stage < end; ++stage) {
    const uint32_t slot = ring + slot_index * slot_bytes;
    const uint32_t inputs = kIsOwn ? own_inputs + (stage - block_begin) * inputs_bytes : slot;
    cp_async_wait<kStages - 1>();
    __syncwarp();
    float products[kFp8Tiles][kFragments][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Sixteen inputs of rows `row` and `row` + 8.
      uint4 low[kFp8Tiles], high[kFp8Tiles];
#pragma unroll
      for (int r = 0; r < kFp8Tiles; ++r) {
        const uint32_t piece = slot + r * kTileBytes + half * 512 + quarter * 128 + (row ^ quarter * 2) * 16;
        low[r] = shared_words(piece), high[r] = shared_words(piece + 1024);
      }
#if XSERV_FP8_MMA
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const uint4 b = shared_words(inputs + token_codes + (x_places[j] ^ half * 64));
#pragma unroll
        for (int r = 0; r < kFp8Tiles; ++r) {
          mma_e4m3(products[r][j], {low[r].x, high[r].x, low[r].y, high[r].y}, b.x, b.y);
          mma_e4m3(products[r][j], {low[r].z, high[r].z, low[r].w, high[r].w}, b.z, b.w);
        }
      }
#else
      uint32_t a[kFp8Tiles][4][4];
#pragma unroll
      for (int r = 0; r < kFp8Tiles; ++r) {
        const uint32_t lows[4] = {low[r].x, low[r].y, low[r].z, low[r].w};
        const uint32_t highs[4] = {high[r].x, high[r].y, high[r].z, high[r].w};
#pragma unroll
        for (int four = 0; four < 4; ++four) {
          uint32_t first[2], second[2];
          decode_in_order(lows[four], first, __half()), decode_in_order(highs[four], second, __half());
          a[r][four][0] = first[0], a[r][four][1] = second[0], a[r][four][2] = first[1], a[r][four][3] = second[1];
        }
      }
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const uint4 v = shared_words(inputs + token_codes + (x_places[j] ^ half * 64));
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int four = 0; four < 4; ++four) {
          uint32_t b[2];
          decode_in_order(words[four], b, __half());
#pragma unroll
          for (int r = 0; r < kFp8Tiles; ++r) mma_m16n8k16<__half>(products[r][j], a[r][four], b[0], b[1]);
        }
      }
#endif
    }
    float2 scales[kFp8Tiles];
#pragma unroll
    for (int r = 0; r < kFp8Tiles; ++r) {
      scales[r] = scale_pair(shared_pair(slot + r * kTileBytes + 2048 + row * (is_f32 ? 8 : 4), is_f32), scale_type);
    }
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const int pair = min(j * 8 + quarter * 2, padded_rows - 2);
      const float2 of_tokens = shared_floats(inputs + token_scales + pair * 4);
#pragma unroll
      for (int r = 0; r < kFp8Tiles; ++r) {
        const float(&v)[4] = products[r][j];
        float(&total)[4] = sum[r][j];
        total[0] = fmaf(v[0], of_tokens.x * scales[r].x, total[0]);
        total[1] = fmaf(v[1], of_tokens.y * scales[r].x, total[1]);
        total[2] = fmaf(v[2], of_tokens.x * scales[r].y, total[2]);
        total[3] = fmaf(v[3], of_tokens.y * scales[r].y, total[3]);
      }
    }
    __syncwarp();
    if (stage + kStages < end) {
      fill_weights(slot, stage + kStages);
      if (!kIsOwn) fill_inputs(slot, stage + kStages);
    }
    cp_async_commit();
    if (++slot_index == kStages) slot_index = 0;
  }

  // The sums take the place of all rings.
  cp_async_wait<0>();
  __syncthreads();
  finish_quantised<T, kFp8Tiles, kFragments, false>(p, staging, sum, block_tile, first_token);
}

}  // namespace xserv

// xserv_linear_fp8_<tokens>_<dtype>, for blocks of 256 threads, and xserv_linear_fp8_own_<stages>_<dtype>.
#define XSERV_FP8(NAME, TOKENS, STAGES, IS_OWN, BLOCKS, SUFFIX, T)                               \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                      \
      xserv_linear_fp8_##NAME##_##SUFFIX(const __grid_constant__ xserv::Fp8Params params) {      \
    xserv::fp8_product<T, (TOKENS + 7) / 8, STAGES, IS_OWN>(params);                             \
  }
// Tokens, stages of a ring, blocks of a multiprocessor, which has shared memory for so many.
// Fragments have 8 tokens.
#define XSERV_FP8_ALL(SUFFIX, T)               \
  XSERV_FP8(4, 4, 3, false, 2, SUFFIX, T)      \
  XSERV_FP8(8, 8, 2, false, 2, SUFFIX, T)      \
  XSERV_FP8(16, 16, 2, false, 2, SUFFIX, T)    \
  XSERV_FP8(32, 32, 2, false, 1, SUFFIX, T)    \
  XSERV_FP8(64, 64, 2, false, 1, SUFFIX, T)    \
  XSERV_FP8(own_2, 8, 2, true, 2, SUFFIX, T)   \
  XSERV_FP8(own_3, 8, 3, true, 2, SUFFIX, T)
XSERV_FP8_ALL(f16, __half)
XSERV_FP8_ALL(bf16, __nv_bfloat16)
