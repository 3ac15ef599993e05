// Decode attention for one unit, a sequence and a kv head, from the heads as the projection wrote them
// to the partial results of blocks; ops/attention/fused.cu says what it computes and why in this way.
#pragma once

#include <type_traits>

#include "ops/attention/cache_tile.cuh"
#include "ops/attention/fused.cuh"
#include "ops/attention/fused_combine.cuh"
#include "ops/attention/fused_project.cuh"

namespace xserv {

enum class DecodeForm { kChunked, kCluster, kProjected };

// Stored: what the cache has for a number, T or Fp8.
template <typename T, int kHeadDim, int kWarps, int kSlots, DecodeForm kForm, typename Stored = T>
struct DecodeAttention {
  using Args = FusedArgs;
  using Tile = CacheTile<T, kHeadDim, Stored>;
  using Rows = typename Tile::Rows;
  using Projected = ProjectedHeads<T, kHeadDim, kWarps>;
  static constexpr bool kProjects = kForm == DecodeForm::kProjected;
  static constexpr bool kCluster = kForm != DecodeForm::kChunked;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTileBytes = Tile::kBytes;
  static_assert(kTileKeys == Tile::kKeys && Rows::kAlign <= kSharedAlign);
  static constexpr int kRingBytes = kSlots * kTileBytes;  // for each warp
  static constexpr int kDimSteps = kHeadDim / 16;
  static constexpr int kVectors = kHeadDim / 4;  // float4 in a row of o
  // An index of a float4 is divided by the length of a slice by multiplication: exact, as their
  // product is less.
  static constexpr int kReciprocalBits = 20;
  static_assert(kGroupHeads * kVectors * kGroupHeads * kVectors < 1 << kReciprocalBits);
  // The number of floats from head to head where the warps' results are combined; the 4 keep the stores
  // of a fragment in different banks.
  static constexpr int kPartialStride = kHeadDim + 4;
  static constexpr int kMergeBytes = kWarps * kGroupHeads * (kPartialStride + 2) * 4;
  // Heads in shared memory lie 16 bytes further apart than their length: conflict-free for ldmatrix.
  static constexpr int kRowBytes = kHeadDim * 2 + 16;
  static constexpr int kNewK = kGroupHeads, kNewV = kGroupHeads + 1;
  static constexpr int kRowsAt = kWarps * kRingBytes > kMergeBytes ? kWarps * kRingBytes : kMergeBytes;
  // A slice is rounded up where the blocks of a cluster do not divide the output.
  static constexpr int kMaxSlices = kGroupHeads * kVectors + (kVectors % kMaxBlocks == 0 ? 0 : kMaxBlocks);
  static constexpr int kMaxReceived = kProjects ? 0 : kMaxSlices + kMaxBlocks * kReceivePad;
  static constexpr int kReceiveAt = kRowsAt + (kGroupHeads + 2) * kRowBytes;
  static constexpr int kReceiveStatsAt = kReceiveAt + (kCluster ? kMaxReceived * 16 : 0);
  static constexpr int kBarrierAt = kReceiveStatsAt + (kCluster ? kMaxReceived * 8 : 0);
  static constexpr int kProjectedAt = kBarrierAt + 16;
  static constexpr int kSharedBytes = kProjectedAt + (kProjects ? Projected::kSharedBytes : 0);
  // A warp or half a warp prepares a head: each lane has kPairs neighbouring pairs of the first half
  // and their partners. Lanes that the head has no pairs for do what the last one with pairs does.
  static constexpr int kHeadLanes = kHeadDim > 128 || (kWarps >= 8 && kHeadDim == 128) ? 32 : 16;
  static constexpr int kHeadsAtOnce = kThreads / kHeadLanes;
  static constexpr int kPairs = kHeadDim / 4 > kHeadLanes ? 2 : 1;
  static constexpr int kLastLane = kHeadDim / 4 / kPairs - 1;
  static_assert((kLastLane + 1) * kPairs * 4 == kHeadDim && kLastLane < kHeadLanes);
  using Pairs = Vec<uint32_t, kPairs>;

