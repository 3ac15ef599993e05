/*
 * Measures a model: prompt processing, generation, and how near generation comes to the speed at
 * which the machine can read the weights.
 *
 *     xserv bench MODEL [OPTIONS]        --help lists them
 *
 * Numbers are medians over --reps. With --random the folder needs a config.json alone, and the device
 * makes up the weights: tests/bench/make_random_model.py --config-only writes those of published
 * shapes. The head of the table then says so, and each line of JSON has random_weights. Names are as in llama-bench: pp<N> is a prompt of N tokens, tg<N> the
 * generation of N tokens, _d<D> after a prompt of D tokens; _b<B> with B requests at once and _t<T>
 * with T threads, if several of these are measured. The rate of a batch is its total, _ms the time
 * of all prompts together or of one step. _limit_ms is the least time that the machine allows: the
 * sum, over the operations, of the time to read weights, keys and values or to multiply, whichever
 * is longer (limits.h); _share is that limit over the measured time. The rates of a GPU are
 * measured in the same run: memory_gb_s, at which a kernel that does little else reads 4 GiB, and
 * gemm_tflop_s, of products of matrices of 8192 rows and columns in the model's type
 * (ceilings.h). --read-gbs and --tflops set them instead; on a CPU there are limits only if
 * both are given. On a CPU fma_tflop_s is what its f32 multiply-adds reach on registers alone and, for
 * bf16 where the library uses AMX, amx_tflop_s what its tiles do; _multiply_share is what a prompt's
 * products would take at the rate of the latter, else the former, as a share of the prompt's time.
 * ttft128_cold_s is the time to the first token of the first prompt after loading,
 * which finds caches and clocks cold.
 *
 * Waiting and serving, in seconds, from one event loop (--no-speed leaves out the above): ttft<N>
 * is the time to the first token of a prompt of N tokens, of one request to an idle model; serve<N>
 * is N short chats under way at any time; offline<N> is N long requests submitted at once;
 * poisson<P> is --poisson-requests of these, which arrive independently of each other at P percent
 * of --offline-rate, or of the rate that an offline run of them reached before. first is the time
 * from arrival to the first token, next that between tokens, idle the share of time in which the
 * device waits although there is work. --no-chunked-prefill computes every prompt in one step,
 * --max-prefill-tokens sets the number of prompt tokens in a step. --kv-cache-tokens makes the KV
 * cache small, so that requests are preempted; --max-swap-bytes is the host memory in which they
 * then wait (1: none, they are recomputed). preempted counts preemptions, swapped the blocks of 32
 * tokens that were copied to the host and back.
 */

#define _DEFAULT_SOURCE /* getrusage */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <xserv.h>

#include "bandwidth.h"
#include "bench.h"
#include "ceilings.h"
#include "limits.h"
#include "measure.h"
#include "multiply.h"
#include "report.h"
#include "serve.h"
#include "tied.h"
#include "../common/options.h"

typedef struct settings {
  const char *model_path;
  number_list prompts, gen, depths, threads, batch, ttft, serve, offline, poisson;
  uint32_t reps, poisson_requests;
  float offline_rate; /* requests per second; 0: to be measured */
  xserv_load_options load;
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
  double multiply_tflops; /* of the CPU's fastest instructions for the model's type; 0: not known */
  double best_single; /* tokens per second of the fastest generation without a batch */
} subject;

