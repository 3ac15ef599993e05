// C = alpha * op(A) * op(B) + beta * C with Hopper's wgmma, for f16 and bf16 with f32 accumulation. The
// rest of the tensor-core family is tensor_core.cu, which says what A, B and C are and what they need.
//
// A block computes 128 rows of C with two groups of four warps, 64 rows each. Slices of A and B, 64
// along k, pass through a ring of shared-memory buffers filled by cp.async, from which wgmma reads them
// without fragments in registers. The products of one slice are still under way while those of the next
// are queued; a buffer is filled again when all warps have waited for the products before the last.
//
// The form "parts" sums k in p.k_per_split parts, each from zero, and adds them in their order, as the
// splits of linear/skinny.cu do, to the same bits (128x128 only: a second set of sums needs the
// registers).
//
// sm_90a has these instructions and no other target does: for the others the file is empty, and the
// host takes the kernels of tensor_core.cu.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"

namespace xserv {

struct GemmParams {
  const void* a;
  const void* b;
  void* c;
  float* workspace;  // unused
  int64_t lda, ldb, ldc;
  int64_t stride_a, stride_b, stride_c;
  int m, n, k;
  int k_per_split;  // for the form "parts": the number of parts; else unused
  float alpha, beta;
};
XSERV_LAYOUT_GemmParams;

constexpr int kThreads = 256, kTileM = 128, kTileK = 64;

// 16 bytes of shared memory, of which the first `bytes` come from global memory and the rest are zero.
__device__ __forceinline__ void cp_async_16_partial(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes));
}

__device__ __forceinline__ int clamp_bytes(int elements) { return min(max(elements, 0), 8) * 2; }

// One operand's slice in shared memory, `kRows` rows of op(A) (or columns of op(B)) by 64 of k, in the
// orientation of global memory and with the swizzle of 128 bytes (PTX ISA, "Shared Memory Matrix Layout"):
// along k as [kRows][64], else as blocks of 64 rows, [kRows / 64][64 of k][64 rows].
template <int kRows, bool kAlongK>
struct OperandSlice {
  static constexpr int kBytes = kRows * kTileK * 2;
  static constexpr int kBlockBytes = 64 * kTileK * 2;  // 64 rows, in both orientations
  static constexpr int kChunks = (kAlongK ? kTileK : kRows) / 8;
  static constexpr int kLinesPerPass = kThreads / kChunks;
  static constexpr int kPasses = kRows * kTileK / 8 / kThreads;
  static_assert(kLinesPerPass % 8 == 0, "the swizzle must not change from pass to pass");

  const char* source;   // this thread's chunk of the next slice
  int64_t pass_stride;  // bytes
  int64_t tile_stride;  // bytes
  uint32_t target;      // offset in the slice
  int first;            // along k: position of the chunk; else bytes of this column of chunks that exist
  int line;             // the other coordinate
  int num_lines;        // lines that exist, if kAlongK

  __device__ __forceinline__ void init(const void* base, int64_t ld, int row0, int num_rows) {
    const int chunk = threadIdx.x % kChunks;
    line = threadIdx.x / kChunks;
    target = chunk / 8 * kBlockBytes + line * 128 + ((chunk ^ line) & 7) * 16;
    pass_stride = kLinesPerPass * ld * 2;
    if (kAlongK) {
      first = chunk * 8;
      num_lines = num_rows - row0;
      tile_stride = kTileK * 2;
      source = static_cast<const char*>(base) + ((row0 + line) * ld + first) * 2;
    } else {
      first = clamp_bytes(num_rows - (row0 + chunk * 8));
      tile_stride = kTileK * ld * 2;
      source = static_cast<const char*>(base) + (line * ld + row0 + chunk * 8) * 2;
    }
  }

  // Starts this thread's copies; `k_left` elements of k are left from this slice's start.
  __device__ __forceinline__ void copy(uint32_t slice, int k_left) const {
    const int bytes_along_k = kAlongK ? clamp_bytes(k_left - first) : 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool exists = line + pass * kLinesPerPass < (kAlongK ? num_lines : k_left);
      cp_async_16_partial(slice + target + pass * kLinesPerPass * 128, source + pass * pass_stride,
                          exists ? (kAlongK ? bytes_along_k : first) : 0);
    }
  }

  // The descriptor of the rows starting at a multiple of 64, for the first 16 of k: start, distance of
  // the blocks of 64 rows (read only where rows are contiguous), distance of eight lines, swizzle of
  // 128 bytes.
  __device__ __forceinline__ static uint64_t descriptor(uint32_t slice, int row) {
    const uint32_t start = slice + row / 64 * kBlockBytes;
    constexpr uint64_t kFixed = static_cast<uint64_t>(kAlongK ? 1 : kBlockBytes >> 4) << 16 |
                                static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    return (start & 0x3ffff) >> 4 | kFixed;
  }
  // The step to the next 16 of k, in the unit of descriptors.
  static constexpr int kStep = (kAlongK ? 16 * 2 : 16 * 128) >> 4;
};

