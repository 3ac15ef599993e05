#define _DEFAULT_SOURCE /* mmap with MAP_ANONYMOUS, madvise */
#define _POSIX_C_SOURCE 200809L

#include "bandwidth.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "measure.h"

#define BUFFER_BYTES ((size_t)1 << 30)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define ROUNDS 5

typedef struct slice {
  const uint64_t *data;
  size_t num_words; /* a multiple of 64 */
  pthread_barrier_t *barrier;
  uint64_t sum; /* written, so that the reads can't be optimised away */
} slice;

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
__attribute__((target("avx2"))) static uint64_t sum_avx2(const uint64_t *data, size_t num_words) {
  __m256i sums[8];
  for (int k = 0; k < 8; k++) sums[k] = _mm256_setzero_si256();
  for (size_t i = 0; i < num_words; i += 32)
    for (size_t k = 0; k < 8; k++)
      sums[k] = _mm256_add_epi64(sums[k], _mm256_load_si256((const __m256i *)(data + i + 4 * k)));
  for (int k = 1; k < 8; k++) sums[0] = _mm256_add_epi64(sums[0], sums[k]);
  uint64_t lanes[4];
  _mm256_storeu_si256((__m256i *)lanes, sums[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}
#endif

static uint64_t sum_words(const uint64_t *data, size_t num_words) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx2")) return sum_avx2(data, num_words);
#endif
  return sum_portable(data, num_words);
}

/* Every round begins and ends at the barrier, where the main thread reads the clock. */
static void *read_slice(void *argument) {
  slice *self = argument;
  for (int round = 0; round < ROUNDS; round++) {
    pthread_barrier_wait(self->barrier);
    self->sum += sum_words(self->data, self->num_words);
    pthread_barrier_wait(self->barrier);
  }
  return NULL;
}

static double best_round(unsigned char *buffer, uint32_t num_threads) {
  slice *slices = calloc(num_threads, sizeof *slices);
  pthread_t *threads = calloc(num_threads, sizeof *threads);
  pthread_barrier_t barrier;
  double best_seconds = 0;
  size_t slice_bytes = BUFFER_BYTES / num_threads / 4096 * 4096;
  if (slices != NULL && threads != NULL &&
      pthread_barrier_init(&barrier, NULL, num_threads + 1) == 0) {
    for (uint32_t i = 0; i < num_threads; i++) {
      slices[i] = (slice){(const uint64_t *)(const void *)(buffer + i * slice_bytes),
                          slice_bytes / sizeof(uint64_t), &barrier, 0};
      if (pthread_create(&threads[i], NULL, read_slice, &slices[i]) != 0) abort();
    }
    for (int round = 0; round < ROUNDS; round++) {
      pthread_barrier_wait(&barrier);
      double began = instant_now().wall;
      pthread_barrier_wait(&barrier);
      double seconds = instant_now().wall - began;
      if (round == 0 || seconds < best_seconds) best_seconds = seconds;
    }
    for (uint32_t i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
  }
  free(slices);
  free(threads);
  return best_seconds > 0 ? (double)(slice_bytes * num_threads) / best_seconds : 0;
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
