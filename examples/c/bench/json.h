/* The little of JSON that it takes to look up what the files of a model's folder say. */

#ifndef EXAMPLES_BENCH_JSON_H
#define EXAMPLES_BENCH_JSON_H

#include <stdbool.h>
#include <stdint.h>

#define MAX_PATH 4096

/* Returns `len` bytes of a file and a NUL; NULL if it does not have them. The caller frees them. */
char *read_part(const char *path, uint64_t begin, uint64_t len);

/* Returns the text of a file in `folder`; NULL if it cannot be read. The caller frees it. */
char *read_json(const char *folder, const char *name);

/* Returns the value of a member of the JSON object that begins at `at`; NULL if it has no such
 * member, or `at` is NULL. */
const char *member(const char *at, const char *key);

/* Skips from the opening quote of a string to after the closing one. */
const char *skip_string(const char *at);

/* Whether `text` begins with `start`; not if it is NULL. */
bool begins_with(const char *text, const char *start);

#endif
