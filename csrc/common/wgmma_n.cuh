// wgmma with few columns: D[64, N] += A[64, 16] B[16, N] for N = 16 .. 256, both operands contiguous along k
// in shared memory with the swizzle of 128 bytes. sm_90a only. common/wgmma.cuh has the fences and the waits.
// PTX ISA, section "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace xserv {

#define XSERV_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define XSERV_R1 XSERV_R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define XSERV_R2 XSERV_R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define XSERV_R3 XSERV_R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define XSERV_R5 \
  XSERV_R3 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define XSERV_R7 \
  XSERV_R5 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define XSERV_R11                                                                               \
  XSERV_R7 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
           "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define XSERV_R15                                                                                           \
  XSERV_R11 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define XSERV_D8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define XSERV_D16(i) XSERV_D8(i), XSERV_D8(i + 8)
#define XSERV_D32(i) XSERV_D16(i), XSERV_D16(i + 16)

#define XSERV_WGMMA_N(N, TYPE, REGISTERS, A, B, PREDICATE, ...)                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" PREDICATE ", 0;"                                  \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " \
               "%" A ", %" B ", p, 1, 1, 0, 0;}"                                                   \
               : __VA_ARGS__                                                                       \
               : "l"(a), "l"(b), "r"(accumulate))
#define XSERV_WGMMA_TYPES(N, REGISTERS, A, B, PREDICATE, ...)                    \
  if constexpr (std::is_same_v<T, __half>) {                                     \
    XSERV_WGMMA_N(N, "f16", REGISTERS, A, B, PREDICATE, __VA_ARGS__);            \
  } else {                                                                       \
    XSERV_WGMMA_N(N, "bf16", REGISTERS, A, B, PREDICATE, __VA_ARGS__);           \
  }

// d = A * B, or d += A * B if `accumulate` is not 0, by descriptors.
template <typename T, int kN>
__device__ __forceinline__ void wgmma_along_k(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256,
                "columns for which the instruction is spelled out");
  if constexpr (kN == 16) {
    XSERV_WGMMA_TYPES("16", XSERV_R0, "8", "9", "10", XSERV_D8(0))
  } else if constexpr (kN == 32) {
    XSERV_WGMMA_TYPES("32", XSERV_R1, "16", "17", "18", XSERV_D16(0))
  } else if constexpr (kN == 64) {
    XSERV_WGMMA_TYPES("64", XSERV_R3, "32", "33", "34", XSERV_D32(0))
  } else if constexpr (kN == 96) {
    XSERV_WGMMA_TYPES("96", XSERV_R5, "48", "49", "50", XSERV_D32(0), XSERV_D16(32))
  } else if constexpr (kN == 128) {
    XSERV_WGMMA_TYPES("128", XSERV_R7, "64", "65", "66", XSERV_D32(0), XSERV_D32(32))
  } else if constexpr (kN == 192) {
    XSERV_WGMMA_TYPES("192", XSERV_R11, "96", "97", "98", XSERV_D32(0), XSERV_D32(32), XSERV_D32(64))
  } else {
    XSERV_WGMMA_TYPES("256", XSERV_R15, "128", "129", "130", XSERV_D32(0), XSERV_D32(32), XSERV_D32(64),
                      XSERV_D32(96))
  }
}

// The same with A in registers, which a warp has as mma.sync has them; they must not change before the wait.
#define XSERV_WGMMA_R(N, TYPES, REGISTERS, A0, A1, A2, A3, B, PREDICATE, ...)                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" PREDICATE ", 0;"                               \
               "wgmma.mma_async.sync.aligned.m64n" N TYPES " {" REGISTERS "}, "                 \
               "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 0;}"                     \
               : __VA_ARGS__                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define XSERV_WGMMA_R_TYPES(...)                                         \
  if constexpr (std::is_same_v<T, __half>) {                             \
    XSERV_WGMMA_R_OF("k16.f32.f16.f16", __VA_ARGS__);                    \
  } else {                                                               \
    XSERV_WGMMA_R_OF("k16.f32.bf16.bf16", __VA_ARGS__);                  \
  }
#define XSERV_WGMMA_R_OF(TYPES, N, ...) XSERV_WGMMA_R(N, TYPES, __VA_ARGS__)

