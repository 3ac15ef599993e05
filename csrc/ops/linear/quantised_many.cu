// Linear layers with quantised weights (quantised.cuh) for more than 16 tokens on Hopper.
//
// A block has 64 rows of W for each of its groups of four warps, all with the same tokens, whose x lies in
// shared memory once for all of them. One warp copies stages of 64 inputs into a ring: the codes of all tiles
// as they are, x, and the scales and zeros of the groups. The others take their codes from there, make numbers
// of T of them in registers, exactly (decode.cuh), and pass these to wgmma as the operand A, whose rows a warp has as
// mma.m16n8k16 has them. The products of a group are summed in f32 of their own and multiplied by the scale of
// their row only then, so that nothing but x has been rounded. While a chunk is multiplied the next one is decoded.
//
// wgmma takes the inputs of x in the order of memory, where a lane's codes in a tile belong to eight neighbouring
// inputs of each half of the chunk (src/ops/quantised/tiles.rs); the four lanes of a row exchange them, as codes.
//
// The blocks of a cluster share the tile and divide its inputs; their sums are added in the order of the inputs,
// through shared memory. Tokens behind the last one are not read: what the ring has in their place goes into sums
// that are not stored.
#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/tma_cluster.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"
#include "ops/linear/quantised.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace xserv {

struct QuantisedManyParams {
  TensorMap x;       // boxes of kManyTokenBox tokens and 64 inputs, swizzled
  TensorMap codes;   // words [num_tiles, words of a tile]; boxes of the tiles of a block and a chunk
  TensorMap scales;  // [num_tiles, num_groups, 16]; boxes of the tiles of a block and a group
  TensorMap zeros;   // likewise, if there are any
  void* out;         // residual: read and written
  const void* bias;  // plain only
  int64_t ldo;       // elements from token to token of out
  int num_tokens;
  int n;              // columns of out
  int num_chunks;     // of a tile
  uint32_t group_factor;  // the group of unit u is (2 * u * group_factor) >> 32; a chunk has kUnits units
  int scale_type;     // a ScaleType
  int epilogue;       // an Epilogue
  int has_zeros;
  int padding[11];
  static constexpr int tile_rows = 16;
};

constexpr int kManyTokenBox = 32;

// kUnits: scales of a chunk and row; kGroups: of four warps.
template <Code kCode_, int kUnits_, int kTokens_, int kGroups_, int kStages_>
struct Many {
  static constexpr Code kCode = kCode_;
  static constexpr int kUnits = kUnits_, kTokens = kTokens_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kWarps = kGroups * 4, kTiles = kWarps, kThreads = (kWarps + 4) * 32;
  // A group of four warps copies and needs few registers; the others divide what that gives back.
  static constexpr int kOtherRegisters = kGroups == 2 ? 40 : 24;
  static constexpr int kRegisters =
      (65536 / kThreads / 8 * 8 * (kGroups + 1) - kOtherRegisters) / kGroups / 8 * 8;
  static constexpr uint32_t kChunkBytes = kCode == Code::kInt4 ? 512 : 1024;
  static constexpr uint32_t kTokenBytes = kTokens * 128, kCodeBytes = kTiles * kChunkBytes;
  static constexpr uint32_t kScaleBytes = kTiles * 64, kZeroBytes = kTiles * 16;  // of a unit, at most
  static constexpr uint32_t kZeroPitch = (kZeroBytes + 127) / 128 * 128;
  static constexpr uint32_t kCodes = kTokenBytes, kScales = kCodes + kCodeBytes;
  static constexpr uint32_t kZeros = kScales + kUnits * kScaleBytes;
  static constexpr uint32_t kStageBytes = (kZeros + kUnits * kZeroPitch + 1023) / 1024 * 1024;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes, kSumBytes = kTiles * kTokens * 64;
  static constexpr uint32_t kBarriers = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 16;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The words of a chunk of a tile for lane `lane`, of a half of it (32 inputs), become those of products whose inputs
// are in order.
struct Exchange {
  bool is_high, is_odd;
  uint32_t send, first, second;  // selectors of bytes

