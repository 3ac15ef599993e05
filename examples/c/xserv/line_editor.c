#define _POSIX_C_SOURCE 200809L

#include "line_editor.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../common/interrupt.h"
#include "terminal.h"
#include "utf8.h"

enum { ESCAPE_MS = 200 }; /* an Escape that nothing follows for this long is a key of its own */

typedef struct entries {
  text_buffer *values;
  size_t len, capacity;
} entries;

struct line_editor {
  int interrupt_fd;
  const char *prompt;
  text_buffer text;
  size_t cursor; /* in bytes, between characters */
  bool pasting;
  char last_pasted;
  entries history;
  size_t entry;      /* which of them is shown; history.len: none */
  text_buffer draft; /* what was typed before going through the history */
  char keys[4096];   /* read and not used yet */
  size_t num_keys, next_key;
  char sequence[32]; /* the beginning of a key that is several bytes long */
  size_t sequence_len;
  size_t cursor_row; /* on the screen, from the first row of the text */
};

/* Characters. Those of width 0 (accents, joiners) belong to the one before. */

static size_t next_in(const line_editor *self, size_t at, uint32_t *character) {
  const size_t bytes = utf8_decode(self->text.data + at, self->text.len - at, character);
  return bytes == 0 ? 1 : bytes; /* there are only whole characters in the text */
}

static size_t right_of(const line_editor *self, size_t at) {
  uint32_t character;
  if (at < self->text.len) at += next_in(self, at, &character);
  while (at < self->text.len) {
    const size_t bytes = next_in(self, at, &character);
    if (utf8_is_control(character) || utf8_width(character) > 0) break;
    at += bytes;
  }
  return at;
}

static size_t left_of(const line_editor *self, size_t at) {
  uint32_t character = 0;
  while (at > 0) {
    at--;
    while (at > 0 && ((unsigned char)self->text.data[at] & 0xc0) == 0x80) at--;
    next_in(self, at, &character);
    if (utf8_is_control(character) || utf8_width(character) > 0) break;
  }
  return at;
}

static size_t line_start(const line_editor *self, size_t at) {
  while (at > 0 && self->text.data[at - 1] != '\n') at--;
  return at;
}

static size_t line_end(const line_editor *self, size_t at) {
  while (at < self->text.len && self->text.data[at] != '\n') at++;
  return at;
}

static bool is_space(char byte) { return byte == ' ' || byte == '\t' || byte == '\n'; }

static size_t word_left(const line_editor *self, size_t at) {
  while (at > 0 && is_space(self->text.data[at - 1])) at--;
  while (at > 0 && !is_space(self->text.data[at - 1])) at--;
  return at;
}

static size_t word_right(const line_editor *self, size_t at) {
  while (at < self->text.len && is_space(self->text.data[at])) at++;
  while (at < self->text.len && !is_space(self->text.data[at])) at++;
  return at;
}

static void erase(line_editor *self, size_t from, size_t to) {
  if (from >= to) return;
  memmove(self->text.data + from, self->text.data + to, self->text.len - to);
  text_truncate(&self->text, self->text.len - (to - from));
  self->cursor = from;
}

static void insert(line_editor *self, const char *bytes, size_t len) {
  text_append_bytes(&self->text, bytes, len); /* for the room */
  memmove(self->text.data + self->cursor + len, self->text.data + self->cursor, self->text.len - len - self->cursor);
  memcpy(self->text.data + self->cursor, bytes, len);
  self->cursor += len;
}

/* The screen. A text is shown in rows that never reach the last column, so that it does not matter
 * what a terminal does there. Rows after the first are indented by the width of the prompt. */

typedef struct place {
  size_t row, column;
} place;

static void advance(place *at, uint32_t character, size_t columns) {
  const size_t width = character == '\t' ? 4 : (size_t)utf8_width(character);
  if (character == '\n') {
    *at = (place){at->row + 1, 0};
  } else if (at->column + width > columns) {
    *at = (place){at->row + 1, width};
  } else {
    at->column += width;
  }
}

