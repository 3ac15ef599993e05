// Attention without its scores in memory: softmax(scale * Q K^T + mask) V by online softmax.
//
//   q, out: [batch, num_heads, q_len, head_dim] by strides, or packed [num_tokens, num_heads, head_dim] with
//           cu_seqlens_q [num_seqs + 1]
//   k, v:   the same with num_kv_heads and cu_seqlens_k, or a cache [num_blocks, block_size, num_kv_heads,
//           head_dim] through block_tables [num_seqs, max_blocks_per_seq] with context_lens [num_seqs]
// Head h reads kv head h / (num_heads / num_kv_heads). Causal: query i sees keys 0 .. kv_len - q_len + i, of
// these the last p.window. A query that sees no key becomes zeros; a block id outside the cache reads as zero
// keys and is reported. The tiles of a block begin with that in which the window of its first query begins.
// The 16-bit forms with a window are compiled by themselves: the others have no registers left for it.
//
//   m' = max(m, max_j s_j);   p_j = 2^(s_j - m');
//   l' = 2^(m - m') l + sum_j p_j;   o' = 2^(m - m') o + sum_j p_j v_j
// with s in base 2 (scale * log2 e is folded into one FMA, never into the 16-bit q); p is rounded to T before
// the second product. Source: Dao 2023 (FlashAttention-2), algorithm 1; every tile and warp layout is ours.
//
// A block owns kWarps * 16 * kMTiles queries of one head and walks over tiles of kKeys keys; a warp
// owns whole rows, so that the softmax needs no shared memory. Two 16-row tiles per warp (kMTiles = 2)
// halve the shared memory reads of K and V per product: with one, ldmatrix and not mma.sync is the
// limit. cp.async fills the ring of K/V tiles kStages - 1 tiles ahead, with a single barrier per tile,
// so that warps drift apart and one warp's softmax overlaps another's products. o is rescaled for every
// tile: a test whether any maximum has grown costs more than the products that it saves.
//
// grid: (num_heads, tiles of queries, num_seqs); the longest tiles of a sequence start first. H200,
// bf16, head_dim 128, 32 heads over 8, causal: 342 TFLOP/s at 8192 tokens, 287 at 2048.
#include "ops/attention/attention.cuh"
#include "common/dtype.cuh"
#include "common/reduce.cuh"

extern __shared__ __align__(1024) unsigned char attention_shared[];

namespace xserv {

struct SequenceView {
  long long q_token, k_token;  // first token in a packed tensor, else 0
  int q_len, kv_len;
  bool packed_q, packed_k;
};

__device__ __forceinline__ SequenceView sequence_view(const AttentionParams& p, int seq) {
  SequenceView view = {0, 0, p.q_len, p.kv_len, p.cu_seqlens_q != nullptr, p.cu_seqlens_k != nullptr};
  if (view.packed_q) {
    const TokenRange range = token_range(p.cu_seqlens_q, seq, p.q_len);
    view.q_token = range.begin;
    view.q_len = range.len;
  }
  if (view.packed_k) {
    const TokenRange range = token_range(p.cu_seqlens_k, seq, p.kv_len);
    view.k_token = range.begin;
    view.kv_len = range.len;
  }
  if (p.block_tables != nullptr) view.kv_len = context_len(p, seq);
  return view;
}

template <typename T, int kHeadDim, int kWarps, int kMTiles, int kKeys, int kStages, bool kWindow>
struct Flash {
  using Rows = TileRows<kHeadDim>;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kQueries = kWarps * 16 * kMTiles;
  static constexpr int kQBytes = kQueries * Rows::kStride;
  static constexpr int kTileBytes = kKeys * Rows::kStride;
  static constexpr int kSharedBytes = kQBytes + kStages * 2 * kTileBytes;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimSteps = kHeadDim / 16;
  static constexpr int kDimTiles = kHeadDim / 8;

  using Scores = float[kMTiles][kKeyTiles][4];

