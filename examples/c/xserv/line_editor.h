/*
 * Reads texts from a terminal, with keys to edit them.
 *
 * Left, Right, Home, End, Ctrl-A, -B, -E and -F move (with Ctrl or Alt the arrows move by words);
 * Backspace and Delete take whole characters; Ctrl-W a word, Ctrl-U and Ctrl-K the line before and
 * after the cursor; Up, Down, Ctrl-P and -N go through earlier texts. A text that is pasted is
 * entered as it is, with its lines; Alt-Enter begins another line. Ctrl-L clears the screen, Ctrl-Z
 * suspends the program.
 */

#ifndef XSERV_PROGRAM_LINE_EDITOR_H
#define XSERV_PROGRAM_LINE_EDITOR_H

#include "../common/text_buffer.h"

typedef enum edit_result {
  EDIT_TEXT,      /* Enter was pressed */
  EDIT_INTERRUPT, /* Ctrl-C; the text is what had been typed */
  EDIT_END,       /* Ctrl-D in an empty line, or the terminal is gone */
} edit_result;

typedef struct line_editor line_editor;

/* interrupt_fd: as interrupt_begin() returns it, for a SIGINT that no key has sent. */
line_editor *line_editor_new(int interrupt_fd);

/* Reads a text. The terminal must be in TERMINAL_EDITING mode. The prompt is ASCII. */
edit_result line_editor_read(line_editor *editor, const char *prompt, text_buffer *text);

/* Adds a text to those that Up finds. */
void line_editor_remember(line_editor *editor, const text_buffer *text);

void line_editor_free(line_editor *editor);

#endif
