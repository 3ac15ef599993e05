/*
 * Measures a model: prompt processing, generation, and how near generation comes to the speed at
 * which the machine can read the weights.
 *
 *     bench MODEL [--prompts 128,512] [--gen 64] [--depths 0,512] [--threads N,N] [--batch 1,4]
 *                 [--serve 1,8] [--offline 256] [--reps 3] [--untied] [--deterministic] [--json]
 *
 * Numbers are medians over --reps. Weights may be random: tests/bench/make_random_model.py makes
 * models of published shapes. Names, as in llama-bench: pp<N> is a prompt of N tokens, tg<N> the
 * generation of N tokens, _d<D> after a prompt of D tokens; _b<B> with B requests at once and _t<T>
 * with T threads, where more than one number of them is asked for. Rates of a batch are its total.
 * serve<N> is a server's load: N requests of mixed lengths under way at any time, from one event loop;
 * offline<N> is N long requests submitted at once.
 */

#define _DEFAULT_SOURCE /* getrusage */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <xserv.h>

#include "bench/bandwidth.h"
#include "bench/measure.h"
#include "bench/serve.h"
#include "common/options.h"

typedef struct list {
  uint32_t values[MAX_LIST];
  size_t len;
} list;

typedef struct settings {
  const char *model_path;
  list prompts, gen, depths, threads, batch, serve, offline;
  uint32_t reps;
  bool untied, deterministic, json;
} settings;

/* What a number was measured with. */
typedef struct row {
  const settings *all;
  uint32_t threads, batch; /* threads 0: it is about all of them */
} row;

static void print_value(const row *row, const char *name, const char *unit, const char *better, double value) {
  char suffix[32] = "", full[96];
  if (row->batch > 1) snprintf(suffix, sizeof suffix, "_b%u", row->batch);
  if (row->threads > 0 && row->all->threads.len > 1)
    snprintf(suffix + strlen(suffix), sizeof suffix - strlen(suffix), "_t%u", row->threads);
  /* The suffix goes before the unit: tg64_b4_tok_s. Other names end in it. */
  const char *tail = strstr(name, "_tok_");
  size_t stem = tail != NULL ? (size_t)(tail - name) : strlen(name);
  snprintf(full, sizeof full, "%.*s%s%s", (int)stem, name, suffix, tail != NULL ? tail : "");
  if (!row->all->json) {
    printf("| %-26s | %12.4g | %-9s |\n", full, value, unit);
  } else {
    printf("{\"metric\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"better\": \"%s\"", full, value,
           unit, better);
    if (row->threads > 0) printf(", \"threads\": %u, \"batch\": %u", row->threads, row->batch);
    puts("}");
  }
  fflush(stdout);
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, uint32_t count) {
  qsort(values, count, sizeof *values, compare);
  return count % 2 == 1 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

/* Prompt processing if depth is XSERV_UNSET_INT, else generation. Stores the median tokens/s. */
static bool measure_row(const row *row, workload *work, uint32_t num_tokens, uint32_t depth, double *tok_s) {
  const bool prompt = depth == XSERV_UNSET_INT;
  double *seconds = calloc(row->all->reps, sizeof(double));
  double *cpu_seconds = calloc(row->all->reps, sizeof(double));
  bool good = seconds != NULL && cpu_seconds != NULL;
  for (uint32_t i = 0; i <= row->all->reps && good; i++) { /* one more: the first warms up */
    rate rate;
    good = prompt ? measure_prompt(work, num_tokens, &rate)
                  : measure_generation(work, depth, num_tokens, &rate);
    if (!good || i == 0) continue;
    seconds[i - 1] = rate.per_second;
    cpu_seconds[i - 1] = rate.per_cpu_second;
  }
  if (good) {
    char name[64], at[24] = "";
    if (!prompt && depth > 0) snprintf(at, sizeof at, "_d%u", depth);
    *tok_s = median(seconds, row->all->reps);
    snprintf(name, sizeof name, "%s%u%s_tok_s", prompt ? "pp" : "tg", num_tokens, at);
    print_value(row, name, "tok/s", "higher", *tok_s);
    snprintf(name, sizeof name, "%s%u%s_tok_cpus", prompt ? "pp" : "tg", num_tokens, at);
    print_value(row, name, "tok/cpu-s", "higher", median(cpu_seconds, row->all->reps));
  }
  free(seconds);
  free(cpu_seconds);
  return good;
}

/* A server's load; once, as it is an average over many requests. */
static bool measure_serve(row row, workload *work, const char *what, const load *load) {
  serving all;
  row.batch = 1; /* the name says it */
  if (!measure_serving(work, load, &all)) return false;
  const struct {
    const char *name, *unit, *better;
    double value;
  } lines[] = {
      {"tok_s", "tok/s", "higher", all.tokens_per_second},
      {"first_p50_s", "s", "lower", all.first_token_p50},
      {"first_p95_s", "s", "lower", all.first_token_p95},
      {"next_p50_s", "s", "lower", all.next_token_p50},
      {"next_p95_s", "s", "lower", all.next_token_p95},
  };
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s%u_%s", what, load->at_once, lines[i].name);
    print_value(&row, name, lines[i].unit, lines[i].better, lines[i].value);
  }
  return true;
}