  // Copies rows tile * kKeys .. of K and V of one kv head into a stage of the ring; rows past kv_len
  // become zeros (0 * NaN of an unused row would spoil the second product).
  __device__ __forceinline__ static void load_tile(const AttentionParams& p, const T* k, const T* v, int seq,
                                                   int kv_len, int tile, uint32_t target) {
    constexpr int kTotal = kKeys * Rows::kChunks;
    const int first = tile * kKeys;
    if (p.block_tables == nullptr && kThreads % Rows::kChunks == 0) {
      // Pointers advance row by row: the offsets of every row, kept over the whole loop, would not fit
      // the registers.
      constexpr int kStep = kThreads / Rows::kChunks;
      const int row = threadIdx.x / Rows::kChunks, chunk = threadIdx.x % Rows::kChunks;
      const T* k_row = k + static_cast<long long>(first + row) * p.k_token_stride + chunk * 8;
      const T* v_row = v + static_cast<long long>(first + row) * p.v_token_stride + chunk * 8;
#pragma unroll
      for (int i = 0; i < kKeys / kStep; ++i) {
        const uint32_t offset =
            target + (kStep % 8 == 0 ? Rows::offset(row, chunk) + i * kStep * Rows::kStride
                                     : Rows::offset(row + i * kStep, chunk));
        const bool is_valid = first + row + i * kStep < kv_len;
        cp_async_16(offset, k_row, is_valid);
        cp_async_16(offset + kTileBytes, v_row, is_valid);
        k_row += kStep * p.k_token_stride;
        v_row += kStep * p.v_token_stride;
      }
    } else if (p.block_tables == nullptr) {
#pragma unroll 2
      for (int index = threadIdx.x; index < kTotal; index += kThreads) {
        const int row = index / Rows::kChunks, chunk = index % Rows::kChunks;
        const long long key = first + row;
        const uint32_t offset = target + Rows::offset(row, chunk);
        const bool is_valid = key < kv_len;
        cp_async_16(offset, k + key * p.k_token_stride + chunk * 8, is_valid);
        cp_async_16(offset + kTileBytes, v + key * p.v_token_stride + chunk * 8, is_valid);
      }
    } else {
#pragma unroll 2
      for (int index = threadIdx.x; index < kTotal; index += kThreads) {
        const int row = index / Rows::kChunks, chunk = index % Rows::kChunks;
        const uint32_t offset = target + Rows::offset(row, chunk);
        BlockRow at = {0, 0, false};
        if (first + row < kv_len) at = block_row(p, seq, first + row);
        const T* k_row = k + at.block * p.k_batch_stride + at.token * p.k_token_stride + chunk * 8;
        const T* v_row = v + at.block * p.v_batch_stride + at.token * p.v_token_stride + chunk * 8;
        cp_async_16(offset, k_row, at.is_valid);
        cp_async_16(offset + kTileBytes, v_row, at.is_valid);
      }
    }
  }

  // One step of 16 dims of S += Q K^T.
  __device__ __forceinline__ static void score_step(Scores& s, uint32_t q_address, uint32_t k_address,
                                                    int step) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ldmatrix_x4(a[m], Rows::advance(q_address, step) + m * 16 * Rows::kStride);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, Rows::advance(k_address, step) + n * 8 * Rows::kStride);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        mma_m16n8k16<T>(s[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ static void clear(Scores& s) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
    }
  }

