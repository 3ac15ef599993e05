// Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34), with a table of angles:
//   cos[p, i] = attention_scale * cos(p * inv_freq[i]), sin likewise, i < head_dim / 2
//   a' = a * cos[p, i] - b * sin[p, i],   b' = b * cos[p, i] + a * sin[p, i]
// where (a, b) are the elements (i, i + head_dim / 2) of a head ("split half", Hugging Face's rotate_half)
// or (2i, 2i + 1) ("interleaved", GPT-J and the paper).
//
// q: [num_tokens, num_heads, head_dim], k: [num_tokens, num_kv_heads, head_dim] or absent; head_dim
// contiguous, token and head strides in elements; positions: [num_tokens], i32 or i64. The whole head is
// rotated, in place or not. A position outside [0, max_position) copies its rows unrotated and writes the
// fault record.
//
// One block per token. A thread owns N pairs of the head, keeps their cos and sin in registers, and goes
// over heads of q and k alike; the data is requested before the position, whose table rows need a
// second trip to memory. N = kVec<T>: two 16-byte vectors per head; N = 1: any even head_dim and alignment.
// 8192 tokens of 32 + 8 heads of 128 in bf16 take 47.0 us on an H200 with 16 heads at a time, 64 with 40.
#include "common/dtype.cuh"
#include "common/fault.cuh"
#include "common/layouts.cuh"

namespace xserv {

struct RopeArgs {
  const void* q;
  void* q_out;
  const void* k;  // null: no k
  void* k_out;
  const void* positions;
  const float* cos;
  const float* sin;
  FaultRecord* fault;
  long long q_token_stride, q_head_stride;
  long long q_out_token_stride, q_out_head_stride;
  long long k_token_stride, k_head_stride;
  long long k_out_token_stride, k_out_head_stride;
  int num_heads;
  int num_kv_heads;  // 0 without k
  int head_dim;
  int max_position;
  // The threads of a head, head_dim / 2 / N, and ceil(2^20 / lanes): t / lanes is t * multiplier >> 20.
  int lanes;
  int lanes_multiplier;
  int heads_at_a_time;  // blockDim.x / lanes
  int padding;
};
XSERV_LAYOUT_RopeArgs;

template <typename T, typename Position, int N, bool INTERLEAVED>
__device__ __forceinline__ void rope_token(const RopeArgs& args) {
  using V = Vec<T, N>;
  const long long token = blockIdx.x;
  const int total_heads = args.num_heads + args.num_kv_heads, half = args.head_dim / 2;
  const int first_head = static_cast<int>(threadIdx.x) * args.lanes_multiplier >> 20;
  const int pair = (static_cast<int>(threadIdx.x) - first_head * args.lanes) * N;
  const int first = INTERLEAVED ? 2 * pair : pair;
  const int second = INTERLEAVED ? first + N : first + half;
  auto source_of = [&](int head) {
    return head < args.num_heads
               ? static_cast<const T*>(args.q) + token * args.q_token_stride + head * args.q_head_stride
               : static_cast<const T*>(args.k) + token * args.k_token_stride +
                     (head - args.num_heads) * args.k_head_stride;
  };
  V a, b;
  auto load = [&](int head) {
    const T* source = source_of(head);
    a = *reinterpret_cast<const V*>(source + first);
    b = *reinterpret_cast<const V*>(source + second);
  };
  if (first_head < total_heads) load(first_head);

  const long long position = static_cast<const Position*>(args.positions)[token];
  const bool is_valid = position >= 0 && position < args.max_position;
  float cos[N], sin[N];
  constexpr int kQuad = N < 4 ? N : 4;
  const long long row = is_valid ? position * half + pair : pair;
#pragma unroll
  for (int i = 0; i < N; i += kQuad) {
    const Vec<float, kQuad> c = *reinterpret_cast<const Vec<float, kQuad>*>(args.cos + row + i);
    const Vec<float, kQuad> s = *reinterpret_cast<const Vec<float, kQuad>*>(args.sin + row + i);
#pragma unroll
    for (int j = 0; j < kQuad; j++) {
      cos[i + j] = c[j];
      sin[i + j] = s[j];
    }
  }
  if (!is_valid && threadIdx.x == 0) report_fault(args.fault, kFaultPosition, token, position);

  for (int head = first_head; head < total_heads; head += args.heads_at_a_time) {
    if (head != first_head) load(head);
    if (is_valid) {
      V x, y;
#pragma unroll
      for (int i = 0; i < N; i++) {
        // Interleaved: pair i lies at 2i, 2i + 1 of the 2N elements that a and b hold one after the other.
        const int at = INTERLEAVED ? (2 * i) % N : i;
        const bool in_a = !INTERLEAVED || 2 * i < N;
        const float left = to_float(in_a ? a[at] : b[at]);
        const float right =
            to_float(!INTERLEAVED ? b[i] : N == 1 ? b[0] : in_a ? a[(at + 1) % N] : b[(at + 1) % N]);
        const T rotated_left = from_float<T>(left * cos[i] - right * sin[i]);
        const T rotated_right = from_float<T>(right * cos[i] + left * sin[i]);
        if (!INTERLEAVED || N == 1) {
          x[i] = rotated_left;
          y[i] = rotated_right;
        } else if (in_a) {
          x[at] = rotated_left;
          x[(at + 1) % N] = rotated_right;
        } else {
          y[at] = rotated_left;
          y[(at + 1) % N] = rotated_right;
        }
      }
      a = x;
      b = y;
    }
    T* target = head < args.num_heads ? static_cast<T*>(args.q_out) + token * args.q_out_token_stride +
                                            head * args.q_out_head_stride
                                      : static_cast<T*>(args.k_out) + token * args.k_out_token_stride +
                                            (head - args.num_heads) * args.k_out_head_stride;
    *reinterpret_cast<V*>(target + first) = a;
    *reinterpret_cast<V*>(target + second) = b;
  }
}

}  // namespace xserv

