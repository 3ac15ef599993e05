// The linear layers of gemv.cu for one token of a small model on tensor cores, for use around the
// attention kernel that contains the output projection (fused_project.cu). W is [out_features,
// in_features]; round() is to T.
//
//   norm          out = round(W h)             h = round(norm_weight * round(x * rstd)), RMSNorm of x
//   sums_swiglu   hidden = round(x + round(sum over g of sums[g]))
//                 out = round(round(silu(round(G h))) * round(U h))
//                 where h is the RMSNorm of hidden as above, G the first out_features rows of W, U the others
//   residual      out = round(residual + round(W x))
//
//   x, residual, hidden, out: rows of one token;   norm_weight: [in_features];   sums: [8, in_features], f32
//   hidden must not be x, nor out of residual be its x: other blocks still read them.
//
// A step of a small model is a chain of memory round trips rather than a stream: what counts is the
// time from the moment when the activations are there to the last store. So a block has one tile of
// rows for each group of warps, with all of its weights under way in registers before the wait, and the
// product is mma.m16n8k16, which takes 16 times fewer instructions than multiplying one by one and
// needs no sums over lanes. Rows of the product are rows of W; where a tile has 8 rows (kRows), rows
// 8..15 of the product are the same rows further along in_features, and column 1 of h goes with them.
// The order of in_features in a step is free: a lane takes 8 neighbouring elements at once, of W and of
// h alike.
//
// A block that reads the sums of all kv heads reads 32 KB, so blocks of that kind are few and large. On
// an H200, the layers and the output of Qwen3-0.6B with 517 tokens of context take 511 us with gemv.cu
// and a separate attention kernel, 438 with these products and a separate attention kernel, 424 with
// the projection in the attention kernel.
//
// Needs: in_features = kWarps * kSteps * (kRows == 16 ? 32 : 64), that is 1024 (norm, sums_swiglu) and
// 3072 (residual); out_features a multiple of kTiles * the outputs of a tile; W, x, norm_weight, sums,
// residual, hidden aligned to 16 bytes. There are kTiles * kWarps * 32 threads; grid out_features /
// (kTiles * outputs of a tile).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "common/gemv.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

namespace xserv {

struct GemvMmaParams {
  const void* x;
  const void* norm_weight;
  const void* weight;
  const float* sums;
  const void* residual;
  void* hidden;
  void* out;
  int out_features;
  float eps;
};
XSERV_LAYOUT_GemvMmaParams;

enum class GemvMma { kNorm, kSumsSwiglu, kResidual };

__device__ __forceinline__ float2 load_sums(const float* source) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(source) : "memory");
  return v;
}
// Reads what an earlier kernel of the chain wrote.
__device__ __forceinline__ uint32_t load_pair(const void* source) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
  return v;
}

