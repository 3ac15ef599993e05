/* Prints the measurements of bench.c: lines of a table, or JSON. */

#ifndef EXAMPLES_BENCH_REPORT_H
#define EXAMPLES_BENCH_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The setting in which a number was measured. */
typedef struct row {
  bool json;
  bool random_weights;     /* the model's weights are random numbers, of which JSON tells */
  bool name_threads;       /* more than one number of threads is measured: names say which */
  uint32_t threads, batch; /* threads 0: it is about all of them, or a GPU */
} row;

/* The head of a table says whether the model's weights are random numbers. */
void print_head(bool json, bool random_weights);

/* `better`: "higher" or "lower". */
void print_value(const row *row, const char *name, const char *unit, const char *better, double value);

/* Sorts the values and returns their median; 0 if there are none. */
double percentile(double *values, size_t count, double share);
double median(double *values, size_t count);

#endif
