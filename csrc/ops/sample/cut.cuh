// Finds the tokens that top-k and top-p keep in a row of which the largest few do not decide it:
// large k, flat distributions. A team of blocks goes over the row together: the blocks of a
// cluster, each over a part of the row, or one block alone on chips without clusters.
//
// A histogram of the distances from the likeliest token says in which bin the cut lies, and the
// tokens of that bin are sorted. If they are too many, they are mostly equal, and only those equals
// are counted. If not, or where the cut lies among the distant tokens, it comes from histograms of
// the order-preserving keys, 11 bits at a time. Counts and weights are integers, whose sums do not
// depend on the order, so all ways, with any number of blocks, keep the same tokens. Each block
// adds up the same numbers and comes to the same cut by itself.
#pragma once

#include "common/cluster.cuh"
#include "ops/sample/row.cuh"

namespace xserv {

// The tokens that top-k and top-p keep: those above `value`, and those with exactly this value
// whose id is at most `last_id`.
struct Cut {
  float value;
  int last_id;
};

__device__ __forceinline__ bool is_kept(const Cut& cut, float value, int id) {
  return value > cut.value || (value == cut.value && id <= cut.last_id);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int team_size() { return cluster_size(); }
__device__ __forceinline__ int team_rank() { return cluster_rank(); }

// For all threads of the team; what they wrote to shared memory before it is visible afterwards.
__device__ __forceinline__ void team_sync() {
  cluster_arrive();
  cluster_wait();
}

// Returns where that lies in block `rank` which lies at `own`, in shared memory, in this block.
template <typename T>
__device__ __forceinline__ T* in_block(T* own, int rank) {
  return cluster_pointer(own, rank);
}
#else
__device__ __forceinline__ int team_size() { return 1; }
__device__ __forceinline__ int team_rank() { return 0; }
__device__ __forceinline__ void team_sync() { __syncthreads(); }

template <typename T>
__device__ __forceinline__ T* in_block(T* own, int) {
  return own;
}
#endif

__device__ __forceinline__ int team_threads() { return team_size() * kThreads; }
__device__ __forceinline__ int team_thread() { return team_rank() * kThreads + static_cast<int>(threadIdx.x); }

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
static_assert(kBins % kMaxTeamBlocks == 0 && (kMaxTeamBlocks & (kMaxTeamBlocks - 1)) == 0,
              "each block of a team, whose size is a power of two, adds up the same number of bins");

// The number of tokens in each bin and the sum of their weights. The halves of the sums are apart,
// because additions of 64 bits in shared memory are loops that try until no other thread came
// between.
struct Histogram {
  unsigned counts[kBins], low[kBins], high[kBins];

  __device__ __forceinline__ unsigned long long mass(int bin) const {
    return static_cast<unsigned long long>(high[bin]) << 32 | low[bin];
  }
  __device__ __forceinline__ void set_mass(int bin, unsigned long long mass) {
    low[bin] = static_cast<unsigned>(mass);
    high[bin] = static_cast<unsigned>(mass >> 32);
  }
  // Adds while other threads do; the upper half changes rarely.
  __device__ __forceinline__ void add_mass(int bin, unsigned long long weight) {
    if (weight == 0) return;
    const unsigned part = static_cast<unsigned>(weight), before = atomicAdd(&low[bin], part);
    const unsigned upper = static_cast<unsigned>(weight >> 32) + (before + part < before ? 1 : 0);
    if (upper != 0) atomicAdd(&high[bin], upper);
  }
};

// The tokens of a bin in a block's part of the row.
struct BinPart {
  int count;
  uint32_t least, largest;  // of their keys
};

// In the shared memory of each block of a team.
struct CutMemory {
  Histogram histogram;
  BinPart part, parts[kMaxTeamBlocks];      // of this block, and copies of those of all
  uint64_t own[kMaxCandidates];             // the tokens of `part`
  uint64_t pairs[kMaxCandidates];           // those of all parts
  unsigned long long sums[kMaxTeamBlocks];  // of each block
  unsigned long long moments[kMaxTeamBlocks];
  int last_id;
};

// Makes a histogram of the whole row in each block. `bin_of(value, id)` is the bin of a token, or
// negative if it has none; kAhead as in for_each_group.
template <int kAhead, bool kCounts, bool kMasses, typename T, typename BinOf>
__device__ __forceinline__ void make_histogram(const LogitsRow<T>& row, const SampleRow& how, float maximum,
                                               Histogram& histogram, const BinOf& bin_of) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    histogram.counts[bin] = 0;
    histogram.set_mass(bin, 0);
  }
  __syncthreads();
  const Weights weights(how, maximum);
  row.template for_each_group<kAhead>(team_thread(), team_threads(), [&](int group, const float (&values)[4],
                                                                         int present) {
    int bins[4];
    unsigned long long masses[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bins[i] = i < present ? bin_of(values[i], group * 4 + i) : -1;
      masses[i] = kMasses ? weights.of(values[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (bins[i] < 0) continue;
      if (kCounts) atomicAdd(&histogram.counts[bins[i]], 1u);
      if (kMasses) histogram.add_mass(bins[i], masses[i]);
    }
  });
  team_sync();
  const int size = team_size();
  if (size == 1) return;
  // Each block adds up some of the bins, which no other block reads, and gives the sums to all.
  const int share = kBins / size, first = team_rank() * share;
  for (int bin = first + static_cast<int>(threadIdx.x); bin < first + share; bin += kThreads) {
    unsigned count = 0;
    unsigned long long mass = 0;
#pragma unroll 2
    for (int rank = 0; rank < size; ++rank) {
      const Histogram* other = in_block(&histogram, rank);
      if (kCounts) count += other->counts[bin];
      if (kMasses) mass += other->mass(bin);
    }
#pragma unroll 2
    for (int rank = 0; rank < size; ++rank) {
      Histogram* other = in_block(&histogram, rank);
      if (kCounts) other->counts[bin] = count;
      if (kMasses) other->set_mass(bin, mass);
    }
  }
  team_sync();
}

// The point at which a walk down the bins from the highest reaches a goal.
struct Crossing {
  int bin;
  unsigned long long above;  // the sum of the bins above `bin`
};

// Returns the highest bin at which the sum of `value_of(bin)` from the top reaches `goal` (> 0), or
// bin 0 if none does. All threads of the block call it.
template <typename Value>
__device__ Crossing find_crossing(const Value& value_of, unsigned long long goal) {
  __shared__ Crossing found;
  constexpr int kPer = kBins / kThreads;
  // Thread 0 has the highest bins.
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPer;
  unsigned long long own = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += value_of(top - i);
  unsigned long long above = sum_before(own);
  const unsigned long long through = above + own;
  if (threadIdx.x == kThreads - 1 && through < goal) found = {0, through - value_of(0)};
  if (above < goal && through >= goal) {
    for (int i = 0; i < kPer; ++i) {
      if (above + value_of(top - i) >= goal) {
        found = {top - i, above};
        break;
      }
      above += value_of(top - i);
    }
  }
  __syncthreads();
  return found;
}

// Returns the mass that is the share `share`, as top-p keeps it, of the tokens of a histogram.
__device__ __forceinline__ unsigned long long mass_goal(float share, const Histogram& histogram) {
  unsigned long long own = 0;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) own += histogram.mass(bin);
  const double total = static_cast<double>(block_sum(own));
  const auto goal = static_cast<unsigned long long>(ceil(static_cast<double>(share) * total));
  return goal < 1 ? 1 : goal;
}

// Returns the cut of top-p among `ties` tokens with this value and together the weight `mass`,
// where `goal` is still missing: all have the same weight, and one stays while those before it do
// not reach the goal.
template <typename T>
__device__ Cut cut_ties(const LogitsRow<T>& row, float value, unsigned ties, unsigned long long mass,
                        unsigned long long goal, CutMemory& memory) {
  const unsigned long long each = ties > 0 ? mass / ties : 0;
  const unsigned long long needed = each > 0 ? (goal + each - 1) / each : ties;
  if (needed >= ties) return {value, row.vocab_size};

  // Finds the id of the last tie that is needed. Each thread counts a run of neighbouring groups.
  const int per_thread = (row.num_groups() + team_threads() - 1) / team_threads();
  const int first = team_thread() * per_thread, end = min(first + per_thread, row.num_groups());
  const auto walk = [&](unsigned long long seen) {
    for (int group = first; group < end; ++group) {
      float values[4];
      const int present = row.load(group, values);
      for (int i = 0; i < present; ++i) {
        if (values[i] != value) continue;
        if (++seen != needed) continue;
        for (int rank = 0; rank < team_size(); ++rank) *in_block(&memory.last_id, rank) = group * 4 + i;
      }
    }
    return seen;
  };
  // No number of ties is so large that the last one is found here.
  constexpr unsigned long long kFar = 1ull << 62;
  const unsigned long long own = walk(kFar) - kFar, sum = block_sum(own);
  if (static_cast<int>(threadIdx.x) < team_size()) in_block(memory.sums, threadIdx.x)[team_rank()] = sum;
  team_sync();
  unsigned long long before = sum_before(own);
  for (int rank = 0; rank < team_rank(); ++rank) before += memory.sums[rank];
  walk(before);
  team_sync();
  return {value, memory.last_id};
}

// The bins for a first look at a row: by the distance from the likeliest token, in units of the temperature.
// Unlike the leading bits of the keys they spread the tokens out, so that threads rarely add to the same one.
constexpr float kBinsPerUnit = 128.0f;

__device__ __forceinline__ float distance_of(float bins_per_unit, float value, float maximum) {
  return (maximum - value) * bins_per_unit;
}
__device__ __forceinline__ int bin_of_distance(float distance) {
  return kBins - 1 - static_cast<int>(fminf(distance, kBins - 1.0f));
}

// Finds the cut of top-p (kByMass) or of top-k among the tokens with values of at least `lowest`:
// the bin in which it lies, and then the token among those of the bin, in order. Returns false if
// the bin is the one of all distant tokens, or has more tokens than there is room for and not all
// are equal. All threads of the team call it.
template <bool kByMass, typename T>
__device__ bool find_cut_in_bins(const LogitsRow<T>& row, const SampleRow& how, float maximum, float lowest,
                                 CutMemory& memory, Cut& cut) {
  Histogram& histogram = memory.histogram;
  const float bins_per_unit = kBinsPerUnit / how.temperature;
  make_histogram<4, !kByMass, kByMass>(row, how, maximum, histogram, [&](float value, int) {
    return value < lowest ? -1 : bin_of_distance(distance_of(bins_per_unit, value, maximum));
  });
  const unsigned long long goal = kByMass ? mass_goal(how.top_p, histogram) : how.top_k;
  const Crossing at = find_crossing(
      [&](int bin) -> unsigned long long { return kByMass ? histogram.mass(bin) : histogram.counts[bin]; }, goal);
  if (at.bin == 0) return false;

  // The distances of the tokens of the bin: from `nearest` on, and less than one more.
  const float nearest = static_cast<float>(kBins - 1 - at.bin);
  BinPart& part = memory.part;
  if (threadIdx.x == 0) part = {0, 0xffffffffu, 0};
  __syncthreads();
  row.template for_each_group<4>(team_thread(), team_threads(), [&](int group, const float (&values)[4], int present) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float distance = distance_of(bins_per_unit, values[i], maximum);
      if (distance < nearest || distance >= nearest + 1.0f || values[i] < lowest || i >= present) continue;
      const int place = atomicAdd(&part.count, 1);
      if (place < kMaxCandidates) memory.own[place] = pair_key(values[i], group * 4 + i);
      atomicMin(&part.least, order_key(values[i]));
      atomicMax(&part.largest, order_key(values[i]));
    }
  });
  team_sync();
  if (static_cast<int>(threadIdx.x) < team_size()) memory.parts[threadIdx.x] = *in_block(&part, threadIdx.x);
  __syncthreads();
  BinPart all = memory.parts[0];
  for (int rank = 1; rank < team_size(); ++rank) {
    const BinPart& other = memory.parts[rank];
    all = {all.count + other.count, min(all.least, other.least), max(all.largest, other.largest)};
  }
  if (all.count > kMaxCandidates) {
    if (all.least != all.largest) return false;
    const float value = value_of_key(all.least);
    cut = {value, row.vocab_size};
    if (kByMass) cut = cut_ties(row, value, all.count, histogram.mass(at.bin), goal - at.above, memory);
    return true;
  }
  int size = 2;
  while (size < all.count) size *= 2;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    int rank = 0, place = i;
    while (rank < team_size() - 1 && place >= memory.parts[rank].count) place -= memory.parts[rank++].count;
    memory.pairs[i] = i < all.count ? in_block(memory.own, rank)[place] : 0;
  }
  sort_pairs(memory.pairs, size);

  __shared__ Cut found;
  constexpr int kEach = kMaxCandidates / kThreads;  // neighbouring tokens for each thread
  const int first = threadIdx.x * kEach;
  const auto value_of = [&](int i) { return value_of_key(static_cast<uint32_t>(memory.pairs[i] >> 32)); };
  const Weights weights(how, maximum);
  unsigned long long each[kEach], own = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    each[k] = 0;
    if (first + k < all.count) each[k] = kByMass ? weights.of(value_of(first + k)) : 1;
    own += each[k];
  }
  unsigned long long before = at.above + sum_before(own);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    // The last token that is needed; with top-k the ties with it stay.
    if (before < goal && before + each[k] >= goal) {
      const int id = static_cast<int>(index_of_pair(memory.pairs[first + k]));
      found = {value_of(first + k), kByMass ? id : row.vocab_size};
    }
    before += each[k];
  }
  __syncthreads();
  cut = found;
  return true;
}

