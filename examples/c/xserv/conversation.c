#include "conversation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static xserv_status add(xserv_messages *messages, const char *role, const text_buffer *content) {
  return xserv_messages_add(messages, role, content->len > 0 ? content->data : "");
}

xserv_status conversation_messages(const conversation *self, size_t first, const text_buffer *question,
                                   xserv_messages *messages) {
  xserv_status status = XSERV_STATUS_OK;
  for (size_t left = xserv_messages_count(messages); left > 0 && status == XSERV_STATUS_OK; left--)
    status = xserv_messages_remove(messages, left - 1);
  if (self->system.len > 0 && status == XSERV_STATUS_OK) status = add(messages, "system", &self->system);
  for (size_t i = first; i < self->num_turns && status == XSERV_STATUS_OK; i++) {
    status = add(messages, "user", &self->turns[i].question);
    if (status == XSERV_STATUS_OK) status = add(messages, "assistant", &self->turns[i].answer);
  }
  return status == XSERV_STATUS_OK ? add(messages, "user", question) : status;
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
