// The tiles of a quantised matrix (src/ops/quantised/tiles.rs) as rows of T:
//   out[i, k] = round((code - zero) * scale)
// for the rows i from first_row on, num_rows of them, in their original order; round() is to f32 and then
// to T.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "ops/quantised/decode.cuh"

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
};
XSERV_LAYOUT_DequantiseParams;

__device__ __forceinline__ float fp8_value(uint32_t code) {
  // The bits of a small f32, which differs by a power of 2.
  const float magnitude = (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u)
                                                : __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
  return code & 0x80 ? -magnitude : magnitude;
}

__device__ __forceinline__ float scale_at(const void* scales, int64_t index, ScaleType type) {
  if (type == ScaleType::kF32) return static_cast<const float*>(scales)[index];
  if (type == ScaleType::kF16) return to_float(static_cast<const __half*>(scales)[index]);
  return to_float(static_cast<const __nv_bfloat16*>(scales)[index]);
}

// Stores eight numbers of a row, those that it has.
template <typename T>
__device__ __forceinline__ void store_eight(const DequantiseParams& p, int64_t out_row, int input,
                                            const Vec<T, 16 / sizeof(T)> (&values)[8 * sizeof(T) / 16]) {
  T* out = static_cast<T*>(p.out) + out_row * p.k + input;
  if (p.k % 8 == 0) {
    if (input >= p.k) return;
#pragma unroll
    for (int i = 0; i < 8 * static_cast<int>(sizeof(T)) / 16; ++i) {
      reinterpret_cast<Vec<T, 16 / sizeof(T)>*>(out)[i] = values[i];
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (input + e < p.k) out[e] = values[e * sizeof(T) / 16][e % (16 / sizeof(T))];
    }
  }
}

// Whether a code of the word is none of a number.
__device__ __forceinline__ bool has_no_number(uint32_t word) {
  return (((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
}

// Eight inputs of each of a lane's two rows that share a group: decoded in pairs of bf16, exactly, as operands of
// products are, so that a number takes four instructions and the memory is what limits.
template <typename T, Code kCode>
__device__ __forceinline__ void dequantise_group(const DequantiseParams& p, const uint32_t (&words)[4], int64_t tile,
                                                 int row, int64_t first, int input) {
  const int64_t index = (tile * p.num_groups + min(input / p.group_size, p.num_groups - 1)) * 16 + row * 2;
  const auto type = static_cast<ScaleType>(p.scale_type);
  const uint32_t* scale_words = static_cast<const uint32_t*>(p.scales) + (type == ScaleType::kF32 ? index : index / 2);
  const float2 scale = scale_pair(
      make_uint2(scale_words[0], type == ScaleType::kF32 ? scale_words[1] : 0), type);
  const bool has_zeros = kCode != Code::kFp8 && p.zeros != nullptr;
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
    Vec<T, 16 / sizeof(T)> values[8 * sizeof(T) / 16];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t pair = a[e / 4][second + e % 4 / 2 * 2];
      const float number = __uint_as_float(e % 2 ? pair & 0xffff0000u : pair << 16);
      values[e * sizeof(T) / 16][e % (16 / sizeof(T))] = from_float<T>(__fmul_rn(number, factor));
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
      static_cast<const char*>(p.codes) + (tile * p.num_chunks + chunk) * static_cast<int64_t>(is_int4 ? 512 : 1024);
  uint32_t words[4] = {};
  if (is_int4) {
    const uint2 v = *reinterpret_cast<const uint2*>(codes + lane * 16 + half * 8);
    words[0] = v.x, words[1] = v.y;
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(codes + half * 512 + lane * 16);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  const int input = chunk * 64 + half * 32 + (lane & 3) * 8;
  const int64_t first = tile * p.tile_rows + row;
  if (first >= p.pairs_end) return;
  if (p.group_size % 8 == 0) {
    if (is_int4) return dequantise_group<T, Code::kInt4>(p, words, tile, row, first, input);
    if (code_type == Code::kInt8) return dequantise_group<T, Code::kInt8>(p, words, tile, row, first, input);
    bool are_numbers = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) are_numbers &= !has_no_number(words[i]);
    if (are_numbers) return dequantise_group<T, Code::kFp8>(p, words, tile, row, first, input);
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int64_t out_row = first + second * static_cast<int64_t>(p.pair_rows) - p.first_row;
    if (out_row < 0 || out_row >= p.num_rows) continue;
    int group = input / p.group_size, left = p.group_size - input % p.group_size;
    float scale = 0.0f;
    int zero = 0;
    Vec<T, 16 / sizeof(T)> values[8 * sizeof(T) / 16];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e == 0 || left == 0) {
        if (left == 0) ++group, left = p.group_size;
        const int64_t index = (tile * p.num_groups + min(group, p.num_groups - 1)) * 16 + row * 2 + second;
        scale = scale_at(p.scales, index, static_cast<ScaleType>(p.scale_type));
        zero = p.zeros != nullptr ? static_cast<const unsigned char*>(p.zeros)[index] : is_int4 ? 8 : 128;
      }
      --left;
      const uint32_t code = is_int4 ? words[e / 4] >> (4 * (second + e % 4 / 2 * 2 + e % 2 * 4)) & 15
                                    : words[e / 2] >> (8 * (second + e % 2 * 2)) & 255;
      const float value = code_type == Code::kFp8 ? fp8_value(code) : static_cast<float>(static_cast<int>(code) - zero);
      values[e * sizeof(T) / 16][e % (16 / sizeof(T))] = from_float<T>(__fmul_rn(value, scale));
    }
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
