// Prefill attention on Hopper: softmax(scale * Q K^T + mask) V, with D = head_dim 64 or 128.
//
//   q, out: [batch, q_len, num_heads, D] by strides, or packed [num_tokens, num_heads, D] by
//           cu_seqlens_q [num_seqs + 1]
//   k, v:   as tensor maps, [batch, kv_len, num_kv_heads, D], or packed [1, num_tokens, num_kv_heads, D]
//           by cu_seqlens_k [num_seqs + 1], or a cache [num_blocks, 32, num_kv_heads, D] through
//           block_tables [num_seqs, max_blocks_per_seq] with context_lens [num_seqs]
// Head h reads kv head h / (num_heads / num_kv_heads). The queries are the last q_len tokens of a
// sequence: causal, query i sees keys 0 .. context_len - q_len + i, in the form with a window of these
// the last p.window. A query that sees no key becomes zeros; a block id outside the cache reads as zero
// keys and is reported. Products of f16 or bf16, sums and softmax in f32; the weights are rounded to T
// before the second product, as in flash.cu, which has the equations.
//
// The scheme is that of Shah et al. 2024 (FlashAttention-3), sections 3.1 and 3.2. A block is a
// producer group of four warps and kGroups groups of consumers, each with 64 queries of the same head.
// One producer warp chooses the items and copies tiles of 128 keys with the copy engine, as boxes of
// 32 keys and 64 dims; the other three copy the queries of the next item. The scores of a
// tile are queued before the product of the preceding tile with V, so that the softmax of one tile runs
// under the product of the other, and two groups take turns in queueing (named barriers): while one
// computes exponentials, the tensor cores belong to the other. Tiles run from the last key to the
// first, so that masks come first and the loop needs no last step of its own. The maximum in use is
// raised only by more than 2^8, which saves nearly every rescaling of the output.
//
// The grid is persistent, so that an item's first copies run under the item before. Items are (tile of
// queries, sequence, head), with the tiles of each sequence from its end: those with most keys first.
// Blocks take the next item from a counter. Which block computes an item does not change its result,
// nor do kGroups or the other sequences: a row's tiles of keys and their order are always the same.
//
// With one query a sequence, the query heads of a kv head can be the rows of an item (packed_heads),
// because they share their keys. A row's result is the same to the bit.
//
// The form with segments takes the keys of a row in segments of 1024, from the last to the first, each
// with a maximum and sums of its own, and merges the (m, l, o) so far with each further segment:
//   m' = max(m, m_s);   l' = 2^(m - m') l + 2^(m_s - m') l_s;   o' likewise
// A block that computes several segments keeps o in a part of device memory of its own between them.
// With one query a sequence the segments can be items, whose (m, l, o) a second kernel merges in the
// same order: the bits are the same, but few sequences with long contexts fill the device.
//
// The form with a window is compiled by itself, because each branch in the loops below changes how ptxas
// orders the products of all others. An item ends with the tile in which the window of its first query
// begins. Rows that do not see a tile which others need keep their results to the bit.
//
// H200, bf16, causal, TFLOP/s, 32 heads over 8 of 128: 560 to 630 at 8192 tokens, 490 at 2048, 175 at
// 512 (cuDNN 550, 410, 152 in the same runs); of 64: 425, 335, 110 (cuDNN 415, 295, 101). Without the
// turns it is 1 to 5 % slower, with the exact maximum 2 %. Two things were tried without gain: to queue
// the next item's first scores before this item's output is stored, and clusters of two heads that
// share K and V by multicast (a quarter slower).
//
// sm_90a has these instructions and no other target does: for the others the file is empty, and the
// host takes flash.cu.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "ops/attention/attention.cuh"
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/tma.cuh"
#include "ops/attention/wgmma.cuh"

namespace xserv {

// Strides count elements and are multiples of 8. Index arrays are not trusted, as in AttentionParams.
struct AttentionFlashWgmmaParams {
  const void* q;  // [num_tokens, num_heads, D], or with a batch before it
  void* out;      // as q
  const int* cu_seqlens_q;  // [num_seqs + 1], or null: then q is not packed
  const int* cu_seqlens_k;  // [num_seqs + 1], or null: then k and v are not packed
  const int* block_tables;  // [num_seqs, max_blocks_per_seq], or null: then k and v are no cache
  const int* context_lens;  // [num_seqs], with block_tables
  FaultRecord* fault;       // may be null
  int* counter;             // [1], zero before the launch and after it
  // For the form with segments. If partial_out is not null (one query a sequence, packed heads),
  // segments are items; both arrays then hold the results of sequences with more than one segment.
  // partial_out: [num_seqs, heads, max_segments, 128]; partial_stats: [num_seqs, heads, max_segments,
  // 2], maximum and sum.
  float* partial_out;
  float* partial_stats;
  float* running;  // [blocks, groups of consumers, 64, 128]
  // Between sequences that are not packed, tokens, heads, rows of an item.
  long long q_batch_stride, q_token_stride, q_head_stride, q_row_stride;
  long long o_batch_stride, o_token_stride, o_head_stride, o_row_stride;
  int num_heads, num_kv_heads;
  int q_len, kv_len;  // of each sequence; tokens in all where packed
  int num_seqs;
  int num_blocks, max_blocks_per_seq;
  int causal;
  float scale;  // above 0
  // If not 0, an item's rows are this many heads (at most 64) of the one token of a sequence; num_heads
  // then counts groups of such heads, and causal is 0. If 0, an item's rows are tokens, and the row
  // strides are those of tokens.
  int packed_heads;
  int max_segments;  // segments in partial_out for each sequence and head
  int window;        // for the form with one: the most keys that a query sees