  __device__ static void run(const AttentionParams& p) {
    const int seq = blockIdx.z, head = blockIdx.x;
    const SequenceView view = sequence_view(p, seq);
    const int q_len = view.q_len, kv_len = view.kv_len;
    const int q_tile = (q_len + kQueries - 1) / kQueries - 1 - static_cast<int>(blockIdx.y);
    if (q_tile < 0) return;

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int kv_head = head / (p.num_heads / p.num_kv_heads);
    const int q_begin = q_tile * kQueries;
    const T* q = static_cast<const T*>(p.q) + head * p.q_head_stride +
                 (view.packed_q ? view.q_token * p.q_token_stride : seq * p.q_batch_stride);
    const long long kv_batch = p.block_tables != nullptr || view.packed_k ? 0 : seq;
    const T* k = static_cast<const T*>(p.k) + kv_batch * p.k_batch_stride + kv_head * p.k_head_stride +
                 view.k_token * p.k_token_stride;
    const T* v = static_cast<const T*>(p.v) + kv_batch * p.v_batch_stride + kv_head * p.v_head_stride +
                 view.k_token * p.v_token_stride;

    // The number of keys that the last query of this block sees.
    const int diagonal = p.causal ? kv_len - q_len : kv_len;
    const int last_query = min(q_begin + kQueries, q_len) - 1;
    const int num_keys = p.causal ? min(kv_len, diagonal + last_query + 1) : kv_len;
    const int num_tiles = num_keys > 0 ? (num_keys + kKeys - 1) / kKeys : 0;
    const int first_tile = kWindow ? window_begin(diagonal + q_begin + 1, p.window) / kKeys : 0;

    const uint32_t q_shared = shared_address(attention_shared);
    const uint32_t ring = q_shared + kQBytes;
    constexpr int kQTotal = kQueries * Rows::kChunks;
#pragma unroll 4
    for (int index = threadIdx.x; index < kQTotal; index += kThreads) {
      const int row = index / Rows::kChunks, chunk = index % Rows::kChunks;
      const long long query = q_begin + row;
      const T* source = q + query * p.q_token_stride + chunk * 8;
      cp_async_16(q_shared + Rows::offset(row, chunk), source, query < q_len);
    }
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (first_tile + stage < num_tiles) {
        load_tile(p, k, v, seq, kv_len, first_tile + stage, ring + stage * 2 * kTileBytes);
      }
      cp_async_commit();
    }

    // Fragment addresses; see the PTX ISA for which lane names which row of which 8x8 matrix.
    uint32_t q_address = q_shared + Rows::offset(warp * 16 * kMTiles + (lane & 15), lane >> 4);
    const uint32_t k_offset = Rows::offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    const uint32_t v_offset = Rows::offset(lane & 15, lane >> 4);

    float scale = p.scale * kLog2E;
    if (scale < 0.0f) {
      // The maximum of scale * s is looked for in s: only a positive scale keeps the order, so the sign
      // of Q is changed where the scale is negative.
      scale = -scale;
      cp_async_wait<0>();
      __syncthreads();
      uint32_t* words = reinterpret_cast<uint32_t*>(attention_shared);
      for (int i = threadIdx.x; i < kQBytes / 4; i += kThreads) words[i] ^= 0x80008000u;
    }

    float o[kMTiles][kDimTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
    }
    float maximum[kMTiles][2], sum[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      maximum[m][0] = maximum[m][1] = kMinusInfinity;
      sum[m][0] = sum[m][1] = 0.0f;
    }

    const int warp_query = q_begin + warp * 16 * kMTiles;
    // Tiles whose last key is seen by the warp's first query need no mask.
    const int unmasked_keys = p.causal ? min(kv_len, diagonal + warp_query + 1) : kv_len;
    const int warp_keys = p.causal ? diagonal + warp_query + 16 * kMTiles : kv_len;