// Finds the same by the keys. All threads of the team call it.
template <bool kByMass, typename T>
__device__ Cut find_cut_in_keys(const LogitsRow<T>& row, const SampleRow& how, float maximum, float lowest,
                                CutMemory& memory) {
  // The 32 bits are taken as 11, 11 and the last 10. Keys of f16 and bf16 end within the second level,
  // but the third costs only one pass.
  constexpr int kShifts[3] = {21, 10, 0};
  constexpr int kPrefixBits[3] = {0, 11, 22};
  Histogram& histogram = memory.histogram;
  unsigned long long goal = how.top_k;
  uint32_t prefix = 0;
  int bin = 0;
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    make_histogram<2, true, kByMass>(row, how, maximum, histogram, [&](float value, int) {
      const uint32_t key = order_key(value);
      if (value < lowest) return -1;
      if (level > 0 && key >> (32 - kPrefixBits[level]) != prefix) return -1;
      return static_cast<int>(key >> kShifts[level] & (kBins - 1));
    });
    if (kByMass && level == 0) goal = mass_goal(how.top_p, histogram);
    const Crossing at = find_crossing(
        [&](int i) -> unsigned long long { return kByMass ? histogram.mass(i) : histogram.counts[i]; }, goal);
    goal -= at.above;
    bin = at.bin;
    prefix = level == 2 ? prefix << 10 | bin : prefix << kBinBits | bin;
  }
  const Cut all = {fmaxf(value_of_key(prefix), lowest), row.vocab_size};
  if (!kByMass) return all;
  const unsigned ties = histogram.counts[bin];
  return ties == 0 ? all : cut_ties(row, all.value, ties, histogram.mass(bin), goal, memory);
}

