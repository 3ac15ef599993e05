// C = alpha * op(A) * op(B) + beta * C on the tensor cores, for f16 and bf16 with f32 accumulation.
//
//   A  op(A) is [m, k]: stored [m, k], or [k, m] if transposed; lda elements from row to row
//   B  op(B) is [k, n]: stored [k, n], or [n, k] if transposed (a weight of torch.nn.Linear); ldb
//   C  [m, n]; ldc. Batches lie stride_a, stride_b and stride_c elements apart (0 shares an operand).
//
// A block computes one tile of C. Slices of A and B pass through a ring of `kStages` shared-memory buffers
// filled by cp.async; each warp computes up to 64x64 of C with mma.m16n8k16 from fragments that ldmatrix
// fetches one k-step ahead (the multistage scheme of CUTLASS 2, "Efficient GEMM in CUDA").
//
// A warp computes 64x64 because this is the largest square that fits the registers, and with it shared
// memory delivers 32 KB per 128x256x16 step; smaller warp tiles need more of it for the same products.
// On an H200 the kernel reaches 52 to 59 % of cuBLAS at m >= 2048, where wgmma.cu serves instead. Both
// operands keep the orientation that they have in memory; ldmatrix .trans transposes those that do not
// run along k.
//
// Needs: A, B 16-byte aligned, lda, ldb, stride_a, stride_b multiples of 8 (cp.async copies 16 bytes).
// m, n and k may be anything: the edges are filled with zeros. So may C and ldc; aligned ones are
// stored faster. Split k: with gridDim.y > 1 the kernel writes f32 partials, which
// xserv_gemm_split_k_reduce adds in a fixed order.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"

namespace xserv {

struct GemmParams {
  const void* a;
  const void* b;
  void* c;
  float* workspace;  // [batch, num_splits, m, n] if num_splits > 1, else null
  int64_t lda, ldb, ldc;
  int64_t stride_a, stride_b, stride_c;
  int m, n, k;
  int k_per_split;  // a multiple of 64; at least k without a split
  float alpha, beta;
};
XSERV_LAYOUT_GemmParams;

// 16 bytes of shared memory, of which the first `bytes` come from global memory and the rest are zero.
__device__ __forceinline__ void cp_async_16_partial(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes));
}

__device__ __forceinline__ int clamp_bytes(int elements) { return min(max(elements, 0), 8) * 2; }

// One operand's tile in shared memory: `kRows` rows of op(A) (or columns of op(B)) by kDepth along k, as
// lines of 16-byte chunks. Chunks are exchanged within a line (XOR with the line number), so that the eight
// rows of an ldmatrix, and the chunks that eight threads copy, fall into different banks.
template <int kRows, int kDepth, int kThreads, bool kAlongK>
struct OperandTile {
  static constexpr int kLineBytes = (kAlongK ? kDepth : kRows) * 2;
  static constexpr int kBytes = kRows * kDepth * 2;
  static constexpr int kChunks = kLineBytes / 16;
  static constexpr int kLinesPerPass = kThreads / kChunks;
  static constexpr int kPasses = kRows * kDepth / 8 / kThreads;
  static_assert(kLinesPerPass % 8 == 0 && kPasses >= 1, "the swizzle must not change from pass to pass");
  static_assert(kBytes % 1024 == 0, "stages must keep the swizzle's alignment");

  // Lines of 64 bytes share a row of banks in pairs.
  __device__ __forceinline__ static int swizzle(int chunk, int line) {
    return kChunks >= 8 ? chunk ^ (line & 7) : chunk ^ ((line >> 1) & 3);
  }

  const char* source;    // this thread's chunk of the next tile
  int64_t pass_stride;   // bytes
  int64_t tile_stride;   // bytes
  uint32_t target;       // offset in the tile
  int first;             // position of the chunk: along k if kAlongK, else along the rows
  int line;              // the other coordinate
  int num_lines;         // lines of this tile that exist, if kAlongK

  __device__ __forceinline__ void init(const void* base, int64_t ld, int row0, int num_rows, int k0) {
    const int chunk = threadIdx.x % kChunks;
    line = threadIdx.x / kChunks;
    target = line * kLineBytes + swizzle(chunk, line) * 16;
    pass_stride = kLinesPerPass * ld * 2;
    if (kAlongK) {
      first = chunk * 8;
      num_lines = num_rows - row0;
      tile_stride = kDepth * 2;
      source = static_cast<const char*>(base) + ((row0 + line) * ld + k0 + first) * 2;
    } else {
      first = clamp_bytes(num_rows - (row0 + chunk * 8));  // bytes of this column of chunks that exist
      tile_stride = kDepth * ld * 2;
      source = static_cast<const char*>(base) + ((k0 + line) * ld + row0 + chunk * 8) * 2;
    }
  }

