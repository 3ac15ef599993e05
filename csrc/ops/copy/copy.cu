// y = x, bit for bit, with strides on both sides (up to 8 axes): makes views contiguous, fills slices,
// repeats along axes of stride 0. b<BYTES> is the unit: the element (2, 4 or 8 bytes), or 16 where the
// innermost axis is contiguous on both sides and everything is 16-byte aligned. A plain contiguous copy
// is the driver's.
#include <stdint.h>

#include "common/strided.cuh"

namespace xserv {

template <typename Unit>
__device__ __forceinline__ void copy_strided(Unit* __restrict__ y, const Unit* __restrict__ x,
                                             const StridedLayout& layout) {
  const unsigned unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= static_cast<unsigned>(layout.num_units)) return;
  long long offsets[2];
  strided_offsets(layout, unit, offsets);
  y[offsets[0]] = x[offsets[1]];
}

}  // namespace xserv

#define XSERV_COPY(BYTES, Unit)                                                            \
  extern "C" __global__ void __launch_bounds__(512) xserv_copy_strided_b##BYTES(           \
      Unit* y, const Unit* x, xserv::StridedLayout layout) {                               \
    xserv::copy_strided<Unit>(y, x, layout);                                               \
  }
XSERV_COPY(2, uint16_t)
XSERV_COPY(4, uint32_t)
XSERV_COPY(8, uint2)
XSERV_COPY(16, uint4)
