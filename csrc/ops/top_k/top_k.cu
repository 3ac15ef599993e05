// The k largest elements of each row of x: [num_rows, width], sorted from the largest; ties: the lower index
// first; NaN counts as larger than everything. values: [num_rows, k] in T, indices: [num_rows, k] i32. Exact.
// k <= 1024 and k <= width.
//
// Elements become distinct 64-bit keys (value, then index descending), so that selecting the k largest has no
// ties to break. A row that fits into one block needs only _single. Else _parts: gridDim.y blocks share a
// row, and each keeps its part in registers (read once), finds its k largest by radix selection, 8 bits at a
// time from the top, and leaves them in `candidates`; _reduce does the same to candidates while there are
// more than a block holds; then in _merge one block per row selects among the candidates and sorts. The
// values are read from x again, so that they are its bits (-0, NaN) and not what the order made of them.
//
// For k of up to 32 each warp first finds its largest key: k of these reach the k-th largest of
// them, which is therefore a bound, and seldom do many more keys than k reach it. Only if they do,
// digits are counted.
#include "common/dtype.cuh"
#include "common/order.cuh"

namespace xserv {

constexpr int kThreads = 1024;
constexpr int kPerThread = 16;  // a block holds 16384 keys: 32 of its 64 registers per thread
constexpr int kMaxK = 1024;
constexpr int kMaxRanked = 256;  // keys that are compared each with each

struct Selection {
  unsigned histogram[256];
  unsigned digit;      // the digit of the k-th largest key in the present pass
  unsigned remaining;  // how many keys are wanted among those that share its prefix
  unsigned matching;   // how many keys share its prefix
  unsigned count;
  uint64_t bound;
  uint64_t largest[32];  // of each warp
  uint64_t selected[kMaxK];
};

__device__ __forceinline__ uint64_t warp_max(uint64_t best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, best, offset);
    best = other > best ? other : best;
  }
  return best;
}

// Leaves the nonzero keys that reach the k-th largest of the largest keys of all warps in
// s.selected, k <= 32: k keys or more, or all if fewer warps have any. Returns their number, which
// may be more than there is room for.
__device__ __forceinline__ unsigned select_by_bound(const uint64_t (&keys)[kPerThread], unsigned k, Selection& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint64_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; i++) largest = keys[i] > largest ? keys[i] : largest;
  largest = warp_max(largest);
  if (lane == 0) s.largest[warp] = largest;
  __syncthreads();
  if (warp == 0) {
    const uint64_t own = s.largest[lane];
    unsigned rank = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) rank += s.largest[i] > own;
    const uint64_t bound = warp_max(rank == k - 1 ? own : 0);
    if (lane == 0) {
      s.bound = bound == 0 ? 1 : bound;
      s.count = 0;
    }
  }
  __syncthreads();
  const uint64_t bound = s.bound;
  if (largest >= bound) {
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      if (keys[i] < bound) continue;
      const unsigned place = atomicAdd(&s.count, 1u);
      if (place < kMaxK) s.selected[place] = keys[i];
    }
  }
  __syncthreads();
  return s.count;
}

// Leaves the k largest of the block's nonzero keys, unsorted, in s.selected, or all if there are no more
// than k. Returns their number.
__device__ __forceinline__ unsigned select(const uint64_t (&keys)[kPerThread], unsigned k, Selection& s) {
  const int thread = threadIdx.x, lane = thread & 31;
  uint64_t prefix = 0;
  unsigned remaining = k;
  int shift = 64;
  if (thread == 0) s.count = 0;
  do {
    if (thread < 256) s.histogram[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const bool matches = keys[i] != 0 && (shift == 64 || keys[i] >> shift == prefix);
      if (matches) atomicAdd(&s.histogram[keys[i] >> (shift - 8) & 255], 1u);
    }
    __syncthreads();
    if (thread < 32) {
      // Lane i owns digits 255 - 8i down to 248 - 8i. `above` counts the keys with larger digits.
      unsigned own = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) own += s.histogram[255 - 8 * lane - i];
      unsigned above = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset <<= 1) {
        const unsigned other = __shfl_up_sync(0xffffffffu, above, offset);
        if (lane >= offset) above += other;
      }
      const unsigned total = __shfl_sync(0xffffffffu, above, 31);
      above -= own;
      if (total < remaining) {
        // This happens only in the first pass: every key is selected.
        if (lane == 0) {
          s.digit = 0;
          s.remaining = s.matching = 0;
        }
      } else if (above < remaining && above + own >= remaining) {
        for (int digit = 255 - 8 * lane;; digit--) {
          const unsigned count = s.histogram[digit];
          if (above + count >= remaining) {
            s.digit = digit;
            s.remaining = remaining - above;
            s.matching = count;
            break;
          }
          above += count;
        }
      }
    }
    __syncthreads();
    shift -= 8;
    prefix = prefix << 8 | s.digit;
    remaining = s.remaining;
  } while (remaining != s.matching && shift > 0);
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    if (keys[i] != 0 && keys[i] >> shift >= prefix) s.selected[atomicAdd(&s.count, 1u)] = keys[i];
  }
  __syncthreads();
  return s.count;
}

