// How the sums of a tile of prefill.cu become results: they are rounded, gated, or normalised and
// rotated as heads, and written 16 tokens of a warp at a time through shared memory, so that whole
// lines are written.
#pragma once

#include <type_traits>

#include "common/dtype.cuh"
#include "common/fault.cuh"
#include "common/layouts.cuh"
#include "common/pairs.cuh"
#include "common/reduce.cuh"
#include "common/tma.cuh"

namespace xserv {

struct PrefillParams {
  TensorMap weight;
  TensorMap x;
  void* out;
  int64_t ldo;  // elements from token to token of out
  int num_tokens;
  int n;  // columns of out
  int k;
  int padding[7];
};
XSERV_LAYOUT_PrefillParams;

// The operands for the heads of q, k and v; see qk_norm_rope_append.cu.
struct PrefillHeadsParams {
  PrefillParams gemm;  // out: [num_tokens, ldo]; only the queries are written there
  const void* q_norm;      // [128]; null, with k_norm: heads are not normalised
  const void* k_norm;      // [128]
  const void* cos;         // [max_position, 64]
  const void* sin;         // [max_position, 64]
  const int* positions;    // [num_tokens]
  const unsigned* slots;   // [num_tokens]
  void* k_cache;           // [num_slots, num_kv_heads, 128]
  void* v_cache;
  const void* bias;        // [num_heads + 2 num_kv_heads, 128], or null; only without norms
  FaultRecord* fault;
  int64_t num_slots;
  int num_heads;
  int num_kv_heads;
  int max_position;
  float eps;
  int padding[6];
};
XSERV_LAYOUT_PrefillHeadsParams;

enum class Epilogue { kPlain, kSwiglu, kHeads };

constexpr uint32_t kStagingBytes = 16 * 128;  // for each warp

// Stores four 8x8 matrices of 16-bit elements; lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Returns the two packed columns of out that a thread has in 8 (swiglu: 16) columns of sums, in its
// first row (kHalf = 0) or 8 rows further. `sums` has the columns lane % 4 * 2 and the next, 4 values
// for each 8 columns.
template <typename T, Epilogue kEpilogue, int kHalf>
__device__ __forceinline__ uint32_t finished(const float* sums) {
  if constexpr (kEpilogue == Epilogue::kSwiglu) {
    return gated<T>(sums[kHalf * 2], sums[kHalf * 2 + 1], sums[4 + kHalf * 2], sums[5 + kHalf * 2]);
  } else {
    return pack_pair<T>(sums[kHalf * 2], sums[kHalf * 2 + 1]);
  }
}

// Writes 16 tokens of a warp, starting at `token` and at column `column` of out.
template <typename T, Epilogue kEpilogue, int kTileN>
struct RowWriter {
  static constexpr int kPerColumn = kEpilogue == Epilogue::kSwiglu ? 2 : 1;
  // Columns of out that pass through the staging area at a time.
  static constexpr int kColumns = kTileN / kPerColumn % 64 == 0 ? 64 : 32;
  static constexpr int kRounds = kTileN / kPerColumn / kColumns;
  static constexpr int kChunks = kColumns / 8, kRowsPerPass = 32 / kChunks, kPasses = 16 / kRowsPerPass;
  static_assert(kTileN % (kColumns * kPerColumn) == 0);

  const PrefillParams& p;
  uint32_t staging;
  T* out;
  int num_rows;  // the rows that exist, counted from this lane's first
  int column;

  __device__ __forceinline__ RowWriter(const PrefillParams& params, uint32_t staging_area, int token,
                                       int first_column)
      : p(params), staging(staging_area) {
    const int lane = threadIdx.x & 31, row = token + lane / kChunks;
    column = first_column + lane % kChunks * 8;
    num_rows = p.num_tokens - row;
    out = static_cast<T*>(p.out) + row * p.ldo + column;
  }

  __device__ __forceinline__ bool exists(int round, int pass) const {
    return pass * kRowsPerPass < num_rows && column + round * kColumns < p.n;
  }
  __device__ __forceinline__ T* place(int round, int pass) const {
    return out + pass * kRowsPerPass * p.ldo + round * kColumns;
  }
  // Rows of the staging area are swizzled, so that 8 rows of a column of chunks lie in different banks.
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return kChunks == 8 ? row * 128 + ((chunk ^ row) & 7) * 16 : row * 64 + ((chunk ^ row >> 1) & 3) * 16;
  }

  // Writes the sums to the staging area; after that they are no longer needed.
  __device__ __forceinline__ static void stage(uint32_t staging, const float* sums) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int block = 0; block < kChunks; block += 2) {
      const float* low = sums + block * 4 * kPerColumn;
      const float* high = low + 4 * kPerColumn;
      const uint32_t packed[4] = {finished<T, kEpilogue, 0>(low), finished<T, kEpilogue, 1>(low),
                                  finished<T, kEpilogue, 0>(high), finished<T, kEpilogue, 1>(high)};
      stmatrix_x4(staging + offset(lane & 15, block + (lane >> 4)), packed);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(int round) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4 v = load_shared(staging + offset(pass * kRowsPerPass + lane / kChunks, lane % kChunks));
      if (exists(round, pass)) *reinterpret_cast<uint4*>(place(round, pass)) = v;
    }
    __syncwarp();
  }
};