  // Starts the copies [begin, end) of this thread; `k_left` elements of k are left from this tile's start.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void copy(uint32_t tile, int k_left) const {
    const int bytes_along_k = kAlongK ? clamp_bytes(k_left - first) : 0;
#pragma unroll
    for (int pass = kBegin; pass < kEnd; ++pass) {
      const int this_line = line + pass * kLinesPerPass;
      const bool exists = this_line < (kAlongK ? num_lines : k_left);
      cp_async_16_partial(tile + target + pass * kLinesPerPass * kLineBytes, source + pass * pass_stride,
                          exists ? (kAlongK ? bytes_along_k : first) : 0);
    }
  }

  // Offset in the tile that this lane passes to ldmatrix for its warp's first 16 rows and k = 0. The four 8x8
  // matrices are (rows 0-7, k 0-7), then rows 8-15 first for A, k 8-15 first for B.
  template <bool kIsA>
  __device__ __forceinline__ static uint32_t lane_offset(int warp_row) {
    const int lane = threadIdx.x & 31;
    const int low = (lane >> 3) & 1, high = lane >> 4;
    const int row_half = kIsA ? low : high, k_half = kIsA ? high : low;
    if (kAlongK) {
      const int row = warp_row + (lane & 7) + row_half * 8;
      return row * kLineBytes + swizzle(k_half, row) * 16;
    }
    const int k = (lane & 7) + k_half * 8;
    return k * kLineBytes + swizzle(warp_row / 8 + row_half, k) * 16;
  }

  // Fragments of 16 rows by 16 of k. XOR reaches the other chunks of the line: the swizzle depends on the
  // lane alone.
  __device__ __forceinline__ static void load(uint32_t (&r)[4], uint32_t tile, uint32_t lane_offset,
                                              int group, int k_step) {
    if (kAlongK) {
      ldmatrix_x4(r, tile + (lane_offset ^ (k_step * 32)) + group * 16 * kLineBytes);
    } else {
      ldmatrix_x4_trans(r, tile + (lane_offset ^ (group * 32)) + k_step * 16 * kLineBytes);
    }
  }
};

template <typename T, int kTileM, int kTileN, int kTileK, int kWarpsM, int kWarpsN, int kStages,
          bool kTransA, bool kTransB>
__device__ __forceinline__ void gemm_tile(const GemmParams& p) {
  constexpr int kThreads = kWarpsM * kWarpsN * 32;
  constexpr int kWarpM = kTileM / kWarpsM, kWarpN = kTileN / kWarpsN;
  constexpr int kGroupsM = kWarpM / 16, kGroupsN = kWarpN / 16, kSteps = kTileK / 16;
  static_assert(kSteps % 2 == 0 && kWarpM % 32 == 0 && kWarpN % 32 == 0,
                "fragments alternate between two buffers");
  using TileA = OperandTile<kTileM, kTileK, kThreads, !kTransA>;
  using TileB = OperandTile<kTileN, kTileK, kThreads, kTransB>;
  constexpr uint32_t kStageBytes = TileA::kBytes + TileB::kBytes;
  static_assert(kStageBytes == (kTileM + kTileN) * kTileK * 2, "what the host asks for");
  extern __shared__ __align__(1024) unsigned char shared[];

  // Tiles run down groups of 1024 rows, so that the blocks of a wave share rows of A and columns of B in L2.
  constexpr int kRaster = 1024 / kTileM;
  const int tiles_m = (p.m + kTileM - 1) / kTileM, tiles_n = (p.n + kTileN - 1) / kTileN;
  const int group = blockIdx.x / (kRaster * tiles_n);
  const int group_rows = min(tiles_m - group * kRaster, kRaster);
  const int in_group = blockIdx.x - group * kRaster * tiles_n;
  const int row0 = (group * kRaster + in_group % group_rows) * kTileM;
  const int column0 = in_group / group_rows * kTileN;

  const int k_begin = blockIdx.y * p.k_per_split;
  const int num_k = min(p.k - k_begin, p.k_per_split);
  const int num_tiles = (num_k + kTileK - 1) / kTileK;

  TileA tile_a;
  TileB tile_b;
  tile_a.init(static_cast<const T*>(p.a) + blockIdx.z * p.stride_a, p.lda, row0, p.m, k_begin);
  tile_b.init(static_cast<const T*>(p.b) + blockIdx.z * p.stride_b, p.ldb, column0, p.n, k_begin);
  const uint32_t ring = shared_address(shared), ring_end = ring + kStages * kStageBytes;

  int k_left = num_k;  // of the tile to be copied next
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (k_left > 0) {
      tile_a.template copy<0, TileA::kPasses>(ring + stage * kStageBytes, k_left);
      tile_b.template copy<0, TileB::kPasses>(ring + stage * kStageBytes + TileA::kBytes, k_left);
      tile_a.source += tile_a.tile_stride;
      tile_b.source += tile_b.tile_stride;
      k_left -= kTileK;
    }
    cp_async_commit();
  }

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warp_row = warp % kWarpsM * kWarpM, warp_column = warp / kWarpsM * kWarpN;
  const uint32_t lane_a = TileA::template lane_offset<true>(warp_row);
  const uint32_t lane_b = TileB::template lane_offset<false>(warp_column) + TileA::kBytes;

  float sum[kGroupsM][kGroupsN * 2][4];
