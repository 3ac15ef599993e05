// The token that a row of a step has: one that the host knows, or one that the step before has just chosen.
#pragma once

#include <stdint.h>

namespace xserv {

constexpr unsigned kFromBatch = 0xffffffffu, kNoToken = 0xffffffffu;

// ids, sources: [num_tokens]; sources[t] is kFromBatch, or a row of `chosen`. A row without a token
// (its logits were not finite; the host ends that sequence) takes token 0.
__device__ __forceinline__ unsigned chosen_id(const unsigned* ids, const unsigned* sources, const unsigned* chosen,
                                              int64_t token) {
  const unsigned source = sources[token];
  const unsigned id = source == kFromBatch ? ids[token] : chosen[source];
  return source != kFromBatch && id == kNoToken ? 0 : id;
}

}  // namespace xserv
