// The choice of a token behind each row of logits, for greedy and random decoding.
//
//   logits: [num_rows, vocab_size], contiguous; rows: [num_rows] how to choose; tokens: [num_rows]
//   greedy       argmax, the lowest id of equals
//   random       p = softmax(logits / temperature), of which top-k (ties with the k-th stay), top-p (the most
//                likely until they have the share, equals in the order of their ids) and min-p (relative to the
//                most likely) leave some; the draw is argmax(log p + Gumbel noise), which has exactly the
//                distribution p (Gumbel-max; Maddison et al. 2014). The noise of a token is a function of
//                (seed, index, id): a row's token depends neither on its batch nor on the number of blocks.
// A row with a logit that is not finite, and one whose caller chooses, gets kNoToken.
//
// Two launches of (parts, num_rows) blocks. _scan leaves the maximum of each part of a row; _choose draws among
// all tokens in parts too, the last block of a row ending it. With filters one block goes over the row alone:
// thresholds by histograms of the order-preserving keys, 11 bits at a time, with counts for top-k and
// probabilities in fixed point for top-p (integers: sums do not depend on the order).
#include "common/dtype.cuh"
#include "common/order.cuh"
#include "common/pdl.cuh"
#include "common/random.cuh"
#include "common/reduce.cuh"

namespace xserv {

// Uploaded by the host with every step (src/ops/stepwise/sample.rs: same layout).
struct SampleRow {
  uint64_t seed, index;
  float temperature;  // 0: greedy; negative: the caller chooses
  float top_p, min_p;
  int top_k;  // 0: all
};
static_assert(sizeof(SampleRow) == 32, "layout shared with the host");

struct SampleArgs {
  const void* logits;
  const SampleRow* rows;
  unsigned* tokens;
  unsigned* const* host_tokens;  // where the same goes in host memory; may be null
  uint64_t* partials;            // [num_rows, 2, parts]
  int* counters;                 // [num_rows], zero before and after
  int vocab_size;
  int parts;
};
static_assert(sizeof(SampleArgs) == 56, "the host passes this struct by value");

constexpr unsigned kNoToken = 0xffffffffu;
constexpr uint64_t kNotFinite = ~0ull;
constexpr int kThreads = 512;
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
// A weight of 1 in fixed point: 2^20 of them fit 64 bits.
constexpr float kOne = 0x1p40f;

// Tokens come in groups of four, whose noise is one call of the generator.
template <typename T>
struct LogitsRow {
  const T* row;
  int vocab_size;
  bool is_aligned;

  __device__ __forceinline__ LogitsRow(const SampleArgs& args, int index)
      : row(static_cast<const T*>(args.logits) + static_cast<int64_t>(index) * args.vocab_size),
        vocab_size(args.vocab_size),
        is_aligned(reinterpret_cast<uintptr_t>(row) % sizeof(Vec<T, 4>) == 0) {}

  __device__ __forceinline__ int num_groups() const { return (vocab_size + 3) / 4; }