// Normalises and rotates a head of 16 tokens of a warp and writes it to its place.
template <typename T>
struct HeadWriter {
  static constexpr int kDim = 128;
  const PrefillHeadsParams& h;
  int row;      // the first of the four rows, four apart, that this lane stores
  int sum_row;  // the first row of this lane's sums; the other is 8 further
  bool is_valid[2];
  uint32_t cos[2][8], sin[2][8];
  uint32_t operand[16];  // of the columns of the head: the norm's weight, or the bias
  unsigned slots[4];

  __device__ __forceinline__ explicit HeadWriter(const PrefillHeadsParams& params) : h(params) {}

  __device__ __forceinline__ bool is_query(int head) const { return head < h.num_heads; }
  __device__ __forceinline__ bool is_value(int head) const { return head >= h.num_heads + h.num_kv_heads; }

  // Begins to read what belongs to the tokens starting at `token`; no kernel writes it.
  __device__ __forceinline__ void load(int token, int head) {
    const int lane = threadIdx.x & 31, num_tokens = h.gemm.num_tokens;
    row = token + lane / 8, sum_row = token + lane / 4;
    const int last_head = h.num_heads + 2 * h.num_kv_heads - 1;
    const T* source = h.bias != nullptr ? static_cast<const T*>(h.bias) + min(head, last_head) * kDim
                                        : static_cast<const T*>(is_query(head) ? h.q_norm : h.k_norm);
    if (source != nullptr) {
#pragma unroll
      for (int i = 0; i < 16; ++i) operand[i] = *reinterpret_cast<const uint32_t*>(source + lane % 4 * 2 + i * 8);
    }
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      slots[pass] = row + pass * 4 < num_tokens ? h.slots[row + pass * 4] : 0;
    }
    int positions[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) positions[r] = sum_row + r * 8 < num_tokens ? h.positions[sum_row + r * 8] : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      is_valid[r] = positions[r] >= 0 && positions[r] < h.max_position;
      const int64_t first = is_valid[r] ? positions[r] * int64_t{kDim / 2} + lane % 4 * 2 : lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        cos[r][i] = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(h.cos) + first + i * 8);
        sin[r][i] = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(h.sin) + first + i * 8);
      }
    }
  }

  // sums: those of the 128 columns of a head.
  __device__ __forceinline__ void write(uint32_t staging, const float* sums, int head) const {
    using P = Pairs<T>;
    const int lane = threadIdx.x & 31, num_tokens = h.gemm.num_tokens;
    if (head >= h.num_heads + 2 * h.num_kv_heads) return;
    uint32_t packed[2][16];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float2 sum = make_float2(sums[i * 4 + r * 2], sums[i * 4 + r * 2 + 1]);
        if (h.bias != nullptr) {
          const float2 bias = P::floats(operand[i]);
          sum.x += bias.x;
          sum.y += bias.y;
        }
        packed[r][i] = pack_pair<T>(sum.x, sum.y);
      }
    }
    if (!is_value(head)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float2 v = P::floats(packed[r][i]);
          even += v.x * v.x;
          odd += v.y * v.y;
        }
        float total = even + odd;
        total += __shfl_xor_sync(kFullWarp, total, 1);
        total += __shfl_xor_sync(kFullWarp, total, 2);
        const float scale = rsqrtf(total / kDim + h.eps);
        if (head == 0 && lane % 4 == 0 && !is_valid[r]) {
          report_fault(h.fault, kFaultPosition, sum_row + r * 8, h.positions[sum_row + r * 8]);
        }
        if (h.q_norm != nullptr) {
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const float2 v = P::floats(packed[r][i]);
            packed[r][i] = P::multiply(pack_pair<T>(v.x * scale, v.y * scale), operand[i]);
          }
        }
        if (is_valid[r]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const uint32_t left = packed[r][i], right = packed[r][i + 8], c = cos[r][i], s = sin[r][i];
            packed[r][i] = P::subtract(P::multiply(left, c), P::multiply(right, s));
            packed[r][i + 8] = P::add(P::multiply(right, c), P::multiply(left, s));
          }
        }
      }
    }
    using Writer = RowWriter<T, Epilogue::kPlain, kDim>;
    const int kv_head = head - h.num_heads - (is_value(head) ? h.num_kv_heads : 0);
    T* cache = static_cast<T*>(is_value(head) ? h.v_cache : h.k_cache) + kv_head * kDim + lane % 8 * 8;
    T* queries = static_cast<T*>(h.gemm.out) + head * kDim + lane % 8 * 8;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int first = round * 8 + i;
        const uint32_t matrices[4] = {packed[0][first], packed[1][first], packed[0][first + 1],
                                      packed[1][first + 1]};
        stmatrix_x4(staging + Writer::offset(lane & 15, i + (lane >> 4)), matrices);
      }
      __syncwarp();
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const uint4 v = load_shared(staging + Writer::offset(pass * 4 + lane / 8, lane % 8));
        const int token = row + pass * 4;
        if (token >= num_tokens) continue;
        if (is_query(head)) {
          *reinterpret_cast<uint4*>(queries + token * h.gemm.ldo + round * 64) = v;
        } else if (slots[pass] < h.num_slots) {
          T* target = cache + static_cast<int64_t>(slots[pass]) * h.num_kv_heads * kDim;
          *reinterpret_cast<uint4*>(target + round * 64) = v;
        } else if (round == 0 && lane % 8 == 0) {
          report_fault(h.fault, kFaultBlock, token, slots[pass]);
        }
      }
      __syncwarp();
    }
  }
};

}  // namespace xserv
