/*
 * Measures a model: prompt processing, generation, and how near generation comes to the speed at
 * which the machine can read the weights.
 *
 *     bench MODEL [--prompts 128,512] [--gen 64] [--depths 0,512] [--threads N,N] [--batch 1,4]
 *                 [--ttft 512,2048] [--serve 1,8] [--offline 256] [--poisson 50,80] [--offline-rate R]
 *                 [--poisson-requests 256] [--max-prefill N] [--no-chunked-prefill] [--no-speed]
 *                 [--kv-tokens N] [--max-swap-bytes N] [--random]
 *                 [--read-gbs N] [--tflops N] [--deterministic] [--reps 3] [--json]
 *
 * Numbers are medians over --reps. With --random the folder needs a config.json alone, and the device
 * makes up the weights: tests/bench/make_random_model.py --config-only writes those of published
 * shapes. Names are as in llama-bench: pp<N> is a prompt of N tokens, tg<N> the
 * generation of N tokens, _d<D> after a prompt of D tokens; _b<B> with B requests at once and _t<T>
 * with T threads, if several of these are measured. The rate of a batch is its total, _ms the time
 * of all prompts together or of one step. _limit_ms is the least time that the machine allows: the
 * sum, over the operations, of the time to read weights, keys and values or to multiply, whichever
 * is longer (bench/limits.h); _share is that limit over the measured time. The rates of a GPU are
 * measured in the same run: memory_gb_s, at which a kernel that does little else reads 4 GiB, and
 * gemm_tflop_s, of products of matrices of 8192 rows and columns in the model's type
 * (bench/ceilings.h). --read-gbs and --tflops set them instead; on a CPU there are limits only if
 * both are given.
 *
 * Waiting and serving, in seconds, from one event loop (--no-speed leaves out the above): ttft<N>
 * is the time to the first token of a prompt of N tokens, of one request to an idle model; serve<N>
 * is N short chats under way at any time; offline<N> is N long requests submitted at once;
 * poisson<P> is --poisson-requests of these, which arrive independently of each other at P percent
 * of --offline-rate, or of the rate that an offline run of them reached before. first is the time
 * from arrival to the first token, next that between tokens, idle the share of time in which the
 * device waits although there is work. --no-chunked-prefill computes every prompt in one step,
 * --max-prefill sets the number of prompt tokens in a step. --kv-tokens makes the KV cache small,
 * so that requests are preempted; --max-swap-bytes is the host memory in which they then wait (1:
 * none, they are recomputed). preempted counts preemptions, swapped the blocks of 32 tokens that
 * were copied to the host and back.
 */

#define _DEFAULT_SOURCE /* getrusage */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <xserv.h>

#include "bench/bandwidth.h"
#include "bench/ceilings.h"
#include "bench/limits.h"
#include "bench/measure.h"
#include "bench/report.h"
#include "bench/serve.h"
#include "bench/tied.h"
#include "common/options.h"

typedef struct list {
  uint32_t values[MAX_LIST];
  size_t len;
} list;

typedef struct settings {
  const char *model_path;
  list prompts, gen, depths, threads, batch, ttft, serve, offline, poisson;
  uint32_t reps, poisson_requests;
  float offline_rate; /* requests per second; 0: to be measured */
  uint64_t max_prefill, kv_tokens, max_swap_bytes;
  ceilings ceilings; /* those that are given and not measured */
  bool deterministic, random, json;
} settings;

/* A model and its properties. */
typedef struct subject {
  const settings *all;
  const xserv_model *model;
  const xserv_model_info *info;
  model_work work;
  ceilings ceilings;
  double best_single; /* tokens per second of the fastest generation without a batch */
} subject;

static row row_of(const settings *all, uint32_t threads) {
  return (row){all->json, all->threads.len > 1, threads, 1};
}

/* Measures prompt processing if depth is XSERV_UNSET_INT, else generation. Stores the median
 * tokens/s. */