// Returns which tokens top-k and then top-p keep. All threads of the team call it.
template <typename T>
__device__ Cut find_cut(const LogitsRow<T>& row, const SampleRow& how, float maximum, CutMemory& memory) {
  Cut cut = {-__builtin_huge_valf(), row.vocab_size};
  if (how.top_k > 0 && how.top_k < row.vocab_size) {
    if (!find_cut_in_bins<false>(row, how, maximum, cut.value, memory, cut)) {
      cut = find_cut_in_keys<false>(row, how, maximum, cut.value, memory);
    }
  }
  if (!(how.top_p < 1.0f)) return cut;
  const float lowest = cut.value;
  if (find_cut_in_bins<true>(row, how, maximum, lowest, memory, cut)) return cut;
  return find_cut_in_keys<true>(row, how, maximum, lowest, memory);
}

// The range that typical-p keeps: the tokens whose information is nearest to the entropy, ties with
// the last one included. With `fall` as in fall_of, the information of a token is its fall and the
// logarithm of the sum of all weights, and the entropy is the mean fall and the same logarithm: the
// two are as far apart as the fall and its mean.
struct Typical {
  float mean;      // of the falls
  float distance;  // at most so far from it
};

__device__ __forceinline__ float distance_from_mean(const SampleRow& how, float value, float maximum, float mean) {
  return fabsf(fall_of(how, value, maximum) - mean);
}

