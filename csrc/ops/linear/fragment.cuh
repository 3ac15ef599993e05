// What linear layers do with sums whose rows are those of the weight and whose columns are tokens, as
// the fragments of tensor cores hold them:
//   out[t, i] = round(sum + bias[i])                                         plain
//   out[t, i] = round(out[t, i] + round(sum))                                residual
//   out[t, i] = round(round(silu(round(gate[t, i]))) * round(up[t, i]))      swiglu
// where round() is to T and silu(g) = g / (1 + e^-g). The quotient and the exponential are exact,
// as in the kernel that computes the activation by itself, or approximate where a kernel says so: a
// prompt's product takes a fifth less time then. With swiglu the rows lane / 4 of a fragment are
// those of the gate, and the rows 8 further those of up.
#pragma once

#include "common/dtype.cuh"
#include "common/mma.cuh"
#include "common/pairs.cuh"

namespace xserv {

enum class Epilogue { kPlain, kResidual, kSwiglu };

// Transposes the 8x8 matrix whose row lane / 4 has `pair` at columns lane % 4 * 2.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

// Columns of a token's results, two at a time. Where rows of out have an odd number of columns,
// they are stored one by one.
template <typename T>
struct ColumnPairs {
  T* out;
  int num_columns;  // how many columns exist from the first on; 0 or less: none
  bool are_pairs;   // whether columns exist two at a time, and begin at multiples of two elements

  // Two columns from `first` on.
  __device__ __forceinline__ uint32_t load_pair(int first) const {
    uint32_t pair = 0;
    if (are_pairs) {
      if (num_columns > first) pair = *reinterpret_cast<const uint32_t*>(out + first);
    } else {
      const uint16_t* columns = reinterpret_cast<const uint16_t*>(out + first);
      if (num_columns > first) pair = columns[0];
      if (num_columns > first + 1) pair |= static_cast<uint32_t>(columns[1]) << 16;
    }
    return pair;
  }
  __device__ __forceinline__ void store_pair(int first, uint32_t pair) const {
    if (are_pairs) {
      if (num_columns > first) *reinterpret_cast<uint32_t*>(out + first) = pair;
    } else {
      uint16_t* columns = reinterpret_cast<uint16_t*>(out + first);
      if (num_columns > first) columns[0] = static_cast<uint16_t>(pair);
      if (num_columns > first + 1) columns[1] = static_cast<uint16_t>(pair >> 16);
    }
  }

  __device__ __forceinline__ static uint32_t add(uint32_t old, uint32_t value) {
    const Vec<T, 2> a = reinterpret_cast<const Vec<T, 2>&>(old);
    const Vec<T, 2> b = reinterpret_cast<const Vec<T, 2>&>(value);
    return pack_pair<T>(to_float(a[0]) + to_float(b[0]), to_float(a[1]) + to_float(b[1]));
  }

  __device__ __forceinline__ static float exactly_gated(float gate, float up) {
    const float g = rounded<T>(gate);
    return rounded<T>(g / (1.0f + expf(-g))) * rounded<T>(up);
  }
};

// Where a lane's part of a fragment of D^T (16 rows, 8 tokens) goes: after the transposition a lane has
// one token and two neighbouring columns; for plain and residual also the two columns 8 further.
template <typename T, Epilogue kEpilogue, bool kIsExact = true>
struct Fragment : ColumnPairs<T> {
  using ColumnPairs<T>::out;
  using ColumnPairs<T>::num_columns;
  using ColumnPairs<T>::are_pairs;
  using ColumnPairs<T>::load_pair;
  using ColumnPairs<T>::store_pair;
  using ColumnPairs<T>::add;

  const T* bias;    // that of row lane / 4, or null
  int num_biases;   // how many of the rows lane / 4 and lane / 4 + 8 exist

  // Of the tile that begins at row tile_row, row `row`. Params are those of the kernel: out, ldo, bias,
  // num_tokens, n and tile_rows.
  template <typename Params>
  __device__ __forceinline__ Fragment(const Params& p, int tile_row, int row, int token) {
    const int lane = threadIdx.x & 31;
    constexpr int kRowsOfColumn = kEpilogue == Epilogue::kSwiglu ? 2 : 1;
    const int end = min(p.n, (tile_row + p.tile_rows) / kRowsOfColumn);
    row += tile_row;
    const int column = row / kRowsOfColumn + (lane & 3) * 2;
    token += lane >> 2;
    out = static_cast<T*>(p.out) + token * p.ldo + column;
    num_columns = token < p.num_tokens ? end - column : 0;
    are_pairs = ((p.n | p.ldo) & 1) == 0;
    row += lane >> 2;
    bias = kEpilogue == Epilogue::kPlain && p.bias != nullptr ? static_cast<const T*>(p.bias) + row : nullptr;
    num_biases = (row < p.n) + (row + 8 < p.n);
  }

  __device__ __forceinline__ uint2 load() const {
    uint2 old = make_uint2(0, 0);
    if constexpr (kEpilogue == Epilogue::kResidual) old = make_uint2(load_pair(0), load_pair(8));
    return old;
  }

