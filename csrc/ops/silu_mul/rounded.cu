// The gate of SwiGLU (Shazeer 2020) with the roundings of Transformers:
//   out = round(round(gate / (1 + e^-gate)) * up)
// where round() is to T. In f32 the roundings do nothing. silu_mul.cu rounds once.
//
// gate_up: [num_rows, 2 * width], the gate before up; out: [num_rows, width]; both contiguous.
//
// grid (num_rows, blocks along width). N elements per access: 1, or kVec<T> where width is a multiple of it
// and everything begins at a multiple of 16 bytes.
#include "common/dtype.cuh"
#include "common/pdl.cuh"

namespace xserv {

template <typename T, int N>
__device__ __forceinline__ void silu_mul_rounded(T* out, const T* gate_up, int width) {
  using V = Vec<T, N>;
  const long long row = blockIdx.x;
  const V* gates = reinterpret_cast<const V*>(gate_up + row * 2 * width);
  const V* ups = reinterpret_cast<const V*>(gate_up + (row * 2 + 1) * width);
  V* target = reinterpret_cast<V*>(out + row * width);
  dependency_launch();
  dependency_wait();
  const int step = gridDim.y * blockDim.x;
  for (int v = blockIdx.y * blockDim.x + threadIdx.x; v < width / N; v += step) {
    const V gate = gates[v], up = ups[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float g = to_float(gate[j]);
      const float activated = to_float(from_float<T>(g / (1.0f + expf(-g))));
      result[j] = from_float<T>(activated * to_float(up[j]));
    }
    target[v] = result;
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T, NAME, N)                                                          \
  extern "C" __global__ void __launch_bounds__(256)                                               \
      xserv_silu_mul_rounded_##NAME##_##SUFFIX(T* out, const T* gate_up, int width) {            \
    xserv::silu_mul_rounded<T, N>(out, gate_up, width);                                          \
  }
#define XSERV_KERNELS(SUFFIX, T)               \
  XSERV_KERNEL(SUFFIX, T, vec, xserv::kVec<T>) \
  XSERV_KERNEL(SUFFIX, T, scalar, 1)
XSERV_FOR_EACH_DTYPE(XSERV_KERNELS)
