// The inputs of a product that its blocks make themselves, out of rows of x that nobody has
// normalised or quantised yet: a kernel between two products costs as long as reading ten megabytes
// of weights.
#pragma once

#include "common/gemv.cuh"
#include "common/reduce.cuh"
#include "ops/linear/quantised.cuh"

namespace xserv {

constexpr int kOwnAhead = 4;  // vectors of eight inputs that a thread loads together

// The warps of a block share the rows of x: [num_rows, k], k a multiple of 8. With norm_weight [k]
// its rows become
//   round(norm_weight * round(x / sqrt(mean(x^2) + eps)))
// which is RMSNorm with the roundings of ops/rms_norm/add_rounded.cu.
template <typename T>
struct OwnInputs {
  const T* x;
  const T* norm_weight;
  int num_eights;      // of a row
  int thread, stride;  // among the threads that have the same row
  int row, first_warp;
  bool has_row;
  uint4 factors[kOwnAhead];

  // Reads weights only.
  __device__ __forceinline__ OwnInputs(const void* x, const void* norm_weight, int num_rows, int k)
      : norm_weight(static_cast<const T*>(norm_weight)), num_eights(k / 8) {
    const int warp = threadIdx.x >> 5;
    const int shift = num_rows <= 1 ? 0 : num_rows <= 2 ? 1 : num_rows <= 4 ? 2 : 3;
    const int num_warps = kQuantisedWarps >> shift;
    first_warp = warp & ~(num_warps - 1);
    thread = (warp - first_warp) * 32 + (threadIdx.x & 31);
    stride = num_warps * 32;
    // Warps past the last row do as those of the last one.
    const int place = warp / num_warps;
    has_row = place < num_rows;
    row = min(place, num_rows - 1);
    this->x = static_cast<const T*>(x) + static_cast<int64_t>(row) * k;
#pragma unroll
    for (int u = 0; u < kOwnAhead; ++u) {
      factors[u] = norm_weight == nullptr ? make_uint4(0, 0, 0, 0) : factor_of(thread + u * stride);
    }
  }

  __device__ __forceinline__ uint4 factor_of(int eight) const {
    return *reinterpret_cast<const uint4*>(norm_weight + min(eight, num_eights - 1) * 8);
  }
  __device__ __forceinline__ uint4 load(int eight) const { return load_activations(x + min(eight, num_eights - 1) * 8); }

  // Calls use for the eights first, first + stride, ..., which are v, and f the weights of their norm.
  template <typename Use>
  __device__ __forceinline__ void treat(int first, const uint4 (&v)[kOwnAhead], const uint4 (&f)[kOwnAhead], int begin,
                                        int end, float scale, const Use& use) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int u = 0; u < kOwnAhead; ++u) {
      const int eight = first + u * stride;
      // The same for all lanes.
      if (eight - lane >= end || eight - lane + 31 < begin) continue;
      uint4 inputs = v[u];
      if (norm_weight != nullptr) {
        inputs = make_uint4(normalize_pair(unpack_pair(v[u].x, T()), scale, f[u].x, T()),
                            normalize_pair(unpack_pair(v[u].y, T()), scale, f[u].y, T()),
                            normalize_pair(unpack_pair(v[u].z, T()), scale, f[u].z, T()),
                            normalize_pair(unpack_pair(v[u].w, T()), scale, f[u].w, T()));
      }
      if (eight >= num_eights) inputs = make_uint4(0, 0, 0, 0);
      use(row, eight, inputs, has_row && eight >= begin && eight < end);
    }
  }

  // Calls use(row, eight, inputs, is_wanted) for the eights `begin` to before `end` of all rows;
  // those past the end of a row are zeros. All lanes of a warp call it together, some of them for
  // inputs that are not wanted. The threads of the block must meet before they read what others
  // have stored.
  template <typename Use>
  __device__ __forceinline__ void make(int begin, int end, float eps, const Use& use) const {
    __shared__ float squares[kQuantisedWarps];
    const int lane = threadIdx.x & 31;
    const bool has_norm = norm_weight != nullptr;
    uint4 kept[kOwnAhead];
    float scale = 1.0f;
    if (has_norm) {
      float sum = 0.0f;
      for (int first = thread; first - lane < num_eights; first += kOwnAhead * stride) {
        uint4 v[kOwnAhead];
#pragma unroll
        for (int u = 0; u < kOwnAhead; ++u) v[u] = load(first + u * stride);
#pragma unroll
        for (int u = 0; u < kOwnAhead; ++u) {
          float numbers[8];
          unpack<T>(v[u], numbers);
          float part = 0.0f;
#pragma unroll
          for (int i = 0; i < 8; ++i) part = fmaf(numbers[i], numbers[i], part);
          if (first + u * stride < num_eights) sum += part;
          if (first == thread) kept[u] = v[u];
        }
      }
      sum = warp_reduce<Sum>(sum);
      if (lane == 0) squares[threadIdx.x >> 5] = sum;
      __syncthreads();
      float total = 0.0f;
      for (int w = 0; w < stride / 32; ++w) total += squares[first_warp + w];
      scale = rsqrtf(total / (num_eights * 8) + eps);
    }
    int first = begin + thread;
    if (has_norm) {
      treat(thread, kept, factors, begin, end, scale, use);
      first = thread + kOwnAhead * stride;
    }
    for (; first - lane < end; first += kOwnAhead * stride) {
      uint4 v[kOwnAhead], f[kOwnAhead];
#pragma unroll
      for (int u = 0; u < kOwnAhead; ++u) v[u] = load(first + u * stride);
#pragma unroll
      for (int u = 0; u < kOwnAhead; ++u) f[u] = has_norm ? factor_of(first + u * stride) : make_uint4(0, 0, 0, 0);
      treat(first, v, f, begin, end, scale, use);
    }
  }
};

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

}  // namespace xserv
