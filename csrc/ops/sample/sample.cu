// Chooses a token for each row of logits, by greedy or random decoding.
//
//   logits: [num_rows, vocab_size], contiguous; rows: [num_rows] how to choose; tokens: [num_rows]
//   greedy       argmax; the lowest id wins a tie
//   random       p = softmax(logits / temperature), filtered by top-k (ties with the k-th stay), top-p (the
//                most likely tokens until they reach the share, ties in the order of their ids) and min-p
//                (relative to the most likely token); the draw is argmax(log p + Gumbel noise), which has
//                exactly the distribution p (Gumbel-max; Maddison et al. 2014). The noise of a token is a
//                function of (seed, index, id): a row's token depends neither on its batch nor on the number
//                of blocks.
// A row with a logit that is not finite, and a row whose caller chooses the token itself, get kNoToken.
//
// There are two launches of (parts, num_rows) blocks each. _scan leaves the maximum of each part of a
// row; _choose draws among all tokens, in parts too, and the last block of a row to arrive finishes the
// row.
//
// With top-k or top-p, the k largest tokens (kTopPTokens without top-k) and a few more are collected
// first: each part's _scan leaves a key that `rank` of its threads reach, and at least rank * parts >=
// k tokens of the row reach the `parts`-th largest of these keys. _choose collects the tokens that
// reach it, and the last block of the row sorts them and applies the filters. Probabilities are in
// fixed point, because sums of integers do not depend on the order. Where the collected tokens are not
// enough (large k, flat distributions), the last block goes over the whole row: a histogram of the distances
// from the likeliest token says in which bin the threshold lies, and the tokens of that bin are sorted. Where
// they are too many or too distant, the thresholds come from histograms of the order-preserving keys, 11 bits
// at a time. All ways keep the same tokens.
#include "common/dtype.cuh"
#include "common/layouts.cuh"
#include "common/order.cuh"
#include "common/pdl.cuh"
#include "ops/sample/random.cuh"
#include "common/reduce.cuh"

namespace xserv {

// The host uploads these with every step (src/ops/sample/mod.rs has the same layout).
struct SampleRow {
  uint64_t seed, index;
  float temperature;  // 0: greedy; negative: the caller chooses
  float top_p, min_p;
  int top_k;  // 0: all
};
XSERV_LAYOUT_SampleRow;

// The counters of one row; they are zero before and after a launch.
struct SampleCounters {
  int arrived;  // blocks that have finished
  int num_candidates;
  unsigned long long mass;  // the sum of the weights of all tokens
};
static_assert(sizeof(SampleCounters) == kSampleCounterWords * 4, "the host makes room");

struct SampleArgs {
  const void* logits;
  const SampleRow* rows;
  unsigned* tokens;
  unsigned* const* host_tokens;  // where the tokens go in host memory as well; may be null
  uint64_t* partials;            // [num_rows, 2 * parts + kMaxCandidates]
  SampleCounters* counters;      // [num_rows]
  int vocab_size;
  int parts;

  // For this block's row: the maxima of the parts, their bounds (or best scores), and the candidates.
  __device__ __forceinline__ uint64_t* maxima() const {
    return partials + static_cast<int64_t>(blockIdx.y) * (2 * parts + kMaxCandidates);
  }
  __device__ __forceinline__ uint64_t* bounds() const { return maxima() + parts; }
  __device__ __forceinline__ uint64_t* candidates() const { return maxima() + 2 * parts; }
};
XSERV_LAYOUT_SampleArgs;

constexpr unsigned kNoToken = 0xffffffffu;
constexpr uint64_t kNotFinite = ~0ull;
constexpr int kThreads = 512;
constexpr int kTopPTokens = 256, kMaxTokens = 512;  // needed without top-k; the most that a bound serves
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
// A weight of 1 in fixed point; the sum of 2^20 of them fits 64 bits.
constexpr float kOne = 0x1p40f;

// Tokens come in groups of four; one call of the generator makes the noise of a group.
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