static bool measure_row(const subject *of, const row *row, workload *work, uint32_t num_tokens, uint32_t depth,
                        double *tok_s) {
  const bool prompt = depth == XSERV_UNSET_INT;
  const uint32_t reps = of->all->reps;
  double *seconds = calloc(reps, sizeof(double));
  double *cpu_seconds = calloc(reps, sizeof(double));
  device_time from = {0, 0}, to = {0, 0};
  bool good = seconds != NULL && cpu_seconds != NULL;
  for (uint32_t i = 0; i <= reps && good; i++) { /* one more: the first warms up */
    rate rate;
    if (i == 1) good = device_time_now(work->model, &from);
    good = good && (prompt ? measure_prompt(work, num_tokens, &rate)
                           : measure_generation(work, depth, num_tokens, &rate));
    if (!good || i == 0) continue;
    seconds[i - 1] = rate.per_second;
    cpu_seconds[i - 1] = rate.per_cpu_second;
  }
  if (good && device_time_now(work->model, &to)) {
    char name[64], stem[32], at[24] = "";
    if (!prompt && depth > 0) snprintf(at, sizeof at, "_d%u", depth);
    snprintf(stem, sizeof stem, "%s%u%s", prompt ? "pp" : "tg", num_tokens, at);
    *tok_s = median(seconds, reps);
    const double tokens = (double)work->batch * (prompt ? num_tokens : 1), ms = 1e3 * tokens / *tok_s;
    const double limit_ms =
        prompt ? prompt_limit_ms(&of->ceilings, &of->work, work->batch, num_tokens)
               : decode_limit_ms(&of->ceilings, &of->work, work->batch, depth + 0.5 * num_tokens);
    const struct {
      const char *name, *unit, *better;
      double value;
      bool is_known;
    } lines[] = {
        {"tok_s", "tok/s", "higher", *tok_s, true},
        {"tok_cpus", "tok/cpu-s", "higher", median(cpu_seconds, reps), true},
        {"ms", "ms", "lower", ms, true},
        {"limit_ms", "ms", "lower", limit_ms, limit_ms > 0},
        {"share", "of 1", "higher", limit_ms / ms, limit_ms > 0},
        {"idle", "of 1", "lower", idle_share(from, to), !prompt},
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
      snprintf(name, sizeof name, "%s_%s", stem, lines[i].name);
      if (lines[i].is_known) print_value(row, name, lines[i].unit, lines[i].better, lines[i].value);
    }
  }
  free(seconds);
  free(cpu_seconds);
  return good;
}

/* Measures one request to an idle model. */
static bool measure_ttft(const subject *of, const row *row, workload *work, uint32_t num_tokens) {
  const uint32_t reps = of->all->reps;
  double *seconds = calloc(reps, sizeof(double)), warm;
  bool good = seconds != NULL && measure_idle_request(work, num_tokens, &warm);
  for (uint32_t i = 0; i < reps && good; i++) good = measure_idle_request(work, num_tokens, &seconds[i]);
  if (good) {
    char name[64];
    snprintf(name, sizeof name, "ttft%u_p50_s", num_tokens);
    print_value(row, name, "s", "lower", median(seconds, reps));
    snprintf(name, sizeof name, "ttft%u_min_s", num_tokens);
    print_value(row, name, "s", "lower", seconds[0]); /* sorted */
  }
  free(seconds);
  return good;
}

