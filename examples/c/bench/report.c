#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void print_head(bool json, bool random_weights) {
  const char *metric = random_weights ? "metric (random weights)" : "metric";
  if (!json) printf("| %-26s | %12s | %-9s |\n|---|---:|---|\n", metric, "value", "unit");
}

void print_value(const row *row, const char *name, const char *unit, const char *better, double value) {
  char suffix[32] = "", full[96];
  if (row->batch > 1) snprintf(suffix, sizeof suffix, "_b%u", row->batch);
  if (row->threads > 0 && row->name_threads)
    snprintf(suffix + strlen(suffix), sizeof suffix - strlen(suffix), "_t%u", row->threads);
  /* The suffix goes before the unit, as in tg64_b4_tok_s. Other names end in it. */
  const char *tail = strstr(name, "_tok_");
  size_t stem = tail != NULL ? (size_t)(tail - name) : strlen(name);
  snprintf(full, sizeof full, "%.*s%s%s", (int)stem, name, suffix, tail != NULL ? tail : "");
  if (!row->json) {
    printf("| %-26s | %12.4g | %-9s |\n", full, value, unit);
  } else {
    printf("{\"metric\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"better\": \"%s\"", full, value, unit, better);
    if (row->threads > 0) printf(", \"threads\": %u, \"batch\": %u", row->threads, row->batch);
    puts(row->random_weights ? ", \"random_weights\": true}" : "}");
  }
  fflush(stdout);
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double percentile(double *values, size_t count, double share) {
  if (count == 0) return 0;
  qsort(values, count, sizeof *values, compare);
  return values[(size_t)(share * (double)(count - 1) + 0.5)];
}

double median(double *values, size_t count) {
  if (count == 0) return 0;
  qsort(values, count, sizeof *values, compare);
  return count % 2 == 1 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}
