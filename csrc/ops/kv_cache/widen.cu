// Copies the keys and values of some sequences from a paged cache of 8-bit floats to one of T, in
// which the blocks of each sequence follow each other, and makes the block table of that:
//   k_out[s * out_blocks + b] = k_cache[block_tables[s][b]],  likewise v,  table_out[s][b] = s * out_blocks + b
//
// k_cache, v_cache: [num_blocks, block_len], with block_len numbers of all heads and tokens, a
// multiple of 16; block_tables: [num_seqs, max_blocks_per_seq]; context_lens: [num_seqs]; k_out,
// v_out: [num_seqs * out_blocks, block_len]; table_out: [num_seqs, out_blocks], where out_blocks <=
// max_blocks_per_seq.
//
// Blocks without keys of the sequence are left as they are, and so are those before the tile of
// tile_keys keys in which the last num_seen keys begin. Where a table names no block of the cache zeros
// are written, and the fault is reported. grid (out_blocks, num_seqs, 2 n), where n
// blocks share the keys of a block of the cache, and n its values.
#include "common/dtype.cuh"
#include "common/fault.cuh"
#include "common/pdl.cuh"
#include "common/e4m3.cuh"

namespace xserv {

// Sixteen numbers.
template <typename T>
__device__ __forceinline__ void widen_unit(T* target, uint4 codes) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 16; i += kVec<T>) {
    Vec<T, kVec<T>> numbers;
#pragma unroll
    for (int j = 0; j < kVec<T>; ++j) {
      numbers[j] = from_float<T>(e4m3_number(words[(i + j) / 4] >> ((i + j) % 4 * 8) & 0xff));
    }
    *reinterpret_cast<Vec<T, kVec<T>>*>(target + i) = numbers;
  }
}

template <typename T>
__device__ __forceinline__ void kv_cache_widen(const uint8_t* k_cache, const uint8_t* v_cache, const int* block_tables,
                                               const int* context_lens, FaultRecord* fault, T* k_out, T* v_out,
                                               int* table_out, int max_blocks_per_seq, int num_blocks, int block_size,
                                               int block_len, int num_seen, int tile_keys) {
  const long long seq = blockIdx.y;
  const int place = blockIdx.x;
  dependency_launch();
  dependency_wait();
  const bool is_first = threadIdx.x == 0 && blockIdx.z == 0;
  const long long to = seq * gridDim.x + place;
  if (is_first) table_out[to] = static_cast<int>(to);
  const long long first_key = static_cast<long long>(place) * block_size;
  const int num_keys = context_lens[seq];
  if (first_key >= num_keys || first_key + block_size <= max(num_keys - num_seen, 0) / tile_keys * tile_keys) return;
  const long long index = seq * max_blocks_per_seq + place;
  const int id = block_tables[index];
  const bool is_valid = static_cast<unsigned>(id) < static_cast<unsigned>(num_blocks);
  if (!is_valid && is_first) report_fault(fault, kFaultBlock, index, id);
  // Even parts are keys, odd ones values.
  const bool is_value = blockIdx.z & 1;
  const uint8_t* source = (is_value ? v_cache : k_cache) + static_cast<long long>(is_valid ? id : 0) * block_len;
  T* target = (is_value ? v_out : k_out) + to * block_len;
  const int step = blockDim.x * (gridDim.z / 2);
  for (int i = (blockIdx.z / 2) * blockDim.x + threadIdx.x; i < block_len / 16; i += step) {
    widen_unit(target + i * 16LL, is_valid ? reinterpret_cast<const uint4*>(source)[i] : make_uint4(0, 0, 0, 0));
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(256) xserv_kv_cache_widen_##SUFFIX(                           \
      const uint8_t* k_cache, const uint8_t* v_cache, const int* block_tables, const int* context_lens,      \
      xserv::FaultRecord* fault, T* k_out, T* v_out, int* table_out, int max_blocks_per_seq, int num_blocks, \
      int block_size, int block_len, int num_seen, int tile_keys) {                                          \
    xserv::kv_cache_widen(k_cache, v_cache, block_tables, context_lens, fault, k_out, v_out, table_out,      \
                          max_blocks_per_seq, num_blocks, block_size, block_len, num_seen, tile_keys);       \
  }
XSERV_FOR_EACH_DTYPE(XSERV_KERNEL)
