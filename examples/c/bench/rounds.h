/* Work that several threads do at the same time, and how long it takes. */

#ifndef EXAMPLES_BENCH_ROUNDS_H
#define EXAMPLES_BENCH_ROUNDS_H

#include <stdint.h>

/* The part of one thread, numbered from 0, in one round. */
typedef void round_work(void *argument, uint32_t thread, uint32_t round);

/*
 * Runs `work` in num_rounds rounds on num_threads threads, which begin each round together, and
 * returns the seconds of the shortest: from when its first thread begins to when its last one ends,
 * by their own clocks. Returns 0 if there is no memory.
 */
double shortest_round(uint32_t num_threads, uint32_t num_rounds, round_work *work, void *argument);

#endif
