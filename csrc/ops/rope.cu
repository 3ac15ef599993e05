// Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34), with a table of angles:
//   cos[p, i] = attention_scale * cos(p * inv_freq[i]), sin likewise, i < head_dim / 2
//   a' = a * cos[p, i] - b * sin[p, i],   b' = b * cos[p, i] + a * sin[p, i]
// where (a, b) are the elements (i, i + head_dim / 2) of a head ("split half", Hugging Face's rotate_half) or
// (2i, 2i + 1) ("interleaved", GPT-J and the paper).
//
// q: [num_tokens, num_heads, head_dim], k: [num_tokens, num_kv_heads, head_dim] or absent, head_dim contiguous,
// token and head strides in elements; positions: [num_tokens], i32 or i64. The whole head is rotated. In
// place or not. A position outside [0, max_position) copies its rows unrotated and writes the fault record.
//
// One block per token. A thread owns N pairs of the head, keeps their cos and sin in registers, and goes
// over heads of q and k alike; the data is requested before the position, whose table rows need a
// second trip to memory. N = kVec<T>: two 16-byte vectors per head; N = 1: any even head_dim and alignment.
#include "common/dtype.cuh"
#include "common/fault.cuh"

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
};
static_assert(sizeof(RopeArgs) == 8 * 8 + 8 * 8 + 4 * 4, "the host passes this struct by value");

// blockDim = (head_dim / 2 / N, heads at a time); U heads per thread under way.
template <typename T, typename Position, int N, bool INTERLEAVED, int U>
__device__ __forceinline__ void rope_token(const RopeArgs& args) {
  using V = Vec<T, N>;
  const long long token = blockIdx.x;
  const int total_heads = args.num_heads + args.num_kv_heads, half = args.head_dim / 2;
  const int pair = threadIdx.x * N;
  const int first = INTERLEAVED ? 2 * pair : pair;
  const int second = INTERLEAVED ? first + N : first + half;
  auto source_of = [&](int head) {
    return head < args.num_heads
               ? static_cast<const T*>(args.q) + token * args.q_token_stride + head * args.q_head_stride
               : static_cast<const T*>(args.k) + token * args.k_token_stride +
                     (head - args.num_heads) * args.k_head_stride;
  };
  V a[U], b[U];
  auto load = [&](int head) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (head + u * static_cast<int>(blockDim.y) < total_heads) {
        const T* source = source_of(head + u * blockDim.y);
        a[u] = *reinterpret_cast<const V*>(source + first);
        b[u] = *reinterpret_cast<const V*>(source + second);
      }
    }
  };
  load(threadIdx.y);

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
  if (!is_valid && threadIdx.x == 0 && threadIdx.y == 0) report_fault(args.fault, kFaultPosition, token, position);

  for (int head = threadIdx.y; head < total_heads; head += U * blockDim.y) {
    if (head != static_cast<int>(threadIdx.y)) load(head);
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int h = head + u * blockDim.y;
      if (h >= total_heads) break;
      if (is_valid) {
        V x, y;
#pragma unroll
        for (int i = 0; i < N; i++) {
          // Interleaved: pair i lies at 2i, 2i + 1 of the 2N elements that a and b hold one after the other.
          const int at = INTERLEAVED ? (2 * i) % N : i;
          const bool in_a = !INTERLEAVED || 2 * i < N;
          const float left = to_float(in_a ? a[u][at] : b[u][at]);
          const float right =
              to_float(!INTERLEAVED ? b[u][i] : N == 1 ? b[u][0] : in_a ? a[u][(at + 1) % N] : b[u][(at + 1) % N]);
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
        a[u] = x;
        b[u] = y;
      }
      T* target = h < args.num_heads
                      ? static_cast<T*>(args.q_out) + token * args.q_out_token_stride + h * args.q_out_head_stride
                      : static_cast<T*>(args.k_out) + token * args.k_out_token_stride +
                            (h - args.num_heads) * args.k_out_head_stride;
      *reinterpret_cast<V*>(target + first) = a[u];
      *reinterpret_cast<V*>(target + second) = b[u];
    }
  }
}

}  // namespace xserv

// The angle in f64: in f32, p * inv_freq is off by up to p * 2^-24 radians, 2e-3 at 40960 tokens.
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

#define XSERV_ROPE_KERNEL(NAME, T, POSITION, N, INTERLEAVED, U)                                          \
  extern "C" __global__ void __launch_bounds__(512) xserv_rope_##NAME(const xserv::RopeArgs args) {      \
    xserv::rope_token<T, POSITION, N, INTERLEAVED, U>(args);                                             \
  }
#define XSERV_ROPE_POSITIONS(SUFFIX, T, POSITION_SUFFIX, POSITION)                                       \
  XSERV_ROPE_KERNEL(split_u1_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, xserv::kVec<T>, false, 1)        \
  XSERV_ROPE_KERNEL(split_u2_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, xserv::kVec<T>, false, 2)        \
  XSERV_ROPE_KERNEL(interleaved_u1_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, xserv::kVec<T>, true, 1)   \
  XSERV_ROPE_KERNEL(interleaved_u2_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, xserv::kVec<T>, true, 2)   \
  XSERV_ROPE_KERNEL(split_scalar_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, 1, false, 1)                 \
  XSERV_ROPE_KERNEL(interleaved_scalar_##POSITION_SUFFIX##_##SUFFIX, T, POSITION, 1, true, 1)
#define XSERV_ROPE(SUFFIX, T)                       \
  XSERV_ROPE_POSITIONS(SUFFIX, T, i32, int)         \
  XSERV_ROPE_POSITIONS(SUFFIX, T, i64, long long)
XSERV_FOR_EACH_DTYPE(XSERV_ROPE)
