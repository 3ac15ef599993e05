// Attention of one query per sequence over its cached keys, the keys split among blocks.
//
//   q, out: [num_seqs, num_heads, head_dim] by strides, or packed with cu_seqlens_q [num_seqs + 1]: then a
//           sequence has no query or one
//   k, v:   [num_seqs, kv_len, num_kv_heads, head_dim] by strides, or packed with cu_seqlens_k, or a cache
//           [num_blocks, block_size, num_kv_heads, head_dim] through block_tables [num_seqs,
//           max_blocks_per_seq] with context_lens [num_seqs], which may store 8-bit floats
// A block computes the (m, l, o) of one chunk of keys for the query heads of one kv head (at most 8; larger
// groups take several blocks). The last block to finish a (sequence, kv head) combines its chunks in chunk
// order:
//   m = max_c m_c;   o = sum_c 2^(m_c - m) o_c / sum_c 2^(m_c - m) l_c
// The length of a chunk depends on that sequence's length alone: a token's result does not change with what
// else is in the batch, and repeats bit for bit. Source: Dao et al. 2023 (Flash-Decoding).
// With a window the chunks divide the keys from the tile on in which the window begins.
//
// Every key and value is used once, so only bytes in flight count. A warp streams its own tiles of keys
// through its own ring of cp.async stages, without a barrier of the block until the end. The query
// heads are the n = 8 of mma.m16n8k16: S^T = K Q^T with 16 keys as A, then O^T += V^T P^T with V
// through ldmatrix.trans and P^T through movmatrix; no lane works for padding rows beyond 8 heads.
//
// grid: (max_chunks, num_kv_heads * head groups, num_seqs); blocks past a sequence's last chunk return
// at once. H200, bf16, head_dim 128, 32 heads over 8, 32 sequences of 4096 keys: 4.06 TB/s, where a
// copy moves 4.27.
#include "ops/attention/attention.cuh"
#include "ops/attention/cache_tile.cuh"
#include "common/dtype.cuh"
#include "common/reduce.cuh"

extern __shared__ __align__(1024) unsigned char decode_shared[];

