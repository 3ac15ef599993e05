/* The speed at which this machine reads memory: the limit of generation at batch 1, which reads every
 * weight. */

#ifndef EXAMPLES_BENCH_BANDWIDTH_H
#define EXAMPLES_BENCH_BANDWIDTH_H

#include <stdint.h>

/*
 * Returns the bytes per second that num_threads read together from a buffer far larger than the
 * caches, the best of several rounds; 0 if there is no memory for the buffer (1 GiB).
 */
double read_bandwidth(uint32_t num_threads);

#endif
