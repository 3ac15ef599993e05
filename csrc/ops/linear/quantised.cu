// Linear layers with quantised weights: W[i, k] = (code[i, k] - zero[i, group]) * scale[i, group], in the
// tiles of src/ops/quantised/tiles.rs. What becomes of the sums is said in fragment.cuh.
//
// x: [num_tokens, k], row-major; codes, scales, zeros: the regions of the tiles; bias: [n] or null;
// out: [num_tokens, n], n being half of the rows of W with swiglu. round() is to T, the type of x and out.
//
// Codes become numbers of T in registers, exactly (decode.cuh), and are the A operand of mma.m16n8k16: 16
// rows of W and 8 tokens have no unused rows even for one token. The products of a group are summed in
// f32, and multiplied by the scale of their row only then, so that nothing but x has been rounded.
//
// The weights go to a ring in shared memory that every warp has of its own, kAhead chunks of 64 inputs
// before they are used. (A ring of registers has no depth: the chip counts loads under way in six counters
// a warp, so that waiting for the oldest is waiting for most. A step of Qwen3-8B in 4 bits took 3.0 ms on an
// H200.) A lane has all that it needs of the codes of a tile's chunk in 16 bytes (of 8 bits: twice), and eight neighbouring numbers of x serve two products, so that x is read 16 bytes at a time from the
// first-level cache. A block has eight warps: p.row_shift says how many of them have different rows, the
// others share the inputs, as do the blocks of a cluster. Their sums are added in the order of the
// inputs, through shared memory. Which inputs are added up by whom depends on k and on those numbers alone.
//
// x is not read behind the end of a row: there, its last eight numbers meet codes that stand for 0.
#include "common/dtype.cuh"
#include "common/gemv.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "ops/linear/fragment.cuh"
#include "ops/quantised/decode.cuh"
#if __CUDA_ARCH__ >= 900
#include "common/cluster.cuh"
#endif

namespace xserv {

struct QuantisedParams {
  const void* x;
  const void* codes;
  const void* scales;
  const void* zeros;  // null: all are the middle of the codes
  void* out;          // residual: read and written
  const void* bias;   // plain only
  int64_t ldo;        // elements from token to token of out
  int num_tokens;
  int n;              // columns of out
  int k;              // a multiple of 8
  int num_tiles;
  int num_chunks;     // of a tile
  int num_groups;     // of a row
  uint32_t group_factor;  // the group of unit u is (2 * u * group_factor) >> 32; a chunk has kScales units
  int scale_type;     // a ScaleType
  int epilogue;       // an Epilogue
  int row_shift;      // log2 of the warps with different rows
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_QuantisedParams;

constexpr int kQuantisedWarps = 8;
constexpr int kChunk = 64;

// Copies 16 bytes of weights to shared memory if `is_wanted`; they are the first to leave the L2.
__device__ __forceinline__ void copy_weights(uint32_t target, const char* source, bool is_wanted, uint64_t policy) {
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %2, 0;"
      "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3;}" ::"r"(target),
      "l"(source), "r"(static_cast<int>(is_wanted)), "l"(policy)
      : "memory");
}

// Adds up the sums that all warps of the cluster have left in shared memory, and stores the results.
// staging: [warps along the inputs][all fragments of the block][lane].
template <typename T, Epilogue kEpilogue, int kFragments>
__device__ __forceinline__ void store_quantised(const QuantisedParams& p, const float4* staging, int first_tile,
                                                int first_token, int num_fragments, int input_warps, int split,
                                                int num_splits) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = split * kQuantisedWarps + warp; i < num_fragments; i += num_splits * kQuantisedWarps) {
    const Fragment<T, kEpilogue> fragment(p, (first_tile + i / kFragments) * QuantisedParams::tile_rows, 0,
                                          first_token + i % kFragments * 8);
    const uint2 old = fragment.load();
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](float4 part) {
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    };
    const float4* own = staging + i * 32 + lane;
    for (int s = 0; s < num_splits; ++s) {
      for (int w = 0; w < input_warps; ++w) {
        const float4* place = own + w * num_fragments * 32;
#if __CUDA_ARCH__ >= 900
        if (num_splits > 1) {
          add(cluster_load(cluster_address(shared_address(place), s)));
          continue;
        }
#endif
        add(*place);
      }
    }
    fragment.store(total, old);
  }
}