#pragma unroll
  for (int i = 0; i < kGroupsM; ++i) {
#pragma unroll
    for (int j = 0; j < kGroupsN * 2; ++j) sum[i][j][0] = sum[i][j][1] = sum[i][j][2] = sum[i][j][3] = 0.0f;
  }
  uint32_t a[2][kGroupsM][4], b[2][kGroupsN][4];
  const auto load_fragments = [&](int buffer, uint32_t stage, int step) {
#pragma unroll
    for (int i = 0; i < kGroupsM; ++i) TileA::load(a[buffer][i], stage, lane_a, i, step);
#pragma unroll
    for (int j = 0; j < kGroupsN; ++j) TileB::load(b[buffer][j], stage, lane_b, j, step);
  };

  cp_async_wait<kStages - 2>();
  __syncthreads();
  uint32_t read = ring, write = ring_end - kStageBytes;
  load_fragments(0, read, 0);

  for (int tile = 0; tile < num_tiles; ++tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_fragments((step + 1) & 1, read, (step + 1) % kSteps);
      if (step == 0 && k_left > 0) {
        tile_a.template copy<0, TileA::kPasses>(write, k_left);
        if (kSteps == 2) tile_b.template copy<0, TileB::kPasses>(write + TileA::kBytes, k_left);
      }
      if (kSteps > 2 && step == 1 && k_left > 0) {
        tile_b.template copy<0, TileB::kPasses>(write + TileA::kBytes, k_left);
      }
#pragma unroll
      for (int i = 0; i < kGroupsM; ++i) {
#pragma unroll
        for (int j = 0; j < kGroupsN; ++j) {
          // Back and forth over j, so that neighbouring products share a fragment.
          const int jj = i & 1 ? kGroupsN - 1 - j : j;
          mma_m16n8k16<T>(sum[i][2 * jj], a[step & 1][i], b[step & 1][jj][0], b[step & 1][jj][1]);
          mma_m16n8k16<T>(sum[i][2 * jj + 1], a[step & 1][i], b[step & 1][jj][2], b[step & 1][jj][3]);
        }
      }
      if (step == kSteps - 2) {
        // All warps have read this stage to its end (the last fragments are on their way), and the next
        // stage has arrived.
        tile_a.source += tile_a.tile_stride;
        tile_b.source += tile_b.tile_stride;
        k_left -= kTileK;
        cp_async_commit();
        cp_async_wait<kStages - 2>();
        __syncthreads();
        write = read;
        read += kStageBytes;
        if (read == ring_end) read = ring;
      }
    }
  }
  cp_async_wait<0>();

  const int quad_row = lane >> 2, quad_column = (lane & 3) * 2;
  if (p.workspace != nullptr) {
    float* out = p.workspace + (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * p.m * p.n;
#pragma unroll
    for (int i = 0; i < kGroupsM; ++i) {
#pragma unroll
      for (int j = 0; j < kGroupsN * 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = row0 + warp_row + i * 16 + quad_row + (e >> 1) * 8;
          const int column = column0 + warp_column + j * 8 + quad_column + (e & 1);
          if (row < p.m && column < p.n) out[static_cast<int64_t>(row) * p.n + column] = sum[i][j][e];
        }
      }
    }
    return;
  }

  // The rows go through shared memory, 16 at a time, so that a warp stores whole lines. The pad of 16
  // bytes keeps both directions free of bank conflicts.
  constexpr int kPitch = kWarpN * 2 + 16;
  static_assert(kWarpsM * kWarpsN * 16 * kPitch <= kStages * kStageBytes, "staging must fit the ring");
  __syncthreads();
  unsigned char* staging = shared + warp * 16 * kPitch;
  T* c = static_cast<T*>(p.c) + blockIdx.z * p.stride_c;
  const bool is_aligned = (reinterpret_cast<uintptr_t>(c) & 15) == 0 && p.ldc % 8 == 0;
