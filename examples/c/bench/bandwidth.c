#define _DEFAULT_SOURCE /* mmap with MAP_ANONYMOUS, madvise */

#include "bandwidth.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "rounds.h"

#define BUFFER_BYTES ((size_t)1 << 30)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define ROUNDS 3 /* for each distance */

/* How far ahead of its reads a round prefetches into the second-level cache, in bytes; 0: the
 * processor alone does. What is best differs from machine to machine. */
static const size_t distances[] = {0, 2048, 4096, 8192, 16384};
#define NUM_DISTANCES (sizeof distances / sizeof *distances)

typedef struct slices {
  const unsigned char *data;
  size_t slice_bytes; /* a multiple of 4096 */
  uint64_t *sums;     /* written, so that the reads can't be optimised away */
} slices;

/* Sums in eight independent chains, so that no addition waits for the one before. */
static uint64_t sum_portable(const uint64_t *data, size_t num_words) {
  uint64_t sums[8] = {0};
  for (size_t i = 0; i < num_words; i += 8)
    for (size_t k = 0; k < 8; k++) sums[k] += data[i + k];
  uint64_t sum = 0;
  for (size_t k = 0; k < 8; k++) sum += sums[k];
  return sum;
}

#if defined(__x86_64__) && defined(__GNUC__)
/* The last prefetches are of what lies behind the slice. */
#define PREFETCH(i, k) _mm_prefetch((const char *)(data + (i)) + distance + 64 * (k), _MM_HINT_T1)

__attribute__((target("avx2"))) static uint64_t sum_avx2(const uint64_t *data, size_t num_words, size_t distance) {
  __m256i sums[8];
  for (int k = 0; k < 8; k++) sums[k] = _mm256_setzero_si256();
  for (size_t i = 0; i < num_words; i += 32) {
    if (distance > 0)
      for (size_t k = 0; k < 4; k++) PREFETCH(i, k);
    for (size_t k = 0; k < 8; k++)
      sums[k] = _mm256_add_epi64(sums[k], _mm256_load_si256((const __m256i *)(data + i + 4 * k)));
  }
  for (int k = 1; k < 8; k++) sums[0] = _mm256_add_epi64(sums[0], sums[k]);
  uint64_t lanes[4];
  _mm256_storeu_si256((__m256i *)lanes, sums[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) static uint64_t sum_avx512(const uint64_t *data, size_t num_words,
                                                              size_t distance) {
  __m512i sums[4];
  for (int k = 0; k < 4; k++) sums[k] = _mm512_setzero_si512();
  for (size_t i = 0; i < num_words; i += 32) {
    if (distance > 0)
      for (size_t k = 0; k < 4; k++) PREFETCH(i, k);
    for (size_t k = 0; k < 4; k++) sums[k] = _mm512_add_epi64(sums[k], _mm512_load_si512(data + i + 8 * k));
  }
  for (int k = 1; k < 4; k++) sums[0] = _mm512_add_epi64(sums[0], sums[k]);
  uint64_t lanes[8], sum = 0;
  _mm512_storeu_si512(lanes, sums[0]);
  for (int k = 0; k < 8; k++) sum += lanes[k];
  return sum;
}
#endif

static uint64_t sum_words(const uint64_t *data, size_t num_words, size_t distance) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f")) return sum_avx512(data, num_words, distance);
  if (__builtin_cpu_supports("avx2")) return sum_avx2(data, num_words, distance);
#endif
  (void)distance;
  return sum_portable(data, num_words);
}

static void read_slice(void *argument, uint32_t thread, uint32_t round) {
  const slices *all = argument;
  const void *data = all->data + thread * all->slice_bytes;
  all->sums[thread] += sum_words(data, all->slice_bytes / sizeof(uint64_t), distances[round % NUM_DISTANCES]);
}

static double best_round(const unsigned char *buffer, uint32_t num_threads) {
  slices all = {buffer, BUFFER_BYTES / num_threads / 4096 * 4096, calloc(num_threads, sizeof(uint64_t))};
  double seconds = 0;
  if (all.sums != NULL) seconds = shortest_round(num_threads, ROUNDS * NUM_DISTANCES, read_slice, &all);
  free(all.sums);
  return seconds > 0 ? (double)(all.slice_bytes * num_threads) / seconds : 0;
}

double read_bandwidth(uint32_t num_threads) {
  size_t len = BUFFER_BYTES + HUGE_PAGE_BYTES;
  void *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
  uintptr_t aligned = ((uintptr_t)memory + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
  unsigned char *buffer = (unsigned char *)memory + (aligned - (uintptr_t)memory);
#ifdef MADV_HUGEPAGE
  madvise(buffer, BUFFER_BYTES, MADV_HUGEPAGE); /* as the library does for its weights */
#endif
  memset(buffer, 1, BUFFER_BYTES);
  double bytes_per_second = best_round(buffer, num_threads);
  munmap(memory, len);
  return bytes_per_second;
}
