// Changes the logits of single tokens in place: biases, bans, penalties (src/ops/adjust_logits/mod.rs has
// their order and sources).
//
//   logits: [num_rows, vocab_size] f32; rows: [num_rows] how each changes; adjustments: those of all rows;
//   chosen: the tokens that the step before chose, on which a row may wait
//
// One block a row, whose adjustments are of different tokens, so that no two threads change the same logit.
// Each step is rounded by itself, as on the host: no multiplication is fused with an addition.
#include <stdint.h>

#include "common/layouts.cuh"

namespace xserv {

struct Adjustment {
  uint32_t token_id, num_generated, flags;
  float bias;
};
XSERV_LAYOUT_Adjustment;

struct AdjustedRow {
  uint32_t first, count, pending, bans_ends;
  float repetition_penalty, presence_penalty, frequency_penalty;
  uint32_t reserved;
};
XSERV_LAYOUT_AdjustedRow;

constexpr uint32_t kSeen = 1, kEnds = 2;
constexpr uint32_t kNoRow = 0xffffffffu;
constexpr float kLowest = -3.4028234663852886e38f;

__device__ __forceinline__ float adjusted(float logit, const AdjustedRow& row, const Adjustment& adjustment) {
  if (logit != logit) return logit;
  if (row.bans_ends != 0 && (adjustment.flags & kEnds) != 0) return kLowest;
  logit = __fadd_rn(logit, adjustment.bias);
  if ((adjustment.flags & kSeen) != 0) {
    logit = logit < 0.0f ? __fmul_rn(logit, row.repetition_penalty) : __fdiv_rn(logit, row.repetition_penalty);
  }
  if (adjustment.num_generated > 0) {
    const float times = __fmul_rn(row.frequency_penalty, static_cast<float>(adjustment.num_generated));
    logit = __fsub_rn(logit, __fadd_rn(row.presence_penalty, times));
  }
  return logit < kLowest ? kLowest : logit;
}

}  // namespace xserv

extern "C" __global__ void __launch_bounds__(512)
    xserv_adjust_logits(float* logits, const xserv::AdjustedRow* rows, const uint4* adjustments,
                        const uint32_t* chosen, int vocab_size) {
  const xserv::AdjustedRow row = rows[blockIdx.x];
  const uint32_t size = vocab_size;
  logits += static_cast<int64_t>(blockIdx.x) * vocab_size;
  const uint32_t pending = row.pending == xserv::kNoRow ? xserv::kNoRow : chosen[row.pending];
  bool is_known = false;
  for (uint32_t i = threadIdx.x; i < row.count; i += blockDim.x) {
    const uint4 words = adjustments[row.first + i];
    xserv::Adjustment adjustment = {words.x, words.y, words.z, __uint_as_float(words.w)};
    if (adjustment.token_id >= size) continue;
    if (adjustment.token_id == pending) {
      is_known = true;
      adjustment.num_generated += 1;
      adjustment.flags |= xserv::kSeen;
    }
    logits[adjustment.token_id] = xserv::adjusted(logits[adjustment.token_id], row, adjustment);
  }
  // A token that was not chosen is beyond the vocabulary too.
  if (!__syncthreads_or(is_known) && threadIdx.x == 0 && pending < size) {
    const xserv::Adjustment adjustment = {pending, 1, xserv::kSeen, 0.0f};
    logits[pending] = xserv::adjusted(logits[pending], row, adjustment);
  }
}
