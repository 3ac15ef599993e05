// Linear layers with weights of 4 or 8 bits (quantised.cuh) for one token on Hopper, which may
// normalise it first.
//
// One token waits for instructions rather than for memory, and this kernel has the fewest. Integers
// are multiplied as the bytes that they are: x is made integers of 16 bits (integer_inputs.cuh),
// whose high and low bytes are two columns of one product of bytes, so that
//   sum_k x[k] (code[k] - zero) = 2^e (256 sum_k high[k] code[k] + sum_k low[k] code[k] - zero sum_k q[k])
// is exact but for the rounding of x to q. Of a word of 4-bit codes two instructions take those of
// the lane's two rows; the second row's stay where they are, as 16 times their value.
//
// Weights of FP8 and x (fp8_inputs.cuh) are multiplied as numbers of f16. The products of 128
// inputs are summed by the tensor cores, multiplied by their scales, and added up in f32. Where x
// becomes FP8 too, fp8.cu is faster.
//
// The warps of a block, and of a cluster of two where there are few tiles, share the inputs of
// every tile. A warp makes the inputs that it multiplies, so that without a norm no thread waits
// for another before the sums. The tiles of a block are one stream of bulk copies; their sums are
// added up by one warp each, in turn, while the others go on.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "common/bulk_copy.cuh"
#include "common/e4m3_pair.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/pdl.cuh"
#include "ops/linear/fp8_inputs.cuh"
#include "ops/linear/integer_inputs.cuh"

namespace xserv {

struct QuantisedOneParams {
  const void* x;            // [k]
  const void* norm_weight;  // [k], or null: x is not normalised
  const void* codes;
  const void* scales;
  const void* zeros;  // null: all are the middle of the codes
  void* out;          // [n]; residual: read and written
  const void* bias;   // plain only
  int64_t ldo;        // not used
  int num_tokens;     // 1
  int n;
  int k;              // a multiple of 8
  int num_tiles;
  int num_chunks;     // of a tile
  int num_groups;     // of a row
  uint32_t group_factor;  // the group of unit u is (2 * u * group_factor) >> 32; a stage has kUnits units
  int scale_type;         // a ScaleType
  int epilogue;           // an Epilogue
  int num_slots;          // of a warp's ring
  int slot_stages;        // the most stages of a slot
  int is_group_a_unit;    // whether every unit has a group of its own
  float eps;
  static constexpr int tile_rows = 16;
};
XSERV_LAYOUT_QuantisedOneParams;

// The sums of so many tiles are under way.
constexpr int kTilesUnderWay = kQuantisedWarps;

// Adds the products of the first num_blocks of up to kBlocks times 32 inputs: codes of FP8 and
// numbers of f16, at the places of a lane.
template <int kBlocks>
__device__ __forceinline__ void multiply_floats(float (&products)[4], uint32_t codes, uint32_t numbers, int num_blocks) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (block >= num_blocks) continue;
    const uint4 v = shared_words(codes + block * 512);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint32_t a[2][4];  // of two products
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      e4m3_to_f16(__byte_perm(words[i], 0, 0x3120), a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
    }
    const uint4 b = shared_words(numbers + block * 64);
    mma_m16n8k16<__half>(products, a[0], b.x, b.y);
    mma_m16n8k16<__half>(products, a[1], b.z, b.w);
  }
}

