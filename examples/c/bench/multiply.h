/* The speed at which the processor's fastest instructions multiply: the limit of long prompts. */

#ifndef EXAMPLES_BENCH_MULTIPLY_H
#define EXAMPLES_BENCH_MULTIPLY_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Returns the floating-point operations per second that num_threads do together with f32
 * multiply-adds of 512 bits (256 where there are no others), the best of several rounds; 0 on other
 * processors than x86-64 with AVX2.
 */
double multiply_add_rate(uint32_t num_threads);

/*
 * Returns those of AMX products of bf16. To be called only if the library uses AMX in this process:
 * then the processor has it, and the system has been asked for it.
 */
double amx_rate(uint32_t num_threads);

#endif
