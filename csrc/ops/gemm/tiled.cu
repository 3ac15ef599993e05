// C = alpha * op(A) * op(B) + beta * C in plain FMA, with f32 accumulation.
//
//   A  op(A) is [m, k]: stored [m, k], or [k, m] if transposed; lda elements from row to row
//   B  op(B) is [k, n]: stored [k, n], or [n, k] if transposed; ldb
//   C  [m, n]; ldc. Batches lie stride_a, stride_b and stride_c elements apart (0 shares an operand).
//   beta = 0 does not read C.
//
//   gemm_naive   one thread per element: the reference for the others
//   gemm_tiled   32x32 of C per block: any size, stride and alignment, so it is the fallback of all others
//   gemm_simt    f32, 128x128 of C per block, 8x8 per thread: full f32 precision where cuBLAS is absent
//                (H200, 2048x4096x4096: 36.6 TFLOP/s, cuBLAS 49.7). Needs A and B 16-byte aligned
//                and lda, ldb, stride_a, stride_b multiples of 4
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"

namespace xserv {

struct SimtGemmParams {
  const void* a;
  const void* b;
  void* c;
  int64_t lda, ldb, ldc;
  int64_t stride_a, stride_b, stride_c;
  int m, n, k;
  int trans_a, trans_b;  // unused in gemm_simt, which has a kernel for each pair
  float alpha, beta;
};
XSERV_LAYOUT_SimtGemmParams;

template <typename T>
__device__ __forceinline__ void store_scaled(T* out, float sum, float alpha, float beta) {
  float value = alpha * sum;
  if (beta != 0.0f) value += beta * to_float(*out);
  *out = from_float<T>(value);
}

// 256 threads compute 8 rows by 32 columns; neighbours lie along a row, so that they store neighbours.
template <typename T>
__device__ __forceinline__ void gemm_naive(const SimtGemmParams& p) {
  const unsigned tiles_n = (p.n + 31) / 32;
  const int row = blockIdx.x / tiles_n * 8 + threadIdx.x / 32;
  const int column = blockIdx.x % tiles_n * 32 + threadIdx.x % 32;
  if (row >= p.m || column >= p.n) return;
  const T* a = static_cast<const T*>(p.a) + blockIdx.z * p.stride_a + row * (p.trans_a ? 1 : p.lda);
  const T* b = static_cast<const T*>(p.b) + blockIdx.z * p.stride_b + column * (p.trans_b ? p.ldb : 1);
  const int64_t step_a = p.trans_a ? p.lda : 1, step_b = p.trans_b ? 1 : p.ldb;
  float sum = 0.0f;
  for (int64_t k = 0; k < p.k; ++k) sum = fmaf(to_float(a[k * step_a]), to_float(b[k * step_b]), sum);
  store_scaled(static_cast<T*>(p.c) + blockIdx.z * p.stride_c + row * p.ldc + column, sum, p.alpha, p.beta);
}

constexpr int kTile = 32;

// A 32x32 tile as [k][row] floats; zeros outside. `along_k`: k is the contiguous axis in memory, and then
// neighbouring threads read neighbouring k. The pitch of 33 makes both ways of writing conflict-free.
template <typename T>
__device__ __forceinline__ void load_tile(float (&tile)[kTile][kTile + 1], const T* source, int64_t ld,
                                          int row0, int num_rows, int k0, int num_k, bool along_k) {
  const int inner = threadIdx.x % kTile;
#pragma unroll 8
  for (int outer = threadIdx.x / kTile; outer < kTile; outer += 4) {
    const int row = along_k ? outer : inner, k = along_k ? inner : outer;
    float value = 0.0f;
    if (row0 + row < num_rows && k0 + k < num_k) {
      const int64_t line = along_k ? row0 + row : k0 + k, position = along_k ? k0 + k : row0 + row;
      value = to_float(source[line * ld + position]);
    }
    tile[k][row] = value;
  }
}

// 128 threads as 16 rows by 8 columns; a thread computes 2x4 elements, 16 rows and 8 columns apart.
template <typename T>
__device__ __forceinline__ void gemm_tiled(const SimtGemmParams& p) {
  __shared__ float tile_a[kTile][kTile + 1], tile_b[kTile][kTile + 1];
  const T* a = static_cast<const T*>(p.a) + blockIdx.z * p.stride_a;
  const T* b = static_cast<const T*>(p.b) + blockIdx.z * p.stride_b;
  const int tx = threadIdx.x % 8, ty = threadIdx.x / 8;
  const unsigned tiles_m = (p.m + kTile - 1) / kTile;
  const int row0 = blockIdx.x % tiles_m * kTile, column0 = blockIdx.x / tiles_m * kTile;
  float sum[2][4] = {};
  for (int k0 = 0; k0 < p.k; k0 += kTile) {
    load_tile(tile_a, a, p.lda, row0, p.m, k0, p.k, !p.trans_a);
    load_tile(tile_b, b, p.ldb, column0, p.n, k0, p.k, p.trans_b != 0);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      float va[2], vb[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) va[i] = tile_a[k][ty + 16 * i];
#pragma unroll
      for (int j = 0; j < 4; ++j) vb[j] = tile_b[k][tx + 8 * j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(va[i], vb[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
  T* c = static_cast<T*>(p.c) + blockIdx.z * p.stride_c;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + ty + 16 * i, column = column0 + tx + 8 * j;
      if (row < p.m && column < p.n) store_scaled(c + row * p.ldc + column, sum[i][j], p.alpha, p.beta);
    }
  }
}

// One operand's tile of gemm_simt: 128 rows of op(A) (columns of op(B)) by 16 of k, in the orientation of
// memory: [128][16 + 4] if k is contiguous, else [16][128]. The pad of 4 floats spreads eight rows over
// all banks.
template <bool kAlongK>
struct SimtTile {
  static constexpr int kRows = 128, kDepth = 16;
  static constexpr int kPitch = kAlongK ? kDepth + 4 : kRows;
  static constexpr int kFloats = kAlongK ? kRows * kPitch : kDepth * kPitch;

  // Returns the row of the tile that is the i-th of eight of thread t of 16. Along k, a thread's rows
  // are 16 apart, so that neighbouring threads read neighbouring rows; else they are two runs of four,
  // one vector each.
  __device__ __forceinline__ static int row(int t, int i) {
    return kAlongK ? t + 16 * i : t * 4 + i % 4 + i / 4 * 64;
  }

  // The tile has 512 vectors of 4 floats, two per thread.
  __device__ __forceinline__ static void copy(float* tile, const float* source, int64_t ld, int row0,
                                              int num_rows, int k0, int num_k) {
    constexpr int kVectors = (kAlongK ? kDepth : kRows) / 4;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      const int vector = threadIdx.x + pass * 256;
      const int line = vector / kVectors, position = vector % kVectors * 4;
      const int first_line = kAlongK ? row0 : k0, num_lines = kAlongK ? num_rows : num_k;
      const int first = kAlongK ? k0 : row0, length = kAlongK ? num_k : num_rows;
      const int floats = first_line + line < num_lines ? min(max(length - first - position, 0), 4) : 0;
      const float* from = source + static_cast<int64_t>(first_line + line) * ld + first + position;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       shared_address(tile + line * kPitch + position)),
                   "l"(from), "r"(floats * 4));
    }
  }

