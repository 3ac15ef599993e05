// Decoding of codes of 4 and 8 bits to pairs of T in registers. The numbers are exact: integers
// less their zero have at most eight significant bits, and floats of eight bits at most four. The
// layout is that of src/ops/quantised/tiles.rs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "common/e4m3.cuh"

namespace xserv {

// What a number is stored as, numbered like Code of src/ops/quantised/format.rs. All that kernels
// ask of a code is in this header: its decoders below, the properties beside it, and the lists of
// codes, M(name, code, ...) for each, by which sources define the kernels of every code.
enum class Code { kInt4, kInt8, kFp8 };

#define XSERV_CODES_OF_4_BITS(M, ...) M(int4, kInt4, __VA_ARGS__)
#define XSERV_CODES_OF_8_BITS(M, ...) M(int8, kInt8, __VA_ARGS__) M(fp8, kFp8, __VA_ARGS__)

// Whether codes stand for floats, which have no zeros.
__host__ __device__ constexpr bool is_float(Code code) { return code == Code::kFp8; }

// (a & kMask) | bits and (a & kMask) ^ bits, in one instruction: of constants it has only one in itself, so
// that the compiler takes two where both are written as such (13.0).
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(kMask), "r"(bits));
  return result;
}
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_xor(uint32_t a, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "n"(kMask), "r"(bits));
  return result;
}

__device__ __forceinline__ uint32_t subtract_pairs(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 c =
      __hsub2_rn(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t a, uint32_t b, __half) {
  const __half2 c = __hsub2_rn(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 c =
      __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b, __half) {
  const __half2 c = __hmul2_rn(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
  const __nv_bfloat162 d = __hfma2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b),
                                   reinterpret_cast<const __nv_bfloat162&>(c));
  return reinterpret_cast<const uint32_t&>(d);
}
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c, __half) {
  const __half2 d = __hfma2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b),
                            reinterpret_cast<const __half2&>(c));
  return reinterpret_cast<const uint32_t&>(d);
}

// The zeros of the two rows of a lane in the form in which registers are decoded with them, from the bytes
// of both: [0] for the even registers, [1] for the odd ones.
template <typename T, Code kCode>
struct Decoder;

// A number from 0 to 127 in the last bits of 128 in bf16, and one from 0 to 1023 in those of 1024 in
// f16, is added to it.
template <>
struct Decoder<__nv_bfloat16, Code::kInt4> {
  uint32_t zeros[2];

  __device__ __forceinline__ Decoder(uint32_t bytes, bool)
      : zeros{__byte_perm(bytes, 0x43434343u, 0x4040), __byte_perm(bytes, 0x43434343u, 0x4141)} {}

  // The four registers of a product.
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = masked_or<0x000f000fu>(word >> (4 * i), 0x43004300u);
      a[i] = subtract_pairs(pair, zeros[i & 1], __nv_bfloat16());
    }
  }
};

template <>
struct Decoder<__half, Code::kInt4> {
  uint32_t zeros[2];  // 1024 + zero; -64 - zero

  __device__ __forceinline__ Decoder(uint32_t bytes, bool)
      : zeros{__byte_perm(bytes, 0x64646464u, 0x4040),
              __byte_perm(bytes, 0, 0x4141) << 4 | 0xd400d400u} {}

  // The nibbles of odd registers are read where they lie, as 16 times their value.
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    constexpr uint32_t kSixteenth = 0x2c002c00u;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t codes = word >> (4 * i);
      a[i] = subtract_pairs(masked_or<0x000f000fu>(codes, 0x64006400u), zeros[0], __half());
      a[i + 1] = multiply_add_pairs(masked_or<0x00f000f0u>(codes, 0x64006400u), kSixteenth, zeros[1], __half());
    }
  }
};

template <>
struct Decoder<__nv_bfloat16, Code::kInt8> {
  uint32_t zeros[2];  // zero - 128
  bool has_zeros;

  // Codes less 128: bf16 has room for seven bits, and the eighth chooses what is subtracted.
  __device__ __forceinline__ static uint32_t centred(uint32_t codes) {
    return subtract_pairs(masked_or<0x007f007fu>(codes, 0x43004300u), masked_xor<0x00800080u>(codes, 0x43804380u),
                          __nv_bfloat16());
  }

  __device__ __forceinline__ Decoder(uint32_t bytes, bool has) : has_zeros(has) {
    zeros[0] = centred(__byte_perm(bytes, 0, 0x4040));
    zeros[1] = centred(__byte_perm(bytes, 0, 0x4141));
  }

  __device__ __forceinline__ void decode(uint32_t first, uint32_t second, uint32_t (&a)[4]) const {
    a[0] = centred(first), a[1] = centred(first >> 8);
    a[2] = centred(second), a[3] = centred(second >> 8);
    if (has_zeros) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = subtract_pairs(a[i], zeros[i & 1], __nv_bfloat16());
    }
  }
};

template <>
struct Decoder<__half, Code::kInt8> {
  uint32_t zeros[2];  // 1024 + zero

