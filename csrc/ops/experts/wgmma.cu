// The products of experts with dense weights on Hopper.
//   out[s, i] = round(sum_k x[token of s, k] * W_e[i, k])                                plain
//   out[s, i] = round(round(silu(round(gate[s, i]))) * round(up[s, i]))                  swiglu
// for the slots s of every expert e, where round() is to T, sums in f32, silu(g) = g / (1 + e^-g), and gate
// and up are the products with rows i and n + i of W_e [2 * n, k].
//
// weight: the weights of all experts; x: [num_tokens, k], or with `tokens` null a row for each slot; out:
// [num_slots, n]; tiles, num_tiles: the slots, from route.cu.
//
// A block takes tiles of rows of weight by slots of one expert. As in linear/skinny.cu the weights are the A
// operand of wgmma, so that few slots leave nothing unused, and one warp copies stages along k into a ring, which
// runs on from tile to tile. Slots of a tile that do not exist are computed from what lies in the ring, and
// not stored; a product has half of the columns where these are enough. Sums run along k in one
// order, so that a token's result does not depend on the others.
//
// The rows of x lie anywhere, and are copied one by one; of more than a few the caller gathers them first. The
// kernel that comes after one with the same tiles fetches weights before it waits: whoever launches it has
// waited for the tiles.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "common/layouts.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"
#include "ops/experts/route.cuh"
#include "ops/linear/fragment.cuh"

namespace xserv {

constexpr int kBox = 64;  // of k: 128 bytes, the widest swizzle
constexpr int kGroups = 2;  // of four warps that multiply
constexpr int kMultipliers = kGroups * 128;

// The threads of a kernel. Where the sums of a group take two blocks of 64 rows, a whole group of warps copies, of
// which one does, because registers move between groups.
constexpr int threads_of(int blocks) { return kMultipliers + (blocks > 1 ? 128 : 32); }

// A bounded wait traps, and that joins the paths of groups with different registers (mbarrier.cuh).
template <bool kMovesRegisters>
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  if constexpr (kMovesRegisters) {
    mbarrier_wait(barrier, parity);
  } else {
    mbarrier_wait_bounded(barrier, parity);
  }
}

// A tile of results as fragment.cuh takes it.
struct TileResults {
  void* out;
  const void* bias;
  int64_t ldo;
  int num_tokens;
  int n;
  int tile_rows;
};

struct ExpertsArguments {
  const TensorMap* weight;
  const TensorMap* x;
  void* out;
  const SlotTile* tiles;
  const int* num_tiles;
  const int* tokens;
  int n;
  int k;
  int tile_rows;  // of weight, up to kRows; swiglu: a multiple of 16
  int num_stages;
  bool has_tiles;  // whether the tiles are there before the kernel waits
};

