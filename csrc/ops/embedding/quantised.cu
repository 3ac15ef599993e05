// The embedding lookup of a step (chosen.cu) in a quantised table, in the tiles of
// src/ops/quantised/tiles.rs:
//   hidden[t] = round(table[id(t)])
// where a number of the table is (code - zero) * scale in f32, and round() is to T. One block per
// token; a thread has eight inputs at a time.
#include "common/dtype.cuh"
#include "common/fault.cuh"
#include "common/layouts.cuh"
#include "common/pdl.cuh"
#include "ops/embedding/chosen.cuh"
#include "ops/quantised/number.cuh"

namespace xserv {

struct EmbeddingQuantisedParams {
  void* hidden;             // [num_tokens, width]
  const void* codes;
  const void* scales;
  const void* zeros;        // null: all are the middle of the codes
  const unsigned* ids;      // as in chosen.cu
  const unsigned* sources;
  const unsigned* chosen;
  FaultRecord* fault;
  unsigned vocab_size;
  int width;
  int num_chunks;           // of a tile
  int num_groups;           // of a row
  int group_size;
  int code;                 // a Code
  int scale_type;           // a ScaleType
  int are_pieces;           // whether codes lie in pieces of rows
};
XSERV_LAYOUT_EmbeddingQuantisedParams;

template <typename T>
__device__ __forceinline__ void embedding_quantised(const EmbeddingQuantisedParams& p) {
  dependency_launch();
  dependency_wait();
  const int64_t token = blockIdx.x;
  const unsigned id = chosen_id(p.ids, p.sources, p.chosen, token);
  const bool is_valid = id < p.vocab_size;
  if (!is_valid && threadIdx.x == 0) report_fault(p.fault, kFaultTokenId, token, id);
  const Code code = static_cast<Code>(p.code);
  const bool is_int4 = code == Code::kInt4;
  const int64_t tile = is_valid ? id / 16 : 0;
  const int row = id % 8, second = id / 8 % 2;
  const int64_t chunk_bytes = is_int4 ? 512 : 1024;
  T* out = static_cast<T*>(p.hidden) + token * p.width;
  for (int eight = threadIdx.x; eight * 8 < p.width; eight += blockDim.x) {
    const int input = eight * 8;
    T values[8] = {};
    if (is_valid) {
      uint32_t words[4];
      const char* codes = static_cast<const char*>(p.codes) + tile * p.num_chunks * chunk_bytes;
      load_eight(codes, row, eight, is_int4, p.are_pieces != 0, words);
      eight_numbers(values, words, second, input, code, p.scales, static_cast<ScaleType>(p.scale_type), p.zeros,
                    tile * p.num_groups * 16 + row * 2 + second, p.num_groups, p.group_size);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (input + e < p.width) out[input + e] = values[e];
    }
  }
}

}  // namespace xserv

// xserv_embedding_quantised_<dtype>: a block per token.
#define XSERV_EMBEDDING_QUANTISED(SUFFIX, T)                                                        \
  extern "C" __global__ void __launch_bounds__(512)                                                 \
      xserv_embedding_quantised_##SUFFIX(const __grid_constant__ xserv::EmbeddingQuantisedParams params) { \
    xserv::embedding_quantised<T>(params);                                                          \
  }
XSERV_FOR_EACH_DTYPE(XSERV_EMBEDDING_QUANTISED)
