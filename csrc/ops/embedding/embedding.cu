// out[t] = table[ids[t]], bit for bit.
// out: [num_tokens, width], table: [vocab_size, width], ids: [num_tokens], i32 or i64; rows contiguous, a
// stride per row each, all in units of `Unit`.
//
// An id outside [0, vocab_size) reads nothing: its row becomes zeros and the fault record is written.
// One block per token (x) and part of its row (y). b16: 16-byte units; b4, b2: what alignment allows.
#include <stdint.h>

#include "common/fault.cuh"

namespace xserv {

// Units per thread under way. In blocks of 128 threads, 8192 rows of 4096 bf16 take 35.6 us on an H200 with 2
// or 4, and 37.6 us with 1 (blocks of 256).
constexpr int kUnits = 2;

template <typename Unit, typename Id>
__device__ __forceinline__ void embedding_row(Unit* __restrict__ out, const Unit* __restrict__ table,
                                              const Id* __restrict__ ids, long long vocab_size, int width,
                                              long long out_stride, long long table_stride,
                                              FaultRecord* fault) {
  const long long token = blockIdx.x;
  const long long id = ids[token];
  const bool is_valid = id >= 0 && id < vocab_size;
  const Unit* source = table + (is_valid ? id * table_stride : 0);
  Unit* target = out + token * out_stride;
  const int first = blockIdx.y * blockDim.x * kUnits + threadIdx.x;
  Unit values[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    const int unit = first + i * blockDim.x;
    values[i] = Unit{};
    if (is_valid && unit < width) values[i] = source[unit];
  }
#pragma unroll
  for (int i = 0; i < kUnits; i++) {
    const int unit = first + i * blockDim.x;
    if (unit < width) target[unit] = values[i];
  }
  if (!is_valid && blockIdx.y == 0 && threadIdx.x == 0) report_fault(fault, kFaultTokenId, token, id);
}

}  // namespace xserv

#define XSERV_EMBEDDING(ID_SUFFIX, Id, BYTES, Unit)                                                        \
  extern "C" __global__ void __launch_bounds__(1024) xserv_embedding_##ID_SUFFIX##_b##BYTES(               \
      Unit* out, const Unit* table, const Id* ids, long long vocab_size, int width, long long out_stride,  \
      long long table_stride, xserv::FaultRecord* fault) {                                                 \
    xserv::embedding_row<Unit, Id>(out, table, ids, vocab_size, width, out_stride, table_stride, fault);   \
  }
#define XSERV_EMBEDDING_IDS(ID_SUFFIX, Id)    \
  XSERV_EMBEDDING(ID_SUFFIX, Id, 16, uint4)   \
  XSERV_EMBEDDING(ID_SUFFIX, Id, 4, uint32_t) \
  XSERV_EMBEDDING(ID_SUFFIX, Id, 2, uint16_t)
XSERV_EMBEDDING_IDS(i32, int)
XSERV_EMBEDDING_IDS(i64, long long)
