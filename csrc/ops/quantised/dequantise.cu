// The tiles of a quantised matrix (src/ops/quantised/tiles.rs) as rows of T:
//   out[i, k] = round((code - zero) * scale)
// for the rows i from first_row on, num_rows of them, in their original order; round() is to f32 and then
// to T.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "ops/quantised/number.cuh"

namespace xserv {

struct DequantiseParams {
  const void* codes;
  const void* scales;
  const void* zeros;  // null: all are the middle of the codes
  void* out;          // [num_rows, k]
  int first_tile;  // of the grid
  int first_row;
  int num_rows;
  int k;
  int num_chunks;  // of a tile
  int num_groups;  // of a row
  int group_size;
  int tile_rows;   // from the first row of a tile to that of the next
  int pair_rows;   // from row r of a tile to row r + 8
  int pairs_end;   // the first row that has none 8 further, nor is one
  int code;        // a Code
  int scale_type;  // a ScaleType
  int are_pieces;  // whether codes lie in pieces of rows
};
XSERV_LAYOUT_DequantiseParams;

// Stores eight numbers of a row, those that it has.
template <typename T>
__device__ __forceinline__ void store_eight(const DequantiseParams& p, int64_t out_row, int input,
                                            const T (&values)[8]) {
  T* out = static_cast<T*>(p.out) + out_row * p.k + input;
  constexpr int kVector = 16 / sizeof(T);
  if (p.k % 8 == 0) {
    if (input >= p.k) return;
#pragma unroll
    for (int i = 0; i < 8 / kVector; ++i) {
      Vec<T, kVector> vector;
#pragma unroll
      for (int e = 0; e < kVector; ++e) vector[e] = values[i * kVector + e];
      reinterpret_cast<Vec<T, kVector>*>(out)[i] = vector;
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (input + e < p.k) out[e] = values[e];
    }
  }
}

// Eight inputs of each of a lane's two rows that share a group: decoded in pairs of bf16, exactly,
// as operands of products are, so that a number takes four instructions and the memory is what
// limits.
template <typename T, Code kCode>
__device__ __forceinline__ void dequantise_group(const DequantiseParams& p, const uint32_t (&words)[4], int64_t tile,
                                                 int row, int64_t first, int input) {
  const int64_t index = (tile * p.num_groups + min(input / p.group_size, p.num_groups - 1)) * 16 + row * 2;
  const auto type = static_cast<ScaleType>(p.scale_type);
  const uint32_t* scale_words = static_cast<const uint32_t*>(p.scales) + (type == ScaleType::kF32 ? index : index / 2);
  const float2 scale = scale_pair(
      make_uint2(scale_words[0], type == ScaleType::kF32 ? scale_words[1] : 0), type);
  const bool has_zeros = !is_float(kCode) && p.zeros != nullptr;
  constexpr uint32_t kMiddle = kCode == Code::kInt4 ? 0x0808 : 0x8080;
  const uint32_t zeros =
      has_zeros ? *reinterpret_cast<const uint16_t*>(static_cast<const char*>(p.zeros) + index) : kMiddle;
  const Decoder<__nv_bfloat16, kCode> decoder(zeros, has_zeros);
  uint32_t a[2][4];  // of two products: pairs of row g, of row g + 8, and both again
  if constexpr (kCode == Code::kInt4) {
    decoder.decode(words[0], a[0]), decoder.decode(words[1], a[1]);
  } else {
    decoder.decode(words[0], words[1], a[0]), decoder.decode(words[2], words[3], a[1]);
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int64_t out_row = first + second * static_cast<int64_t>(p.pair_rows) - p.first_row;
    if (out_row < 0 || out_row >= p.num_rows) continue;
    const float factor = second ? scale.y : scale.x;
    T values[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t pair = a[e / 4][second + e % 4 / 2 * 2];
      const float number = __uint_as_float(e % 2 ? pair & 0xffff0000u : pair << 16);
      values[e] = from_float<T>(__fmul_rn(number, factor));
    }
    store_eight(p, out_row, input, values);
  }
}

template <typename T>
__device__ __forceinline__ void dequantise(const DequantiseParams& p) {
  const int chunk = blockIdx.y * 4 + threadIdx.x / 64, lane = threadIdx.x & 31, half = threadIdx.x >> 5 & 1;
  if (chunk >= p.num_chunks) return;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) + p.first_tile;
  const Code code_type = static_cast<Code>(p.code);
  const bool is_int4 = code_type == Code::kInt4;
  const int row = lane >> 2;
  const char* codes =
      static_cast<const char*>(p.codes) + tile * p.num_chunks * static_cast<int64_t>(is_int4 ? 512 : 1024);
  uint32_t words[4];
  const int eight = chunk * 8 + half * 4 + (lane & 3), input = eight * 8;
  load_eight(codes, row, eight, is_int4, p.are_pieces != 0, words);
  const int64_t first = tile * p.tile_rows + row;
  if (first >= p.pairs_end) return;
  if (p.group_size % 8 == 0) {
    // Decoders take codes that stand for numbers.
    if (with_code(code_type, [&](auto code) {
          if (!are_numbers<code.value>(words)) return false;
          dequantise_group<T, code.value>(p, words, tile, row, first, input);
          return true;
        })) {
      return;
    }
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int64_t out_row = first + second * static_cast<int64_t>(p.pair_rows) - p.first_row;
    if (out_row < 0 || out_row >= p.num_rows) continue;
    T values[8];
    eight_numbers(values, words, second, input, code_type, p.scales, static_cast<ScaleType>(p.scale_type), p.zeros,
                  tile * p.num_groups * 16 + row * 2 + second, p.num_groups, p.group_size);
    store_eight(p, out_row, input, values);
  }
}

}  // namespace xserv

// xserv_dequantise_<dtype>: grid (tiles, chunks / 4) of 256 threads, which have 8 inputs of two rows each.
#define XSERV_DEQUANTISE(SUFFIX, T)                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      xserv_dequantise_##SUFFIX(const __grid_constant__ xserv::DequantiseParams params) {      \
    xserv::dequantise<T>(params);                                                              \
  }
XSERV_FOR_EACH_DTYPE(XSERV_DEQUANTISE)
