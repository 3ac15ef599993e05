/* A string that grows, and JSON written into it. */

#ifndef EXAMPLES_TEXT_BUFFER_H
#define EXAMPLES_TEXT_BUFFER_H

#include <stddef.h>

/* Start with {0}. data ends in a NUL (NULL while nothing was appended); len does not count it. */
typedef struct text_buffer {
  char *data;
  size_t len;
  size_t capacity;
} text_buffer;

/* These end the program with a message when memory runs out: an example has nothing better to do. */
void text_append(text_buffer *buffer, const char *text);
void text_append_bytes(text_buffer *buffer, const char *bytes, size_t len);

/* Appends "..." with quotes, and everything escaped that JSON wants escaped. The bytes are UTF-8. */
void text_append_json_string(text_buffer *buffer, const char *bytes, size_t len);

/* Appends {"role": "...", "content": "..."}. */
void text_append_message(text_buffer *buffer, const char *role, const char *content, size_t len);

/* Forgets everything after the first len bytes. */
void text_truncate(text_buffer *buffer, size_t len);

void text_free(text_buffer *buffer);

#endif
