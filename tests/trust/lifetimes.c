/*
 * A host that opens the library by itself, and ends in the ways in which programs end. Run by
 * lifetimes.rs: lifetimes LIBRARY MODEL WAY [ROUNDS]. Ends with a code of its own; 1 is a failure,
 * of which it prints the reason.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "xserv.h"

#define FUNCTIONS(X)                                                                               \
  X(xserv_load_options_init)                                                                       \
  X(xserv_load)                                                                                    \
  X(xserv_model_free)                                                                              \
  X(xserv_request_init)                                                                            \
  X(xserv_generate)                                                                                \
  X(xserv_submit_options_init)                                                                     \
  X(xserv_submit)                                                                                  \
  X(xserv_submission_free)                                                                         \
  X(xserv_tokenize)                                                                                \
  X(xserv_tokens_free)                                                                             \
  X(xserv_apply_chat_template)                                                                     \
  X(xserv_chat_options_init)                                                                       \
  X(xserv_text_free)                                                                               \
  X(xserv_last_error)

static struct {
#define X(name) __typeof__(&name) name;
  FUNCTIONS(X)
#undef X
} lib;

static void *library;
static const char *folder;
static xserv_model *model;
static const uint32_t ids[4] = {10, 20, 30, 40};

static void fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, lib.xserv_last_error ? lib.xserv_last_error() : dlerror());
  _exit(1);
}

static void check(const char *what, xserv_status status) {
  if (status != XSERV_STATUS_OK) fail(what);
}

static void open_library(const char *path, int flags) {
  library = dlopen(path, RTLD_NOW | flags);
  if (!library) fail("dlopen");
#define X(name)                                                                                    \
  *(void **)&lib.name = dlsym(library, #name);                                                     \
  if (!lib.name) fail(#name);
  FUNCTIONS(X)
#undef X
}

static xserv_model *load_with(xserv_progress_callback progress) {
  xserv_load_options options;
  xserv_model *loaded = NULL;
  lib.xserv_load_options_init(&options, sizeof options);
  options.device_kind = XSERV_DEVICE_CPU;
  options.num_threads = 2;
  options.kv_cache_tokens = 2048;
  options.progress = progress;
  check("load", lib.xserv_load(folder, &options, &loaded));
  return loaded;
}

/* Returns the status of a greedy generation. */
static xserv_status generate(uint32_t tokens, xserv_token_callback callback) {
  xserv_request request;
  lib.xserv_request_init(&request, sizeof request);
  request.prompt_tokens = ids;
  request.num_prompt_tokens = 4;
  request.max_tokens = tokens;
  request.temperature = 0;
  request.ignore_eos = 1;
  return lib.xserv_generate(model, &request, callback, NULL, NULL);
}

/* All that a host does: text, conversation, generation. */
static void use(void) {
  xserv_tokens *tokens;
  xserv_text *text;
  xserv_chat_options chat;
  check("generate", generate(3, NULL));
  check("tokenize", lib.xserv_tokenize(model, "Once", 4, NULL, &tokens));
  lib.xserv_tokens_free(tokens);
  lib.xserv_chat_options_init(&chat, sizeof chat);
  chat.messages_json = "[{\"role\": \"user\", \"content\": \"Hello\"}]";
  check("chat", lib.xserv_apply_chat_template(model, &chat, &text));
  lib.xserv_text_free(text);
}

static atomic_int has_begun;
static atomic_int is_over;

static bool note_token(const xserv_token_event *event, void *data) {
  (void)event, (void)data;
  atomic_store(&has_begun, 1);
  return !atomic_load(&is_over);
}

/* Uses the model until it is gone or the test is over. */
static void *keep_using(void *data) {
  while (!atomic_load(&is_over) && generate(1000, note_token) == XSERV_STATUS_OK) {
  }
  return data;
}

/* Uses the library once, and ends long after it was closed, with what it left in the thread. */
static void *use_and_wait(void *data) {
  (void)generate(2, NULL);
  if (lib.xserv_load(NULL, NULL, NULL) == XSERV_STATUS_OK) fail("no model");
  atomic_store(&has_begun, 1);
  while (!atomic_load(&is_over)) usleep(1000);
  return data;
}