  static constexpr int block_size_log2 = 5;
};
XSERV_LAYOUT_AttentionFlashWgmmaParams;
static_assert(1 << AttentionFlashWgmmaParams::block_size_log2 == kBlockTokens);

// The queries of a sequence: where they begin in packed tensors, and how many there are.
__device__ __forceinline__ TokenRange query_range(const AttentionFlashWgmmaParams& p, int seq) {
  return p.cu_seqlens_q == nullptr ? TokenRange{0, p.q_len} : token_range(p.cu_seqlens_q, seq, p.q_len);
}
// The keys of a sequence; those of a cache begin at 0.
__device__ __forceinline__ TokenRange key_range(const AttentionFlashWgmmaParams& p, int seq) {
  if (p.block_tables != nullptr) return {0, context_len(p, seq)};
  return p.cu_seqlens_k == nullptr ? TokenRange{0, p.kv_len} : token_range(p.cu_seqlens_k, seq, p.kv_len);
}

// The work of a block: a tile of queries of one head.
struct FlashItem {
  int head;       // negative: no more work
  int token;      // of the first row, in the packed tensors or in its sequence
  int rows;       // at most kQueries
  int num_tiles;  // the end of its tiles of 128 keys; the first is begin_tile
  int visible;    // end of the first row's keys; may be negative. That of every row is one more, at most kv_len
  int kv_len;
  int seq;
  int begin_tile;
};

constexpr int kSegmentTiles = kSegmentKeys / 128;  // tiles in a segment

__device__ __forceinline__ int count_segments(int kv_len) {
  return max(1, (kv_len + kSegmentTiles * 128 - 1) / (kSegmentTiles * 128));
}
// The first segment that the last query of a sequence sees.
template <bool kWindow>
__device__ __forceinline__ int first_segment(const AttentionFlashWgmmaParams& p, int kv_len) {
  return kWindow ? window_begin(kv_len, p.window) / (kSegmentTiles * 128) : 0;
}

// The factors of the results so far and of a further segment, with the maxima m and m_s of their
// scores; m becomes the new maximum. If there were no keys so far, the segment stays as it is.
struct MergeFactors {
  float old, segment;

  __device__ __forceinline__ MergeFactors(float& m, float m_s, float scale) {
    const float next = fmaxf(m, m_s);
    old = m == kMinusInfinity ? 0.0f : exp2_approx(__fmul_rn(__fsub_rn(m, next), scale));
    segment = m_s == kMinusInfinity ? 0.0f : exp2_approx(__fmul_rn(__fsub_rn(m_s, next), scale));
    m = next;
  }
  __device__ __forceinline__ float merge(float value, float of_segment) const {
    return __fmaf_rn(value, old, __fmul_rn(of_segment, segment));
  }
};

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The registers of products under way are not used before this point.
template <typename Register, int kCount>
__device__ __forceinline__ void fence_registers(Register (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<Register, float>) {
      asm volatile("" : "+f"(r[i])::"memory");
    } else {
      asm volatile("" : "+r"(r[i])::"memory");
    }
  }
}

// Walks over the items in their order, one warp together. Level l holds the tile that is l tiles before the
// last of every sequence that has more than l tiles.
struct FlashSchedule {
  int level = 0, chunk = 0;  // of 32 sequences
  int first = 0;             // item number of the first item of (level, chunk)
  bool is_empty = true;      // whether no item of the level has been found so far

  // Finds item `number`, which must not be below that of the previous call. If there is no such item (head
  // negative), `first` is the number of all items.
  template <int kQueries, bool kSegments, bool kWindow>
  __device__ __forceinline__ FlashItem find(const AttentionFlashWgmmaParams& p, int number) {
    FlashItem item = {-1, 0, 0, 0, 0, 0, 0, 0};
    const int lane = threadIdx.x & 31;
    while (true) {
      const int seq = chunk * 32 + lane;
      TokenRange range = {0, 0};
      int kv_len = 0;
      if (seq < p.num_seqs) {
        range = query_range(p, seq);
        kv_len = key_range(p, seq).len;  // here, for all: its latency is that of the others
      }
      const int q_rows = p.packed_heads == 0 ? range.len : (range.len > 0 ? p.packed_heads : 0);
      // Segments as items take the places of tiles of queries.
      const bool in_segments = kSegments && p.partial_out != nullptr;
      int tiles = (q_rows + kQueries - 1) / kQueries;
      if (in_segments && tiles > 0) {
        tiles = min(count_segments(kv_len) - first_segment<kWindow>(p, kv_len), p.max_segments);
      }
      const unsigned has_level = __ballot_sync(kFullWarp, tiles > level);
      const int count = __popc(has_level) * p.num_heads;
      if (number - first < count) {
        const int index = (number - first) / p.num_heads;
        const int rank = __popc(has_level & ((1u << lane) - 1));
        const int source = __ffs(__ballot_sync(kFullWarp, tiles > level && rank == index)) - 1;
        item.head = number - first - index * p.num_heads;
        item.seq = chunk * 32 + source;
        const int q_len = __shfl_sync(kFullWarp, q_rows, source);
        const int place = __shfl_sync(kFullWarp, tiles, source) - 1 - level;
        const int q_begin = in_segments ? 0 : place * kQueries;
        item.token = __shfl_sync(kFullWarp, range.begin, source) + q_begin;
        item.rows = min(q_len - q_begin, kQueries);
        item.kv_len = __shfl_sync(kFullWarp, kv_len, source);
        item.visible = p.causal ? item.kv_len - q_len + q_begin + 1 : item.kv_len;
        const int num_keys = p.causal ? min(item.visible + item.rows - 1, item.kv_len) : item.kv_len;
        item.num_tiles = (max(num_keys, 1) + 127) / 128;  // without keys, one tile that is masked
        if (kWindow) item.begin_tile = window_begin(item.visible, p.window) / 128;
        if (in_segments) {
          const int segment_tile = (first_segment<kWindow>(p, item.kv_len) + place) * kSegmentTiles;
          item.begin_tile = kWindow ? max(item.begin_tile, segment_tile) : segment_tile;
          item.num_tiles = min(item.num_tiles, segment_tile + kSegmentTiles);
        }
        return item;
      }
      first += count;
      if (count > 0) is_empty = false;
      if (++chunk * 32 >= p.num_seqs) {
        if (is_empty) return item;
        chunk = 0;
        ++level;
        is_empty = true;
      }
    }
  }
};