  __device__ static void run(const Args& p, const OutputProjection& projection = {}) {
    if (p.wait_first) dependency_wait();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t shared = shared_address(fused_shared);

    // The block's unit.
    const int num_groups = (p.heads_per_kv + kGroupHeads - 1) / kGroupHeads;
    const int seq = blockIdx.z;
    // A cluster is a row of the grid, with 1, 2, 4, 8 or 16 blocks.
    const int rank = kCluster ? blockIdx.x : 0, ranks_log2 = kCluster ? 31 - __clz(gridDim.x) : 0;
    const int num_ranks = 1 << ranks_log2;
    const int chunk = kCluster ? 0 : blockIdx.x;
    if (seq >= p.num_seqs) {  // the grid may be larger than the work
      dependency_wait();
      return;
    }
    const int kv_head = num_groups == 1 ? blockIdx.y : blockIdx.y / num_groups;
    const int first_head = (blockIdx.y - kv_head * num_groups) * kGroupHeads;
    const int group_begin = kv_head * p.heads_per_kv + first_head;
    const int num_group_heads = min(kGroupHeads, p.heads_per_kv - first_head);

    // Tiles first_tile, first_tile + tile_stride, ... are this warp's.
    const int* table = p.block_tables + static_cast<long long>(seq) * p.max_blocks_per_seq;
    int first_tile = rank + num_ranks * warp;
    const int tile_stride = num_ranks * kWarps;
    // Lane i has the id of the block of one of 32 tiles of this warp; the place is known before the
    // length.
    const auto load_ids = [&](int i) {
      const int block = (first_tile + (i + lane) * tile_stride) >> 1;
      return block < p.max_blocks_per_seq ? load_here(table + block) : 0;
    };
    // The order of the reads matters: each takes one trip to the L2, but several if it is queued after
    // the keys of all blocks.
    int ids = 0;
    if constexpr (kCluster) ids = load_ids(0);
    const int position = load_here(p.positions + seq);
    const unsigned new_slot = static_cast<unsigned>(load_here(reinterpret_cast<const int*>(p.slots) + seq));
    const int kv_len = min(max(load_here(p.context_lens + seq), 0), p.max_blocks_per_seq * kBlockSize);
    // Keys before this one are hidden by the window, and tiles before its tile are not read.
    const int first_key = window_begin(kv_len, p.window), window_tile = first_key / kTileKeys;
    int num_chunks = 1, end_tile = (kv_len + kTileKeys - 1) / kTileKeys, begin_tile = window_tile + rank;
    if constexpr (!kCluster) {
      // The workspace has room for max_chunks: a sequence longer than the host planned for takes longer
      // chunks.
      const int num_keys = kv_len - window_tile * kTileKeys;
      const int planned = (num_keys + p.max_chunks - 1) / p.max_chunks;
      const int length = planned <= p.chunk_len ? p.chunk_len : (planned + 63) / 64 * 64;
      num_chunks = max(1, (num_keys + length - 1) / length);
      if (chunk >= num_chunks) {
        dependency_wait();
        return;
      }
      begin_tile = window_tile + chunk * (length / kTileKeys);
      end_tile = min(end_tile, begin_tile + length / kTileKeys);
      first_tile = begin_tile + warp;
      ids = load_ids(0);
    } else if (window_tile > 0) {
      first_tile += window_tile;
      ids = load_ids(0);
    }
    const long long first_out = (static_cast<long long>(seq) * p.num_heads + group_begin) * kHeadDim;
    T* const out = static_cast<T*>(p.out) + first_out;
    if (kv_len == 0) {
      dependency_wait();
      if constexpr (kProjects) {
        Projected::write_zeros(projection, kv_head, rank);
      } else if (rank == 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < num_group_heads * kHeadDim; i += kThreads) out[i] = from_float<T>(0.0f);
      }
      return;
    }
    const int num_tiles = max(0, (end_tile - first_tile + tile_stride - 1) / kWarps >> ranks_log2);
    const int num_block_tiles = (end_tile - begin_tile + num_ranks - 1) >> ranks_log2;
    const bool is_long = num_block_tiles > kWarps;
    const int old_len = kv_len - 1;
    const int new_tile = old_len / kTileKeys;