// kUnits: scales of a stage and row.
template <typename T, Code kCode, int kUnits>
__device__ __forceinline__ void quantised_one(const QuantisedOneParams& p) {
  constexpr bool kIsInt4 = kCode == Code::kInt4, kIsFloat = is_float(kCode);
  static_assert(!kIsFloat || kUnits == 1, "128 inputs share the power of two of x");
  using Inputs = std::conditional_t<kIsFloat, Fp8Inputs<T>, IntegerInputs<T, kUnits, kIsInt4>>;
  constexpr int kStageInputs = 128, kStageChunks = kStageInputs / 64, kBlocks = kStageInputs / 32;
  constexpr int kStageBytes = kStageInputs * 16 * (kIsInt4 ? 4 : 8) / 8, kWords = kStageBytes / 512;
  constexpr int kThreads = kQuantisedWarps * 32;
  extern __shared__ __align__(16) float4 staging[];
  __shared__ __align__(16) float2 partials[kTilesUnderWay][kQuantisedWarps][32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
  const int split = split_rank(), num_splits = split_count();
  const int part = split * kQuantisedWarps + warp, num_parts = num_splits * kQuantisedWarps;
  const int num_stages = (p.num_chunks + kStageChunks - 1) / kStageChunks;
  const int begin = part * num_stages / num_parts, end = (part + 1) * num_stages / num_parts;
  const int team = blockIdx.x / num_splits, num_teams = gridDim.x / num_splits;
  const int first_tile = static_cast<int>(static_cast<int64_t>(p.num_tiles) * team / num_teams);
  const int end_tile = static_cast<int>(static_cast<int64_t>(p.num_tiles) * (team + 1) / num_teams);
  const auto scale_type = static_cast<ScaleType>(p.scale_type);
  const bool is_f32 = scale_type == ScaleType::kF32, has_zeros = p.zeros != nullptr;
  const uint64_t policy = weight_policy();

  // Shared memory has the barriers of all rings, the rings, what is made of x, and its sums or
  // scales. A slot of a ring has the codes of its stages, then the scales and the zeros of their
  // units.
  const int group_bytes = is_f32 ? 64 : 32;
  const int scales_at = p.slot_stages * kStageBytes;
  const int zeros_at = scales_at + p.slot_stages * kUnits * group_bytes;
  const int slot_bytes = zeros_at + (has_zeros ? p.slot_stages * kUnits * 16 : 0);
  const uint32_t all_barriers = shared_address(staging), barriers = all_barriers + warp * p.num_slots * 8;
  const uint32_t all_rings = all_barriers + ((kQuantisedWarps * p.num_slots * 8 + 15) & ~15);
  const uint32_t ring = all_rings + warp * p.num_slots * slot_bytes;
  const uint32_t x_bytes = all_rings + kQuantisedWarps * p.num_slots * slot_bytes;
  const uint32_t x_sums = x_bytes + num_stages * (kStageInputs * 2);
  if (lane == 0) {
    for (int i = 0; i < p.num_slots; ++i) mbarrier_init(barriers + i * 8, 1);
    mbarrier_init_fence();
  }
  __syncwarp();

  // What is fetched next.
  int next_tile = begin < end ? first_tile : end_tile, next_stage = begin;
  const int64_t tile_bytes = static_cast<int64_t>(p.num_chunks) * (kStageBytes / kStageChunks);
  const auto fetch = [&](int slot) {
    if (next_tile >= end_tile) return;
    const int stop = min(next_stage + p.slot_stages, end);
    if (lane == 0) {
      const uint32_t target = ring + slot * slot_bytes, barrier = barriers + slot * 8;
      // The last stage of a row may have a single chunk.
      const int offset = next_stage * kStageBytes;
      const int bytes = min(stop * kStageBytes, static_cast<int>(tile_bytes)) - offset;
      const int first_unit = next_stage * kUnits, num_units = (stop - next_stage) * kUnits;
      mbarrier_arrive_expect(barrier, bytes + num_units * (group_bytes + (has_zeros ? 16 : 0)));
      bulk_copy(target, static_cast<const char*>(p.codes) + next_tile * tile_bytes + offset, bytes, barrier, policy);
      // Groups that are units lie beside each other; units past the last group have its scale.
      const bool are_beside = p.is_group_a_unit && first_unit + num_units <= p.num_groups;
      const int step = are_beside ? num_units : 1;
      for (int u = 0; u < num_units; u += step) {
        const uint32_t group = min(__umulhi(2 * (first_unit + u), p.group_factor), p.num_groups - 1u);
        const int64_t place = static_cast<int64_t>(next_tile) * p.num_groups + group;
        bulk_copy(target + scales_at + u * group_bytes, static_cast<const char*>(p.scales) + place * group_bytes,
                  step * group_bytes, barrier, policy);
        if (has_zeros) {
          bulk_copy(target + zeros_at + u * 16, static_cast<const char*>(p.zeros) + place * 16, step * 16, barrier,
                    policy);
        }
      }
    }
    next_stage = stop;
    if (next_stage == end) next_stage = begin, ++next_tile;
  };
  for (int i = 0; i < p.num_slots; ++i) fetch(i);
  const Inputs inputs(p.norm_weight, p.k, begin, end, x_bytes, x_sums);
  dependency_launch();
  dependency_wait();
  inputs.make_all(p.x, p.k, p.eps, num_splits);

  // Adds up the sums of a tile of all warps of the cluster, and stores the results.
  const auto store = [&](int tile, int place) {
    const auto with = [&](auto epilogue) {
      const Fragment<T, decltype(epilogue)::value> fragment(p, tile * p.tile_rows, 0, 0);
      const uint2 old = fragment.load();
      if (num_splits == 1) named_sync(1 + place, kThreads);
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (quarter == 0) {
        for (int s = 0; s < num_splits; ++s) {
#pragma unroll
          for (int w = 0; w < kQuantisedWarps; ++w) {
            const float2* own = &partials[place][w][row * 4];
            float2 v;
            if (num_splits == 1) {
              v = *own;
            } else {
              const float4 both = cluster_load(cluster_address(shared_address(own), s));
              v = make_float2(both.x, both.y);
            }
            total.x += v.x, total.z += v.y;
          }
        }
      }
      __syncwarp();
      fragment.store(total, old);
    };
    switch (static_cast<Epilogue>(p.epilogue)) {
      case Epilogue::kPlain: with(EpilogueTag<Epilogue::kPlain>()); break;
      case Epilogue::kResidual: with(EpilogueTag<Epilogue::kResidual>()); break;
      case Epilogue::kSwiglu: with(EpilogueTag<Epilogue::kSwiglu>()); break;
    }
  };

  int slot = 0;
  uint32_t parity = 0;
  for (int tile = first_tile; tile < end_tile; ++tile) {
    // Of rows `row` and `row + 8`. Only the lanes of quarter 0 have columns that mean something.
    float2 sum = make_float2(0.0f, 0.0f);
    for (int stage = begin; stage < end;) {
      const int stop = min(stage + p.slot_stages, end);
      uint32_t codes = ring + slot * slot_bytes + lane * 16;
      uint32_t scales = ring + slot * slot_bytes + scales_at + row * (is_f32 ? 8 : 4);
      uint32_t zeros = ring + slot * slot_bytes + zeros_at + row * 2;
      // Column 0 of a product of integers has the high bytes, and the others the low ones.
      uint32_t x = x_bytes + stage * (kStageInputs * 2) + (kIsFloat ? 0 : min(row, 1) * 64) + quarter * 16;
      uint32_t sums = x_sums + stage * kUnits * 8;
      mbarrier_wait(barriers + slot * 8, parity);
#pragma unroll 1
      for (; stage < stop; ++stage) {
        if constexpr (kIsFloat) {
          float products[4] = {};
          // Where the last stage has a single chunk, the place of the other has anything, also what
          // is no number.
          const int num_blocks = 2 * stage + 1 < p.num_chunks ? kBlocks : kBlocks / 2;
          multiply_floats<kBlocks>(products, codes, x, num_blocks);
          const float2 scale = scale_pair(shared_pair(scales, is_f32), scale_type);
          const float of_x = shared_float(sums);
          sum.x = fmaf(products[0], of_x * scale.x, sum.x);
          sum.y = fmaf(products[2], of_x * scale.y, sum.y);
        } else {
          uint4 words[kWords];
          const uint4 eights[2] = {shared_words(x), shared_words(x + 128)};
          // Where the last stage has a single chunk, the other's inputs are zeros, and its codes
          // may be anything.
#pragma unroll
          for (int w = 0; w < kWords; ++w) words[w] = shared_words(codes + w * 512);
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            const uint2 scale_words = shared_pair(scales + u * group_bytes, is_f32);
            const uint32_t zero = has_zeros ? shared_half(zeros + u * 16) : kIsInt4 ? 0x0808u : 0x8080u;
            const uint2 unit = shared_pair(sums + u * 8, true);
            int products[4] = {};
#pragma unroll
            for (int block = u * kBlocks / kUnits; block < (u + 1) * kBlocks / kUnits; ++block) {
              const uint4& e = eights[block / 2];
              uint32_t a[4];
              if constexpr (kIsInt4) {
                const uint4& w = words[block / 2];
                const uint32_t first = block % 2 ? w.z : w.x, second = block % 2 ? w.w : w.y;
                constexpr uint32_t kFirstRow = 0x0f0f0f0fu;
                a[0] = first & kFirstRow, a[1] = first & ~kFirstRow, a[2] = second & kFirstRow, a[3] = second & ~kFirstRow;
              } else {
                const uint4& w = words[block];
                a[0] = __byte_perm(w.x, w.y, 0x6420), a[1] = __byte_perm(w.x, w.y, 0x7531);
                a[2] = __byte_perm(w.z, w.w, 0x6420), a[3] = __byte_perm(w.z, w.w, 0x7531);
              }
              mma_m16n8k32(products, a, block % 2 ? e.z : e.x, block % 2 ? e.w : e.y);
            }
            // None of these is beyond 2^30: 128 integers of 14 bits times 16 times a code of 4 bits
            // or a code of 8.
            constexpr int kSecondRow = kIsInt4 ? 16 : 1;
            const int unit_sum = static_cast<int>(unit.x);
            const int first_zero = zero & 255, second_zero = kIsInt4 ? zero >> 4 & 0xf0 : zero >> 8;
            const float first = static_cast<float>(products[0] * 256 + products[1] - first_zero * unit_sum);
            const float second = static_cast<float>(products[2] * 256 + products[3] - second_zero * unit_sum);
            const float2 scale = scale_pair(scale_words, scale_type);
            const float down = __uint_as_float(unit.y);
            sum.x = fmaf(first * down, scale.x, sum.x);
            sum.y = fmaf(second * (down * (1.0f / kSecondRow)), scale.y, sum.y);
          }
        }
        codes += kStageBytes, x += kStageInputs * 2, sums += kUnits * 8;
        scales += kUnits * group_bytes, zeros += kUnits * 16;
      }
      __syncwarp();
      fetch(slot);
      if (++slot == p.num_slots) slot = 0, parity ^= 1;
    }
    // No warp writes here before its sums of eight tiles ago have been read: it has itself waited
    // for all warps since, among them the one that read them.
    const int place = (tile - first_tile) % kTilesUnderWay;
    partials[place][warp][lane] = sum;
    if (num_splits > 1) {
      meet(num_splits);
      if (warp == 0 && (tile - first_tile) % num_splits == split) store(tile, place);
    } else if (warp == place) {
      store(tile, place);
    } else {
      named_arrive(1 + place, kThreads);
    }
  }
  // No block leaves while another may read its sums.
  if (num_splits > 1) meet(num_splits);
}

}  // namespace xserv

