// Linear layers with quantised weights (quantised.cuh) for more than 16 tokens on Hopper.
//
// A block has 64 rows of W for each of its groups of four warps, all with the same tokens, whose x
// lies in shared memory once for all of them. One warp copies stages of 64 inputs into a ring: the
// codes of all tiles as they are, x, and the scales and zeros of the groups. The others take their
// codes from there, make numbers of T of them in registers, exactly (decode.cuh), and pass these to
// wgmma as the operand A, whose rows a warp has as mma.m16n8k16 has them. The products of a group
// are summed in f32 of their own and multiplied by the scale of their row only then, so that
// nothing but x has been rounded. While a chunk is multiplied the next one is decoded.
//
// wgmma takes the inputs of x in the order of memory, where a lane's codes in a tile belong to
// eight neighbouring inputs of each half of the chunk (src/ops/quantised/tiles.rs); the four lanes
// of a row exchange them, as codes.
//
// The blocks of a cluster share the tile and divide its inputs; their sums are added in the order
// of the inputs, through shared memory. Tokens past the last one are not read: what the ring has in
// their place goes into sums that are not stored.
#include <type_traits>

#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/tma_cluster.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_n.cuh"
#include "ops/linear/quantised.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace xserv {

struct QuantisedManyParams {
  TensorMap x;       // boxes of token_box tokens and 64 inputs, swizzled
  TensorMap codes;   // [num_tiles, bytes of a tile]; boxes of the tiles of a block and a stage
  TensorMap scales;  // [num_tiles, num_groups, 16]; boxes of the tiles of a block and a group
  TensorMap zeros;   // likewise, if there are any
  void* out;         // residual: read and written
  const void* bias;  // plain only
  int64_t ldo;       // elements from token to token of out
  int num_tokens;
  int n;              // columns of out
  int num_stages;     // of a tile
  int group_pieces;   // the pieces of a group, of which a stage has one or several
  int sum_pieces;     // those that are summed by the tensor cores, which truncate: all or some of a group's
  int unit_shift;     // log2 of the groups, or of the parts of them, whose scales are copied for a stage
  int token_box;
  int scale_type;     // a ScaleType
  int epilogue;       // an Epilogue
  int has_zeros;
  int first_tile;     // of a launch, which may have some of a weight's tiles
  int padding[15];
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_QuantisedManyParams;

constexpr int kStageInputs = 128;

// kPieceInputs: those of a stage that are multiplied at a time; kGroups: of four warps.
template <Code kCode_, int kPieceInputs_, int kTokens_, int kGroups_>
struct Many {
  static constexpr Code kCode = kCode_;
  static constexpr int kPieceInputs = kPieceInputs_, kTokens = kTokens_, kGroups = kGroups_;
  static constexpr int kPieces = kStageInputs / kPieceInputs, kUnits = kPieceInputs == 64 ? 2 : 4;
  static constexpr int kWarps = kGroups * 4, kTiles = kWarps, kThreads = (kWarps + 4) * 32;
  // A group of four warps copies and needs few registers; the others divide what that gives back.
  static constexpr int kOtherRegisters = kGroups > 2 ? 32 : kTokens == 128 ? 24 : 40;
  static constexpr int kRegisters =
      (65536 / kThreads / 8 * 8 * (kGroups + 1) - kOtherRegisters) / kGroups / 8 * 8;
  static constexpr uint32_t kChunkBytes = kCode == Code::kInt4 ? 512 : 1024;
  static constexpr uint32_t kBoxBytes = kTokens * 128, kCodeBytes = kTiles * kChunkBytes * 2;
  static constexpr uint32_t kScaleBytes = kTiles * 64, kZeroBytes = kTiles * 16;  // of a unit, at most
  static constexpr uint32_t kZeroPitch = (kZeroBytes + 127) / 128 * 128;
  static constexpr uint32_t kCodes = 2 * kBoxBytes, kScales = kCodes + kCodeBytes;
  static constexpr uint32_t kZeros = kScales + kUnits * kScaleBytes;
  static constexpr uint32_t kStageBytes = (kZeros + kUnits * kZeroPitch + 1023) / 1024 * 1024;
  static constexpr int kMostStages = (226 * 1024) / kStageBytes, kStages = kMostStages < 10 ? kMostStages : 10;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes, kSumBytes = kTiles * kTokens * 64;
  static constexpr uint32_t kBarriers = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 16;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The words of a chunk of a tile for lane `lane`, of a half of it (32 inputs), become those of
// products whose inputs are in order.
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
  __device__ __forceinline__ void operator()(uint32_t* w) const {
    const uint32_t x = __shfl_xor_sync(kFullWarp, is_high ? w[0] : w[2], 2);
    const uint32_t y = __shfl_xor_sync(kFullWarp, is_high ? w[1] : w[3], 2);
    const uint32_t low[2] = {is_high ? x : w[0], is_high ? y : w[1]};
    const uint32_t high[2] = {is_high ? w[2] : x, is_high ? w[3] : y};
    const uint32_t a = __shfl_xor_sync(kFullWarp, is_odd ? low[0] : low[1], 1);
    const uint32_t b = __shfl_xor_sync(kFullWarp, is_odd ? high[0] : high[1], 1);
    w[0] = is_odd ? a : low[0], w[1] = is_odd ? low[1] : a;
    w[2] = is_odd ? b : high[0], w[3] = is_odd ? high[1] : b;
  }
};

// The zeros of codes without any of their own, and how codes become the operand: numbers that are
// kFirstFactor or kSecondFactor times too small for the two rows of a lane.
template <Code kCode>
constexpr uint32_t kMiddleZeros = kCode == Code::kInt4 ? 0x0808 : 0x8080;

template <typename T, Code kCode>
struct ManyDecoder : Decoder<T, kCode> {
  static constexpr float kFirstFactor = 1.0f, kSecondFactor = 1.0f;
  using Decoder<T, kCode>::Decoder;
};

// A number of T of which no bits but those of the mantissa and the last one before it are set is
// these bits times a power of 2, be it subnormal or not. So a code need not be moved, and one
// instruction brings it into range and subtracts the zero. kScale is 2^127 or 2^15, by which the
// last bit becomes 1 / kBit.
template <typename T>
struct SmallNumbers {
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static constexpr float kBit = kIsHalf ? 512.0f : 64.0f;
  static constexpr uint32_t kScale = kIsHalf ? 0x78007800u : 0x7f007f00u;