    // The operands of the heads other than qkv.
    const int first_row = threadIdx.x / kHeadLanes;
    const int head_lane = min(static_cast<int>(threadIdx.x) % kHeadLanes, kLastLane);
    const bool is_counted = kLastLane == kHeadLanes - 1 || threadIdx.x % kHeadLanes <= kLastLane;
    const bool has_new = kCluster ? ((new_tile - window_tile) & (num_ranks - 1)) == rank
                                  : new_tile >= begin_tile && new_tile < end_tile;
    const int num_rows = num_group_heads + (has_new ? 2 : 0);  // the query heads, the new key, the new value
    constexpr int kHalf = kHeadDim / 2;
    const bool is_normed = p.q_norm != nullptr;
    const auto load_weight = [&](int row, Pairs& a, Pairs& b) {
      // Without norms heads are multiplied by 1 twice, which changes none of their bits.
      if (!is_normed) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) a[j] = b[j] = pack_pair<T>(1.0f, 1.0f);
        return;
      }
      const void* norm = row < num_group_heads ? p.q_norm : p.k_norm;
      const T* weight = static_cast<const T*>(norm) + head_lane * kPairs * 2;
      a = load_here(reinterpret_cast<const Pairs*>(weight));
      b = load_here(reinterpret_cast<const Pairs*>(weight + kHalf));
    };
    Pairs weight_a, weight_b;
    load_weight(first_row, weight_a, weight_b);
    const bool is_rotated = position >= 0 && position < p.max_position;
    const long long angle =
        static_cast<long long>(is_rotated ? position : 0) * kHalf + head_lane * kPairs * 2;
    Pairs cos = load_here(reinterpret_cast<const Pairs*>(static_cast<const T*>(p.cos) + angle));
    Pairs sin = load_here(reinterpret_cast<const Pairs*>(static_cast<const T*>(p.sin) + angle));

    // The ring holds the keys and the values of 16 tokens alternately; load 2 i is the keys of tile i.
    const uint32_t ring = shared + warp * kRingBytes;
    const int pitch = p.num_kv_heads * kHeadDim;
    int next_ids = num_tiles > 32 ? load_ids(32) : 0;
    int bad_tile = -1;
    const auto load = [&](int i, bool is_value, int slot) {
      const int id = __shfl_sync(kFullWarp, ids, i & 31);
      const bool is_valid = static_cast<unsigned>(id) < static_cast<unsigned>(p.num_blocks);
      if (!is_valid) bad_tile = first_tile + i * tile_stride;
      const int key = (first_tile + i * tile_stride) * kTileKeys;
      const long long token = static_cast<long long>(is_valid ? id : 0) * kBlockSize + key % kBlockSize;
      const Stored* source =
          static_cast<const Stored*>(is_value ? p.v_cache : p.k_cache) + token * pitch + kv_head * kHeadDim;
      const uint32_t target = ring + slot * kTileBytes;
      if constexpr (32 % Rows::kChunks == 0) {
        constexpr int kStep = 32 / Rows::kChunks;  // rows that the warp copies at once
        const int row = lane / Rows::kChunks, column = lane % Rows::kChunks;
        source += row * pitch + column * Tile::kChunkLen;
#pragma unroll
        for (int j = 0; j < kTileKeys / kStep; ++j) {
          cp_async_16(target + Rows::offset(row + j * kStep, column), source, is_valid);
          source += kStep * pitch;
        }
      } else {
        constexpr int kTileChunks = kTileKeys * Rows::kChunks;
#pragma unroll
        for (int begin = 0; begin < kTileChunks; begin += 32) {
          const int index = begin + lane, row = index / Rows::kChunks, column = index % Rows::kChunks;
          if (begin + 32 <= kTileChunks || index < kTileChunks) {
            cp_async_16(target + Rows::offset(row, column), source + row * pitch + column * Tile::kChunkLen, is_valid);
          }
        }
      }
    };
    const auto fill = [&](int begin, int end) {
#pragma unroll 1
      for (int index = begin; index < end; ++index) {
        if (index >> 1 < num_tiles) load(index >> 1, (index & 1) != 0, index);
        cp_async_commit();
      }
    };
    // The query is needed soon but would queue after all loads that are under way: where a warp has
    // several tiles, the cluster form begins with few loads and issues the rest after it has requested
    // the query.
    const int prefill = kCluster ? (is_long ? 1 : 2) * (Tile::kIsFp8 ? 2 : 1) : kSlots;
    fill(0, prefill);

#if __CUDA_ARCH__ >= 900
    if constexpr (kProjects) {
      Projected::load_weight(projection, shared + kProjectedAt, group_begin, p.num_heads, rank);
    }
#endif

    unsigned char* const head_rows = fused_shared + kRowsAt;
    // Heads that the group does not have are multiplied too; their products are not used.
    constexpr int kRowWords = kRowBytes / 4;
