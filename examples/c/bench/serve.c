#define _GNU_SOURCE /* eventfd, ppoll */

#include "serve.h"

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "report.h"

typedef struct slot {
  xserv_submission *submission; /* NULL: free */
  double last;                  /* when it arrived, or its last token came */
  bool has_token;
} slot;

/* Measured times, sorted at the end. */
typedef struct times {
  double *values;
  size_t len;
} times;

static uint32_t draw(uint64_t *state, uint32_t from, uint32_t to) {
  *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
  return from + (uint32_t)((*state >> 33) % (to - from + 1));
}

/* Returns the time to the next of independent events, which come at `rate` per second. */
static double draw_gap(uint64_t *state, double rate) {
  double uniform = (draw(state, 0, (1u << 30) - 1) + 0.5) / (double)(1u << 30);
  return -log(uniform) / rate;
}

static waits waits_of(times *all) {
  return (waits){percentile(all->values, all->len, 0.5), percentile(all->values, all->len, 0.95),
                 percentile(all->values, all->len, 0.99)};
}

load chat_load(uint32_t num) { return (load){num, 4 * num, 16, 128, 16, 64, 0.0f, 0}; }

load offline_load(uint32_t num) { return poisson_load(num, 0); }

load poisson_load(uint32_t num, double rate) { return (load){num, num, 100, 1024, 100, 1024, 0.6f, rate}; }

/* The random numbers of a load: its lengths and arrivals are always the same, its tokens never. */
typedef struct dice {
  uint64_t lengths, arrivals, tokens;
} dice;

static xserv_status submit(const workload *work, const load *load, dice *dice, int fd, uint32_t *prompt,
                           slot *self) {
  xserv_request request;
  xserv_submit_options options;
  xserv_request_default(&request);
  xserv_submit_options_default(&options);
  request.num_prompt_tokens = draw(&dice->lengths, load->least_prompt, load->most_prompt);
  request.max_tokens = draw(&dice->lengths, load->least_tokens, load->most_tokens);
  for (size_t i = 0; i < request.num_prompt_tokens; i++) prompt[i] = draw(&dice->tokens, 0, work->vocab_size - 1);
  request.prompt_tokens = prompt;
  request.temperature = load->temperature;
  request.top_k = 0;
  request.top_p = 1.0f;
  request.seed = dice->tokens;
  request.ignore_eos = 1;
  options.wake_fd = fd;
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

/* Sleeps until there are events, or until `at`. */
static bool wait_for_news(int fd, double at) {
  double seconds = at - instant_now().wall;
  if (seconds <= 0) return true;
  struct timespec timeout = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
  struct pollfd news = {.fd = fd, .events = POLLIN};
  uint64_t count;
  return ppoll(&news, 1, &timeout, NULL) <= 0 || read(fd, &count, sizeof count) > 0;
}

bool measure_serving(workload *work, const load *load, serving *result) {
  const uint32_t total = load->total, at_once = load->at_once;
  work->seed += 0x9e3779b97f4a7c15u;
  dice dice = {0, 1, work->seed};
  slot *slots = calloc(at_once, sizeof *slots);
  times first = {calloc(total, sizeof(double)), 0}, next = {calloc((size_t)total * load->most_tokens, sizeof(double)), 0};
  uint32_t *prompt = calloc(load->most_prompt, sizeof *prompt);
  int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (slots == NULL || first.values == NULL || next.values == NULL || prompt == NULL || fd < 0) {
    fprintf(stderr, "bench: out of memory or descriptors\n");
    exit(1);
  }
  device_time from, to;
  if (!device_time_now(work->model, &from)) return false;
  xserv_status status = XSERV_STATUS_OK;
  uint32_t submitted = 0, ended = 0;
  double begin = instant_now().wall, arrival = begin;
  while (ended < total && status == XSERV_STATUS_OK) {
    bool has_room = false;
    for (uint32_t i = 0; i < at_once && status == XSERV_STATUS_OK; i++) {
      double now = instant_now().wall;
      if (slots[i].submission == NULL && submitted < total && (load->rate == 0 || arrival <= now)) {
        /* A request that is submitted late has waited since it arrived. */
        slots[i].last = load->rate == 0 ? now : arrival;
        status = submit(work, load, &dice, fd, prompt, &slots[i]);
        if (load->rate > 0) arrival += draw_gap(&dice.arrivals, load->rate);
        submitted++;
      }
      if (status != XSERV_STATUS_OK || slots[i].submission == NULL) continue;
      status = take_events(&slots[i], &first, &next);
      if (slots[i].submission == NULL) ended++;
      has_room = has_room || slots[i].submission == NULL;
    }
    /* A request that has just ended makes room for the next one at once. */
    if (load->rate == 0 && has_room && submitted < total) continue;
    double until = load->rate > 0 && submitted < total ? arrival : instant_now().wall + 1;
    if (ended < total && status == XSERV_STATUS_OK && !wait_for_news(fd, until)) break;
  }
  double seconds = instant_now().wall - begin;
  if (status != XSERV_STATUS_OK)
    fprintf(stderr, "bench: %s (%s)\n", xserv_last_error(), xserv_status_name(status));
  bool good = status == XSERV_STATUS_OK && ended == total && device_time_now(work->model, &to);
  if (good)
    *result = (serving){(double)(first.len + next.len) / seconds, total / seconds, waits_of(&first), waits_of(&next),
                        idle_share(from, to)};
  for (uint32_t i = 0; i < at_once; i++) xserv_submission_free(slots[i].submission);
  free(slots);
  free(prompt);
  free(first.values);
  free(next.values);
  close(fd);
  return good;
}
