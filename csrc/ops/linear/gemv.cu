// The linear layers of decode for 1 and 2 tokens, as kernels of a chain with programmatic dependent
// launch (PDL).
// W is [out_features, in_features] (a weight of torch.nn.Linear), ldw; round() is to T.
//
//   residual     out = round(out + round(W x))           in place: out is the residual stream
//   norm         out = round(W h + bias)                 h = round(norm_weight * round(x * rstd)), RMSNorm
//   norm_swiglu  out = round(round(silu(round(G h))) * round(U h))     G the first out_features rows of W,
//                                                                      U the others
//
//   x    [num_tokens, in_features], ldx        norm_weight [in_features]       bias [out_features] or null
//   out  [num_tokens, out_features], ldo
//
// The threads of a block lie side by side along in_features: a warp has kSteps * 256 elements of every
// row, and a lane 8 elements of each 256. So h is computed once in a block, and only its scale is
// exchanged. A block takes a tile of kRows rows of W at a time, straight from device memory into
// registers (64 to 128 KB of an SM's registers are loads under way), and requests the next tile as soon
// as the products are done, before it sums them up. It requests its first tile before the preceding
// kernels have ended, which is safe because no kernel writes weights: so the device memory does not
// idle between two kernels.
//
// The order of a sum depends on in_features and kSteps alone, not on the number of tokens, kRows, the
// grid or the block that took the tile.
//
// The bounded kernels, for one token, take any in_features up to threads * 8 * kSteps and give each block
// its share of the rows, of which the last tile has what is left: so the multiprocessors have equal work
// whatever out_features is. What is beyond a row counts as zero, and what is beyond the last row is not
// read.
//
// Needs: x, W, norm_weight 16-byte aligned; ldx, ldw multiples of 8; in_features = threads * 8 *
// kSteps (bounded: a multiple of 8, at most that), where the number of threads is a multiple of 32, at
// most 640 and at least the outputs of a tile; out_features >= the rows (of out) of a tile; 1 <= grid <=
// tiles (bounded: out_features). The blocks need not be resident together: none waits for another. Dynamic
// shared memory in rows of threads * kSteps * 16 bytes: one with a norm, and kTokens more where kTokens *
// kSteps >= 8. The shared-memory carveout must leave room for the L1, because loads under way live there
// (100 % of shared memory costs 4 % of a step of Qwen3-8B).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#include "common/gemv.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

namespace xserv {

struct LinearGemvParams {
  const void* x;
  const void* norm_weight;  // unused without a norm
  const void* weight;
  const void* bias;  // norm only
  void* out;
  int64_t ldx, ldw, ldo;
  int num_tokens, out_features, in_features;
  // The first prefetch_blocks blocks prefetch the first prefetch_rows rows of their second tile into
  // the L2.
  int prefetch_blocks, prefetch_rows;
  float eps;
};
XSERV_LAYOUT_LinearGemvParams;

enum class Gemv { kResidual, kNorm, kNormSwiglu };
constexpr int kGemvMaxWarps = 20;

// Sums kCount (a power of two) values over the lanes; lane i gets the sum with index i / (32 / kCount).
// Each exchange halves the number of values that a lane handles; the order of each sum is that of
// warp_reduce.
template <int kCount, int kOffset = 16>
__device__ __forceinline__ float reduce_many(float* values, int lane) {
  if constexpr (kOffset == 0) {
    return values[0];
  } else if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(kFullWarp, values[0], kOffset);
    return reduce_many<1, kOffset / 2>(values, lane);
  } else {
    const bool is_upper = lane & kOffset;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float kept = is_upper ? values[i + kCount / 2] : values[i];
      const float sent = is_upper ? values[i] : values[i + kCount / 2];
      values[i] = kept + __shfl_xor_sync(kFullWarp, sent, kOffset);
    }
    return reduce_many<kCount / 2, kOffset / 2>(values, lane);
  }
}

