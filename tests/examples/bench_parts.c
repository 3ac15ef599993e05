/* Calls parts of examples/c/bench for tests:
 *
 *     bench_parts tied FOLDER...
 *     bench_parts declared FOLDER...
 *     bench_parts limits READ_GBS TFLOPS TIED BATCH CONTEXT NUM_TOKENS [WEIGHTS_BYTES EMBEDDINGS
 *                        [EXPERT_WEIGHTS EXPERTS PER_TOKEN]]             (of Qwen3-8B's sizes)
 *     bench_parts experts FOLDER NUM_LAYERS HIDDEN_SIZE
 *     bench_parts ceilings DTYPE                                         (of the CPU, with little work)
 *     bench_parts rounds NUM_THREADS                                     (of threads that wait)
 */

#define _POSIX_C_SOURCE 200809L /* nanosleep */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <xserv.h>

#include "bench/ceilings.h"
#include "bench/experts.h"
#include "bench/limits.h"
#include "bench/rounds.h"
#include "bench/tied.h"

#define NUM_ROUNDS 3
#define MAX_THREADS 64

static int print_limits(char **numbers, int count) {
  xserv_model_info info = {.struct_size = sizeof info};
  info.dtype = XSERV_DTYPE_BF16;
  info.num_parameters = 8190735360;
  info.kv_bytes_per_token = 147456;
  info.vocab_size = 151936;
  info.hidden_size = 4096;
  info.num_layers = 36;
  info.num_heads = 32;
  info.num_kv_heads = 8;
  info.head_dim = 128;
  double given[11] = {[6] = 2.0 * (double)info.num_parameters, [7] = XSERV_WEIGHTS_AS_STORED, [9] = 1, [10] = 1};
  for (int i = 0; i < count; i++) given[i] = strtod(numbers[i], NULL);
  const ceilings rates = {given[0], given[1]};
  info.weights_bytes = (uint64_t)given[6];
  const expert_sizes experts = {given[8], given[9], given[10]};
  const model_work work = model_work_of(&info, given[2] != 0, (uint32_t)given[7], experts);
  printf("%.17g %.17g %.17g\n", step_weight_bytes(&work), decode_limit_ms(&rates, &work, given[3], given[4]),
         prompt_limit_ms(&rates, &work, given[3], given[5]));
  return 0;
}

static int print_experts(char **words) {
  xserv_model_info info = {.struct_size = sizeof info, .path = words[0]};
  info.num_layers = (uint32_t)strtoul(words[1], NULL, 10);
  info.hidden_size = (uint32_t)strtoul(words[2], NULL, 10);
  const expert_sizes experts = experts_of(&info);
  printf("%.17g %.17g %.17g\n", experts.weights, experts.count, experts.per_token);
  return 0;
}

static int print_ceilings(const char *dtype) {
  const probes probes = {XSERV_DEVICE_CPU, (uint32_t)strtoul(dtype, NULL, 10), (size_t)64 << 20, (size_t)32 << 20,
                         256, 0.01};
  measured found;
  if (!measure_ceilings(&probes, &found)) return 1;
  printf("%zu %.17g %.17g\n", found.num_bytes, found.ceilings.read_gbs, found.ceilings.tflops);
  return 0;
}

static int calls[MAX_THREADS][NUM_ROUNDS];

/* The last thread takes longest, 10 ms for each. */
static void wait_in_turn(void *argument, uint32_t thread, uint32_t round) {
  (void)argument;
  calls[thread][round]++;
  const struct timespec time = {0, 10000000L * (thread + 1)};
  nanosleep(&time, NULL);
}

static int print_rounds(uint32_t num_threads) {
  if (num_threads > MAX_THREADS) return 2;
  printf("%.17g", shortest_round(num_threads, NUM_ROUNDS, wait_in_turn, NULL));
  for (uint32_t thread = 0; thread < num_threads; thread++)
    for (int round = 0; round < NUM_ROUNDS; round++) printf(" %d", calls[thread][round]);
  putchar('\n');
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "rounds") == 0) return print_rounds((uint32_t)strtoul(argv[2], NULL, 10));
  if (argc == 5 && strcmp(argv[1], "experts") == 0) return print_experts(argv + 2);
  if ((argc == 8 || argc == 10 || argc == 13) && strcmp(argv[1], "limits") == 0) return print_limits(argv + 2, argc - 2);
  if (argc == 3 && strcmp(argv[1], "ceilings") == 0) return print_ceilings(argv[2]);
  const bool declared = argc > 2 && strcmp(argv[1], "declared") == 0;
  if (argc < 3 || (!declared && strcmp(argv[1], "tied") != 0)) return 2;
  bool (*const is_tied)(const char *folder) = declared ? declares_tied_embeddings : has_tied_embeddings;
  for (int i = 2; i < argc; i++) puts(is_tied(argv[i]) ? "tied" : "untied");
  return 0;
}
