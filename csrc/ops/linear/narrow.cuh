// The linear layers of decode for up to 8 tokens of a narrow model, as kernels of a chain with
// programmatic dependent launch (PDL), whatever their weights are stored as.
// W is [out_features, in_features] (a weight of torch.nn.Linear). round() is to T.
//
//   norm         out = round(W h + bias)                 h = round(norm_weight * round(x * rstd)), RMSNorm
//   norm_swiglu  out = round(round(silu(round(G h))) * round(U h))     G and U: the halves of W
//   residual     out = round(out + round(W x))           in place: out is the residual stream
//
//   x    [num_tokens, in_features], ldx        norm_weight [in_features]       bias [out_features] or null
//   out  [num_tokens, out_features], ldo
//
// A step of a narrow model is a chain of memory round trips rather than a stream. So there is no kernel
// for the norm, and as in gemv_mma.cu weights go from device memory straight into registers, as many as
// there are registers for, before the preceding kernels have ended. The product is mma.m16n8k16: rows are
// rows of W and columns are tokens, so that eight tokens take the instructions of one. The order of
// in_features in a step is free: a lane takes 8 neighbouring elements at once, of W and of x alike, so that
// x needs no shared memory either.
//
// The warps of a block lie side by side along in_features and have one tile of W at a time; as soon
// as a piece of weights is multiplied, that of the next tile is requested. With a norm a block has
// all of in_features at once, keeps h in registers, and exchanges only the squares: blocks are
// small, so that those of the next kernel find room beside them. (Blocks of several tiles that
// share h in shared memory were slower.) Without a norm there may be several passes over
// in_features.
//
// The order of a sum depends on in_features and the kernel alone, not on the other tokens or the grid.
//
// Weights say how W is read and multiplied:
//   Params          the argument of the kernel: the fields of LinearNarrowParams but weight and
//                   ldw, and its own
//   kStep           elements of a row in a step, a multiple of 32 of which a lane has 8 neighbours each
//   kSteps          the most steps of a warp in a pass
//   kRows           rows of W in a tile, 16 or 8
//   place(part)     where the lane's 8 neighbours of a part of a step, 32 elements, are in the step
//   prepare(inputs, i)      what is made of the inputs of a step once, for all tiles
//   piece(...)      a tile and a pass over in_features, as one lane sees it
//   load(piece, i), multiply(sums, inputs, i)    a step of it; sums as in finish()
//
// Needs: x, W, norm_weight 16-byte aligned; ldx and in_features multiples of 8; num_passes * warps
// * steps * kStep >= in_features, steps <= kSteps, at most 16 warps, and one pass with a norm; 1 <=
// grid <= tiles. The blocks need not be resident together: none waits for another. Dynamic shared
// memory as in src/ops/linear/cuda_narrow.rs.
#pragma once

#include "common/gemv.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

namespace xserv {

enum class Narrow { kNorm, kNormSwiglu, kResidual };

constexpr int kNarrowTokens = 8;  // the columns of a product

template <typename T, Narrow kMode, typename Weights>
struct LinearNarrow {
  using Params = typename Weights::Params;
  static constexpr bool kIsGated = kMode == Narrow::kNormSwiglu, kHasNorm = kMode != Narrow::kResidual;
  static constexpr int kRows = Weights::kRows, kSteps = Weights::kSteps, kStep = Weights::kStep;
  static constexpr int kOuts = kIsGated ? kRows / 2 : kRows;
  static constexpr int kParts = kStep / 32;  // vectors of 8 elements of x for a lane in a step
  // Rows of sums in shared memory have this distance, so that lanes write to different banks.
  static constexpr int kPitch = kRows + 4;
  static_assert((kRows == 16 || kRows == 8) && (!kIsGated || kRows == 16), "rows of a tile");

  const Params& p;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  const int row = lane >> 2, quarter = lane & 3;
  Weights weights;
  uint4 inputs[kSteps][kParts];

  __device__ __forceinline__ explicit LinearNarrow(const Params& params) : p(params), weights(params) {}

  // The first step of the warp in a pass, and how many it has.
  __device__ __forceinline__ int first_step(int pass) const { return (pass * num_warps + warp) * p.steps; }
  __device__ __forceinline__ int steps_of(int pass) const {
    return min(p.steps, (p.in_features + kStep - 1) / kStep - first_step(pass));
  }
  __device__ __forceinline__ typename Weights::Piece piece(int tile, int pass) const {
    return weights.template piece<kIsGated>(tile, first_step(pass), steps_of(pass));
  }

  // Elements that do not exist, and those of steps that the warp does not have, are zero.
  __device__ __forceinline__ void load_inputs(int pass, int i) {
    // Tokens that do not exist have the values of the last one; nobody reads their sums.
    const int token = min(row, p.num_tokens - 1), first = (first_step(pass) + i) * kStep;
    const char* source = static_cast<const char*>(p.x) + (token * p.ldx + first) * 2;
    const int end = i < p.steps ? p.in_features : 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int place = weights.place(part);
      inputs[i][part] = first + place < end ? load_activations(source + place * 2) : make_uint4(0, 0, 0, 0);
    }
  }

