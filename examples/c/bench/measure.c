#define _POSIX_C_SOURCE 200809L /* clock_gettime, barriers */

#include "measure.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double seconds_of(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

instant instant_now(void) {
  return (instant){seconds_of(CLOCK_MONOTONIC), seconds_of(CLOCK_PROCESS_CPUTIME_ID)};
}

/* One request, run by one thread. */
typedef struct job {
  const workload *work;
  pthread_barrier_t *start;
  const uint32_t *prompt;
  uint32_t prompt_len;
  uint32_t num_steps; /* tokens to generate; 0: only the logits of the prompt */
  float *logits;      /* [vocab_size], if num_steps is 0 */
  instant began, ended;
  instant *token_times; /* [num_steps] */
  uint32_t num_tokens;
  double first_token_seconds;
  bool failed;
} job;

static bool note_time(const xserv_token_event *event, void *user_data) {
  job *self = user_data;
  if (event->token_id != XSERV_NO_TOKEN && self->num_tokens < self->num_steps)
    self->token_times[self->num_tokens++] = instant_now();
  return true;
}

/* Greedy, and without an end before max_tokens. */
static void make_request(const uint32_t *prompt, uint32_t prompt_len, uint32_t max_tokens, xserv_request *request) {
  xserv_request_default(request);
  request->prompt_tokens = prompt;
  request->num_prompt_tokens = prompt_len;
  request->max_tokens = max_tokens;
  request->temperature = 0.0f;
  request->repetition_penalty = 1.0f;
  request->presence_penalty = request->frequency_penalty = 0.0f;
  request->ignore_eos = 1;
}

static xserv_status generate(job *self) {
  xserv_request request;
  make_request(self->prompt, self->prompt_len, self->num_steps, &request);
  xserv_result *result = NULL;
  xserv_status status = xserv_generate(self->work->model, &request, note_time, self, &result);
  if (status != XSERV_STATUS_OK) return status;
  xserv_result_info info = {.struct_size = sizeof info};
  status = xserv_result_get_info(result, &info);
  if (status == XSERV_STATUS_OK) self->first_token_seconds = info.time_to_first_token_seconds;
  xserv_result_free(result);
  return status;
}

static void *run_job(void *argument) {
  job *self = argument;
  const workload *work = self->work;
  pthread_barrier_wait(self->start);
  self->began = instant_now();
  xserv_status status = self->num_steps > 0
                            ? generate(self)
                            : xserv_logits(work->model, self->prompt, self->prompt_len, NULL,
                                           self->logits, work->vocab_size);
  self->ended = instant_now();
  self->failed = status != XSERV_STATUS_OK;
  if (self->failed) { /* the message belongs to this thread */
    fprintf(stderr, "bench: %s (%s)\n", xserv_last_error(), xserv_status_name(status));
  } else if (self->num_tokens != self->num_steps) {
    fprintf(stderr, "bench: %u tokens came instead of %u; is the context too short?\n",
            self->num_tokens, self->num_steps);
    self->failed = true;
  }
  return NULL;
}

static uint32_t random_token(workload *work) {
  work->seed = work->seed * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
  return (uint32_t)((work->seed >> 33) % work->vocab_size);
}

static void free_jobs(job *jobs, uint32_t num_jobs) {
  for (uint32_t i = 0; i < num_jobs; i++) {
    free((void *)jobs[i].prompt);
    free(jobs[i].token_times);
    free(jobs[i].logits);
  }
  free(jobs);
}

