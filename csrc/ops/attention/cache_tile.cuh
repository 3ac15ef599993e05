// Tiles of 16 keys or 16 values in shared memory as the cache stores them, and their products with
// query heads by mma.m16n8k16: scores S^T = K Q^T with the keys as A, and sums O^T += V^T P^T. The
// kernels for one query per sequence share them.
//
// Numbers of 8 bits are read in pairs as if they were of 16, which only changes the order of the
// dims within every 16; queries are brought into the same order, and sums come out in it. In the
// registers of a tile, a lane finds four dims of a key, 4 t .. 4 t + 3, of which two become each
// half of an operand of the product; and two neighbouring dims of two values, of which the first is
// in the upper half of a product's rows and the second in the lower.
//
// The conversion to f16 is an instruction (of sm_89), that to bf16 takes four on integers for two
// numbers, which is more than there is time for: so f16 is multiplied, whatever T is. It holds the
// numbers of 8 bits exactly and weights more finely than bf16; queries beyond 65504 become that.
// Older GPUs multiply T.
#pragma once

#include <type_traits>

#include "common/e4m3_pair.cuh"
#include "ops/attention/attention.cuh"
#include "ops/quantised/decode.cuh"

namespace xserv {

template <typename T, int kHeadDim, typename Stored>
struct CacheTile {
  static constexpr bool kIsFp8 = std::is_same_v<Stored, Fp8>;
  static_assert(kIsFp8 || std::is_same_v<Stored, T>);
  static constexpr int kKeys = 16;
  using Rows = TileRows<kHeadDim * static_cast<int>(sizeof(Stored)) / 2>;
  static constexpr int kBytes = kKeys * Rows::kStride;
  static constexpr int kChunkLen = 16 / sizeof(Stored);  // elements in 16 bytes
  static constexpr int kDimSteps = kHeadDim / 16;
#if __CUDA_ARCH__ >= 890
  using Math = std::conditional_t<kIsFp8, __half, T>;
#else
  using Math = T;
#endif
  // The dims of the sums of a lane in every 16: kLaneDims * (lane / 4), and that plus kHalfDims.
  static constexpr int kLaneDims = kIsFp8 ? 2 : 1, kHalfDims = kIsFp8 ? 1 : 8;

  // Where the lane reads keys and values of a tile.
  __device__ __forceinline__ static uint32_t key_offset(int lane) { return Rows::offset(lane & 15, lane >> 4); }
  __device__ __forceinline__ static uint32_t value_offset(int lane) {
    return Rows::offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }

  // The operand of the product from four neighbouring dims of a query, 4 (lane % 4) of every 16.
  __device__ __forceinline__ static void order_query(uint2 dims, uint32_t (&q)[2]) {
#if __CUDA_ARCH__ >= 890
    q[0] = in_math(dims.x);
    q[1] = in_math(dims.y);
#else
    q[0] = __byte_perm(dims.x, dims.y, 0x5410);
    q[1] = __byte_perm(dims.x, dims.y, 0x7632);
#endif
  }
  // A pair of T.
  __device__ __forceinline__ static uint32_t in_math(uint32_t pair) {
    if constexpr (std::is_same_v<Math, T>) return pair;
    const auto clamped = [](uint32_t bits) { return fminf(fmaxf(__uint_as_float(bits), -65504.0f), 65504.0f); };
    return pack_pair<__half>(clamped(pair << 16), clamped(pair & 0xffff0000u));  // of bf16
  }

  // The operands of two rows of keys, and those of values 0, 1, 8 and 9 of a product.
  __device__ __forceinline__ static void decode_keys(uint32_t first, uint32_t second, uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 890
    e4m3_to_f16(first, a[0], a[2]);
    e4m3_to_f16(second, a[1], a[3]);
#else
    uint32_t numbers[4];
    Decoder<T, Code::kFp8>(0, false).decode(first, second, numbers);
    a[0] = numbers[0], a[1] = numbers[2], a[2] = numbers[1], a[3] = numbers[3];
#endif
  }
  __device__ __forceinline__ static void decode_values(uint32_t first, uint32_t second, uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 890
    // The two numbers of each dim side by side.
    e4m3_to_f16(__byte_perm(first, 0, 0x3120), a[0], a[1]);
    e4m3_to_f16(__byte_perm(second, 0, 0x3120), a[2], a[3]);
#else
    Decoder<T, Code::kFp8>(0, false).decode(first, second, a);
#endif
  }