#pragma unroll 1
    for (int i = num_group_heads * kRowWords + threadIdx.x; i < kGroupHeads * kRowWords; i += kThreads) {
      reinterpret_cast<uint32_t*>(head_rows)[i] = 0;
    }
#if __CUDA_ARCH__ >= 900
    const uint32_t barrier = shared + kBarrierAt;
    // The output is divided into slices of this many float4, of which the last may be shorter or empty.
    const int slice = (num_group_heads * kVectors + num_ranks - 1) >> ranks_log2;
    const int own_slice = max(0, min(slice, num_group_heads * kVectors - rank * slice));
    const int num_partials = min(num_ranks, end_tile - window_tile);  // the blocks that have keys
    int reciprocal = (1 << kReciprocalBits) / slice + 1;
    asm volatile("" : "+r"(reciprocal));  // computed here, as time counts at its use
    if constexpr (kCluster) {
      if (num_ranks > 1) {
        if (threadIdx.x == 0) {
          mbarrier_init(barrier, 1);
          mbarrier_init_fence();
        }
        __syncwarp();
        if (threadIdx.x == 0) {
          const int bytes = kProjects ? Projected::kPartialBytes : own_slice * 24;
          mbarrier_arrive_expect(barrier, num_partials * bytes);
        }
        __syncwarp();
        cluster_arrive_relaxed();
      }
    }
#endif

    const auto head_source = [&](int row) {
      const int key_head = p.num_heads + kv_head;
      const int head = row < num_group_heads    ? group_begin + row
                       : row == num_group_heads ? key_head
                                                : key_head + p.num_kv_heads;
      return static_cast<const T*>(p.qkv) + head_lane * kPairs * 2 +
             (static_cast<long long>(seq) * (p.num_heads + 2 * p.num_kv_heads) + head) * kHeadDim;
    };
    const T* source = head_source(first_row);
    asm volatile("" : "+l"(source));

    dependency_wait();
    // The loads of the next kernel's weights compete with what this kernel still has to read: where
    // that is much, the next kernel is let in later.
    if (!is_long) dependency_launch();
    if (!is_rotated) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        cos[j] = pack_pair<T>(1.0f, 1.0f);
        sin[j] = 0;
      }
    }
    // The condition is uniform over the block, so all lanes take part in the sums.
#pragma unroll 1
    for (int begin = 0; begin < num_rows; begin += kHeadsAtOnce) {
      const int row = begin + first_row;
      const bool is_active = row < num_rows, is_value = row == num_group_heads + 1;
      Pairs a = {}, b = {};
      if (is_active) {
        a = load_here(reinterpret_cast<const Pairs*>(source));
        b = load_here(reinterpret_cast<const Pairs*>(source + kHalf));
      }
      if (begin == 0) fill(prefill, kSlots);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float2 left = unpack_pair<T>(a[j]), right = unpack_pair<T>(b[j]);
        sum += left.x * left.x + left.y * left.y + right.x * right.x + right.y * right.y;
      }
      if (!is_counted) sum = 0.0f;