/* Everything for one number of threads, on a model loaded for it. best_single: gets the tokens per
 * second of the fastest generation without a batch. */
static bool measure_model(const settings *all, bool first, const xserv_model *model,
                          const xserv_model_info *info, double *best_single) {
  row row = {all, info->num_threads, 1};
  workload work = {model, info->vocab_size, 1, 1};
  print_value(&row, "load_s", "s", "lower", info->load_seconds);
  double first_token;
  if (!measure_first_token(&work, 128, &first_token)) return false;
  print_value(&row, "ttft128_s", "s", "lower", first_token);

  for (size_t b = 0; b < all->batch.len; b++) {
    work.batch = row.batch = all->batch.values[b];
    double tok_s;
    for (size_t i = 0; i < all->prompts.len; i++)
      if (!measure_row(&row, &work, all->prompts.values[i], XSERV_UNSET_INT, &tok_s)) return false;
    for (size_t i = 0; i < all->gen.len; i++) {
      for (size_t d = 0; d < all->depths.len; d++) {
        if (!measure_row(&row, &work, all->gen.values[i], all->depths.values[d], &tok_s)) return false;
        if (row.batch == 1 && tok_s > *best_single) *best_single = tok_s;
      }
    }
  }

  row.batch = 1;
  for (size_t i = 0; i < all->serve.len; i++) {
    load load = chat_load(all->serve.values[i]);
    if (!measure_serve(row, &work, "serve", &load)) return false;
  }
  for (size_t i = 0; i < all->offline.len; i++) {
    load load = offline_load(all->offline.values[i]);
    if (!measure_serve(row, &work, "offline", &load)) return false;
  }

  struct rusage usage; /* only before the first of our own large buffers, which would count as well */
  if (first && getrusage(RUSAGE_SELF, &usage) == 0)
    print_value(&(struct row){all, 0, 1}, "peak_rss_mib", "MiB", "lower",
                (double)usage.ru_maxrss / 1024.0);
  return true;
}

/* How near generation comes to the speed at which the host reads its memory; on a GPU only how fast it reads the
 * weights, whose memory is not the host's. Called when the model has
 * been freed, so that the buffer of the measurement does not add to the memory of the process. */
