// The attention of fused.cu for one sequence with one new token, with the output projection of its
// heads, in one kernel.
//
//   attn = everything that fused.cu computes, rounded to T
//   sums[g] = W_o[:, columns of the heads over kv head g] attn[heads over g]       f32, for each kv head g
//
//   weight: [hidden_size, num_heads * head_dim], W_o;   sums: [num_kv_heads, hidden_size]
//   qkv, norms, tables, cache: as in fused.cu, with num_seqs = 1; out is not used. A sequence that is not in
//   use (its length is 0) has sums of zero.
//
// The kernel that reads the sums adds them over g in order, rounds to T and adds the residual
// (gemv_mma.cu).
//
// Grid (8, num_kv_heads) in clusters of 8 blocks, each cluster with a kv head and its 2 query heads. A
// separate projection costs a kernel's beginning and end; here its weights arrive while the chain of
// trips of the attention leaves the device memory idle, a block has 16 rows of W_o for each of its
// warps in shared memory by then, and the sum over the heads of all clusters costs only the additional
// reads of the next kernel.
//
// xserv_attention_fused_project_<slots>_<dtype>: 2 or 3 tiles of 16 tokens are under way for each warp.
// With less shared memory the neighbours in the chain begin earlier, with more of it long contexts are
// read faster (H200, layers and output of Qwen3-0.6B: 424 and 440 us with 517 tokens of context, 557
// and 544 with 4133; five kernels a layer: 511 and 613).
//
// Needs: head_dim 128, 2 query heads for each kv head, hidden_size a multiple of 128, at most 1024; W_o
// aligned to 16 bytes; and what fused.cu needs. Shared memory: 177472 bytes.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "ops/attention/fused_unit.cuh"

#include "common/layouts.cuh"

namespace xserv {

struct FusedProjectArgs {
  FusedArgs attention;
  OutputProjection projection;
};
XSERV_LAYOUT_FusedProjectArgs;

}  // namespace xserv

// STORED is the type T itself or Fp8, whose kernels are called ..._fp8_... and have twice as many
// slots of half the size.
#define XSERV_DECODE_ATTENTION_O(name, slots, suffix, T, STORED, held)                                          \
  extern "C" __global__ void __launch_bounds__(256, 2) xserv_attention_fused_project_##name##slots##_##suffix(    \
      const __grid_constant__ xserv::FusedProjectArgs args) {                                                  \
    using Kernel = xserv::DecodeAttention<T, 128, 8, held, xserv::DecodeForm::kProjected, STORED>;                 \
    static_assert(Kernel::kSharedBytes == xserv::shared_bytes::attention_fused_project_##slots);                   \
    Kernel::run(args.attention, args.projection);                                                                  \
  }
#define XSERV_DECODE_ATTENTION_O_EACH(slots, suffix, T)         \
  XSERV_DECODE_ATTENTION_O(, slots, suffix, T, T, slots)        \
  XSERV_DECODE_ATTENTION_O(fp8_, slots, suffix, T, xserv::Fp8, slots * 2)
XSERV_DECODE_ATTENTION_O_EACH(2, f16, __half)
XSERV_DECODE_ATTENTION_O_EACH(2, bf16, __nv_bfloat16)
XSERV_DECODE_ATTENTION_O_EACH(3, f16, __half)
XSERV_DECODE_ATTENTION_O_EACH(3, bf16, __nv_bfloat16)
#endif
