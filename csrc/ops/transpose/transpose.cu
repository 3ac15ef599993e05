// y[b, c, r] = x[b, r, c] for b < batch, r < num_rows, c < num_cols, bit for bit.
// x: [batch, num_rows, num_cols], y: [batch, num_cols, num_rows]; row and batch strides in elements, last
// axes contiguous.
//
// A block moves one 64 x 64 tile through shared memory, so that both sides see whole 128-byte lines.
// _b2: two rows by two columns per thread, turned in registers, so that 16-bit elements too move as 4-byte
// words on both sides (num_rows, num_cols and all strides even, pointers 4-byte aligned). _b2_scalar: any
// 16-bit matrix. _b4: 32-bit elements.
#include <stdint.h>

namespace xserv {

constexpr int kTile = 64;

// Pads each tile row by one unit: a column of units then falls into different banks.
template <typename T>
__device__ __forceinline__ void transpose_elements(T* __restrict__ y, const T* __restrict__ x, int num_rows,
                                                   int num_cols, long long y_batch_stride,
                                                   long long x_batch_stride, long long y_row_stride,
                                                   long long x_row_stride) {
  __shared__ T tile[kTile][kTile + 4 / sizeof(T)];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_col = blockIdx.x * kTile, first_row = blockIdx.y * kTile;
  x += blockIdx.z * x_batch_stride;
  y += blockIdx.z * y_batch_stride;
#pragma unroll
  for (int i = 0; i < kTile / 8; i++) {
    const int r = warp + i * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int c = lane + half * 32;
      if (first_row + r < num_rows && first_col + c < num_cols) {
        tile[r][c] = x[(first_row + r) * x_row_stride + first_col + c];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTile / 8; i++) {
    const int c = warp + i * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = lane + half * 32;
      if (first_row + r < num_rows && first_col + c < num_cols) {
        y[(first_col + c) * y_row_stride + first_row + r] = tile[r][c];
      }
    }
  }
}

__device__ __forceinline__ void transpose_pairs(uint16_t* __restrict__ y, const uint16_t* __restrict__ x,
                                                int num_rows, int num_cols, long long y_batch_stride,
                                                long long x_batch_stride, long long y_row_stride,
                                                long long x_row_stride) {
  // [pair of columns][pair of rows]: the column's two words of a 2 x 2 square. With 33 units of 8 bytes
  // the stores down a column are free of conflicts.
  __shared__ uint2 tile[kTile / 2][kTile / 2 + 1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_col = blockIdx.x * kTile, first_row = blockIdx.y * kTile;
  x += blockIdx.z * x_batch_stride;
  y += blockIdx.z * y_batch_stride;
  uint32_t upper[4], lower[4];
  const int c = first_col + 2 * lane;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = first_row + 2 * (warp + i * 8);
    if (r < num_rows && c < num_cols) {
      upper[i] = *reinterpret_cast<const uint32_t*>(x + r * x_row_stride + c);
      lower[i] = *reinterpret_cast<const uint32_t*>(x + (r + 1) * x_row_stride + c);
    } else {
      upper[i] = lower[i] = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    tile[lane][warp + i * 8] = make_uint2(__byte_perm(upper[i], lower[i], 0x5410),
                                          __byte_perm(upper[i], lower[i], 0x7632));
  }
  __syncthreads();
  const int r = first_row + 2 * lane;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int pair = warp + i * 8, col = first_col + 2 * pair;
    const uint2 words = tile[pair][lane];
    if (r < num_rows && col < num_cols) {
      *reinterpret_cast<uint32_t*>(y + col * y_row_stride + r) = words.x;
      *reinterpret_cast<uint32_t*>(y + (col + 1) * y_row_stride + r) = words.y;
    }
  }
}

}  // namespace xserv

#define XSERV_TRANSPOSE(NAME, T, CALL)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) xserv_transpose_##NAME(                                  \
      T* y, const T* x, int num_rows, int num_cols, long long y_batch_stride, long long x_batch_stride,      \
      long long y_row_stride, long long x_row_stride) {                                                      \
    CALL(y, x, num_rows, num_cols, y_batch_stride, x_batch_stride, y_row_stride, x_row_stride);              \
  }
XSERV_TRANSPOSE(b2, uint16_t, xserv::transpose_pairs)
XSERV_TRANSPOSE(b2_scalar, uint16_t, xserv::transpose_elements<uint16_t>)
XSERV_TRANSPOSE(b4, uint32_t, xserv::transpose_elements<uint32_t>)