  // Returns how many of the group's four tokens exist.
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

  // Calls visit(group, values, count) for the groups first, first + step, ... in all lanes of a warp,
  // with a count of 0 past the end of the row. Tokens that do not exist are minus infinity. kAhead
  // groups are loaded at a time.
  template <int kAhead, typename Visit>
  __device__ __forceinline__ void for_each_group(int first, int step, const Visit& visit) const {
    const int lane = threadIdx.x & 31;
    for (; first - lane < num_groups(); first += step * kAhead) {
      float values[kAhead][4];
      int counts[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int group = first + u * step;
        if (group < num_groups()) {
          counts[u] = load(group, values[u]);
        } else {
          counts[u] = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) values[u][i] = -__builtin_huge_valf();
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (first - lane + u * step < num_groups()) visit(first + u * step, values[u], counts[u]);
      }
    }
  }
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Returns the maximum over the block to all threads.
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

// Whether top-k or top-p removes tokens.
__device__ __forceinline__ bool is_filtered(const SampleRow& how, int vocab_size) {
  return (how.top_k > 0 && how.top_k < vocab_size) || how.top_p < 1.0f;
}

// How the bound for the filtered tokens is found: `rank` threads of a part reach the part's bound, and
// `parts` parts reach the row's bound. With a rank of 0 there is no bound.
struct BoundRanks {
  int rank = 0, parts = 0;

  __device__ __forceinline__ BoundRanks(const SampleRow& how, const SampleArgs& args) {
    const int needed = how.top_k > 0 && how.top_k < args.vocab_size ? how.top_k : kTopPTokens;
    if (needed > kMaxTokens) return;
    // `parts` becomes about half of all parts: few tokens more than needed reach a bound that lies in
    // the middle.
    rank = max(2, (2 * needed + args.parts - 1) / args.parts);
    parts = (needed + rank - 1) / rank;
  }
};

// Returns the upper 16 bits of the largest key that the keys of `rank` threads reach.
__device__ __forceinline__ uint32_t find_bound(uint32_t key, int rank) {
  uint32_t bound = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 16; --bit) {
    const uint32_t higher = bound | 1u << bit;
    if (__syncthreads_count(key >= higher) >= rank) bound = higher;
  }
  return bound;
}

template <typename T>
__device__ __forceinline__ void sample_scan(const SampleArgs& args) {
  dependency_launch();
  dependency_wait();
  const SampleRow how = args.rows[blockIdx.y];
  if (how.temperature < 0.0f) return;
  const LogitsRow<T> row(args, blockIdx.y);
  uint32_t best_key = 0, best_index = 0;
  float check = 0.0f;  // becomes NaN with the first value that is not finite
  const auto look_at = [&](int group, const float (&values)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      check += values[i] * 0.0f;
      const uint32_t key = order_key(values[i]);
      if (key > best_key) best_key = key, best_index = group * 4 + i;
    }
  };
  row.template for_each_group<4>(blockIdx.x * kThreads + threadIdx.x, args.parts * kThreads, look_at);
  uint64_t best = static_cast<uint64_t>(best_key) << 32 | (0xffffffffu - best_index);
  if (!(check == 0.0f)) best = kNotFinite;
  best = block_max(best);
  if (threadIdx.x == 0) args.maxima()[blockIdx.x] = best;
  if (how.temperature > 0.0f && is_filtered(how, args.vocab_size)) {
    const BoundRanks ranks(how, args);
    if (ranks.rank > 0) {
      const uint32_t bound = find_bound(best_key, ranks.rank);
      if (threadIdx.x == 0) args.bounds()[blockIdx.x] = bound;
    }
  }
}

