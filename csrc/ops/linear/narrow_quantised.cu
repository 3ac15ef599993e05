// The linear layers of narrow.cuh with weights of 4 or 8 bits in the tiles of
// src/ops/quantised/tiles.rs, of which a lane holds what it passes to products, and decodes it when
// it multiplies:
//   W[i, k] = (code[i, k] - zero[i, group]) * scale[i, group]
// The products of a group, or of up to 128 inputs of it, are summed by the tensor cores and scaled
// in f32. As in quantised_few.cu codes of 4 bits stay 1 + code / 16 in the products (decode.cuh),
// and what is too much is the sum of the inputs, times 1 + zero / 16. Instructions are what a
// product waits for: with a scale for every 32 inputs a step of Qwen3-1.7B takes 22 % longer
// (H200). (Numbers decoded before x is there have no room in the registers.)
//
// x stays as it is even where the format has it in FP8: to make codes of it, which every block needs, takes 0.24 ms
// of a step of Qwen3-0.6B, which takes 0.55 without (H200). (Numbers of f16, which are made faster than those of
// bf16, do not pay: x must become f16 too.)
//
// Needs: in_features a multiple of 8; groups of multiples of 32 inputs, or whole rows.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "ops/linear/narrow.cuh"
#include "ops/quantised/decode_in_order.cuh"

namespace xserv {

struct LinearNarrowQuantisedParams {
  const void* x;
  const void* norm_weight;  // unused without a norm
  const void* codes;
  const void* scales;
  const void* zeros;  // null: all are the middle of the codes
  const void* bias;   // norm only
  void* out;
  int64_t ldx, ldo;
  int num_tokens, out_features, in_features;
  // A warp has `steps` steps of in_features in each of num_passes passes.
  int steps, num_passes;
  int num_groups;         // of a row
  uint32_t group_factor;  // the group of unit u is (2 * u * group_factor) >> 32; a step has kUnits units
  int scale_type;         // a ScaleType
  float eps;
};
XSERV_LAYOUT_LinearNarrowQuantisedParams;

// The scales of two rows (decode.cuh: scale_pair) if `exist`; else zeros.
__device__ __forceinline__ uint2 load_scales_within(bool exist, bool is_f32, const char* source) {
  uint2 v;
  asm volatile(
      "{.reg .pred p, q, r; setp.ne.s32 r, %3, 0; setp.ne.and.s32 p, %4, 0, r; setp.eq.and.s32 q, %4, 0, r;"
      "mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.v2.u32 {%0, %1}, [%2]; @q ld.global.u32 %0, [%2];}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(source), "r"(static_cast<int>(exist)), "r"(static_cast<int>(is_f32))
      : "memory");
  return v;
}
// 16 bits if `exist`; else `other`.
__device__ __forceinline__ uint32_t load_zeros_within(bool exist, uint16_t other, const char* source) {
  uint16_t v;
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.b16 %0, %3; @p ld.global.u16 %0, [%1];}"
               : "=&h"(v)
               : "l"(source), "r"(static_cast<int>(exist)), "h"(other)
               : "memory");
  return v;
}

// kUnits: scales of a step and row; kHasPieces: whether codes, of FP8, lie in pieces of 16 inputs of a row.
template <typename T, Code kCode, int kUnits, bool kHasPieces = false>
struct QuantisedTiles {
  using Params = LinearNarrowQuantisedParams;
  static constexpr int kRows = 16, kSteps = 2;
  static constexpr int kStep = 128, kChunks = kStep / 64, kParts = kStep / 32;
  static constexpr bool kIsInt4 = kCode == Code::kInt4;
  // Of 16 bytes of codes of a lane in a chunk: of 8 bits for either half of it, in pieces for rows `row` and `row` + 8.
  static constexpr int kVectors = kIsInt4 ? 1 : 2;
  static constexpr int kChunkBytes = kVectors * 512;

  struct Piece {
    const char* codes;
    const char* scales;  // of group 0
    const char* zeros;
    int first_unit;
    int chunks;  // that the warp has
  };

  const Params& p;
  const int row = (threadIdx.x & 31) >> 2, lane = threadIdx.x & 31;
  const bool is_f32 = static_cast<ScaleType>(p.scale_type) == ScaleType::kF32, has_zeros = p.zeros != nullptr;
  const uint64_t policy = weight_policy();
  uint4 codes[kSteps][kChunks][kVectors];
  uint2 scales[kSteps][kUnits];
  uint32_t zeros[kSteps][kUnits];
  float2 input_sums[kSteps][kUnits];  // of two tokens; of codes of 4 bits only