#pragma unroll
      for (int offset = kHeadLanes / 2; offset > 0; offset >>= 1) {
        sum += __shfl_xor_sync(kFullWarp, sum, offset);
      }
      const float rstd = is_normed ? rsqrtf(sum / kHeadDim + p.eps) : 1.0f;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const auto normalize = [&](uint32_t pair, uint32_t weight_pair) {
          const float2 x = unpack_pair<T>(pair), weight = unpack_pair<T>(weight_pair);
          const float2 scaled = round_pair<T>(x.x * rstd, x.y * rstd);
          return round_pair<T>(scaled.x * weight.x, scaled.y * weight.y);
        };
        const float2 left = normalize(a[j], weight_a[j]), right = normalize(b[j], weight_b[j]);
        const float2 c = unpack_pair<T>(cos[j]), s = unpack_pair<T>(sin[j]);
        const float2 left_cos = round_pair<T>(left.x * c.x, left.y * c.y);
        const float2 left_sin = round_pair<T>(left.x * s.x, left.y * s.y);
        const float2 right_cos = round_pair<T>(right.x * c.x, right.y * c.y);
        const float2 right_sin = round_pair<T>(right.x * s.x, right.y * s.y);
        const uint32_t rotated_left = pack_pair<T>(left_cos.x - right_sin.x, left_cos.y - right_sin.y);
        const uint32_t rotated_right = pack_pair<T>(right_cos.x + left_sin.x, right_cos.y + left_sin.y);
        a[j] = is_value ? a[j] : rotated_left;
        b[j] = is_value ? b[j] : rotated_right;
      }
      if (is_active) {
        const int place = row < num_group_heads ? row : is_value ? kNewV : kNewK;
        unsigned char* const head_row = head_rows + place * kRowBytes;
        if (Tile::kIsFp8 && row >= num_group_heads) {  // as the cache has them
#pragma unroll
          for (int j = 0; j < kPairs; ++j) {
            const float2 left = unpack_pair<T>(a[j]), right = unpack_pair<T>(b[j]);
            uint16_t* target = reinterpret_cast<uint16_t*>(head_row + head_lane * (kPairs * 2)) + j;
            target[0] = static_cast<uint16_t>(e4m3_pair(left.x, left.y));
            target[kHalf / 2] = static_cast<uint16_t>(e4m3_pair(right.x, right.y));
          }
        } else {
          *reinterpret_cast<Pairs*>(head_row + head_lane * (kPairs * 4)) = a;
          *reinterpret_cast<Pairs*>(head_row + head_lane * (kPairs * 4) + kHalf * 2) = b;
        }
      }
      if (begin + kHeadsAtOnce < num_rows) {
        load_weight(row + kHeadsAtOnce, weight_a, weight_b);
        source = head_source(row + kHeadsAtOnce);
      }
    }
    __syncthreads();
    if (is_long) dependency_launch();

    // Q^T as B: head lane / 4, dims 2 (lane % 4) + {0, 1, 8, 9} of every 16, or those that the tile wants.
    uint32_t q[kDimSteps][2];