__device__ __forceinline__ void write_token(const SampleArgs& args, unsigned token) {
  args.tokens[blockIdx.y] = token;
  if (args.host_tokens != nullptr) {
    *reinterpret_cast<volatile unsigned*>(*args.host_tokens + blockIdx.y) = token;
  }
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Returns the random bits of the tokens 4 * group to 4 * group + 3.
__device__ __forceinline__ uint4 noise_bits(const SampleRow& how, int group) {
  return philox(how.seed, make_uint4(static_cast<uint32_t>(how.index), static_cast<uint32_t>(how.index >> 32),
                                     group, 0));
}

// Returns the best score in the groups first, first + step, ...; `is_eligible(value, id)` filters the
// tokens. Some eligible token must have a score of at least `lowest`. All threads of the block call it.
template <typename T, typename Eligible>
__device__ __forceinline__ uint64_t best_score(const LogitsRow<T>& row, const SampleRow& how, float maximum,
                                               float lowest, int first, int step, const Eligible& is_eligible) {
  uint64_t best = 0;
  const float per_temperature = 1.0f / how.temperature;
  row.template for_each_group<2>(first, step, [&](int group, const float (&values)[4], int count) {
    // The noise that each token needs to reach `lowest`, approximately.
    float needed[4], least = __builtin_huge_valf();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      needed[i] = lowest - (values[i] - maximum) * per_temperature;
      least = fminf(least, needed[i]);
    }
    if (count > 0 && least <= kMaxGumbel + 0.1f) {
      const uint4 bits = noise_bits(how, group);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The noise is at most -log(uniform), which is too little most of the time; this test avoids
        // the more expensive logarithms.
        if (i >= count || uniform(word(bits, i)) > 1.01f * __expf(-needed[i])) continue;
        if (!is_eligible(values[i], group * 4 + i)) continue;
        const float score = (values[i] - maximum) / how.temperature + gumbel(word(bits, i));
        best = larger(best, pair_key(score, group * 4 + i));
        lowest = fmaxf(lowest, score);
      }
    }
    lowest = value_of_key(__reduce_max_sync(kFullWarp, order_key(lowest)));
  });
  return best;
}

// Returns the score of the most likely token, which passes every filter.
__device__ __forceinline__ float likeliest_score(const SampleRow& how, int likeliest) {
  __shared__ float score;
  if (threadIdx.x == 0) score = gumbel(word(noise_bits(how, likeliest / 4), likeliest % 4));
  __syncthreads();
  return score;
}

// Returns the sum of the values of all threads before this one.
__device__ unsigned long long sum_before(unsigned long long own) {
  __shared__ unsigned long long warps[kThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned long long sum = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned long long before = __shfl_up_sync(kFullWarp, sum, offset);
    if (lane >= offset) sum += before;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += warps[i];
  return sum - own;
}

struct Histogram {
  unsigned count[kBins];
  unsigned long long mass[kBins];
};

// Adds to a sum in shared memory. Additions of 64 bits there are loops that try until no other thread came between;
// the upper half changes rarely.
__device__ __forceinline__ void add_mass(unsigned long long& sum, unsigned long long weight) {
  if (weight == 0) return;
  unsigned* halves = reinterpret_cast<unsigned*>(&sum);
  const unsigned low = static_cast<unsigned>(weight), before = atomicAdd(halves, low);
  const unsigned high = static_cast<unsigned>(weight >> 32) + (before + low < before ? 1 : 0);
  if (high != 0) atomicAdd(halves + 1, high);
}

// Where a walk down the bins from the highest reaches `goal`.
struct Crossing {
  int bin;
  unsigned long long above;  // the sum of the bins above `bin`
};

// Returns the highest bin at which the sum from the top reaches `goal` (> 0), or bin 0 if none does.
template <typename Value>
__device__ Crossing find_crossing(const Value* bins, unsigned long long goal) {
  __shared__ Crossing found;
  constexpr int kPer = kBins / kThreads;
  // Thread 0 has the highest bins.
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPer;
  unsigned long long own = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += bins[top - i];
  unsigned long long above = sum_before(own);
  const unsigned long long through = above + own;
  if (threadIdx.x == kThreads - 1 && through < goal) found = {0, through - bins[0]};
  if (above < goal && through >= goal) {
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

// The tokens that top-k and top-p keep: those with a key above `key`, and those with exactly this key
// whose id is at most `last_id`.
struct Cut {
  uint32_t key;
  int last_id;
};

__device__ __forceinline__ bool is_kept(const Cut& cut, uint32_t key, int id) {
  return key > cut.key || (key == cut.key && id <= cut.last_id);
}

// A weight in fixed point; the most likely token has kOne.
__device__ __forceinline__ unsigned long long weight_of(const SampleRow& how, float value, float maximum) {
  return static_cast<unsigned long long>(expf((value - maximum) / how.temperature) * kOne);
}

// Sorts the first `size` (a power of two) pairs in shared memory, the largest first, by a bitonic network.
__device__ void sort_pairs(uint64_t* pairs, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = i / distance * 2 * distance + i % distance, high = low + distance;
        const bool is_descending = (low & run) == 0;
        const uint64_t a = pairs[low], b = pairs[high];
        if ((a < b) == is_descending) pairs[low] = b, pairs[high] = a;
      }
    }
  }
  __syncthreads();
}