static row row_of(const settings *all, uint32_t threads) {
  return (row){all->json, all->random, all->threads.len > 1, threads, 1};
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
    /* On a CPU, what the multiplications alone would take. */
    const ceilings only_multiply = {1e30, of->multiply_tflops};
    const double multiply_ms =
        prompt ? prompt_limit_ms(&only_multiply, &of->work, work->batch, num_tokens) : 0;
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
        {"multiply_share", "of 1", "higher", multiply_ms / ms, multiply_ms > 0},
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
  number_list offline = all->offline;
  if (all->poisson.len > 0 && offline.len == 0 && requests_per_second == 0)
    offline = (number_list){{all->poisson_requests}, 1};
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

/* Whether the library multiplies in tiles of AMX. */
static bool has_amx(const xserv_model_info *info) { return strstr(info->device, "avx512-amx") != NULL; }

/* Measures how fast the processor multiplies the model's numbers. The read rate is measured when the
 * model is gone. */
static void measure_cpu(subject *of, const row *row) {
  const xserv_model_info *info = of->info;
  if (of->all->prompts.len == 0) return;
  double rate = multiply_add_rate(info->num_threads) * 1e-12;
  if (rate > 0) print_value(row, "fma_tflop_s", "TFLOP/s", "higher", rate);
  if (info->dtype == XSERV_DTYPE_BF16 && has_amx(info)) {
    rate = amx_rate(info->num_threads) * 1e-12;
    print_value(row, "amx_tflop_s", "TFLOP/s", "higher", rate);
  }
  of->multiply_tflops = rate;
}

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
  print_value(&row, "ttft128_cold_s", "s", "lower", first_token);
  if (is_on_gpu(of->info)) {
    measure_gpu(of, &row);
  } else {
    measure_cpu(of, &row);
  }

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
  xserv_load_options options = all->load;
  xserv_model *model = NULL;
  xserv_model_info info = {.struct_size = sizeof info};
  subject of = {.all = all, .info = &info, .ceilings = all->ceilings};
  options.num_threads = threads;
  bool good = xserv_load(all->model_path, &options, &model) == XSERV_STATUS_OK &&
              xserv_model_get_info(model, &info) == XSERV_STATUS_OK;
  if (!good) {
    fprintf(stderr, "bench: %s\n", xserv_last_error());
  } else {
    const bool tied = all->random ? declares_tied_embeddings(info.path) : has_tied_embeddings(info.path);
    fprintf(stderr, "%s, %.3g GB of %sweights, embeddings %s, %s, xserv %s\n", info.architecture,
            (double)info.weights_bytes / 1e9, all->random ? "random " : "", tied ? "tied" : "not tied", info.device, xserv_version());
    of.model = model;
    of.work = model_work_of(&info, tied, options.embeddings, experts_of(&info));
    good = measure_model(&of, threads == all->threads.values[0]);
  }
  xserv_model_free(model);
  if (good) print_memory_share(&of);
  return good;
}

