/* What bench.c measures of many requests at once: a server's load, from one thread. */

#ifndef EXAMPLES_BENCH_SERVE_H
#define EXAMPLES_BENCH_SERVE_H

#include "measure.h"

typedef struct serving {
  double tokens_per_second; /* generated, of all requests together */
  double first_token_p50, first_token_p95; /* seconds from submitting to the first token */
  double next_token_p50, next_token_p95;   /* seconds between tokens of a request, as they are taken */
} serving;

/*
 * Keeps work->batch requests under way until four times as many have ended: prompts of 16 to 128 tokens, 16 to
 * 64 generated, both random but the same for every batch. Returns false, with a message on stderr, if the
 * library refuses.
 */
bool measure_serving(workload *work, serving *result);

#endif
