/* The measurements of bench.c on a model, through the public interface only. */

#ifndef EXAMPLES_BENCH_MEASURE_H
#define EXAMPLES_BENCH_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include <xserv.h>

/* A point in time: seconds of a steady clock, and CPU seconds of the whole process. */
typedef struct instant {
  double wall;
  double cpu;
} instant;

instant instant_now(void);

/* Tokens per second, and tokens per second of process CPU time. */
typedef struct rate {
  double per_second;
  double per_cpu_second;
} rate;

/* The work to run: `batch` requests at once on one model, each from a thread of its own. */
typedef struct workload {
  const xserv_model *model;
  uint32_t vocab_size;
  uint32_t batch;
  uint64_t seed; /* of the random prompts; changes with every measurement, so that nothing is cached */
} workload;

/*
 * Processes prompts of num_tokens, from an empty cache to the logits of the last token. The rate
 * counts the tokens of all requests. Returns false, with a message on stderr, if the library
 * refuses.
 */
bool measure_prompt(workload *work, uint32_t num_tokens, rate *result);

/*
 * Generates num_tokens greedily, one step each, after a prompt of `depth` tokens (0: from a
 * one-token context). The prompt is not part of the time: with several requests it is the time in
 * which all of them generate.
 */
bool measure_generation(workload *work, uint32_t depth, uint32_t num_tokens, rate *result);

/* Measures the seconds from the call to the first token, for a prompt of num_tokens. */
bool measure_first_token(workload *work, uint32_t num_tokens, double *seconds);

/*
 * Measures the seconds to the first token as an otherwise idle application sees them, of one
 * request to an idle model: from xserv_submit() to the return of xserv_next() with the first token,
 * of several.
 */
bool measure_idle_request(workload *work, uint32_t num_tokens, double *seconds);

/* Returns the share of the time between two moments in which the device waited for the library
 * although there was work. */
typedef struct device_time {
  double busy, idle; /* seconds since loading */
} device_time;

bool device_time_now(const xserv_model *model, device_time *now);
double idle_share(device_time from, device_time to);

#endif
