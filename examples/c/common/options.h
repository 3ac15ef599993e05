/* Command-line options with a value: "--name value". */

#ifndef EXAMPLES_OPTIONS_H
#define EXAMPLES_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_LIST 16

/*
 * Each checks whether argv[*i] is the option `name`. If not, it returns false. If so, it stores the
 * value, moves *i to it and returns true; a missing or invalid value ends the program with exit
 * code 2 and a message.
 */
bool option_text(int argc, char **argv, int *i, const char *name, const char **value);
bool option_number(int argc, char **argv, int *i, const char *name, uint64_t max, uint64_t *value);
bool option_float(int argc, char **argv, int *i, const char *name, float *value);

/* "--name 1,2,3": stores at most MAX_LIST numbers from min to max, and their count. */
bool option_list(int argc, char **argv, int *i, const char *name, uint32_t min, uint32_t max,
                 uint32_t values[MAX_LIST], size_t *num_values);

#endif