#pragma unroll
  for (int i = 0; i < kGroupsM; ++i) {
    const int row_base = row0 + warp_row + i * 16;
#pragma unroll
    for (int j = 0; j < kGroupsN * 2; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float low = p.alpha * sum[i][j][half * 2], high = p.alpha * sum[i][j][half * 2 + 1];
        if (p.beta != 0.0f) {
          const int row = row_base + quad_row + half * 8;
          const int column = column0 + warp_column + j * 8 + quad_column;
          const T* old = c + row * p.ldc + column;
          if (row < p.m && column < p.n) low += p.beta * to_float(old[0]);
          if (row < p.m && column + 1 < p.n) high += p.beta * to_float(old[1]);
        }
        *reinterpret_cast<uint32_t*>(staging + (quad_row + half * 8) * kPitch + (j * 8 + quad_column) * 2) =
            pack_pair<T>(low, high);
      }
    }
    __syncwarp();
    constexpr int kChunks = kWarpN / 8;
#pragma unroll
    for (int chunk = lane; chunk < 16 * kChunks; chunk += 32) {
      const int row = chunk / kChunks, column = column0 + warp_column + chunk % kChunks * 8;
      const Vec<T, 8> values =
          *reinterpret_cast<const Vec<T, 8>*>(staging + row * kPitch + chunk % kChunks * 16);
      T* out = c + (row_base + row) * p.ldc + column;
      if (row_base + row < p.m) {
        if (is_aligned && column + 8 <= p.n) {
          *reinterpret_cast<Vec<T, 8>*>(out) = values;
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (column + e < p.n) out[e] = values.values[e];
          }
        }
      }
    }
    __syncwarp();
  }
}

// Adds the partials in the order of k, with one thread per element.
template <typename T>
__device__ __forceinline__ void split_k_reduce(const GemmParams& p, int num_splits) {
  const int64_t size = static_cast<int64_t>(p.m) * p.n;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const float* partials = p.workspace + blockIdx.z * num_splits * size + i;
  float sum = 0.0f;
#pragma unroll 4
  for (int split = 0; split < num_splits; ++split) sum += partials[split * size];
  const int64_t row = i / p.n;
  T* out = static_cast<T*>(p.c) + blockIdx.z * p.stride_c + row * p.ldc + (i - row * p.n);
  float value = p.alpha * sum;
  if (p.beta != 0.0f) value += p.beta * to_float(*out);
  *out = from_float<T>(value);
}

}  // namespace xserv

// xserv_gemm_tensor_core_<tile>_<transposes>_<dtype>: n or t for A, then for B.
#define XSERV_GEMM(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, trans, TA, TB, suffix, T)                       \
  extern "C" __global__ void __launch_bounds__(WM * WN * 32, BLOCKS)                                         \
      xserv_gemm_tensor_core_##tile##_##trans##_##suffix(const __grid_constant__ xserv::GemmParams params) { \
    xserv::gemm_tile<T, TM, TN, TK, WM, WN, STAGES, TA, TB>(params);                                         \
  }
#define XSERV_GEMM_TRANS(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, suffix, T)                  \
  XSERV_GEMM(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, nn, false, false, suffix, T)            \
  XSERV_GEMM(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, nt, false, true, suffix, T)             \
  XSERV_GEMM(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, tn, true, false, suffix, T)             \
  XSERV_GEMM(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, tt, true, true, suffix, T)
#define XSERV_GEMM_ALL(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS)                               \
  static_assert(STAGES * (TM + TN) * TK * 2 == xserv::shared_bytes::gemm_tensor_core_##tile);  \
  XSERV_GEMM_TRANS(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, f16, __half)                      \
  XSERV_GEMM_TRANS(tile, TM, TN, TK, WM, WN, STAGES, BLOCKS, bf16, __nv_bfloat16)

// The fastest tiles in a sweep on an H200 (depth, stages and warps; 2048x6144x4096 in TFLOP/s, nt):
// 192 KB, one block an SM: 464.
XSERV_GEMM_ALL(128x256, 128, 256, 64, 2, 4, 4, 1)
// 64 KB, two blocks an SM (one on sm_86 and sm_89): 432. For devices that cannot give a block 192 KB.
XSERV_GEMM_ALL(128x128, 128, 128, 32, 2, 2, 4, 2)
// 72 KB, three blocks an SM: 364; fills the device where there are few tiles.
XSERV_GEMM_ALL(64x128, 64, 128, 64, 1, 4, 3, 3)
// 64 KB, three blocks an SM: 270; few rows.
XSERV_GEMM_ALL(64x64, 64, 64, 64, 2, 2, 4, 3)

#define XSERV_SPLIT_K_REDUCE(suffix, T)                                                  \
  extern "C" __global__ void __launch_bounds__(256) xserv_gemm_split_k_reduce_##suffix(  \
      const __grid_constant__ xserv::GemmParams params, int num_splits) {                \
    xserv::split_k_reduce<T>(params, num_splits);                                        \
  }
XSERV_SPLIT_K_REDUCE(f16, __half)
XSERV_SPLIT_K_REDUCE(bf16, __nv_bfloat16)
