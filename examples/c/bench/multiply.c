#define _POSIX_C_SOURCE 200809L

#include "multiply.h"

#include <pthread.h>
#include <stdlib.h>

#include "measure.h"

#define ROUNDS 5

/* Each does num_steps times a fixed number of independent operations on registers alone. */
typedef void kernel(uint64_t num_steps);

#if defined(__x86_64__) && defined(__GNUC__)

/* Twelve sums, so that no instruction waits for the one before. */
#define TWELVE(op, reg)                                                                                      \
  op " %%" reg "12, %%" reg "12, %%" reg "0\n" op " %%" reg "12, %%" reg "12, %%" reg "1\n"                  \
  op " %%" reg "12, %%" reg "12, %%" reg "2\n" op " %%" reg "12, %%" reg "12, %%" reg "3\n"                  \
  op " %%" reg "12, %%" reg "12, %%" reg "4\n" op " %%" reg "12, %%" reg "12, %%" reg "5\n"                  \
  op " %%" reg "12, %%" reg "12, %%" reg "6\n" op " %%" reg "12, %%" reg "12, %%" reg "7\n"                  \
  op " %%" reg "12, %%" reg "12, %%" reg "8\n" op " %%" reg "12, %%" reg "12, %%" reg "9\n"                  \
  op " %%" reg "12, %%" reg "12, %%" reg "10\n" op " %%" reg "12, %%" reg "12, %%" reg "11\n"

#define MULTIPLY_ADDS(reg)                                                                                   \
  __asm__ volatile("1:\n" TWELVE("vfmadd231ps", reg) "dec %0\njnz 1b\n"                                      \
                   : "+r"(num_steps)                                                                         \
                   :                                                                                         \
                   : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",   \
                     "xmm10", "xmm11", "xmm12")

static void multiply_adds_512(uint64_t num_steps) {
  MULTIPLY_ADDS("zmm");
  __asm__ volatile("vzeroupper");
}

static void multiply_adds_256(uint64_t num_steps) {
  MULTIPLY_ADDS("ymm");
  __asm__ volatile("vzeroupper");
}

/* Four sums of 16 x 16 over 32 values. The tiles are released before the thread does anything else. */
static void tile_products(uint64_t num_steps) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = 16;
  }
  __asm__ volatile(
      "ldtilecfg %1\n"
      "1:\n"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n"
      "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n"
      "tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n"
      "dec %0\n"
      "jnz 1b\n"
      "tilerelease\n"
      : "+r"(num_steps)
      : "m"(config)
      : "cc");
}

#endif

typedef struct worker {
  kernel *kernel;
  uint64_t num_steps;
  pthread_barrier_t *barrier;
} worker;

/* Every round begins and ends at the barrier, where the main thread reads the clock. */
static void *work(void *argument) {
  const worker *self = argument;
  for (int round = 0; round < ROUNDS; round++) {
    pthread_barrier_wait(self->barrier);
    self->kernel(self->num_steps);
    pthread_barrier_wait(self->barrier);
  }
  return NULL;
}

/* Returns steps per second of all threads together. */
static double best_round(uint32_t num_threads, kernel *kernel, uint64_t num_steps) {
  worker self;
  pthread_t *threads = calloc(num_threads, sizeof *threads);
  pthread_barrier_t barrier;
  double best_seconds = 0;
  if (threads != NULL && pthread_barrier_init(&barrier, NULL, num_threads + 1) == 0) {
    self = (worker){kernel, num_steps, &barrier};
    for (uint32_t i = 0; i < num_threads; i++)
      if (pthread_create(&threads[i], NULL, work, &self) != 0) abort();
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
  free(threads);
  return best_seconds > 0 ? (double)num_steps * num_threads / best_seconds : 0;
}

double multiply_add_rate(uint32_t num_threads) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f"))
    return 12 * 32 * best_round(num_threads, multiply_adds_512, 4000000);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return 12 * 16 * best_round(num_threads, multiply_adds_256, 4000000);
#endif
  (void)num_threads;
  return 0;
}

double amx_rate(uint32_t num_threads) {
#if defined(__x86_64__) && defined(__GNUC__)
  return 4.0 * 2 * 16 * 16 * 32 * best_round(num_threads, tile_products, 800000);
#else
  (void)num_threads;
  return 0;
#endif
}
