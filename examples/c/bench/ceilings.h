/* How fast a device reads its memory and multiplies large matrices, measured by operators of the library. */

#ifndef EXAMPLES_BENCH_CEILINGS_H
#define EXAMPLES_BENCH_CEILINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "limits.h"

/* What to measure with. */
typedef struct probes {
  uint32_t device_kind; /* an xserv_device_kind */
  uint32_t dtype;       /* an xserv_dtype: of the weights that are read, and of the product */
  size_t most_bytes;    /* to read, and the least: half as many are tried where there is no memory, */
  size_t least_bytes;   /* and so on. Powers of two of at least 4 MiB, and several times the caches. */
  int64_t gemm_size;    /* rows and columns of the matrices */
  double round_seconds; /* how long a measurement takes; the result is the median of several */
} probes;

/* Those for a GPU: 4 GiB, or 512 MiB if there is no more, and a product of 8192 rows and columns. */
probes gpu_probes(uint32_t dtype);

/* What was found, and with how much. */
typedef struct measured {
  ceilings ceilings;
  size_t num_bytes; /* that were read */
} measured;

/*
 * The read rate is the better one of two kernels that do little but read: a product of one row with a matrix, and a
 * search for the largest elements. The rate of products is that of XSERV_GEMM_AUTO on random numbers, kept up for
 * round_seconds and longer: a GPU slows down when it draws all the power that it may. Returns false, with a message
 * on stderr, if the library refuses.
 */
bool measure_ceilings(const probes *probes, measured *result);

#endif