template <typename T, Gemv kMode, int kTokens, int kRows, int kSteps, bool kIsBounded>
__device__ __forceinline__ void gemv(const LinearGemvParams& p) {
  constexpr bool kIsGated = kMode == Gemv::kNormSwiglu;
  constexpr bool kHasNorm = kIsGated || kMode == Gemv::kNorm;
  constexpr int kOuts = kIsGated ? kRows / 2 : kRows, kSums = kRows * kTokens;
  constexpr bool kInRegisters = kTokens * kSteps < 8;
  static_assert(kSums <= 32, "reduce_many");
  extern __shared__ __align__(16) uint4 shared_h[];  // [kTokens][kSteps][threads]
  __shared__ float partials[2][kGemvMaxWarps][kSums];
  __shared__ float squares[kGemvMaxWarps][kTokens];
  dependency_launch();

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_threads = blockDim.x;
  // The outputs of this block: tiles from `place` on, `stride` apart, up to `end`.
  const auto share = [&](int block) {
    return static_cast<int>(static_cast<int64_t>(p.out_features) * block / gridDim.x);
  };
  const int end = kIsBounded ? share(blockIdx.x + 1) : p.out_features;
  const int stride = kIsBounded ? kOuts : static_cast<int>(gridDim.x) * kOuts;
  int place = kIsBounded ? share(blockIdx.x) : static_cast<int>(blockIdx.x) * kOuts;
  // The offset of this thread's first chunk in a row; the next chunks are 512 bytes apart.
  const int offset = (warp * kSteps * 32 + lane) * 16;
  // How many chunks of a row there are from this thread's first one on, and whether the warp has its
  // whole share of a row.
  const int rest = p.in_features / 8 - (warp * kSteps * 32 + lane);
  const bool is_inside = (warp + 1) * kSteps * 256 <= p.in_features;
  const uint64_t policy = weight_policy();
  const int64_t row_bytes = p.ldw * 2;
  // Where sizes are not bounded, the last tile begins earlier if out_features is not a multiple of kOuts:
  // it computes some rows again, but writes only its own.
  const auto first_row = [&](int place) { return kIsBounded ? place : min(place, p.out_features - kOuts); };

  uint4 weights[kRows][kSteps];
  const auto load_tile = [&](int place) {
    const char* source = static_cast<const char*>(p.weight) + first_row(place) * row_bytes + offset;
    // Both ways together take too many registers with a gate and few steps.
    constexpr bool kHasFastWay = !kIsGated || kSteps >= 4;
    if (!kIsBounded || (kHasFastWay && is_inside && end - place >= kOuts)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (kIsGated && r == kOuts) source += (p.out_features - kOuts) * row_bytes;
#pragma unroll
        for (int c = 0; c < kSteps; ++c) weights[r][c] = load_weight(source + c * 512, policy);
        source += row_bytes;
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (kIsGated && r == kOuts) source += (p.out_features - kOuts) * row_bytes;
#pragma unroll
        for (int c = 0; c < kSteps; ++c) {
          weights[r][c] = load_weight_within(r % kOuts, end - place, c * 32, rest, source + c * 512, policy);
        }
        source += row_bytes;
      }
    }
  };
  load_tile(place);
  uint4* factors = shared_h + (kInRegisters ? 0 : kTokens * kSteps * num_threads) + threadIdx.x;
  if (kHasNorm) {
    // The copy goes through shared memory, so that it takes no registers while the loads are under way.
    // A thread reads only what it copied itself.
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if (!kIsBounded || c * 32 < rest) {
        cp_async_16(shared_address(factors + c * num_threads),
                    static_cast<const char*>(p.norm_weight) + offset + c * 512);
      } else {
        factors[c * num_threads] = make_uint4(0, 0, 0, 0);
      }
    }
    cp_async_commit();
  }
#if __CUDA_ARCH__ >= 900
  const int thread = threadIdx.x;
  if (static_cast<int>(blockIdx.x) < p.prefetch_blocks && thread < min(kRows, p.prefetch_rows)) {
    int64_t row = place + stride + thread % kOuts;
    if (row < end) {
      if (thread >= kOuts) row += p.out_features;
      const char* source = static_cast<const char*>(p.weight) + row * row_bytes;
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(p.in_features * 2) : "memory");
    }
  }