static void write_screen(const text_buffer *out) {
  for (size_t at = 0; at < out->len;) {
    ssize_t written = write(STDOUT_FILENO, out->data + at, out->len - at);
    if (written < 0 && errno != EINTR) return;
    if (written > 0) at += (size_t)written;
  }
}

static void draw(line_editor *self) {
  size_t columns, rows;
  terminal_size(STDOUT_FILENO, &columns, &rows);
  const size_t indent = strlen(self->prompt);
  columns = columns > indent + 3 ? columns - indent - 1 : 2;

  place at = {0, 0}, cursor = {0, 0};
  for (size_t i = 0; i < self->text.len;) {
    uint32_t character;
    const size_t bytes = next_in(self, i, &character);
    advance(&at, character, columns);
    i += bytes;
    if (i == self->cursor) cursor = at;
  }
  /* The rows around the cursor that fit on the screen. */
  const size_t last = at.row, height = rows < 2 ? 1 : rows - 1;
  const size_t top = cursor.row < height ? 0 : cursor.row - height + 1;
  const size_t bottom = last < top + height ? last : top + height - 1;

  text_buffer out = {0};
  char move[48];
  if (self->cursor_row > 0) {
    snprintf(move, sizeof move, "\033[%zuA", self->cursor_row);
    text_append(&out, move);
  }
  text_append(&out, "\r\033[J");
  if (top == 0) text_append(&out, self->prompt);
  else text_append_bytes(&out, "                ", indent < 16 ? indent : 16);
  at = (place){0, 0};
  for (size_t i = 0; i < self->text.len && at.row <= bottom;) {
    uint32_t character;
    const size_t bytes = next_in(self, i, &character), row = at.row;
    advance(&at, character, columns);
    if (at.row > row && at.row > top && at.row <= bottom) {
      text_append(&out, "\r\n");
      text_append_bytes(&out, "                ", indent < 16 ? indent : 16);
    }
    if (at.row >= top && at.row <= bottom && character != '\n') {
      if (character == '\t') text_append(&out, "    ");
      else text_append_bytes(&out, self->text.data + i, bytes);
    }
    i += bytes;
  }
  if (bottom > cursor.row) {
    snprintf(move, sizeof move, "\033[%zuA", bottom - cursor.row);
    text_append(&out, move);
  }
  snprintf(move, sizeof move, "\r\033[%zuC", indent + cursor.column);
  text_append(&out, move);
  self->cursor_row = cursor.row - top;
  write_screen(&out);
  text_free(&out);
}

/* The history. */

static void assign(text_buffer *to, const text_buffer *from) {
  text_truncate(to, 0);
  text_append_bytes(to, from->data, from->len);
}

static void show_entry(line_editor *self, size_t entry) {
  if (self->entry == self->history.len) assign(&self->draft, &self->text);
  self->entry = entry;
  assign(&self->text, entry == self->history.len ? &self->draft : &self->history.values[entry]);
  self->cursor = self->text.len;
}

static void go_up(line_editor *self) {
  const size_t start = line_start(self, self->cursor);
  if (start > 0) {
    const size_t above = line_start(self, start - 1), target = above + (self->cursor - start);
    self->cursor = target < start - 1 ? target : start - 1;
    while (((unsigned char)self->text.data[self->cursor] & 0xc0) == 0x80) self->cursor--;
  } else if (self->entry > 0) {
    show_entry(self, self->entry - 1);
  }
}

static void go_down(line_editor *self) {
  const size_t end = line_end(self, self->cursor), start = line_start(self, self->cursor);
  if (end < self->text.len) {
    const size_t below_end = line_end(self, end + 1), target = end + 1 + (self->cursor - start);
    self->cursor = target < below_end ? target : below_end;
    while (self->cursor < self->text.len && ((unsigned char)self->text.data[self->cursor] & 0xc0) == 0x80)
      self->cursor--;
  } else if (self->entry < self->history.len) {
    show_entry(self, self->entry + 1);
  }
}

/* Keys. */

typedef enum outcome { GO_ON, ENTERED, INTERRUPTED, ENDED } outcome;

