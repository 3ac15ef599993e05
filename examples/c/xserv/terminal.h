/* The terminal of a conversation: its modes, and what is written to it. */

#ifndef XSERV_PROGRAM_TERMINAL_H
#define XSERV_PROGRAM_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>

typedef enum terminal_mode {
  TERMINAL_AS_FOUND, /* as it was before the program */
  TERMINAL_EDITING,  /* every key is read as it is pressed, Ctrl-C too */
  TERMINAL_WATCHING, /* the same, but Ctrl-C, Ctrl-Z and Ctrl-\ are signals */
} terminal_mode;

/*
 * Returns whether lines can be edited: standard input and output are a terminal, and TERM is not
 * "dumb". If so, the terminal will be as it was found whenever and however the program ends or is
 * stopped, SIGKILL apart.
 */
bool terminal_begin(void);

/* Changes the modes. What was typed and not read yet is kept. */
void terminal_set(terminal_mode mode);

/* Does what Ctrl-Z does: stops the program, and its pipeline, until it is continued. */
void terminal_suspend(void);

/* Returns whether the program was continued after a stop since the last call: the screen has
 * changed. */
bool terminal_was_resumed(void);

/* The size of the terminal in characters; 80 by 24 if it is unknown. */
void terminal_size(int fd, size_t *columns, size_t *rows);

/* Whether a stream shows colours and can be drawn on: a terminal, where TERM is not "dumb". */
bool terminal_is_drawable(int fd);

/* Writes a text of whole characters to standard output. On a terminal, characters that it would act
 * on (of a model's text, for example) come out as U+FFFD. Returns false if it can't be written. */
bool terminal_write_text(const char *text, size_t len);

#endif