namespace xserv {

// The number of floats from head to head where the warps' results are combined in shared memory; the 4
// keep the stores of a fragment (heads 2t, dims g) out of each other's banks.
template <int kHeadDim>
constexpr int kPartialStride = kHeadDim + 4;

// Short chunks give short sequences enough blocks to fill the device; with long sequences, longer
// chunks mean fewer partial results to combine, and fewer waves of blocks. The values come from a sweep
// on an H200 over 1 to 128 sequences of 512 to 32768 keys. The host has the same rule
// (src/ops/attention/cuda_split_kv.rs).
__device__ __forceinline__ int decode_chunk_len(int kv_len) {
  if (kv_len <= 2048) return 256;
  if (kv_len <= 8192) return 512;
  if (kv_len <= 65536) return 1024;
  return (kv_len / 64 + 64) / 64 * 64;  // at most 64 chunks
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// The keys of a tile, which begins at a multiple of them and so lies in one block of a cache.
constexpr int kDecodeTileKeys = 16;

struct DecodeUnit {
  int seq, kv_head, group_begin, num_group_heads;  // heads group_begin .. of all query heads
  int q_row, k_token;  // first token in packed tensors; q_row is the sequence otherwise, k_token 0
  int kv_len, num_chunks, chunk, key_begin, key_end;
  int first_key;  // keys of the chunk before this one are hidden by the window
  int counter;
};

__device__ __forceinline__ DecodeUnit decode_unit(const AttentionDecodeParams& p) {
  DecodeUnit unit;
  const int heads_per_kv = p.num_heads / p.num_kv_heads;
  const int num_groups = (heads_per_kv + kGroupHeads - 1) / kGroupHeads;
  unit.seq = blockIdx.z;
  unit.chunk = blockIdx.x;
  unit.kv_head = blockIdx.y / num_groups;
  const int first = blockIdx.y % num_groups * kGroupHeads;
  unit.group_begin = unit.kv_head * heads_per_kv + first;
  unit.num_group_heads = min(kGroupHeads, heads_per_kv - first);
  unit.q_row = unit.seq;
  bool has_query = true;
  if (p.cu_seqlens_q != nullptr) {
    const TokenRange range = token_range(p.cu_seqlens_q, unit.seq, p.num_tokens);
    unit.q_row = range.begin;
    has_query = range.len > 0;
  }
  unit.k_token = 0;
  unit.kv_len = p.kv_len;
  if (p.cu_seqlens_k != nullptr) {
    const TokenRange range = token_range(p.cu_seqlens_k, unit.seq, p.kv_len);
    unit.k_token = range.begin;
    unit.kv_len = range.len;
  }
  if (p.block_tables != nullptr) unit.kv_len = context_len(p, unit.seq);
  unit.first_key = window_begin(unit.kv_len, p.window);
  const int tiles_begin = unit.first_key / kDecodeTileKeys * kDecodeTileKeys;
  const int num_keys = unit.kv_len - tiles_begin;
  const int chunk_len = decode_chunk_len(num_keys);
  // The workspace has room for max_chunks: a sequence longer than the host planned for takes longer
  // chunks.
  const int planned = (num_keys + p.max_chunks - 1) / p.max_chunks;
  const int length = planned <= chunk_len ? chunk_len : (planned + 63) / 64 * 64;
  // A sequence without keys has one chunk, which writes the zeros.
  unit.num_chunks = has_query ? max(1, (num_keys + length - 1) / length) : 0;
  unit.key_begin = tiles_begin + unit.chunk * length;
  unit.key_end = min(unit.kv_len, unit.key_begin + length);
  unit.counter = unit.seq * gridDim.y + blockIdx.y;
  return unit;
}

template <typename T>
__device__ __forceinline__ T* decode_out(const AttentionDecodeParams& p, const DecodeUnit& unit, int head) {
  return static_cast<T*>(p.out) + unit.q_row * p.o_seq_stride + (unit.group_begin + head) * p.o_head_stride;
}

// All threads call this once the block's (m, l, o) are in the workspace.
template <typename T, int kHeadDim, int kThreads>
__device__ __forceinline__ void combine_chunks(const AttentionDecodeParams& p, const DecodeUnit& unit) {
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int arrived = atomicAdd(p.counters + unit.counter, 1);
    is_last = arrived == unit.num_chunks - 1;
    if (is_last) p.counters[unit.counter] = 0;  // no other block arrives before the next launch
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  constexpr int kVectors = kHeadDim / 4;
  constexpr int kBatch = 16;  // chunks read at once: each round of reads is a trip to L2, so few rounds
  for (int index = threadIdx.x; index < unit.num_group_heads * kVectors; index += kThreads) {
    const int head = index / kVectors, column = index % kVectors * 4;
    const long long first =
        (static_cast<long long>(unit.seq) * p.num_heads + unit.group_begin + head) * p.max_chunks;
    const float* partial = p.partial_out + first * kHeadDim + column;
    const float* stats = p.partial_stats + first * 2;
    float maximum = kMinusInfinity, sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int begin = 0; begin < unit.num_chunks; begin += kBatch) {
      float4 part[kBatch];
      float2 stat[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int chunk = min(begin + i, unit.num_chunks - 1);
        part[i] = __ldcg(reinterpret_cast<const float4*>(partial + static_cast<long long>(chunk) * kHeadDim));
        stat[i] = __ldcg(reinterpret_cast<const float2*>(stats + chunk * 2));
      }
      float next = maximum;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) next = fmaxf(next, stat[i].x);
      const float shift = next == kMinusInfinity ? 0.0f : next;
      const float rescale = exp2_approx(maximum - shift);
      maximum = next;
      sum *= rescale;
      o.x *= rescale;
      o.y *= rescale;
      o.z *= rescale;
      o.w *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i >= unit.num_chunks) break;
        const float weight = exp2_approx(stat[i].x - shift);
        sum += weight * stat[i].y;
        o.x += weight * part[i].x;
        o.y += weight * part[i].y;
        o.z += weight * part[i].z;
        o.w += weight * part[i].w;
      }
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    Vec<T, 4> result;
    result[0] = from_float<T>(o.x * inverse);
    result[1] = from_float<T>(o.y * inverse);
    result[2] = from_float<T>(o.z * inverse);
    result[3] = from_float<T>(o.w * inverse);
    *reinterpret_cast<Vec<T, 4>*>(decode_out<T>(p, unit, head) + column) = result;
  }
}