// kIsEarly: no kernel that may still be at work writes the index arrays, so they are read before the
// wait. This form is only for short contexts: the place of the wait makes ptxas order the consumers'
// code differently, and at 8192 keys they then take 1.3 times as long (13.0, H200).
template <typename T, int kDim, int kGroups, bool kSegments, bool kIsEarly, bool kWindow>
struct FlashWgmma {
  static_assert(kDim == 64 || kDim == 128);
  static constexpr int kBoxes = kDim / 64;  // of 64 dims, 128 bytes
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kQueries = 64 * kGroups, kKeys = 128, kStages = 2;
  static constexpr int kGroupBytes = 64 * kDim * 2;  // queries of a group: [kBoxes][64 rows][64]
  static constexpr int kQBytes = kGroups * kGroupBytes;
  static constexpr int kTileBytes = kKeys * kDim * 2;  // [kBoxes][128 keys][64]
  static constexpr int kChunks = kDim / 8;             // of 16 bytes, in a row of queries
  static constexpr int kK = 2 * kQBytes, kV = kK + kStages * kTileBytes;
  static constexpr int kItems = kV + kStages * kTileBytes;
  static constexpr int kItemSlots = 4;
  static constexpr int kBarriers = kItems + kItemSlots * sizeof(FlashItem);
  static constexpr int kSharedBytes = kBarriers + (12 + 2 * kItemSlots) * 8;
  static constexpr int kTurn = 1, kGroup = 3;  // named barriers, one for each group

  // Offsets of the mbarriers of a stage or slot.
  static constexpr int kKFull = kBarriers, kKEmpty = kKFull + 16, kVFull = kKEmpty + 16;
  static constexpr int kVEmpty = kVFull + 16, kQFull = kVEmpty + 16, kQEmpty = kQFull + 16;
  static constexpr int kItemFull = kQEmpty + 16, kItemEmpty = kItemFull + kItemSlots * 8;

  __device__ __forceinline__ static uint64_t descriptor(uint32_t start, int block_bytes) {
    return (start & 0x3ffff) >> 4 | static_cast<uint64_t>(block_bytes >> 4) << 16 |
           static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
  }

  // Returns where 32 times 32 keys begin, one to a lane: the id of a cache block, or the token.
  // Past the sequence, and for an id that must not be followed, a place outside the tensor, which
  // reads as zeros.
  __device__ __forceinline__ static int load_ids(const AttentionFlashWgmmaParams& p, const FlashItem& item,
                                                 int chunk) {
    const int block = chunk * 32 + (threadIdx.x & 31);
    const bool is_key = block >= 0 && block * 32 < item.kv_len;
    if (p.block_tables == nullptr) return is_key ? key_range(p, item.seq).begin + block * 32 : p.kv_len;
    if (!is_key) return p.num_blocks;
    const long long index = static_cast<long long>(item.seq) * p.max_blocks_per_seq + block;
    const int id = p.block_tables[index];
    if (static_cast<unsigned>(id) < static_cast<unsigned>(p.num_blocks)) return id;
    report_fault(p.fault, kFaultBlock, index, id);
    return p.num_blocks;
  }