/* Measures a server's load once, because the result is an average over many requests. */
static bool measure_serve(const row *row, workload *work, const char *what, uint32_t number, const load *load,
                          serving *all) {
  const xserv_model *model = work->model;
  xserv_model_stats before = {.struct_size = sizeof before}, after = {.struct_size = sizeof after};
  if (xserv_model_get_stats(model, &before) != XSERV_STATUS_OK || !measure_serving(work, load, all) ||
      xserv_model_get_stats(model, &after) != XSERV_STATUS_OK)
    return false;
  const uint64_t swapped = after.total_swapped_out_blocks - before.total_swapped_out_blocks +
                           after.total_swapped_in_blocks - before.total_swapped_in_blocks;
  const struct {
    const char *name, *unit, *better;
    double value;
  } lines[] = {
      {"tok_s", "tok/s", "higher", all->tokens_per_second},
      {"req_s", "req/s", "higher", all->requests_per_second},
      {"first_p50_s", "s", "lower", all->first.p50},
      {"first_p95_s", "s", "lower", all->first.p95},
      {"first_p99_s", "s", "lower", all->first.p99},
      {"next_p50_s", "s", "lower", all->next.p50},
      {"next_p95_s", "s", "lower", all->next.p95},
      {"next_p99_s", "s", "lower", all->next.p99},
      {"idle", "of 1", "lower", all->idle},
      {"preempted", "times", "lower", (double)(after.total_preemptions - before.total_preemptions)},
      {"swapped", "blocks", "lower", (double)swapped},
  };
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s%u_%s", what, number, lines[i].name);
    print_value(row, name, lines[i].unit, lines[i].better, lines[i].value);
  }
  return true;
}

static bool measure_loads(const subject *of, const row *row, workload *work) {
  const settings *all = of->all;
  serving result;
  double requests_per_second = all->offline_rate;
  for (size_t i = 0; i < all->serve.len; i++) {
    load load = chat_load(all->serve.values[i]);
    if (!measure_serve(row, work, "serve", load.at_once, &load, &result)) return false;
  }
  list offline = all->offline;
  if (all->poisson.len > 0 && offline.len == 0 && requests_per_second == 0)
    offline = (list){{all->poisson_requests}, 1};
  for (size_t i = 0; i < offline.len; i++) {
    load load = offline_load(offline.values[i]);
    if (!measure_serve(row, work, "offline", load.at_once, &load, &result)) return false;
    if (all->offline_rate == 0) requests_per_second = result.requests_per_second;
  }
  for (size_t i = 0; i < all->poisson.len; i++) {
    uint32_t percent = all->poisson.values[i];
    load load = poisson_load(all->poisson_requests, requests_per_second * percent / 100);
    if (!measure_serve(row, work, "poisson", percent, &load, &result)) return false;
  }
  return true;
}

static bool is_on_gpu(const xserv_model_info *info) { return info->num_threads == 0; }

/* Measures the rates of the GPU while the model is on it: loading and the first token are over by
 * then, and later measurements find the GPU at its steady temperature. If this fails there are no
 * limits. */
static void measure_gpu(subject *of, const row *row) {
  const ceilings *set = &of->all->ceilings;
  const bool has_rows = of->all->prompts.len + of->all->gen.len > 0;
  const probes probes = gpu_probes(of->info->dtype);
  measured found;
  if (!has_rows || (set->read_gbs > 0 && set->tflops > 0) || !measure_ceilings(&probes, &found)) return;
  fprintf(stderr, "measured: reads of %zu MiB, products of %lld rows and columns\n", found.num_bytes >> 20,
          (long long)probes.gemm_size);
  if (set->read_gbs == 0) {
    of->ceilings.read_gbs = found.ceilings.read_gbs;
    print_value(row, "memory_gb_s", "GB/s", "higher", of->ceilings.read_gbs);
  }
  if (set->tflops == 0) {
    of->ceilings.tflops = found.ceilings.tflops;
    print_value(row, "gemm_tflop_s", "TFLOP/s", "higher", of->ceilings.tflops);
  }
}