// Combines the warps' (m, l, o) of one chunk and writes the result to the workspace, or to the output
// where it is the only chunk. partial: [kWarps][kGroupHeads][kPartialStride], stats:
// [kWarps][kGroupHeads][2], both in shared memory.
template <typename T, int kHeadDim, int kWarps>
__device__ __forceinline__ void merge_warps(const AttentionDecodeParams& p, const DecodeUnit& unit,
                                            const float* partial, const float* stats) {
  constexpr int kVectors = kHeadDim / 4;
  for (int index = threadIdx.x; index < unit.num_group_heads * kVectors; index += kWarps * 32) {
    const int head = index / kVectors, column = index % kVectors * 4;
    float maximum = kMinusInfinity;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, stats[(w * kGroupHeads + head) * 2]);
    const float shift = maximum == kMinusInfinity ? 0.0f : maximum;
    float sum = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_approx(stats[(w * kGroupHeads + head) * 2] - shift);
      const float4 part = *reinterpret_cast<const float4*>(
          partial + (w * kGroupHeads + head) * kPartialStride<kHeadDim> + column);
      sum += weight * stats[(w * kGroupHeads + head) * 2 + 1];
      o.x += weight * part.x;
      o.y += weight * part.y;
      o.z += weight * part.z;
      o.w += weight * part.w;
    }
    if (unit.num_chunks == 1) {
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      Vec<T, 4> result;
      result[0] = from_float<T>(o.x * inverse);
      result[1] = from_float<T>(o.y * inverse);
      result[2] = from_float<T>(o.z * inverse);
      result[3] = from_float<T>(o.w * inverse);
      *reinterpret_cast<Vec<T, 4>*>(decode_out<T>(p, unit, head) + column) = result;
    } else {
      const long long row = static_cast<long long>(unit.seq) * p.num_heads + unit.group_begin + head;
      const long long at = row * p.max_chunks + unit.chunk;
      *reinterpret_cast<float4*>(p.partial_out + at * kHeadDim + column) = o;
      if (column == 0) *reinterpret_cast<float2*>(p.partial_stats + at * 2) = make_float2(maximum, sum);
    }
  }
}

// Returns true for blocks that have nothing (more) to do.
template <typename T, int kHeadDim>
__device__ __forceinline__ bool is_done(const AttentionDecodeParams& p, const DecodeUnit& unit) {
  if (unit.chunk >= unit.num_chunks) return true;
  if (unit.kv_len > 0) return false;
  for (int index = threadIdx.x; index < unit.num_group_heads * kHeadDim; index += blockDim.x) {
    decode_out<T>(p, unit, index / kHeadDim)[index % kHeadDim] = from_float<T>(0.0f);
  }
  return true;
}

// Returns the first key of a kv head (or the cache of the kv head).
template <typename T>
__device__ __forceinline__ const T* decode_keys(const void* base, const AttentionDecodeParams& p,
                                                const DecodeUnit& unit, long long seq_stride,
                                                long long token_stride, long long head_stride) {
  const T* keys = static_cast<const T*>(base) + unit.kv_head * head_stride;
  if (p.block_tables != nullptr) return keys;
  if (p.cu_seqlens_k != nullptr) return keys + unit.k_token * token_stride;
  return keys + unit.seq * seq_stride;
}

template <typename T, int kHeadDim, typename Stored, int kWarps, int kStages>
struct Decode {
  using Tile = CacheTile<T, kHeadDim, Stored>;  // of a warp
  using Rows = typename Tile::Rows;
  static constexpr int kKeys = Tile::kKeys, kTileBytes = Tile::kBytes;
  static_assert(kKeys == kDecodeTileKeys);
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;  // for each warp
  static constexpr int kSharedBytes = kWarps * kRingBytes;
  static constexpr int kDimSteps = kHeadDim / 16;
  static_assert(kSharedBytes >= kWarps * kGroupHeads * (kPartialStride<kHeadDim> + 2) * 4,
                "the merge reuses the ring");

