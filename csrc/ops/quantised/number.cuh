// The numbers of a quantised matrix one at a time, exactly: what is too little for decode.cuh.
#pragma once

#include "common/dtype.cuh"
#include "ops/quantised/decode.cuh"

namespace xserv {

__device__ __forceinline__ float scale_at(const void* scales, int64_t index, ScaleType type) {
  if (type == ScaleType::kF32) return static_cast<const float*>(scales)[index];
  if (type == ScaleType::kF16) return to_float(static_cast<const __half*>(scales)[index]);
  return to_float(static_cast<const __nv_bfloat16*>(scales)[index]);
}

// The words of the inputs 8 * eight to 8 * eight + 7 of rows `row` and `row` + 8 of a tile, as a
// lane of a product has them: of 4 bits the first two, of 8 bits all. codes: those of the tile;
// are_pieces: whether they lie in pieces of rows.
__device__ __forceinline__ void load_eight(const char* codes, int row, int eight, bool is_int4, bool are_pieces,
                                           uint32_t (&words)[4]) {
  const int chunk = eight / 8, half = eight / 4 % 2, lane = row * 4 + eight % 4;
  if (is_int4) {
    const uint2 v = *reinterpret_cast<const uint2*>(codes + static_cast<int64_t>(chunk) * 512 + lane * 16 + half * 8);
    words[0] = v.x, words[1] = v.y, words[2] = words[3] = 0;
  } else if (are_pieces) {
    const char* piece = codes + static_cast<int64_t>(eight / 16) * 2048 + eight / 2 % 8 * 128 + row * 16 + eight % 2 * 8;
    const uint2 low = *reinterpret_cast<const uint2*>(piece), high = *reinterpret_cast<const uint2*>(piece + 1024);
    words[0] = __byte_perm(low.x, high.x, 0x5140), words[1] = __byte_perm(low.x, high.x, 0x7362);
    words[2] = __byte_perm(low.y, high.y, 0x5140), words[3] = __byte_perm(low.y, high.y, 0x7362);
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(codes + static_cast<int64_t>(chunk) * 1024 + half * 512 + lane * 16);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
}

// The code of input `e` of eight, of the lane's first row or of its second.
__device__ __forceinline__ uint32_t code_of(const uint32_t (&words)[4], int e, int second, bool is_int4) {
  return is_int4 ? words[e / 4] >> (4 * (second + e % 4 / 2 * 2 + e % 2 * 4)) & 15
                 : words[e / 2] >> (8 * (second + e % 2 * 2)) & 255;
}

// The eight inputs from `input` on of a row, each (code - zero) * scale rounded to f32 and then to
// T. scales, zeros: regions of all tiles, in which group g of the row has index first_group + g *
// 16; zeros is null where all are the middle of the codes. Inputs after the last group have its
// scale.
template <typename T>
__device__ __forceinline__ void eight_numbers(T (&values)[8], const uint32_t (&words)[4], int second, int input,
                                              Code code, const void* scales, ScaleType scale_type, const void* zeros,
                                              int64_t first_group, int num_groups, int group_size) {
  const bool is_int4 = code == Code::kInt4;
  int group = input / group_size, left = group_size - input % group_size;
  float scale = 0.0f;
  int zero = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e == 0 || left == 0) {
      if (left == 0) ++group, left = group_size;
      const int64_t index = first_group + min(group, num_groups - 1) * static_cast<int64_t>(16);
      scale = scale_at(scales, index, scale_type);
      zero = zeros != nullptr ? static_cast<const unsigned char*>(zeros)[index] : is_int4 ? 8 : 128;
    }
    --left;
    const float value = code_value(code, code_of(words, e, second, is_int4), zero);
    values[e] = from_float<T>(__fmul_rn(value, scale));
  }
}

}  // namespace xserv
