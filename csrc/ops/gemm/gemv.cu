// out = alpha * x * op(W) + beta * out for a few rows of x (m <= 8): the linear layers of decode.
//
//   x    [m, k]; ldx elements from row to row
//   W    [n, k] (a weight of torch.nn.Linear), or [k, n] for the _nn kernels; ldw
//   out  [m, n]; ldo. All of one type T, f32 accumulation, one rounding at the store.
//
// The weights are read once, 16 bytes per lane at a time past the L1 and with several loads in flight, so
// that the kernel runs at the rate of device memory; x comes from the caches. Every sum has a fixed
// order.
//
//   gemv              a group of warps computes a few rows of W with FMA: m = 1, 2, and f32
//   gemv_tensor_core  16 rows of W are the A operand of mma.m16n8k16 and the rows of x its eight columns: FMA
//                     would not keep up with memory from m = 3 on. A sum may take k in any order, so a lane
//                     takes eight consecutive weights for its k of two products: fragments come straight
//                     from global memory, without shared memory.
//   gemv_nn           W is not transposed: lanes lie along n, and the threads of a block split k
//
// Needs: x, W 16-byte aligned, ldx, ldw multiples of 16 bytes; k a multiple of 8 for gemv_tensor_core.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"

namespace xserv {

struct GemvParams {
  const void* x;
  const void* w;
  void* out;
  int64_t ldx, ldw, ldo;
  int m, n, k;
  float alpha, beta;
};
XSERV_LAYOUT_GemvParams;

// kWide asks the L2 to fetch 256 bytes at a time: 5 % faster for gemv_tensor_core, 5 % slower for gemv
// (measured on an H200).
template <bool kWide>
__device__ __forceinline__ uint4 load_weights(const void* source) {
  uint4 v;
  if (kWide) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source));
  }
  return v;
}

__device__ __forceinline__ void unpack(const uint4& v, float (&f)[4], float) {
  f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y);
  f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8], __nv_bfloat16) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = __uint_as_float(words[i] << 16);
    f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8], __half) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    f[2 * i] = pair.x, f[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ void store_scaled(T* out, float sum, const GemvParams& p) {
  float value = p.alpha * sum;
  if (p.beta != 0.0f) value += p.beta * to_float(*out);
  *out = from_float<T>(value);
}

// kWarpsK warps share kRows rows of W and split k among their lanes, chunk by chunk.
template <typename T, int kTokens, int kRows, int kWarpsK, int kUnroll, int kWarps>
__device__ __forceinline__ void gemv(const GemvParams& p) {
  constexpr int kN = kVec<T>, kStep = kWarpsK * 32, kGroups = kWarps / kWarpsK;
  static_assert(kWarps % kWarpsK == 0, "whole groups only");
  __shared__ float partials[kWarpsK > 1 ? kWarps : 1][kRows * kTokens];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = warp / kWarpsK, part = warp % kWarpsK;
  const T* x = static_cast<const T*>(p.x);
  const int num_chunks = p.k / kN;

  // The host launches one block per tile, or fewer blocks that take several tiles each.
  const int rows_per_block = kGroups * kRows;
  for (int row0 = blockIdx.x * rows_per_block; row0 < p.n; row0 += gridDim.x * rows_per_block) {
    const int first_row = row0 + group * kRows;
    const T* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = static_cast<const T*>(p.w) + min(first_row + r, p.n - 1) * p.ldw;
    }
    float sum[kRows][kTokens];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) sum[r][token] = 0.0f;
    }
    const auto accumulate = [&](const uint4 (&weights)[kRows], int chunk) {
      float w[kRows][kN];
#pragma unroll
      for (int r = 0; r < kRows; ++r) unpack(weights[r], w[r], T());
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (kTokens == 1 || token < p.m) {
          float values[kN];
          unpack(__ldg(reinterpret_cast<const uint4*>(x + token * p.ldx + chunk * kN)), values, T());
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kN; ++i) sum[r][token] += w[r][i] * values[i];
          }
        }
      }
    };

    int chunk = part * 32 + lane;
    for (; chunk + (kUnroll - 1) * kStep < num_chunks; chunk += kUnroll * kStep) {
      uint4 weights[kUnroll][kRows];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          weights[u][r] = load_weights<false>(rows[r] + (chunk + u * kStep) * kN);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) accumulate(weights[u], chunk + u * kStep);
    }
    for (; chunk < num_chunks; chunk += kStep) {
      uint4 weights[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) weights[r] = load_weights<false>(rows[r] + chunk * kN);
      accumulate(weights, chunk);
    }
    const int tail = num_chunks * kN + lane;  // fewer than kN elements are left
    if (part == 0 && tail < p.k) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token < p.m) {
          const float value = to_float(x[token * p.ldx + tail]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[r][token] += to_float(rows[r][tail]) * value;
        }
      }
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) sum[r][token] = warp_reduce<Sum>(sum[r][token]);
    }
    T* out = static_cast<T*>(p.out);
    if (kWarpsK == 1) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          if (lane == (r * kTokens + token) % 32 && token < p.m && first_row + r < p.n) {
            store_scaled(out + token * p.ldo + first_row + r, sum[r][token], p);
          }
        }
      }
    } else {
      if (lane == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int token = 0; token < kTokens; ++token) partials[warp][r * kTokens + token] = sum[r][token];
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kGroups * kRows * kTokens; i += kWarps * 32) {
        const int row = i / kTokens, token = i % kTokens, own_group = row / kRows;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarpsK; ++w) {
          total += partials[own_group * kWarpsK + w][row % kRows * kTokens + token];
        }
        if (token < p.m && row0 + row < p.n) store_scaled(out + token * p.ldo + row0 + row, total, p);
      }
      __syncthreads();
    }
  }
}

