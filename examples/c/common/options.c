#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void refuse(const char *name, const char *value) {
  fprintf(stderr, "%s: %s is not a value that it can have\n", name, value);
  exit(2);
}

bool option_text(int argc, char **argv, int *i, const char *name, const char **value) {
  if (strcmp(argv[*i], name) != 0) return false;
  if (*i + 1 >= argc) {
    fprintf(stderr, "%s: needs a value\n", name);
    exit(2);
  }
  *value = argv[++*i];
  return true;
}

/* Reads digits and returns where they end. */
static const char *read_number(const char *name, const char *text, uint64_t max, uint64_t *value) {
  char *end;
  errno = 0;
  unsigned long long number = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || errno != 0 || number > max) refuse(name, text);
  *value = number;
  return end;
}

bool option_number(int argc, char **argv, int *i, const char *name, uint64_t max,
                   uint64_t *value) {
  const char *text;
  if (!option_text(argc, argv, i, name, &text)) return false;
  if (*read_number(name, text, max, value) != '\0') refuse(name, text);
  return true;
}

bool option_float(int argc, char **argv, int *i, const char *name, float *value) {
  const char *text;
  if (!option_text(argc, argv, i, name, &text)) return false;
  char *end;
  *value = strtof(text, &end);
  if (end == text || *end != '\0') refuse(name, text);
  return true;
}

bool option_list(int argc, char **argv, int *i, const char *name, uint32_t min, uint32_t max,
                 uint32_t values[MAX_LIST], size_t *num_values) {
  const char *text;
  if (!option_text(argc, argv, i, name, &text)) return false;
  *num_values = 0;
  for (const char *at = text;; at++) {
    uint64_t number = 0;
    at = read_number(name, at, max, &number);
    if (number < min || *num_values == MAX_LIST || (*at != ',' && *at != '\0')) refuse(name, text);
    values[(*num_values)++] = (uint32_t)number;
    if (*at == '\0') return true;
  }
}
