/* Measures how fast a device reads memory and multiplies large matrices, with the library's
 * operators. */

#ifndef EXAMPLES_BENCH_CEILINGS_H
#define EXAMPLES_BENCH_CEILINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "limits.h"

/* The sizes to measure with. */
typedef struct probes {
  uint32_t device_kind; /* an xserv_device_kind */
  uint32_t dtype;       /* an xserv_dtype: of the weights that are read, and of the product */
  /* Bytes to read: if there is no memory for most_bytes, half as many are tried, and so on down to
   * least_bytes. Powers of two of at least 4 MiB, and several times the caches. */
  size_t most_bytes, least_bytes;
  int64_t gemm_size;    /* rows and columns of the matrices */
  double round_seconds; /* how long a measurement takes; the result is the median of several */
} probes;

/* Returns the sizes for a GPU: 4 GiB, down to 512 MiB where there is no more, and matrices of 8192
 * rows. */
probes gpu_probes(uint32_t dtype);

/* The measured rates, and the sizes they were measured with. */
typedef struct measured {
  ceilings ceilings;
  size_t num_bytes; /* that were read */
} measured;

/*
 * Measures both rates. The read rate is the better one of two kernels that do little but read: a
 * product of one row with a matrix, and a search for the largest elements. The rate of products is
 * that of XSERV_GEMM_AUTO on random numbers, sustained for round_seconds and longer: a GPU slows
 * down when it reaches its power limit. Returns false, with a message on stderr, if the library
 * refuses.
 */
bool measure_ceilings(const probes *probes, measured *result);

#endif
