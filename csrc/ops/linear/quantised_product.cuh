// The kernel of quantised.cu, which ops/experts/quantised.cu has too.
//
// Codes become numbers of T in registers, exactly (decode.cuh), and are the A operand of mma.m16n8k16: 16
// rows of W and 8 tokens have no unused rows even for one token. The products of a group are summed in
// f32, and multiplied by the scale of their row only then, so that nothing but x has been rounded.
//
// The weights go to a ring in shared memory that every warp has of its own, kAhead chunks of 64
// inputs before they are used. (A ring of registers has no depth: the chip counts loads under way
// in six counters a warp, so that waiting for the oldest is waiting for most. A step of Qwen3-8B in
// 4 bits took 3.0 ms on an H200.) A lane has all that it needs of the codes of a tile's chunk in 16
// bytes (of 8 bits: twice), and eight neighbouring numbers of x serve two products, so that x is
// read 16 bytes at a time from the first-level cache. A block has eight warps: p.row_shift says how
// many of them have different rows, the others share the inputs, as do the blocks of a cluster.
// Their sums are added in the order of the inputs, through shared memory. Which inputs are added up
// by whom depends on k and on those numbers alone.
//
// x is not read past the end of a row: there, its last eight numbers meet codes that stand for 0.
#pragma once

#include "common/gemv.cuh"
#include "common/pdl.cuh"
#include "ops/linear/quantised.cuh"

namespace xserv {

constexpr int kChunk = 64;

// kScales: of a chunk and row; kFragments: of 8 tokens; kTiles: of a warp; kBatch: fragments whose
// x is loaded together, while those before are multiplied.
//
// block: of the tiles of rows; token_of: the row of x of token i of the kFragments * 8 from first_token on.
template <typename T, Code kCode, int kScales, int kFragments, int kTiles, int kBatch, int kAhead, typename TokenOf>
__device__ __forceinline__ void quantised_product(const QuantisedParams& p, int block, int first_token,
                                                  const TokenOf& token_of) {
  constexpr int kLoads = kCode == Code::kInt4 ? 1 : 2, kBatches = kFragments / kBatch;
  constexpr int kChunkBytes = kLoads * 512;
  static_assert(kFragments % kBatch == 0 && (kBatches * kAhead) % 2 == 0, "x alternates between two buffers");
  extern __shared__ __align__(16) float4 staging[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
  const int split = split_rank(), num_splits = split_count();
  const int row_warps = 1 << p.row_shift, input_warps = kQuantisedWarps >> p.row_shift;
  const int row_warp = warp & (row_warps - 1), input_warp = warp >> p.row_shift;
  const int part = split * input_warps + input_warp, num_parts = num_splits * input_warps;
  const int begin = part * p.num_chunks / num_parts, end = (part + 1) * p.num_chunks / num_parts;
  const int block_tile = block / num_splits * row_warps * kTiles;

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const int scale_shift = scale_type == ScaleType::kF32 ? 3 : 2;  // log2 of the bytes of a pair
  const bool is_f32 = scale_type == ScaleType::kF32, has_zeros = p.zeros != nullptr;
  const uint64_t policy = weight_policy();
  const char* codes[kTiles];
  int first_groups[kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    // Tiles past the last one are read as the last one, and not stored.
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

  const char* x = static_cast<const char*>(p.x) + static_cast<int64_t>(first_token) * p.k * 2;
  uint32_t token_offsets[kFragments];
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
    token_offsets[j] = token_of(j * 8 + row) * p.k * 2;
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
          zeros[s] = !is_float(kCode) && has_zeros ? shared_half(group + 64 + row * 2) : kMiddle;
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
  finish_quantised<T, kTiles, kFragments>(p, staging, sum, block_tile, first_token);
}

}  // namespace xserv
