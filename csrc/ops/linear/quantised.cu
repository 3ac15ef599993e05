// Linear layers with quantised weights (quantised.cuh), for any number of tokens; quantised_few.cu
// is faster for up to 16.
//
// quantised_product.cuh has the kernel.
#include "ops/linear/quantised_product.cuh"

namespace xserv {

template <typename T, Code kCode, int kScales, int kFragments, int kTiles, int kBatch, int kAhead>
__device__ __forceinline__ void quantised(const QuantisedParams& p) {
  const int first_token = blockIdx.y * (kFragments * 8);
  // Tokens past the last one are read as the last one, and not stored.
  quantised_product<T, kCode, kScales, kFragments, kTiles, kBatch, kAhead>(
      p, blockIdx.x, first_token, [&](int token) { return min(token, p.num_tokens - 1 - first_token); });
}

}  // namespace xserv

// xserv_linear_quantised_<code>_<scales of a chunk>_<tokens>_<dtype>, for blocks of 256 threads.
#define XSERV_QUANTISED(CODE_NAME, CODE, SCALES, TOKENS, TILES, BATCH, AHEAD, BLOCKS, SUFFIX, T) \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                      \
      xserv_linear_quantised_##CODE_NAME##_##SCALES##_##TOKENS##_##SUFFIX(                       \
          const __grid_constant__ xserv::QuantisedParams params) {                               \
    xserv::quantised<T, xserv::Code::CODE, SCALES, TOKENS / 8, TILES, BATCH, AHEAD>(params);     \
  }
#define XSERV_QUANTISED_DTYPES(...)              \
  XSERV_QUANTISED(__VA_ARGS__, f16, __half)      \
  XSERV_QUANTISED(__VA_ARGS__, bf16, __nv_bfloat16)
// Scales of a chunk, tokens, tiles of a warp, fragments of a batch, chunks ahead, blocks of a multiprocessor:
// with these nothing is spilled on sm_90 for up to 32 tokens, and for 64 at most a few words.
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 1, 8, 2, 1, 6, 2)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 1, 16, 2, 2, 6, 2)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 1, 32, 2, 4, 6, 1)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 1, 64, 2, 4, 6, 1)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 2, 8, 2, 1, 6, 2)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 2, 16, 2, 2, 6, 2)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 2, 32, 2, 2, 6, 1)
XSERV_CODES_OF_4_BITS(XSERV_QUANTISED_DTYPES, 2, 64, 2, 2, 6, 1)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 1, 8, 2, 1, 4, 2)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 1, 16, 2, 2, 4, 2)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 1, 32, 2, 4, 4, 1)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 1, 64, 2, 4, 4, 1)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 2, 8, 2, 1, 4, 2)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 2, 16, 2, 2, 4, 2)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 2, 32, 2, 4, 4, 1)
XSERV_CODES_OF_8_BITS(XSERV_QUANTISED_DTYPES, 2, 64, 2, 2, 4, 1)