  __device__ __forceinline__ Exchange() {
    is_high = threadIdx.x & 2, is_odd = threadIdx.x & 1;
    send = is_odd ? 0x6420 : 0x7531;
    first = is_odd ? 0x3514 : 0x5240;
    second = is_odd ? 0x3716 : 0x7260;
  }

  // Of 4 bits: two words, each with four inputs of two rows.
  __device__ __forceinline__ void operator()(uint32_t& w0, uint32_t& w1) const {
    const uint32_t other = __shfl_xor_sync(kFullWarp, is_high ? w0 : w1, 2);
    const uint32_t low = is_high ? other : w0, high = is_high ? w1 : other;
    const uint32_t pairs = __shfl_xor_sync(kFullWarp, __byte_perm(low, high, send), 1);
    w0 = __byte_perm(low, pairs, first);
    w1 = __byte_perm(high, pairs, second);
  }

  // Of 8 bits: four words, each with two inputs of two rows.
  __device__ __forceinline__ void operator()(uint4& w) const {
    const uint32_t x = __shfl_xor_sync(kFullWarp, is_high ? w.x : w.z, 2);
    const uint32_t y = __shfl_xor_sync(kFullWarp, is_high ? w.y : w.w, 2);
    const uint32_t low[2] = {is_high ? x : w.x, is_high ? y : w.y};
    const uint32_t high[2] = {is_high ? w.z : x, is_high ? w.w : y};
    const uint32_t a = __shfl_xor_sync(kFullWarp, is_odd ? low[0] : low[1], 1);
    const uint32_t b = __shfl_xor_sync(kFullWarp, is_odd ? high[0] : high[1], 1);
    w = make_uint4(is_odd ? a : low[0], is_odd ? low[1] : a, is_odd ? b : high[0], is_odd ? high[1] : b);
  }
};

template <typename T, typename S>
__device__ __forceinline__ void quantised_many(const QuantisedManyParams& p) {
  constexpr int kTokens = S::kTokens, kUnits = S::kUnits, kStages = S::kStages, kSums = kTokens / 2;
  constexpr bool kIsInt4 = S::kCode == Code::kInt4;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + S::kBarriers, empty = full + kStages * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int split = cluster_rank(), num_splits = cluster_size();
  const int begin = split * p.num_chunks / num_splits, end = (split + 1) * p.num_chunks / num_splits;
  const int block_tile = blockIdx.x / num_splits * S::kTiles, first_token = blockIdx.y * kTokens;
  const auto group_of = [&](int chunk, int unit) -> int { return __umulhi(2 * (chunk * kUnits + unit), p.group_factor); };

  if (threadIdx.x == S::kWarps * 32) {
    tensor_map_prefetch(&p.codes);
    tensor_map_prefetch(&p.x);
    tensor_map_prefetch(&p.scales);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
      mbarrier_init(full + slot * 8, 2);
      mbarrier_init(empty + slot * 8, S::kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const bool is_f32 = scale_type == ScaleType::kF32;
  if (warp >= S::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kOtherRegisters));
    if (threadIdx.x == S::kWarps * 32) {
      const uint64_t first = l2_evict_first(), last = l2_evict_last();
      // Codes are read by all groups of tokens.
      const uint64_t policy = gridDim.y > 1 ? l2_evict_normal() : first;
      const uint32_t scale_bytes = is_f32 ? S::kScaleBytes : S::kScaleBytes / 2;
      const uint32_t weight_bytes = S::kCodeBytes + kUnits * (scale_bytes + (p.has_zeros ? S::kZeroBytes : 0));
      const int num_boxes = min((p.num_tokens - first_token + kManyTokenBox - 1) / kManyTokenBox, kTokens / kManyTokenBox);
      const auto load_weights = [&](int chunk, int slot) {
        const uint32_t barrier = full + slot * 8, target = ring + slot * S::kStageBytes;
        mbarrier_arrive_expect(barrier, weight_bytes);
        tma_load_2d(target + S::kCodes, &p.codes, barrier, chunk * static_cast<int>(S::kChunkBytes / 4), block_tile, policy);
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int group = group_of(chunk, unit);
          tma_load_3d(target + S::kScales + unit * S::kScaleBytes, &p.scales, barrier, 0, group, block_tile, policy);
          if (p.has_zeros) {
            tma_load_3d(target + S::kZeros + unit * S::kZeroPitch, &p.zeros, barrier, 0, group, block_tile, policy);
          }
        }
      };
      const auto load_tokens = [&](int chunk, int slot) {
        const uint32_t barrier = full + slot * 8, target = ring + slot * S::kStageBytes;
        mbarrier_arrive_expect(barrier, num_boxes * (kManyTokenBox * 128));
        for (int box = 0; box < num_boxes; ++box) {
          tma_load_2d(target + box * (kManyTokenBox * 128), &p.x, barrier, chunk * 64, first_token + box * kManyTokenBox,
                      last);
        }
      };
      const int count = end - begin, ahead = min(count, kStages);
      for (int i = 0; i < ahead; ++i) load_weights(begin + i, i);
      dependency_launch();
      dependency_wait();
      for (int i = 0; i < ahead; ++i) load_tokens(begin + i, i);
      int slot = 0;
      uint32_t parity = 0;
      for (int i = ahead; i < count; ++i) {
        mbarrier_wait(empty + slot * 8, parity);
        load_weights(begin + i, slot);
        load_tokens(begin + i, slot);
        if (++slot == kStages) slot = 0, parity ^= 1;
      }
    }
    // The barriers of the sums; these warps do not join the others, which have more registers.
    if (num_splits == 1) return;
    __syncthreads();
    meet(num_splits);
    meet(num_splits);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    constexpr uint64_t kFixed = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    const Exchange exchange;
    const int row = lane >> 2;
    // A piece is what has one scale: a chunk, or either half of one. Its numbers are made while the piece before is
    // multiplied, in other registers; the branches in between are such that ptxas (13.0) sees no product under way
    // in any of them, since otherwise it waits for each.
    constexpr int kSteps = 4 / kUnits;
    uint32_t numbers[2][kSteps][4];
    float2 scales[2];
    float products[kSums], total[kSums] = {};
    const auto decode = [&](int slot, uint32_t parity, int unit, uint32_t (&a)[kSteps][4], float2& scale) {
      mbarrier_wait(full + slot * 8, parity);
      const uint32_t stage = ring + slot * S::kStageBytes;
      const uint32_t codes = stage + S::kCodes + warp * S::kChunkBytes + lane * 16;
      const uint32_t pairs = stage + S::kScales + unit * S::kScaleBytes;
      scale = scale_pair(shared_pair(pairs + ((warp * 8 + row) << (is_f32 ? 3 : 2)), is_f32), scale_type);
      uint32_t zeros = kIsInt4 ? 0x0808 : 0x8080;
      if (S::kCode != Code::kFp8 && p.has_zeros) {
        zeros = shared_half(stage + S::kZeros + unit * S::kZeroPitch + warp * 16 + row * 2);
      }
      const Decoder<T, S::kCode> decoder(zeros, p.has_zeros);
      uint4 words;
      if constexpr (kIsInt4) words = shared_words(codes);
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        const int half = unit + i / 2;
        if constexpr (kIsInt4) {
          uint32_t w0 = half ? words.z : words.x, w1 = half ? words.w : words.y;
          exchange(w0, w1);
          decoder.decode(w0, a[i]);
          decoder.decode(w1, a[i + 1]);
        } else {
          words = shared_words(codes + half * 512);
          exchange(words);
          decoder.decode(words.x, words.y, a[i]);
          decoder.decode(words.z, words.w, a[i + 1]);
        }
      }
    };
    const auto issue = [&](int slot, int unit, const uint32_t (&a)[kSteps][4]) {
      const uint64_t tokens = ((ring + slot * S::kStageBytes) & 0x3ffff) >> 4 | kFixed;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma_registers<T, kTokens>(products, a[step], tokens + (unit * kSteps + step) * 2, step > 0);
      }
      wgmma_commit();
    };
    const auto finish = [&](float2 scale) {
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        asm volatile("" : "+f"(products[i])::"memory");  // not before the wait
        total[i] = fmaf(products[i], i & 2 ? scale.y : scale.x, total[i]);
      }
    };
    const auto release = [&](int slot) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + slot * 8);
    };
    int slot = 0;
    uint32_t parity = 0;
    // The stage of the chunk after `chunk`; behind the last one that itself.
    const auto next = [&](int chunk, int slot, uint32_t parity, int& next_slot, uint32_t& next_parity) {
      const bool is_last = chunk + 1 >= end, wraps = slot + 1 == kStages;
      next_slot = is_last ? slot : wraps ? 0 : slot + 1;
      next_parity = is_last ? parity : wraps ? parity ^ 1 : parity;
    };
    if (begin < end) decode(slot, parity, 0, numbers[0], scales[0]);
    if constexpr (kUnits == 1) {
      for (int chunk = begin; chunk < end; chunk += 2) {
        int other;
        uint32_t other_parity;
        next(chunk, slot, parity, other, other_parity);
        issue(slot, 0, numbers[0]);
        decode(other, other_parity, 0, numbers[1], scales[1]);
        finish(scales[0]);
        release(slot);
        if (chunk + 1 >= end) break;
        next(chunk + 1, other, other_parity, slot, parity);
        issue(other, 0, numbers[1]);
        decode(slot, parity, 0, numbers[0], scales[0]);
        finish(scales[1]);
        release(other);
      }
    } else {
      for (int chunk = begin; chunk < end; ++chunk) {
        issue(slot, 0, numbers[0]);
        decode(slot, parity, 1, numbers[1], scales[1]);
        finish(scales[0]);
        int other;
        uint32_t other_parity;
        next(chunk, slot, parity, other, other_parity);
        issue(slot, 1, numbers[1]);
        decode(other, other_parity, 0, numbers[0], scales[0]);
        finish(scales[1]);
        release(slot);
        slot = other, parity = other_parity;
      }
    }
    dependency_wait();
    const auto with_epilogue = [&](auto store) {
      switch (static_cast<Epilogue>(p.epilogue)) {
        case Epilogue::kPlain: store(EpilogueTag<Epilogue::kPlain>()); break;
        case Epilogue::kResidual: store(EpilogueTag<Epilogue::kResidual>()); break;
        case Epilogue::kSwiglu: store(EpilogueTag<Epilogue::kSwiglu>()); break;
      }
    };
    constexpr int kFragments = kTokens / 8;
    if (num_splits == 1) {
      with_epilogue([&](auto epilogue) {
#pragma unroll
        for (int j = 0; j < kFragments; ++j) {
          const Fragment<T, decltype(epilogue)::value> fragment(p, (block_tile + warp) * p.tile_rows, 0,
                                                                first_token + j * 8);
          const float* v = total + j * 4;
          fragment.store(make_float4(v[0], v[1], v[2], v[3]), fragment.load());
        }
      });
      return;
    }
    // The sums take the place of the ring. No copy is under way: every stage has been waited for.
    float4* staging = reinterpret_cast<float4*>(shared);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const float* v = total + j * 4;
      staging[(warp * kFragments + j) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
    meet(num_splits);
    with_epilogue([&](auto epilogue) {
      store_quantised<T, decltype(epilogue)::value, kFragments, S::kWarps>(p, staging, block_tile, first_token,
                                                                          S::kTiles * kFragments, 1, split, num_splits);
    });
    meet(num_splits);
  }
}

}  // namespace xserv
#endif