  __device__ __forceinline__ static uint32_t less(uint32_t codes, uint32_t zero) {
    return multiply_add_pairs(codes, kScale, zero, T());
  }
  __device__ __forceinline__ static uint32_t negative(uint32_t codes) {
    return multiply_pairs(codes, kScale ^ 0x80008000u, T());
  }
};

// The codes of the second row are those before the last four bits, and 16 times as large.
template <typename T>
struct ManyDecoder<T, Code::kInt4> {
  using Numbers = SmallNumbers<T>;
  static constexpr float kFirstFactor = Numbers::kBit, kSecondFactor = Numbers::kBit / 16;
  uint32_t zeros[2];

  __device__ __forceinline__ ManyDecoder(uint32_t bytes, bool)
      : zeros{Numbers::negative(__byte_perm(bytes, 0, 0x4040)), Numbers::negative(__byte_perm(bytes, 0, 0x4141) << 4)} {}

  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t high = word >> 8;
    a[0] = Numbers::less(word & 0x000f000fu, zeros[0]);
    a[1] = Numbers::less(word & 0x00f000f0u, zeros[1]);
    a[2] = Numbers::less(high & 0x000f000fu, zeros[0]);
    a[3] = Numbers::less(high & 0x00f000f0u, zeros[1]);
  }
};

template <typename T>
struct ManyDecoder<T, Code::kInt8> {
  using Numbers = SmallNumbers<T>;
  static constexpr float kFirstFactor = Numbers::kBit, kSecondFactor = Numbers::kBit;
  uint32_t zeros[2];