  // Reads the 32 bytes of each row that belong to two steps of 16 numbers of 8 bits; of the last
  // step alone where their number is odd.
  template <bool kIsTransposed>
  __device__ __forceinline__ static void load_two(uint32_t tile, uint32_t offset, int pair, uint32_t (&r)[4]) {
    uint32_t address = Rows::advance(tile + offset, pair);
    if (kDimSteps % 2 != 0 && pair == kDimSteps / 2) {
      // There is no second chunk of 16 bytes: its lanes read the first one too.
      static_assert(kDimSteps % 2 == 0 || !Rows::kSwizzle);
      address -= (kIsTransposed ? threadIdx.x >> 3 & 1 : threadIdx.x >> 4 & 1) * 16;
    }
    if constexpr (kIsTransposed) {
      ldmatrix_x4_trans(r, address);
    } else {
      ldmatrix_x4(r, address);
    }
  }

  // Adds the scores of the 16 keys; each step goes to the next of the sums.
  template <int kSums>
  __device__ __forceinline__ static void add_scores(float (&s)[kSums][4], uint32_t tile, uint32_t offset,
                                                    const uint32_t (&q)[kDimSteps][2]) {
    if constexpr (!kIsFp8) {
#pragma unroll
      for (int step = 0; step < kDimSteps; ++step) {
        uint32_t a[4];
        ldmatrix_x4(a, Rows::advance(tile + offset, step));
        mma_m16n8k16<T>(s[step % kSums], a, q[step][0], q[step][1]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < kDimSteps; step += 2) {
        uint32_t r[4];
        load_two<false>(tile, offset, step / 2, r);
#pragma unroll
        for (int i = 0; i < 2 && step + i < kDimSteps; ++i) {
          uint32_t a[4];
          decode_keys(r[i * 2], r[i * 2 + 1], a);
          mma_m16n8k16<Math>(s[(step + i) % kSums], a, q[step + i][0], q[step + i][1]);
        }
      }
    }
  }

  // Adds the 16 values times their weights, which are the operand B.
  __device__ __forceinline__ static void add_values(float (&o)[kDimSteps][4], uint32_t tile, uint32_t offset,
                                                    uint32_t b0, uint32_t b1) {
    if constexpr (!kIsFp8) {
#pragma unroll
      for (int step = 0; step < kDimSteps; ++step) {
        uint32_t a[4];
        ldmatrix_x4_trans(a, Rows::advance(tile + offset, step));
        mma_m16n8k16<T>(o[step], a, b0, b1);
      }
    } else {
#pragma unroll
      for (int step = 0; step < kDimSteps; step += 2) {
        uint32_t r[4];
        load_two<true>(tile, offset, step / 2, r);
#pragma unroll
        for (int i = 0; i < 2 && step + i < kDimSteps; ++i) {
          uint32_t a[4];
          decode_values(r[i], r[i + 2], a);
          mma_m16n8k16<Math>(o[step + i], a, b0, b1);
        }
      }
    }
  }

  // Writes the sums of a lane for two heads, of which `first` is the place of the first one's dims.
  __device__ __forceinline__ static void store_sums(const float (&o)[kDimSteps][4], float* first, int stride, int lane) {
    float* mine = first + (lane >> 2) * kLaneDims;
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) {
      mine[step * 16] = o[step][0];
      mine[step * 16 + stride] = o[step][1];
      mine[step * 16 + kHalfDims] = o[step][2];
      mine[step * 16 + kHalfDims + stride] = o[step][3];
    }
  }
};

}  // namespace xserv