// kSlots: the most of a tile; kBlocks: of 64 rows of weight, of a group; kBoxes: of a stage.
template <typename T, Epilogue kEpilogue, int kSlots, int kBlocks, int kBoxes>
__device__ __forceinline__ void experts(const ExpertsArguments& p) {
  constexpr bool kMovesRegisters = kBlocks > 1;
  constexpr int kRows = kGroups * kBlocks * 64, kWarps = kMultipliers / 32;
  constexpr int kSlotBox = kSlots < 32 ? kSlots : 32;  // rows of a box of x
  constexpr uint32_t kWeightBoxBytes = kRows * kBox * 2, kSlotBoxBytes = kSlots * kBox * 2;
  constexpr uint32_t kWeightBytes = kWeightBoxBytes * kBoxes, kStageBytes = kWeightBytes + kSlotBoxBytes * kBoxes;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared);
  const uint32_t full = ring + p.num_stages * kStageBytes, empty = full + p.num_stages * 8;

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rows = kEpilogue == Epilogue::kSwiglu ? 2 * p.n : p.n;
  const int row_tiles = (rows + p.tile_rows - 1) / p.tile_rows;
  const int num_chunks = (p.k + kBox * kBoxes - 1) / (kBox * kBoxes);

  if (threadIdx.x == kMultipliers) {
    tensor_map_prefetch(p.weight);
    tensor_map_prefetch(p.x);
    for (int slot = 0; slot < p.num_stages; ++slot) {
      mbarrier_init(full + slot * 8, 2);
      mbarrier_init(empty + slot * 8, kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (!p.has_tiles) {
    dependency_wait();
    dependency_launch();
  }
  const int num_items = __ldcg(p.num_tiles) * row_tiles;

  if (warp >= kWarps) {
    if constexpr (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kWarps) {
      const uint64_t stream = l2_evict_first(), keep = l2_evict_last();
      const int my_items = blockIdx.x < num_items ? (num_items - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
      const int total = my_items * num_chunks;
      struct Cursor {
        int item, chunk, stage;
        SlotTile tile;
      };
      const auto advance = [&](Cursor& c) {
        if (++c.stage == p.num_stages) c.stage = 0;
        if (++c.chunk == num_chunks) {
          c.chunk = 0;
          c.item += gridDim.x;
          if (c.item < num_items) c.tile = load_tile(p.tiles, c.item / row_tiles);
        }
      };
      Cursor first{static_cast<int>(blockIdx.x), 0, 0, {}};
      if (total > 0) first.tile = load_tile(p.tiles, first.item / row_tiles);
      Cursor weights = first, slots = first;
      const auto load_weights = [&]() {
        if (lane == 0) {
          const uint32_t barrier = full + weights.stage * 8, target = ring + weights.stage * kStageBytes;
          mbarrier_arrive_expect(barrier, p.tile_rows * (kBox * 2 * kBoxes));
          const int row = weights.item % row_tiles * p.tile_rows;
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            const int column = (weights.chunk * kBoxes + box) * kBox;
            if constexpr (kEpilogue == Epilogue::kSwiglu) {
              tma_load_5d(target + box * kWeightBoxBytes, p.weight, barrier, column, 0, 0, row / 16, weights.tile.expert,
                          stream);
            } else {
              tma_load_3d(target + box * kWeightBoxBytes, p.weight, barrier, column, row, weights.tile.expert, stream);
            }
          }
        }
        advance(weights);
      };
      // The token of a lane's slot.
      int my_token = 0, token_item = -1;
      const auto load_slots = [&]() {
        const uint32_t barrier = full + slots.stage * 8, target = ring + slots.stage * kStageBytes + kWeightBytes;
        const int count = slots.tile.num_slots;
        const int column = slots.chunk * kBoxes * kBox;
        if (p.tokens != nullptr) {
          // As many as a warp has lanes.
          if (token_item != slots.item) {
            token_item = slots.item;
            if (lane < count) my_token = __ldcg(p.tokens + slots.tile.first_slot + lane);
          }
          if (lane == 0) mbarrier_arrive_expect(barrier, count * (kBox * 2 * kBoxes));
          __syncwarp();
          if (lane < count) {
#pragma unroll
            for (int box = 0; box < kBoxes; ++box) {
              tma_load_2d(target + box * kSlotBoxBytes + lane * (kBox * 2), p.x, barrier, column + box * kBox, my_token,
                          keep);
            }
          }
        } else if (lane == 0) {
          const int boxes = (count + kSlotBox - 1) / kSlotBox;
          mbarrier_arrive_expect(barrier, boxes * kSlotBox * (kBox * 2 * kBoxes));
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            for (int i = 0; i < boxes; ++i) {
              tma_load_2d(target + box * kSlotBoxBytes + i * (kSlotBox * kBox * 2), p.x, barrier, column + box * kBox,
                          slots.tile.first_slot + i * kSlotBox, keep);
            }
          }
        }
        advance(slots);
      };
      const int ahead = min(p.num_stages, total);
      for (int i = 0; i < ahead; ++i) load_weights();
      if (p.has_tiles) {
        dependency_launch();
        dependency_wait();
      }
      for (int i = 0; i < ahead; ++i) load_slots();
      int stage = 0;
      uint32_t parity = 0;
      for (int i = ahead; i < total; ++i) {
        wait_for<kMovesRegisters>(empty + stage * 8, parity);
        load_weights();
        load_slots();
        if (++stage == p.num_stages) stage = 0, parity ^= 1;
      }
    }
  } else {
    if constexpr (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (p.has_tiles) dependency_wait();
    // Start, (unused), distance of eight lines, swizzle of 128 bytes.
    constexpr uint64_t kFixed = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    int stage = 0;
    uint32_t parity = 0;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
      const SlotTile tile = load_tile(p.tiles, item / row_tiles);
      const int tile_row = item % row_tiles * p.tile_rows;
      const auto compute = [&](auto columns) {
        constexpr int kColumns = decltype(columns)::value;
        float sum[kBlocks][kColumns / 2];
        int previous = -1;
        for (int chunk = 0; chunk < num_chunks; ++chunk) {
          wait_for<kMovesRegisters>(full + stage * 8, parity);
          const uint32_t place = ring + stage * kStageBytes, mine = place + warp / 4 * (kBlocks * 64 * kBox * 2);
          const uint64_t a = (mine & 0x3ffff) >> 4 | kFixed;
          const uint64_t b = ((place + kWeightBytes) & 0x3ffff) >> 4 | kFixed;
          wgmma_fence();
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
            for (int step = 0; step < kBox / 16; ++step) {
#pragma unroll
              for (int block = 0; block < kBlocks; ++block) {
                wgmma_along_k<T, kColumns>(sum[block],
                                           a + (box * kWeightBoxBytes + block * (64 * kBox * 2) >> 4) + step * 2,
                                           b + (box * kSlotBoxBytes >> 4) + step * 2, chunk > 0 || box > 0 || step > 0);
              }
            }
          }
          wgmma_commit();
          if (previous >= 0) {
            wgmma_wait<1>();
            if (lane == 0) mbarrier_arrive(empty + previous * 8);
          }
          previous = stage;
          if (++stage == p.num_stages) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(sum[block][i])::"memory");  // not before the wait
        }
        if (lane == 0) mbarrier_arrive(empty + previous * 8);
        T* out = static_cast<T*>(p.out) + static_cast<int64_t>(tile.first_slot) * p.n;
        const TileResults results{out, nullptr, p.n, tile.num_slots, p.n, p.tile_rows};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const int row = (warp / 4 * kBlocks + block) * 64 + warp % 4 * 16;
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            const float* v = sum[block] + j * 4;
            Fragment<T, kEpilogue, false>(results, tile_row, row, j * 8)
                .store(make_float4(v[0], v[1], v[2], v[3]), make_uint2(0, 0));
          }
        }
      };
      // With more sizes than two the sums are spilled.
      if (kSlots > 32 && tile.num_slots <= kSlots / 2) {
        compute(std::integral_constant<int, kSlots / (kSlots > 32 ? 2 : 1)>());
      } else {
        compute(std::integral_constant<int, kSlots>());
      }
    }
  }
}

}  // namespace xserv