    Scores s;
    int stage = 0;
    for (int tile = first_tile; tile < num_tiles; ++tile) {
      // Every warp is also done with the tile before, whose stage the next load overwrites.
      cp_async_wait<kStages - 2>();
      __syncthreads();
      {
        const int next = tile + kStages - 1;
        const int next_stage = stage == 0 ? kStages - 1 : stage - 1;
        if (next < num_tiles) load_tile(p, k, v, seq, kv_len, next, ring + next_stage * 2 * kTileBytes);
        cp_async_commit();
      }
      const uint32_t k_base = ring + stage * 2 * kTileBytes, v_base = k_base + kTileBytes;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      asm volatile("" : "+r"(q_address));  // else all its variants are kept over the loop

      // On the diagonal the block's last tiles may be past every key of this warp's rows.
      if (tile * kKeys >= warp_keys) continue;
      clear(s);
#pragma unroll
      for (int step = 0; step < kDimSteps; ++step) score_step(s, q_address, k_base + k_offset, step);

      const int key_begin = tile * kKeys;
      // The window of the warp's last row begins last; it is counted back from the end of its keys.
      if (key_begin + kKeys > unmasked_keys || (kWindow && key_begin + p.window < warp_keys)) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if constexpr (kWindow) {
              const int end = warp_keys - 16 * kMTiles + m * 16 + r * 8 + (lane >> 2) + 1;
              const int begin = end - p.window;
              // Whether a key is before the end and not before the window is one comparison.
              const unsigned num_seen = max(min(kv_len, end) - begin, 0);
#pragma unroll
              for (int n = 0; n < kKeyTiles; ++n) {
                const unsigned key = key_begin - begin + n * 8 + (lane & 3) * 2;
                if (key >= num_seen) s[m][n][r * 2] = kMinusInfinity;
                if (key + 1 >= num_seen) s[m][n][r * 2 + 1] = kMinusInfinity;
              }
              continue;
            }
            const int query = warp_query + m * 16 + r * 8 + (lane >> 2);
            const int visible = p.causal ? min(kv_len, diagonal + query + 1) : kv_len;
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
              const int key = key_begin + n * 8 + (lane & 3) * 2;
              if (key >= visible) s[m][n][r * 2] = kMinusInfinity;
              if (key + 1 >= visible) s[m][n][r * 2 + 1] = kMinusInfinity;
            }
          }
        }
      }

      float shift[kMTiles][2];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float row_max = maximum[m][r];
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            row_max = fmaxf(row_max, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
          }
          row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 1));
          row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
          // A row of nothing but -inf must give zeros, not -inf - -inf.
          shift[m][r] = row_max == kMinusInfinity ? 0.0f : row_max * scale;
          // The factor is exactly 1 where the maximum stays, which the FMA would not give: a tile that
          // a row does not see, but that is computed for the rows beside it, must not change the row's
          // bits. Nor must the row's place in the tile: without the explicit roundings the compiler
          // fuses the sums of some rows and not of others.
          const float rescale =
              maximum[m][r] == row_max ? 1.0f : exp2_approx(__fmaf_rn(maximum[m][r], scale, -shift[m][r]));
          maximum[m][r] = row_max;
          sum[m][r] = __fmul_rn(sum[m][r], rescale);
#pragma unroll
          for (int n = 0; n < kDimTiles; ++n) {
            o[m][n][r * 2] *= rescale;
            o[m][n][r * 2 + 1] *= rescale;
          }
        }
      }

      uint32_t weights[kMTiles][kKeyTiles][2];
      const auto exponentials = [&](int m, int n) {
        const float e0 = exp2_approx(fmaf(s[m][n][0], scale, -shift[m][0]));
        const float e1 = exp2_approx(fmaf(s[m][n][1], scale, -shift[m][0]));
        const float e2 = exp2_approx(fmaf(s[m][n][2], scale, -shift[m][1]));
        const float e3 = exp2_approx(fmaf(s[m][n][3], scale, -shift[m][1]));
        sum[m][0] += e0 + e1;
        sum[m][1] += e2 + e3;
        weights[m][n][0] = pack_pair<T>(e0, e1);
        weights[m][n][1] = pack_pair<T>(e2, e3);
      };
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        // The loop takes 16 keys at a time, so that the next keys' exponentials run under these
        // products.
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          exponentials(m, 2 * j);
          exponentials(m, 2 * j + 1);
        }
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, Rows::advance(v_base + v_offset, n / 2) + j * 16 * Rows::kStride);
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            const uint32_t a[4] = {weights[m][2 * j][0], weights[m][2 * j][1], weights[m][2 * j + 1][0],
                                   weights[m][2 * j + 1][1]};
            mma_m16n8k16<T>(o[m][n], a, b[0], b[1]);
            mma_m16n8k16<T>(o[m][n + 1], a, b[2], b[3]);
          }
        }
      }
    }

    // The rows go through shared memory for 16-byte stores; a warp overwrites only its own rows of Q.
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float row_sum = sum[m][r];
        row_sum += __shfl_xor_sync(kFullWarp, row_sum, 1);
        row_sum += __shfl_xor_sync(kFullWarp, row_sum, 2);
        const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
        const int row = warp * 16 * kMTiles + m * 16 + r * 8 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
          const uint32_t pair = pack_pair<T>(o[m][n][r * 2] * inverse, o[m][n][r * 2 + 1] * inverse);
          *reinterpret_cast<uint32_t*>(attention_shared + Rows::offset(row, n) + (lane & 3) * 4) = pair;
        }
      }
    }
    __syncwarp();
    // The range is read again: kept over the loop, the address would cost registers.
    const long long first = p.cu_seqlens_q != nullptr
                                ? token_range(p.cu_seqlens_q, seq, p.q_len).begin * p.o_token_stride
                                : seq * p.o_batch_stride;
    T* out = static_cast<T*>(p.out) + first + head * p.o_head_stride;