#pragma unroll
    for (int step = 0; step < kDimSteps; step += 2) {
      if constexpr (Tile::kIsFp8) {
        const unsigned char* dims = head_rows + (lane >> 2) * kRowBytes + step * 32 + (lane & 3) * 8;
        Tile::order_query(*reinterpret_cast<const uint2*>(dims), q[step]);
        if (step + 1 < kDimSteps) Tile::order_query(*reinterpret_cast<const uint2*>(dims + 32), q[step + 1]);
      } else {
        uint32_t r[4];
        ldmatrix_x4(r, shared + kRowsAt + (lane & 7) * kRowBytes + step * 32 + (lane >> 3) * 16);
        q[step][0] = r[0];
        q[step][1] = r[1];
        if (step + 1 < kDimSteps) {  // what was read past the last dims is another row's or padding
          q[step + 1][0] = r[2];
          q[step + 1][1] = r[3];
        }
      }
    }

    const uint32_t k_offset = Tile::key_offset(lane), v_offset = Tile::value_offset(lane);
    const float scale = p.scale * kLog2E;
    // The values of heads 2 (lane % 4) + {0, 1}; sums are per lane until the end.
    float maximum[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
    float o[kDimSteps][4];
#pragma unroll
    for (int i = 0; i < kDimSteps; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    // The new key or value takes its place in the tile, and zeros take the places after it, because the
    // cache may not hold numbers there.
    const auto insert_new = [&](uint32_t tile_base, int source_row) {
#pragma unroll 1
      for (int i = old_len % kTileKeys * Rows::kChunks + lane; i < kTileKeys * Rows::kChunks; i += 32) {
        const int row = i / Rows::kChunks, column = i % Rows::kChunks;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (row == old_len % kTileKeys) {
          value = *reinterpret_cast<const uint4*>(head_rows + source_row * kRowBytes + column * 16);
        }
        const uint32_t target = tile_base - shared + Rows::offset(row, column);
        *reinterpret_cast<uint4*>(fused_shared + target) = value;
      }
      __syncwarp();
    };

    int slot = 0;
    const auto load_next = [&](int i, auto is_value) {
      __syncwarp();  // all lanes have read the slot that is loaded next
      if (!decltype(is_value)::value && (i & 31) == 0) {
        ids = next_ids;
        next_ids = i + 32 < num_tiles ? load_ids(i + 32) : 0;
      }
      if (i < num_tiles) load(i, decltype(is_value)::value, slot);
      cp_async_commit();
      slot = slot + 1 == kSlots ? 0 : slot + 1;
    };
    // The load that comes kSlots loads after the keys and the values of tile i.
    using AfterKey = std::integral_constant<bool, kSlots % 2 == 1>;
    using AfterValue = std::integral_constant<bool, kSlots % 2 == 0>;
#pragma unroll 1
    for (int i = 0; i < num_tiles; ++i) {
      const int tile = first_tile + i * tile_stride;
      cp_async_wait<kSlots - 1>();
      __syncwarp();
      const uint32_t k_base = ring + slot * kTileBytes;
      if (tile == new_tile) insert_new(k_base, kNewK);
      // There are several sums, so that a product need not wait for the one before.
      constexpr int kSums = 4;
      float s[kSums][4] = {};
      Tile::add_scores(s, k_base, k_offset, q);
      load_next(i + kSlots / 2, AfterKey());
      // Whether a key is before the end and not before the window is one comparison.
      const unsigned key = tile * kTileKeys - first_key + (lane >> 2);
      const unsigned num_seen = kv_len - first_key;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float product = (s[0][c] + s[1][c]) + (s[2][c] + s[3][c]);
        s[0][c] = key + (c >> 1) * 8 < num_seen ? product * scale : kMinusInfinity;
      }
      float shift[2], rescale[2];
      bool has_grown = false;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float column_max = fmaxf(maximum[c], fmaxf(s[0][c], s[0][c + 2]));
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
          column_max = fmaxf(column_max, __shfl_xor_sync(kFullWarp, column_max, offset));
        }
        shift[c] = column_max == kMinusInfinity ? 0.0f : column_max;
        rescale[c] = exp2_approx(maximum[c] - shift[c]);
        has_grown = has_grown || column_max != maximum[c];
        maximum[c] = column_max;
      }
      if (i > 0 && __any_sync(kFullWarp, has_grown)) {
        sum[0] *= rescale[0];
        sum[1] *= rescale[1];
#pragma unroll
        for (int d = 0; d < kDimSteps; ++d) {
          o[d][0] *= rescale[0];
          o[d][1] *= rescale[1];
          o[d][2] *= rescale[0];
          o[d][3] *= rescale[1];
        }
      }
      const float e0 = exp2_approx(s[0][0] - shift[0]), e1 = exp2_approx(s[0][1] - shift[1]);
      const float e2 = exp2_approx(s[0][2] - shift[0]), e3 = exp2_approx(s[0][3] - shift[1]);
      sum[0] += e0 + e2;
      sum[1] += e1 + e3;
      const uint32_t b0 = movmatrix_8x8(pack_pair<typename Tile::Math>(e0, e1)), b1 = movmatrix_8x8(pack_pair<typename Tile::Math>(e2, e3));
      cp_async_wait<kSlots - 1>();
      __syncwarp();
      const uint32_t v_base = ring + slot * kTileBytes;
      if (tile == new_tile) insert_new(v_base, kNewV);
      Tile::add_values(o, v_base, v_offset, b0, b1);
      load_next(i + (kSlots + 1) / 2, AfterValue());
    }
    cp_async_wait<0>();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) sum[c] += __shfl_xor_sync(kFullWarp, sum[c], offset);
    }

    // The warps that had keys combine their results in the ring: warps 0 .. num_active - 1.
    const int num_active = max(0, min(kWarps, num_block_tiles));
    float* partial = reinterpret_cast<float*>(fused_shared);
    float2* stats = reinterpret_cast<float2*>(partial + kWarps * kGroupHeads * kPartialStride);
    __syncthreads();
    const int head = (lane & 3) * 2;
    if (warp < num_active && head < num_group_heads) {
      Tile::store_sums(o, partial + (warp * kGroupHeads + head) * kPartialStride, kPartialStride, lane);
      if (lane < 4) {
        stats[warp * kGroupHeads + head] = make_float2(maximum[0], sum[0]);
        stats[warp * kGroupHeads + head + 1] = make_float2(maximum[1], sum[1]);
      }
    }
    __syncthreads();

#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      if (num_ranks > 1) cluster_wait();  // the barriers of the other blocks are ready
    }
