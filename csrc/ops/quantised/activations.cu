// Activations in FP8 (activations.cuh).
#include "common/layouts.cuh"
#include "common/pdl.cuh"
#include "ops/quantised/activations.cuh"

namespace xserv {

// x: [num_tokens, k], row-major, k a multiple of 8. Sixteen lanes have a group of 128 inputs.
template <typename T>
__device__ __forceinline__ void quantise_activations(const T* x, uint8_t* codes, float* scales, int num_tokens, int k,
                                                     int num_groups, int pitch) {
  dependency_launch();
  dependency_wait();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 16) + threadIdx.x / 16;
  const int64_t last = static_cast<int64_t>(num_tokens) * num_groups - 1;
  // Lanes without a group do as those of the last one, for the exchange.
  const int64_t place = min(index, last);
  const int token = static_cast<int>(place / num_groups), group = static_cast<int>(place - static_cast<int64_t>(token) * num_groups);
  const int eight = threadIdx.x & 15, input = group * 128 + eight * 8;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (input < k) v = load_activations(x + static_cast<int64_t>(token) * k + input);
  float numbers[8];
  unpack<T>(v, numbers);
  uint32_t words[2];
  const float scale = quantise_eight(numbers, words);
  if (index > last) return;
  uint8_t* target = codes + (static_cast<int64_t>(token) * num_groups + group) * 128 + eight / 4 * 32 + eight % 4 * 4;
  *reinterpret_cast<uint32_t*>(target) = words[0];
  *reinterpret_cast<uint32_t*>(target + 16) = words[1];
  if (eight == 0) scales[static_cast<int64_t>(group) * pitch + token] = scale;
}

}  // namespace xserv

#define XSERV_ACTIVATIONS(SUFFIX, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                               \
      xserv_quantise_activations_##SUFFIX(const T* x, uint8_t* codes, float* scales, int num_tokens, int k,       \
                                          int num_groups, int pitch) {                                            \
    xserv::quantise_activations<T>(x, codes, scales, num_tokens, k, num_groups, pitch);                           \
  }
XSERV_ACTIVATIONS(f16, __half)
XSERV_ACTIVATIONS(bf16, __nv_bfloat16)
