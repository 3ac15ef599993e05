// The routes of tokens to experts, as the kernels of this folder pass them on.
//
// An assignment is a token and one of its experts, number token * per_token + j. Assignments sorted by
// expert have slots: the rows of the tensors between the products.
#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

namespace xserv {

// Neighbouring slots of one expert: the tokens of a block of a product.
struct SlotTile {
  int expert;
  int first_slot;
  int num_slots;
  int unused;
};

// Reads a tile past the first-level cache, which may hold that of the layer before.
__device__ __forceinline__ SlotTile load_tile(const SlotTile* tiles, int index) {
  const int4 v = __ldcg(reinterpret_cast<const int4*>(tiles) + index);
  return {v.x, v.y, v.z, v.w};
}

}  // namespace xserv
