// Chooses a token for each row of logits, by greedy or random decoding.
//
//   logits: [num_rows, vocab_size], contiguous; rows: [num_rows] how to choose; tokens: [num_rows]
//   greedy       argmax; the lowest id wins a tie
//   random       p = softmax(logits / temperature), filtered by top-k (ties with the k-th stay), top-p (the
//                most likely tokens until they reach the share, ties in the order of their ids), min-p
//                (relative to the most likely token) and typical-p (the tokens whose information is
//                nearest to the entropy until they reach the share; Meister et al. 2022); the draw
//                is argmax(log p + Gumbel noise), which has exactly the distribution p (Gumbel-max;
//                Maddison et al. 2014). The noise of a token is a function of (seed, index, id): a
//                row's token depends neither on its batch nor on the number of blocks.
// A row with a logit that is not finite, and a row whose caller chooses the token itself, get kNoToken.
//
// There are two launches of (parts, num_rows) blocks each. _scan leaves the maximum of each part of
// a row; _choose draws among all tokens, in parts too, and the last block of a row to arrive
// finishes the row. Where some row has top-k, top-p or typical-p, a third launch, _cut, finishes
// the rows that _choose leaves.
//
// With top-k or top-p, the k largest tokens (kTopPTokens without top-k) and a few more are
// collected first: each part's _scan leaves a key that `rank` of its threads reach, and at least
// rank * parts >= k tokens of the row reach the `parts`-th largest of these keys. _choose collects
// the tokens that reach it, and the last block of the row sorts them and applies the filters.
// Probabilities are in fixed point, because sums of integers do not depend on the order. Where the
// collected tokens are not enough (large k, flat distributions) or too many, the row is wide: _cut
// looks through all of it, with several blocks at a time where there are clusters (cut.cuh). With
// typical-p a row always is. All ways keep the same tokens.
#include "common/pdl.cuh"
#include "ops/sample/cut.cuh"
#include "ops/sample/draw.cuh"
#include "ops/sample/row.cuh"

namespace xserv {

// The counters of one row. The first three are zero before and after a launch.
struct SampleCounters {
  int arrived;  // blocks that have finished
  int num_candidates;
  unsigned long long mass;  // the sum of the weights of all tokens
  // The list of the wide rows, which _choose leaves to _cut, in any order: the n-th entry in the
  // n-th row's counters, the rest in the first row's.
  int wide_row, wide_likeliest;  // the entry: which row, and its likeliest token
  int num_wide;
  int num_taken;  // entries that teams have taken after their first ones
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
constexpr int kTopPTokens = 256, kMaxTokens = 512;  // needed without top-k; the most that a bound serves

// Whether top-k, top-p or typical-p removes tokens.
__device__ __forceinline__ bool is_filtered(const SampleRow& how, int vocab_size) {
  return (how.top_k > 0 && how.top_k < vocab_size) || how.top_p < 1.0f || is_typical(how);
}

// The ranks that give the bound for the filtered tokens: `rank` threads of a part reach the part's
// bound, and `parts` parts reach the row's bound. With a rank of 0 there is no bound.
struct BoundRanks {
  int rank = 0, parts = 0;

  __device__ __forceinline__ BoundRanks(const SampleRow& how, const SampleArgs& args) {
    // The nearest to the entropy may be any.
    if (is_typical(how)) return;
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
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) args.counters->num_wide = args.counters->num_taken = 0;
  const SampleRow how = args.rows[blockIdx.y];
  if (how.temperature < 0.0f) return;
  const LogitsRow<T> row(args.logits, args.vocab_size, blockIdx.y);
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

__device__ __forceinline__ void write_token(const SampleArgs& args, int row, unsigned token) {
  args.tokens[row] = token;
  if (args.host_tokens != nullptr) {
    *reinterpret_cast<volatile unsigned*>(*args.host_tokens + row) = token;
  }
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
  const Weights weights(how, maximum);
  const auto look_at = [&](int group, const float (&values)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      if (has_mass) mass += weights.of(values[i]);
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
    const Weights weights(how, maximum);
    unsigned long long each[kEach], own = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      each[k] = first + k < kept ? weights.of(value_of(first + k)) : 0;
      own += each[k];
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
      before += each[k];
    }
    kept = left;
  }