  __device__ static void run(const AttentionDecodeParams& p) {
    const DecodeUnit unit = decode_unit(p);
    if (is_done<T, kHeadDim>(p, unit)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool is_paged = p.block_tables != nullptr;
    const Stored* k = decode_keys<Stored>(p.k, p, unit, p.k_seq_stride, p.k_token_stride, p.k_head_stride);
    const Stored* v = decode_keys<Stored>(p.v, p, unit, p.v_seq_stride, p.v_token_stride, p.v_head_stride);
    const int num_tiles = (unit.key_end - unit.key_begin + kKeys - 1) / kKeys;
    const int num_warp_tiles = (num_tiles - warp + kWarps - 1) / kWarps;  // tiles warp, warp + kWarps, ...
    const uint32_t ring = shared_address(decode_shared) + warp * kRingBytes;

    const auto load_tile = [&](int i, int stage) {
      const int key = unit.key_begin + (warp + i * kWarps) * kKeys;
      const uint32_t target = ring + stage * 2 * kTileBytes;
      const Stored *k_rows = k, *v_rows = v;
      int num_rows = unit.key_end - key;
      if (is_paged) {
        // 16 keys that start at a multiple of 16 lie in one block of the cache.
        const BlockRow at = block_row(p, unit.seq, key);
        k_rows += at.block * p.k_seq_stride + at.token * p.k_token_stride;
        v_rows += at.block * p.v_seq_stride + at.token * p.v_token_stride;
        if (!at.is_valid) num_rows = 0;
      } else {
        k_rows += key * p.k_token_stride;
        v_rows += key * p.v_token_stride;
      }
      constexpr int kTotal = kKeys * Rows::kChunks;
#pragma unroll
      for (int j = 0; j < (kTotal + 31) / 32; ++j) {
        const int row = (j * 32 + lane) / Rows::kChunks, chunk = (j * 32 + lane) % Rows::kChunks;
        if (kTotal % 32 != 0 && row >= kKeys) break;
        const uint32_t offset = target + Rows::offset(row, chunk);
        const int column = chunk * Tile::kChunkLen;
        cp_async_16(offset, k_rows + row * p.k_token_stride + column, row < num_rows);
        cp_async_16(offset + kTileBytes, v_rows + row * p.v_token_stride + column, row < num_rows);
      }
    };
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage < num_warp_tiles) load_tile(stage, stage);
      cp_async_commit();
    }