  // The keys of a tile into a stage, 32 at a time.
  __device__ __forceinline__ static void copy_tile(const AttentionFlashWgmmaParams& p, uint32_t target,
                                                   const TensorMap* map, uint32_t barrier,
                                                   const int (&ids)[4], int kv_head, int seq) {
    const bool is_cache = p.block_tables != nullptr;
    const int batch = p.cu_seqlens_k == nullptr ? seq : 0;
    mbarrier_arrive_expect(barrier, kTileBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        tma_load_4d(target + box * (kTileBytes / kBoxes) + i * 32 * 128, map, barrier, box * 64, kv_head,
                    is_cache ? 0 : ids[i], is_cache ? ids[i] : batch);
      }
    }
  }

  // One warp: chooses the items, and copies their keys and values.
  __device__ __forceinline__ static void produce(const AttentionFlashWgmmaParams& p, const TensorMap* k_map,
                                                 const TensorMap* v_map, uint32_t shared,
                                                 FlashItem* items) {
    const int lane = threadIdx.x & 31;
    const int heads_per_kv_head = p.num_heads / p.num_kv_heads;
    FlashSchedule schedule;
    int claimed = -1;
    uint32_t count = 0, published = 0;  // tiles, items
    const auto publish = [&](int number) {
      const FlashItem item = schedule.find<kQueries, kSegments, kWindow>(p, number);
      const uint32_t slot = published % kItemSlots;
      mbarrier_wait(shared + kItemEmpty + slot * 8, (published / kItemSlots & 1) ^ 1);
      if (lane == 0) {
        items[slot] = item;
        mbarrier_arrive(shared + kItemFull + slot * 8);
      }
      __syncwarp();
      ++published;
      return item;
    };

    FlashItem item = publish(blockIdx.x), next = item;
    int first_ids = load_ids(p, item, (item.num_tiles - 1) >> 3);
    if constexpr (kIsEarly) dependency_wait();
    const auto publish_next = [&]() {
      claimed = __shfl_sync(kFullWarp, claimed, 0);
      next = publish(gridDim.x + claimed);
      first_ids = load_ids(p, next, (next.num_tiles - 1) >> 3);
    };
    while (item.head >= 0) {
      // The next item is claimed and published before the last tiles, where the copies must wait for a
      // stage anyway: late enough to keep the load even, early enough for its queries to be there in
      // time.
      const int begin_tile = kSegments || kWindow ? item.begin_tile : 0;
      const int after_begin = min(item.num_tiles - begin_tile - 3, 1);
      const int publish_tile = after_begin < 0 ? -1 : begin_tile + after_begin;
      const int claim_tile = publish_tile < 0 ? item.num_tiles - 1 : publish_tile + 1;
      const int kv_head = item.head / heads_per_kv_head;
      int ids = first_ids;
      for (int tile = item.num_tiles - 1; tile >= begin_tile; --tile) {
        if (tile == claim_tile && lane == 0) claimed = atomicAdd(p.counter, 1);
        if (tile == publish_tile) publish_next();
        if (tile != item.num_tiles - 1 && (tile & 7) == 7) ids = load_ids(p, item, tile >> 3);
        int tile_ids[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) tile_ids[i] = __shfl_sync(kFullWarp, ids, (tile & 7) * 4 + i);
        const uint32_t stage = count & 1, phase = (count >> 1 & 1) ^ 1;
        ++count;
        mbarrier_wait(shared + kKEmpty + stage * 8, phase);
        if (lane == 0) {
          copy_tile(p, shared + kK + stage * kTileBytes, k_map, shared + kKFull + stage * 8, tile_ids, kv_head,
                    item.seq);
        }
        mbarrier_wait(shared + kVEmpty + stage * 8, phase);
        if (lane == 0) {
          copy_tile(p, shared + kV + stage * kTileBytes, v_map, shared + kVFull + stage * 8, tile_ids, kv_head,
                    item.seq);
        }
        __syncwarp();
      }
      if (publish_tile < 0) publish_next();
      item = next;
    }
    // Every item is followed by one claim: the block that made the last claim clears the counter.
    if (lane == 0 && claimed >= 0 && claimed == schedule.first - 1) *p.counter = 0;
  }

  // Three warps copy the queries of the items; rows past the sequence become zeros.
  __device__ __forceinline__ static void produce_queries(const AttentionFlashWgmmaParams& p, uint32_t shared,
                                                         const FlashItem* items) {
    const int thread = (threadIdx.x & 127) - 32, chunk = thread & (kChunks - 1);
    if constexpr (kIsEarly) dependency_wait();
    for (uint32_t index = 0;; ++index) {
      const uint32_t slot = index & 1, item_slot = index % kItemSlots;
      mbarrier_wait(shared + kItemFull + item_slot * 8, index / kItemSlots & 1);
      const FlashItem& item = items[item_slot];
      const int head = item.head, rows = item.rows;
      const T* q = static_cast<const T*>(p.q) + item.seq * p.q_batch_stride + item.token * p.q_token_stride +
                   head * p.q_head_stride + chunk * 8;
      mbarrier_wait(shared + kQEmpty + slot * 8, (index >> 1 & 1) ^ 1);
      if (head >= 0) {
        const uint32_t target = shared + slot * kQBytes + (chunk >> 3) * (kGroupBytes / kBoxes);
#pragma unroll 4
        for (int row = thread / kChunks; row < kQueries; row += 96 / kChunks) {
          cp_async_16(target + (row >> 6) * kGroupBytes + (row & 63) * 128 + ((chunk ^ row) & 7) * 16,
                      q + (row < rows ? row : 0) * p.q_row_stride, row < rows);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_for_wgmma();
      }
      __syncwarp();
      if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared + kQFull + slot * 8);
      if (head < 0) break;
    }
  }

  // Tells that a warp is done with a stage or slot.
  __device__ __forceinline__ static void release(uint32_t barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
  }

  struct Rows {  // the two rows of a thread: row and row + 8
    float maximum[2], sum[2], rescale[2];
  };

  // Computes s = 2^(scale * s - shift), with the maximum and the sum of each of this thread's two rows,
  // for the first kTiles * 8 keys of a tile.
  template <int kTiles>
  __device__ __forceinline__ static void softmax(float (&s)[64], Rows& rows, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Each row has two chains, because a single one would be bound by the latency of its comparisons.
      float even = fmaxf(s[r * 2], s[r * 2 + 1]), odd = fmaxf(s[4 + r * 2], s[4 + r * 2 + 1]);
#pragma unroll
      for (int n = 2; n < kTiles; n += 2) {
        even = fmaxf(even, fmaxf(s[n * 4 + r * 2], s[n * 4 + r * 2 + 1]));
        odd = fmaxf(odd, fmaxf(s[n * 4 + 4 + r * 2], s[n * 4 + 4 + r * 2 + 1]));
      }
      float row_max = fmaxf(even, odd);
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
      [[maybe_unused]] const bool is_hidden = row_max == kMinusInfinity;
      row_max = fmaxf(row_max, rows.maximum[r]);
      // Weights up to 2^8 do no harm: the old maximum stays in use until a new one is above that.
      if (!((row_max - rows.maximum[r]) * scale > 8.0f)) row_max = rows.maximum[r];
      // A row of nothing but -inf must give zeros, not -inf - -inf.
      const float shift = row_max == kMinusInfinity ? 0.0f : row_max * scale;
      // The operations are fused explicitly here and below, so that they are fused for all rows.
      rows.rescale[r] = exp2_approx(__fmaf_rn(rows.maximum[r], scale, -shift));
      // That factor is not exactly 1 where the maximum stays. A row that sees nothing of a tile, which
      // is there for the rows beside it, must not change; without a window such tiles come first,
      // while the sums are still 0.
      if (kWindow && is_hidden) rows.rescale[r] = 1.0f;
      rows.maximum[r] = row_max;
      float sum_even = 0.0f, sum_odd = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& a = s[n * 4 + r * 2 + e];
          float& b = s[n * 4 + 4 + r * 2 + e];
          a = exp2_approx(fmaf(a, scale, -shift));
          b = exp2_approx(fmaf(b, scale, -shift));
          sum_even += a;
          sum_odd += b;
        }
      }
      rows.sum[r] = __fmaf_rn(rows.sum[r], rows.rescale[r], sum_even + sum_odd);
    }
  }

  __device__ __forceinline__ static void consume(const AttentionFlashWgmmaParams& p, uint32_t shared,
                                                 const FlashItem* items) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x >> 7), 0);
    const int row = warp * 16 + (lane >> 2);  // in the group's 64 rows; the other row is row + 8
    const float scale = p.scale * kLog2E;
    if (kGroups == 2 && group == 1) named_arrive(kTurn, kGroups * 128);

    uint32_t count = 0;  // the tiles whose scores were queued
    float o[kDim / 2], s[64];
    const auto q_descriptor = [&](uint32_t slot) {
      return descriptor(shared + slot * kQBytes + group * kGroupBytes, 16);
    };
    // Returns the next item, once its queries are there.
    const auto next_item = [&](uint32_t index) {
      mbarrier_wait(shared + kQFull + (index & 1) * 8, index >> 1 & 1);
      const uint32_t item_slot = index % kItemSlots;
      const FlashItem item = items[item_slot];
      release(shared + kItemEmpty + item_slot * 8);
      return item;
    };
    const auto queue_scores = [&](uint64_t q_desc, uint32_t stage) {
      const uint64_t k_desc = descriptor(shared + kK + stage * kTileBytes, 16);
      fence_registers(s);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int box = step >> 2, offset = (step & 3) * 32;
        wgmma<T, 0, 0>(s, q_desc + ((box * (kGroupBytes / kBoxes) + offset) >> 4),
                       k_desc + ((box * (kTileBytes / kBoxes) + offset) >> 4), step > 0);
      }
      wgmma_commit();
    };

    FlashItem item = next_item(0);
    for (uint32_t index = 0; item.head >= 0; ++index) {
      const uint32_t slot = index & 1;
      const uint32_t q_shared = shared + slot * kQBytes + group * kGroupBytes;
      const uint64_t q_desc = q_descriptor(slot);
      // The number of keys that the group's first row sees, and that this thread's first row sees.
      const int group_visible = p.causal ? item.visible + group * 64 : item.visible;
      const int row_visible = p.causal ? group_visible + row : group_visible;
      const int row_step = p.causal ? 8 : 0;
      const int kv_len = item.kv_len;

      uint32_t weights[32];
      Rows rows = {};

      const auto queue_output = [&](uint32_t stage) {
        const uint64_t v_desc = descriptor(shared + kV + stage * kTileBytes, kTileBytes / kBoxes);
        fence_registers(o);
        fence_registers(weights);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          wgmma_registers<T>(o, weights + step * 4, v_desc + (step * 16 * 128 >> 4), 1);
        }
        wgmma_commit();
      };
      // There is no branch around the first half alone: with it ptxas (13.0) makes all products wait
      // for each other.
      const auto mask_half = [&](int half, int limit0, int limit1, int begin0, int begin1) {
#pragma unroll
        for (int n = half * 8; n < half * 8 + 8; ++n) {
          if (n * 8 >= limit0 || (kWindow && n * 8 < begin0)) s[n * 4] = kMinusInfinity;
          if (n * 8 + 1 >= limit0 || (kWindow && n * 8 + 1 < begin0)) s[n * 4 + 1] = kMinusInfinity;
          if (n * 8 >= limit1 || (kWindow && n * 8 < begin1)) s[n * 4 + 2] = kMinusInfinity;
          if (n * 8 + 1 >= limit1 || (kWindow && n * 8 + 1 < begin1)) s[n * 4 + 3] = kMinusInfinity;
        }
      };
      const auto mask = [&](int tile, int num_halves) {
        const int seen = min(group_visible, kv_len) - tile * kKeys;
        if constexpr (kWindow) {
          // The window of the group's last row begins last. One comparison decides for both ends: with
          // two, all products wait for each other here too.
          const int last_begin = group_visible + (p.causal ? 63 : 0) - p.window;
          if (min(seen - num_halves * 64, tile * kKeys - last_begin) >= 0) return;
        } else {
          if (seen >= num_halves * 64) return;
        }
        const int first = tile * kKeys + (lane & 3) * 2;
        const int limit0 = min(row_visible, kv_len) - first;
        const int limit1 = min(row_visible + row_step, kv_len) - first;
        const int begin0 = kWindow ? row_visible - p.window - first : 0, begin1 = begin0 + row_step;
        mask_half(0, limit0, limit1, begin0, begin1);
        if (num_halves == 2) mask_half(1, limit0, limit1, begin0, begin1);
      };
      const auto pack_weights = [&]() {
#pragma unroll
        for (int i = 0; i < 32; ++i) weights[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
      };

      // The rest of the last 32 keys may be anything, an unused part of a cache block or the next sequence,
      // and 0 * NaN would spoil the product. Every group clears it for itself: writing zeros over zeros
      // does no harm.
      const auto clear_rest = [&](int tile, uint32_t stage) {
        if ((tile + 1) * kKeys <= kv_len || (kv_len & 31) == 0) return;
        const int first = kv_len - tile * kKeys, num_rows = 32 - (kv_len & 31);
        const uint32_t v_shared = shared + kV + stage * kTileBytes;
        for (int i = threadIdx.x & 127; i < num_rows * kChunks; i += 128) {
          const uint32_t address = v_shared + (i % kChunks >> 3) * (kTileBytes / kBoxes) +
                                   (first + i / kChunks) * 128 + (i & 7) * 16;
          asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
        }
        fence_for_wgmma();
        named_sync(kGroup + group, 128);
      };
      const auto rescale_output = [&]() {
        if (__any_sync(kFullWarp, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) {
#pragma unroll
          for (int i = 0; i < kDim / 2; ++i) o[i] *= rows.rescale[i >> 1 & 1];
        }
      };

      int tile = item.num_tiles - 1;
      const int begin_tile = kSegments || kWindow ? item.begin_tile : 0;
      float merged_max[2], merged_sum[2];
      bool is_merged = false;
      while (true) {
      const int first_tile = kSegments ? max(tile & ~(kSegmentTiles - 1), begin_tile) : begin_tile;
      rows = {{kMinusInfinity, kMinusInfinity}, {0.0f, 0.0f}, {1.0f, 1.0f}};
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;
      // On the diagonal a group may see only the first half of a tile's keys: this half is computed by
      // itself.
      const bool is_half = tile > first_tile &&
                           (p.causal ? min(group_visible + 63, kv_len) : kv_len) - tile * kKeys <= 64;
      if (is_half) {
        const uint32_t stage = count & 1, phase = count >> 1 & 1;
        ++count;
        mbarrier_wait(shared + kKFull + stage * 8, phase);
        if (kGroups == 2) named_sync(kTurn + group, kGroups * 128);
        const uint64_t k_desc = descriptor(shared + kK + stage * kTileBytes, 16);
        fence_registers(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
          const int box = step >> 2, offset = (step & 3) * 32;
          wgmma_n64<T>(s, q_desc + ((box * (kGroupBytes / kBoxes) + offset) >> 4),
                       k_desc + ((box * (kTileBytes / kBoxes) + offset) >> 4), step > 0);
        }
        wgmma_commit();
        if (kGroups == 2) named_arrive(kTurn + (group ^ 1), kGroups * 128);
        wgmma_wait<0>();
        fence_registers(s);
        release(shared + kKEmpty + stage * 8);
        mask(tile, 1);
        softmax<8>(s, rows, scale);
        mbarrier_wait(shared + kVFull + stage * 8, phase);
#pragma unroll
        for (int i = 0; i < 16; ++i) weights[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        clear_rest(tile, stage);
        const uint64_t v_desc = descriptor(shared + kV + stage * kTileBytes, kTileBytes / kBoxes);
        fence_registers(o);
        fence_registers(weights);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          wgmma_registers<T>(o, weights + step * 4, v_desc + (step * 16 * 128 >> 4), 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(o);
        release(shared + kVEmpty + stage * 8);
        --tile;
      }
      uint32_t stage = count & 1, phase = count >> 1 & 1;
      mbarrier_wait(shared + kKFull + stage * 8, phase);
      queue_scores(q_desc, stage);
      wgmma_wait<0>();
      fence_registers(s);
      release(shared + kKEmpty + stage * 8);
      mask(tile, 2);
      softmax<16>(s, rows, scale);
      mbarrier_wait(shared + kVFull + stage * 8, phase);
      pack_weights();
      clear_rest(tile, stage);
      rescale_output();
      ++count;
      for (--tile; tile >= first_tile; --tile) {
        const uint32_t v_stage = stage;
        stage = count & 1;
        phase = count >> 1 & 1;
        ++count;
        mbarrier_wait(shared + kKFull + stage * 8, phase);
        if (kGroups == 2) named_sync(kTurn + group, kGroups * 128);
        queue_scores(q_desc, stage);
        queue_output(v_stage);
        if (kGroups == 2) named_arrive(kTurn + (group ^ 1), kGroups * 128);
        wgmma_wait<1>();
        fence_registers(s);
        release(shared + kKEmpty + stage * 8);
        mask(tile, 2);
        softmax<16>(s, rows, scale);
        // The wait stands here, and not where these values are used, because the compiler moves the
        // wait below up to the last branch, which would end the overlap with the softmax.
        mbarrier_wait(shared + kVFull + stage * 8, phase);
        wgmma_wait<0>();
        fence_registers(o);
        fence_registers(s);
        release(shared + kVEmpty + v_stage * 8);
        pack_weights();
        rescale_output();
      }
      queue_output(stage);
      wgmma_wait<0>();
      fence_registers(o);
      release(shared + kVEmpty + stage * 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(kFullWarp, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(kFullWarp, rows.sum[r], 2);
      }
      if (!kSegments) break;
      const bool is_last = first_tile <= begin_tile;
      if (is_last && !is_merged) break;
      float* running = p.running + (static_cast<int64_t>(blockIdx.x) * kGroups + group) * (64 * kDim) +
                       (threadIdx.x & 127);
      if (is_merged) {
        const MergeFactors factors[2] = {{merged_max[0], rows.maximum[0], scale},
                                         {merged_max[1], rows.maximum[1], scale}};
#pragma unroll
        for (int r = 0; r < 2; ++r) merged_sum[r] = factors[r].merge(merged_sum[r], rows.sum[r]);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o[i] = factors[i >> 1 & 1].merge(running[i * 128], o[i]);
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) merged_max[r] = rows.maximum[r], merged_sum[r] = rows.sum[r];
      }
      if (is_last) {
        rows.sum[0] = merged_sum[0];
        rows.sum[1] = merged_sum[1];
        break;
      }
      is_merged = true;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) running[i * 128] = o[i];
      }

      const int item_first = first_segment<kWindow>(p, kv_len);
      if (kSegments && p.partial_out != nullptr && count_segments(kv_len) - item_first > 1) {
        // The item is one segment of several: it writes what the merge needs.
        const int64_t first_head = static_cast<int64_t>(item.seq) * p.num_heads * p.packed_heads +
                                   item.head * p.packed_heads;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int target_row = group * 64 + row + r * 8;
          if (target_row >= item.rows) continue;
          const int64_t place =
              (first_head + target_row) * p.max_segments + begin_tile / kSegmentTiles - item_first;
          float* target = p.partial_out + place * kDim + (lane & 3) * 2;
#pragma unroll
          for (int n = 0; n < kDim / 8; ++n) {
            *reinterpret_cast<float2*>(target + n * 8) = make_float2(o[n * 4 + r * 2], o[n * 4 + r * 2 + 1]);
          }
          if ((lane & 3) == 0) {
            *reinterpret_cast<float2*>(p.partial_stats + place * 2) = make_float2(rows.maximum[r], rows.sum[r]);
          }
        }
        release(shared + kQEmpty + slot * 8);
        item = next_item(index + 1);
        continue;
      }

      // The rows go through the queries' place for 16-byte stores of whole rows; the group does not
      // read the queries any more.
      named_sync(kGroup + group, 128);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float row_sum = rows.sum[r];
        const float inverse = row_sum == 0.0f ? 0.0f : __frcp_rn(row_sum);
        const uint32_t target = q_shared + (row + r * 8) * 128 + (lane & 3) * 4;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const uint32_t pair = pack_pair<T>(o[n * 4 + r * 2] * inverse, o[n * 4 + r * 2 + 1] * inverse);
          const uint32_t address = target + (n >> 3) * (kGroupBytes / kBoxes) + ((n ^ row) & 7) * 16;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
        }
      }
      __syncwarp();
      constexpr int kRows = 32 / kChunks;  // that a warp copies at once
      const int chunk = lane & (kChunks - 1);
      T* out = static_cast<T*>(p.out) + item.seq * p.o_batch_stride + item.token * p.o_token_stride +
               group * 64 * p.o_row_stride + item.head * p.o_head_stride + chunk * 8;
      uint4 values[16 / kRows];  // all reads come before the first write, as the compiler keeps their order
