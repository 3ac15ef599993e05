/* The measurements of bench.c with many requests at once: a server's load, from one thread. */

#ifndef EXAMPLES_BENCH_SERVE_H
#define EXAMPLES_BENCH_SERVE_H

#include "measure.h"

/* Percentiles of the seconds that requests, or tokens, waited. */
typedef struct waits {
  double p50, p95, p99;
} waits;

typedef struct serving {
  double tokens_per_second;   /* generated, of all requests together */
  double requests_per_second; /* ended */
  waits first;                /* from arriving to the first token */
  waits next;                 /* between tokens of a request, as they are taken */
  double idle;                /* see idle_share() */
} serving;

/* The load of the server. Lengths and arrivals are random, but the same for every load of the same
 * sizes. */
typedef struct load {
  uint32_t at_once, total; /* the most requests under way at a time, and the total */
  uint32_t least_prompt, most_prompt, least_tokens, most_tokens;
  float temperature;
  double rate; /* independent arrivals per second; 0: as soon as there is room */
} load;

/* Returns a load of short chats: `num` requests under way until four times as many have ended. */
load chat_load(uint32_t num);

/* Returns a load of `num` requests, all submitted at once: prompts of 100 to 1024 tokens, 100 to
 * 1024 generated at temperature 0.6. */
load offline_load(uint32_t num);

/* Returns a load of the requests of offline_load(), of which `rate` arrive per second. */
load poisson_load(uint32_t num, double rate);

/* Runs a load. Returns false, with a message on stderr, if the library refuses. */
bool measure_serving(workload *work, const load *load, serving *result);

#endif
