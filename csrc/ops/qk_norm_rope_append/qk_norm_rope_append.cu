// The operations between the projection and the attention, with the roundings of Transformers:
//   q, k = rope(rms_norm(q)), rope(rms_norm(k))     each head by itself; q in place, k into the cache
//   v                                               into the cache as it is, or both as 8-bit floats
// or without the norms, where q_norm and k_norm are null;
//   rms_norm(x) = round(weight * round(x / sqrt(mean(x^2) + eps)))
//   rope(x)     = round(round(x * cos) + round(rotate_half(x) * sin))      Su et al. 2021, split-half pairs
// where round() is to T, and cos and sin are of type T. In f32 the roundings do nothing.
//
// qkv: [num_tokens, (num_heads + 2 num_kv_heads) * head_stride], where the first head_dim elements of
// each head are in use and the others are zero; q_norm, k_norm: [head_dim]; cos, sin: [max_position,
// head_dim / 2]; positions: [num_tokens]; slots: [num_tokens], block * block_size + offset; no kernel
// writes positions or slots; k_cache, v_cache: [num_slots, num_kv_heads, head_stride], that is
// [num_blocks, block_size, ...].
//
// A token whose slot is outside the cache is not written, and one whose position is outside the table
// is not rotated; both are reported. LANES lanes of a warp work on each token and head, each with PAIRS
// neighbouring pairs at a time. Heads of 128 and 64 without gaps take 16 or 8 lanes with 4 pairs: all
// of a head in one access, and two or four heads in a warp. Other heads take whole warps, with 2 pairs
// where head_dim is a multiple of 4, else 1; head_dim is even and at most 256; head_stride is a
// multiple of 4. grid (num_tokens, ceil(heads / heads of a block)).
#include "common/dtype.cuh"
#include "common/fault.cuh"
#include "common/layouts.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "ops/kv_cache/stored.cuh"

namespace xserv {

struct QkNormRopeAppendArgs {
  void* qkv;
  const void* q_norm;
  const void* k_norm;
  const void* cos;
  const void* sin;
  const int* positions;
  const unsigned* slots;
  void* k_cache;
  void* v_cache;
  FaultRecord* fault;
  long long num_slots;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int head_stride;
  int max_position;
  float eps;
};
XSERV_LAYOUT_QkNormRopeAppendArgs;

// The number of pairs of the longest head.
constexpr int kMaxPairs = kMaxNormedHeadDim / 2;

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

// Stored: what the cache has for a number, T or Fp8.
template <typename T, typename Stored, int PAIRS, int LANES>
__device__ __forceinline__ void qk_norm_rope_append(const QkNormRopeAppendArgs& args) {
  using V = Vec<T, PAIRS>;
  constexpr bool kIsWhole = LANES < 32;  // the lanes hold exactly a head
  constexpr int kSteps = kIsWhole ? 1 : kMaxPairs / (32 * PAIRS);
  const int lane = threadIdx.x % LANES;
  const int head = blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;
  const int num_heads = args.num_heads, num_kv_heads = args.num_kv_heads;
  dependency_launch();
  // Lanes beyond the last head take part in the sums of their warp.
  const bool is_head = head < num_heads + 2 * num_kv_heads;
  const long long token = blockIdx.x;
  const int half = kIsWhole ? LANES * PAIRS : args.head_dim / 2;
  const int stride = kIsWhole ? 2 * half : args.head_stride;
  T* source = static_cast<T*>(args.qkv) + (token * (num_heads + 2 * num_kv_heads) + (is_head ? head : 0)) * stride;
  const long long slot = args.slots[token];
  const int position = args.positions[token];
  const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
  const bool is_valid = position >= 0 && position < args.max_position;
  const long long row = is_valid ? static_cast<long long>(position) * half : 0;
  const T* weight = static_cast<const T*>(is_query ? args.q_norm : args.k_norm);
  const T* cos_row = static_cast<const T*>(args.cos) + row;
  const T* sin_row = static_cast<const T*>(args.sin) + row;
  const bool is_normed = weight != nullptr;
  // Operands that no kernel writes are read while the preceding kernels are still at work.
  V weight_a{}, weight_b{}, cos{}, sin{};
  const auto load_factors = [&](int i) {
    if (is_normed) {
      weight_a = *reinterpret_cast<const V*>(weight + i);
      weight_b = *reinterpret_cast<const V*>(weight + half + i);
    }
    cos = *reinterpret_cast<const V*>(cos_row + i);
    sin = *reinterpret_cast<const V*>(sin_row + i);
  };
  if constexpr (kIsWhole) load_factors(lane * PAIRS);
  dependency_wait();
  if (!kIsWhole && !is_head) return;

  V a[kSteps], b[kSteps];
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    const int i = (step * LANES + lane) * PAIRS;
    if (!kIsWhole && i >= half) continue;
    a[step] = *reinterpret_cast<const V*>(source + i);
    b[step] = *reinterpret_cast<const V*>(source + half + i);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const float left = to_float(a[step][j]), right = to_float(b[step][j]);
      sum += left * left + right * right;
    }
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  if (!is_head) return;