  // sum: rows lane / 4 (x, y) and lane / 4 + 8 (z, w), for tokens lane % 4 * 2 and the next.
  __device__ __forceinline__ void store(float4 sum, uint2 old) const {
    if constexpr (kEpilogue == Epilogue::kSwiglu) {
      if constexpr (kIsExact) {
        const auto gated = ColumnPairs<T>::exactly_gated;
        store_pair(0, transposed(pack_pair<T>(gated(sum.x, sum.z), gated(sum.y, sum.w))));
      } else {
        store_pair(0, transposed(gated<T>(sum.x, sum.y, sum.z, sum.w)));
      }
    } else {
      if (kEpilogue == Epilogue::kPlain && bias != nullptr) {
        const float first = num_biases > 0 ? to_float(bias[0]) : 0.0f;
        const float second = num_biases > 1 ? to_float(bias[8]) : 0.0f;
        sum = make_float4(sum.x + first, sum.y + first, sum.z + second, sum.w + second);
      }
      uint32_t low = transposed(pack_pair<T>(sum.x, sum.y)), high = transposed(pack_pair<T>(sum.z, sum.w));
      if constexpr (kEpilogue == Epilogue::kResidual) {
        low = add(old.x, low);
        high = add(old.y, high);
      }
      store_pair(0, low);
      store_pair(8, high);
    }
  }
};

// Transposes the 4x4 matrix whose row lane % 4 has the words of this lane.
__device__ __forceinline__ void transpose_four(uint32_t (&words)[4]) {
  const bool is_high = threadIdx.x & 2, is_odd = threadIdx.x & 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffff, is_high ? words[i] : words[i + 2], 2);
    words[i] = is_high ? got : words[i];
    words[i + 2] = is_high ? words[i + 2] : got;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffff, is_odd ? words[i] : words[i + 1], 1);
    words[i] = is_odd ? got : words[i];
    words[i + 1] = is_odd ? words[i + 1] : got;
  }
}

// A token's results where the tokens are the rows of D: of each tile, a lane has the rows lane % 4 * 2 of W
// and the next, and those 8 further. The four lanes of a token exchange the results of some tiles, so that
// each has eight neighbouring columns: a store of 16 bytes takes as long as one of 4. The activation is
// approximate.
template <typename T, Epilogue kEpilogue>
struct TokenRow {
  static constexpr int kTiles = kEpilogue == Epilogue::kSwiglu ? 4 : 2;  // whose results are exchanged at once
  T* row;
  int num_columns;  // 0: the token does not exist
  bool are_eights;  // whether columns exist eight at a time, and begin at multiples of 16 bytes

  template <typename Params>
  __device__ __forceinline__ TokenRow(const Params& p, int token)
      : row(static_cast<T*>(p.out) + token * p.ldo),
        num_columns(token < p.num_tokens ? p.n : 0),
        are_eights(((p.n | p.ldo | reinterpret_cast<uintptr_t>(p.out) / sizeof(T)) & 7) == 0) {}

  // The lane's columns of the results of kTiles tiles.
  template <typename Params>
  __device__ __forceinline__ static int column_of(int tile) {
    return tile * (kEpilogue == Epilogue::kSwiglu ? Params::tile_rows / 2 : Params::tile_rows) + (threadIdx.x & 3) * 8;
  }

  // What the sums of kTiles tiles from `tile` on are added to.
  template <typename Params>
  __device__ __forceinline__ uint4 load(const Params&, int tile) const {
    uint4 old = make_uint4(0, 0, 0, 0);
    if constexpr (kEpilogue == Epilogue::kResidual) {
      const int column = column_of<Params>(tile);
      if (are_eights) {
        if (column < num_columns) old = *reinterpret_cast<const uint4*>(row + column);
      } else {
        uint16_t values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          values[i] = column + i < num_columns ? reinterpret_cast<const uint16_t*>(row)[column + i] : uint16_t{0};
        }
        old = reinterpret_cast<const uint4&>(values);
      }
    }
    return old;
  }

  // sums: of kTiles tiles from `tile` on, of the lane's rows in their order. For all lanes of the warp.
  template <typename Params>
  __device__ __forceinline__ void store(const Params& p, int tile, const float4 (&sums)[kTiles], uint4 old) const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float4 sum = sums[i];
      if constexpr (kEpilogue == Epilogue::kSwiglu) {
        words[i] = gated<T>(sum.x, sum.y, sum.z, sum.w);
      } else {
        if (kEpilogue == Epilogue::kPlain && p.bias != nullptr) {
          const int first = (tile + i) * Params::tile_rows + (threadIdx.x & 3) * 2;
          const auto bias = [&](int i) { return first + i < p.n ? to_float(static_cast<const T*>(p.bias)[first + i]) : 0.0f; };
          sum = make_float4(sum.x + bias(0), sum.y + bias(1), sum.z + bias(8), sum.w + bias(9));
        }
        words[2 * i] = pack_pair<T>(sum.x, sum.y);
        words[2 * i + 1] = pack_pair<T>(sum.z, sum.w);
      }
    }
    transpose_four(words);
    if constexpr (kEpilogue == Epilogue::kResidual) {
      words[0] = Pairs<T>::add(old.x, words[0]), words[1] = Pairs<T>::add(old.y, words[1]);
      words[2] = Pairs<T>::add(old.z, words[2]), words[3] = Pairs<T>::add(old.w, words[3]);
    }
    const int column = column_of<Params>(tile);
    if (are_eights) {
      if (column < num_columns) {
        *reinterpret_cast<uint4*>(row + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto value = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
        if (column + i < num_columns) reinterpret_cast<uint16_t*>(row)[column + i] = value;
      }
    }
  }
};

}  // namespace xserv