// A block computes 16 * kTiles rows of W; its warps take runs of kUnroll * 32 along k in turn.
template <typename T, int kTiles, int kWarps, int kUnroll>
__device__ __forceinline__ void gemv_tensor_core(const GemvParams& p) {
  constexpr int kRows = kTiles * 16;
  __shared__ float partials[kWarps][8][kRows];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // The row (or token) within eight, and the first k, of this lane.
  const int quad = lane >> 2, k_lane = (lane & 3) * 8;
  const T* x = static_cast<const T*>(p.x) + min(quad, p.m - 1) * p.ldx;
  const bool has_token = quad < p.m;

  for (int row0 = blockIdx.x * kRows; row0 < p.n; row0 += gridDim.x * kRows) {
    const T* rows[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[tile][half] =
            static_cast<const T*>(p.w) + min(row0 + tile * 16 + half * 8 + quad, p.n - 1) * p.ldw;
      }
    }
    // Two alternating sums halve the chain of dependent products.
    float sum[2][kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[0][tile][e] = sum[1][tile][e] = 0.0f;
    }
    // The loop's bound is the same for the whole warp, because the products need all lanes.
    for (int k_warp = warp * kUnroll * 32; k_warp < p.k; k_warp += kWarps * kUnroll * 32) {
      const int k0 = k_warp + k_lane;
      uint4 weights[kUnroll][kTiles][2], values[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int k = k0 + u * 32;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            weights[u][tile][half] = make_uint4(0, 0, 0, 0);
            if (k < p.k) weights[u][tile][half] = load_weights<true>(rows[tile][half] + k);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int k = k0 + u * 32;
        values[u] = make_uint4(0, 0, 0, 0);
        if (has_token && k < p.k) values[u] = __ldg(reinterpret_cast<const uint4*>(x + k));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 &upper = weights[u][tile][0], &lower = weights[u][tile][1];
          const uint32_t a0[4] = {upper.x, lower.x, upper.y, lower.y};
          const uint32_t a1[4] = {upper.z, lower.z, upper.w, lower.w};
          mma_m16n8k16<T>(sum[0][tile], a0, values[u].x, values[u].y);
          mma_m16n8k16<T>(sum[1][tile], a1, values[u].z, values[u].w);
        }
      }
    }

#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = (lane & 3) * 2 + (e & 1), row = tile * 16 + quad + (e >> 1) * 8;
        partials[warp][token][row] = sum[0][tile][e] + sum[1][tile][e];
      }
    }
    __syncthreads();
    T* out = static_cast<T*>(p.out);
    for (int i = threadIdx.x; i < p.m * kRows; i += kWarps * 32) {
      const int token = i / kRows, row = i % kRows;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += partials[w][token][row];
      if (row0 + row < p.n) store_scaled(out + token * p.ldo + row0 + row, total, p);
    }
    __syncthreads();
  }
}

