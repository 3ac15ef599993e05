// Log-probabilities of some tokens of each row: out = (x[id] - m) / t - log(sum(exp((x - m) / t))), m = max(x).
//
//   logits: [num_rows, vocab_size]; temperatures: [num_rows], or null for 1
//   ids, out: [num_rows, count], two lists of them, so that the sum is done once
//
// One block a row, so that a row's sum has one order whatever else is in the batch. Threads work against their
// own maximum and correct at the end (Milakov & Gimelshein 2018, arXiv:1805.02867). An id beyond the vocabulary
// gives NaN, and so does a row with a logit that is not a number.
#include "common/dtype.cuh"
#include "common/reduce.cuh"

namespace xserv {

constexpr int kThreads = 1024;
// The lowest f32: what ops/adjust_logits makes of a banned token, which has minus infinity here.
constexpr float kBanned = -3.4028234663852886e38f;

struct LogSum {
  float max = -__builtin_huge_valf();
  float sum = 0.0f;  // of exp((x - max) * per_temperature)

  __device__ __forceinline__ void add(float x, float per_temperature) {
    if (x == -__builtin_huge_valf()) return;
    if (x > max) {
      sum = sum * expf((max - x) * per_temperature) + 1.0f;
      max = x;
    } else {
      sum += expf((x - max) * per_temperature);  // NaN stays in the sum
    }
  }
};

template <typename T>
__device__ __forceinline__ LogSum sum_of_thread(const T* row, int vocab_size, float per_temperature) {
  using V = Vec<T, kVec<T>>;
  LogSum part;
  int done = 0;
  if (reinterpret_cast<uintptr_t>(row) % sizeof(V) == 0) {
    const int num_vecs = vocab_size / kVec<T>;
    const V* vecs = reinterpret_cast<const V*>(row);
    for (int v = threadIdx.x; v < num_vecs; v += kThreads) {
      const V values = vecs[v];
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) part.add(to_float(values[i]), per_temperature);
    }
    done = num_vecs * kVec<T>;
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < vocab_size; i += kThreads) {
    part.add(to_float(row[i]), per_temperature);
  }
  return part;
}

struct LogProbsList {
  float* out;
  const int* ids;
  int count;
};

template <typename T>
__device__ __forceinline__ void log_probs(const T* logits, const float* temperatures, int vocab_size,
                                          const LogProbsList (&lists)[2]) {
  __shared__ float scratch[2][32];
  const int64_t row = blockIdx.x;
  logits += row * vocab_size;
  const float per_temperature = temperatures == nullptr ? 1.0f : 1.0f / temperatures[row];
  const LogSum part = sum_of_thread(logits, vocab_size, per_temperature);
  const float max = block_reduce<Max>(part.max, scratch[0]);
  // A thread without tokens has minus infinity as its maximum and no sum.
  const float own = part.sum == 0.0f ? 0.0f : part.sum * expf((part.max - max) * per_temperature);
  const float log_sum = logf(block_reduce<Sum>(own, scratch[1]));
#pragma unroll
  for (int list = 0; list < 2; ++list) {
    const int count = lists[list].count;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const unsigned id = lists[list].ids[row * count + i];
      float result = __int_as_float(0x7fffffff);
      if (id < static_cast<unsigned>(vocab_size)) {
        const float x = to_float(logits[id]);
        result = x == kBanned ? -__builtin_huge_valf() : (x - max) * per_temperature - log_sum;
      }
      lists[list].out[row * count + i] = result;
    }
  }
}

}  // namespace xserv

#define XSERV_LOG_PROBS(SUFFIX, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads)                                               \
      xserv_log_probs_##SUFFIX(const T* logits, const float* temperatures, int vocab_size, float* out,        \
                               const int* ids, int count, float* out_b, const int* ids_b, int count_b) {      \
    const xserv::LogProbsList lists[2] = {{out, ids, count}, {out_b, ids_b, count_b}};                        \
    xserv::log_probs<T>(logits, temperatures, vocab_size, lists);                                             \
  }
XSERV_FOR_EACH_DTYPE(XSERV_LOG_PROBS)