#pragma unroll 4
    for (int index = lane; index < 16 * kMTiles * Rows::kChunks; index += 32) {
      const int row = warp * 16 * kMTiles + index / Rows::kChunks, chunk = index % Rows::kChunks;
      const long long query = q_begin + row;
      if (query < q_len) {
        *reinterpret_cast<uint4*>(out + query * p.o_token_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(attention_shared + Rows::offset(row, chunk));
      }
    }
  }
};

// The f32 form, without tensor cores: it takes 32 queries against tiles of 32 keys (16 where head_dim
// is 256, for shared memory); a thread computes 2 x kKeys / 8 scores and 2 rows x head_dim / 8 outputs.
// T is always float.
template <int kHeadDim>
struct FlashF32 {
  static constexpr int kThreads = 128, kQueries = 32;
  static constexpr int kKeys = kHeadDim > 128 ? 16 : 32;
  static constexpr int kStride = kHeadDim + 4;
  static constexpr int kKeysPerThread = kKeys / 8;
  static constexpr int kVectors = kHeadDim / 4;
  static constexpr int kOutVectors = (kVectors + 7) / 8;
  static constexpr int kSharedBytes = ((kQueries + 2 * kKeys) * kStride + kQueries * (kKeys + 1)) * 4;

  __device__ static void run(const AttentionParams& p) {
    float* q_tile = reinterpret_cast<float*>(attention_shared);
    float* k_tile = q_tile + kQueries * kStride;
    float* v_tile = k_tile + kKeys * kStride;
    float* w_tile = v_tile + kKeys * kStride;  // [kQueries][kKeys + 1]
    const int seq = blockIdx.z, head = blockIdx.x;
    const SequenceView view = sequence_view(p, seq);
    const int q_len = view.q_len, kv_len = view.kv_len;
    const int q_tile_index = (q_len + kQueries - 1) / kQueries - 1 - static_cast<int>(blockIdx.y);
    if (q_tile_index < 0) return;
    const int kv_head = head / (p.num_heads / p.num_kv_heads);
    const int q_begin = q_tile_index * kQueries;
    const float* q = static_cast<const float*>(p.q) + head * p.q_head_stride +
                     (view.packed_q ? view.q_token * p.q_token_stride : seq * p.q_batch_stride);
    const long long kv_batch = p.block_tables != nullptr || view.packed_k ? 0 : seq;
    const float* k = static_cast<const float*>(p.k) + kv_batch * p.k_batch_stride +
                     kv_head * p.k_head_stride + view.k_token * p.k_token_stride;
    const float* v = static_cast<const float*>(p.v) + kv_batch * p.v_batch_stride +
                     kv_head * p.v_head_stride + view.k_token * p.v_token_stride;
    float* out = static_cast<float*>(p.out) + head * p.o_head_stride +
                 (view.packed_q ? view.q_token * p.o_token_stride : seq * p.o_batch_stride);
    const int diagonal = p.causal ? kv_len - q_len : kv_len;
    const int last_query = min(q_begin + kQueries, q_len) - 1;
    const int num_keys = p.causal ? min(kv_len, diagonal + last_query + 1) : kv_len;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    for (int index = threadIdx.x; index < kQueries * kVectors; index += kThreads) {
      const int row = index / kVectors, column = index % kVectors * 4;
      const long long query = q_begin + row;
      *reinterpret_cast<float4*>(q_tile + row * kStride + column) =
          query < q_len ? *reinterpret_cast<const float4*>(q + query * p.q_token_stride + column) : zero;
    }

    const int x = threadIdx.x & 7, y = threadIdx.x >> 3;  // rows y and y + 16
    const float scale = p.scale * kLog2E;
    float maximum[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
    float4 o[2][kOutVectors];
#pragma unroll
    for (int i = 0; i < kOutVectors; ++i) o[0][i] = o[1][i] = zero;

    const int first_key = p.causal ? window_begin(diagonal + q_begin + 1, p.window) / kKeys * kKeys : 0;
    for (int key_begin = first_key; key_begin < num_keys; key_begin += kKeys) {
      __syncthreads();
      for (int index = threadIdx.x; index < kKeys * kVectors; index += kThreads) {
        const int row = index / kVectors, column = index % kVectors * 4;
        const long long key = key_begin + row;
        float4 k_value = zero, v_value = zero;
        if (key < kv_len) {
          BlockRow at = {0, static_cast<int>(key), true};
          if (p.block_tables != nullptr) at = block_row(p, seq, static_cast<int>(key));
          const long long token = at.token;
          if (at.is_valid) {
            const float* k_row = k + at.block * p.k_batch_stride + token * p.k_token_stride;
            const float* v_row = v + at.block * p.v_batch_stride + token * p.v_token_stride;
            k_value = *reinterpret_cast<const float4*>(k_row + column);
            v_value = *reinterpret_cast<const float4*>(v_row + column);
          }
        }
        *reinterpret_cast<float4*>(k_tile + row * kStride + column) = k_value;
        *reinterpret_cast<float4*>(v_tile + row * kStride + column) = v_value;
      }
      __syncthreads();

      float s[2][kKeysPerThread] = {};
#pragma unroll 4
      for (int d = 0; d < kHeadDim; d += 4) {
        const float4 a0 = *reinterpret_cast<const float4*>(q_tile + y * kStride + d);
        const float4 a1 = *reinterpret_cast<const float4*>(q_tile + (y + 16) * kStride + d);
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
          const float4 b = *reinterpret_cast<const float4*>(k_tile + (x + i * 8) * kStride + d);
          s[0][i] += a0.x * b.x + a0.y * b.y + a0.z * b.z + a0.w * b.w;
          s[1][i] += a1.x * b.x + a1.y * b.y + a1.z * b.z + a1.w * b.w;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = q_begin + y + r * 16;
        const int end = p.causal ? diagonal + query + 1 : kv_len;
        const int first = window_begin(end, p.window);
        // Whether a key is before the end and not before the window is one comparison.
        const unsigned num_seen = max(min(kv_len, end) - first, 0);
        const unsigned key = key_begin + x - first;
        float row_max = maximum[r];
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
          s[r][i] = key + i * 8 < num_seen ? __fmul_rn(s[r][i], scale) : kMinusInfinity;
          row_max = fmaxf(row_max, s[r][i]);
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset <<= 1) {
          row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, offset));
        }
        const float shift = row_max == kMinusInfinity ? 0.0f : row_max;
        const float rescale = exp2f(maximum[r] - shift);
        maximum[r] = row_max;
        sum[r] = __fmul_rn(sum[r], rescale);
#pragma unroll
        for (int i = 0; i < kKeysPerThread; ++i) {
          const float weight = exp2f(s[r][i] - shift);
          sum[r] += weight;
          w_tile[(y + r * 16) * (kKeys + 1) + x + i * 8] = weight;
        }
#pragma unroll
        for (int i = 0; i < kOutVectors; ++i) {
          o[r][i].x = __fmul_rn(o[r][i].x, rescale);
          o[r][i].y = __fmul_rn(o[r][i].y, rescale);
          o[r][i].z = __fmul_rn(o[r][i].z, rescale);
          o[r][i].w = __fmul_rn(o[r][i].w, rescale);
        }
      }
      __syncwarp();  // a row's weights are written and read by the same 8 lanes
#pragma unroll 4
      for (int key = 0; key < kKeys; ++key) {
        const float w0 = w_tile[y * (kKeys + 1) + key], w1 = w_tile[(y + 16) * (kKeys + 1) + key];
#pragma unroll
        for (int i = 0; i < kOutVectors; ++i) {
          const int column = (x + i * 8) * 4;
          if (kVectors % 8 != 0 && column >= kHeadDim) continue;
          const float4 b = *reinterpret_cast<const float4*>(v_tile + key * kStride + column);
          o[0][i].x += w0 * b.x;
          o[0][i].y += w0 * b.y;
          o[0][i].z += w0 * b.z;
          o[0][i].w += w0 * b.w;
          o[1][i].x += w1 * b.x;
          o[1][i].y += w1 * b.y;
          o[1][i].z += w1 * b.z;
          o[1][i].w += w1 * b.w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int offset = 1; offset < 8; offset <<= 1) sum[r] += __shfl_xor_sync(kFullWarp, sum[r], offset);
      const float inverse = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
      const long long query = q_begin + y + r * 16;
      if (query >= q_len) continue;
#pragma unroll
      for (int i = 0; i < kOutVectors; ++i) {
        const int column = (x + i * 8) * 4;
        if (kVectors % 8 != 0 && column >= kHeadDim) continue;
        *reinterpret_cast<float4*>(out + query * p.o_token_stride + column) =
            make_float4(o[r][i].x * inverse, o[r][i].y * inverse, o[r][i].z * inverse, o[r][i].w * inverse);
      }
    }
  }
};

}  // namespace xserv