__device__ __forceinline__ uint4 shared_words(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// Two scales: two words of f32, or one of 16-bit numbers.
__device__ __forceinline__ uint2 shared_pair(uint32_t address, bool is_f32) {
  uint2 v = make_uint2(0, 0);
  if (is_f32) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.x) : "r"(address) : "memory");
  }
  return v;
}
__device__ __forceinline__ uint32_t shared_half(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

// kScales: of a chunk and row; kFragments: of 8 tokens; kTiles: of a warp; kBatch: fragments whose x is loaded
// together, while those before are multiplied.
template <typename T, Code kCode, int kScales, int kFragments, int kTiles, int kBatch, int kAhead>
__device__ __forceinline__ void quantised(const QuantisedParams& p) {
  constexpr int kLoads = kCode == Code::kInt4 ? 1 : 2, kBatches = kFragments / kBatch;
  constexpr int kChunkBytes = kLoads * 512;
  static_assert(kFragments % kBatch == 0 && (kBatches * kAhead) % 2 == 0, "x alternates between two buffers");
  extern __shared__ __align__(16) float4 staging[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
#if __CUDA_ARCH__ >= 900
  const int split = cluster_rank(), num_splits = cluster_size();
#else
  const int split = 0, num_splits = 1;
#endif
  const int row_warps = 1 << p.row_shift, input_warps = kQuantisedWarps >> p.row_shift;
  const int row_warp = warp & (row_warps - 1), input_warp = warp >> p.row_shift;
  const int part = split * input_warps + input_warp, num_parts = num_splits * input_warps;
  const int begin = part * p.num_chunks / num_parts, end = (part + 1) * p.num_chunks / num_parts;
  const int block_tile = blockIdx.x / num_splits * row_warps * kTiles;
  const int first_token = blockIdx.y * (kFragments * 8);

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const int scale_shift = scale_type == ScaleType::kF32 ? 3 : 2;  // log2 of the bytes of a pair
  const bool is_f32 = scale_type == ScaleType::kF32, has_zeros = p.zeros != nullptr;
  const uint64_t policy = weight_policy();
  const char* codes[kTiles];
  int first_groups[kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    // Tiles behind the last one are read as the last one, and not stored.
    const int tile = min(block_tile + row_warp * kTiles + r, p.num_tiles - 1);
    codes[r] = static_cast<const char*>(p.codes) + static_cast<int64_t>(tile) * p.num_chunks * kChunkBytes + lane * 16;
    first_groups[r] = tile * p.num_groups;
  }
  // A slot of the ring: of each tile the codes, and the scales and zeros of each group of the chunk.
  constexpr int kGroupBytes = 80, kTileBytes = kChunkBytes + kScales * kGroupBytes;
  const uint32_t ring = shared_address(staging) + warp * (kAhead * kTiles * kTileBytes);
  const auto slot_of = [&](int i, int r) { return ring + (i * kTiles + r) * kTileBytes; };
  // Lanes 0 and 1 (of f32 to 3) copy the scales of a group, and lane 4 its zeros.
  const bool copies_scales = lane < (is_f32 ? 4 : 2), copies_zeros = has_zeros && lane == 4;
  const bool copies_groups = copies_scales || copies_zeros;
  const char* groups = static_cast<const char*>(copies_scales ? p.scales : p.zeros) + (copies_scales ? lane * 16 : 0);
  const int group_shift = copies_scales ? scale_shift + 3 : 4;  // log2 of the bytes of a group
  const auto load_weights = [&](int i, int chunk) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        copy_weights(slot_of(i, r) + load * 512 + lane * 16,
                     codes[r] + static_cast<int64_t>(chunk) * kChunkBytes + load * 512, true, policy);
      }
    }
#pragma unroll
    for (int s = 0; s < kScales; ++s) {
      const int group = __umulhi(2 * (chunk * kScales + s), p.group_factor);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        copy_weights(slot_of(i, r) + kChunkBytes + s * kGroupBytes + lane * 16,
                     groups + (static_cast<int64_t>(first_groups[r] + group) << group_shift), copies_groups, policy);
      }
    }
  };

