#include "conversation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void append(text_buffer *messages, const char *role, const text_buffer *content) {
  if (messages->len > 1) text_append(messages, ", ");
  text_append_message(messages, role, content->len > 0 ? content->data : "", content->len);
}

void conversation_messages(const conversation *self, size_t first, const text_buffer *question, text_buffer *messages) {
  text_truncate(messages, 0);
  text_append(messages, "[");
  if (self->system.len > 0) append(messages, "system", &self->system);
  for (size_t i = first; i < self->num_turns; i++) {
    append(messages, "user", &self->turns[i].question);
    append(messages, "assistant", &self->turns[i].answer);
  }
  append(messages, "user", question);
  text_append(messages, "]");
}

void conversation_add(conversation *self, const text_buffer *question, const text_buffer *answer) {
  if (self->num_turns == self->capacity) {
    self->capacity = self->capacity == 0 ? 16 : 2 * self->capacity;
    turn *turns = realloc(self->turns, self->capacity * sizeof *turns);
    if (turns == NULL) {
      fprintf(stderr, "out of memory\n");
      exit(1);
    }
    self->turns = turns;
  }
  turn *added = &self->turns[self->num_turns++];
  *added = (turn){{0}, {0}};
  text_append_bytes(&added->question, question->data, question->len);
  text_append_bytes(&added->answer, answer->data, answer->len);
}

void conversation_drop(conversation *self, size_t num_turns) {
  for (size_t i = 0; i < num_turns; i++) {
    text_free(&self->turns[i].question);
    text_free(&self->turns[i].answer);
  }
  if (num_turns == 0) return;
  self->num_turns -= num_turns;
  memmove(self->turns, self->turns + num_turns, self->num_turns * sizeof *self->turns);
}

void conversation_free(conversation *self) {
  conversation_drop(self, self->num_turns);
  free(self->turns);
  text_free(&self->system);
  *self = (conversation){0};
}