  __device__ __forceinline__ explicit QuantisedTiles(const Params& params) : p(params) {}

  __device__ __forceinline__ int place(int part) const {
    const int quarter = lane & 3;
    return kHasPieces ? part / 2 * 64 + quarter * 16 + part % 2 * 8 : part * 32 + quarter * 8;
  }

  __device__ __forceinline__ void prepare(const uint4 (&inputs)[kParts], int i) {
    if constexpr (kIsInt4) {
      const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float total[2][4] = {};
#pragma unroll
        for (int k = 0; k < kParts / kUnits; ++k) {
          const uint4 b = inputs[u * (kParts / kUnits) + k];
          mma_m16n8k16<T>(total[0], ones, b.x, b.y);
          mma_m16n8k16<T>(total[1], ones, b.z, b.w);
        }
        input_sums[i][u] = make_float2(total[0][0] + total[1][0], total[0][1] + total[1][1]);
      }
    }
  }

  template <bool kIsGated>
  __device__ __forceinline__ Piece piece(int tile, int first_step, int steps) const {
    // In pieces there is an even number of chunks.
    const int num_chunks = kHasPieces ? (p.in_features + kStep - 1) / kStep * kChunks : (p.in_features + 63) / 64;
    const int first_chunk = first_step * kChunks;
    const int64_t pair = static_cast<int64_t>(tile) * p.num_groups * 16 + row * 2;
    Piece piece;
    piece.codes = static_cast<const char*>(p.codes) +
                  (static_cast<int64_t>(tile) * num_chunks + first_chunk) * kChunkBytes +
                  (kHasPieces ? (lane & 3) * 128 + row * 16 : lane * 16);
    piece.scales = static_cast<const char*>(p.scales) + (pair << (is_f32 ? 2 : 1));
    piece.zeros = static_cast<const char*>(p.zeros) + pair;
    piece.first_unit = first_step * kUnits;
    piece.chunks = min(steps * kChunks, num_chunks - first_chunk);
    return piece;
  }

  __device__ __forceinline__ void load(const Piece& piece, int i) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int chunk = i * kChunks + c;
        const int vector = kHasPieces ? i * kChunks * kVectors + v * kChunks + c : chunk * kVectors + v;
        codes[i][c][v] = load_weight_within(0, 1, chunk, piece.chunks, piece.codes + vector * 512, policy);
      }
    }
    const bool exists = i * kChunks < piece.chunks;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t unit = piece.first_unit + i * kUnits + u;
      const uint32_t group = min(__umulhi(2 * unit, p.group_factor), p.num_groups - 1u);
      scales[i][u] = load_scales_within(exists, is_f32, piece.scales + (group << (is_f32 ? 6 : 5)));
      if constexpr (!is_float(kCode)) {
        zeros[i][u] = load_zeros_within(exists && has_zeros, kIsInt4 ? 0x0808 : 0x8080, piece.zeros + group * 16);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[2][4], const uint4 (&inputs)[kParts], int i) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float products[2][4] = {};
#pragma unroll
      for (int k = 0; k < kParts / kUnits; ++k) {
        const int part = u * (kParts / kUnits) + k;
        const uint4 b = inputs[part];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          if constexpr (kIsInt4) {
            const uint4& v = codes[i][part / 2][0];
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
            decode_raised(words[part % 2 * 2 + half], a, T());
          } else if constexpr (kHasPieces) {
            const uint4 &low = codes[i][part / 2][0], &high = codes[i][part / 2][1];
            uint32_t first[2], second[2];
            decode_in_order(part % 2 ? (half ? low.w : low.z) : (half ? low.y : low.x), first, T());
            decode_in_order(part % 2 ? (half ? high.w : high.z) : (half ? high.y : high.x), second, T());
            a[0] = first[0], a[1] = second[0], a[2] = first[1], a[3] = second[1];
          } else {
            const uint4& v = codes[i][part / 2][part % 2];
            const Decoder<T, kCode> decoder(zeros[i][u], has_zeros);
            decoder.decode(half ? v.z : v.x, half ? v.w : v.y, a);
          }
          mma_m16n8k16<T>(products[half], a, half ? b.z : b.x, half ? b.w : b.y);
        }
      }
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = products[0][j] + products[1][j];
      float2 scale = scale_pair(scales[i][u], static_cast<ScaleType>(p.scale_type));
      if constexpr (kIsInt4) {
        const float2 raised = raised_zeros(zeros[i][u]), of_inputs = input_sums[i][u];
        scale.x *= 16.0f, scale.y *= 16.0f;
        v[0] = fmaf(-raised.x, of_inputs.x, v[0]), v[1] = fmaf(-raised.x, of_inputs.y, v[1]);
        v[2] = fmaf(-raised.y, of_inputs.x, v[2]), v[3] = fmaf(-raised.y, of_inputs.y, v[3]);
      }
      float(&sum)[4] = sums[(i + u) % 2];
      sum[0] = fmaf(v[0], scale.x, sum[0]), sum[1] = fmaf(v[1], scale.x, sum[1]);
      sum[2] = fmaf(v[2], scale.y, sum[2]), sum[3] = fmaf(v[3], scale.y, sum[3]);
    }
  }
};

}  // namespace xserv

