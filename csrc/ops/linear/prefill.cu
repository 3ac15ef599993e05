// Linear layers of prompts on Hopper, with the operations that follow them.
//   out[t, i] = round(sum_k x[t, k] * weight[i, k])                                     plain
//   out[t, i] = round(round(silu(round(gate[t, i]))) * round(up[t, i]))                 swiglu
//   out and the cache as qk_norm_rope_append.cu computes them from q, k and v           heads
// where round() is to T, sums in f32, silu(g) = g / (1 + e^-g), and gate and up are the products with rows i
// and intermediate_size + i of weight [2 * intermediate_size, k]. The roundings are those of Transformers.
//
// x: [num_tokens, k]; weight: [n, k], row-major as the checkpoint has it; out: [num_tokens, n]. k and n are
// multiples of 8, with swiglu n = intermediate_size too; all begin at multiples of 16 bytes.
//
// prefill.cuh has the kernel.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "ops/linear/prefill.cuh"

// xserv_linear_prefill_<epilogue>_<shape>_<dtype>: groups of 64 tokens, rows, stages, blocks of a
// cluster with the same rows and with the same tokens, parts of k
#define XSERV_PREFILL(NAME, EPILOGUE, SUFFIX, T, SHAPE, ...)                                                  \
  extern "C" __global__ void __launch_bounds__(xserv::Shape<__VA_ARGS__>::kThreads, 1)                        \
      xserv_linear_prefill_##NAME##_##SHAPE##_##SUFFIX(const __grid_constant__ xserv::PrefillParams params) { \
    static_assert(xserv::Shape<__VA_ARGS__>::kSharedBytes == xserv::shared_bytes::linear_prefill_##SHAPE);    \
    xserv::prefill<T, xserv::Epilogue::EPILOGUE, xserv::Shape<__VA_ARGS__>>(params, params);                  \
  }
#define XSERV_PREFILL_HEADS(SUFFIX, T, SHAPE, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(xserv::Shape<__VA_ARGS__>::kThreads, 1)                          \
      xserv_linear_prefill_heads_##SHAPE##_##SUFFIX(const __grid_constant__ xserv::PrefillHeadsParams params) { \
    static_assert(xserv::Shape<__VA_ARGS__>::kSharedBytes == xserv::shared_bytes::linear_prefill_##SHAPE);      \
    xserv::prefill<T, xserv::Epilogue::kHeads, xserv::Shape<__VA_ARGS__>>(params.gemm, params);                 \
  }
#define XSERV_PREFILL_ALL(SUFFIX, T)                                       \
  XSERV_WIDE_SHAPES(XSERV_PREFILL, plain, kPlain, SUFFIX, T)               \
  XSERV_WIDE_SHAPES(XSERV_PREFILL, swiglu, kSwiglu, SUFFIX, T)             \
  XSERV_PREFILL(plain, kPlain, SUFFIX, T, 64x128_m, 1, 128, 8, 2, 1)       \
  XSERV_PREFILL(plain, kPlain, SUFFIX, T, 64x128_m_s2, 1, 128, 8, 2, 1, 2) \
  XSERV_PREFILL(plain, kPlain, SUFFIX, T, 64x64_n_s2, 1, 64, 11, 1, 2, 2)  \
  XSERV_PREFILL_HEADS(SUFFIX, T, 128x128_m, 2, 128, 6, 2, 1)               \
  XSERV_PREFILL_HEADS(SUFFIX, T, 128x128_n, 2, 128, 6, 1, 2)
XSERV_PREFILL_ALL(f16, __half)
XSERV_PREFILL_ALL(bf16, __nv_bfloat16)
#endif