// The bins for a first look at a row: by the distance from the likeliest token, in units of the temperature.
// Unlike the leading bits of the keys they spread the tokens out, so that threads rarely add to the same one.
constexpr float kBinsPerUnit = 128.0f;

__device__ __forceinline__ int distance_bin(const SampleRow& how, float value, float maximum) {
  const float distance = (maximum - value) * (kBinsPerUnit / how.temperature);
  return kBins - 1 - static_cast<int>(fminf(distance, kBins - 1.0f));
}

// Finds the cut of top-p (kByMass) or of top-k among the tokens with keys of at least `lowest`: the bin in which it
// lies, and then the token among those of the bin, in order. Returns false if that takes more room than there is, or
// if the bin is the one of all distant tokens. All threads of the block call it; `pairs` has room for kMaxCandidates.
template <bool kByMass, typename T>
__device__ bool find_cut_in_bins(const LogitsRow<T>& row, const SampleRow& how, float maximum, uint32_t lowest,
                                 Histogram& histogram, uint64_t* pairs, Cut& cut) {
  __shared__ int num_pairs;
  __shared__ unsigned long long total;
  __shared__ Cut found;
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram.count[bin] = 0, histogram.mass[bin] = 0;
  if (threadIdx.x == 0) num_pairs = 0, total = 0;
  __syncthreads();
  row.template for_each_group<4>(threadIdx.x, kThreads, [&](int, const float (&values)[4], int present) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= present || order_key(values[i]) < lowest) continue;
      const int bin = distance_bin(how, values[i], maximum);
      if (kByMass) {
        add_mass(histogram.mass[bin], weight_of(how, values[i], maximum));
      } else {
        atomicAdd(&histogram.count[bin], 1u);
      }
    }
  });
  __syncthreads();
  unsigned long long goal = how.top_k;
  if (kByMass) {
    unsigned long long own = 0;
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) own += histogram.mass[bin];
    atomicAdd(&total, own);
    __syncthreads();
    goal = static_cast<unsigned long long>(ceil(static_cast<double>(how.top_p) * static_cast<double>(total)));
    if (goal < 1) goal = 1;
  }
  const Crossing at = kByMass ? find_crossing(histogram.mass, goal) : find_crossing(histogram.count, goal);
  if (at.bin == 0) return false;

  row.template for_each_group<4>(threadIdx.x, kThreads, [&](int group, const float (&values)[4], int present) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= present || order_key(values[i]) < lowest) continue;
      if (distance_bin(how, values[i], maximum) != at.bin) continue;
      const int place = atomicAdd(&num_pairs, 1);
      if (place < kMaxCandidates) pairs[place] = pair_key(values[i], group * 4 + i);
    }
  });
  __syncthreads();
  const int count = num_pairs;
  if (count > kMaxCandidates) return false;
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += kThreads) pairs[i] = 0;
  sort_pairs(pairs, size);

  constexpr int kEach = kMaxCandidates / kThreads;  // neighbouring tokens for each thread
  const int first = threadIdx.x * kEach;
  unsigned long long each[kEach], own = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    each[k] = 0;
    if (first + k < count) {
      const float value = value_of_key(static_cast<uint32_t>(pairs[first + k] >> 32));
      each[k] = kByMass ? weight_of(how, value, maximum) : 1;
    }
    own += each[k];
  }
  unsigned long long before = at.above + sum_before(own);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    // The last token that is needed; with top-k the ties with it stay.
    if (before < goal && before + each[k] >= goal) {
      const uint64_t pair = pairs[first + k];
      found = {static_cast<uint32_t>(pair >> 32), kByMass ? static_cast<int>(index_of_pair(pair)) : row.vocab_size};
    }
    before += each[k];
  }
  __syncthreads();
  cut = found;
  return true;
}

