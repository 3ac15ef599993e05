// Walks a tensor of up to 8 axes in row-major order of the result, each operand with its own strides
// (0 repeats an operand along an axis).
#pragma once

#include "common/layouts.cuh"

namespace xserv {

// Filled by the host, which also merges axes where it can. The last axis is the innermost. Fewer than
// 2^31 units per launch; a unit is an element or, in the _vec kernels, a 16-byte vector of the innermost
// axis (sizes then count vectors on that axis, all strides still count units).
struct StridedLayout {
  int rank;
  int num_units;
  unsigned sizes[kMaxRank];
  // Division by sizes[d] without a divide (Granlund & Montgomery 1994, as PyTorch's IntDivider):
  //   shift = ceil(log2(size)), multiplier = floor(2^32 * (2^shift - size) / size) + 1,
  //   n / size = (umulhi(n, multiplier) + n) >> shift for n < 2^31.
  unsigned multipliers[kMaxRank];
  unsigned shifts[kMaxRank];
  long long strides[3][kMaxRank];  // result, first operand, second operand
};
XSERV_LAYOUT_StridedLayout;

template <int OPERANDS>
__device__ __forceinline__ void strided_offsets(const StridedLayout& layout, unsigned unit,
                                                long long (&offsets)[OPERANDS]) {
#pragma unroll
  for (int o = 0; o < OPERANDS; o++) offsets[o] = 0;
#pragma unroll
  for (int i = kMaxRank - 1; i >= 0; i--) {
    if (i >= layout.rank) continue;
    const unsigned quotient = (__umulhi(unit, layout.multipliers[i]) + unit) >> layout.shifts[i];
    const unsigned index = unit - quotient * layout.sizes[i];
#pragma unroll
    for (int o = 0; o < OPERANDS; o++) offsets[o] += index * layout.strides[o][i];
    unit = quotient;
  }
}

}  // namespace xserv
