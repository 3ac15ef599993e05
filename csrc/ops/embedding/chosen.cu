// Makes the first rows of the residual stream of a step: hidden[t] = table[id(t)], where the host knows
// the token already, or the step before has just chosen it.
//   ids, sources: [num_tokens]: see chosen.cuh
//   hidden: [num_tokens, width], table: [vocab_size, width], in units of 16 bytes or of two
// An id outside the vocabulary is reported and gives zeros. One block per token.
#include <stdint.h>

#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "ops/embedding/chosen.cuh"

namespace xserv {

template <typename Unit>
__device__ __forceinline__ void embedding_chosen(Unit* hidden, const Unit* table, const unsigned* ids,
                                               const unsigned* sources, const unsigned* chosen,
                                               FaultRecord* fault, unsigned vocab_size, int width) {
  dependency_launch();
  dependency_wait();
  const int64_t token = blockIdx.x;
  const unsigned id = chosen_id(ids, sources, chosen, token);
  const bool is_valid = id < vocab_size;
  if (!is_valid && threadIdx.x == 0) report_fault(fault, kFaultTokenId, token, id);
  const Unit* row = table + (is_valid ? static_cast<int64_t>(id) * width : 0);
  for (int i = threadIdx.x; i < width; i += blockDim.x) hidden[token * width + i] = is_valid ? row[i] : Unit{};
}

}  // namespace xserv

#define XSERV_EMBEDDING_STEP(NAME, Unit)                                                                    \
  extern "C" __global__ void __launch_bounds__(512) xserv_embedding_chosen_##NAME(                            \
      Unit* hidden, const Unit* table, const unsigned* ids, const unsigned* sources, const unsigned* chosen, \
      xserv::FaultRecord* fault, unsigned vocab_size, int width) {                                          \
    xserv::embedding_chosen<Unit>(hidden, table, ids, sources, chosen, fault, vocab_size, width);             \
  }
XSERV_EMBEDDING_STEP(b16, uint4)
XSERV_EMBEDDING_STEP(b2, uint16_t)
