// Linear layers of prompts on Hopper whose operands are integers of 8 bits
// (csrc/ops/quantised/integers.cu): a scale for each token and one for each row of weight.
//   out[t, i] = round(sum_k x[t, k] * weight[i, k] * x_scales[t] * scales[i] + bias[i])   plain
//   out[t, i] = round(round(silu(round(gate[t, i]))) * round(up[t, i]))                  swiglu, without bias
// The sums of products are exact; what follows is in f32, and round() is to T. Gate and up alternate in
// weight every eight rows. num_rows is a multiple of 16 and k is one, too; prefill.cuh has the kernel.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "ops/linear/prefill.cuh"

namespace xserv {

struct PrefillInt8Params {
  PrefillParams gemm;
  const float* x_scales;  // [num_tokens]
  const float* scales;    // [num_rows]
  const void* bias;       // [n], or null; plain only
  int num_rows;           // of weight and of scales, n or more (swiglu: 2 n)
  int padding[9];
};
XSERV_LAYOUT_PrefillInt8Params;

template <typename T, Epilogue kEpilogue>
struct Integers {
  using Sum = int;
  static constexpr int kElements = 128;
  static constexpr bool kHasMixedRows = true;
  static constexpr bool kIsMade = true;

  template <int kRows>
  __device__ __forceinline__ static void multiply(int (&sum)[kRows / 2], uint64_t a, uint64_t b, int accumulate) {
    wgmma_s8<kRows>(sum, a, b, accumulate);
  }

  // The sums of 16 tokens of a warp from `token` on, by rows of weight from `row` on.
  template <int kSums>
  __device__ __forceinline__ static void scale(const PrefillInt8Params& p, const int* sums, int token, int row,
                                               float (&scaled)[kSums]) {
    const int lane = threadIdx.x & 31, last = p.gemm.num_tokens - 1;
    // Values after the last token or row are not stored.
    const float low = p.x_scales[min(token + lane / 4, last)], high = p.x_scales[min(token + lane / 4 + 8, last)];
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const int column = row + i * 2 + lane % 4 * 2;
      const float2 s = *reinterpret_cast<const float2*>(p.scales + min(column, p.num_rows - 2));
      float2 bias = make_float2(0.0f, 0.0f);
      if (kEpilogue == Epilogue::kPlain && p.bias != nullptr) {
        bias = Pairs<T>::floats(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.bias) +
                                                                   min(column, p.gemm.n - 2)));
      }
      scaled[i] = fmaf(__int2float_rn(sums[i]), low * s.x, bias.x);
      scaled[i + 1] = fmaf(__int2float_rn(sums[i + 1]), low * s.y, bias.y);
      scaled[i + 2] = fmaf(__int2float_rn(sums[i + 2]), high * s.x, bias.x);
      scaled[i + 3] = fmaf(__int2float_rn(sums[i + 3]), high * s.y, bias.y);
    }
  }
};

}  // namespace xserv

// xserv_linear_prefill_int8_<epilogue>_<shape>_<dtype>
#define XSERV_PREFILL_INT8(NAME, EPILOGUE, SUFFIX, T, SHAPE, ...)                                                      \
  extern "C" __global__ void __launch_bounds__(xserv::Shape<__VA_ARGS__>::kThreads, 1)                                 \
      xserv_linear_prefill_int8_##NAME##_##SHAPE##_##SUFFIX(const __grid_constant__ xserv::PrefillInt8Params params) { \
    static_assert(xserv::Shape<__VA_ARGS__>::kSharedBytes == xserv::shared_bytes::linear_prefill_##SHAPE);             \
    xserv::prefill<T, xserv::Epilogue::EPILOGUE, xserv::Shape<__VA_ARGS__>,                                            \
                   xserv::Integers<T, xserv::Epilogue::EPILOGUE>>(params.gemm, params);                                \
  }
XSERV_WIDE_SHAPES(XSERV_PREFILL_INT8, plain, kPlain, f16, __half)
XSERV_WIDE_SHAPES(XSERV_PREFILL_INT8, plain, kPlain, bf16, __nv_bfloat16)
XSERV_WIDE_SHAPES(XSERV_PREFILL_INT8, swiglu, kSwiglu, f16, __half)
XSERV_WIDE_SHAPES(XSERV_PREFILL_INT8, swiglu, kSwiglu, bf16, __nv_bfloat16)
#endif