template <typename T, int kTileN, int kStages, bool kTransA, bool kTransB, bool kInParts = false>
__device__ __forceinline__ void gemm_wgmma(const GemmParams& p) {
  constexpr int kSums = kTileN / 2;
  using SliceA = OperandSlice<kTileM, !kTransA>;
  using SliceB = OperandSlice<kTileN, kTransB>;
  constexpr uint32_t kStageBytes = SliceA::kBytes + SliceB::kBytes;
  static_assert(kStageBytes == (kTileM + kTileN) * kTileK * 2, "what the host asks for");
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0, "the swizzle needs aligned slices");
  extern __shared__ __align__(1024) unsigned char shared[];

  // Tiles run down groups of 1024 rows, so that the blocks of a wave share rows of A and columns of B in L2.
  constexpr int kRaster = 1024 / kTileM;
  const int tiles_m = (p.m + kTileM - 1) / kTileM, tiles_n = (p.n + kTileN - 1) / kTileN;
  const int group = blockIdx.x / (kRaster * tiles_n);
  const int group_rows = min(tiles_m - group * kRaster, kRaster);
  const int in_group = blockIdx.x - group * kRaster * tiles_n;
  const int row0 = (group * kRaster + in_group % group_rows) * kTileM;
  const int column0 = in_group / group_rows * kTileN;
  const int num_slices = (p.k + kTileK - 1) / kTileK;

  SliceA slice_a;
  SliceB slice_b;
  slice_a.init(static_cast<const T*>(p.a) + blockIdx.z * p.stride_a, p.lda, row0, p.m);
  slice_b.init(static_cast<const T*>(p.b) + blockIdx.z * p.stride_b, p.ldb, column0, p.n);
  const uint32_t ring = shared_address(shared), ring_end = ring + kStages * kStageBytes;
  uint32_t write = ring, read = ring;
  int k_left = p.k;  // of the slice to be copied next
  const auto copy = [&]() {
    if (k_left > 0) {
      slice_a.copy(write, k_left);
      slice_b.copy(write + SliceA::kBytes, k_left);
      slice_a.source += slice_a.tile_stride;
      slice_b.source += slice_b.tile_stride;
      k_left -= kTileK;
      write += kStageBytes;
      if (write == ring_end) write = ring;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 2; ++stage) copy();

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float sum[kSums];  // the first product overwrites it
  // Parts end where linear/skinny.cu ends them, at multiples of kPartSlices.
  constexpr int kPartSlices = 256 / kTileK;
  const int num_units = (num_slices + kPartSlices - 1) / kPartSlices;
  int part = 1, part_begin = 0;
  const auto part_end = [&]() { return part * num_units / p.k_per_split * kPartSlices; };
  float total[kInParts ? kSums : 1];
#pragma unroll
  for (int i = 0; i < (kInParts ? kSums : 1); ++i) total[i] = 0.0f;
  int next_part = kInParts ? part_end() : num_slices;
  for (int slice = 0; slice < num_slices; ++slice) {
    cp_async_wait<kStages - 3>();
    fence_for_wgmma();
    wgmma_wait<1>();
    // This slice has arrived, and all warps have finished the products of the slice before the last.
    __syncthreads();
    const uint64_t a = SliceA::descriptor(read, warp / 4 * 64);
    const uint64_t b = SliceB::descriptor(read + SliceA::kBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      wgmma<T, kTransA, !kTransB>(sum, a + step * SliceA::kStep, b + step * SliceB::kStep,
                                  slice > part_begin || step > 0);
    }
    wgmma_commit();
    read += kStageBytes;
    if (read == ring_end) read = ring;
    copy();
    if (kInParts && slice + 1 == next_part && slice + 1 < num_slices) {
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        asm volatile("" : "+f"(sum[i])::"memory");
        total[kInParts ? i : 0] += sum[i];
      }
      part_begin = slice + 1;
      ++part;
      next_part = part_end();
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sum[i])::"memory");  // no use before the wait
  if (kInParts) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = total[kInParts ? i : 0] + sum[i];
  }
  cp_async_wait<0>();

  // Each warp has 16 rows. They go through shared memory, so that it stores whole lines; the pad of 16
  // bytes keeps both directions free of bank conflicts.
  constexpr int kPitch = kTileN * 2 + 16;
  static_assert(kTileM * kPitch <= kStages * kStageBytes, "staging must fit the ring");
  __syncthreads();
  unsigned char* staging = shared + warp * 16 * kPitch;
  T* c = static_cast<T*>(p.c) + blockIdx.z * p.stride_c;
  const bool is_aligned = (reinterpret_cast<uintptr_t>(c) & 15) == 0 && p.ldc % 8 == 0;
  const int row_base = row0 + warp * 16, quad_row = lane >> 2, quad_column = (lane & 3) * 2;
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float low = p.alpha * sum[j * 4 + half * 2], high = p.alpha * sum[j * 4 + half * 2 + 1];
      if (p.beta != 0.0f) {
        const int row = row_base + quad_row + half * 8, column = column0 + j * 8 + quad_column;
        const T* old = c + row * p.ldc + column;
        if (row < p.m && column < p.n) low += p.beta * to_float(old[0]);
        if (row < p.m && column + 1 < p.n) high += p.beta * to_float(old[1]);
      }
      *reinterpret_cast<uint32_t*>(staging + (quad_row + half * 8) * kPitch + (j * 8 + quad_column) * 2) =
          pack_pair<T>(low, high);
    }
  }
  __syncwarp();
  constexpr int kChunks = kTileN / 8;
