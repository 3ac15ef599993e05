// Chooses the experts of every token, and sorts tokens by expert (src/ops/experts/mod.rs).
//
// logits: [num_tokens, num_experts]; ids: [num_tokens, per_token], scratch; places: [num_tokens, per_token], the
// slot of each assignment; weights: [num_tokens, per_token], rounded to T; tokens: [num_tokens * per_token],
// the token of each slot; tiles: up to tile_tokens slots of one expert each, in the order of the experts;
// num_tiles: how many there are. num_experts <= 1024, per_token <= 32 and <= num_experts.
//
// A warp chooses for a token. One block then sorts: experts have their slots in their order, and the tokens
// of an expert in no order, which no result depends on.
#include "ops/experts/choose.cuh"

namespace xserv {

constexpr int kMaxNear = 1024;  // assignments

template <typename T>
__device__ __forceinline__ void route(int* places, int* tokens, SlotTile* tiles, int* num_tiles, int* ids,
                                      float* weights, const T* logits, int num_tokens, int num_experts, int per_token,
                                      int renormalises, int tile_tokens) {
  dependency_launch();
  dependency_wait();
  // What one block chooses and sorts stays in shared memory, if it has room.
  __shared__ int near_ids[kMaxNear];
  if (gridDim.x == 1 && num_tokens * per_token <= kMaxNear) ids = near_ids;
  choose_all(ids, weights, logits, num_tokens, num_experts, per_token, renormalises != 0);
  // With several blocks another kernel sorts.
  if (gridDim.x > 1) return;
  __syncthreads();
  sort(places, tokens, tiles, num_tiles, ids, num_tokens * per_token, num_experts, per_token, tile_tokens);
}

}  // namespace xserv

// xserv_experts_route_<dtype>: one block sorts too.
#define XSERV_EXPERTS_ROUTE(SUFFIX, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(512) xserv_experts_route_##SUFFIX(                                   \
      int* places, int* tokens, xserv::SlotTile* tiles, int* num_tiles, int* ids, float* weights, const T* logits,  \
      int num_tokens, int num_experts, int per_token, int renormalises, int tile_tokens) {                          \
    xserv::route<T>(places, tokens, tiles, num_tiles, ids, weights, logits, num_tokens, num_experts, per_token,     \
                    renormalises, tile_tokens);                                                                     \
  }
XSERV_FOR_EACH_DTYPE(XSERV_EXPERTS_ROUTE)

// For one block.
extern "C" __global__ void __launch_bounds__(1024) xserv_experts_sort(int* places, int* tokens, xserv::SlotTile* tiles,
                                                                      int* num_tiles, const int* ids,
                                                                      unsigned num_assignments, int num_experts,
                                                                      int per_token, int tile_tokens) {
  xserv::dependency_launch();
  xserv::dependency_wait();
  xserv::sort(places, tokens, tiles, num_tiles, ids, num_assignments, num_experts, per_token, tile_tokens);
}