#endif

    // The block's (m, l, o) goes to the output, to the block of the cluster that combines it, or to the
    // workspace.
    if (num_active > 0) {
      // Values that go to all blocks are computed by several threads, each of which sends them to some
      // blocks.
      const int first_index = kProjects ? threadIdx.x % Projected::kVectors : threadIdx.x;
#pragma unroll 1
      for (int index = first_index; index < num_group_heads * kVectors; index += kThreads) {
        const int out_head = index / kVectors, column = index % kVectors * 4;
        float2 stat[kWarps];
        float m = kMinusInfinity;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          stat[w] = w < num_active ? stats[w * kGroupHeads + out_head] : make_float2(kMinusInfinity, 0.0f);
          m = fmaxf(m, stat[w].x);
        }
        const float shift = m == kMinusInfinity ? 0.0f : m;
        float l = 0.0f;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float weight = exp2_approx(stat[w].x - shift);
          float4 part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (w < num_active) {
            const float* row = partial + (w * kGroupHeads + out_head) * kPartialStride;
            part = *reinterpret_cast<const float4*>(row + column);
          }
          l += weight * stat[w].y;
          total.x += weight * part.x;
          total.y += weight * part.y;
          total.z += weight * part.z;
          total.w += weight * part.w;
        }
        if constexpr (kProjects) {
#if __CUDA_ARCH__ >= 900
          Projected::send(shared + kProjectedAt, barrier, rank, index, total, m, l);
#endif
        } else if (kCluster ? num_ranks == 1 : num_chunks == 1) {
          store_out(out + index * 4, total, l);
        } else if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
          const int owner = index * reciprocal >> kReciprocalBits;  // index / slice
          const int place = rank * (slice + kReceivePad) + index - owner * slice;
          const uint32_t remote = cluster_address(shared, owner);
          cluster_store_async(remote + kReceiveAt + place * 16, remote + kBarrierAt, total);
          cluster_store_async(remote + kReceiveStatsAt + place * 8, remote + kBarrierAt, make_float2(m, l));
#endif
        } else {
          const long long row = static_cast<long long>(seq) * p.num_heads + group_begin + out_head;
          const long long at = row * p.max_chunks + chunk;
          *reinterpret_cast<float4*>(p.partial_out + at * kHeadDim + column) = total;
          if (column == 0) *reinterpret_cast<float2*>(p.partial_stats + at * 2) = make_float2(m, l);
        }
      }
    }

    // The new key and value are written to the cache only now, so that no other work waits for this.
    bool is_slot_bad = false;
    if (has_new && first_head == 0) {
      is_slot_bad = new_slot >= static_cast<unsigned>(p.num_blocks) * kBlockSize;
      if (!is_slot_bad && threadIdx.x < 2 * Rows::kChunks) {
        const int is_v = threadIdx.x / Rows::kChunks, column = threadIdx.x % Rows::kChunks;
        Stored* cache = static_cast<Stored*>(is_v ? p.v_cache : p.k_cache) +
                        static_cast<long long>(new_slot) * pitch + kv_head * kHeadDim + column * Tile::kChunkLen;
        *reinterpret_cast<uint4*>(cache) =
            *reinterpret_cast<const uint4*>(head_rows + (kNewK + is_v) * kRowBytes + column * 16);
      }
    }
    const bool is_first = threadIdx.x == 0 && blockIdx.y == 0;
    const bool is_position_bad = !is_rotated && is_first && rank == 0 && chunk == 0;
    is_slot_bad = is_slot_bad && is_first;
    if ((bad_tile >= 0 && lane == 0) || is_position_bad || is_slot_bad) {
      long long index = seq, value = is_position_bad ? position : new_slot;
      if (!is_position_bad && !is_slot_bad) {
        index = static_cast<long long>(seq) * p.max_blocks_per_seq + (bad_tile >> 1);
        value = p.block_tables[index];
      }
      report_fault(p.fault, is_position_bad ? kFaultPosition : kFaultBlock, index, value);
    }
    if constexpr (kProjects) {
#if __CUDA_ARCH__ >= 900
      Projected::finish(projection, kProjectedAt, barrier, num_partials, kv_head, rank);
#endif
    } else if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
      if (num_ranks == 1) return;
      combine_slice<T, kThreads>(out, kReceiveAt, kReceiveStatsAt, barrier, slice, own_slice, num_partials, rank);
#endif
    } else {
      if (num_chunks > 1) {
        combine_chunks<T, kHeadDim, kThreads>(p, out, seq, group_begin, num_group_heads, num_chunks);
      }
    }
  }
};

}  // namespace xserv