  __device__ __forceinline__ ManyDecoder(uint32_t bytes, bool)
      : zeros{Numbers::negative(__byte_perm(bytes, 0, 0x4040)), Numbers::negative(__byte_perm(bytes, 0, 0x4141))} {}

  __device__ __forceinline__ void decode(uint32_t first, uint32_t second, uint32_t (&a)[4]) const {
    a[0] = Numbers::less(first & 0x00ff00ffu, zeros[0]);
    a[1] = Numbers::less((first >> 8) & 0x00ff00ffu, zeros[1]);
    a[2] = Numbers::less(second & 0x00ff00ffu, zeros[0]);
    a[3] = Numbers::less((second >> 8) & 0x00ff00ffu, zeros[1]);
  }
};

template <typename T, typename S>
__device__ __forceinline__ void quantised_many(const QuantisedManyParams& p) {
  constexpr int kTokens = S::kTokens, kStages = S::kStages, kSums = kTokens / 2;
  constexpr bool kIsInt4 = S::kCode == Code::kInt4;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t ring = shared_address(shared), full = ring + S::kBarriers, empty = full + kStages * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int split = cluster_rank(), num_splits = cluster_size();
  const int begin = split * p.num_stages / num_splits, end = (split + 1) * p.num_stages / num_splits;
  const int block_tile = p.first_tile + blockIdx.x / num_splits * S::kTiles, first_token = blockIdx.y * kTokens;

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
    // One thread copies weights and another one x.
    const bool copies_weights = warp == S::kWarps;
    if (lane == 0 && warp < S::kWarps + 2) {
      // Codes are read again by other groups of tokens.
      const uint64_t policy = !copies_weights ? l2_evict_last() : gridDim.y > 1 ? l2_evict_normal() : l2_evict_first();
      const int num_units = 1 << p.unit_shift;
      const uint32_t scale_bytes = is_f32 ? S::kScaleBytes : S::kScaleBytes / 2;
      const uint32_t weight_bytes = S::kCodeBytes + num_units * (scale_bytes + (p.has_zeros ? S::kZeroBytes : 0));
      const uint32_t token_bytes = p.token_box * 256;
      if (!copies_weights) dependency_wait();
      int slot = 0;
      uint32_t parity = 1;  // of slots that were never filled
      for (int stage = begin; stage < end; ++stage) {
        const uint32_t barrier = full + slot * 8, target = ring + slot * S::kStageBytes;
        mbarrier_wait(empty + slot * 8, parity);
        if (copies_weights) {
          mbarrier_arrive_expect(barrier, weight_bytes);
          tma_load_2d(target + S::kCodes, &p.codes, barrier, stage * 256, block_tile, policy);
          for (int unit = 0; unit < num_units; ++unit) {
            const int group = (stage * S::kPieces + unit * (S::kPieces >> p.unit_shift)) / p.group_pieces;
            tma_load_3d(target + S::kScales + unit * S::kScaleBytes, &p.scales, barrier, 0, group, block_tile, policy);
            if (p.has_zeros) {
              tma_load_3d(target + S::kZeros + unit * S::kZeroPitch, &p.zeros, barrier, 0, group, block_tile, policy);
            }
          }
          if (stage + 1 == min(end, begin + kStages)) dependency_launch();
        } else {
          mbarrier_arrive_expect(barrier, token_bytes);
          tma_load_2d(target, &p.x, barrier, stage * kStageInputs, first_token, policy);
          tma_load_2d(target + S::kBoxBytes, &p.x, barrier, stage * kStageInputs + 64, first_token, policy);
        }
        if (++slot == kStages) slot = 0, parity ^= 1;
      }
    }
    // The meetings of the cluster; these warps do not join the others, which have more registers.
    if (num_splits == 1) return;
    meet(num_splits);
    meet(num_splits);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    constexpr uint64_t kFixed = 1ull << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
    const Exchange exchange;
    const int row = lane >> 2;
    // While a piece is multiplied, the numbers of the next one are made in other registers, and
    // then the codes of the one after that are fetched. (ptxas, 13.0, moves what follows the loop
    // of a barrier past the wait for the products, where nothing is multiplied; and it waits for
    // each product where one is under way in a branch.)
    constexpr int kPieces = S::kPieces, kSteps = S::kPieceInputs / 16, kWords = kIsInt4 ? kSteps : 2 * kSteps;
    constexpr int kPieceShift = kPieces == 2 ? 1 : 2;
    const int num_pieces = (end - begin) * kPieces;
    const bool has_units = p.unit_shift > 0;
    uint32_t numbers[2][kSteps][4], words[kWords];
    uint2 scale, next_scale, fetched_scale;  // as they are stored
    uint32_t zeros = kMiddleZeros<S::kCode>;
    float products[kSums], total[kSums] = {};
    uint32_t fetched_stage = ring, fetched_barrier = full, fetched_parity = 0, fetched_place;
    int fetched_turn = 0;
    const uint32_t codes = S::kCodes + warp * 2 * S::kChunkBytes + lane * 16;
    const uint32_t pairs = S::kScales + ((warp * 8 + row) << (is_f32 ? 3 : 2));
    // Brings the codes, the scales and the zeros of a piece, and where its x lies. Past the last
    // piece it stays in the last stage. is_second: of the two pieces of a turn of the loop.
    const auto fetch = [&](bool is_second) {
      if (!is_second) mbarrier_wait(fetched_barrier, fetched_parity);
      const int chunk = kPieces == 2 ? is_second : fetched_turn & 1, half = kPieces == 2 ? 0 : is_second;
      fetched_place = fetched_stage + chunk * S::kBoxBytes + half * 64;
      if (!is_second || has_units) {
        const int unit = (kPieces == 2 ? is_second : (chunk * 2 + half)) >> (kPieceShift - p.unit_shift);
        fetched_scale = shared_pair(fetched_stage + pairs + unit * S::kScaleBytes, is_f32);
        if (!is_float(S::kCode) && p.has_zeros) {
          zeros = shared_half(fetched_stage + S::kZeros + unit * S::kZeroPitch + warp * 16 + row * 2);
        }
      }
      const uint32_t source = fetched_stage + codes + chunk * S::kChunkBytes;
      const auto keep = [&](uint4 v, int place) {
        words[place] = v.x, words[place + 1] = v.y, words[place + 2] = v.z, words[place + 3] = v.w;
      };
      if constexpr (kWords == 2) {
        const uint2 v = shared_pair(source + half * 8, true);
        words[0] = v.x, words[1] = v.y;
      } else {
        keep(shared_words(source + half * 512), 0);
        if constexpr (kWords == 8) keep(shared_words(source + 512), 4);
      }
      if (is_second && fetched_turn + 1 < num_pieces / 2 && (kPieces == 2 || (fetched_turn & 1))) {
        fetched_stage += S::kStageBytes, fetched_barrier += 8;
        if (fetched_barrier == empty) fetched_stage = ring, fetched_barrier = full, fetched_parity ^= 1;
      }
      if (is_second) ++fetched_turn;
    };
    const auto decode = [&](uint32_t (&a)[kSteps][4]) {
      const ManyDecoder<T, S::kCode> decoder(zeros, p.has_zeros);
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        if constexpr (kIsInt4) {
          exchange(words[i], words[i + 1]);
          decoder.decode(words[i], a[i]);
          decoder.decode(words[i + 1], a[i + 1]);
        } else {
          uint32_t* w = words + i * 2;
          exchange(w);
          decoder.decode(w[0], w[1], a[i]);
          decoder.decode(w[2], w[3], a[i + 1]);
        }
      }
    };
    bool is_fresh = true;
    const auto issue = [&](uint32_t place, const uint32_t (&a)[kSteps][4]) {
      const uint64_t tokens = (place & 0x3ffff) >> 4 | kFixed;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma_registers<T, kTokens>(products, a[step], tokens + step * 2, step > 0 || !is_fresh);
      }
      wgmma_commit();
    };
    // The pieces of a sum that are still to come, the one at hand included.
    int left = p.sum_pieces - begin * kPieces % p.sum_pieces;
    const auto finish = [&](int piece) {
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(products[i])::"memory");  // not before the wait
      is_fresh = --left == 0 || piece + 1 == num_pieces;
      if (is_fresh) {
        left = p.sum_pieces;
        float2 factor = scale_pair(scale, scale_type);
        factor.x *= ManyDecoder<T, S::kCode>::kFirstFactor, factor.y *= ManyDecoder<T, S::kCode>::kSecondFactor;
#pragma unroll
        for (int i = 0; i < kSums; ++i) total[i] = fmaf(products[i], i & 2 ? factor.y : factor.x, total[i]);
      }
      scale = next_scale, next_scale = fetched_scale;
    };
    if (begin < end) {
      fetch(false);
      uint32_t place = fetched_place;
      scale = fetched_scale;
      decode(numbers[0]);
      fetch(true);
      uint32_t next_place = fetched_place;
      next_scale = fetched_scale;
      uint32_t done = empty;
      for (int piece = 0; piece < num_pieces; piece += 2) {
        issue(place, numbers[0]);
        decode(numbers[1]);
        fetch(false);
        finish(piece);
        place = fetched_place;
        issue(next_place, numbers[1]);
        decode(numbers[0]);
        fetch(true);
        finish(piece + 1);
        next_place = fetched_place;
        if (kPieces == 2 || (piece & 2)) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(done);
          done += 8;
          if (done == empty + kStages * 8) done = empty;
        }
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
          const Fragment<T, decltype(epilogue)::value, false> fragment(p, (block_tile + warp) * p.tile_rows, 0,
                                                                       first_token + j * 8);
          const float* v = total + j * 4;
          fragment.store(make_float4(v[0], v[1], v[2], v[3]), fragment.load());
        }
      });
      return;
    }
    // The sums take the place of the ring. No copy is under way: every stage has been waited for.
    float4* staging = reinterpret_cast<float4*>(shared);
    named_sync(1, S::kWarps * 32);
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const float* v = total + j * 4;
      staging[(warp * kFragments + j) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
    meet(num_splits);
    with_epilogue([&](auto epilogue) {
      store_cluster<T, decltype(epilogue)::value, kFragments, S::kWarps>(
          p, staging, block_tile, first_token, S::kTiles * kFragments, split, num_splits);
    });
    meet(num_splits);
  }
}

}  // namespace xserv

