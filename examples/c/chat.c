/*
 * A conversation in the terminal.
 *
 *     chat MODEL [--system TEXT] [--max-tokens N] [--temperature T] [--seed N] [--threads N]
 *                [--no-thinking]
 *
 * Ctrl-C stops an answer, not the program; Ctrl-D or /exit leaves, /clear starts over. Lines may
 * also come from a pipe.
 */

#define _POSIX_C_SOURCE 200809L /* getline, sigaction, isatty */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xserv.h>

#include "common/options.h"
#include "common/text_buffer.h"

/* A signal handler may do little more than set this. The token callback checks it. */
static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
}

static bool print_text(const xserv_token_event *event, void *user_data) {
  (void)user_data;
  if (fwrite(event->text, 1, event->text_len, stdout) != event->text_len) return false;
  return fflush(stdout) == 0 && !interrupted;
}

/*
 * One turn: adds the user's message and the model's answer to `messages`, which is a JSON array
 * without its closing bracket. A turn that fails leaves it as it was. Returns false if it failed.
 */
static bool answer(const xserv_model *model, xserv_request *request, text_buffer *messages,
                   const char *line, size_t line_len) {
  size_t before = messages->len;
  if (before > 1) text_append(messages, ", ");
  text_append_message(messages, "user", line, line_len);
  size_t open = messages->len;
  text_append(messages, "]");
  request->messages_json = messages->data;

  interrupted = 0;
  xserv_result *result = NULL;
  xserv_status status = xserv_generate(model, request, print_text, NULL, &result);
  xserv_result_info info = {.struct_size = sizeof info};
  if (status == XSERV_STATUS_OK) status = xserv_result_get_info(result, &info);
  if (status != XSERV_STATUS_OK) {
    fprintf(stderr, "chat: %s\n", xserv_last_error());
    text_truncate(messages, before);
  } else {
    /* An answer that was stopped is remembered as far as it was printed. */
    text_truncate(messages, open);
    text_append(messages, ", ");
    text_append_message(messages, "assistant", info.text, info.text_len);
    puts(info.finish_reason == XSERV_FINISH_CALLBACK       ? " [stopped]"
         : info.finish_reason == XSERV_FINISH_CONTEXT_FULL ? " [the context is full; /clear starts over]"
                                                           : "");
  }
  fflush(stdout);
  xserv_result_free(result);
  return status == XSERV_STATUS_OK;
}

static void start_over(text_buffer *messages, const char *system_text) {
  text_truncate(messages, 0);
  text_append(messages, "[");
  if (system_text != NULL) text_append_message(messages, "system", system_text, strlen(system_text));
}

/* Reads lines and answers them until the input ends. Returns the number of turns that failed. */
static int converse(const xserv_model *model, xserv_request *request, const char *system_text) {
  const bool terminal = isatty(STDIN_FILENO);
  text_buffer messages = {0};
  start_over(&messages, system_text);
  char *line = NULL;
  size_t capacity = 0;
  int failures = 0;

  for (;;) {
    if (terminal) {
      fputs("> ", stdout);
      fflush(stdout);
    }
    errno = 0;
    ssize_t len = getline(&line, &capacity, stdin);
    if (len < 0 && errno == EINTR) { /* Ctrl-C at the prompt: the terminal has dropped the line */
      clearerr(stdin);
      fputs("\n(Ctrl-D or /exit leaves)\n", stdout);
      continue;
    }
    if (len < 0) break;
    while (len > 0 && (line[len - 1] == '\n' || line[len - 1] == '\r')) line[--len] = '\0';
    if (strcmp(line, "/exit") == 0) break;
    if (strcmp(line, "/clear") == 0) {
      start_over(&messages, system_text);
    } else if (len > 0 && !answer(model, request, &messages, line, (size_t)len)) {
      failures++;
    }
  }
  if (terminal) putchar('\n');
  free(line);
  text_free(&messages);
  return failures;
}

int main(int argc, char **argv) {
  const char *model_path = NULL, *system_text = NULL;
  xserv_load_options load_options;
  xserv_request request;
  xserv_load_options_default(&load_options);
  xserv_request_default(&request);

  for (int i = 1; i < argc; i++) {
    uint64_t number = 0;
    if (option_text(argc, argv, &i, "--system", &system_text)) {
      /* stored */
    } else if (option_number(argc, argv, &i, "--max-tokens", UINT32_MAX - 1, &number)) {
      request.max_tokens = (uint32_t)number;
    } else if (option_number(argc, argv, &i, "--seed", UINT64_MAX - 1, &number)) {
      request.seed = number;
    } else if (option_number(argc, argv, &i, "--threads", 1024, &number)) {
      load_options.num_threads = (uint32_t)number;
    } else if (option_float(argc, argv, &i, "--temperature", &request.temperature)) {
      /* stored */
    } else if (strcmp(argv[i], "--no-thinking") == 0) {
      request.template_variables_json = "{\"enable_thinking\": false}"; /* Qwen3's template reads it */
    } else if (argv[i][0] != '-' && model_path == NULL) {
      model_path = argv[i];
    } else {
      fprintf(stderr, "chat: unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (model_path == NULL) {
    fprintf(stderr, "usage: chat MODEL [--system TEXT] [--max-tokens N] [--temperature T] [--seed N] "
                    "[--threads N] [--no-thinking]\n");
    return 2;
  }

  /* The library installs no signal handlers; this one is ours. It is set without SA_RESTART, so
   * that getline returns when Ctrl-C is pressed at the prompt. */
  struct sigaction action = {0};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);

  xserv_model *model = NULL;
  if (xserv_load(model_path, &load_options, &model) != XSERV_STATUS_OK) {
    fprintf(stderr, "chat: %s\n", xserv_last_error());
    return 1;
  }
  sigaction(SIGINT, &action, NULL);
  int failures = converse(model, &request, system_text);
  xserv_model_free(model);
  return failures == 0 ? 0 : 1;
}
