// The kernel of prefill.cu, for operands of 16 bits and for integers of 8 bits (prefill_int8.cu). sm_90a only.
//
// A block computes tiles of tokens by rows of weight: two warps copy stages of 128 bytes along k into a
// ring, and groups of four warps multiply them, each group with 64 tokens, all rows of the tile and the
// sums in registers. Gate and up alternate in the tile every eight columns, so that a thread has both. The
// ring runs on across the tiles of a block; under programmatic launch the first stages of weight are
// fetched while the kernel before is still running, unless it makes them. Results go through shared memory,
// 16 rows of a warp at a time, so that whole lines are written and no warp waits for another.
//
// The L2 cache limits such tiles, not the tensor cores (128 x 128 needs 64 bytes per clock and SM,
// where about 40 can be had). So blocks come in pairs with the same rows of weight and different tokens
// (m) or the other way round (n); each fetches one half of what they share for both.
//
// Where too few tiles would leave most of the chip idle, k is divided among the pairs of a cluster
// (s2). Each block finishes its part of the sums of a tile: the others send theirs through distributed
// shared memory, and they are added in the order of k. With narrow weights 64 blocks are as fast as 128
// at 512 tokens: they begin while the preceding kernel is still at work, and leave room for the next
// one.
//
// The products are added in the order of k: a token's result does not depend on the other tokens, nor
// on the tile where k is not divided.
#pragma once

#include <type_traits>

#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "ops/linear/prefill_rows.cuh"
#include "common/tma.cuh"
#include "common/tma_cluster.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"

namespace xserv {

constexpr int kBox = 64;  // rows of a box, which has 128 bytes of each, the widest swizzle
constexpr uint32_t kBoxBytes = kBox * 128;

// Operands of T, both in rows of k. Gate and up alternate because the tensor map does that.
template <typename T>
struct Numbers {
  using Sum = float;
  static constexpr int kElements = 64;  // of 128 bytes
  static constexpr bool kHasMixedRows = false;
  static constexpr bool kIsMade = false;  // whether the kernel before writes the weight

