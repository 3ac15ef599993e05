/*
 * A conversation in the terminal.
 *
 *     chat MODEL [--system TEXT] [OPTIONS]
 *
 * Ctrl-C stops an answer, also while its prompt is computed, and not the program; Ctrl-D or /exit
 * leaves, /clear starts over. Lines may also come from a pipe. It is short, to be read; `xserv chat`
 * (the folder xserv) edits lines, shows progress and forgets old turns when the context is full.
 */

#define _POSIX_C_SOURCE 200809L /* getline, isatty */

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xserv.h>

#include "common/interrupt.h"
#include "common/options.h"
#include "common/stream.h"
#include "common/text_buffer.h"

/* Prints a piece of the answer, and keeps it. */
static bool take_text(const char *text, size_t len, void *answer) {
  text_append_bytes(answer, text, len);
  return fwrite(text, 1, len, stdout) == len && fflush(stdout) == 0;
}

/* Forgets all messages but the first `count`. */
static void forget(xserv_messages *messages, size_t count) {
  for (size_t left = xserv_messages_count(messages); left > count; left--)
    if (xserv_messages_remove(messages, left - 1) != XSERV_STATUS_OK) return;
}

/*
 * One turn: adds the user's message and the model's answer to `messages`. A turn that fails leaves
 * them as they were. Returns false if it failed.
 */
static bool answer(const xserv_model *model, xserv_request *request, int interrupt_fd, xserv_messages *messages,
                   const char *line) {
  const size_t before = xserv_messages_count(messages);
  text_buffer text = {0};
  xserv_result *result = NULL; /* stays NULL if the answer is stopped */
  xserv_result_info info = {.struct_size = sizeof info};
  interrupt_take(); /* a Ctrl-C from before is not about this answer */
  xserv_status status = xserv_messages_add(messages, "user", line);
  if (status == XSERV_STATUS_OK) {
    request->messages_json = xserv_messages_json(messages);
    status = stream(model, request, interrupt_fd, take_text, &text, &result);
  }
  if (status == XSERV_STATUS_OK && result != NULL) status = xserv_result_get_info(result, &info);
  /* An answer that was stopped is remembered as far as it was printed. */
  if (status == XSERV_STATUS_OK) status = xserv_messages_add(messages, "assistant", text.len > 0 ? text.data : "");
  if (status != XSERV_STATUS_OK) {
    fprintf(stderr, "chat: %s%s\n", xserv_last_error(),
            status == XSERV_STATUS_CONTEXT_FULL && before > 0 ? "; /clear starts over" : "");
    forget(messages, before);
  } else {
    puts(result == NULL                                       ? " [stopped]"
         : info.finish_reason == XSERV_FINISH_CONTEXT_FULL ? " [the context is full; /clear starts over]"
                                                           : "");
  }
  fflush(stdout);
  xserv_result_free(result);
  text_free(&text);
  return status == XSERV_STATUS_OK;
}

static bool start_over(xserv_messages *messages, const char *system_text) {
  forget(messages, 0);
  if (system_text == NULL || xserv_messages_add(messages, "system", system_text) == XSERV_STATUS_OK) return true;
  fprintf(stderr, "chat: %s\n", xserv_last_error());
  return false;
}

/* Waits for a line from the terminal. Returns false if Ctrl-C comes first: then the terminal has
 * dropped what was typed. */
static bool wait_for_line(int interrupt_fd) {
  struct pollfd news[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = interrupt_fd, .events = POLLIN}};
  while (poll(news, 2, -1) < 0) continue; /* a signal */
  return !interrupt_take();
}

/* Reads lines and answers them until the input ends. Returns the number of turns that failed. */
static int converse(const xserv_model *model, xserv_request *request, int interrupt_fd, const char *system_text) {
  const bool terminal = isatty(STDIN_FILENO);
  xserv_messages *messages;
  if (xserv_messages_new(&messages) != XSERV_STATUS_OK) {
    fprintf(stderr, "chat: %s\n", xserv_last_error());
    return 1;
  }
  char *line = NULL;
  size_t capacity = 0;
  int failures = start_over(messages, system_text) ? 0 : 1;

  for (;;) {
    if (terminal) {
      fputs("> ", stdout);
      fflush(stdout);
      if (!wait_for_line(interrupt_fd)) {
        fputs("\n(Ctrl-D or /exit leaves)\n", stdout);
        continue;
      }
    }
    ssize_t len = getline(&line, &capacity, stdin);
    if (len < 0) break;
    while (len > 0 && (line[len - 1] == '\n' || line[len - 1] == '\r')) line[--len] = '\0';
    if (strcmp(line, "/exit") == 0) break;
    if (strcmp(line, "/clear") == 0) {
      failures += !start_over(messages, system_text);
    } else if (len > 0 && !answer(model, request, interrupt_fd, messages, line)) {
      failures++;
    }
    if (!terminal && interrupt_pending()) break;
  }
  if (terminal) putchar('\n');
  free(line);
  xserv_messages_free(messages);
  return failures;
}

int main(int argc, char **argv) {
  const char *model_path = NULL, *system_text = NULL;
  bool no_thinking = false;
  xserv_load_options load_options;
  xserv_request request;
  xserv_load_options_default(&load_options);
  xserv_request_default(&request);
  const command_option options[] = {
      {"--system", "TEXT", OPTION_TEXT, &system_text, "a system message before the conversation", 0, 0},
      {"--max-tokens", "N", OPTION_UINT32, &request.max_tokens, "end answers after N tokens", 0, UINT32_MAX - 1},
      {"--temperature", "T", OPTION_FLOAT, &request.temperature, "0: always the most likely token", 0, 0},
      {"--seed", "N", OPTION_UINT64, &request.seed, "draw the same tokens every time", 0, UINT64_MAX - 1},
      {"--threads", "N", OPTION_UINT32, &load_options.num_threads, "on the CPU; 0: one for each core", 0, 1024},
      {"--no-thinking", NULL, OPTION_FLAG, &no_thinking, "answer at once, where the model can be told so", 0, 0},
      {0},
  };
  const command command = {"chat", "MODEL",
                           "A conversation in the terminal. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /clear\n"
                           "starts over.",
                           {{"Options", options}}};
  if (parse_command(&command, argc, argv, &model_path, 1) == 0) refuse(&command, "no model; --help tells more");
  if (no_thinking) request.template_variables_json = "{\"enable_thinking\": false}"; /* Qwen3's template reads it */

  xserv_model *model = NULL;
  if (xserv_load(model_path, &load_options, &model) != XSERV_STATUS_OK) {
    fprintf(stderr, "chat: %s\n", xserv_last_error());
    return 1;
  }
  /* The library installs no signal handlers; this one is ours. */
  int failures = converse(model, &request, interrupt_begin(false), system_text);
  xserv_model_free(model);
  return failures == 0 ? 0 : 1;
}