#endif
  dependency_wait();

  uint4 own_h[kInRegisters ? kTokens : 1][kSteps];
  const auto h = [&](int token, int c) -> uint4& {
    return kInRegisters ? own_h[token][c] : shared_h[(token * kSteps + c) * num_threads + threadIdx.x];
  };
  float token_squares[kTokens];
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    token_squares[token] = 0.0f;
    const char* x = static_cast<const char*>(p.x) + min(token, p.num_tokens - 1) * p.ldx * 2;
    uint4 values[kSteps];
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if (!kIsBounded || c * 32 < rest) {
        values[c] = load_activations(x + offset + c * 512);
      } else {
        values[c] = make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int c = 0; c < kSteps; ++c) h(token, c) = values[c];
  }
  if (kHasNorm) {
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
        float f[8];
        unpack<T>(h(token, c), f);
#pragma unroll
        for (int i = 0; i < 8; ++i) token_squares[token] += f[i] * f[i];
      }
    }
    const float sum = reduce_many<kTokens>(token_squares, lane);
    if (lane % (32 / kTokens) == 0) squares[warp][lane / (32 / kTokens)] = sum;
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float total = lane < num_threads / 32 ? squares[lane][token] : 0.0f;
#pragma unroll
      for (int step = 16; step >= 1; step >>= 1) total += __shfl_xor_sync(kFullWarp, total, step);
      const float scale = rsqrtf(total / p.in_features + p.eps);
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
        const uint4 v = h(token, c), factor = factors[c * num_threads];
        h(token, c) = make_uint4(normalize_pair(unpack_pair(v.x, T()), scale, factor.x, T()),
                                 normalize_pair(unpack_pair(v.y, T()), scale, factor.y, T()),
                                 normalize_pair(unpack_pair(v.z, T()), scale, factor.z, T()),
                                 normalize_pair(unpack_pair(v.w, T()), scale, factor.w, T()));
      }
    }
  }

  // Each of kOuts * kTokens threads writes one output.
  const int out_row = threadIdx.x % kOuts, out_token = threadIdx.x / kOuts;
  const bool is_writer = out_token < min(kTokens, p.num_tokens);
  int parity = 0;
  for (; place < end; place += stride) {
    const int row = first_row(place) + out_row;
    const bool writes = is_writer && (kIsBounded ? row < end : row >= place);
    T* out = static_cast<T*>(p.out) + (writes ? out_token * p.ldo + row : 0);
    uint16_t residual = 0;
    if (kMode == Gemv::kResidual && writes) {
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(residual) : "l"(out) : "memory");
    }
    float bias = 0.0f;
    if (kMode == Gemv::kNorm && writes && p.bias != nullptr) bias = to_float(static_cast<const T*>(p.bias)[row]);
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      float values[kTokens][8];
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        uint4 packed = h(token, c);
        // Without this the compiler keeps the unpacked h, which takes twice the registers, over all
        // tiles.
        asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
        unpack<T>(packed, values[token]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float w[8];
        unpack<T>(weights[r][c], w);
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            sums[r * kTokens + token] = fmaf(w[i], values[token][i], sums[r * kTokens + token]);
          }
        }
      }
    }
    if (place + stride < end) load_tile(place + stride);

    const float sum = reduce_many<kSums>(sums, lane);
    if (lane % (32 / kSums) == 0) partials[parity][warp][lane / (32 / kSums)] = sum;
    __syncthreads();
    if (writes) {
      const auto total_of = [&](int row) {
        float total = 0.0f;
#pragma unroll 4
        for (int w = 0; w < num_threads / 32; ++w) total += partials[parity][w][row * kTokens + out_token];
        if (kMode == Gemv::kNorm && p.bias != nullptr) total += bias;
        return to_float(from_float<T>(total));
      };
      float value = total_of(out_row);
      if (kMode == Gemv::kResidual) value += to_float(reinterpret_cast<const T&>(residual));
      if (kIsGated) value = to_float(from_float<T>(value / (1.0f + __expf(-value)))) * total_of(kOuts + out_row);
      *out = from_float<T>(value);
    }
    parity ^= 1;
  }
}

// The number of registers that a thread may have, for weights in flight, h, sums, and the rest.
constexpr int gemv_registers(int tokens, int rows, int steps) {
  const int h = tokens * steps < 8 ? tokens * steps * 4 : 0;
  const int n = rows * steps * 4 + h + rows * tokens + (tokens - 1) * 8 + 44;
  if (rows * steps >= 32) return 248;
  const int cap = steps == 3 ? 128 : 248;
  return n > cap ? cap : (n + 7) / 8 * 8;
}

}  // namespace xserv