  template <int kRows>
  __device__ __forceinline__ static void multiply(float (&sum)[kRows / 2], uint64_t a, uint64_t b, int accumulate) {
    wgmma_along_k<T, kRows>(sum, a, b, accumulate);
  }
};

// The shape of a kernel: a block computes kGroups * 64 tokens by kRows of weight. A cluster has kClusterM
// blocks with the same rows of weight and kClusterN with the same tokens, for each of kSplits parts of k.
template <int kGroups_, int kRows_, int kStages_, int kClusterM_, int kClusterN_, int kSplits_ = 1>
struct Shape {
  static constexpr int kGroups = kGroups_, kRows = kRows_, kStages = kStages_;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kSplits = kSplits_;
  static constexpr int kSharers = kClusterM * kClusterN, kBlocks = kSharers * kSplits;
  static constexpr int kTokens = kGroups * 64, kWarps = kGroups * 4;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr bool kMovesRegisters = kGroups == 2;
  // The rows of a box are such that each sharer has one box to copy.
  static constexpr int kWeightBox = kRows / kClusterM < 64 ? kRows / kClusterM : 64;
  static constexpr int kTokenBox = kTokens / kClusterN < 64 ? kTokens / kClusterN : 64;
  static constexpr uint32_t kTokenBytes = kTokens * 128, kStageBytes = kTokenBytes + kRows * 128;
  // With a split, each block finishes the sums of 64 tokens by kOwnRows.
  static constexpr int kParts = kSplits > kGroups ? kSplits / kGroups : 1, kOwnRows = kRows / kParts;
  static constexpr uint32_t kSourceBytes = kSplits > 1 ? 64 * kOwnRows * 4 : 0;
  static constexpr uint32_t kReceived = kStages * kStageBytes;
  static constexpr uint32_t kStaging = kReceived + (kSplits - 1) * kSourceBytes;
  static constexpr uint32_t kBarriers = kStaging + kWarps * kStagingBytes;
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 16 + 8;
  static_assert(kSplits == 1 || kSplits % kGroups == 0);
  static_assert(kBlocks > 1 && kSharedBytes <= 227 * 1024);
};

// M(..., name, parameters) for each shape that serves all weights.
#define XSERV_WIDE_SHAPES(M, ...)             \
  M(__VA_ARGS__, 128x256_m, 2, 256, 4, 2, 1) \
  M(__VA_ARGS__, 128x256_n, 2, 256, 4, 1, 2) \
  M(__VA_ARGS__, 128x192_m, 2, 192, 5, 2, 1) \
  M(__VA_ARGS__, 128x192_n, 2, 192, 5, 1, 2) \
  M(__VA_ARGS__, 128x128_m, 2, 128, 6, 2, 1) \
  M(__VA_ARGS__, 128x128_n, 2, 128, 6, 1, 2)

__device__ __forceinline__ void hold(float& v) { asm volatile("" : "+f"(v)::"memory"); }
__device__ __forceinline__ void hold(int& v) { asm volatile("" : "+r"(v)::"memory"); }

__device__ __forceinline__ float4 load_sums(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// `others`: the parameters of the epilogue or of the operands.
template <typename T, Epilogue kEpilogue, typename S, typename Operands = Numbers<T>, typename Others = PrefillParams>
__device__ __forceinline__ void prefill(const PrefillParams& p, const Others& others) {
  constexpr int kRows = S::kRows, kStages = S::kStages, kWarps = S::kWarps;
  constexpr int kPerColumn = kEpilogue == Epilogue::kSwiglu ? 2 : 1;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), staging = ring + S::kStaging;
  const uint32_t full = ring + S::kBarriers, empty = full + kStages * 8, summed = empty + kStages * 8;

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank();
  const int split = rank / S::kSharers, sharer = rank % S::kSharers, first_sharer = split * S::kSharers;
  const int of_m = sharer / S::kClusterN, of_n = sharer % S::kClusterN;
  const int first_tile = blockIdx.x / S::kBlocks, tile_step = gridDim.x / S::kBlocks;
  constexpr int kClusterTokens = S::kTokens * S::kClusterM, kClusterRows = kRows * S::kClusterN;
  const int tiles_m = (p.num_tokens + kClusterTokens - 1) / kClusterTokens;
  const int tiles_n = (p.n * kPerColumn + kClusterRows - 1) / kClusterRows;
  const int num_tiles = tiles_m * tiles_n, all_chunks = (p.k + Operands::kElements - 1) / Operands::kElements;
  const int chunk_begin = split * all_chunks / S::kSplits;
  const int num_chunks = (split + 1) * all_chunks / S::kSplits - chunk_begin;
  // Tiles run down groups of 1024 tokens, so that the blocks that run together share tokens and weights
  // in L2.
  constexpr int kRaster = 1024 / kClusterTokens;
  const auto place = [&](int tile, int& token, int& row) {
    const int group = tile / (kRaster * tiles_n), in_group = tile - group * kRaster * tiles_n;
    const int height = min(tiles_m - group * kRaster, kRaster), column = in_group / height;
    token = (group * kRaster + in_group - column * height) * kClusterTokens + of_m * S::kTokens;
    row = column * kClusterRows + of_n * kRows;
  };

  if (threadIdx.x == kWarps * 32) {
    tensor_map_prefetch(&p.weight);
    tensor_map_prefetch(&p.x);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
      mbarrier_init(full + slot * 8, 2);
      mbarrier_init(empty + slot * 8, (S::kClusterM + S::kClusterN - 1) * kWarps);
    }
    if constexpr (S::kSplits > 1) mbarrier_init(summed, 1);
    mbarrier_init_fence();
    if constexpr (S::kSplits > 1) mbarrier_arrive_expect(summed, (S::kSplits - 1) * S::kSourceBytes);
  }
  // The other blocks must have initialised their barriers before bytes for them arrive.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();