int run_bench(const char *name, int argc, char **argv) {
  settings all = {.prompts = {{128, 512}, 2}, .gen = {{64}, 1}, .depths = {{0}, 1},
                  .threads = {{0}, 1}, .batch = {{1}, 1}, .reps = 3, .poisson_requests = 256};
  bool no_speed = false, whole_prompts = false;
  float read_gbs = 0, tflops = 0;
  xserv_load_options_default(&all.load);
  xserv_load_options *load = &all.load;
  const command_option speed[] = {
      {"--prompts", "N,N", OPTION_NUMBERS, &all.prompts, "prompts of N tokens (128,512)", 1, 1u << 20},
      {"--gen", "N,N", OPTION_NUMBERS, &all.gen, "generate N tokens (64)", 1, 1u << 20},
      {"--depths", "N,N", OPTION_NUMBERS, &all.depths, "after prompts of N tokens (0)", 0, 1u << 20},
      {"--batch", "N,N", OPTION_NUMBERS, &all.batch, "N requests at once (1)", 1, 256},
      {"--threads", "N,N", OPTION_NUMBERS, &all.threads, "N threads (0: one for each core)", 0, 1024},
      {"--reps", "N", OPTION_UINT32, &all.reps, "medians of N measurements (3)", 1, 1000},
      {"--no-speed", NULL, OPTION_FLAG, &no_speed, "measure no prompts and no generation", 0, 0},
      {"--read-gbs", "N", OPTION_FLOAT, &read_gbs, "GB/s at which memory can be read, for the limits", 0, 0},
      {"--tflops", "N", OPTION_FLOAT, &tflops, "TFLOP/s of large products, for the limits", 0, 0},
      {"--json", NULL, OPTION_FLAG, &all.json, "print JSON lines: one object for each number, a line each", 0, 0},
      {0},
  };
  const command_option waiting[] = {
      {"--ttft", "N,N", OPTION_NUMBERS, &all.ttft, "time to the first token of one prompt of N tokens", 1, 1u << 20},
      {"--serve", "N,N", OPTION_NUMBERS, &all.serve, "N short chats under way at any time", 1, 1024},
      {"--offline", "N,N", OPTION_NUMBERS, &all.offline, "N long requests submitted at once", 1, 1024},
      {"--poisson", "P,P", OPTION_NUMBERS, &all.poisson,
       "long requests at random times, at P percent of the rate", 1, 1000},
      {"--poisson-requests", "N", OPTION_UINT32, &all.poisson_requests, "N of these (256)", 1, 1024},
      {"--offline-rate", "R", OPTION_FLOAT, &all.offline_rate,
       "that rate, requests per second; else it is measured", 0, 0},
      {0},
  };
  const command_option model[] = {
      {"--device", "cpu|cuda|auto", OPTION_CHOICE, &load->device_kind, "where the model runs (auto)", 0, 0},
      {"--device-index", "N", OPTION_UINT32, &load->device_index, "which GPU (0)", 0, UINT32_MAX},
      {"--dtype", "auto|f32|f16|bf16", OPTION_CHOICE, &load->dtype,
       "type of weights and KV cache (auto: as stored)", 0, 0},
      {"--max-memory", "SIZE", OPTION_SIZE, &load->max_memory_bytes,
       "weights, work space and KV cache take no more", 0, 0},
      {"--context", "N", OPTION_UINT64, &load->max_context_tokens, "longest context of a request", 1, UINT64_MAX},
      {"--kv-cache-tokens", "N", OPTION_UINT64, &load->kv_cache_tokens,
       "tokens in the KV cache; if few, requests are preempted", 0, UINT64_MAX},
      {"--kv-cache", "computed|fp8", OPTION_CHOICE, &load->kv_cache_format, "what the KV cache stores (computed)", 0, 0},
      {"--activations", "computed|int8|unquantised", OPTION_CHOICE, &load->activations,
       "what products with quantised weights take theirs as\n(computed: FP8 where the config says so; int8: with\n"
       "int4 and int8 on the CPU; unquantised: never FP8)", 0, 0},
      {"--max-swap-bytes", "SIZE", OPTION_SIZE, &load->max_swap_bytes,
       "host memory for preempted requests; 1: none", 0, 0},
      {"--max-prefill-tokens", "N", OPTION_UINT64, &load->max_prefill_tokens, "prompt tokens in a step", 0, UINT64_MAX},
      {"--no-chunked-prefill", NULL, OPTION_FLAG, &whole_prompts, "compute every prompt in one step", 0, 0},
      {"--deterministic", NULL, OPTION_FLAG, &all.deterministic,
       "the same tokens to the last bit, on a GPU too", 0, 0},
      {"--weights", "stored|int8|int4", OPTION_CHOICE, &load->weights,
       "what the layers' matrices are kept as (stored)", 0, 0},
      {"--group-size", "N", OPTION_UINT32, &load->weights_group_size,
       "inputs that share a scale in weights quantised at load", 0, 1 << 20},
      {"--embeddings", "stored|int8", OPTION_CHOICE, &load->embeddings,
       "what the embedding and the output matrix are kept as (stored)", 0, 0},
      {"--kept-weights", "FILE", OPTION_TEXT, &load->kept_weights,
       "keep what is quantised in FILE: read if it is there, else made", 0, 0},
      {"--random", NULL, OPTION_FLAG, &all.random, "random weights: MODEL needs a config.json alone", 0, 0},
      {0},
  };
  const command command = {
      name, "MODEL",
      "Measures a model: prompt processing, generation, and how near generation comes to the\n"
      "speed at which the machine can read the weights. A list has numbers with commas between.\n"
      "\n"
      "pp<N> is a prompt of N tokens, tg<N> the generation of N, _d<D> after a prompt of D;\n"
      "_b<B> is with B requests at once, _t<T> with T threads. _limit_ms is the least time that\n"
      "the machine allows, _share that limit over the measured time. ttft<N> is the time to the\n"
      "first token; ttft128_cold_s that of the first prompt after loading.",
      {{"Speed", speed}, {"Waiting and serving", waiting}, {"Model", model}}};
  if (parse_command(&command, argc, argv, &all.model_path, 1) == 0) refuse(&command, "no model; --help tells more");
  if (all.offline_rate < 0 || read_gbs < 0 || tflops < 0) refuse(&command, "a rate is negative");
  all.ceilings = (ceilings){read_gbs, tflops};
  if (whole_prompts) load->max_prefill_tokens = UINT64_MAX; /* at least the longest context */
  if (no_speed) all.prompts.len = all.gen.len = 0;
  load->deterministic = all.deterministic;
  load->random_weights = all.random;
  print_head(all.json, all.random);
  for (size_t i = 0; i < all.threads.len; i++)
    if (!measure_threads(&all, all.threads.values[i])) return 1;
  return 0;
}