  // How many of the four there are.
  __device__ __forceinline__ int load(int group, float (&values)[4]) const {
    const int first = group * 4, count = min(4, vocab_size - first);
    if (is_aligned && count == 4) {
      const Vec<T, 4> v = *reinterpret_cast<const Vec<T, 4>*>(row + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = to_float(v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = i < count ? to_float(row[first + i]) : -__builtin_huge_valf();
    }
    return count;
  }
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// All threads get the maximum over the block.
__device__ __forceinline__ uint64_t block_max(uint64_t best) {
  __shared__ uint64_t scratch[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) best = larger(best, __shfl_xor_sync(kFullWarp, best, offset));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) best = larger(best, scratch[i]);
  return best;
}

template <typename T>
__device__ __forceinline__ void sample_scan(const SampleArgs& args) {
  dependency_launch();
  dependency_wait();
  if (args.rows[blockIdx.y].temperature < 0.0f) return;
  const LogitsRow<T> row(args, blockIdx.y);
  uint32_t best_key = 0, best_index = 0;
  float check = 0.0f;  // becomes NaN with the first value that is not finite
  for (int group = blockIdx.x * kThreads + threadIdx.x; group < row.num_groups(); group += args.parts * kThreads) {
    float values[4];
    const int count = row.load(group, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      check += values[i] * 0.0f;
      const uint32_t key = order_key(values[i]);
      if (key > best_key) best_key = key, best_index = group * 4 + i;
    }
  }
  uint64_t best = static_cast<uint64_t>(best_key) << 32 | (0xffffffffu - best_index);
  if (!(check == 0.0f)) best = kNotFinite;
  best = block_max(best);
  if (threadIdx.x == 0) args.partials[static_cast<int64_t>(blockIdx.y) * 2 * args.parts + blockIdx.x] = best;
}

__device__ __forceinline__ void write_token(const SampleArgs& args, unsigned token) {
  args.tokens[blockIdx.y] = token;
  if (args.host_tokens != nullptr) {
    *reinterpret_cast<volatile unsigned*>(*args.host_tokens + blockIdx.y) = token;
  }
}

// log p + noise of a token, up to a constant, as the upper half of a key that orders by it, then by id.
__device__ __forceinline__ uint64_t score_key(float scaled, uint32_t bits, int id) {
  return pair_key(scaled + gumbel(bits), id);
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Best score of the groups first, first + step, ...; `is_eligible(value, id)` filters.
template <typename T, typename Eligible>
__device__ __forceinline__ uint64_t best_score(const LogitsRow<T>& row, const SampleRow& how, float maximum,
                                               int first, int step, const Eligible& is_eligible) {
  uint64_t best = 0;
  // Of this thread: nothing so far below it can win.
  float lowest = -__builtin_huge_valf();
  for (int group = first; group < row.num_groups(); group += step) {
    float values[4];
    const int count = row.load(group, values);
    float scaled[4];
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scaled[i] = (values[i] - maximum) / how.temperature;
      const bool is_in = i < count && scaled[i] + kMostGumbel >= lowest && is_eligible(values[i], group * 4 + i);
      if (!is_in) scaled[i] = -__builtin_huge_valf();
      any |= is_in;
    }
    if (!any) continue;
    const uint4 bits = philox(how.seed, make_uint4(static_cast<uint32_t>(how.index),
                                                   static_cast<uint32_t>(how.index >> 32), group, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (scaled[i] == -__builtin_huge_valf()) continue;
      best = larger(best, score_key(scaled[i], word(bits, i), group * 4 + i));
      lowest = fmaxf(lowest, scaled[i] + kLeastGumbel);
    }
  }
  return best;
}

struct Histogram {
  unsigned count[kBins];
  unsigned long long mass[kBins];
};

// Where a walk down the bins from the highest has come to `goal`.
struct Crossing {
  int bin;
  unsigned long long above;  // sum of the bins higher than that
};

// The highest bin at which the sum from the top reaches `goal` (> 0); bin 0 if none does.
template <typename Value>
__device__ Crossing find_crossing(const Value* bins, unsigned long long goal) {
  __shared__ unsigned long long sums[kThreads];
  __shared__ Crossing found;
  constexpr int kPer = kBins / kThreads;
  // Thread 0 has the highest bins.
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPer;
  unsigned long long own = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += bins[top - i];
  __syncthreads();
  sums[threadIdx.x] = own;
  __syncthreads();
  for (int offset = 1; offset < kThreads; offset *= 2) {
    const unsigned long long before = threadIdx.x >= offset ? sums[threadIdx.x - offset] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  unsigned long long above = sums[threadIdx.x] - own;
  if (threadIdx.x == kThreads - 1 && sums[threadIdx.x] < goal) {
    found = {0, sums[threadIdx.x] - bins[0]};
  }
  if (above < goal && sums[threadIdx.x] >= goal) {
    for (int i = 0; i < kPer; ++i) {
      if (above + bins[top - i] >= goal) {
        found = {top - i, above};
        break;
      }
      above += bins[top - i];
    }
  }
  __syncthreads();
  return found;
}

// The tokens that top-k and top-p leave: those with a key above `key`, and of those that have it the ones up to
// `last_id`.
struct Cut {
  uint32_t key;
  int last_id;
};

__device__ __forceinline__ bool is_kept(const Cut& cut, uint32_t key, int id) {
  return key > cut.key || (key == cut.key && id <= cut.last_id);
}

template <typename T>
__device__ Cut find_cut(const LogitsRow<T>& row, const SampleRow& how, float maximum) {
  __shared__ Histogram histogram;
  const auto weight = [&](float value) {
    return static_cast<unsigned long long>(expf((value - maximum) / how.temperature) * kOne);
  };
  // Counts and masses of the keys that begin with the `prefix_bits` of `prefix` and are at least `lowest`.
  const auto count = [&](int shift, int prefix_bits, uint32_t prefix, uint32_t lowest) {
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram.count[bin] = 0, histogram.mass[bin] = 0;
    __syncthreads();
    for (int group = threadIdx.x; group < row.num_groups(); group += kThreads) {
      float values[4];
      const int present = row.load(group, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = order_key(values[i]);
        if (i >= present || key < lowest) continue;
        if (prefix_bits > 0 && (key >> (32 - prefix_bits)) != prefix) continue;
        const uint32_t bin = key >> shift & (kBins - 1);
        atomicAdd(&histogram.count[bin], 1u);
        atomicAdd(&histogram.mass[bin], weight(values[i]));
      }
    }
    __syncthreads();
  };
  // Of 32 bits: 11, 11 and the last 10. f16 and bf16 end within the second, but the third costs one pass.
  constexpr int kShifts[3] = {21, 10, 0};
  constexpr int kPrefixBits[3] = {0, 11, 22};

  uint32_t lowest = 0;  // of top-k
  if (how.top_k > 0 && how.top_k < row.vocab_size) {
    unsigned long long goal = how.top_k;
    uint32_t prefix = 0;
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      count(kShifts[level], kPrefixBits[level], prefix, 0);
      const Crossing at = find_crossing(histogram.count, goal);
      goal -= at.above;
      prefix = level == 2 ? prefix << 10 | at.bin : prefix << kBinBits | at.bin;
    }
    lowest = prefix;
  }
  if (!(how.top_p < 1.0f)) return {lowest, row.vocab_size};

  __shared__ unsigned long long total;
  unsigned long long goal = 0;
  uint32_t prefix = 0;
  unsigned ties = 0;
  unsigned long long tie_mass = 0;
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    count(kShifts[level], kPrefixBits[level], prefix, lowest);
    if (level == 0) {
      if (threadIdx.x == 0) total = 0;
      __syncthreads();
      unsigned long long own = 0;
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) own += histogram.mass[bin];
      atomicAdd(&total, own);
      __syncthreads();
      goal = static_cast<unsigned long long>(ceil(static_cast<double>(how.top_p) * static_cast<double>(total)));
      if (goal < 1) goal = 1;
    }
    const Crossing at = find_crossing(histogram.mass, goal);
    goal -= at.above;
    prefix = level == 2 ? prefix << 10 | at.bin : prefix << kBinBits | at.bin;
    ties = histogram.count[at.bin];
    tie_mass = histogram.mass[at.bin];
  }
  // All ties have the same weight; one stays while those before it do not reach the goal.
  const unsigned long long each = ties > 0 ? tie_mass / ties : 0;
  const unsigned long long needed = each > 0 ? (goal + each - 1) / each : ties;
  Cut cut = {prefix > lowest ? prefix : lowest, row.vocab_size};
  if (needed >= ties) return cut;

  // The id of the last tie that is needed. Each thread counts a run of neighbouring groups.
  __shared__ unsigned before[kThreads + 1];
  __shared__ int last_id;
  const int per_thread = (row.num_groups() + kThreads - 1) / kThreads;
  const int first = threadIdx.x * per_thread, end = min(first + per_thread, row.num_groups());
  const auto walk = [&](unsigned seen, unsigned goal_count) {
    for (int group = first; group < end; ++group) {
      float values[4];
      const int present = row.load(group, values);
      for (int i = 0; i < present; ++i) {
        if (order_key(values[i]) != cut.key) continue;
        if (++seen == goal_count) last_id = group * 4 + i;
      }
    }
    return seen;
  };
  before[threadIdx.x + 1] = walk(0, 0);
  if (threadIdx.x == 0) before[0] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kThreads; ++i) before[i + 1] += before[i];
  }
  __syncthreads();
  walk(before[threadIdx.x], static_cast<unsigned>(needed));
  __syncthreads();
  cut.last_id = last_id;
  return cut;
}

