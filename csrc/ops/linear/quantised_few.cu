// Linear layers with quantised weights (quantised.cuh) for up to 16 tokens.
//
// As in quantised.cu, the codes are the A operand of mma.m16n8k16 and the products of a group are scaled in
// f32, but this kernel is made for the fewest instructions, which is what few tokens wait for:
//
// * A stage of a warp's ring in shared memory has the same 1,024 bytes of codes of each of its
//   tiles (128 inputs of 4 bits, 64 of 8), the scales and zeros of their groups, and the inputs, so
//   that what a stage costs beside its products is paid for half as often as by chunks, and no load
//   of x is waited for.
// * Codes of 4 bits stay 1 + code / 16 in the products (decode.cuh). What is too much is the sum of the
//   inputs of a group, which a product with ones gives to all rows at once, times 1 + zero / 16.
//
// On an H200 the layer of Qwen3-8B in 4 bits takes 40 us for one token, where quantised.cu takes 60.
//
// The stages of the inputs are divided among p.row_shift's warps and the blocks of a cluster as in
// quantised.cu. Inputs past the end of a row are zeros.
#include "common/gemv.cuh"
#include "common/pdl.cuh"
#include "ops/linear/quantised.cuh"

namespace xserv {

constexpr int kFewStages = 3;
constexpr int kFewTiles = 2;  // of a warp
constexpr int kStageBytes = 1024;

// Copies 16 bytes of x if `is_wanted`: zeros unless `is_there`.
__device__ __forceinline__ void copy_inputs(uint32_t target, const char* source, bool is_wanted, bool is_there) {
  asm volatile(
      "{.reg .pred p, q; setp.ne.s32 p, %2, 0; setp.eq.s32 q, %3, 0;"
      "@p cp.async.ca.shared.global [%0], [%1], 16, q;}" ::"r"(target),
      "l"(source), "r"(static_cast<int>(is_wanted)), "r"(static_cast<int>(is_there))
      : "memory");
}

// kUnits: scales of a stage and row; kFragments: of 8 tokens.
template <typename T, Code kCode, int kUnits, int kFragments>
__device__ __forceinline__ void quantised_few(const QuantisedParams& p) {
  constexpr bool kIsInt4 = kCode == Code::kInt4;
  constexpr int kInputs = kIsInt4 ? 128 : 64, kEights = kInputs / 32, kSteps = kInputs / 16;
  constexpr int kTileBytes = kStageBytes + kUnits * 80;
  extern __shared__ __align__(16) float4 staging[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
  const int split = split_rank(), num_splits = split_count();
  const int row_warps = 1 << p.row_shift, input_warps = kQuantisedWarps >> p.row_shift;
  const int row_warp = warp & (row_warps - 1), input_warp = warp >> p.row_shift;
  const int part = split * input_warps + input_warp, num_parts = num_splits * input_warps;
  constexpr int kChunksOfStage = kInputs / 64;
  const int num_stages = (p.num_chunks + kChunksOfStage - 1) / kChunksOfStage;
  const int begin = part * num_stages / num_parts, end = (part + 1) * num_stages / num_parts;
  const int block_tile = blockIdx.x / num_splits * row_warps * kFewTiles;
  const int warp_tile = block_tile + row_warp * kFewTiles;
  const int first_token = blockIdx.y * (kFragments * 8), num_rows = min(p.num_tokens - first_token, kFragments * 8);

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const bool is_f32 = scale_type == ScaleType::kF32, has_zeros = p.zeros != nullptr;
  const uint64_t policy = weight_policy();
  // A slot of the ring has of each tile the codes, then 64 bytes of scales of each unit, then 16 of
  // zeros; after the tiles, for every 32 inputs, 64 bytes of each row of x.
  const uint32_t slot_bytes = kFewTiles * kTileBytes + num_rows * (kInputs * 2);
  const uint32_t ring = shared_address(staging) + warp * (kFewStages * slot_bytes);

  // Tiles past the last one are read as the last one, and not stored.
  const auto tile_of = [&](int r) { return static_cast<int64_t>(min(warp_tile + r, p.num_tiles - 1)); };
  // The pointers are those of the next stage of slot 0.
  const char* codes[kFewTiles];
#pragma unroll
  for (int r = 0; r < kFewTiles; ++r) {
    const int64_t tile_bytes = static_cast<int64_t>(p.num_chunks) * (kStageBytes / kChunksOfStage);
    codes[r] = static_cast<const char*>(p.codes) + tile_of(r) * tile_bytes +
               static_cast<int64_t>(begin) * kStageBytes + lane * 16;
  }
  // Lanes 0 and 1 of every eight (of f32 to 3) copy the scales of a tile, and lane 4 its zeros.
  const int member = lane & 7;
  const bool copies_scales = member < (is_f32 ? 4 : 2);
  const bool copies_groups = lane < kFewTiles * 8 && (copies_scales || (has_zeros && member == 4));
  const int group_shift = copies_scales ? (is_f32 ? 6 : 5) : 4;  // log2 of the bytes of a group
  const char* const groups = static_cast<const char*>(copies_scales ? p.scales : p.zeros) +
                             (copies_scales ? member * 16 : 0) + (tile_of(lane >> 3) * p.num_groups << group_shift);
  const uint32_t group_target = (lane >> 3) * kTileBytes + kStageBytes + (copies_scales ? member * 16 : kUnits * 64);
  const int group_pitch = copies_scales ? 64 : 16;
  const auto fill_weights = [&](uint32_t slot, int i, int stage) {
    // The last stage may have a single chunk.
    const bool is_whole = kChunksOfStage == 1 || stage * kChunksOfStage + 1 < p.num_chunks;
#pragma unroll
    for (int r = 0; r < kFewTiles; ++r) {
      const uint32_t target = slot + r * kTileBytes + lane * 16;
      copy_weights(target, codes[r] + i * kStageBytes, true, policy);
      copy_weights(target + kStageBytes / 2, codes[r] + i * kStageBytes + kStageBytes / 2, is_whole, policy);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t group = min(__umulhi(2 * (stage * kUnits + u), p.group_factor), p.num_groups - 1u);
      copy_weights(slot + group_target + u * group_pitch, groups + (group << group_shift), copies_groups, policy);
    }
  };

#pragma unroll
  for (int i = 0; i < kFewStages; ++i) {
    if (begin + i < end) fill_weights(ring + i * slot_bytes, i, begin + i);
    cp_async_commit();
  }
  dependency_launch();
  dependency_wait();

  // Tokens past the last one are read as the last one, and not stored.
  const char* x[kFragments];
  uint32_t x_places[kFragments];
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
    const int token = min(j * 8 + row, num_rows - 1);
    x[j] = static_cast<const char*>(p.x) +
           (static_cast<int64_t>(first_token + token) * p.k + begin * kInputs + quarter * 8) * 2;
    x_places[j] = kFewTiles * kTileBytes + token * 64 + quarter * 16;
  }
  const uint32_t x_pitch = num_rows * 64;
  const auto fill_inputs = [&](uint32_t slot, int i, int stage) {
    const int left = p.k - quarter * 8 - stage * kInputs;
#pragma unroll
    for (int h = 0; h < kEights; ++h) {
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        copy_inputs(slot + x_places[j] + h * x_pitch, x[j] + (i * kEights + h) * 64, j * 8 + row < num_rows,
                    h * 32 < left);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kFewStages; ++i) {
    if (begin + i < end) fill_inputs(ring + i * slot_bytes, i, begin + i);
    cp_async_commit();
  }

  float sum[kFewTiles][kFragments][4] = {};
  for (int first = begin; first < end; first += kFewStages) {
#pragma unroll
    for (int r = 0; r < kFewTiles; ++r) codes[r] += kFewStages * kStageBytes;
#pragma unroll
    for (int j = 0; j < kFragments; ++j) x[j] += kFewStages * kInputs * 2;
#pragma unroll
    for (int i = 0; i < kFewStages; ++i) {
      const int stage = first + i;
      if (stage >= end) break;
      const uint32_t slot = ring + i * slot_bytes;
      cp_async_wait<kFewStages - 1>();
      __syncwarp();
      uint4 eights[kFragments][kEights], words[kFewTiles][2];
#pragma unroll
      for (int h = 0; h < kEights; ++h) {
#pragma unroll
        for (int j = 0; j < kFragments; ++j) eights[j][h] = shared_words(slot + x_places[j] + h * x_pitch);
      }
#pragma unroll
      for (int r = 0; r < kFewTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          words[r][half] = shared_words(slot + r * kTileBytes + half * (kStageBytes / 2) + lane * 16);
        }
      }
      uint2 scale_words[kFewTiles][kUnits];
      uint32_t zeros[kFewTiles][kUnits];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int r = 0; r < kFewTiles; ++r) {
          const uint32_t group = slot + r * kTileBytes + kStageBytes;
          scale_words[r][u] = shared_pair(group + u * 64 + row * (is_f32 ? 8 : 4), is_f32);
          constexpr uint32_t kMiddle = kIsInt4 ? 0x0808 : 0x8080;
          const bool has = !is_float(kCode) && has_zeros;
          zeros[r][u] = has ? shared_half(group + kUnits * 64 + u * 16 + row * 2) : kMiddle;
        }
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float products[kFewTiles][kFragments][4] = {}, inputs[kFragments][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps / kUnits; ++k) {  // with bounds of u nvcc (13.0) left two units as a loop
          const int step = u * (kSteps / kUnits) + k;
          uint32_t a[kFewTiles][4];
#pragma unroll
          for (int r = 0; r < kFewTiles; ++r) {
            if constexpr (kIsInt4) {
              const uint4& w = words[r][step / 4];
              decode_raised(step % 4 == 0 ? w.x : step % 4 == 1 ? w.y : step % 4 == 2 ? w.z : w.w, a[r], T());
            } else {
              const uint4& w = words[r][step / 2];
              const Decoder<T, kCode> decoder(zeros[r][u], has_zeros);
              decoder.decode(step % 2 ? w.z : w.x, step % 2 ? w.w : w.y, a[r]);
            }
          }
#pragma unroll
          for (int j = 0; j < kFragments; ++j) {
            const uint4& eight = eights[j][step / 2];
            const uint32_t b0 = step % 2 ? eight.z : eight.x, b1 = step % 2 ? eight.w : eight.y;
            if constexpr (kIsInt4) {
              const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
              mma_m16n8k16<T>(inputs[j], ones, b0, b1);
            }
#pragma unroll
            for (int r = 0; r < kFewTiles; ++r) mma_m16n8k16<T>(products[r][j], a[r], b0, b1);
          }
        }
#pragma unroll
        for (int r = 0; r < kFewTiles; ++r) {
          float2 scale = scale_pair(scale_words[r][u], scale_type);
          const float2 raised = raised_zeros(zeros[r][u]);
          if constexpr (kIsInt4) scale.x *= 16.0f, scale.y *= 16.0f;
#pragma unroll
          for (int j = 0; j < kFragments; ++j) {
            float(&v)[4] = products[r][j];
            if constexpr (kIsInt4) {
              v[0] = fmaf(-raised.x, inputs[j][0], v[0]), v[1] = fmaf(-raised.x, inputs[j][1], v[1]);
              v[2] = fmaf(-raised.y, inputs[j][0], v[2]), v[3] = fmaf(-raised.y, inputs[j][1], v[3]);
            }
            float(&total)[4] = sum[r][j];
            total[0] = fmaf(v[0], scale.x, total[0]), total[1] = fmaf(v[1], scale.x, total[1]);
            total[2] = fmaf(v[2], scale.y, total[2]), total[3] = fmaf(v[3], scale.y, total[3]);
          }
        }
      }
      __syncwarp();
      if (stage + kFewStages < end) {
        fill_weights(slot, i, stage + kFewStages);
        fill_inputs(slot, i, stage + kFewStages);
      }
      cp_async_commit();
    }
  }

  // The sums take the place of all rings.
  cp_async_wait<0>();
  __syncthreads();
  finish_quantised<T, kFewTiles, kFragments>(p, staging, sum, block_tile, first_token);
}

}  // namespace xserv