  if (warp >= kWarps) {
    // There are 65536 registers for 384 threads, and the sums need more than their share.
    if constexpr (S::kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int my_tiles = first_tile < num_tiles ? (num_tiles - first_tile + tile_step - 1) / tile_step : 0;
    const int total = my_tiles * num_chunks;
    const uint64_t policy = l2_evict_normal();
    struct Cursor {
      int tile, chunk, slot, token, row;
      // The number of boxes of a stage that have anything in them. The others are left out, because the
      // engine takes more than twice as long to fill a box with zeros. The stale bytes there go into
      // results that are not written.
      int weight_boxes, token_boxes;
    };
    const auto find = [&](Cursor& c) {
      const auto count = [](int left, int box, int most) { return min(max((left + box - 1) / box, 0), most); };
      place(c.tile, c.token, c.row);
      c.weight_boxes = count(p.n * kPerColumn - c.row, S::kWeightBox, kRows / S::kWeightBox);
      c.token_boxes = count(p.num_tokens - c.token, S::kTokenBox, S::kTokens / S::kTokenBox);
    };
    const auto advance = [&](Cursor& c) {
      if (++c.slot == kStages) c.slot = 0;
      if (++c.chunk == num_chunks) {
        c.chunk = 0;
        c.tile += tile_step;
        find(c);
      }
    };
    // The blocks of the cluster with the same rows of weight, and those with the same tokens.
    uint16_t same_rows = 0, same_tokens = 0;
#pragma unroll
    for (int i = 0; i < S::kClusterM; ++i) same_rows |= 1 << (first_sharer + i * S::kClusterN + of_n);
#pragma unroll
    for (int i = 0; i < S::kClusterN; ++i) same_tokens |= 1 << (first_sharer + of_m * S::kClusterN + i);
    const auto load_weights = [&](const Cursor& c) {
      const uint32_t barrier = full + c.slot * 8, target = ring + c.slot * S::kStageBytes + S::kTokenBytes;
      const int column = (chunk_begin + c.chunk) * Operands::kElements;
      mbarrier_arrive_expect(barrier, c.weight_boxes * (S::kWeightBox * 128));
#pragma unroll
      for (int box = 0; box < kRows / S::kWeightBox; ++box) {
        if (box % S::kClusterM != of_m || box >= c.weight_boxes) continue;
        const int row = c.row + box * S::kWeightBox;
        const uint32_t place = target + box * S::kWeightBox * 128;
        if constexpr (kEpilogue == Epilogue::kSwiglu && !Operands::kHasMixedRows) {
          if constexpr (S::kClusterM > 1) {
            tma_multicast_4d(place, &p.weight, barrier, column, 0, 0, row / 16, same_rows, policy);
          } else {
            tma_load_4d(place, &p.weight, barrier, column, 0, 0, row / 16, policy);
          }
        } else if constexpr (S::kClusterM > 1) {
          tma_multicast_2d(place, &p.weight, barrier, column, row, same_rows, policy);
        } else {
          tma_load_2d(place, &p.weight, barrier, column, row, policy);
        }
      }
    };
    const auto load_tokens = [&](const Cursor& c) {
      const uint32_t barrier = full + c.slot * 8, target = ring + c.slot * S::kStageBytes;
      const int column = (chunk_begin + c.chunk) * Operands::kElements;
      mbarrier_arrive_expect(barrier, c.token_boxes * (S::kTokenBox * 128));
#pragma unroll
      for (int box = 0; box < S::kTokens / S::kTokenBox; ++box) {
        if (box % S::kClusterN != of_n || box >= c.token_boxes) continue;
        const int token = c.token + box * S::kTokenBox;
        const uint32_t place = target + box * S::kTokenBox * 128;
        if constexpr (S::kClusterN > 1) {
          tma_multicast_2d(place, &p.x, barrier, column, token, same_tokens, policy);
        } else {
          tma_load_2d(place, &p.x, barrier, column, token, policy);
        }
      }
    };
    // One thread copies weights and one copies tokens: with small tiles the others would wait for a
    // single thread.
    const bool has_weights = warp == kWarps;
    if (lane == 0 && warp < kWarps + 2) {
      Cursor c{first_tile, 0, 0, 0, 0, 0, 0};
      find(c);
      if (!has_weights || Operands::kIsMade) dependency_wait();
      uint32_t parity = 1;  // of slots that were never filled
      for (int i = 0; i < total; ++i, advance(c)) {
        mbarrier_wait(empty + c.slot * 8, parity);
        if (c.slot == kStages - 1) parity ^= 1;
        if (has_weights) {
          load_weights(c);
          if (i == min(kStages, total) - 1) dependency_launch();
        } else {
          load_tokens(c);
        }
      }
    }
  } else {
    if constexpr (S::kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    auto head_writer = [&] {
      if constexpr (kEpilogue == Epilogue::kHeads) {
        return HeadWriter<T>(others);
      } else {
        return 0;
      }
    }();
    const auto load_heads = [&](int tile) {
      if constexpr (kEpilogue == Epilogue::kHeads) {
        int token, row;
        place(tile, token, row);
        head_writer.load(token + warp * 16, row / 128);
      }
    };
    if (first_tile < num_tiles) load_heads(first_tile);
    dependency_wait();
    // Start, (unused), distance of eight lines, swizzle of 128 bytes.
    constexpr uint64_t kFixed = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    const auto release = [&](int slot) {
      if (lane < S::kClusterM + S::kClusterN - 1) {
        // First the blocks in the same column of the cluster, then the others of its row.
        const int other = lane - S::kClusterM, column = other + (other >= of_n);
        const int to = lane < S::kClusterM ? lane * S::kClusterN + of_n : of_m * S::kClusterN + column;
        cluster_barrier_arrive(cluster_address(empty + slot * 8, first_sharer + to));
      }
    };
    int slot = 0;
    uint32_t parity = 0;
    typename Operands::Sum sum[kRows / 2];
    for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
      int token, row;
      place(tile, token, row);
      const uint32_t my_staging = staging + warp * kStagingBytes;
      if (token + warp / 4 * 64 >= p.num_tokens || row >= p.n * kPerColumn) {
        // There is nothing to compute, but the others of the cluster wait for the slots.
        for (int chunk = 0; chunk < num_chunks; ++chunk) {
          mbarrier_wait(full + slot * 8, parity);
          release(slot);
          if (++slot == kStages) slot = 0, parity ^= 1;
        }
        if (S::kSplits > 1) break;
        continue;
      }
      int previous = -1;
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        mbarrier_wait(full + slot * 8, parity);
        const uint32_t tokens = ring + slot * S::kStageBytes + warp / 4 * kBoxBytes;
        const uint64_t a = (tokens & 0x3ffff) >> 4 | kFixed;
        const uint64_t b = ((ring + slot * S::kStageBytes + S::kTokenBytes) & 0x3ffff) >> 4 | kFixed;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Operands::template multiply<kRows>(sum, a + step * 2, b + step * 2, chunk > 0 || step > 0);
        }
        wgmma_commit();
        if (previous >= 0) {
          wgmma_wait<1>();
          release(previous);
        }
        previous = slot;
        if (++slot == kStages) slot = 0, parity ^= 1;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) hold(sum[i]);  // not before the wait
      release(previous);
      if constexpr (kEpilogue == Epilogue::kHeads) {
        head_writer.write(my_staging, sum, row / 128);
        if (tile + tile_step < num_tiles) load_heads(tile + tile_step);
      } else if constexpr (S::kSplits == 1) {
        using Writer = RowWriter<T, kEpilogue, kRows>;
        const Writer writer(p, my_staging, token + warp * 16, row / kPerColumn);
#pragma unroll
        for (int round = 0; round < Writer::kRounds; ++round) {
          constexpr int kSums = kRows / 2 / Writer::kRounds;
          if constexpr (std::is_same_v<typename Operands::Sum, float>) {
            Writer::stage(my_staging, sum + round * kSums);
          } else {
            float scaled[kSums];
            const int first_row = row + round * kSums * 2;
            Operands::template scale<kSums>(others, sum + round * kSums, token + warp * 16, first_row, scaled);
            Writer::stage(my_staging, scaled);
          }
          writer.store(round);
        }
      } else {
        // Part i of the sums of a tile, 64 tokens by kOwnRows, belongs to the block with part i of k.
        constexpr int kOwnSums = S::kOwnRows / 2;
        using Writer = RowWriter<T, kEpilogue, S::kOwnRows>;
        const uint32_t mine = ring + S::kReceived + (threadIdx.x & 127) * 16;
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          const int owner = warp / 4 * S::kParts + part;
          float* own = sum + part * kOwnSums;
          if (owner != split) {
            const int place = split - (split > owner);
            const int block = owner * S::kSharers + sharer;
            const uint32_t target = cluster_address(mine + place * S::kSourceBytes, block);
            const uint32_t barrier = cluster_address(summed, block);
#pragma unroll
            for (int i = 0; i < kOwnSums / 4; ++i) {
              const float* v = own + i * 4;
              cluster_store_async(target + i * 2048, barrier, make_float4(v[0], v[1], v[2], v[3]));
            }
          }
        }
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          if (warp / 4 * S::kParts + part != split) continue;
          float* own = sum + part * kOwnSums;
          mbarrier_wait(summed, 0);
#pragma unroll
          for (int i = 0; i < kOwnSums / 4; ++i) {
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int source = 0; source < S::kSplits; ++source) {
              float4 v = make_float4(own[i * 4], own[i * 4 + 1], own[i * 4 + 2], own[i * 4 + 3]);
              const int place = source - (source > split);
              if (source != split) v = load_sums(mine + place * S::kSourceBytes + i * 2048);
              total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
            own[i * 4] = total.x, own[i * 4 + 1] = total.y, own[i * 4 + 2] = total.z, own[i * 4 + 3] = total.w;
          }
          const Writer writer(p, my_staging, token + warp * 16, (row + part * S::kOwnRows) / kPerColumn);
#pragma unroll
          for (int round = 0; round < Writer::kRounds; ++round) {
            Writer::stage(my_staging, own + round * (kOwnSums / Writer::kRounds));
            writer.store(round);
          }
        }
        break;  // the others have no place for the sums of another tile
      }
    }
  }
  // A block may not end while the others arrive at its barriers.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}

}  // namespace xserv