// A block has kTiles tiles of kRows rows, each computed by kWarps warps side by side along in_features.
template <typename T, GemvMma kMode, int kRows, int kTiles, int kWarps, int kSteps>
__device__ __forceinline__ void gemv_mma(const GemvMmaParams& p) {
  constexpr bool kIsGated = kMode == GemvMma::kSumsSwiglu;
  constexpr int kOuts = kIsGated ? kRows / 2 : kRows;
  constexpr int kStep = kRows == 16 ? 32 : 64;  // elements of a row in a step
  constexpr int kWarpWidth = kSteps * kStep, kIn = kWarps * kWarpWidth, kThreads = kTiles * kWarps * 32;
  static_assert(kRows == 16 || kRows == 8, "rows of a tile");
  static_assert(kIsGated ? kThreads == kIn / 2 : kWarpWidth % 256 == 0, "h is divided evenly");
  static_assert(kTiles * kOuts <= kThreads, "a thread has one output");
  // h is held once per block or (without sums, with a read of its own) once per group of warps, so that
  // warps need not wait.
  __shared__ __align__(16) unsigned char shared_h[(kIsGated ? 1 : kTiles) * kIn * 2];
  __shared__ float partials[kTiles * kWarps][kRows];
  __shared__ float squares[kThreads / 32];
  dependency_launch();

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = warp / kWarps, warp_in_group = warp % kWarps;
  const int first_out = (blockIdx.x * kTiles + group) * kOuts;
  const int row = lane >> 2, quarter = lane & 3;

  uint4 weights[kSteps][2];
  {
    const uint64_t policy = weight_policy();
    constexpr int64_t kRowBytes = kIn * 2;
    const char* base = static_cast<const char*>(p.weight) + warp_in_group * kWarpWidth * 2 + quarter * 16;
    const char* first = base + (first_out + row) * kRowBytes;
    // Rows 8..15 of the product.
    const char* second = kIsGated      ? first + p.out_features * kRowBytes
                         : kRows == 16 ? first + 8 * kRowBytes
                                       : first + 32 * 2;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      weights[i][0] = load_weight_in_order(first + i * kStep * 2, policy);
      weights[i][1] = load_weight_in_order(second + i * kStep * 2, policy);
    }
  }

  // Each output, of tile out_tile, has one thread that writes it.
  const int out_tile = threadIdx.x / kOuts, out_row = threadIdx.x % kOuts;
  const bool is_writer = threadIdx.x < kTiles * kOuts;
  const int out = blockIdx.x * kTiles * kOuts + threadIdx.x;
  unsigned char* h = shared_h;
  uint16_t residual = 0;
  if constexpr (kIsGated) {
    const uint32_t factor = static_cast<const uint32_t*>(p.norm_weight)[threadIdx.x];
    dependency_wait();
    float2 sums[kNumSums];
#pragma unroll
    for (int g = 0; g < kNumSums; ++g) sums[g] = load_sums(p.sums + g * kIn + threadIdx.x * 2);
    const float2 x = unpack_pair(load_pair(static_cast<const uint32_t*>(p.x) + threadIdx.x), T());
#pragma unroll
    for (int g = 1; g < kNumSums; ++g) {
      sums[0].x += sums[g].x;
      sums[0].y += sums[g].y;
    }
    const float2 projected = unpack_pair(pack_pair<T>(sums[0].x, sums[0].y), T());
    const uint32_t packed = pack_pair<T>(x.x + projected.x, x.y + projected.y);
    if (blockIdx.x == 0) static_cast<uint32_t*>(p.hidden)[threadIdx.x] = packed;
    const float2 hidden = unpack_pair(packed, T());
    const float sum = warp_reduce<Sum>(hidden.x * hidden.x + hidden.y * hidden.y);
    if (lane == 0) squares[warp] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) total += squares[i];
    const float scale = rsqrtf(total / kIn + p.eps);
    reinterpret_cast<uint32_t*>(h)[threadIdx.x] = normalize_pair(hidden, scale, factor, T());
    __syncthreads();
  } else {
    constexpr int kVectors = kWarpWidth / 256;  // vectors of 8 elements for each lane
    const int offset = warp_in_group * kWarpWidth * 2 + lane * 16;
    h += group * kIn * 2;
    uint4 factors[kVectors];
    if (kMode == GemvMma::kNorm) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        factors[i] = *reinterpret_cast<const uint4*>(static_cast<const char*>(p.norm_weight) + offset + i * 512);
      }
    }
    dependency_wait();
    uint4 x[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = load_activations(static_cast<const char*>(p.x) + offset + i * 512);
    if (kMode == GemvMma::kResidual && is_writer) {
      const T* source = static_cast<const T*>(p.residual) + out;
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(residual) : "l"(source) : "memory");
    }
    if (kMode == GemvMma::kNorm) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float f[8];
        unpack<T>(x[i], f);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += f[j] * f[j];
      }
      sum = warp_reduce<Sum>(sum);
      if (lane == 0) squares[warp] = sum;
      __syncthreads();
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += squares[group * kWarps + i];
      const float scale = rsqrtf(total / kIn + p.eps);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        x[i] = make_uint4(normalize_pair(unpack_pair(x[i].x, T()), scale, factors[i].x, T()),
                          normalize_pair(unpack_pair(x[i].y, T()), scale, factors[i].y, T()),
                          normalize_pair(unpack_pair(x[i].z, T()), scale, factors[i].z, T()),
                          normalize_pair(unpack_pair(x[i].w, T()), scale, factors[i].w, T()));
      }
    }
    // A warp reads what it wrote, in another order.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) *reinterpret_cast<uint4*>(h + offset + i * 512) = x[i];
    __syncwarp();
  }

  // There are several sums, so that a product need not wait for the one before.
  float sums[4][4] = {};
  // Column row % 2 of 8-row tiles is 32 elements further along; the other columns of the product are
  // not used.
  const unsigned char* source = h + warp_in_group * kWarpWidth * 2 + quarter * 16 + (kRows == 16 ? 0 : (row & 1) * 64);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint4 b = *reinterpret_cast<const uint4*>(source + i * kStep * 2);
    const uint4 top = weights[i][0], bottom = weights[i][1];
    const uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y}, high[4] = {top.z, bottom.z, top.w, bottom.w};
    mma_m16n8k16<T>(sums[2 * i % 4], low, b.x, b.y);
    mma_m16n8k16<T>(sums[2 * i % 4 + 1], high, b.z, b.w);
  }
  // For a row of W, element 0 of lane 4 * row has the product of the first half with column 0, element
  // 2 that of row + 8 with column 0, and element 3 that of row + 8 with column 1.
  if (quarter == 0) {
    const auto sum_of = [&](int i) { return (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]); };
    if (kRows == 16) {
      partials[warp][row] = sum_of(0);
      partials[warp][row + 8] = sum_of(2);
    } else {
      partials[warp][row] = sum_of(0) + sum_of(3);
    }
  }
  __syncthreads();
  if (!is_writer) return;
  const auto total_of = [&](int i) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += partials[out_tile * kWarps + w][i];
    return to_float(from_float<T>(total));
  };
  float value = total_of(out_row);
  if (kMode == GemvMma::kResidual) value += to_float(reinterpret_cast<const T&>(residual));
  if (kIsGated) value = to_float(from_float<T>(value / (1.0f + __expf(-value)))) * total_of(kOuts + out_row);
  static_cast<T*>(p.out)[out] = from_float<T>(value);
}

}  // namespace xserv

#define XSERV_DECODE_GEMV_MMA(NAME, MODE, ROWS, TILES, WARPS, STEPS, BLOCKS, SUFFIX, T)                    \
  extern "C" __global__ void __launch_bounds__(TILES * WARPS * 32, BLOCKS)                                 \
      xserv_linear_gemv_mma_##NAME##_##SUFFIX(const __grid_constant__ xserv::GemvMmaParams params) { \
    xserv::gemv_mma<T, xserv::GemvMma::MODE, ROWS, TILES, WARPS, STEPS>(params);                    \
  }
#define XSERV_DECODE_GEMV_MMA_ALL(SUFFIX, T)                                 \
  XSERV_DECODE_GEMV_MMA(norm, kNorm, 16, 2, 4, 8, 2, SUFFIX, T)              \
  XSERV_DECODE_GEMV_MMA(sums_swiglu, kSumsSwiglu, 16, 4, 4, 8, 1, SUFFIX, T) \
  XSERV_DECODE_GEMV_MMA(residual, kResidual, 8, 1, 6, 8, 3, SUFFIX, T)
XSERV_DECODE_GEMV_MMA_ALL(f16, __half)
XSERV_DECODE_GEMV_MMA_ALL(bf16, __nv_bfloat16)
#endif
