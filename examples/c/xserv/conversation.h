/* The turns of a conversation. */

#ifndef XSERV_PROGRAM_CONVERSATION_H
#define XSERV_PROGRAM_CONVERSATION_H

#include <stddef.h>

#include <xserv.h>

#include "../common/text_buffer.h"

typedef struct turn {
  text_buffer question, answer;
} turn;

/* Initialised with {0}. */
typedef struct conversation {
  text_buffer system; /* empty: there is no system message */
  turn *turns;
  size_t num_turns, capacity;
} conversation;

/* Rebuilds the messages: the system message, the turns from `first` on and the question. */
xserv_status conversation_messages(const conversation *self, size_t first, const text_buffer *question,
                                   xserv_messages *messages);

void conversation_add(conversation *self, const text_buffer *question, const text_buffer *answer);

/* Forgets the first turns. */
void conversation_drop(conversation *self, size_t num_turns);

void conversation_free(conversation *self);

#endif