/* Measures everything for one number of threads, on a model loaded for it. */
static bool measure_model(subject *of, bool first) {
  const settings *all = of->all;
  row row = row_of(all, of->info->num_threads);
  workload work = {of->model, of->info->vocab_size, 1, 1};
  print_value(&row, "load_s", "s", "lower", of->info->load_seconds);
  double first_token;
  if (!measure_first_token(&work, 128, &first_token)) return false;
  print_value(&row, "ttft128_s", "s", "lower", first_token);
  if (is_on_gpu(of->info)) measure_gpu(of, &row);

  for (size_t b = 0; b < all->batch.len; b++) {
    work.batch = row.batch = all->batch.values[b];
    double tok_s;
    for (size_t i = 0; i < all->prompts.len; i++)
      if (!measure_row(of, &row, &work, all->prompts.values[i], XSERV_UNSET_INT, &tok_s)) return false;
    for (size_t i = 0; i < all->gen.len; i++) {
      for (size_t d = 0; d < all->depths.len; d++) {
        if (!measure_row(of, &row, &work, all->gen.values[i], all->depths.values[d], &tok_s)) return false;
        if (row.batch == 1 && tok_s > of->best_single) of->best_single = tok_s;
      }
    }
  }

  work.batch = row.batch = 1; /* from here on part of the names */
  for (size_t i = 0; i < all->ttft.len; i++)
    if (!measure_ttft(of, &row, &work, all->ttft.values[i])) return false;
  if (!measure_loads(of, &row, &work)) return false;

  struct rusage usage; /* read before the first of our own large buffers, which would count as well */
  row = row_of(all, 0);
  if (first && getrusage(RUSAGE_SELF, &usage) == 0)
    print_value(&row, "peak_rss_mib", "MiB", "lower", (double)usage.ru_maxrss / 1024.0);
  return true;
}

/* Prints how near generation comes to the speed at which the device reads its memory. Called after
 * the model has been freed, so that the host buffer of the measurement does not add to the memory
 * of the process. */
static void print_memory_share(const subject *of) {
  row row = row_of(of->all, of->info->num_threads);
  if (of->best_single == 0) return;
  double weights = of->best_single * step_weight_bytes(&of->work) / 1e9, memory = of->ceilings.read_gbs;
  print_value(&row, "weights_gb_s", "GB/s", "higher", weights);
  if (!is_on_gpu(of->info)) {
    memory = read_bandwidth(of->info->num_threads) / 1e9;
    print_value(&row, "memory_gb_s", "GB/s", "higher", memory);
  }
  if (memory > 0) print_value(&row, "memory_share", "of 1", "higher", weights / memory);
}

static bool measure_threads(const settings *all, uint32_t threads) {
  xserv_load_options options;
  xserv_model *model = NULL;
  xserv_model_info info = {.struct_size = sizeof info};
  subject of = {.all = all, .info = &info, .ceilings = all->ceilings};
  xserv_load_options_default(&options);
  options.num_threads = threads;
  options.deterministic = all->deterministic;
  options.random_weights = all->random;
  options.max_prefill_tokens = all->max_prefill;
  options.kv_cache_tokens = all->kv_tokens;
  options.max_swap_bytes = all->max_swap_bytes;
  bool good = xserv_load(all->model_path, &options, &model) == XSERV_STATUS_OK &&
              xserv_model_get_info(model, &info) == XSERV_STATUS_OK;
  if (!good) {
    fprintf(stderr, "bench: %s\n", xserv_last_error());
  } else {
    const bool tied = has_tied_embeddings(info.path);
    fprintf(stderr, "%s, %.3g GB of weights, embeddings %s, %s, xserv %s\n", info.architecture,
            (double)info.weights_bytes / 1e9, tied ? "tied" : "not tied", info.device, xserv_version());
    of.model = model;
    of.work = model_work_of(&info, tied);
    good = measure_model(&of, threads == all->threads.values[0]);
  }
  xserv_model_free(model);
  if (good) print_memory_share(&of);
  return good;
}

