// Log-probabilities of some tokens of each row: out = (x[id] - m) / t - log(sum(exp((x - m) / t))),
// m = max(x).
//
//   logits: [num_rows, vocab_size]; temperatures: [num_rows], or null for 1
//   ids, out: [num_rows, count], two lists of them, so that the sum is done once
//
// One block a row, so that a row's sum has one order whatever else is in the batch. Threads work
// against their own maximum and correct at the end (Milakov & Gimelshein 2018, arXiv:1805.02867).
// An id beyond the vocabulary gives NaN, and so does a row with a logit that is not a number.
#include "common/dtype.cuh"
#include "common/exp2.cuh"
#include "common/reduce.cuh"

namespace xserv {

constexpr int kThreads = 1024;
// The lowest f32: what ops/adjust_logits makes of a banned token, which has minus infinity here.
constexpr float kBanned = -3.4028234663852886e38f;

// Vectors that a thread loads together.
constexpr int kAhead = 4;

// The sum of exp((x - max) * per_temperature) over some logits, for the largest of them so far.
struct LogSum {
  float max = kBanned;
  float sum = 0.0f;

  // per_unit: per_temperature times log2(e), as an exponential of base 2 is one instruction.
  template <int N>
  __device__ __forceinline__ void add(const float (&x)[N], float per_unit) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < N; ++i) largest = fmaxf(largest, x[i]);
    if (largest > max) {
      sum *= exp2_approx((max - largest) * per_unit);
      max = largest;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp2_approx((x[i] - max) * per_unit);  // NaN stays in the sum
  }
};

// Which thread adds which logits, and in what order, depends on vocab_size alone: where a row
// begins decides only how they are read.
template <typename T>
__device__ __forceinline__ LogSum sum_of_thread(const T* row, int vocab_size, float per_unit) {
  constexpr int N = kVec<T>;
  using V = Vec<T, N>;
  LogSum part;
  const int num_whole = vocab_size / N;
  int v = threadIdx.x;
  const auto add = [&](const V& loaded) {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = to_float(loaded[i]);
    part.add(values, per_unit);
  };
  if (reinterpret_cast<uintptr_t>(row) % sizeof(V) == 0) {
    const V* vecs = reinterpret_cast<const V*>(row);
    for (; v + (kAhead - 1) * kThreads < num_whole; v += kAhead * kThreads) {
      V loaded[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) loaded[u] = vecs[v + u * kThreads];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) add(loaded[u]);
    }
    for (; v < num_whole; v += kThreads) add(vecs[v]);
  } else {
    for (; v < num_whole; v += kThreads) {
      V loaded;
#pragma unroll
      for (int i = 0; i < N; ++i) loaded[i] = row[v * N + i];
      add(loaded);
    }
  }
  const int tail = num_whole * N + threadIdx.x;
  if (tail < vocab_size) part.add({to_float(row[tail])}, per_unit);
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
  // A product with the largest finite number keeps the weight of the maximum, which is 0 away from
  // itself, at 1.
  const float per_unit = fminf(per_temperature * kLog2E, 0x1p127f);
  const LogSum part = sum_of_thread(logits, vocab_size, per_unit);
  const float max = block_reduce<Max>(part.max, scratch[0]);
  const float own = part.sum * exp2_approx((part.max - max) * per_unit);
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