template <typename T>
__device__ Cut find_cut(const LogitsRow<T>& row, const SampleRow& how, float maximum, uint64_t* pairs) {
  __shared__ Histogram histogram;
  // Counts the keys that begin with the `prefix_bits` of `prefix` and are at least `lowest`, and sums
  // up their weights.
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
        add_mass(histogram.mass[bin], weight_of(how, values[i], maximum));
      }
    }
    __syncthreads();
  };
  // The 32 bits are taken as 11, 11 and the last 10. Keys of f16 and bf16 end within the second level,
  // but the third costs only one pass.
  constexpr int kShifts[3] = {21, 10, 0};
  constexpr int kPrefixBits[3] = {0, 11, 22};

  Cut cut;
  uint32_t lowest = 0;  // the lowest key that top-k keeps
  const bool has_top_k = how.top_k > 0 && how.top_k < row.vocab_size;
  if (has_top_k && find_cut_in_bins<false>(row, how, maximum, 0, histogram, pairs, cut)) {
    lowest = cut.key;
  } else if (has_top_k) {
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
  if (find_cut_in_bins<true>(row, how, maximum, lowest, histogram, pairs, cut)) return cut;

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
  // All ties have the same weight; a tie stays while the tokens before it do not reach the goal.
  const unsigned long long each = ties > 0 ? tie_mass / ties : 0;
  const unsigned long long needed = each > 0 ? (goal + each - 1) / each : ties;
  cut = {prefix > lowest ? prefix : lowest, row.vocab_size};
  if (needed >= ties) return cut;

  // Finds the id of the last tie that is needed. Each thread counts a run of neighbouring groups.
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

__device__ __forceinline__ bool passes_min_p(const SampleRow& how, float value, float maximum) {
  return how.min_p <= 0.0f || expf((value - maximum) / how.temperature) >= how.min_p;
}

// Returns the sum over the block to all threads.
__device__ __forceinline__ unsigned long long block_sum(unsigned long long own) {
  __shared__ unsigned long long scratch[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) own += __shfl_xor_sync(kFullWarp, own, offset);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = own;
  __syncthreads();
  unsigned long long sum = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += scratch[i];
  return sum;
}

// Returns the `parts`-th largest of the bounds of the row's parts.
__device__ __forceinline__ uint32_t row_bound(const SampleArgs& args, int parts) {
  __shared__ uint32_t bounds[kMaxSampleParts];
  __shared__ uint32_t found;
  const int i = threadIdx.x;
  if (i < args.parts) bounds[i] = static_cast<uint32_t>(args.bounds()[i]);
  __syncthreads();
  if (i < args.parts) {
    int place = 0;
    for (int k = 0; k < args.parts; ++k) place += bounds[k] > bounds[i] || (bounds[k] == bounds[i] && k < i);
    if (place == parts - 1) found = bounds[i];
  }
  __syncthreads();
  return found;
}

// Makes the tokens at or above the bound in the block's part candidates of the row and, with
// `has_mass`, adds up the weights of all tokens of the part. `collected` has room for kMaxCandidates.
template <typename T>
__device__ void collect(const SampleArgs& args, const LogitsRow<T>& row, const SampleRow& how, float maximum,
                        uint32_t bound, bool has_mass, uint64_t* collected) {
  __shared__ int num_collected, place;
  if (threadIdx.x == 0) num_collected = 0;
  __syncthreads();
  unsigned long long mass = 0;
  const auto look_at = [&](int group, const float (&values)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      if (has_mass) mass += weight_of(how, values[i], maximum);
      if (order_key(values[i]) < bound) continue;
      const int at = atomicAdd(&num_collected, 1);
      if (at < kMaxCandidates) collected[at] = pair_key(values[i], group * 4 + i);
    }
  };
  row.template for_each_group<2>(blockIdx.x * kThreads + threadIdx.x, args.parts * kThreads, look_at);
  SampleCounters& counters = args.counters[blockIdx.y];
  if (has_mass) {
    mass = block_sum(mass);
    if (threadIdx.x == 0) atomicAdd(&counters.mass, mass);
  }
  __syncthreads();
  if (threadIdx.x == 0) place = atomicAdd(&counters.num_candidates, num_collected);
  __syncthreads();
  for (int i = threadIdx.x; i < min(num_collected, kMaxCandidates) && place + i < kMaxCandidates; i += kThreads) {
    args.candidates()[place + i] = collected[i];
  }
}