#pragma unroll
      for (int i = 0; i < 16 / kRows; ++i) {
        const int target_row = warp * 16 + i * kRows + lane / kChunks;
        const uint32_t address = q_shared + (chunk >> 3) * (kGroupBytes / kBoxes) + target_row * 128 +
                                 ((chunk ^ target_row) & 7) * 16;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values[i].x), "=r"(values[i].y), "=r"(values[i].z), "=r"(values[i].w)
                     : "r"(address)
                     : "memory");
      }
      release(shared + kQEmpty + slot * 8);
#pragma unroll
      for (int i = 0; i < 16 / kRows; ++i) {
        const int target_row = warp * 16 + i * kRows + lane / kChunks;
        if (group * 64 + target_row < item.rows) {
          *reinterpret_cast<uint4*>(out + target_row * p.o_row_stride) = values[i];
        }
      }
      item = next_item(index + 1);
    }
    if (kGroups == 2 && group == 0) named_sync(kTurn, kGroups * 128);  // the turn that is left over
  }

  __device__ __forceinline__ static void run(const AttentionFlashWgmmaParams& p, const TensorMap* k_map,
                                             const TensorMap* v_map) {
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    dependency_launch();
    const uint32_t shared = shared_address(flash_shared);
    FlashItem* items = reinterpret_cast<FlashItem*>(flash_shared + kItems);
    if (threadIdx.x == 0) {
      tensor_map_prefetch(k_map);
      tensor_map_prefetch(v_map);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared + kKFull + i * 8, 1);
        mbarrier_init(shared + kKEmpty + i * 8, kGroups * 4);
        mbarrier_init(shared + kVFull + i * 8, 1);
        mbarrier_init(shared + kVEmpty + i * 8, kGroups * 4);
        mbarrier_init(shared + kQFull + i * 8, 3);
        mbarrier_init(shared + kQEmpty + i * 8, kGroups * 4);
      }