#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) load_weights(i, begin + i);
    cp_async_commit();
  }
  dependency_launch();
  dependency_wait();

  // Tokens behind the last one are read as the last one, and not stored.
  const char* x = static_cast<const char*>(p.x) + static_cast<int64_t>(first_token) * p.k * 2;
  uint32_t token_offsets[kFragments];
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
    token_offsets[j] = min(j * 8 + row, p.num_tokens - 1 - first_token) * p.k * 2;
  }
  uint4 numbers[2][kBatch][2];
  const auto load_x = [&](uint4 (&target)[kBatch][2], int chunk, int batch) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t input = min(chunk * kChunk + half * (kChunk / 2) + quarter * 8, p.k - 8);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        target[j][half] = load_activations(x + (token_offsets[batch * kBatch + j] + input * 2));
      }
    }
  };

  float sum[kTiles][kFragments][4] = {};
  if (begin < end) load_x(numbers[0], begin, 0);
  for (int first = begin; first < end; first += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i;
      if (chunk >= end) break;
      cp_async_wait<kAhead - 1>();
      __syncwarp();
      uint32_t a[kTiles][4][4];
      float2 scales[kTiles][kScales];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        uint4 words[kLoads];
        uint32_t zeros[kScales];
        const uint32_t slot = slot_of(i, r);
#pragma unroll
        for (int load = 0; load < kLoads; ++load) words[load] = shared_words(slot + load * 512 + lane * 16);
#pragma unroll
        for (int s = 0; s < kScales; ++s) {
          const uint32_t group = slot + kChunkBytes + s * kGroupBytes;
          scales[r][s] = scale_pair(shared_pair(group + (row << scale_shift), is_f32), scale_type);
          constexpr uint32_t kMiddle = kCode == Code::kInt4 ? 0x0808 : 0x8080;
          zeros[s] = kCode != Code::kFp8 && has_zeros ? shared_half(group + 64 + row * 2) : kMiddle;
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const Decoder<T, kCode> decoder(zeros[step * kScales / 4], has_zeros);
          const uint4& v = words[step * kLoads / 4];
          if constexpr (kCode == Code::kInt4) {
            decoder.decode(step == 0 ? v.x : step == 1 ? v.y : step == 2 ? v.z : v.w, a[r][step]);
          } else {
            decoder.decode(step % 2 ? v.z : v.x, step % 2 ? v.w : v.y, a[r][step]);
          }
        }
      }
      __syncwarp();
      if (chunk + kAhead < end) load_weights(i, chunk + kAhead);
      cp_async_commit();
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        const int turn = i * kBatches + batch;
        const bool is_last = batch + 1 == kBatches;
        load_x(numbers[(turn + 1) % 2], is_last ? min(chunk + 1, end - 1) : chunk, is_last ? 0 : batch + 1);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const uint4(&v)[2] = numbers[turn % 2][b];
#pragma unroll
          for (int r = 0; r < kTiles; ++r) {
            float products[kScales][4] = {};
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              const uint4& eight = v[step / 2];
              mma_m16n8k16<T>(products[step * kScales / 4], a[r][step], step % 2 ? eight.z : eight.x,
                              step % 2 ? eight.w : eight.y);
            }
            float(&total)[4] = sum[r][batch * kBatch + b];
#pragma unroll
            for (int s = 0; s < kScales; ++s) {
              total[0] = fmaf(products[s][0], scales[r][s].x, total[0]);
              total[1] = fmaf(products[s][1], scales[r][s].x, total[1]);
              total[2] = fmaf(products[s][2], scales[r][s].y, total[2]);
              total[3] = fmaf(products[s][3], scales[r][s].y, total[3]);
            }
          }
        }
      }
    }
  }

  // The sums take the place of all rings.
  cp_async_wait<0>();
  __syncthreads();
  const int num_fragments = row_warps * kTiles * kFragments;
  float4* own = staging + (warp * kTiles * kFragments) * 32 + lane;
