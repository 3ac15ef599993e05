// Linear layers of prompts on Hopper, with what follows them.
//   out[t, i] = round(sum_k x[t, k] * weight[i, k])                                     plain
//   out[t, i] = round(round(silu(round(gate[t, i]))) * round(up[t, i]))                 swiglu
// where round() is to T, sums in f32, silu(g) = g / (1 + e^-g), and gate and up are the products with rows i
// and intermediate_size + i of weight [2 * intermediate_size, k]. The roundings are those of Transformers.
//
// x: [num_tokens, k]; weight: [n, k], row-major as the checkpoint has it; out: [num_tokens, n]. k and n are
// multiples of 8, with swiglu n = intermediate_size too; all begin at multiples of 16 bytes.
//
// A block computes tiles of 128 tokens by kTileN rows of weight: one warp copies stages of 64 along k into a
// ring, two groups of four warps multiply them, 64 tokens to a group and kTileN columns, with the sums in
// registers. Gate and up take turns in the tile by eight columns (the tensor map does that), so that a thread
// has both. The ring runs on across the tiles of a block; under programmatic launch the first stages of weight
// are fetched while the kernel before is still running. Results go through shared memory, 16 rows of a warp at
// a time, so that whole lines are written, and no other warp is waited for.
//
// What limits such tiles is the L2 cache, not the tensor cores (64 bytes per clock and SM for 128 x 128, where
// about 40 can be had). So blocks come in clusters of two with the same rows of weight and different tokens;
// each fetches one half of the rows for both.
//
// The products are added in the order of k: a token's result does not depend on the other tokens, nor on the tile.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "common/dtype.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/tma.cuh"
#include "common/tma_cluster.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"

namespace xserv {

struct PrefillGemmParams {
  TensorMap weight;
  TensorMap x;
  void* out;
  int64_t ldo;  // elements from token to token of out
  int num_tokens;
  int n;  // columns of out
  int k;
  int padding[7];
};
static_assert(sizeof(PrefillGemmParams) == 320, "PrefillGemmParams is mirrored in Rust");

enum class Epilogue { kPlain, kSwiglu };

constexpr int kBox = 64;  // of k: 128 bytes, the widest swizzle; and rows of a box
constexpr uint32_t kBoxBytes = kBox * kBox * 2;
constexpr int kWarps = 8, kTileTokens = 128, kPairTokens = 2 * kTileTokens;  // of a block, of a cluster
constexpr uint32_t kStagingBytes = 16 * 128;                                 // of a warp

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <typename T>
__device__ __forceinline__ float gated(float gate, float up) {
  const float g = rounded<T>(gate);
  return rounded<T>(g / (1.0f + expf(-g))) * rounded<T>(up);
}

// Stores four 8x8 matrices of 16-bit elements; lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The two packed columns of out that a thread has of 8 (swiglu: of 16) columns of sums, in its first row
// (kHalf = 0) or 8 rows further. sums: of the columns lane % 4 * 2 and the next, 4 for each 8 columns.
template <typename T, Epilogue kEpilogue, int kHalf>
__device__ __forceinline__ uint32_t finished(const float* sums) {
  if constexpr (kEpilogue == Epilogue::kSwiglu) {
    return pack_pair<T>(gated<T>(sums[kHalf * 2], sums[4 + kHalf * 2]),
                        gated<T>(sums[kHalf * 2 + 1], sums[5 + kHalf * 2]));
  } else {
    return pack_pair<T>(sums[kHalf * 2], sums[kHalf * 2 + 1]);
  }
}

// Writes 16 tokens of a warp, from `token` on and from column `column` of out on.
template <typename T, Epilogue kEpilogue, int kTileN>
struct RowWriter {
  static constexpr int kPerColumn = kEpilogue == Epilogue::kSwiglu ? 2 : 1;
  // Columns of out that pass through the staging area at a time.
  static constexpr int kColumns = kTileN / kPerColumn % 64 == 0 ? 64 : 32;
  static constexpr int kRounds = kTileN / kPerColumn / kColumns;
  static constexpr int kChunks = kColumns / 8, kRowsPerPass = 32 / kChunks, kPasses = 16 / kRowsPerPass;
  static_assert(kTileN % (kColumns * kPerColumn) == 0);

  const PrefillGemmParams& p;
  uint32_t staging;
  T* out;
  int num_rows;  // that exist, counted from this lane's first
  int column;

  __device__ __forceinline__ RowWriter(const PrefillGemmParams& params, uint32_t staging_area, int token,
                                       int first_column)
      : p(params), staging(staging_area) {
    const int lane = threadIdx.x & 31, row = token + lane / kChunks;
    column = first_column + lane % kChunks * 8;
    num_rows = p.num_tokens - row;
    out = static_cast<T*>(p.out) + row * p.ldo + column;
  }