    // Q^T as B: lane holds head lane / 4, dims 2 (lane % 4) + {0, 1, 8, 9} of every 16, or those
    // that the tile wants.
    uint32_t q[kDimSteps][2];
    {
      const int head = lane >> 2;
      const T* row = static_cast<const T*>(p.q) + unit.q_row * p.q_seq_stride +
                     (unit.group_begin + head) * p.q_head_stride + (lane & 3) * (Tile::kIsFp8 ? 4 : 2);
#pragma unroll
      for (int step = 0; step < kDimSteps; ++step) {
        q[step][0] = q[step][1] = 0;
        if (head >= unit.num_group_heads) continue;
        if constexpr (Tile::kIsFp8) {
          Tile::order_query(*reinterpret_cast<const uint2*>(row + step * 16), q[step]);
        } else {
          q[step][0] = *reinterpret_cast<const uint32_t*>(row + step * 16);
          q[step][1] = *reinterpret_cast<const uint32_t*>(row + step * 16 + 8);
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

    int stage = 0;
    for (int i = 0; i < num_warp_tiles; ++i) {
      cp_async_wait<kStages - 1>();
      __syncwarp();
      const uint32_t k_base = ring + stage * 2 * kTileBytes, v_base = k_base + kTileBytes;
      // There are two sums, so that a product need not wait for the one before.
      float sums[2][4] = {}, s[4];
      Tile::add_scores(sums, k_base, k_offset, q);
      // Whether a key is before the end and not before the window is one comparison.
      const unsigned key = unit.key_begin - unit.first_key + (warp + i * kWarps) * kKeys + (lane >> 2);
      const unsigned num_seen = unit.key_end - unit.first_key;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[c] = key + (c >> 1) * 8 < num_seen ? (sums[0][c] + sums[1][c]) * scale : kMinusInfinity;
      }
      float shift[2];
      bool has_grown = false;
      float rescale[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float column_max = fmaxf(maximum[c], fmaxf(s[c], s[c + 2]));
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
          column_max = fmaxf(column_max, __shfl_xor_sync(kFullWarp, column_max, offset));
        }
        shift[c] = column_max == kMinusInfinity ? 0.0f : column_max;
        rescale[c] = exp2_approx(maximum[c] - shift[c]);
        has_grown = has_grown || column_max != maximum[c];
        maximum[c] = column_max;
      }
      if (__any_sync(kFullWarp, has_grown)) {
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
      const float e0 = exp2_approx(s[0] - shift[0]), e1 = exp2_approx(s[1] - shift[1]);
      const float e2 = exp2_approx(s[2] - shift[0]), e3 = exp2_approx(s[3] - shift[1]);
      sum[0] += e0 + e2;
      sum[1] += e1 + e3;
      const uint32_t b0 = transpose_8x8(pack_pair<typename Tile::Math>(e0, e1)), b1 = transpose_8x8(pack_pair<typename Tile::Math>(e2, e3));
      Tile::add_values(o, v_base, v_offset, b0, b1);
      __syncwarp();  // all lanes have read the stage that is loaded next
      if (i + kStages < num_warp_tiles) load_tile(i + kStages, stage);
      cp_async_commit();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) sum[c] += __shfl_xor_sync(kFullWarp, sum[c], offset);
    }

    __syncthreads();
    float* partial = reinterpret_cast<float*>(decode_shared);
    float* stats = partial + kWarps * kGroupHeads * kPartialStride<kHeadDim>;
    const int head = (lane & 3) * 2;
    float* mine = partial + (warp * kGroupHeads + head) * kPartialStride<kHeadDim>;
    Tile::store_sums(o, mine, kPartialStride<kHeadDim>, lane);
    if (lane < 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        stats[(warp * kGroupHeads + head + c) * 2] = maximum[c];
        stats[(warp * kGroupHeads + head + c) * 2 + 1] = sum[c];
      }
    }
    __syncthreads();
    merge_warps<T, kHeadDim, kWarps>(p, unit, partial, stats);
    if (unit.num_chunks > 1) combine_chunks<T, kHeadDim, kWarps * 32>(p, unit);
  }
};

// For f32: a warp takes keys one by one, and a lane takes the dims lane, lane + 32, ...; it is simple,
// and serves models in f32.
template <int kHeadDim, typename Stored>
struct DecodeF32 {
  static constexpr int kWarps = 4;
  static constexpr int kDims = (kHeadDim + 31) / 32;

  __device__ static void run(const AttentionDecodeParams& p) {
    __shared__ __align__(16) float partial[kWarps * kGroupHeads * kPartialStride<kHeadDim>];
    __shared__ float stats[kWarps * kGroupHeads * 2];
    const DecodeUnit unit = decode_unit(p);
    if (is_done<float, kHeadDim>(p, unit)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool is_paged = p.block_tables != nullptr;
    const Stored* k = decode_keys<Stored>(p.k, p, unit, p.k_seq_stride, p.k_token_stride, p.k_head_stride);
    const Stored* v = decode_keys<Stored>(p.v, p, unit, p.v_seq_stride, p.v_token_stride, p.v_head_stride);
    const float scale = p.scale * kLog2E;
    for (int head = 0; head < unit.num_group_heads; ++head) {
      const float* q_row = static_cast<const float*>(p.q) + unit.q_row * p.q_seq_stride +
                           (unit.group_begin + head) * p.q_head_stride;
      float q[kDims], o[kDims];
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        q[i] = lane + i * 32 < kHeadDim ? q_row[lane + i * 32] : 0.0f;
        o[i] = 0.0f;
      }
      float maximum = kMinusInfinity, sum = 0.0f;
#pragma unroll 2
      for (int key = max(unit.key_begin, unit.first_key) + warp; key < unit.key_end; key += kWarps) {
        BlockRow at = {0, key, true};
        if (is_paged) at = block_row(p, unit.seq, key);
        const long long token = at.token;
        const Stored* k_row = k + (is_paged ? at.block * p.k_seq_stride : 0) + token * p.k_token_stride;
        const Stored* v_row = v + (is_paged ? at.block * p.v_seq_stride : 0) + token * p.v_token_stride;
        float s = 0.0f, value[kDims];
#pragma unroll
        for (int i = 0; i < kDims; ++i) {
          const bool is_valid = at.is_valid && lane + i * 32 < kHeadDim;
          s += q[i] * (is_valid ? to_float(k_row[lane + i * 32]) : 0.0f);
          value[i] = is_valid ? to_float(v_row[lane + i * 32]) : 0.0f;
        }
        s = warp_reduce<Sum>(s) * scale;
        const float next = fmaxf(maximum, s);
        const float shift = next == kMinusInfinity ? 0.0f : next;
        const float rescale = exp2f(maximum - shift), weight = exp2f(s - shift);
        maximum = next;
        sum = sum * rescale + weight;
#pragma unroll
        for (int i = 0; i < kDims; ++i) o[i] = o[i] * rescale + weight * value[i];
      }
      float* mine = partial + (warp * kGroupHeads + head) * kPartialStride<kHeadDim> + lane;
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        if (lane + i * 32 < kHeadDim) mine[i * 32] = o[i];
      }
      if (lane == 0) {
        stats[(warp * kGroupHeads + head) * 2] = maximum;
        stats[(warp * kGroupHeads + head) * 2 + 1] = sum;
      }
    }
    __syncthreads();
    merge_warps<float, kHeadDim, kWarps>(p, unit, partial, stats);
    if (unit.num_chunks > 1) combine_chunks<float, kHeadDim, kWarps * 32>(p, unit);
  }
};

}  // namespace xserv