constexpr unsigned kUndecided = 0xfffffffeu;

// Returns the token drawn among the candidates that pass the filters, or kUndecided if tokens that are
// not candidates might pass them too. All threads of the block call it; `pairs` has room for
// kMaxCandidates.
__device__ unsigned choose_candidate(const SampleArgs& args, const SampleRow& how, float maximum, int num_candidates,
                                     unsigned long long mass, uint64_t* pairs) {
  if (num_candidates > kMaxCandidates) return kUndecided;
  int size = 2;
  while (size < num_candidates) size *= 2;
  for (int i = threadIdx.x; i < size; i += kThreads) pairs[i] = i < num_candidates ? __ldcg(args.candidates() + i) : 0;
  sort_pairs(pairs, size);

  constexpr int kEach = kMaxCandidates / kThreads;  // neighbouring candidates for each thread
  const int first = threadIdx.x * kEach;
  const auto value_of = [&](int i) { return value_of_key(static_cast<uint32_t>(pairs[i] >> 32)); };
  int kept = num_candidates;
  if (how.top_k > 0 && how.top_k < num_candidates) {
    const uint32_t lowest = pairs[how.top_k - 1] >> 32;  // ties with it stay
    kept = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      kept += __syncthreads_count(first + k < num_candidates && pairs[first + k] >> 32 >= lowest);
    }
  }
  if (how.top_p < 1.0f) {
    unsigned long long weights[kEach], own = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      weights[k] = first + k < kept ? weight_of(how, value_of(first + k), maximum) : 0;
      own += weights[k];
    }
    const unsigned long long total = block_sum(own);
    if (how.top_k > 0 && how.top_k < args.vocab_size) mass = total;
    unsigned long long goal =
        static_cast<unsigned long long>(ceil(static_cast<double>(how.top_p) * static_cast<double>(mass)));
    if (goal < 1) goal = 1;
    if (total < goal) return kUndecided;
    // A token stays while the tokens before it do not reach the goal.
    unsigned long long before = sum_before(own);
    int left = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      left += __syncthreads_count(first + k < kept && before < goal);
      before += weights[k];
    }
    kept = left;
  }

  uint64_t best = 0;
  for (int i = threadIdx.x; i < kept; i += kThreads) {
    const float value = value_of(i);
    if (!passes_min_p(how, value, maximum)) continue;
    const int id = index_of_pair(pairs[i]);
    const uint4 bits = noise_bits(how, id / 4);
    best = larger(best, pair_key((value - maximum) / how.temperature + gumbel(word(bits, id % 4)), id));
  }
  return index_of_pair(block_max(best));
}