/* Makes work->batch requests with prompts of random tokens; free_jobs() frees them. */
static job *make_jobs(workload *work, uint32_t prompt_len, uint32_t num_steps) {
  job *jobs = calloc(work->batch, sizeof *jobs);
  bool failed = jobs == NULL;
  for (uint32_t i = 0; i < work->batch && !failed; i++) {
    uint32_t *prompt = malloc(prompt_len * sizeof *prompt);
    for (uint32_t k = 0; prompt != NULL && k < prompt_len; k++) prompt[k] = random_token(work);
    jobs[i] = (job){.work = work, .prompt = prompt, .prompt_len = prompt_len, .num_steps = num_steps};
    jobs[i].token_times = calloc(num_steps + 1u, sizeof *jobs[i].token_times);
    jobs[i].logits = num_steps == 0 ? malloc(work->vocab_size * sizeof(float)) : NULL;
    failed = prompt == NULL || jobs[i].token_times == NULL ||
             (num_steps == 0 && jobs[i].logits == NULL);
  }
  if (failed) {
    fprintf(stderr, "bench: out of memory\n");
    exit(1);
  }
  return jobs;
}

/* Runs all requests at once. Returns false if one failed. */
static bool run_jobs(workload *work, job *jobs) {
  pthread_t *threads = calloc(work->batch, sizeof *threads);
  pthread_barrier_t start;
  if (threads == NULL || pthread_barrier_init(&start, NULL, work->batch) != 0) {
    fprintf(stderr, "bench: out of memory\n");
    exit(1);
  }
  for (uint32_t i = 0; i < work->batch; i++) {
    jobs[i].start = &start;
    jobs[i].num_tokens = 0;
  }
  for (uint32_t i = 1; i < work->batch; i++) {
    if (pthread_create(&threads[i], NULL, run_job, &jobs[i]) != 0) {
      fprintf(stderr, "bench: cannot start %u threads\n", work->batch);
      exit(1);
    }
  }
  run_job(&jobs[0]);
  for (uint32_t i = 1; i < work->batch; i++) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&start);
  free(threads);
  for (uint32_t i = 0; i < work->batch; i++)
    if (jobs[i].failed) return false;
  return true;
}

static rate rate_between(double num_tokens, instant from, instant to) {
  return (rate){num_tokens / (to.wall - from.wall), num_tokens / (to.cpu - from.cpu)};
}

static instant earlier(instant a, instant b) { return a.wall <= b.wall ? a : b; }
static instant later(instant a, instant b) { return a.wall >= b.wall ? a : b; }

bool measure_prompt(workload *work, uint32_t num_tokens, rate *result) {
  job *jobs = make_jobs(work, num_tokens, 0);
  bool ok = run_jobs(work, jobs);
  instant from = jobs[0].began, to = jobs[0].ended;
  for (uint32_t i = 1; i < work->batch; i++) {
    from = earlier(from, jobs[i].began);
    to = later(to, jobs[i].ended);
  }
  if (ok) *result = rate_between((double)num_tokens * work->batch, from, to);
  free_jobs(jobs, work->batch);
  return ok;
}

/* Computes the rate at which all requests together generate while all of them do: from the end of
 * the last prompt until the first request has all its tokens. It is derived from the steps of that
 * request, in each of which every request gets a token. Returns false if there is no such time. */
static bool common_rate(const workload *work, const job *jobs, rate *result) {
  const job *first = &jobs[0];
  instant begin = jobs[0].token_times[0];
  for (uint32_t i = 1; i < work->batch; i++) {
    uint32_t last = jobs[i].num_steps - 1;
    if (jobs[i].token_times[last].wall < first->token_times[last].wall) first = &jobs[i];
    begin = later(begin, jobs[i].token_times[0]);
  }
  uint32_t last = first->num_steps - 1, from = 0;
  while (from < last && first->token_times[from].wall < begin.wall) from++;
  if (from == last) return false;
  *result = rate_between((double)(last - from) * work->batch, first->token_times[from], first->token_times[last]);
  return true;
}

/* Computes the rate over the whole time from `from` to the last token of all requests. */
static rate whole_rate(const workload *work, const job *jobs, instant from) {
  double count = 0;
  instant to = from;
  for (uint32_t i = 0; i < work->batch; i++) {
    to = later(to, jobs[i].token_times[jobs[i].num_steps - 1]);
    for (uint32_t k = 0; k < jobs[i].num_steps; k++)
      if (jobs[i].token_times[k].wall > from.wall) count++;
  }
  return rate_between(count, from, to);
}

