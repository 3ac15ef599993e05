#include "multiply.h"

#include "rounds.h"

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

/* From zeros: registers that held something else once made them seventy times as slow. */
#define MULTIPLY_ADDS(reg)                                                                                   \
  __asm__ volatile("vzeroall\n"                                                                              \
                   "1:\n" TWELVE("vfmadd231ps", reg) "dec %0\njnz 1b\n"                                      \
                   : "+r"(num_steps)                                                                         \
                   :                                                                                         \
                   : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",   \
                     "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

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

typedef struct products {
  kernel *kernel;
  uint64_t num_steps;
} products;

static void multiply(void *argument, uint32_t thread, uint32_t round) {
  (void)thread;
  (void)round;
  const products *self = argument;
  self->kernel(self->num_steps);
}

/* Returns steps per second of all threads together. */
static double best_round(uint32_t num_threads, kernel *kernel, uint64_t num_steps) {
  products all = {kernel, num_steps};
  double seconds = shortest_round(num_threads, ROUNDS, multiply, &all);
  return seconds > 0 ? (double)num_steps * num_threads / seconds : 0;
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