// xserv_linear_quantised_one_<code>_<scales of 128 inputs>_<dtype>, for blocks of 256 threads, of
// which a multiprocessor has two.
#define XSERV_QUANTISED_ONE(CODE_NAME, CODE, UNITS, SUFFIX, T)               \
  extern "C" __global__ void __launch_bounds__(256, 2)                       \
      xserv_linear_quantised_one_##CODE_NAME##_##UNITS##_##SUFFIX(           \
          const __grid_constant__ xserv::QuantisedOneParams params) {        \
    xserv::quantised_one<T, xserv::Code::CODE, UNITS>(params);               \
  }
#define XSERV_QUANTISED_ONE_UNITS(CODE_NAME, CODE, UNITS)            \
  XSERV_QUANTISED_ONE(CODE_NAME, CODE, UNITS, f16, __half)           \
  XSERV_QUANTISED_ONE(CODE_NAME, CODE, UNITS, bf16, __nv_bfloat16)
XSERV_QUANTISED_ONE_UNITS(int4, kInt4, 1)
XSERV_QUANTISED_ONE_UNITS(int4, kInt4, 2)
XSERV_QUANTISED_ONE_UNITS(int4, kInt4, 4)
XSERV_QUANTISED_ONE_UNITS(int8, kInt8, 1)
XSERV_QUANTISED_ONE_UNITS(int8, kInt8, 2)
XSERV_QUANTISED_ONE_UNITS(int8, kInt8, 4)
XSERV_QUANTISED_ONE_UNITS(fp8, kFp8, 1)
#endif
