// Integers of 8 bits for products with integers: activations with a scale for each token, and the tiles of
// a matrix (src/ops/quantised/tiles.rs) whose rows have one scale each and no zeros.
//   x_scales[t] = max |x[t]| / 127, codes[t, k] = rint(x[t, k] / x_scales[t])
//   rows[i, k] = code[i, k] - 128
// Rows are in the order of the tiles: with gate and up, eight of each alternate. One launch makes both, as
// those of small models would wait for two.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/pdl.cuh"
#include "ops/quantised/number.cuh"

namespace xserv {

struct IntegersParams {
  const void* x;      // [num_tokens, k]
  void* tokens;       // [num_tokens, k]
  float* x_scales;    // [num_tokens]
  const void* codes;
  const void* scales;
  void* rows;         // [16 * num_tiles, k]
  float* row_scales;  // [16 * num_tiles]
  int num_tokens;
  int k;              // a multiple of 16
  int num_chunks;     // of a tile
  int tile_blocks;    // those of a tile, eight chunks each
  int scale_type;     // a ScaleType
  int are_pieces;     // whether codes lie in pieces of rows
};
XSERV_LAYOUT_IntegersParams;

// A thread has sixteen inputs of two rows.
__device__ __forceinline__ void integer_rows(const IntegersParams& p, int block) {
  const int64_t tile = block / p.tile_blocks;
  const int part = block % p.tile_blocks;
  const int chunk = part * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (part == 0 && threadIdx.x < 16) {
    // In a tile rows r and r + 8 are beside each other.
    const int64_t place = tile * 16 + threadIdx.x % 8 * 2 + threadIdx.x / 8;
    p.row_scales[tile * 16 + threadIdx.x] = scale_at(p.scales, place, static_cast<ScaleType>(p.scale_type));
  }
  const int row = lane >> 2, sixteen = chunk * 4 + (lane & 3);
  if (chunk >= p.num_chunks || sixteen * 16 >= p.k) return;
  const char* codes = static_cast<const char*>(p.codes) + tile * p.num_chunks * int64_t{1024};
  uint32_t bytes[2][4];  // of either row
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    uint32_t words[4];
    load_eight(codes, row, sixteen * 2 + eight, false, p.are_pieces != 0, words);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // In a word are both inputs of a pair, each of both rows.
      bytes[0][eight * 2 + i] = __byte_perm(words[i * 2], words[i * 2 + 1], 0x6420) ^ 0x80808080u;
      bytes[1][eight * 2 + i] = __byte_perm(words[i * 2], words[i * 2 + 1], 0x7531) ^ 0x80808080u;
    }
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    char* to = static_cast<char*>(p.rows) + (tile * 16 + second * 8 + row) * p.k + sixteen * 16;
    const uint32_t(&v)[4] = bytes[second];
    *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

__device__ __forceinline__ uint32_t rounded_byte(float v, float inverse) {
  return static_cast<uint32_t>(__float2int_rn(v * inverse)) & 0xff;
}

// The block has a token. A token with an activation that is not finite has a scale that is not finite.
template <typename T>
__device__ __forceinline__ void integer_token(const IntegersParams& p, int64_t token) {
  using V = Vec<T, 8>;
  __shared__ uint32_t sizes[32];
  const int k = p.k;
  const V* row = reinterpret_cast<const V*>(static_cast<const T*>(p.x) + token * k);
  const int num_vectors = k / 8;
  // As integers, sizes have the order of the numbers, and what is no number is larger than all.
  uint32_t largest = 0;
  for (int v = threadIdx.x; v < num_vectors; v += blockDim.x) {
    const V values = row[v];
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = max(largest, __float_as_uint(to_float(values[j])) & 0x7fffffffu);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  if ((threadIdx.x & 31) == 0) sizes[threadIdx.x >> 5] = largest;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) largest = max(largest, sizes[warp]);
  const float scale = __uint_as_float(largest) / 127.0f;
  // If the largest is too small to be inverted (below 2^-121) or not finite, codes are 0, and the scale tells.
  const bool is_usual = largest >= 0x03000000u && largest < 0x7f800000u;
  const float inverse = is_usual ? 127.0f / __uint_as_float(largest) : 0.0f;
  if (threadIdx.x == 0) p.x_scales[token] = scale;
  uint2* to = reinterpret_cast<uint2*>(static_cast<char*>(p.tokens) + token * k);
  for (int v = threadIdx.x; v < num_vectors; v += blockDim.x) {
    const V values = row[v];
    uint32_t bytes[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) bytes[j] = is_usual ? rounded_byte(to_float(values[j]), inverse) : 0;
    to[v] = make_uint2(bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24,
                       bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24);
  }
}

}  // namespace xserv

// xserv_integers_<dtype>: blocks of 256 threads, one for each token, and those of the tiles after them.
#define XSERV_INTEGERS(SUFFIX, T)                                                          \
  extern "C" __global__ void __launch_bounds__(256)                                        \
      xserv_integers_##SUFFIX(const __grid_constant__ xserv::IntegersParams params) {      \
    xserv::dependency_launch();                                                            \
    const int block = static_cast<int>(blockIdx.x);                                        \
    if (block < params.num_tokens) {                                                       \
      xserv::integer_token<T>(params, block);                                              \
    } else {                                                                               \
      xserv::integer_rows(params, block - params.num_tokens);                              \
    }                                                                                      \
  }
XSERV_INTEGERS(f16, __half)
XSERV_INTEGERS(bf16, __nv_bfloat16)