/* A whole sequence that begins with Escape. */
static void run_sequence(line_editor *self) {
  static const struct {
    const char *sequence;
    char key; /* the control character that does the same, or another letter */
  } names[] = {
      {"[A", 16},    {"OA", 16},    {"[B", 14},    {"OB", 14},    {"[C", 6},     {"OC", 6},     {"[D", 2},
      {"OD", 2},     {"[H", 1},     {"OH", 1},     {"[1~", 1},    {"[7~", 1},    {"[F", 5},     {"OF", 5},
      {"[4~", 5},    {"[8~", 5},    {"[3~", 'd'},  {"[1;5C", 'f'}, {"[1;3C", 'f'}, {"f", 'f'},  {"[1;5D", 'b'},
      {"[1;3D", 'b'}, {"b", 'b'},   {"[200~", '('}, {"[201~", ')'}, {"\r", '\n'}, {"\n", '\n'}, {"\177", 23},
  };
  char key = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strlen(names[i].sequence) == self->sequence_len - 1 &&
        memcmp(names[i].sequence, self->sequence + 1, self->sequence_len - 1) == 0)
      key = names[i].key;
  self->sequence_len = 0;
  if (self->pasting) {
    if (key == ')') self->pasting = false;
    return;
  }
  switch (key) {
  case 1: self->cursor = line_start(self, self->cursor); break;
  case 2: self->cursor = left_of(self, self->cursor); break;
  case 5: self->cursor = line_end(self, self->cursor); break;
  case 6: self->cursor = right_of(self, self->cursor); break;
  case 14: go_down(self); break;
  case 16: go_up(self); break;
  case 23: erase(self, word_left(self, self->cursor), self->cursor); break;
  case 'b': self->cursor = word_left(self, self->cursor); break;
  case 'd': erase(self, self->cursor, right_of(self, self->cursor)); break;
  case 'f': self->cursor = word_right(self, self->cursor); break;
  case '(': self->pasting = true; break;
  case '\n': insert(self, "\n", 1); break;
  default: break; /* a key without a meaning here */
  }
}

static outcome press(line_editor *self, char byte);

static outcome continue_sequence(line_editor *self, char byte) {
  if (self->sequence_len == sizeof self->sequence) self->sequence_len = 2; /* it has no meaning anyway */
  self->sequence[self->sequence_len++] = byte;
  const char *sequence = self->sequence;
  const size_t len = self->sequence_len;
  if (sequence[0] == '\033') {
    /* ESC [ parameters letter, ESC O letter, or ESC key. */
    if (len == 1 || (len == 2 && (byte == '[' || byte == 'O'))) return GO_ON;
    if (len > 2 && sequence[1] == '[' && (byte < 0x40 || byte > 0x7e)) return GO_ON;
    run_sequence(self);
    return GO_ON;
  }
  const size_t whole = utf8_length((unsigned char)sequence[0]);
  const bool broken = len > 1 && ((unsigned char)byte & 0xc0) != 0x80;
  if (!broken && len < whole) return GO_ON;
  uint32_t character;
  if (!broken && utf8_decode(sequence, len, &character) == len && !utf8_is_control(character))
    insert(self, sequence, len);
  self->sequence_len = 0;
  return broken ? press(self, byte) : GO_ON; /* what is no character is left out */
}

static outcome press(line_editor *self, char byte) {
  if (self->sequence_len > 0 || byte == '\033' || ((unsigned char)byte & 0x80)) {
    return continue_sequence(self, byte);
  }
  if (self->pasting) {
    /* A terminal sends what Enter sends for the line breaks of a text. */
    if (byte == '\r' || (byte == '\n' && self->last_pasted != '\r')) insert(self, "\n", 1);
    else if (byte == '\t' || (byte >= 0x20 && byte != 0x7f)) insert(self, &byte, 1);
    self->last_pasted = byte;
    return GO_ON;
  }
  switch (byte) {
  case '\r':
  case '\n': return ENTERED;
  case 3: return INTERRUPTED;
  case 4:
    if (self->text.len == 0) return ENDED;
    erase(self, self->cursor, right_of(self, self->cursor));
    break;
  case 1: self->cursor = line_start(self, self->cursor); break;
  case 2: self->cursor = left_of(self, self->cursor); break;
  case 5: self->cursor = line_end(self, self->cursor); break;
  case 6: self->cursor = right_of(self, self->cursor); break;
  case 8:
  case 0x7f: erase(self, left_of(self, self->cursor), self->cursor); break;
  case 11: erase(self, self->cursor, line_end(self, self->cursor)); break;
  case 12:
    self->cursor_row = 0;
    write_screen(&(text_buffer){.data = "\033[H\033[2J", .len = 7});
    break;
  case 14: go_down(self); break;
  case 16: go_up(self); break;
  case 21: erase(self, line_start(self, self->cursor), self->cursor); break;
  case 23: erase(self, word_left(self, self->cursor), self->cursor); break;
  case 26: terminal_suspend(); break;
  default:
    if (byte >= 0x20) insert(self, &byte, 1);
  }
  return GO_ON;
}