  __device__ __forceinline__ bool exists(int round, int pass) const {
    return pass * kRowsPerPass < num_rows && column + round * kColumns < p.n;
  }
  __device__ __forceinline__ T* place(int round, int pass) const {
    return out + pass * kRowsPerPass * p.ldo + round * kColumns;
  }
  // Rows of the staging area are swizzled, so that 8 rows of a column of chunks lie in different banks.
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return kChunks == 8 ? row * 128 + ((chunk ^ row) & 7) * 16 : row * 64 + ((chunk ^ row >> 1) & 3) * 16;
  }

  // Into the staging area; then the sums are no longer needed.
  __device__ __forceinline__ void stage(const float* sums) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int block = 0; block < kChunks; block += 2) {
      const float* low = sums + block * 4 * kPerColumn;
      const float* high = low + 4 * kPerColumn;
      const uint32_t packed[4] = {finished<T, kEpilogue, 0>(low), finished<T, kEpilogue, 1>(low),
                                  finished<T, kEpilogue, 0>(high), finished<T, kEpilogue, 1>(high)};
      stmatrix_x4(staging + offset(lane & 15, block + (lane >> 4)), packed);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(int round) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4 v = load_shared(staging + offset(pass * kRowsPerPass + lane / kChunks, lane % kChunks));
      if (exists(round, pass)) *reinterpret_cast<uint4*>(place(round, pass)) = v;
    }
    __syncwarp();
  }
};

// Bytes of dynamic shared memory.
template <int kTileN, int kStages>
constexpr int kPrefillSharedBytes =
    kStages * (kTileTokens + kTileN) * kBox * 2 + kWarps * kStagingBytes + kStages * 16;