// xserv_linear_gemv_<mode>_<most tokens>_<steps of in_features>_<dtype>. The rows of a tile and the
// steps are the fastest for the layers of Qwen3-0.6B and 8B on an H200.
#define XSERV_DECODE_GEMV_KERNEL(NAME, REGISTERS, SUFFIX, ...)                           \
  extern "C" __global__ void __maxnreg__(REGISTERS) xserv_linear_gemv_##NAME##_##SUFFIX( \
      const __grid_constant__ xserv::LinearGemvParams params) {                          \
    xserv::gemv<__VA_ARGS__>(params);                                                    \
  }
#define XSERV_DECODE_GEMV(NAME, MODE, TOKENS, ROWS, STEPS, SUFFIX, T)                                        \
  XSERV_DECODE_GEMV_KERNEL(NAME##_##TOKENS##_##STEPS, xserv::gemv_registers(TOKENS, ROWS, STEPS), SUFFIX, T, \
                           xserv::Gemv::MODE, TOKENS, ROWS, STEPS, false)
#define XSERV_DECODE_GEMV_ALL(SUFFIX, T)                      \
  XSERV_DECODE_GEMV(norm, kNorm, 1, 16, 1, SUFFIX, T)         \
  XSERV_DECODE_GEMV(swiglu, kNormSwiglu, 1, 16, 1, SUFFIX, T) \
  XSERV_DECODE_GEMV(residual, kResidual, 1, 16, 1, SUFFIX, T) \
  XSERV_DECODE_GEMV(residual, kResidual, 1, 4, 3, SUFFIX, T)  \
  XSERV_DECODE_GEMV(residual, kResidual, 1, 4, 4, SUFFIX, T)  \
  XSERV_DECODE_GEMV(norm, kNorm, 1, 8, 2, SUFFIX, T)          \
  XSERV_DECODE_GEMV(swiglu, kNormSwiglu, 1, 8, 2, SUFFIX, T)  \
  XSERV_DECODE_GEMV(residual, kResidual, 1, 8, 2, SUFFIX, T)  \
  XSERV_DECODE_GEMV(norm, kNorm, 2, 8, 1, SUFFIX, T)          \
  XSERV_DECODE_GEMV(swiglu, kNormSwiglu, 2, 8, 1, SUFFIX, T)  \
  XSERV_DECODE_GEMV(residual, kResidual, 2, 8, 1, SUFFIX, T)  \
  XSERV_DECODE_GEMV(residual, kResidual, 2, 4, 3, SUFFIX, T)  \
  XSERV_DECODE_GEMV(residual, kResidual, 2, 4, 4, SUFFIX, T)
XSERV_DECODE_GEMV_ALL(f16, __half)
XSERV_DECODE_GEMV_ALL(bf16, __nv_bfloat16)

// xserv_linear_gemv_bounded_<mode>_<steps of in_features>_<dtype>: one token, any in_features. A tile
// has 16 chunks of a thread whatever the steps.
#define XSERV_DECODE_GEMV_BOUNDED(NAME, MODE, STEPS, SUFFIX, T)                                        \
  XSERV_DECODE_GEMV_KERNEL(bounded_##NAME##_##STEPS, 128, SUFFIX, T, xserv::Gemv::MODE, 1, 16 / STEPS, \
                           STEPS, true)
#define XSERV_DECODE_GEMV_BOUNDED_ALL(SUFFIX, T)               \
  XSERV_DECODE_GEMV_BOUNDED(norm, kNorm, 1, SUFFIX, T)         \
  XSERV_DECODE_GEMV_BOUNDED(norm, kNorm, 2, SUFFIX, T)         \
  XSERV_DECODE_GEMV_BOUNDED(norm, kNorm, 4, SUFFIX, T)         \
  XSERV_DECODE_GEMV_BOUNDED(norm, kNorm, 8, SUFFIX, T)         \
  XSERV_DECODE_GEMV_BOUNDED(swiglu, kNormSwiglu, 2, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(swiglu, kNormSwiglu, 4, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(swiglu, kNormSwiglu, 8, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(residual, kResidual, 1, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(residual, kResidual, 2, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(residual, kResidual, 4, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(residual, kResidual, 8, SUFFIX, T) \
  XSERV_DECODE_GEMV_BOUNDED(residual, kResidual, 16, SUFFIX, T)
XSERV_DECODE_GEMV_BOUNDED_ALL(f16, __half)
XSERV_DECODE_GEMV_BOUNDED_ALL(bf16, __nv_bfloat16)
#endif