bool measure_generation(workload *work, uint32_t depth, uint32_t num_tokens, rate *result) {
  /* The first token comes with the prompt; with a prompt of one token that is a step like the
   * others. */
  uint32_t num_steps = depth == 0 ? num_tokens : num_tokens + 1;
  job *jobs = make_jobs(work, depth == 0 ? 1 : depth, num_steps);
  bool ok = true;
  if (work->batch > 1 && depth > 0) {
    /* Fills the prefix cache, so that all requests come to their first tokens at about the same
     * time. */
    for (uint32_t i = 0; i < work->batch; i++) jobs[i].num_steps = 1;
    ok = run_jobs(work, jobs);
    for (uint32_t i = 0; i < work->batch; i++) jobs[i].num_steps = num_steps;
  }
  ok = ok && run_jobs(work, jobs);

  /* If memory does not allow all to generate at the same time, the time counts from the end of the
   * last prompt. */
  if (ok && (depth == 0 || !common_rate(work, jobs, result))) {
    instant from = depth == 0 ? jobs[0].began : jobs[0].token_times[0];
    for (uint32_t i = 1; i < work->batch; i++)
      from = depth == 0 ? earlier(from, jobs[i].began) : later(from, jobs[i].token_times[0]);
    *result = whole_rate(work, jobs, from);
  }
  free_jobs(jobs, work->batch);
  return ok;
}

bool measure_first_token(workload *work, uint32_t num_tokens, double *seconds) {
  job *jobs = make_jobs(work, num_tokens, 1);
  bool ok = run_jobs(work, jobs);
  if (ok) *seconds = jobs[0].first_token_seconds;
  free_jobs(jobs, work->batch);
  return ok;
}

bool measure_idle_request(workload *work, uint32_t num_tokens, double *seconds) {
  uint32_t *prompt = malloc(num_tokens * sizeof *prompt);
  if (prompt == NULL) {
    fprintf(stderr, "bench: out of memory\n");
    exit(1);
  }
  for (uint32_t k = 0; k < num_tokens; k++) prompt[k] = random_token(work);
  nanosleep(&(struct timespec){0, 10000000}, NULL); /* what the last request left to be done is done */

  xserv_request request;
  xserv_submission *submission = NULL;
  xserv_event event = {.struct_size = sizeof event};
  make_request(prompt, num_tokens, 8, &request);
  double began = seconds_of(CLOCK_MONOTONIC);
  xserv_status status = xserv_submit(work->model, &request, NULL, &submission);
  *seconds = 0;
  while (status == XSERV_STATUS_OK && event.kind != XSERV_EVENT_DONE) {
    status = xserv_next(submission, XSERV_WAIT_FOREVER, &event);
    if (*seconds == 0 && event.kind == XSERV_EVENT_TOKEN) *seconds = seconds_of(CLOCK_MONOTONIC) - began;
  }
  if (status != XSERV_STATUS_OK)
    fprintf(stderr, "bench: %s (%s)\n", xserv_last_error(), xserv_status_name(status));
  xserv_submission_free(submission);
  free(prompt);
  return status == XSERV_STATUS_OK;
}

bool device_time_now(const xserv_model *model, device_time *now) {
  xserv_model_stats stats = {.struct_size = sizeof stats};
  xserv_status status = xserv_model_get_stats(model, &stats);
  if (status != XSERV_STATUS_OK)
    fprintf(stderr, "bench: %s (%s)\n", xserv_last_error(), xserv_status_name(status));
  *now = (device_time){stats.device_busy_seconds, stats.device_idle_seconds};
  return status == XSERV_STATUS_OK;
}

double idle_share(device_time from, device_time to) {
  double busy = to.busy - from.busy, idle = to.idle - from.idle;
  return busy + idle > 0 ? idle / (busy + idle) : 0;
}