  // Makes h of the inputs. squares: [warps][kNarrowTokens]; factors: the weight of the norm, whose
  // copies to shared memory are under way.
  __device__ __forceinline__ void normalise(const unsigned char* factors, float* squares) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float f[8];
        unpack<T>(inputs[i][part], f);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += f[j] * f[j];
      }
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (quarter == 0) squares[warp * kNarrowTokens + row] = sum;
    cp_async_wait<0>();
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < num_warps; ++w) total += squares[w * kNarrowTokens + row];
    const float scale = rsqrtf(total / p.in_features + p.eps);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int first = (first_step(0) + i) * kStep;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Inputs that do not exist stay zero, whatever the factor.
        const int input = min(first + weights.place(part), p.in_features - 8);
        const uint4 factor = *reinterpret_cast<const uint4*>(factors + input * 2);
        uint4& v = inputs[i][part];
        // Without this the compiler keeps what it unpacked for the squares, which takes twice the registers.
        asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
        v = make_uint4(normalize_pair(unpack_pair(v.x, T()), scale, factor.x, T()),
                       normalize_pair(unpack_pair(v.y, T()), scale, factor.y, T()),
                       normalize_pair(unpack_pair(v.z, T()), scale, factor.z, T()),
                       normalize_pair(unpack_pair(v.w, T()), scale, factor.w, T()));
      }
    }
  }

  __device__ __forceinline__ void run() {
    // [2][warps][kNarrowTokens][kPitch] sums; with a norm [warps][kNarrowTokens] squares and
    // [in_features] factors
    extern __shared__ __align__(16) unsigned char shared[];
    float* partials = reinterpret_cast<float*>(shared);
    float* squares = partials + 2 * num_warps * kNarrowTokens * kPitch;
    unsigned char* const factors = reinterpret_cast<unsigned char*>(squares + num_warps * kNarrowTokens);
    dependency_launch();

    const int num_tiles = (p.out_features + kOuts - 1) / kOuts;
    int tile = blockIdx.x, pass = 0, parity = 0;
    {
      const auto first = piece(tile, 0);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) weights.load(first, i);
    }
    if (kHasNorm) {
      for (int i = threadIdx.x; i < p.in_features / 8; i += blockDim.x) {
        cp_async_16(shared_address(factors + i * 16), static_cast<const char*>(p.norm_weight) + i * 16);
      }
      cp_async_commit();
    }
    dependency_wait();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) load_inputs(0, i);

    // The outputs of a tile are divided among the threads; this is the first of this one.
    const int out_row = threadIdx.x % kOuts, out_token = threadIdx.x / kOuts;
    uint16_t residual = 0;
    const auto read_residual = [&](int token, int out) {
      if (kMode != Narrow::kResidual || token >= p.num_tokens || out >= p.out_features) return;
      const T* source = static_cast<const T*>(p.out) + token * p.ldo + out;
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(residual) : "l"(source) : "memory");
    };
    read_residual(out_token, tile * kOuts + out_row);
    if (kHasNorm) normalise(factors, squares);

    float sums[2][4] = {};  // several, so that a product need not wait for the one before
    bool are_new = true;
    while (true) {
      if (are_new) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) weights.prepare(inputs[i], i);
        are_new = !kHasNorm && p.num_passes > 1;
      }
      const bool is_last_pass = pass + 1 == p.num_passes;
      const int next_tile = is_last_pass ? tile + static_cast<int>(gridDim.x) : tile, next_pass = is_last_pass ? 0 : pass + 1;
      const bool has_next = next_tile < num_tiles;
      const auto next = piece(next_tile, next_pass);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        weights.multiply(sums, inputs[i], i);
        if (has_next) {
          weights.load(next, i);
          if (!kHasNorm && p.num_passes > 1) load_inputs(next_pass, i);
        }
      }
      if (is_last_pass) {
        finish(partials + parity * num_warps * kNarrowTokens * kPitch, sums, tile, residual, read_residual);
        parity ^= 1;
        if (has_next) read_residual(out_token, next_tile * kOuts + out_row);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0.0f;
      }
      if (!has_next) break;
      tile = next_tile, pass = next_pass;
    }
  }

  // Adds up the sums of the warps and writes the outputs of a tile.
  template <typename Read>
  __device__ __forceinline__ void finish(float* partials, const float (&sums)[2][4], int tile, uint16_t& residual,
                                         const Read& read_residual) {
    // Elements 0 and 1 of a lane are those of two neighbouring tokens and its row of the product, 2 and 3
    // those of the row 8 further down.
    float* target = partials + (warp * kNarrowTokens + quarter * 2) * kPitch + row;
    if constexpr (kRows == 16) {
      target[0] = sums[0][0] + sums[1][0];
      target[kPitch] = sums[0][1] + sums[1][1];
      target[8] = sums[0][2] + sums[1][2];
      target[kPitch + 8] = sums[0][3] + sums[1][3];
    } else {
      target[0] = sums[0][0] + sums[1][2];
      target[kPitch] = sums[0][1] + sums[1][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kOuts * kNarrowTokens; i += blockDim.x) {
      const int token = i / kOuts, place = i % kOuts, out = tile * kOuts + place;
      if (token >= p.num_tokens || out >= p.out_features) continue;
      float bias = 0.0f;
      if (kMode == Narrow::kNorm && p.bias != nullptr) bias = to_float(static_cast<const T*>(p.bias)[out]);
      const auto total_of = [&](int place) {
        float total = 0.0f;
#pragma unroll 4
        for (int w = 0; w < num_warps; ++w) total += partials[(w * kNarrowTokens + token) * kPitch + place];
        if (kMode == Narrow::kNorm && p.bias != nullptr) total += bias;
        return to_float(from_float<T>(total));
      };
      float value = total_of(place);
      if (kMode == Narrow::kResidual) {
        if (i != threadIdx.x) read_residual(token, out);
        value += to_float(reinterpret_cast<const T&>(residual));
      }
      if (kIsGated) value = to_float(from_float<T>(value / (1.0f + __expf(-value)))) * total_of(kOuts + place);
      static_cast<T*>(p.out)[token * p.ldo + out] = from_float<T>(value);
    }
  }
};

}  // namespace xserv