  uint64_t best = 0;
  for (int i = threadIdx.x; i < kept; i += kThreads) {
    const float value = value_of(i);
    if (!passes_alone(how, value, maximum)) continue;
    const int id = index_of_pair(pairs[i]);
    const uint4 bits = noise_bits(how, id / 4);
    best = larger(best, pair_key((value - maximum) / how.temperature + gumbel(word(bits, id % 4)), id));
  }
  return index_of_pair(block_max(best));
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
    if (is_first && threadIdx.x == 0) write_token(args, blockIdx.y, kNoToken);
    return;
  }
  uint64_t best = 0;
  for (int i = threadIdx.x; i < args.parts; i += kThreads) best = larger(best, args.maxima()[i]);
  best = block_max(best);
  if (best == kNotFinite || how.temperature == 0.0f) {
    const unsigned token = best == kNotFinite ? kNoToken : static_cast<unsigned>(index_of_pair(best));
    if (is_first && threadIdx.x == 0) write_token(args, blockIdx.y, token);
    return;
  }
  const LogitsRow<T> row(args.logits, args.vocab_size, blockIdx.y);
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
    if (threadIdx.x == 0) {
      counters.arrived = counters.num_candidates = 0;
      counters.mass = 0;
      write_token(args, blockIdx.y, token == kUndecided ? kNoToken : token);
      if (token == kUndecided) {
        SampleCounters& entry = args.counters[atomicAdd(&args.counters->num_wide, 1)];
        entry.wide_row = blockIdx.y;
        entry.wide_likeliest = likeliest;
      }
    }
    return;
  }
  const auto is_left = [&](float value, int) { return passes_alone(how, value, maximum); };
  best = best_score(row, how, maximum, likeliest_score(how, likeliest), -__builtin_huge_valf(),
                    blockIdx.x * kThreads + threadIdx.x, args.parts * kThreads, is_left);
  best = block_max(best);
  if (threadIdx.x == 0) args.bounds()[blockIdx.x] = best;
  if (!is_last_block(args)) return;
  best = 0;
  for (int i = threadIdx.x; i < args.parts; i += kThreads) best = larger(best, __ldcg(args.bounds() + i));
  best = block_max(best);
  if (threadIdx.x == 0) {
    counters.arrived = 0;
    write_token(args, blockIdx.y, index_of_pair(best));
  }
}

template <typename T>
__device__ __forceinline__ void sample_cut(const SampleArgs& args) {
  dependency_launch();
  dependency_wait();
  if (static_cast<int>(blockIdx.x) >= team_size()) return;
  __shared__ CutMemory memory;
  // In shared memory, because registers are short here: what does not fit goes to local memory, for
  // which a device that is full has no room.
  __shared__ SampleRow how;
  __shared__ Cut cut;
  __shared__ Typical typical;
  __shared__ int index, likeliest, next;
  __shared__ uint64_t best[kMaxTeamBlocks];  // of each block
  for (int entry = blockIdx.y; entry < __ldcg(&args.counters->num_wide); entry = next) {
    if (threadIdx.x == 0) {
      index = __ldcg(&args.counters[entry].wide_row);
      likeliest = __ldcg(&args.counters[entry].wide_likeliest);
      how = args.rows[index];
    }
    __syncthreads();
    const LogitsRow<T> row(args.logits, args.vocab_size, index);
    const float maximum = to_float(row.row[likeliest]);
    const Cut found = find_cut(row, how, maximum, memory);
    if (threadIdx.x == 0) cut = found;
    __syncthreads();
    const auto passes = [&](float value, int id) {
      return is_kept(cut, value, id) && passes_alone(how, value, maximum);
    };
    float lowest = -__builtin_huge_valf();
    if (is_typical(how)) {
      const Typical nearest = find_typical(row, how, maximum, memory, passes);
      if (threadIdx.x == 0) typical = nearest;
      __syncthreads();
    } else {
      lowest = likeliest_score(how, likeliest);
    }
    const auto is_left = [&](float value, int id) {
      if (!passes(value, id)) return false;
      return !is_typical(how) || distance_from_mean(how, value, maximum, typical.mean) <= typical.distance;
    };
    const uint64_t own =
        block_max(best_score(row, how, maximum, lowest, cut.value, team_thread(), team_threads(), is_left));
    if (threadIdx.x == 0) {
      in_block(best, 0)[team_rank()] = own;
      if (team_rank() == 0) {
        const int taken = gridDim.y + atomicAdd(&args.counters->num_taken, 1);
        for (int rank = 0; rank < team_size(); ++rank) *in_block(&next, rank) = taken;
      }
    }
    // The last time that a block writes to the memory of another, which may end.
    team_sync();
    if (team_rank() == 0 && threadIdx.x == 0) {
      uint64_t all = 0;
      for (int rank = 0; rank < team_size(); ++rank) all = larger(all, best[rank]);
      write_token(args, index, index_of_pair(all));
    }
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
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(xserv::kThreads, 2)                                         \
      xserv_sample_cut_##SUFFIX(const __grid_constant__ xserv::SampleArgs args) {                          \
    xserv::sample_cut<T>(args);                                                                            \
  }
XSERV_FOR_EACH_DTYPE(XSERV_SAMPLE)