#pragma unroll 4
  for (int chunk = lane; chunk < 16 * kChunks; chunk += 32) {
    const int row = chunk / kChunks, column = column0 + chunk % kChunks * 8;
    const Vec<T, 8> values =
        *reinterpret_cast<const Vec<T, 8>*>(staging + row * kPitch + chunk % kChunks * 16);
    T* out = c + (row_base + row) * p.ldc + column;
    if (row_base + row >= p.m) continue;
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

}  // namespace xserv

// xserv_gemm_wgmma_<tile>_<transposes>_<dtype>: n or t for A, then for B.
#define XSERV_GEMM(tile, TN, STAGES, BLOCKS, trans, TA, TB, suffix, T)                                \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads, BLOCKS)                               \
      xserv_gemm_wgmma_##tile##_##trans##_##suffix(const __grid_constant__ xserv::GemmParams params) { \
    xserv::gemm_wgmma<T, TN, STAGES, TA, TB>(params);                                                 \
  }
#define XSERV_GEMM_TRANS(tile, TN, STAGES, BLOCKS, suffix, T)        \
  XSERV_GEMM(tile, TN, STAGES, BLOCKS, nn, false, false, suffix, T)  \
  XSERV_GEMM(tile, TN, STAGES, BLOCKS, nt, false, true, suffix, T)   \
  XSERV_GEMM(tile, TN, STAGES, BLOCKS, tn, true, false, suffix, T)   \
  XSERV_GEMM(tile, TN, STAGES, BLOCKS, tt, true, true, suffix, T)
#define XSERV_GEMM_ALL(tile, TN, STAGES, BLOCKS)                 \
  static_assert(STAGES * (xserv::kTileM + TN) * xserv::kTileK * 2 == xserv::shared_bytes::gemm_wgmma_##tile); \
  XSERV_GEMM_TRANS(tile, TN, STAGES, BLOCKS, f16, __half)        \
  XSERV_GEMM_TRANS(tile, TN, STAGES, BLOCKS, bf16, __nv_bfloat16)

// 192 KB, one block an SM.
XSERV_GEMM_ALL(128x256, 256, 4, 1)
// For C with few tiles. 192 KB, one block an SM: three stages in two blocks are half as fast at m = 512.
XSERV_GEMM_ALL(128x128, 128, 6, 1)

#define XSERV_GEMM_PARTS(suffix, T)                                                      \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads, 1)                       \
      xserv_gemm_wgmma_128x128_parts_nt_##suffix(                                        \
          const __grid_constant__ xserv::GemmParams params) {                            \
    xserv::gemm_wgmma<T, 128, 6, false, true, true>(params);                             \
  }
XSERV_GEMM_PARTS(f16, __half)
XSERV_GEMM_PARTS(bf16, __nv_bfloat16)
#endif