// xserv_linear_quantised_few_<code>_<scales of a stage>_<tokens>_<dtype>, for blocks of 256
// threads, of which a multiprocessor has two with 8 tokens.
#define XSERV_QUANTISED_FEW(CODE_NAME, CODE, UNITS, TOKENS, BLOCKS, SUFFIX, T)                \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                   \
      xserv_linear_quantised_few_##CODE_NAME##_##UNITS##_##TOKENS##_##SUFFIX(                 \
          const __grid_constant__ xserv::QuantisedParams params) {                            \
    xserv::quantised_few<T, xserv::Code::CODE, UNITS, TOKENS / 8>(params);                    \
  }
#define XSERV_QUANTISED_FEW_TOKENS(CODE_NAME, CODE, UNITS)                      \
  XSERV_QUANTISED_FEW(CODE_NAME, CODE, UNITS, 8, 2, f16, __half)                \
  XSERV_QUANTISED_FEW(CODE_NAME, CODE, UNITS, 8, 2, bf16, __nv_bfloat16)        \
  XSERV_QUANTISED_FEW(CODE_NAME, CODE, UNITS, 16, 1, f16, __half)               \
  XSERV_QUANTISED_FEW(CODE_NAME, CODE, UNITS, 16, 1, bf16, __nv_bfloat16)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_FEW_TOKENS, 1)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_FEW_TOKENS, 2)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_FEW_TOKENS, 4)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_FEW_TOKENS, 1)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_FEW_TOKENS, 2)