// min_blocks per multiprocessor bounds the registers: 255 where it is 2 and a block has 128 threads.
// The short forms have half the queries per block, for launches that would not fill the device
// otherwise.
#define XSERV_FLASH_FORM(variant, window, suffix, T, head_dim, warps, m_tiles, keys, stages, min_blocks, has_window) \
  extern "C" __global__ void __launch_bounds__(warps * 32, min_blocks)                                               \
      xserv_attention_flash_##variant##window##_##suffix(const __grid_constant__ xserv::AttentionParams p) {         \
    using Kernel = xserv::Flash<T, head_dim, warps, m_tiles, keys, stages, has_window>;                              \
    static_assert(Kernel::kSharedBytes == xserv::shared_bytes::attention_flash_##variant);                           \
    Kernel::run(p);                                                                                                  \
  }
#define XSERV_FLASH(variant, suffix, T, head_dim, warps, m_tiles, keys, stages, min_blocks)                       \
  XSERV_FLASH_FORM(variant, , suffix, T, head_dim, warps, m_tiles, keys, stages, min_blocks, false)               \
  XSERV_FLASH_FORM(variant, _window, suffix, T, head_dim, warps, m_tiles, keys, stages, min_blocks, true)
#define XSERV_FLASH_16(suffix, T)                         \
  XSERV_FLASH(d64, suffix, T, 64, 4, 2, 64, 2, 2)         \
  XSERV_FLASH(d64_short, suffix, T, 64, 4, 1, 64, 2, 3)   \
  XSERV_FLASH(d80, suffix, T, 80, 4, 2, 64, 2, 2)         \
  XSERV_FLASH(d96, suffix, T, 96, 4, 2, 64, 2, 2)         \
  XSERV_FLASH(d128, suffix, T, 128, 4, 2, 64, 2, 2)       \
  XSERV_FLASH(d128_short, suffix, T, 128, 4, 1, 64, 2, 2) \
  XSERV_FLASH(d256, suffix, T, 256, 4, 1, 32, 2, 2)
XSERV_FLASH_16(f16, __half)
XSERV_FLASH_16(bf16, __nv_bfloat16)

#define XSERV_FLASH_F32(head_dim)                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                               \
      xserv_attention_flash_d##head_dim##_f32(const __grid_constant__ xserv::AttentionParams p) { \
    using Kernel = xserv::FlashF32<head_dim>;                                                     \
    static_assert(Kernel::kSharedBytes == xserv::shared_bytes::attention_flash_d##head_dim##_f32); \
    Kernel::run(p);                                                                               \
  }
XSERV_FOR_HEAD_DIMS(XSERV_FLASH_F32)