// xserv_experts_<epilogue>_<rows>x<slots>_<dtype>
#define XSERV_EXPERTS(NAME, EPILOGUE, ROWS, SLOTS, BOXES, SUFFIX, T)                                                  \
  extern "C" __global__ void __launch_bounds__(xserv::threads_of(ROWS / 128), 1)                                      \
      xserv_experts_##NAME##_##ROWS##x##SLOTS##_##SUFFIX(                                                             \
          const __grid_constant__ xserv::TensorMap weight, const __grid_constant__ xserv::TensorMap x, T* out,        \
          const xserv::SlotTile* tiles, const int* num_tiles, const int* tokens, int n, int k, int tile_rows,         \
          int num_stages, int has_tiles) {                                                                            \
    const xserv::ExpertsArguments arguments{&weight, &x, out, tiles, num_tiles, tokens, n, k, tile_rows, num_stages,  \
                                            has_tiles != 0};                                                          \
    xserv::experts<T, xserv::Epilogue::EPILOGUE, SLOTS, ROWS / 128, BOXES>(arguments);                                \
  }
#define XSERV_EXPERTS_ALL(...)                                  \
  XSERV_EXPERTS(plain, kPlain, __VA_ARGS__, f16, __half)          \
  XSERV_EXPERTS(plain, kPlain, __VA_ARGS__, bf16, __nv_bfloat16)  \
  XSERV_EXPERTS(swiglu, kSwiglu, __VA_ARGS__, f16, __half)        \
  XSERV_EXPERTS(swiglu, kSwiglu, __VA_ARGS__, bf16, __nv_bfloat16)
// rows, slots, boxes of a stage
XSERV_EXPERTS_ALL(128, 16, 2)
XSERV_EXPERTS_ALL(128, 64, 1)
XSERV_EXPERTS_ALL(256, 128, 1)
#endif