// Finds it among the tokens that `is_left(value, id)` leaves, of which the likeliest is one. All
// threads of the team call it.
template <typename T, typename Left>
__device__ Typical find_typical(const LogitsRow<T>& row, const SampleRow& how, float maximum, CutMemory& memory,
                                const Left& is_left) {
  unsigned long long mass = 0, moment = 0;
  const Weights weights(how, maximum);
  row.template for_each_group<4>(team_thread(), team_threads(), [&](int group, const float (&values)[4], int present) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= present || !is_left(values[i], group * 4 + i)) continue;
      const unsigned long long weight = weights.of(values[i]);
      if (weight == 0) continue;
      mass += weight;
      // At most a weight of 1 over e: the sum of 2^20 fits as well.
      moment += static_cast<unsigned long long>(fall_of(how, values[i], maximum) * static_cast<float>(weight));
    }
  });
  mass = block_sum(mass);
  moment = block_sum(moment);
  if (static_cast<int>(threadIdx.x) < team_size()) {
    in_block(memory.sums, threadIdx.x)[team_rank()] = mass;
    in_block(memory.moments, threadIdx.x)[team_rank()] = moment;
  }
  team_sync();
  mass = moment = 0;
  for (int rank = 0; rank < team_size(); ++rank) mass += memory.sums[rank], moment += memory.moments[rank];
  const float mean = static_cast<float>(static_cast<double>(moment) / static_cast<double>(mass));

  // The nearest have the highest keys.
  constexpr int kShifts[3] = {21, 10, 0};
  constexpr int kPrefixBits[3] = {0, 11, 22};
  Histogram& histogram = memory.histogram;
  unsigned long long goal = 0;
  uint32_t prefix = 0;
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    make_histogram<2, false, true>(row, how, maximum, histogram, [&](float value, int id) {
      if (!is_left(value, id)) return -1;
      const uint32_t key = order_key(-distance_from_mean(how, value, maximum, mean));
      if (level > 0 && key >> (32 - kPrefixBits[level]) != prefix) return -1;
      return static_cast<int>(key >> kShifts[level] & (kBins - 1));
    });
    if (level == 0) goal = mass_goal(how.typical_p, histogram);
    const Crossing at = find_crossing([&](int i) -> unsigned long long { return histogram.mass(i); }, goal);
    goal -= at.above;
    prefix = level == 2 ? prefix << 10 | at.bin : prefix << kBinBits | at.bin;
  }
  return {mean, -value_of_key(prefix)};
}

}  // namespace xserv
