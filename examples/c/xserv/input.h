/* Reads the user's input: from a terminal with editing keys, from one without, or from a pipe. */

#ifndef XSERV_PROGRAM_INPUT_H
#define XSERV_PROGRAM_INPUT_H

#include <stdbool.h>

#include "line_editor.h"

typedef struct input {
  int interrupt_fd;
  bool is_interactive;  /* a person types: there is a prompt */
  line_editor *editor;  /* NULL: the terminal, or a pipe, gives whole lines */
  char bytes[4096];     /* without an editor: read and not used yet */
  size_t len, next;
} input;

/* Finds out what standard input is. terminal_begin() is called. */
void input_begin(input *self, int interrupt_fd);

/* Reads a text: a line, or several if they were pasted. EDIT_INTERRUPT: Ctrl-C came; the text is
 * what had been typed, where that is known. */
edit_result input_read(input *self, text_buffer *text);

/* Adds a text to those that the Up key finds. */
void input_remember(input *self, const text_buffer *text);

void input_end(input *self);

#endif