// Sorts s.selected[0, count), the largest first, by a bitonic network.
__device__ __forceinline__ void sort_selected(unsigned count, Selection& s) {
  unsigned size = 2;
  while (size < count) size <<= 1;
  const unsigned i = threadIdx.x;
  if (i >= count && i < size) s.selected[i] = 0;
  __syncthreads();
  for (unsigned length = 2; length <= size; length <<= 1) {
    for (unsigned stride = length >> 1; stride > 0; stride >>= 1) {
      const unsigned partner = i ^ stride;
      if (i < size && partner > i) {
        const uint64_t a = s.selected[i], b = s.selected[partner];
        const bool is_descending = (i & length) == 0;
        if ((a < b) == is_descending) {
          s.selected[i] = b;
          s.selected[partner] = a;
        }
      }
      __syncthreads();
    }
  }
}

// Calls store(place, key) for the k largest of the block's nonzero keys, or all of fewer, from any
// threads; with kIsSorted the largest has place 0. Returns their number.
template <bool kIsSorted, typename Store>
__device__ __forceinline__ unsigned take_largest(const uint64_t (&keys)[kPerThread], unsigned k, Selection& s,
                                                 const Store& store) {
  const unsigned i = threadIdx.x;
  if (k <= 32) {
    const unsigned count = select_by_bound(keys, k, s);
    if (count <= kMaxRanked) {
      if (i < count) {
        const uint64_t own = s.selected[i];
        unsigned rank = 0;
        for (unsigned j = 0; j < count; j++) rank += s.selected[j] > own;
        if (rank < k) store(rank, own);
      }
      return min(count, k);
    }
    __syncthreads();
  }
  const unsigned count = select(keys, k, s);
  if (kIsSorted) sort_selected(count, s);
  if (i < count) store(i, s.selected[i]);
  return count;
}

// Loads the block's part of a row, `chunk` elements starting at `begin`. N: elements per access.
template <typename T, int N>
__device__ __forceinline__ void load_keys(uint64_t (&keys)[kPerThread], const T* row, int begin, int end) {
  // All loads come first, as each would wait for the branches around the one before.
  Vec<T, N> loaded[kPerThread / N];
#pragma unroll
  for (int i = 0; i < kPerThread / N; i++) {
    const int at = begin + (i * kThreads + static_cast<int>(threadIdx.x)) * N;
    if (at + N <= end) loaded[i] = *reinterpret_cast<const Vec<T, N>*>(row + at);
  }
#pragma unroll
  for (int i = 0; i < kPerThread / N; i++) {
    const int at = begin + (i * kThreads + static_cast<int>(threadIdx.x)) * N;
    if (at < end && at + N > end) {
#pragma unroll
      for (int j = 0; j < N; j++) loaded[i][j] = at + j < end ? row[at + j] : from_float<T>(0.0f);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      keys[i * N + j] = at + j < end ? pair_key(to_float(loaded[i][j]), at + j) : 0;
    }
  }
}

// Writes the k largest of the block's keys, which are places of `row`.
template <typename T>
__device__ __forceinline__ void store_largest(T* values, int* indices, const T* row,
                                              const uint64_t (&keys)[kPerThread], unsigned k, Selection& s) {
  take_largest<true>(keys, k, s, [&](unsigned rank, uint64_t key) {
    const uint32_t index = index_of_pair(key);
    values[rank] = row[index];
    indices[rank] = index;
  });
}