/* Waits for keys, drawing the text before there is nothing to do. */
static outcome read_keys(line_editor *self) {
  struct pollfd news[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = self->interrupt_fd, .events = POLLIN}};
  if (poll(news, 2, 0) == 0) draw(self);
  for (;;) {
    const bool alone = self->sequence_len == 1 && self->sequence[0] == '\033' && !self->pasting;
    const int ready = poll(news, 2, alone ? ESCAPE_MS : -1);
    if (ready == 0) self->sequence_len = 0;
    if (terminal_was_resumed()) self->cursor_row = 0; /* other programs have written meanwhile */
    if (ready < 0) draw(self); /* a signal: the window may have another size */
    if (ready > 0) break;
  }
  if (news[1].revents != 0 && interrupt_take()) return INTERRUPTED;
  if (news[0].revents == 0) return GO_ON;
  ssize_t len = read(STDIN_FILENO, self->keys, sizeof self->keys);
  if (len == 0 || (len < 0 && errno != EINTR && errno != EAGAIN)) return ENDED;
  self->next_key = 0;
  self->num_keys = len < 0 ? 0 : (size_t)len;
  return GO_ON;
}

line_editor *line_editor_new(int interrupt_fd) {
  line_editor *self = calloc(1, sizeof *self);
  if (self == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  self->interrupt_fd = interrupt_fd;
  return self;
}

edit_result line_editor_read(line_editor *self, const char *prompt, text_buffer *text) {
  self->prompt = prompt;
  text_truncate(&self->text, 0);
  self->cursor = self->cursor_row = self->sequence_len = 0;
  self->pasting = false;
  self->entry = self->history.len;
  outcome outcome = GO_ON;
  while (outcome == GO_ON) {
    if (self->next_key < self->num_keys) outcome = press(self, self->keys[self->next_key++]);
    else outcome = read_keys(self);
  }
  /* Leaves the text on the screen and the cursor below. */
  self->cursor = self->text.len;
  draw(self);
  write_screen(&(text_buffer){.data = "\r\n", .len = 2});
  text_truncate(text, 0);
  text_append_bytes(text, self->text.data, self->text.len);
  return outcome == ENTERED ? EDIT_TEXT : outcome == INTERRUPTED ? EDIT_INTERRUPT : EDIT_END;
}

void line_editor_remember(line_editor *self, const text_buffer *text) {
  entries *all = &self->history;
  if (text->len == 0) return;
  if (all->len > 0 && strcmp(all->values[all->len - 1].data, text->data) == 0) return;
  if (all->len == all->capacity) {
    all->capacity = all->capacity == 0 ? 16 : 2 * all->capacity;
    text_buffer *values = realloc(all->values, all->capacity * sizeof *values);
    if (values == NULL) {
      fprintf(stderr, "out of memory\n");
      exit(1);
    }
    all->values = values;
  }
  all->values[all->len] = (text_buffer){0};
  assign(&all->values[all->len++], text);
}

void line_editor_free(line_editor *self) {
  if (self == NULL) return;
  for (size_t i = 0; i < self->history.len; i++) text_free(&self->history.values[i]);
  free(self->history.values);
  text_free(&self->text);
  text_free(&self->draft);
  free(self);
}
