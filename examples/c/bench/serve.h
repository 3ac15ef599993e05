/* What bench.c measures of many requests at once: a server's load, from one thread. */

#ifndef EXAMPLES_BENCH_SERVE_H
#define EXAMPLES_BENCH_SERVE_H

#include "measure.h"

typedef struct serving {
  double tokens_per_second; /* generated, of all requests together */
  double first_token_p50, first_token_p95; /* seconds from submitting to the first token */
  double next_token_p50, next_token_p95;   /* seconds between tokens of a request, as they are taken */
} serving;

/* What is asked of the server. Prompts and lengths are random, but the same for every load of the same sizes. */
typedef struct load {
  uint32_t at_once, total; /* requests under way at a time, and in all */
  uint32_t least_prompt, most_prompt, least_tokens, most_tokens;
  float temperature;
} load;

/* `num` requests under way until four times as many have ended: short chats. */
load chat_load(uint32_t num);

/* `num` requests, all submitted at once: prompts of 100 to 1024 tokens, 100 to 1024 generated at temperature 0.6. */
load offline_load(uint32_t num);

/* Runs a load. Returns false, with a message on stderr, if the library refuses. */
bool measure_serving(workload *work, const load *load, serving *result);

#endif
