/*
 * Answers many questions at once from one thread, as a server's event loop would: submits them all,
 * sleeps until there are events, and prints each answer when it is complete.
 *
 *     batch MODEL [QUESTION...] [OPTIONS]
 *
 * Without questions on the command line they are read from standard input, one per line.
 */

#define _GNU_SOURCE /* getline */

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <xserv.h>

#include "common/options.h"

enum { MAX_QUESTIONS = 1024 };

typedef struct job {
  const char *question;
  xserv_submission *submission;
  bool done;
} job;

static int report(const char *what, xserv_status status) {
  fprintf(stderr, "batch: %s: %s (%s)\n", what, xserv_last_error(), xserv_status_name(status));
  return 1;
}

/* Prints the result of a request. */
static xserv_status print_answers(const job *self) {
  xserv_result *result;
  xserv_status status = xserv_submission_take_result(self->submission, &result);
  if (status != XSERV_STATUS_OK) return status;
  xserv_result_info info = {.struct_size = sizeof info};
  for (size_t sample = 0; sample == 0 || sample < info.num_samples; sample++) {
    status = xserv_result_get_sample(result, sample, &info);
    if (status != XSERV_STATUS_OK) break;
    printf("> %s\n%s\n", self->question, info.text);
    fprintf(stderr, "[%zu prompt tokens, %zu of them cached, %zu generated]\n", info.num_prompt_tokens,
            info.num_cached_tokens, info.num_tokens);
  }
  xserv_result_free(result);
  return status;
}

/* Takes all pending events. */
static xserv_status take_events(job *self) {
  xserv_event event = {.struct_size = sizeof event};
  while (!self->done) {
    xserv_status status = xserv_next(self->submission, 0, &event);
    if (status != XSERV_STATUS_OK) return status;
    if (event.kind == XSERV_EVENT_NONE) break;
    /* XSERV_EVENT_TOKEN and _TEXT carry pieces of text; here the whole is enough. */
    if (event.kind != XSERV_EVENT_DONE) continue;
    self->done = true;
    return print_answers(self);
  }
  return XSERV_STATUS_OK;
}

static xserv_status run(const xserv_model *model, job *jobs, size_t num_jobs, xserv_request request, int fd) {
  xserv_submit_options options;
  xserv_status status = XSERV_STATUS_OK;
  xserv_submit_options_default(&options);
  options.wake_fd = fd;
  for (size_t i = 0; i < num_jobs && status == XSERV_STATUS_OK; i++) {
    xserv_messages *messages = NULL;
    status = xserv_messages_new(&messages);
    if (status == XSERV_STATUS_OK) status = xserv_messages_add(messages, "user", jobs[i].question);
    if (status == XSERV_STATUS_OK) {
      request.messages_json = xserv_messages_json(messages);
      status = xserv_submit(model, &request, &options, &jobs[i].submission);
    }
    xserv_messages_free(messages); /* the library has its copy */
  }
  for (size_t num_done = 0; num_done < num_jobs && status == XSERV_STATUS_OK;) {
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    uint64_t news;
    if (poll(&wait, 1, -1) < 0 || read(fd, &news, sizeof news) < 0) continue;
    num_done = 0;
    for (size_t i = 0; i < num_jobs && status == XSERV_STATUS_OK; i++) {
      status = take_events(&jobs[i]);
      num_done += jobs[i].done;
    }
  }
  return status;
}

int main(int argc, char **argv) {
  static job jobs[MAX_QUESTIONS];
  static const char *operands[1 + MAX_QUESTIONS]; /* the model, then questions */
  xserv_request request;
  xserv_request_default(&request);
  request.max_tokens = 128;
  const command_option options[] = {
      {"--max-tokens", "N", OPTION_UINT32, &request.max_tokens, "end answers after N tokens (128)", 0, UINT32_MAX - 1},
      {"--samples", "N", OPTION_UINT32, &request.num_samples, "give N answers to each question", 1, 256},
      {"--temperature", "T", OPTION_FLOAT, &request.temperature, "0: always the most likely token", 0, 0},
      {0},
  };
  const command command = {"batch", "MODEL [QUESTION...]",
                           "Answers many questions at once. Without questions on the command line they are read\n"
                           "from standard input, one per line.",
                           {{"Options", options}}};
  const size_t num_operands = parse_command(&command, argc, argv, operands, 1 + MAX_QUESTIONS);
  if (num_operands == 0) refuse(&command, "no model; --help tells more");
  size_t num_jobs = num_operands - 1;
  for (size_t i = 0; i < num_jobs; i++) jobs[i].question = operands[1 + i];
  char *lines[MAX_QUESTIONS] = {NULL};
  if (num_jobs == 0) {
    size_t room = 0;
    ssize_t len;
    while (num_jobs < MAX_QUESTIONS && (len = getline(&lines[num_jobs], &room, stdin)) > 0) {
      lines[num_jobs][strcspn(lines[num_jobs], "\n")] = '\0';
      jobs[num_jobs].question = lines[num_jobs];
      num_jobs++;
      room = 0;
    }
  }

  xserv_model *model = NULL;
  int exit_code = 0, fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  xserv_status status = xserv_load(operands[0], NULL, &model);
  if (status != XSERV_STATUS_OK) {
    exit_code = report("load", status);
  } else {
    status = run(model, jobs, num_jobs, request, fd);
    if (status != XSERV_STATUS_OK) exit_code = report("run", status);
  }
  for (size_t i = 0; i < num_jobs; i++) xserv_submission_free(jobs[i].submission);
  for (size_t i = 0; i < MAX_QUESTIONS; i++) free(lines[i]);
  xserv_model_free(model);
  close(fd);
  return exit_code;
}