template <typename T, int N>
__device__ __forceinline__ void top_k_single(T* values, int* indices, const T* x, int width, int k,
                                             long long x_stride) {
  __shared__ Selection s;
  const long long row = blockIdx.x;
  uint64_t keys[kPerThread];
  load_keys<T, N>(keys, x + row * x_stride, 0, width);
  store_largest(values + row * k, indices + row * k, x + row * x_stride, keys, k, s);
}

// candidates: [num_rows, gridDim.y, k]; a part of fewer than k elements leaves zeros after its own.
__device__ __forceinline__ void store_candidates(uint64_t* candidates, const uint64_t (&keys)[kPerThread], int k,
                                                 Selection& s) {
  uint64_t* target = candidates + (static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y) * k;
  const int count = take_largest<false>(keys, k, s, [&](unsigned place, uint64_t key) { target[place] = key; });
  const int i = threadIdx.x;
  if (i >= count && i < k) target[i] = 0;
}

template <typename T, int N>
__device__ __forceinline__ void top_k_parts(uint64_t* candidates, const T* x, int width, int k, int chunk,
                                            long long x_stride) {
  __shared__ Selection s;
  uint64_t keys[kPerThread];
  const int begin = blockIdx.y * chunk;
  load_keys<T, N>(keys, x + blockIdx.x * x_stride, begin, min(begin + chunk, width));
  store_candidates(candidates, keys, k, s);
}

// Loads up to kThreads * kPerThread of the row's candidates, starting at `begin`.
__device__ __forceinline__ void load_candidates(uint64_t (&keys)[kPerThread], const uint64_t* candidates,
                                                int num_candidates, int begin) {
  const uint64_t* row = candidates + static_cast<long long>(blockIdx.x) * num_candidates;
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    const int at = begin + i * kThreads + threadIdx.x;
    keys[i] = at < num_candidates ? row[at] : 0;
  }
}

template <typename T>
__device__ __forceinline__ void top_k_merge(T* values, int* indices, const T* x, const uint64_t* candidates,
                                            int num_candidates, int k, long long x_stride) {
  __shared__ Selection s;
  const long long row = blockIdx.x;
  uint64_t keys[kPerThread];
  load_candidates(keys, candidates, num_candidates, 0);
  store_largest(values + row * k, indices + row * k, x + row * x_stride, keys, k, s);
}

}  // namespace xserv

#define XSERV_TOP_K_LOADS(SUFFIX, T, NAME, N)                                                              \
  extern "C" __global__ void __launch_bounds__(1024) xserv_top_k_single##NAME##_##SUFFIX(                  \
      T* values, int* indices, const T* x, int width, int k, long long x_stride) {                         \
    xserv::top_k_single<T, N>(values, indices, x, width, k, x_stride);                                     \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(1024) xserv_top_k_parts##NAME##_##SUFFIX(                   \
      uint64_t* candidates, const T* x, int width, int k, int chunk, long long x_stride) {                 \
    xserv::top_k_parts<T, N>(candidates, x, width, k, chunk, x_stride);                                    \
  }
#define XSERV_TOP_K(SUFFIX, T)                                                                             \
  XSERV_TOP_K_LOADS(SUFFIX, T, , xserv::kVec<T>)                                                           \
  XSERV_TOP_K_LOADS(SUFFIX, T, _scalar, 1)                                                                 \
  extern "C" __global__ void __launch_bounds__(1024) xserv_top_k_merge_##SUFFIX(                           \
      T* values, int* indices, const T* x, const uint64_t* candidates, int num_candidates, int k,          \
      long long x_stride) {                                                                                \
    xserv::top_k_merge<T>(values, indices, x, candidates, num_candidates, k, x_stride);                    \
  }
XSERV_FOR_EACH_DTYPE(XSERV_TOP_K)

// target: [num_rows, gridDim.y, k] of source: [num_rows, num_candidates].
extern "C" __global__ void __launch_bounds__(1024)
    xserv_top_k_reduce(uint64_t* target, const uint64_t* source, int num_candidates, int k) {
  __shared__ xserv::Selection s;
  uint64_t keys[xserv::kPerThread];
  xserv::load_candidates(keys, source, num_candidates, blockIdx.y * (xserv::kThreads * xserv::kPerThread));
  xserv::store_candidates(target, keys, k, s);
}