// The angle is in f64: in f32, p * inv_freq is off by up to p * 2^-24 radians, 2e-3 at 40960 tokens.
// One thread per entry of [max_position, half].
extern "C" __global__ void __launch_bounds__(256)
    xserv_rope_table(float* __restrict__ cos_table, float* __restrict__ sin_table,
                     const float* __restrict__ inv_freq, float attention_scale, int max_position, int half) {
  const long long entry = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (entry >= static_cast<long long>(max_position) * half) return;
  const int position = static_cast<int>(entry / half);
  double sin_value, cos_value;
  sincos(position * static_cast<double>(inv_freq[entry % half]), &sin_value, &cos_value);
  cos_table[entry] = static_cast<float>(attention_scale * cos_value);
  sin_table[entry] = static_cast<float>(attention_scale * sin_value);
}

#define XSERV_ROPE_KERNEL(NAME, T, POSITION, N, INTERLEAVED)                                               \
  extern "C" __global__ void __launch_bounds__(512) xserv_rope_##NAME(const xserv::RopeArgs args) {        \
    xserv::rope_token<T, POSITION, N, INTERLEAVED>(args);                                                  \
  }
#define XSERV_ROPE_POSITIONS(SUFFIX, T, POSITION_SUFFIX, POSITION)                                         \
  XSERV_ROPE_KERNEL(split_vec_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, xserv::kVec<T>, false)            \
  XSERV_ROPE_KERNEL(interleaved_vec_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, xserv::kVec<T>, true)       \
  XSERV_ROPE_KERNEL(split_scalar_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, 1, false)                      \
  XSERV_ROPE_KERNEL(interleaved_scalar_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, 1, true)
#define XSERV_ROPE(SUFFIX, T)               \
  XSERV_ROPE_POSITIONS(SUFFIX, T, i32, int) \
  XSERV_ROPE_POSITIONS(SUFFIX, T, i64, long long)
XSERV_FOR_EACH_DTYPE(XSERV_ROPE)
