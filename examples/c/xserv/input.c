#define _POSIX_C_SOURCE 200809L

#include "input.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "../common/interrupt.h"
#include "terminal.h"

static const char prompt[] = "> ";

void input_begin(input *self, int interrupt_fd) {
  *self = (input){.interrupt_fd = interrupt_fd, .is_interactive = isatty(STDIN_FILENO)};
  if (terminal_begin()) self->editor = line_editor_new(interrupt_fd);
  if (self->editor != NULL) terminal_set(TERMINAL_WATCHING);
}

/* Reads a line of any length. (stdio would hide lines that it has read already from poll().) */
static edit_result read_line(input *self, text_buffer *text) {
  text_truncate(text, 0);
  for (;;) {
    while (self->next < self->len) {
      const char byte = self->bytes[self->next++];
      if (byte == '\n') {
        if (text->len > 0 && text->data[text->len - 1] == '\r') text_truncate(text, text->len - 1);
        return EDIT_TEXT;
      }
      text_append_bytes(text, &byte, 1);
    }
    struct pollfd news[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = self->interrupt_fd, .events = POLLIN}};
    if (poll(news, 2, -1) < 0) continue; /* a signal */
    if (news[1].revents != 0 && interrupt_take()) return EDIT_INTERRUPT;
    if (news[0].revents == 0) continue;
    const ssize_t len = read(STDIN_FILENO, self->bytes, sizeof self->bytes);
    if (len < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (len <= 0) return text->len > 0 ? EDIT_TEXT : EDIT_END;
    self->next = 0;
    self->len = (size_t)len;
  }
}

edit_result input_read(input *self, text_buffer *text) {
  edit_result result;
  if (self->editor != NULL) {
    terminal_set(TERMINAL_EDITING);
    result = line_editor_read(self->editor, prompt, text);
    terminal_set(TERMINAL_WATCHING);
  } else {
    if (self->is_interactive) {
      fputs(prompt, stdout);
      fflush(stdout);
    }
    result = read_line(self, text);
    if (self->is_interactive && result != EDIT_TEXT) putchar('\n');
  }
  return result;
}

void input_remember(input *self, const text_buffer *text) {
  if (self->editor != NULL) line_editor_remember(self->editor, text);
}

void input_end(input *self) {
  if (self->editor != NULL) terminal_set(TERMINAL_AS_FOUND);
  line_editor_free(self->editor);
  self->editor = NULL;
}