#pragma unroll
      for (int i = 0; i < kItemSlots; ++i) {
        mbarrier_init(shared + kItemFull + i * 8, 1);
        mbarrier_init(shared + kItemEmpty + i * 8, kGroups * 4);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    if constexpr (!kIsEarly) dependency_wait();

    const int role = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x >> 5), 0);
    if (role >= kGroups * 4) {
      release_registers<40>();
      if (role == kGroups * 4) {
        produce(p, k_map, v_map, shared, items);
      } else {
        produce_queries(p, shared, items);
      }
    } else {
      claim_registers<kGroups == 1 ? 240 : 232>();
      consume(p, shared, items);
    }
  }
};

// Merges the results that the items of a sequence's segments have left, in the order in which a single
// block merges. Grid (heads, sequences), with a thread for each of 128 dims.
template <typename T>
__device__ __forceinline__ void merge_segments(const AttentionFlashWgmmaParams& p) {
  const int head = blockIdx.x, seq = blockIdx.y, dim = threadIdx.x;
  const TokenRange range = query_range(p, seq);
  const int kv_len = key_range(p, seq).len;
  const int num_segments = min(count_segments(kv_len) - first_segment<true>(p, kv_len), p.max_segments);
  if (range.len == 0 || num_segments == 1) return;
  const int64_t first = (static_cast<int64_t>(seq) * gridDim.x + head) * p.max_segments;
  const float scale = p.scale * kLog2E;
  const float* partial = p.partial_out + first * 128 + dim;
  const float2* stats = reinterpret_cast<const float2*>(p.partial_stats) + first;
  int segment = num_segments - 1;
  float2 stat = stats[segment];
  float maximum = stat.x, sum = stat.y, o = partial[segment * 128];
#pragma unroll 4
  for (--segment; segment >= 0; --segment) {
    stat = stats[segment];
    const MergeFactors factors(maximum, stat.x, scale);
    sum = factors.merge(sum, stat.y);
    o = factors.merge(o, partial[segment * 128]);
  }
  const float inverse = sum == 0.0f ? 0.0f : __frcp_rn(sum);
  T* out = static_cast<T*>(p.out) + seq * p.o_batch_stride + range.begin * p.o_token_stride +
           head * p.o_row_stride + dim;
  *out = from_float<T>(o * inverse);
}

}  // namespace xserv