#pragma unroll
  for (int i = 0; i < kTiles * kFragments; ++i) {
    const float(&v)[4] = sum[i / kFragments][i % kFragments];
    own[i * 32] = make_float4(v[0], v[1], v[2], v[3]);
  }
  const auto meet = [&]() {
#if __CUDA_ARCH__ >= 900
    if (num_splits > 1) {
      cluster_arrive();
      cluster_wait();
      return;
    }
#endif
    __syncthreads();
  };
  meet();
  switch (static_cast<Epilogue>(p.epilogue)) {
    case Epilogue::kPlain:
      store_quantised<T, Epilogue::kPlain, kFragments>(p, staging, block_tile, first_token, num_fragments, input_warps,
                                                       split, num_splits);
      break;
    case Epilogue::kResidual:
      store_quantised<T, Epilogue::kResidual, kFragments>(p, staging, block_tile, first_token, num_fragments,
                                                          input_warps, split, num_splits);
      break;
    case Epilogue::kSwiglu:
      store_quantised<T, Epilogue::kSwiglu, kFragments>(p, staging, block_tile, first_token, num_fragments,
                                                        input_warps, split, num_splits);
      break;
  }
  // No block leaves while another may read its sums.
  if (num_splits > 1) meet();
}

}  // namespace xserv

// xserv_linear_quantised_<code>_<scales of a chunk>_<tokens>_<dtype>, for blocks of 256 threads.
#define XSERV_QUANTISED(CODE_NAME, CODE, SCALES, TOKENS, TILES, BATCH, AHEAD, BLOCKS, SUFFIX, T) \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                      \
      xserv_linear_quantised_##CODE_NAME##_##SCALES##_##TOKENS##_##SUFFIX(                       \
          const __grid_constant__ xserv::QuantisedParams params) {                               \
    xserv::quantised<T, xserv::Code::CODE, SCALES, TOKENS / 8, TILES, BATCH, AHEAD>(params);     \
  }
#define XSERV_QUANTISED_DTYPES(...)              \
  XSERV_QUANTISED(__VA_ARGS__, f16, __half)      \
  XSERV_QUANTISED(__VA_ARGS__, bf16, __nv_bfloat16)
#define XSERV_QUANTISED_8_BITS(...)                      \
  XSERV_QUANTISED_DTYPES(int8, kInt8, __VA_ARGS__)       \
  XSERV_QUANTISED_DTYPES(fp8, kFp8, __VA_ARGS__)
// Scales of a chunk, tokens, tiles of a warp, fragments of a batch, chunks ahead, blocks of a multiprocessor:
// with these nothing is spilled on sm_90 for up to 32 tokens, and for 64 at most a few words.
XSERV_QUANTISED_DTYPES(int4, kInt4, 1, 8, 2, 1, 6, 2)
XSERV_QUANTISED_DTYPES(int4, kInt4, 1, 16, 2, 2, 6, 2)
XSERV_QUANTISED_DTYPES(int4, kInt4, 1, 32, 2, 4, 6, 1)
XSERV_QUANTISED_DTYPES(int4, kInt4, 1, 64, 2, 4, 6, 1)
XSERV_QUANTISED_DTYPES(int4, kInt4, 2, 8, 2, 1, 6, 2)
XSERV_QUANTISED_DTYPES(int4, kInt4, 2, 16, 2, 2, 6, 2)
XSERV_QUANTISED_DTYPES(int4, kInt4, 2, 32, 2, 2, 6, 1)
XSERV_QUANTISED_DTYPES(int4, kInt4, 2, 64, 2, 2, 6, 1)
XSERV_QUANTISED_8_BITS(1, 8, 2, 1, 4, 2)
XSERV_QUANTISED_8_BITS(1, 16, 2, 2, 4, 2)
XSERV_QUANTISED_8_BITS(1, 32, 2, 4, 4, 1)
XSERV_QUANTISED_8_BITS(1, 64, 2, 4, 4, 1)
XSERV_QUANTISED_8_BITS(2, 8, 2, 1, 4, 2)
XSERV_QUANTISED_8_BITS(2, 16, 2, 2, 4, 2)
XSERV_QUANTISED_8_BITS(2, 32, 2, 4, 4, 1)
XSERV_QUANTISED_8_BITS(2, 64, 2, 2, 4, 1)