template <typename T, int kN>
__device__ __forceinline__ void wgmma_registers(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192,
                "columns for which the instruction is spelled out");
  if constexpr (kN == 32) {
    XSERV_WGMMA_R_TYPES("32", XSERV_R1, "16", "17", "18", "19", "20", "21", XSERV_D16(0))
  } else if constexpr (kN == 64) {
    XSERV_WGMMA_R_TYPES("64", XSERV_R3, "32", "33", "34", "35", "36", "37", XSERV_D32(0))
  } else if constexpr (kN == 96) {
    XSERV_WGMMA_R_TYPES("96", XSERV_R5, "48", "49", "50", "51", "52", "53", XSERV_D32(0), XSERV_D16(32))
  } else if constexpr (kN == 128) {
    XSERV_WGMMA_R_TYPES("128", XSERV_R7, "64", "65", "66", "67", "68", "69", XSERV_D32(0), XSERV_D32(32))
  } else {
    XSERV_WGMMA_R_TYPES("192", XSERV_R11, "96", "97", "98", "99", "100", "101", XSERV_D32(0), XSERV_D32(32),
                        XSERV_D32(64))
  }
}

#define XSERV_WGMMA_E(N, REGISTERS, A, B, PREDICATE, ...)                                                           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" PREDICATE ", 0;"                                                   \
               "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" REGISTERS "}, %" A ", %" B ", p, 1, 1;}" \
               : __VA_ARGS__                                                                                        \
               : "l"(a), "l"(b), "r"(accumulate))

// The same for e4m3 and 32 inputs, both along k; any layout in shared memory.
template <int kN>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192,
                "columns for which the instruction is spelled out");
  if constexpr (kN == 32) {
    XSERV_WGMMA_E("32", XSERV_R1, "16", "17", "18", XSERV_D16(0));
  } else if constexpr (kN == 64) {
    XSERV_WGMMA_E("64", XSERV_R3, "32", "33", "34", XSERV_D32(0));
  } else if constexpr (kN == 96) {
    XSERV_WGMMA_E("96", XSERV_R5, "48", "49", "50", XSERV_D32(0), XSERV_D16(32));
  } else if constexpr (kN == 128) {
    XSERV_WGMMA_E("128", XSERV_R7, "64", "65", "66", XSERV_D32(0), XSERV_D32(32));
  } else {
    XSERV_WGMMA_E("192", XSERV_R11, "96", "97", "98", XSERV_D32(0), XSERV_D32(32), XSERV_D32(64));
  }
}

#define XSERV_I8(i)                                                                            \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7])
#define XSERV_I32(i) XSERV_I8(i), XSERV_I8(i + 8), XSERV_I8(i + 16), XSERV_I8(i + 24)
#define XSERV_WGMMA_I(N, REGISTERS, A, B, PREDICATE, ...)                                                       \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" PREDICATE ", 0;"                                               \
               "wgmma.mma_async.sync.aligned.m64n" N "k32.s32.s8.s8 {" REGISTERS "}, %" A ", %" B ", p;}"       \
               : __VA_ARGS__                                                                                    \
               : "l"(a), "l"(b), "r"(accumulate))

// The same for signed integers of 8 bits, whose sums are exact.
template <int kN>
__device__ __forceinline__ void wgmma_s8(int (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kN == 128 || kN == 192 || kN == 256, "columns for which the instruction is spelled out");
  if constexpr (kN == 128) {
    XSERV_WGMMA_I("128", XSERV_R7, "64", "65", "66", XSERV_I32(0), XSERV_I32(32));
  } else if constexpr (kN == 192) {
    XSERV_WGMMA_I("192", XSERV_R11, "96", "97", "98", XSERV_I32(0), XSERV_I32(32), XSERV_I32(64));
  } else {
    XSERV_WGMMA_I("256", XSERV_R15, "128", "129", "130", XSERV_I32(0), XSERV_I32(32), XSERV_I32(64), XSERV_I32(96));
  }
}

#undef XSERV_WGMMA_I
#undef XSERV_I32
#undef XSERV_I8
#undef XSERV_WGMMA_E
#undef XSERV_WGMMA_R_TYPES
#undef XSERV_WGMMA_R_OF
#undef XSERV_WGMMA_R
#undef XSERV_WGMMA_TYPES
#undef XSERV_WGMMA_N
#undef XSERV_D32
#undef XSERV_D16
#undef XSERV_D8
#undef XSERV_R15
#undef XSERV_R11
#undef XSERV_R7
#undef XSERV_R5
#undef XSERV_R3
#undef XSERV_R2
#undef XSERV_R1
#undef XSERV_R0

}  // namespace xserv