#define XSERV_FLASH_WGMMA(variant, suffix, T, dim, groups, segments, early, window) \
  extern "C" __global__ void __launch_bounds__(128 * (groups + 1), 1) \
      xserv_attention_flash_wgmma##variant##_##suffix( \
          const __grid_constant__ xserv::AttentionFlashWgmmaParams p, \
          const __grid_constant__ xserv::TensorMap k_map, \
          const __grid_constant__ xserv::TensorMap v_map) { \
    using Kernel = xserv::FlashWgmma<T, dim, groups, segments, early, window>; \
    static_assert(Kernel::kSharedBytes == xserv::shared_bytes::attention_flash_wgmma_##dim##_##groups); \
    Kernel::run(p, &k_map, &v_map); \
  }
// The short form has half the queries in an item, for launches that would leave half the device idle.
// The early form is the short one for short contexts, which have no use for a window. Segments have
// head_dim 128 alone.
#define XSERV_FLASH_WGMMA_ALL(suffix, T) \
  XSERV_FLASH_WGMMA(_128, suffix, T, 128, 2, false, false, false) \
  XSERV_FLASH_WGMMA(_128_short, suffix, T, 128, 1, false, false, false) \
  XSERV_FLASH_WGMMA(_128_early, suffix, T, 128, 1, false, true, false) \
  XSERV_FLASH_WGMMA(_128_window, suffix, T, 128, 2, false, false, true) \
  XSERV_FLASH_WGMMA(_128_short_window, suffix, T, 128, 1, false, false, true) \
  XSERV_FLASH_WGMMA(_64, suffix, T, 64, 2, false, false, false) \
  XSERV_FLASH_WGMMA(_64_short, suffix, T, 64, 1, false, false, false) \
  XSERV_FLASH_WGMMA(_64_early, suffix, T, 64, 1, false, true, false) \
  XSERV_FLASH_WGMMA(_64_window, suffix, T, 64, 2, false, false, true) \
  XSERV_FLASH_WGMMA(_64_short_window, suffix, T, 64, 1, false, false, true) \
  XSERV_FLASH_WGMMA(_segments, suffix, T, 128, 2, true, false, false) \
  XSERV_FLASH_WGMMA(_segments_short, suffix, T, 128, 1, true, false, false) \
  XSERV_FLASH_WGMMA(_segments_window, suffix, T, 128, 2, true, false, true) \
  XSERV_FLASH_WGMMA(_segments_short_window, suffix, T, 128, 1, true, false, true) \
  extern "C" __global__ void __launch_bounds__(128) \
      xserv_attention_flash_wgmma_merge_##suffix( \
          const __grid_constant__ xserv::AttentionFlashWgmmaParams p) { \
    xserv::merge_segments<T>(p); \
  }
XSERV_FLASH_WGMMA_ALL(f16, __half)
XSERV_FLASH_WGMMA_ALL(bf16, __nv_bfloat16)
#endif