  // Loads the thread's eight rows for two steps of k from k0 (four would not leave registers for the
  // sums).
  __device__ __forceinline__ static void load(float (&v)[8][2], const float* tile, int t, int k0) {
    if (kAlongK) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 f = *reinterpret_cast<const float2*>(tile + row(t, i) * kPitch + k0);
        v[i][0] = f.x, v[i][1] = f.y;
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 f = *reinterpret_cast<const float4*>(tile + (k0 + k) * kPitch + t * 4 + half * 64);
          v[half * 4][k] = f.x, v[half * 4 + 1][k] = f.y, v[half * 4 + 2][k] = f.z, v[half * 4 + 3][k] = f.w;
        }
      }
    }
  }
};

// 256 threads, 16x16 of 8x8 elements. Three buffers of shared memory: one in use, two on their way.
template <bool kTransA, bool kTransB>
__device__ __forceinline__ void gemm_simt(const SimtGemmParams& p) {
  using TileA = SimtTile<!kTransA>;
  using TileB = SimtTile<kTransB>;
  constexpr int kDepth = 16, kStages = 3, kStageFloats = TileA::kFloats + TileB::kFloats;
  static_assert(kStages * kStageFloats * 4 ==
                (kTransA ? (kTransB ? shared_bytes::gemm_simt_tt : shared_bytes::gemm_simt_tn)
                         : (kTransB ? shared_bytes::gemm_simt_nt : shared_bytes::gemm_simt_nn)));
  extern __shared__ __align__(16) float simt_shared[];

  // Groups of 8 tile rows share their columns of B in L2.
  const int tiles_m = (p.m + 127) / 128, tiles_n = (p.n + 127) / 128;
  const int group = blockIdx.x / (8 * tiles_n), group_rows = min(tiles_m - group * 8, 8);
  const int in_group = blockIdx.x - group * 8 * tiles_n;
  const int row0 = (group * 8 + in_group % group_rows) * 128, column0 = in_group / group_rows * 128;
  const float* a = static_cast<const float*>(p.a) + blockIdx.z * p.stride_a;
  const float* b = static_cast<const float*>(p.b) + blockIdx.z * p.stride_b;

  // A warp covers 4x8 threads of C: 12 distinct vectors of shared memory for each step of k.
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tx = (warp & 1) * 8 + (lane & 7), ty = (warp >> 1) * 4 + (lane >> 3);
  const int num_tiles = (p.k + kDepth - 1) / kDepth;
  const auto copy = [&](int tile) {
    if (tile < num_tiles) {
      float* stage = simt_shared + tile % kStages * kStageFloats;
      TileA::copy(stage, a, p.lda, row0, p.m, tile * kDepth, p.k);
      TileB::copy(stage + TileA::kFloats, b, p.ldb, column0, p.n, tile * kDepth, p.k);
    }
    cp_async_commit();
  };
  float sum[8][8] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    copy(tile + kStages - 1);
    const float* stage = simt_shared + tile % kStages * kStageFloats;
#pragma unroll 2
    for (int k0 = 0; k0 < kDepth; k0 += 2) {
      float va[8][2], vb[8][2];
      TileA::load(va, stage, ty, k0);
      TileB::load(vb, stage + TileA::kFloats, tx, k0);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(va[i][k], vb[j][k], sum[i][j]);
        }
      }
    }
  }
  cp_async_wait<0>();

  float* c = static_cast<float*>(p.c) + blockIdx.z * p.stride_c;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = row0 + TileA::row(ty, i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = column0 + TileB::row(tx, j);
      if (row < p.m && column < p.n) store_scaled(c + row * p.ldc + column, sum[i][j], p.alpha, p.beta);
    }
  }
}

}  // namespace xserv

#define XSERV_GEMM_PLAIN(suffix, T)                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                     \
      xserv_gemm_naive_##suffix(const __grid_constant__ xserv::SimtGemmParams params) { \
    xserv::gemm_naive<T>(params);                                                       \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(128)                                     \
      xserv_gemm_tiled_##suffix(const __grid_constant__ xserv::SimtGemmParams params) { \
    xserv::gemm_tiled<T>(params);                                                       \
  }
XSERV_FOR_EACH_DTYPE(XSERV_GEMM_PLAIN)

// n or t for A, then for B.
#define XSERV_GEMM_SIMT(trans, TA, TB)                                                         \
  extern "C" __global__ void __launch_bounds__(256, 2)                                         \
      xserv_gemm_simt_##trans##_f32(const __grid_constant__ xserv::SimtGemmParams params) {    \
    xserv::gemm_simt<TA, TB>(params);                                                          \
  }
XSERV_GEMM_SIMT(nn, false, false)
XSERV_GEMM_SIMT(nt, false, true)
XSERV_GEMM_SIMT(tn, true, false)
XSERV_GEMM_SIMT(tt, true, true)
