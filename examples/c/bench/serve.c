#define _GNU_SOURCE /* eventfd */

#include "serve.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

typedef struct slot {
  xserv_submission *submission; /* NULL: free */
  double last;                  /* when it was submitted, or its last token came */
  bool has_token;
} slot;

/* Times that were measured; sorted at the end. */
typedef struct times {
  double *values;
  size_t len;
} times;

static uint32_t draw(uint64_t *state, uint32_t from, uint32_t to) {
  *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
  return from + (uint32_t)((*state >> 33) % (to - from + 1));
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double percentile(times *all, double share) {
  if (all->len == 0) return 0;
  qsort(all->values, all->len, sizeof *all->values, compare);
  return all->values[(size_t)(share * (double)(all->len - 1))];
}

load chat_load(uint32_t num) { return (load){num, 4 * num, 16, 128, 16, 64, 0.0f}; }

load offline_load(uint32_t num) { return (load){num, num, 100, 1024, 100, 1024, 0.6f}; }

static xserv_status submit(const workload *work, const load *load, uint64_t *state, int fd, uint32_t *prompt,
                           slot *self) {
  xserv_request request;
  xserv_submit_options options;
  xserv_status status = xserv_request_default(&request);
  if (status == XSERV_STATUS_OK) status = xserv_submit_options_default(&options);
  if (status != XSERV_STATUS_OK) return status;
  request.num_prompt_tokens = draw(state, load->least_prompt, load->most_prompt);
  request.max_tokens = draw(state, load->least_tokens, load->most_tokens);
  for (size_t i = 0; i < request.num_prompt_tokens; i++) prompt[i] = draw(state, 0, work->vocab_size - 1);
  request.prompt_tokens = prompt;
  request.temperature = load->temperature;
  request.top_k = 0;
  request.top_p = 1.0f;
  request.seed = *state;
  request.ignore_eos = 1;
  options.wake_fd = fd;
  self->last = instant_now().wall;
  self->has_token = false;
  return xserv_submit(work->model, &request, &options, &self->submission);
}

static xserv_status take_events(slot *self, times *first, times *next) {
  xserv_event event = {.struct_size = sizeof event};
  for (;;) {
    xserv_status status = xserv_next(self->submission, 0, &event);
    if (status != XSERV_STATUS_OK || event.kind == XSERV_EVENT_NONE) return status;
    if (event.kind == XSERV_EVENT_TOKEN) {
      times *all = self->has_token ? next : first;
      double now = instant_now().wall;
      all->values[all->len++] = now - self->last;
      self->last = now;
      self->has_token = true;
    } else if (event.kind == XSERV_EVENT_DONE) {
      xserv_submission_free(self->submission);
      self->submission = NULL;
      return XSERV_STATUS_OK;
    }
  }
}

bool measure_serving(workload *work, const load *load, serving *result) {
  const uint32_t total = load->total, at_once = load->at_once;
  uint64_t state = ++work->seed;
  slot *slots = calloc(at_once, sizeof *slots);
  times first = {calloc(total, sizeof(double)), 0}, next = {calloc((size_t)total * load->most_tokens, sizeof(double)), 0};
  uint32_t *prompt = calloc(load->most_prompt, sizeof *prompt);
  int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (slots == NULL || first.values == NULL || next.values == NULL || prompt == NULL || fd < 0) {
    fprintf(stderr, "bench: out of memory or descriptors\n");
    exit(1);
  }
  xserv_status status = XSERV_STATUS_OK;
  uint32_t submitted = 0, ended = 0;
  double begin = instant_now().wall;
  while (ended < total && status == XSERV_STATUS_OK) {
    for (uint32_t i = 0; i < at_once && status == XSERV_STATUS_OK; i++) {
      if (slots[i].submission == NULL && submitted < total) {
        status = submit(work, load, &state, fd, prompt, &slots[i]);
        submitted++;
      }
      if (status != XSERV_STATUS_OK || slots[i].submission == NULL) continue;
      status = take_events(&slots[i], &first, &next);
      if (slots[i].submission == NULL) ended++;
    }
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    uint64_t news;
    /* A request that has just ended makes room for the next at once. */
    if (ended + at_once > submitted && submitted < total) continue;
    if (ended < total && status == XSERV_STATUS_OK && poll(&wait, 1, 1000) > 0 &&
        read(fd, &news, sizeof news) < 0)
      break;
  }
  double seconds = instant_now().wall - begin;
  if (status != XSERV_STATUS_OK)
    fprintf(stderr, "bench: %s (%s)\n", xserv_last_error(), xserv_status_name(status));
  *result = (serving){(double)(first.len + next.len) / seconds, percentile(&first, 0.5),
                      percentile(&first, 0.95), percentile(&next, 0.5), percentile(&next, 0.95)};
  for (uint32_t i = 0; i < at_once; i++) xserv_submission_free(slots[i].submission);
  free(slots);
  free(prompt);
  free(first.values);
  free(next.values);
  close(fd);
  return status == XSERV_STATUS_OK;
}