// A block computes 64 bytes of columns: four lanes lie side by side, and 128 threads along k.
template <typename T, int kTokens>
__device__ __forceinline__ void gemv_nn(const GemvParams& p) {
  constexpr int kN = kVec<T>, kColumns = 4 * kN, kThreads = 512, kUnroll = 4;
  __shared__ float partials[kThreads / 32][kTokens][kColumns];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int column0 = blockIdx.x * kColumns, column = column0 + (lane & 3) * kN;
  const T* x = static_cast<const T*>(p.x);
  const T* w = static_cast<const T*>(p.w) + column;
  float sum[kTokens][kN];
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
#pragma unroll
    for (int i = 0; i < kN; ++i) sum[token][i] = 0.0f;
  }
  for (int k0 = threadIdx.x >> 2; k0 < p.k; k0 += kUnroll * (kThreads / 4)) {
    uint4 weights[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = k0 + u * (kThreads / 4);
      weights[u] = make_uint4(0, 0, 0, 0);
      if (k >= p.k) continue;
      if (column + kN <= p.n) {
        weights[u] = load_weights<false>(w + k * p.ldw);
      } else {
        Vec<T, kN> edge;
#pragma unroll
        for (int i = 0; i < kN; ++i) edge[i] = column + i < p.n ? w[k * p.ldw + i] : from_float<T>(0.0f);
        weights[u] = reinterpret_cast<const uint4&>(edge);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = k0 + u * (kThreads / 4);
      if (k >= p.k) continue;
      float values[kN];
      unpack(weights[u], values, T());
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token < p.m) {
          const float factor = to_float(x[token * p.ldx + k]);
#pragma unroll
          for (int i = 0; i < kN; ++i) sum[token][i] += values[i] * factor;
        }
      }
    }
  }
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      float value = sum[token][i];
#pragma unroll
      for (int offset = 16; offset >= 4; offset >>= 1) value += __shfl_xor_sync(kFullWarp, value, offset);
      if (lane < 4) partials[warp][token][lane * kN + i] = value;
    }
  }
  __syncthreads();
  T* out = static_cast<T*>(p.out);
  for (int i = threadIdx.x; i < p.m * kColumns; i += kThreads) {
    const int token = i / kColumns, c = i % kColumns;
    float total = 0.0f;
#pragma unroll
    for (int part = 0; part < kThreads / 32; ++part) total += partials[part][token][c];
    if (column0 + c < p.n) store_scaled(out + token * p.ldo + column0 + c, total, p);
  }
}

// Returns the number of blocks per SM that leaves each thread the registers for its loads in flight and
// `others`. Without the bound the compiler shrinks the kernel to 40 registers and issues the loads one
// after the other.
constexpr int blocks_for(int warps, int loads, int others) {
  const int registers = (loads * 4 + others + 7) / 8 * 8;
  const int blocks = 65536 / (warps * 32 * (registers < 255 ? registers : 255));
  const int most = 2048 / (warps * 32);
  return blocks < 1 ? 1 : (blocks < most ? blocks : most);
}

}  // namespace xserv

#define XSERV_GEMV(name, T, TOKENS, ROWS, WARPS_K, UNROLL, WARPS)                                    \
  extern "C" __global__ void __launch_bounds__(                                                      \
      WARPS * 32, xserv::blocks_for(WARPS, ROWS* UNROLL, 36 + 2 * ROWS + TOKENS * (ROWS + 4)))       \
  name(const __grid_constant__ xserv::GemvParams p) {                                                \
    xserv::gemv<T, TOKENS, ROWS, WARPS_K, UNROLL, WARPS>(p);                                         \
  }
#define XSERV_GEMV_TENSOR_CORE(name, T, TILES, WARPS, UNROLL)                                        \
  extern "C" __global__ void __launch_bounds__(                                                      \
      WARPS * 32, xserv::blocks_for(WARPS, (2 * TILES + 1) * UNROLL, 28 + 12 * TILES))               \
  name(const __grid_constant__ xserv::GemvParams p) {                                                \
    xserv::gemv_tensor_core<T, TILES, WARPS, UNROLL>(p);                                             \
  }

// xserv_gemv_m<most rows of x>_<dtype>. Four warps along k and eight loads in flight per lane were the
// fastest in a sweep on an H200 with bf16.
#define XSERV_GEMV_ALL(suffix, T)                                                                    \
  XSERV_GEMV(xserv_gemv_m1_##suffix, T, 1, 2, 4, (sizeof(T) == 4 ? 2 : 4), 4)                        \
  XSERV_GEMV(xserv_gemv_m2_##suffix, T, 2, 2, 4, 4, 4)                                               \
  XSERV_GEMV(xserv_gemv_m4_##suffix, T, 4, 2, 4, 2, 4)                                               \
  XSERV_GEMV(xserv_gemv_m8_##suffix, T, 8, 2, 4, 2, 4)                                               \
  extern "C" __global__ void __launch_bounds__(512)                                                  \
      xserv_gemv_nn_m1_##suffix(const __grid_constant__ xserv::GemvParams p) {                       \
    xserv::gemv_nn<T, 1>(p);                                                                         \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(512)                                                  \
      xserv_gemv_nn_m8_##suffix(const __grid_constant__ xserv::GemvParams p) {                       \
    xserv::gemv_nn<T, 8>(p);                                                                         \
  }
XSERV_FOR_EACH_DTYPE(XSERV_GEMV_ALL)

XSERV_GEMV_TENSOR_CORE(xserv_gemv_tensor_core_f16, __half, 1, 8, 4)
XSERV_GEMV_TENSOR_CORE(xserv_gemv_tensor_core_bf16, __nv_bfloat16, 1, 8, 4)
