#include "text_buffer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void reserve(text_buffer *buffer, size_t more) {
  if (more < buffer->capacity - buffer->len) return; /* one byte is kept for the NUL */
  size_t capacity = buffer->capacity == 0 ? 256 : buffer->capacity;
  while (capacity - buffer->len <= more) {
    if (capacity > (size_t)-1 / 2) abort();
    capacity *= 2;
  }
  char *data = realloc(buffer->data, capacity);
  if (data == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  buffer->data = data;
  buffer->capacity = capacity;
}

void text_append_bytes(text_buffer *buffer, const char *bytes, size_t len) {
  reserve(buffer, len);
  if (len > 0) memcpy(buffer->data + buffer->len, bytes, len);
  buffer->len += len;
  buffer->data[buffer->len] = '\0';
}

void text_append(text_buffer *buffer, const char *text) {
  text_append_bytes(buffer, text, strlen(text));
}

void text_append_json_string(text_buffer *buffer, const char *bytes, size_t len) {
  text_append(buffer, "\"");
  for (size_t i = 0; i < len; i++) {
    unsigned char byte = (unsigned char)bytes[i];
    char escape[8];
    switch (byte) {
    case '"': text_append(buffer, "\\\""); break;
    case '\\': text_append(buffer, "\\\\"); break;
    case '\n': text_append(buffer, "\\n"); break;
    case '\r': text_append(buffer, "\\r"); break;
    case '\t': text_append(buffer, "\\t"); break;
    default:
      if (byte < 0x20) { /* JSON allows no control characters; all other bytes are left as they are */
        snprintf(escape, sizeof escape, "\\u%04x", byte);
        text_append(buffer, escape);
      } else {
        text_append_bytes(buffer, bytes + i, 1);
      }
    }
  }
  text_append(buffer, "\"");
}

void text_truncate(text_buffer *buffer, size_t len) {
  if (len >= buffer->len) return;
  buffer->len = len;
  buffer->data[len] = '\0';
}

void text_free(text_buffer *buffer) {
  free(buffer->data);
  *buffer = (text_buffer){0};
}