template <typename T>
__device__ __forceinline__ void sample_choose(const SampleArgs& args) {
  dependency_launch();
  dependency_wait();
  const SampleRow how = args.rows[blockIdx.y];
  const bool is_first = blockIdx.x == 0;
  if (how.temperature < 0.0f) {
    if (is_first && threadIdx.x == 0) write_token(args, kNoToken);
    return;
  }
  uint64_t* partials = args.partials + static_cast<int64_t>(blockIdx.y) * 2 * args.parts;
  uint64_t best = 0;
  for (int i = threadIdx.x; i < args.parts; i += kThreads) best = larger(best, partials[i]);
  best = block_max(best);
  if (best == kNotFinite || how.temperature == 0.0f) {
    const unsigned token = best == kNotFinite ? kNoToken : static_cast<unsigned>(index_of_pair(best));
    if (is_first && threadIdx.x == 0) write_token(args, token);
    return;
  }
  const LogitsRow<T> row(args, blockIdx.y);
  const float maximum = to_float(row.row[index_of_pair(best)]);
  const bool has_cut = (how.top_k > 0 && how.top_k < args.vocab_size) || how.top_p < 1.0f;
  if (has_cut) {
    if (!is_first) return;
    const Cut cut = find_cut(row, how, maximum);
    best = best_score(row, how, maximum, threadIdx.x, kThreads, [&](float value, int id) {
      return is_kept(cut, order_key(value), id) && expf((value - maximum) / how.temperature) >= how.min_p;
    });
    best = block_max(best);
    if (threadIdx.x == 0) write_token(args, index_of_pair(best));
    return;
  }
  best = best_score(row, how, maximum, blockIdx.x * kThreads + threadIdx.x, args.parts * kThreads,
                    [&](float value, int) {
                      return how.min_p <= 0.0f || expf((value - maximum) / how.temperature) >= how.min_p;
                    });
  best = block_max(best);
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    partials[args.parts + blockIdx.x] = best;
    __threadfence();
    is_last = atomicAdd(args.counters + blockIdx.y, 1) == args.parts - 1;
    if (is_last) args.counters[blockIdx.y] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  best = 0;
  for (int i = threadIdx.x; i < args.parts; i += kThreads) best = larger(best, __ldcg(partials + args.parts + i));
  best = block_max(best);
  if (threadIdx.x == 0) write_token(args, index_of_pair(best));
}

}  // namespace xserv

#define XSERV_SAMPLE(SUFFIX, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads)                                            \
      xserv_sample_scan_##SUFFIX(const __grid_constant__ xserv::SampleArgs args) {                         \
    xserv::sample_scan<T>(args);                                                                           \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads)                                            \
      xserv_sample_choose_##SUFFIX(const __grid_constant__ xserv::SampleArgs args) {                       \
    xserv::sample_choose<T>(args);                                                                         \
  }
XSERV_FOR_EACH_DTYPE(XSERV_SAMPLE)