  __device__ __forceinline__ Decoder(uint32_t bytes, bool)
      : zeros{__byte_perm(bytes, 0x64646464u, 0x4040), __byte_perm(bytes, 0x64646464u, 0x4141)} {}

  __device__ __forceinline__ void decode(uint32_t first, uint32_t second, uint32_t (&a)[4]) const {
    const uint32_t words[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = __byte_perm(words[i / 2], 0x64646464u, i & 1 ? 0x4341 : 0x4240);
      a[i] = subtract_pairs(pair, zeros[i & 1], __half());
    }
  }
};

// The bits of an e4m3 number are those of a small number of T, subnormal ones included, which differs
// by a power of 2. The two codes that stand for no number become 480 and -480.
template <>
struct Decoder<__nv_bfloat16, Code::kFp8> {
  __device__ __forceinline__ Decoder(uint32_t, bool) {}

  __device__ __forceinline__ void decode(uint32_t first, uint32_t second, uint32_t (&a)[4]) const {
    constexpr uint32_t kScale = 0x7b807b80u;  // 2^120
    const uint32_t words[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2];
      const uint32_t rest = i & 1 ? word >> 4 : word << 4, sign = i & 1 ? word : word << 8;
      a[i] = multiply_pairs(masked_or<0x07f007f0u>(rest, sign & 0x80008000u), kScale, __nv_bfloat16());
    }
  }
};

template <>
struct Decoder<__half, Code::kFp8> {
  __device__ __forceinline__ Decoder(uint32_t, bool) {}

  __device__ __forceinline__ void decode(uint32_t first, uint32_t second, uint32_t (&a)[4]) const {
    constexpr uint32_t kScale = 0x5c005c00u;  // 2^8
    const uint32_t words[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2];
      const uint32_t rest = i & 1 ? word >> 1 : word << 7, sign = i & 1 ? word : word << 8;
      a[i] = multiply_pairs(masked_or<0x3f803f80u>(rest, sign & 0x80008000u), kScale, __half());
    }
  }
};

// The number of a code, before it is scaled.
__device__ __forceinline__ float code_value(Code code, uint32_t bits, int zero) {
  return code == Code::kFp8 ? e4m3_number(bits) : static_cast<float>(static_cast<int>(bits) - zero);
}

// Whether all codes of the words stand for numbers.
template <Code kCode>
__device__ __forceinline__ bool are_numbers(const uint32_t (&words)[4]) {
  if constexpr (kCode != Code::kFp8) return true;
  bool are = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) are &= (((words[i] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) == 0;
  return are;
}

// Returns function(std::integral_constant<Code, code>()).
template <typename Function>
__device__ __forceinline__ bool with_code(Code code, const Function& function) {
  if (code == Code::kInt4) return function(std::integral_constant<Code, Code::kInt4>());
  if (code == Code::kInt8) return function(std::integral_constant<Code, Code::kInt8>());
  return function(std::integral_constant<Code, Code::kFp8>());
}

// Numbers 1 + code / 16 from the word of a product: with codes where T has its highest bits after the point,
// they take two instructions each, and what is too much can be subtracted from sums. A sum loses two bits
// by that, of the 24 of f32.
__device__ __forceinline__ void decode_raised(uint32_t word, uint32_t (&a)[4], __nv_bfloat16) {
  a[0] = masked_or<0x00780078u>(word << 3, 0x3f803f80u);
  a[1] = masked_or<0x00780078u>(word >> 1, 0x3f803f80u);
  a[2] = masked_or<0x00780078u>(word >> 5, 0x3f803f80u);
  a[3] = masked_or<0x00780078u>(word >> 9, 0x3f803f80u);
}
__device__ __forceinline__ void decode_raised(uint32_t word, uint32_t (&a)[4], __half) {
  a[0] = masked_or<0x03c003c0u>(word << 6, 0x3c003c00u);
  a[1] = masked_or<0x03c003c0u>(word << 2, 0x3c003c00u);
  a[2] = masked_or<0x03c003c0u>(word >> 2, 0x3c003c00u);
  a[3] = masked_or<0x03c003c0u>(word >> 6, 0x3c003c00u);
}
// 1 + zero / 16 of each of the two rows of a lane, from the bytes of both.
__device__ __forceinline__ float2 raised_zeros(uint32_t bytes) {
  return make_float2(__uint_as_float(0x3f800000u | (bytes & 15) << 19),
                     __uint_as_float(0x3f800000u | (bytes >> 8) << 19));
}

// Two ones: a product with them gives to all rows the sum of the inputs.
template <typename T>
constexpr uint32_t kOnes = 0x3f803f80u;
template <>
constexpr uint32_t kOnes<__half> = 0x3c003c00u;

// The type in which scales are stored.
enum class ScaleType : int { kF32, kF16, kBf16 };

// Two scales beside each other, from the one or two words that hold them.
__device__ __forceinline__ float2 scale_pair(uint2 words, ScaleType type) {
  if (type == ScaleType::kF32) return make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
  if (type == ScaleType::kF16) return __half22float2(reinterpret_cast<const __half2&>(words.x));
  return make_float2(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u));
}

}  // namespace xserv
