/* Names with values, printed as a table or as JSON. */

#ifndef XSERV_PROGRAM_FIELDS_H
#define XSERV_PROGRAM_FIELDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum field_kind {
  FIELD_TEXT,
  FIELD_NUMBER,
  FIELD_BYTES,
  FIELD_REAL,
  FIELD_TRUTH,
  FIELD_IDS,
  FIELD_UNKNOWN /* null, or why in a table */
} field_kind;

typedef struct field {
  const char *name; /* of the JSON object's member; the table has spaces for underscores */
  field_kind kind;
  const char *text;    /* FIELD_TEXT, FIELD_UNKNOWN; a table leaves empty ones out */
  uint64_t number;     /* FIELD_NUMBER, FIELD_BYTES, FIELD_TRUTH; the length of the other two */
  double real;         /* FIELD_REAL */
  const uint32_t *ids; /* FIELD_IDS, which only JSON has */
} field;

field text_field(const char *name, const char *text);
field number_field(const char *name, uint64_t number);
field bytes_field(const char *name, uint64_t bytes);
field real_field(const char *name, double real);
field truth_field(const char *name, bool is_true);
field unknown_field(const char *name, const char *why);

/* Prints them to standard output, as one JSON object or as a table. */
void print_fields(const field *fields, size_t num_fields, bool json);

/* Writes "5.8 MiB". Returns `buffer`. */
const char *describe_bytes(uint64_t bytes, char buffer[32]);

/* "bf16" and so on, for an xserv_dtype; "cpu" or "cuda" for an xserv_device_kind. */
const char *dtype_name(uint32_t dtype);
const char *device_name(uint32_t device_kind);

/* "max_tokens" and so on, for an xserv_finish_reason: its name without the prefix, in small letters.
 * Valid until the next call. */
const char *finish_name(uint32_t finish_reason);

#endif
