// y[i] = mean + factor * noise(seed, i), rounded once: reproducible numbers that look normally
// distributed. The noise is a sum of integers, so src/ops/fill/cpu.rs computes the same bits.
#include <stdint.h>

#include "common/dtype.cuh"

namespace xserv {

// The sum of four numbers of 16 random bits less its mean: a whole number from -131070 to 131070,
// which f32 holds exactly. The bits are those of SplitMix64 (Steele, Lea and Flood 2014, "Fast
// splittable pseudorandom number generators") at step `index`.
__device__ __forceinline__ float noise(uint64_t seed, uint64_t index) {
  uint64_t bits = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  const uint32_t low = static_cast<uint32_t>(bits), high = static_cast<uint32_t>(bits >> 32);
  const uint32_t sum = (low & 0xffff) + (low >> 16) + (high & 0xffff) + (high >> 16);
  return static_cast<float>(static_cast<int>(sum) - 131070);
}

// y: `count` elements in rows of `width`, each contiguous, `stride` elements apart; i counts them
// row by row. Grid: ceil(count / blockDim.x) blocks. The product and the sum are rounded one after
// the other, as on the host.
template <typename T>
__device__ __forceinline__ void fill(T* __restrict__ y, long long count, long long width,
                                     long long stride, uint64_t seed, float mean, float factor) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const long long row = count == width ? 0 : i / width;
  const float value = __fadd_rn(mean, __fmul_rn(factor, noise(seed, static_cast<uint64_t>(i))));
  y[row * stride + (i - row * width)] = from_float<T>(value);
}

}  // namespace xserv

#define XSERV_FILL(suffix, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      xserv_fill_##suffix(T* y, long long count, long long width, long long stride,            \
                          uint64_t seed, float mean, float factor) {                           \
    xserv::fill(y, count, width, stride, seed, mean, factor);                                  \
  }
XSERV_FOR_EACH_DTYPE(XSERV_FILL)
