/* Separates what a model thinks from what it answers: text between <think> and </think> at the
 * beginning of an answer, which comes in pieces. */

#ifndef XSERV_PROGRAM_THINKING_H
#define XSERV_PROGRAM_THINKING_H

#include <stdbool.h>
#include <stddef.h>

#include "../common/text_buffer.h"

typedef enum thinking_state {
  THINKING_UNKNOWN, /* nothing but white space, or a part of <think>, has come */
  THINKING_INSIDE,
  THINKING_AFTER, /* the answer itself */
} thinking_state;

/* Receives text of the kind `thought` says. Returns false to stop. */
typedef bool (*thinking_callback)(const char *text, size_t len, bool thought, void *user_data);

typedef struct thinking {
  thinking_state state;
  bool trimming;    /* white space is left out until there is text */
  text_buffer held; /* text whose meaning is not known yet */
  thinking_callback callback;
  void *user_data;
} thinking;

/* inside: the prompt has opened <think> already, as some chat templates do. */
void thinking_begin(thinking *self, bool inside, thinking_callback callback, void *user_data);

/* Takes a piece, and passes on what is known now. The tags and the white space around what they
 * enclose are left out. Returns false as soon as the callback has. */
bool thinking_push(thinking *self, const char *text, size_t len);

/* Passes on what is held back, and frees it. */
bool thinking_end(thinking *self);

#endif