// Draws as choose_candidate does, but over the whole row.
template <typename T>
__device__ unsigned choose_filtered(const LogitsRow<T>& row, const SampleRow& given, float maximum, int likeliest,
                                    uint64_t* pairs) {
  // In shared memory, because registers are short here: what does not fit goes to local memory, for which a device
  // that is full has no room.
  __shared__ SampleRow how;
  if (threadIdx.x == 0) how = given;
  __syncthreads();
  const Cut cut = find_cut(row, how, maximum, pairs);
  const auto is_left = [&](float value, int id) {
    return is_kept(cut, order_key(value), id) && passes_min_p(how, value, maximum);
  };
  const float lowest = likeliest_score(how, likeliest);
  return index_of_pair(block_max(best_score(row, how, maximum, lowest, threadIdx.x, kThreads, is_left)));
}

// Returns true in all threads of the last block of the row to call it; that block sees what the others
// have written.
__device__ __forceinline__ bool is_last_block(const SampleArgs& args) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&args.counters[blockIdx.y].arrived, 1) == args.parts - 1;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
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
  uint64_t best = 0;
  for (int i = threadIdx.x; i < args.parts; i += kThreads) best = larger(best, args.maxima()[i]);
  best = block_max(best);
  if (best == kNotFinite || how.temperature == 0.0f) {
    const unsigned token = best == kNotFinite ? kNoToken : static_cast<unsigned>(index_of_pair(best));
    if (is_first && threadIdx.x == 0) write_token(args, token);
    return;
  }
  const LogitsRow<T> row(args, blockIdx.y);
  const int likeliest = index_of_pair(best);
  const float maximum = to_float(row.row[likeliest]);
  SampleCounters& counters = args.counters[blockIdx.y];
  if (is_filtered(how, args.vocab_size)) {
    __shared__ uint64_t pairs[kMaxCandidates];
    const BoundRanks ranks(how, args);
    const bool has_bound = ranks.rank > 0;
    if (has_bound) {
      const bool has_mass = !(how.top_k > 0 && how.top_k < args.vocab_size);
      collect(args, row, how, maximum, row_bound(args, ranks.parts), has_mass, pairs);
    }
    if (!is_last_block(args)) return;
    unsigned token = kUndecided;
    if (has_bound) {
      token = choose_candidate(args, how, maximum, __ldcg(&counters.num_candidates), __ldcg(&counters.mass), pairs);
    }
    if (token == kUndecided) token = choose_filtered(row, how, maximum, likeliest, pairs);
    if (threadIdx.x == 0) {
      counters = SampleCounters();
      write_token(args, token);
    }
    return;
  }
  const auto is_left = [&](float value, int) { return passes_min_p(how, value, maximum); };
  best = best_score(row, how, maximum, likeliest_score(how, likeliest), blockIdx.x * kThreads + threadIdx.x,
                    args.parts * kThreads, is_left);
  best = block_max(best);
  if (threadIdx.x == 0) args.bounds()[blockIdx.x] = best;
  if (!is_last_block(args)) return;
  best = 0;
  for (int i = threadIdx.x; i < args.parts; i += kThreads) best = larger(best, __ldcg(args.bounds() + i));
  best = block_max(best);
  if (threadIdx.x == 0) {
    counters.arrived = 0;
    write_token(args, index_of_pair(best));
  }
}

}  // namespace xserv

#define XSERV_SAMPLE(SUFFIX, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads)                                            \
      xserv_sample_scan_##SUFFIX(const __grid_constant__ xserv::SampleArgs args) {                         \
    xserv::sample_scan<T>(args);                                                                           \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads, 2)                                         \
      xserv_sample_choose_##SUFFIX(const __grid_constant__ xserv::SampleArgs args) {                       \
    xserv::sample_choose<T>(args);                                                                         \
  }
XSERV_FOR_EACH_DTYPE(XSERV_SAMPLE)
