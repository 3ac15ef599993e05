// The products of experts with quantised weights; what they compute is said in wgmma.cu, and how in
// linear/quantised_product.cuh.
//
// params: those of the first expert and of x and out as a whole; `expert_stride` bytes from one expert to the
// next. grid: (blocks of rows, the most tiles of slots).
#include "ops/experts/route.cuh"
#include "ops/linear/quantised_product.cuh"

namespace xserv {

template <typename T, Code kCode, int kScales, int kFragments, int kTiles, int kBatch, int kAhead>
__device__ __forceinline__ void experts_quantised(QuantisedParams p, const SlotTile* tiles, const int* num_tiles,
                                                  const int* tokens, int64_t expert_stride) {
  dependency_wait();
  dependency_launch();
  if (static_cast<int>(blockIdx.y) >= __ldcg(num_tiles)) return;
  const SlotTile tile = load_tile(tiles, blockIdx.y);
  const auto advance = [](const void* pointer, int64_t bytes) { return static_cast<const char*>(pointer) + bytes; };
  const int64_t offset = tile.expert * expert_stride;
  p.codes = advance(p.codes, offset), p.scales = advance(p.scales, offset);
  if (p.zeros != nullptr) p.zeros = advance(p.zeros, offset);
  p.out = static_cast<T*>(p.out) + tile.first_slot * p.ldo;
  p.num_tokens = tile.num_slots;
  // Slots past the last one are read as the last one, and not stored.
  const int first = tile.first_slot, last = tile.num_slots - 1;
  quantised_product<T, kCode, kScales, kFragments, kTiles, kBatch, kAhead>(p, blockIdx.x, 0, [&](int slot) {
    const int row = first + min(slot, last);
    return static_cast<uint32_t>(tokens != nullptr ? __ldg(tokens + row) : row);
  });
}

}  // namespace xserv

// xserv_experts_quantised_<code>_<slots>_<dtype>, for blocks of 256 threads.
#define XSERV_EXPERTS_QUANTISED(CODE_NAME, CODE, SCALES, SLOTS, TILES, BATCH, AHEAD, BLOCKS, SUFFIX, T)              \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) xserv_experts_quantised_##CODE_NAME##_##SLOTS##_##SUFFIX( \
      const __grid_constant__ xserv::QuantisedParams params, const xserv::SlotTile* tiles, const int* num_tiles,     \
      const int* tokens, int64_t expert_stride) {                                                                    \
    xserv::experts_quantised<T, xserv::Code::CODE, SCALES, SLOTS / 8, TILES, BATCH, AHEAD>(params, tiles, num_tiles, \
                                                                                           tokens, expert_stride);   \
  }
#define XSERV_EXPERTS_QUANTISED_DTYPES(...)          \
  XSERV_EXPERTS_QUANTISED(__VA_ARGS__, f16, __half)  \
  XSERV_EXPERTS_QUANTISED(__VA_ARGS__, bf16, __nv_bfloat16)
// Scales of a chunk, slots, tiles of a warp, fragments of a batch, chunks ahead, blocks of a multiprocessor.
XSERV_CODES_OF_4_BITS(XSERV_EXPERTS_QUANTISED_DTYPES, 2, 8, 2, 1, 6, 2)
XSERV_CODES_OF_4_BITS(XSERV_EXPERTS_QUANTISED_DTYPES, 2, 32, 2, 2, 6, 1)
XSERV_CODES_OF_4_BITS(XSERV_EXPERTS_QUANTISED_DTYPES, 2, 64, 2, 2, 6, 1)
XSERV_CODES_OF_8_BITS(XSERV_EXPERTS_QUANTISED_DTYPES, 2, 8, 2, 1, 4, 2)
XSERV_CODES_OF_8_BITS(XSERV_EXPERTS_QUANTISED_DTYPES, 2, 32, 2, 4, 4, 1)
XSERV_CODES_OF_8_BITS(XSERV_EXPERTS_QUANTISED_DTYPES, 2, 64, 2, 2, 4, 1)