template <typename T, Epilogue kEpilogue, int kTileN, int kStages>
__device__ __forceinline__ void prefill_gemm(const PrefillGemmParams& p) {
  constexpr uint32_t kTokenBytes = kTileTokens * kBox * 2, kStageBytes = kTokenBytes + kTileN * kBox * 2;
  constexpr int kPerColumn = kEpilogue == Epilogue::kSwiglu ? 2 : 1;
  static_assert(kTileN % kBox == 0);
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), staging = ring + kStages * kStageBytes;
  const uint32_t full = staging + kWarps * kStagingBytes, empty = full + kStages * 8;

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank();
  const int first_tile = blockIdx.x / 2, tile_step = gridDim.x / 2;
  const int tiles_m = (p.num_tokens + kPairTokens - 1) / kPairTokens;
  const int tiles_n = (p.n * kPerColumn + kTileN - 1) / kTileN;
  const int num_tiles = tiles_m * tiles_n, num_chunks = (p.k + kBox - 1) / kBox;
  // Tiles run down groups of 1024 tokens, so that the blocks at work share tokens and weights in L2.
  constexpr int kRaster = 1024 / kPairTokens;
  const auto place = [&](int tile, int& token, int& row) {
    const int group = tile / (kRaster * tiles_n), in_group = tile - group * kRaster * tiles_n;
    const int height = min(tiles_m - group * kRaster, kRaster), column = in_group / height;
    token = (group * kRaster + in_group - column * height) * kPairTokens + rank * kTileTokens;
    row = column * kTileN;
  };

  if (threadIdx.x == kWarps * 32) {
    tensor_map_prefetch(&p.weight);
    tensor_map_prefetch(&p.x);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
      mbarrier_init(full + slot * 8, 1);
      mbarrier_init(empty + slot * 8, 2 * kWarps);
    }
    barrier_init_fence();
  }
  // The other block must have its barriers before bytes for them come.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();

  if (warp >= kWarps) {
    // 65536 registers are there for 384 threads, and the sums need more than their share.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const bool is_producer = threadIdx.x == kWarps * 32;
    const int my_tiles = first_tile < num_tiles ? (num_tiles - first_tile + tile_step - 1) / tile_step : 0;
    const int total = my_tiles * num_chunks;
    const uint64_t policy = l2_evict_normal();
    struct Cursor {
      int tile, chunk, slot, token, row;
    };
    Cursor of_weights{first_tile, 0, 0, 0, 0}, of_tokens;
    place(first_tile, of_weights.token, of_weights.row);
    of_tokens = of_weights;
    const auto advance = [&](Cursor& c) {
      if (++c.slot == kStages) c.slot = 0;
      if (++c.chunk == num_chunks) {
        c.chunk = 0;
        c.tile += tile_step;
        place(c.tile, c.token, c.row);
      }
    };
    const auto load_weights = [&]() {
      const Cursor& c = of_weights;
      const uint32_t barrier = full + c.slot * 8, target = ring + c.slot * kStageBytes + kTokenBytes;
      const int column = c.chunk * kBox;
      mbarrier_arrive_expect(barrier, kStageBytes);
#pragma unroll
      for (int box = 0; box < kTileN / kBox; ++box) {
        if ((box & 1) != rank) continue;
        const int row = c.row + box * kBox;
        if constexpr (kEpilogue == Epilogue::kSwiglu) {
          tma_multicast_4d(target + box * kBoxBytes, &p.weight, barrier, column, 0, 0, row / 16, 3, policy);
        } else {
          tma_multicast_2d(target + box * kBoxBytes, &p.weight, barrier, column, row, 3, policy);
        }
      }
      advance(of_weights);
    };
    const auto load_tokens = [&]() {
      const Cursor& c = of_tokens;
      const uint32_t barrier = full + c.slot * 8, target = ring + c.slot * kStageBytes;
#pragma unroll
      for (int box = 0; box < kTileTokens / kBox; ++box) {
        tma_load_2d(target + box * kBoxBytes, &p.x, barrier, c.chunk * kBox, c.token + box * kBox, policy);
      }
      advance(of_tokens);
    };
    if (is_producer) {
      for (int i = 0; i < min(kStages, total); ++i) load_weights();
      dependency_launch();
      dependency_wait();
      for (int i = 0; i < min(kStages, total); ++i) load_tokens();
      uint32_t parity = 0;
      for (int i = kStages; i < total; ++i) {
        mbarrier_wait(empty + of_tokens.slot * 8, parity);
        if (of_tokens.slot == kStages - 1) parity ^= 1;
        load_weights();
        load_tokens();
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    dependency_wait();
    // Start, (not read), distance of eight lines, swizzle of 128 bytes.
    constexpr uint64_t kFixed = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    const auto release = [&](int slot) {
      if (lane < 2) cluster_barrier_arrive(cluster_address(empty + slot * 8, lane));
    };
    int slot = 0;
    uint32_t parity = 0;
    float sum[kTileN / 2];
    for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
      int previous = -1;
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        mbarrier_wait(full + slot * 8, parity);
        const uint32_t tokens = ring + slot * kStageBytes + warp / 4 * kBoxBytes;
        const uint64_t a = (tokens & 0x3ffff) >> 4 | kFixed;
        const uint64_t b = ((ring + slot * kStageBytes + kTokenBytes) & 0x3ffff) >> 4 | kFixed;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBox / 16; ++step) {
          wgmma_along_k<T, kTileN>(sum, a + step * 2, b + step * 2, chunk > 0 || step > 0);
        }
        wgmma_commit();
        if (previous >= 0) {
          wgmma_wait<1>();
          release(previous);
        }
        previous = slot;
        if (++slot == kStages) slot = 0, parity ^= 1;
      }
      int token, row;
      place(tile, token, row);
      using Writer = RowWriter<T, kEpilogue, kTileN>;
      const Writer writer(p, staging + warp * kStagingBytes, token + warp * 16, row / kPerColumn);
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");  // not before the wait
      release(previous);
#pragma unroll
      for (int round = 0; round < Writer::kRounds; ++round) {
        writer.stage(sum + round * (kTileN / 2 / Writer::kRounds));
        writer.store(round);
      }
    }
  }
  // A block may not end while the other arrives at its barriers.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}

}  // namespace xserv

// xserv_prefill_gemm_<epilogue>_<rows of weight>_<dtype>
#define XSERV_PREFILL(NAME, EPILOGUE, ROWS, STAGES, SUFFIX, T)                                   \
  extern "C" __global__ void __launch_bounds__(384, 1) xserv_prefill_gemm_##NAME##_##ROWS##_##SUFFIX( \
      const __grid_constant__ xserv::PrefillGemmParams params) {                                 \
    xserv::prefill_gemm<T, xserv::Epilogue::EPILOGUE, ROWS, STAGES>(params);                     \
  }
#define XSERV_PREFILL_ALL(SUFFIX, T)                  \
  XSERV_PREFILL(plain, kPlain, 256, 4, SUFFIX, T)     \
  XSERV_PREFILL(plain, kPlain, 192, 5, SUFFIX, T)     \
  XSERV_PREFILL(plain, kPlain, 128, 6, SUFFIX, T)     \
  XSERV_PREFILL(swiglu, kSwiglu, 256, 4, SUFFIX, T)   \
  XSERV_PREFILL(swiglu, kSwiglu, 192, 5, SUFFIX, T)   \
  XSERV_PREFILL(swiglu, kSwiglu, 128, 6, SUFFIX, T)
XSERV_PREFILL_ALL(f16, __half)
XSERV_PREFILL_ALL(bf16, __nv_bfloat16)
#endif
