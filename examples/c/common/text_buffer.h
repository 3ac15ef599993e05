/* A string that grows, and JSON strings written into it. */

#ifndef EXAMPLES_TEXT_BUFFER_H
#define EXAMPLES_TEXT_BUFFER_H

#include <stddef.h>

/* Initialised with {0}. data ends in a NUL (NULL while nothing was appended), which len does not
 * count. */
typedef struct text_buffer {
  char *data;
  size_t len;
  size_t capacity;
} text_buffer;

/* These functions end the program with a message when memory runs out, as an example may. */
void text_append(text_buffer *buffer, const char *text);
void text_append_bytes(text_buffer *buffer, const char *bytes, size_t len);

/* Appends the text in quotes, with everything escaped that JSON requires. The bytes are UTF-8. */
void text_append_json_string(text_buffer *buffer, const char *bytes, size_t len);

/* Forgets everything after the first len bytes. */
void text_truncate(text_buffer *buffer, size_t len);

void text_free(text_buffer *buffer);

#endif