// xserv_linear_narrow_quantised_<mode>_<code>_<scales of 128 inputs>_<dtype>, and of FP8 in pieces
// xserv_linear_narrow_fp8_<mode>_<dtype>. 128 registers a thread.
#define XSERV_LINEAR_NARROW_QUANTISED(NAME, MODE, CODE_NAME, CODE, UNITS, SUFFIX, T)            \
  extern "C" __global__ void __launch_bounds__(512, 1)                                          \
      xserv_linear_narrow_quantised_##NAME##_##CODE_NAME##_##UNITS##_##SUFFIX(                  \
          const __grid_constant__ xserv::LinearNarrowQuantisedParams params) {                  \
    using Weights = xserv::QuantisedTiles<T, xserv::Code::CODE, UNITS>;                         \
    xserv::LinearNarrow<T, xserv::Narrow::MODE, Weights>(params).run();                         \
  }
#define XSERV_LINEAR_NARROW_QUANTISED_MODES(CODE_NAME, CODE, UNITS, SUFFIX, T)                  \
  XSERV_LINEAR_NARROW_QUANTISED(norm, kNorm, CODE_NAME, CODE, UNITS, SUFFIX, T)                 \
  XSERV_LINEAR_NARROW_QUANTISED(swiglu, kNormSwiglu, CODE_NAME, CODE, UNITS, SUFFIX, T)         \
  XSERV_LINEAR_NARROW_QUANTISED(residual, kResidual, CODE_NAME, CODE, UNITS, SUFFIX, T)
#define XSERV_LINEAR_NARROW_QUANTISED_TYPES(CODE_NAME, CODE, UNITS)                  \
  XSERV_LINEAR_NARROW_QUANTISED_MODES(CODE_NAME, CODE, UNITS, f16, __half)           \
  XSERV_LINEAR_NARROW_QUANTISED_MODES(CODE_NAME, CODE, UNITS, bf16, __nv_bfloat16)
#define XSERV_LINEAR_NARROW_FP8(NAME, MODE, SUFFIX, T)                                            \
  extern "C" __global__ void __launch_bounds__(512, 1) xserv_linear_narrow_fp8_##NAME##_##SUFFIX( \
      const __grid_constant__ xserv::LinearNarrowQuantisedParams params) {                        \
    using Weights = xserv::QuantisedTiles<T, xserv::Code::kFp8, 1, true>;                         \
    xserv::LinearNarrow<T, xserv::Narrow::MODE, Weights>(params).run();                           \
  }
#define XSERV_LINEAR_NARROW_FP8_MODES(SUFFIX, T)          \
  XSERV_LINEAR_NARROW_FP8(norm, kNorm, SUFFIX, T)         \
  XSERV_LINEAR_NARROW_FP8(swiglu, kNormSwiglu, SUFFIX, T) \
  XSERV_LINEAR_NARROW_FP8(residual, kResidual, SUFFIX, T)
XSERV_LINEAR_NARROW_FP8_MODES(f16, __half)
XSERV_LINEAR_NARROW_FP8_MODES(bf16, __nv_bfloat16)
XSERV_CODES_OF_4_BITS(XSERV_LINEAR_NARROW_QUANTISED_TYPES, 1)
XSERV_CODES_OF_4_BITS(XSERV_LINEAR_NARROW_QUANTISED_TYPES, 2)
XSERV_CODES_OF_4_BITS(XSERV_LINEAR_NARROW_QUANTISED_TYPES, 4)
XSERV_CODES_OF_8_BITS(XSERV_LINEAR_NARROW_QUANTISED_TYPES, 1)
XSERV_CODES_OF_8_BITS(XSERV_LINEAR_NARROW_QUANTISED_TYPES, 2)
XSERV_CODES_OF_8_BITS(XSERV_LINEAR_NARROW_QUANTISED_TYPES, 4)
#endif