static void print_memory_share(const settings *all, const xserv_model_info *info, double best_single) {
  row row = {all, info->num_threads, 1};
  if (best_single == 0) return;

  /* One step of one request reads every weight once; of an embedding table that isn't also the
   * output matrix, only a row. */
  double step_bytes = (double)info->weights_bytes;
  if (all->untied)
    step_bytes -= (double)info->vocab_size * info->hidden_size * (info->dtype == XSERV_DTYPE_F32 ? 4 : 2);
  double weights = best_single * step_bytes / 1e9;
  print_value(&row, "weights_gb_s", "GB/s", "higher", weights);
  if (info->num_threads == 0) return; /* a GPU */
  double memory = read_bandwidth(info->num_threads) / 1e9;
  print_value(&row, "memory_gb_s", "GB/s", "higher", memory);
  if (memory > 0) print_value(&row, "memory_share", "of 1", "higher", weights / memory);
}

static bool measure_threads(const settings *all, uint32_t threads) {
  xserv_load_options options;
  xserv_model *model = NULL;
  xserv_model_info info = {.struct_size = sizeof info};
  double best_single = 0;
  if (xserv_load_options_default(&options) != XSERV_STATUS_OK) return false;
  options.num_threads = threads;
  options.deterministic = all->deterministic;
  bool good = xserv_load(all->model_path, &options, &model) == XSERV_STATUS_OK &&
              xserv_model_get_info(model, &info) == XSERV_STATUS_OK;
  if (!good) {
    fprintf(stderr, "bench: %s\n", xserv_last_error());
  } else {
    fprintf(stderr, "%s, %.3g GB of weights, %s, xserv %s\n", info.architecture,
            (double)info.weights_bytes / 1e9, info.device, xserv_version());
    good = measure_model(all, threads == all->threads.values[0], model, &info, &best_single);
  }
  xserv_model_free(model);
  if (good) print_memory_share(all, &info, best_single);
  return good;
}

int main(int argc, char **argv) {
  settings all = {.prompts = {{128, 512}, 2}, .gen = {{64}, 1}, .depths = {{0}, 1},
                  .threads = {{0}, 1}, .batch = {{1}, 1}, .reps = 3};
  for (int i = 1; i < argc; i++) {
    uint64_t reps;
    if (option_list(argc, argv, &i, "--prompts", 1, 1u << 20, all.prompts.values, &all.prompts.len) ||
        option_list(argc, argv, &i, "--gen", 1, 1u << 20, all.gen.values, &all.gen.len) ||
        option_list(argc, argv, &i, "--depths", 0, 1u << 20, all.depths.values, &all.depths.len) ||
        option_list(argc, argv, &i, "--threads", 0, 1024, all.threads.values, &all.threads.len) ||
        option_list(argc, argv, &i, "--serve", 1, 1024, all.serve.values, &all.serve.len) ||
        option_list(argc, argv, &i, "--offline", 1, 1024, all.offline.values, &all.offline.len) ||
        option_list(argc, argv, &i, "--batch", 1, 256, all.batch.values, &all.batch.len)) {
      /* stored */
    } else if (option_number(argc, argv, &i, "--reps", 1000, &reps)) {
      all.reps = reps > 0 ? (uint32_t)reps : 1;
    } else if (strcmp(argv[i], "--json") == 0) {
      all.json = true;
    } else if (strcmp(argv[i], "--deterministic") == 0) {
      all.deterministic = true;
    } else if (strcmp(argv[i], "--untied") == 0) {
      all.untied = true;
    } else if (argv[i][0] != '-' && all.model_path == NULL) {
      all.model_path = argv[i];
    } else {
      fprintf(stderr, "bench: unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (all.model_path == NULL) {
    fprintf(stderr, "usage: bench MODEL [--prompts N,N] [--gen N,N] [--depths N,N] [--threads N,N] "
                    "[--batch N,N] [--serve N,N] [--offline N,N] [--reps N] [--untied] [--deterministic] "
                    "[--json]\n");
    return 2;
  }
  if (!all.json) printf("| %-26s | %12s | %-9s |\n|---|---:|---|\n", "metric", "value", "unit");
  for (size_t i = 0; i < all.threads.len; i++)
    if (!measure_threads(&all, all.threads.values[i])) return 1;
  return 0;
}