static void await(atomic_int *flag) {
  for (int i = 0; i < 20000 && !atomic_load(flag); i++) usleep(1000);
  if (!atomic_load(flag)) fail("nothing began");
}

static int count_maps(void) {
  char line[4096];
  int count = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps && fgets(line, sizeof line, maps)) count += strstr(line, "libxserv") != NULL;
  if (maps) fclose(maps);
  return count;
}

static void rounds(const char *path, int count) {
  enum { LIVE = 4 };
  pthread_t live[LIVE];
  int begun = 0, maps = 0;
  for (int round = 0; round < count; round++) {
    pthread_t short_lived;
    open_library(path, round % 2 ? RTLD_GLOBAL : RTLD_LOCAL);
    model = load_with(NULL);
    if (begun < LIVE) {
      atomic_store(&has_begun, 0);
      if (pthread_create(&live[begun++], NULL, use_and_wait, NULL)) fail("a thread");
      await(&has_begun);
    }
    if (pthread_create(&short_lived, NULL, keep_using, NULL)) fail("a thread");
    use();
    lib.xserv_model_free(model);
    if (dlclose(library)) fail("dlclose");
    pthread_join(short_lived, NULL);
    if (round == 1) maps = count_maps();
  }
  if (count_maps() != maps) fail("the mappings of the library have changed");
  atomic_store(&is_over, 1);
  for (int i = 0; i < begun; i++) pthread_join(live[i], NULL);
}

/* From here on the process has five seconds. */
static void leave(int code) {
  alarm(5);
  exit(code);
}

static bool exit_in_callback(const xserv_token_event *event, void *data) {
  (void)event, (void)data;
  leave(22);
  return true;
}

static bool exit_in_progress(float fraction, void *data) {
  (void)data;
  if (fraction > 0.3f) leave(23);
  return true;
}

static void exit_in_wake(void *data) {
  (void)data;
  leave(24);
}

static void free_at_exit(void) {
  if (generate(2, NULL) != XSERV_STATUS_OK) _exit(1);
  lib.xserv_model_free(model);
}

static void use_at_exit(void) {
  (void)generate(2, NULL);
}

int main(int argc, char **argv) {
  if (argc < 4) return 1;
  const char *path = argv[1], *way = argv[3];
  pthread_t thread;
  folder = argv[2];
  if (!strcmp(way, "rounds")) {
    rounds(path, argc > 4 ? atoi(argv[4]) : 2);
    return 0;
  }
  open_library(path, RTLD_LOCAL);
  if (!strcmp(way, "progress")) load_with(exit_in_progress);
  model = load_with(NULL);
  use();
  if (!strcmp(way, "host")) {
    lib.xserv_model_free(model);
    return 0;
  }
  if (!strcmp(way, "idle")) leave(20);
  if (!strcmp(way, "callback")) generate(1000, exit_in_callback);
  if (!strcmp(way, "atexit")) {
    atexit(free_at_exit);
    leave(25);
  }
  if (!strcmp(way, "wake")) {
    xserv_submit_options options;
    xserv_submission *submission;
    xserv_request request;
    lib.xserv_submit_options_init(&options, sizeof options);
    options.wake = exit_in_wake;
    lib.xserv_request_init(&request, sizeof request);
    request.prompt = "Once";
    check("submit", lib.xserv_submit(model, &request, &options, &submission));
    sleep(20);
    fail("no callback");
  }
  if (pthread_create(&thread, NULL, keep_using, NULL)) fail("a thread");
  await(&has_begun);
  if (!strcmp(way, "closed")) {
    /* The library stays where it is, with those who use it. */
    if (dlclose(library)) fail("dlclose");
    use();
    leave(26);
  }
  if (!strcmp(way, "quick")) {
    alarm(5);
    quick_exit(27);
  }
  if (!strcmp(way, "busy")) leave(21);
  if (!strcmp(way, "handlers")) {
    for (int i = 0; i < 3; i++) atexit(use_at_exit);
    leave(28);
  }
  fprintf(stderr, "no way is called %s\n", way);
  return 1;
}