// STORED is the type T itself or Fp8, whose kernels are called ..._split_kv_fp8_...
#define XSERV_DECODE(suffix, T, name, STORED, head_dim, warps, stages, min_blocks)           \
  extern "C" __global__ void __launch_bounds__(warps * 32, min_blocks)                       \
      xserv_attention_split_kv_##name##d##head_dim##_##suffix(                               \
          const __grid_constant__ xserv::AttentionDecodeParams p) {                          \
    using Kernel = xserv::Decode<T, head_dim, STORED, warps, stages>;                        \
    static_assert(Kernel::kSharedBytes == xserv::shared_bytes::attention_split_kv_##name##d##head_dim); \
    Kernel::run(p);                                                                          \
  }
#define XSERV_DECODE_16(suffix, T)                     \
  XSERV_DECODE(suffix, T, , T, 64, 4, 4, 2)            \
  XSERV_DECODE(suffix, T, , T, 80, 4, 4, 2)            \
  XSERV_DECODE(suffix, T, , T, 96, 4, 3, 2)            \
  XSERV_DECODE(suffix, T, , T, 128, 4, 2, 3)           \
  XSERV_DECODE(suffix, T, , T, 256, 3, 2, 2)           \
  XSERV_DECODE(suffix, T, fp8_, xserv::Fp8, 64, 4, 8, 2)  \
  XSERV_DECODE(suffix, T, fp8_, xserv::Fp8, 80, 4, 8, 2)  \
  XSERV_DECODE(suffix, T, fp8_, xserv::Fp8, 96, 4, 6, 2)  \
  XSERV_DECODE(suffix, T, fp8_, xserv::Fp8, 128, 4, 4, 3) \
  XSERV_DECODE(suffix, T, fp8_, xserv::Fp8, 256, 3, 4, 2)
XSERV_DECODE_16(f16, __half)
XSERV_DECODE_16(bf16, __nv_bfloat16)

#define XSERV_DECODE_F32(head_dim)                                                                       \
  extern "C" __global__ void __launch_bounds__(128)                                                      \
      xserv_attention_split_kv_d##head_dim##_f32(const __grid_constant__ xserv::AttentionDecodeParams p) { \
    xserv::DecodeF32<head_dim, float>::run(p);                                                           \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(128) xserv_attention_split_kv_fp8_d##head_dim##_f32(       \
      const __grid_constant__ xserv::AttentionDecodeParams p) {                                          \
    xserv::DecodeF32<head_dim, xserv::Fp8>::run(p);                                                      \
  }
XSERV_FOR_HEAD_DIMS(XSERV_DECODE_F32)
