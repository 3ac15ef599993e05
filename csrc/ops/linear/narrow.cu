// The linear layers of narrow.cuh with weights of T.
//
// Tiles of 8 rows are for few outputs, which would leave multiprocessors idle otherwise: rows 8..15
// of the product are the same rows further along in_features, and have a product with x from there.
//
// Needs: ldw a multiple of 8; in_features a multiple of kStep (32; 64 with 8 rows).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "ops/linear/narrow.cuh"

namespace xserv {

struct LinearNarrowParams {
  const void* x;
  const void* norm_weight;  // unused without a norm
  const void* weight;
  const void* bias;  // norm only
  void* out;
  int64_t ldx, ldw, ldo;
  int num_tokens, out_features, in_features;
  // A warp has `steps` steps of in_features in each of num_passes passes.
  int steps, num_passes;
  float eps;
};
XSERV_LAYOUT_LinearNarrowParams;

template <typename T, int kTileRows, int kMaxSteps>
struct DenseRows {
  using Params = LinearNarrowParams;
  static constexpr int kRows = kTileRows, kSteps = kMaxSteps;
  static constexpr int kStep = kRows == 16 ? 32 : 64;

  struct Piece {
    const char* source;
    int64_t distance;  // to the second vector of a step
    int rows;          // of the outputs from the lane's first row on
    int second;        // whether the second vector is of row 8, and not of row 0: 8 or 0
    int steps;         // that the warp has
    bool is_whole;
  };

  const LinearNarrowParams& p;
  const int row = (threadIdx.x & 31) >> 2, quarter = threadIdx.x & 3;
  const uint64_t policy = weight_policy();
  uint4 weights[kSteps][2];  // the second vector is that of rows 8..15 of the product

  __device__ __forceinline__ explicit DenseRows(const LinearNarrowParams& params) : p(params) {}

  __device__ __forceinline__ int place(int part) const { return part * 32 + quarter * 8; }
  __device__ __forceinline__ void prepare(const uint4 (&)[kStep / 32], int) const {}

  template <bool kIsGated>
  __device__ __forceinline__ Piece piece(int tile, int first_step, int steps) const {
    constexpr int kOuts = kIsGated ? kRows / 2 : kRows;
    const int first = tile * kOuts + row;
    Piece piece;
    piece.source = static_cast<const char*>(p.weight) + first * p.ldw * 2 + first_step * (kStep * 2) + quarter * 16;
    piece.distance = kIsGated ? p.out_features * p.ldw * 2 : kRows == 16 ? 8 * p.ldw * 2 : 64;
    piece.rows = p.out_features - first;
    piece.second = !kIsGated && kRows == 16 ? 8 : 0;
    piece.steps = steps;
    piece.is_whole = steps == kSteps && (tile + 1) * kOuts <= p.out_features;
    return piece;
  }

  __device__ __forceinline__ void load(const Piece& piece, int i) {
    const char* source = piece.source + i * kStep * 2;
    if (piece.is_whole) {
      weights[i][0] = load_weight_in_order(source, policy);
      weights[i][1] = load_weight_in_order(source + piece.distance, policy);
    } else {
      weights[i][0] = load_weight_within(0, piece.rows, i, piece.steps, source, policy);
      weights[i][1] = load_weight_within(piece.second, piece.rows, i, piece.steps, source + piece.distance, policy);
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[2][4], const uint4 (&inputs)[kStep / 32], int i) const {
    const uint4 top = weights[i][0], bottom = weights[i][1];
    const uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y}, high[4] = {top.z, bottom.z, top.w, bottom.w};
    if constexpr (kRows == 16) {
      const uint4 b = inputs[0];
      mma_m16n8k16<T>(sums[0], low, b.x, b.y);
      mma_m16n8k16<T>(sums[1], high, b.z, b.w);
    } else {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 b = inputs[part];
        mma_m16n8k16<T>(sums[part], low, b.x, b.y);
        mma_m16n8k16<T>(sums[part], high, b.z, b.w);
      }
    }
  }
};

}  // namespace xserv

// xserv_linear_narrow_<mode>_<rows of a tile>_<dtype>. 128 registers a thread.
#define XSERV_LINEAR_NARROW(NAME, MODE, ROWS, STEPS, SUFFIX, T)                                     \
  extern "C" __global__ void __launch_bounds__(512, 1) xserv_linear_narrow_##NAME##_##ROWS##_##SUFFIX( \
      const __grid_constant__ xserv::LinearNarrowParams params) {                                   \
    xserv::LinearNarrow<T, xserv::Narrow::MODE, xserv::DenseRows<T, ROWS, STEPS>>(params).run();                         \
  }
#define XSERV_LINEAR_NARROW_ALL(SUFFIX, T)                  \
  XSERV_LINEAR_NARROW(norm, kNorm, 16, 8, SUFFIX, T)         \
  XSERV_LINEAR_NARROW(norm, kNorm, 8, 4, SUFFIX, T)          \
  XSERV_LINEAR_NARROW(swiglu, kNormSwiglu, 16, 8, SUFFIX, T) \
  XSERV_LINEAR_NARROW(residual, kResidual, 16, 8, SUFFIX, T) \
  XSERV_LINEAR_NARROW(residual, kResidual, 8, 4, SUFFIX, T)
XSERV_LINEAR_NARROW_ALL(f16, __half)
XSERV_LINEAR_NARROW_ALL(bf16, __nv_bfloat16)
#endif