// xserv_linear_quantised_many_<code>_<inputs of a piece>_<tokens>x<groups of four warps>_<dtype>
#define XSERV_MANY(CODE_NAME, CODE, INPUTS, TOKENS, GROUPS, SUFFIX, T)                                              \
  extern "C" __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)                                             \
      xserv_linear_quantised_many_##CODE_NAME##_##INPUTS##_##TOKENS##x##GROUPS##_##SUFFIX(                        \
          const __grid_constant__ xserv::QuantisedManyParams params) {                                            \
    xserv::quantised_many<T, xserv::Many<xserv::Code::CODE, INPUTS, TOKENS, GROUPS>>(params);                     \
  }
#define XSERV_MANY_ALL(CODE_NAME, CODE, SUFFIX, T)            \
  XSERV_MANY(CODE_NAME, CODE, 64, 32, 4, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 64, 32, 3, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 64, 32, 2, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 64, 64, 3, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 64, 64, 2, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 64, 96, 2, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 64, 128, 2, SUFFIX, T)          \
  XSERV_MANY(CODE_NAME, CODE, 32, 32, 4, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 32, 64, 3, SUFFIX, T)           \
  XSERV_MANY(CODE_NAME, CODE, 32, 128, 2, SUFFIX, T)
#define XSERV_MANY_CODES(SUFFIX, T)                     \
  XSERV_CODES_OF_4_BITS(XSERV_MANY_ALL, SUFFIX, T)      \
  XSERV_CODES_OF_8_BITS(XSERV_MANY_ALL, SUFFIX, T)
XSERV_MANY_CODES(f16, __half)
XSERV_MANY_CODES(bf16, __nv_bfloat16)
#endif