int main(int argc, char **argv) {
  settings all = {.prompts = {{128, 512}, 2}, .gen = {{64}, 1}, .depths = {{0}, 1},
                  .threads = {{0}, 1}, .batch = {{1}, 1}, .reps = 3, .poisson_requests = 256};
  for (int i = 1; i < argc; i++) {
    uint64_t number;
    float real;
    if (option_list(argc, argv, &i, "--prompts", 1, 1u << 20, all.prompts.values, &all.prompts.len) ||
        option_list(argc, argv, &i, "--gen", 1, 1u << 20, all.gen.values, &all.gen.len) ||
        option_list(argc, argv, &i, "--depths", 0, 1u << 20, all.depths.values, &all.depths.len) ||
        option_list(argc, argv, &i, "--threads", 0, 1024, all.threads.values, &all.threads.len) ||
        option_list(argc, argv, &i, "--ttft", 1, 1u << 20, all.ttft.values, &all.ttft.len) ||
        option_list(argc, argv, &i, "--poisson", 1, 1000, all.poisson.values, &all.poisson.len) ||
        option_float(argc, argv, &i, "--offline-rate", &all.offline_rate) ||
        option_number(argc, argv, &i, "--max-prefill", UINT64_MAX, &all.max_prefill) ||
        option_number(argc, argv, &i, "--kv-tokens", UINT64_MAX, &all.kv_tokens) ||
        option_number(argc, argv, &i, "--max-swap-bytes", UINT64_MAX, &all.max_swap_bytes) ||
        option_list(argc, argv, &i, "--serve", 1, 1024, all.serve.values, &all.serve.len) ||
        option_list(argc, argv, &i, "--offline", 1, 1024, all.offline.values, &all.offline.len) ||
        option_list(argc, argv, &i, "--batch", 1, 256, all.batch.values, &all.batch.len)) {
      /* stored */
    } else if (option_number(argc, argv, &i, "--reps", 1000, &number)) {
      all.reps = number > 0 ? (uint32_t)number : 1;
    } else if (option_number(argc, argv, &i, "--poisson-requests", 1024, &number)) {
      all.poisson_requests = number > 0 ? (uint32_t)number : 1;
    } else if (option_float(argc, argv, &i, "--read-gbs", &real)) {
      all.ceilings.read_gbs = real;
    } else if (option_float(argc, argv, &i, "--tflops", &real)) {
      all.ceilings.tflops = real;
    } else if (strcmp(argv[i], "--no-chunked-prefill") == 0) {
      all.max_prefill = UINT64_MAX; /* at least the longest context */
    } else if (strcmp(argv[i], "--no-speed") == 0) {
      all.prompts.len = all.gen.len = 0;
    } else if (strcmp(argv[i], "--json") == 0) {
      all.json = true;
    } else if (strcmp(argv[i], "--deterministic") == 0) {
      all.deterministic = true;
    } else if (strcmp(argv[i], "--random") == 0) {
      all.random = true;
    } else if (argv[i][0] != '-' && all.model_path == NULL) {
      all.model_path = argv[i];
    } else {
      fprintf(stderr, "bench: unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (all.model_path == NULL) {
    fprintf(stderr, "usage: bench MODEL [--prompts N,N] [--gen N,N] [--depths N,N] [--threads N,N] "
                    "[--batch N,N] [--ttft N,N] [--serve N,N] [--offline N,N] [--poisson PERCENT,...] "
                    "[--offline-rate R] [--poisson-requests N] [--max-prefill N] [--no-chunked-prefill] "
                    "[--kv-tokens N] [--max-swap-bytes N] [--no-speed] [--read-gbs N] [--tflops N] "
                    "[--deterministic] [--random] [--reps N] [--json]\n");
    return 2;
  }
  if (all.offline_rate < 0 || all.ceilings.read_gbs < 0 || all.ceilings.tflops < 0) {
    fprintf(stderr, "bench: a rate is negative\n");
    return 2;
  }
  print_head(all.json);
  for (size_t i = 0; i < all.threads.len; i++)
    if (!measure_threads(&all, all.threads.values[i])) return 1;
  return 0;
}