  Stored* cached = nullptr;
  if (!is_query) {
    if (slot >= args.num_slots) {
      if (lane == 0) report_fault(args.fault, kFaultBlock, token, slot);
      return;
    }
    const int kv_head = head - num_heads - (is_value ? num_kv_heads : 0);
    cached = static_cast<Stored*>(is_value ? args.v_cache : args.k_cache);
    cached += (slot * num_kv_heads + kv_head) * stride;
  }
  if (is_value) {
    if constexpr (kIsWhole) {
      store_in_cache(cached + lane * PAIRS, a[0]);
      store_in_cache(cached + half + lane * PAIRS, b[0]);
    } else {
      for (int i = lane * PAIRS; i < stride; i += LANES * PAIRS) {
        store_in_cache(cached + i, *reinterpret_cast<const V*>(source + i));
      }
    }
    return;
  }

  const float scale = rsqrtf(sum / args.head_dim + args.eps);
  if (!is_valid && head == 0 && lane == 0) report_fault(args.fault, kFaultPosition, token, position);
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    const int i = (step * LANES + lane) * PAIRS;
    if (!kIsWhole && i >= half) continue;
    if constexpr (!kIsWhole) load_factors(i);
    V left_out, right_out;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      float left = to_float(a[step][j]), right = to_float(b[step][j]);
      if (is_normed) {
        left = rounded<T>(rounded<T>(left * scale) * to_float(weight_a[j]));
        right = rounded<T>(rounded<T>(right * scale) * to_float(weight_b[j]));
      }
      const float c = is_valid ? to_float(cos[j]) : 1.0f, s = is_valid ? to_float(sin[j]) : 0.0f;
      left_out[j] = from_float<T>(rounded<T>(left * c) - rounded<T>(right * s));
      right_out[j] = from_float<T>(rounded<T>(right * c) + rounded<T>(left * s));
    }
    if (is_query) {
      *reinterpret_cast<V*>(source + i) = left_out;
      *reinterpret_cast<V*>(source + half + i) = right_out;
    } else {
      store_in_cache(cached + i, left_out);
      store_in_cache(cached + half + i, right_out);
    }
  }
  // The gap is cleared here because the cache is not cleared before its first use.
  if (!kIsWhole && !is_query) {
    for (int i = args.head_dim + lane; i < stride; i += LANES) cached[i] = Stored{};
  }
}

// Makes the tables, [max_position, half] each, as Transformers does: the angle in f32, the factor of
// YaRN in f32, then rounded to T. One thread per entry.
template <typename T>
__device__ __forceinline__ void rope_table(T* cos_table, T* sin_table, const float* inv_freq, float scaling,
                                           int max_position, int half) {
  const long long entry = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (entry >= static_cast<long long>(max_position) * half) return;
  const float angle = __fmul_rn(static_cast<float>(entry / half), inv_freq[entry % half]);
  double sin_value, cos_value;
  sincos(static_cast<double>(angle), &sin_value, &cos_value);
  cos_table[entry] = from_float<T>(static_cast<float>(cos_value) * scaling);
  sin_table[entry] = from_float<T>(static_cast<float>(sin_value) * scaling);
}

}  // namespace xserv

#define XSERV_APPEND(SUFFIX, T, NAME, STORED, PAIRS, LANES)                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                          \
      xserv_qk_norm_rope_append_##NAME##_##SUFFIX(const __grid_constant__ xserv::QkNormRopeAppendArgs args) { \
    xserv::qk_norm_rope_append<T, STORED, PAIRS, LANES>(args);                                               \
  }
#define XSERV_KERNEL(SUFFIX, T)                                                                              \
  XSERV_APPEND(SUFFIX, T, 128, T, 4, 16)                                                                     \
  XSERV_APPEND(SUFFIX, T, 64, T, 4, 8)                                                                       \
  XSERV_APPEND(SUFFIX, T, vec, T, 2, 32)                                                                     \
  XSERV_APPEND(SUFFIX, T, scalar, T, 1, 32)                                                                  \
  XSERV_APPEND(SUFFIX, T, fp8_128, xserv::Fp8, 4, 16)                                                        \
  XSERV_APPEND(SUFFIX, T, fp8_64, xserv::Fp8, 4, 8)                                                          \
  XSERV_APPEND(SUFFIX, T, fp8_vec, xserv::Fp8, 2, 32)                                                        \
  XSERV_APPEND(SUFFIX, T, fp8_scalar, xserv::Fp8, 1, 32)                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                                          \
      xserv_qk_rope_table_##SUFFIX(T* cos_table, T* sin_table, const float* inv_freq, float scaling,         \
                                   int max_position, int half) {                                             \
    xserv::rope_table<T>(cos_table, sin_table, inv_freq, scaling, max_position, half);                       \
  }
XSERV_FOR_EACH_DTYPE(XSERV_KERNEL)
