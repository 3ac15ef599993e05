#include "thinking.h"

#include <string.h>

static const char opening[] = "<think>", closing[] = "</think>";

static bool is_space(char byte) { return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r'; }

static size_t spaces_at(const char *text, size_t len) {
  size_t count = 0;
  while (count < len && is_space(text[count])) count++;
  return count;
}

void thinking_begin(thinking *self, bool inside, thinking_callback callback, void *user_data) {
  *self = (thinking){.state = inside ? THINKING_INSIDE : THINKING_UNKNOWN, .trimming = inside,
                     .callback = callback, .user_data = user_data};
}

/* Passes on the first bytes of what is held, and forgets them and `tag_len` bytes after them. */
static bool pass(thinking *self, size_t len, size_t tag_len) {
  text_buffer *held = &self->held;
  const size_t skipped = self->trimming ? spaces_at(held->data, len) : 0;
  bool good = true;
  if (skipped < len) {
    self->trimming = false;
    good = self->callback(held->data + skipped, len - skipped, self->state == THINKING_INSIDE, self->user_data);
  }
  memmove(held->data, held->data + len + tag_len, held->len - len - tag_len);
  text_truncate(held, held->len - len - tag_len);
  return good;
}

/* Returns where `tag` begins in what is held, or where what may become it does, or else the end. */
static size_t find(const thinking *self, const char *tag, size_t tag_len) {
  for (size_t at = 0; at < self->held.len; at++) {
    const size_t left = self->held.len - at;
    if (memcmp(self->held.data + at, tag, left < tag_len ? left : tag_len) == 0) return at;
  }
  return self->held.len;
}

bool thinking_push(thinking *self, const char *text, size_t len) {
  text_append_bytes(&self->held, text, len);
  text_buffer *held = &self->held;
  if (self->state == THINKING_UNKNOWN) {
    const size_t tag_len = sizeof opening - 1, spaces = spaces_at(held->data, held->len);
    const size_t at = spaces + find(&(thinking){.held = {held->data + spaces, held->len - spaces, 0}}, opening, tag_len);
    if (spaces == held->len || (at == spaces && held->len - at < tag_len)) return true;
    self->state = at == spaces ? THINKING_INSIDE : THINKING_AFTER;
    if (self->state == THINKING_INSIDE) {
      self->trimming = true;
      if (!pass(self, spaces, tag_len)) return false;
    }
  }
  if (self->state == THINKING_INSIDE) {
    const size_t tag_len = sizeof closing - 1, at = find(self, closing, tag_len);
    size_t end = at; /* white space before the tag is left out, and it may be there */
    while (end > 0 && is_space(held->data[end - 1])) end--;
    if (held->len - at < tag_len) return end == 0 || pass(self, end, 0);
    if (!pass(self, end, at - end + tag_len)) return false;
    self->state = THINKING_AFTER;
    self->trimming = true;
  }
  return held->len == 0 || pass(self, held->len, 0);
}

bool thinking_end(thinking *self) {
  /* The beginning of a tag that did not come is text. */
  const bool good = self->held.len == 0 || pass(self, self->held.len, 0);
  text_free(&self->held);
  return good;
}
