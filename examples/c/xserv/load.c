#include "load.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../common/interrupt.h"
#include "terminal.h"

enum { BAR_WIDTH = 30 };

/* Used while the model lives: the library logs after the load, too. */
static struct {
  const char *command, *path;
  bool draws, verbose;
  volatile bool is_loading;
  int shown; /* percent; -1: nothing */
} loading;

static void wipe(void) {
  if (loading.shown >= 0) fputs("\r\033[K", stderr);
  loading.shown = -1;
}

/* "Loading NAME [#####     ]  50 %", in one row. */
static void draw_bar(float fraction, int percent) {
  size_t columns, rows;
  terminal_size(STDERR_FILENO, &columns, &rows);
  const char *path = loading.path;
  size_t len = strlen(path);
  const size_t others = sizeof "Loading  [] 100 % " - 1 + BAR_WIDTH;
  const size_t most = columns > others + 8 ? columns - others : 0; /* of the name, its end */
  if (len > most) path += len - most;
  char bar[BAR_WIDTH + 1];
  const size_t filled = (size_t)(BAR_WIDTH * fraction);
  memset(bar, ' ', BAR_WIDTH);
  memset(bar, '#', filled < BAR_WIDTH ? filled : BAR_WIDTH);
  bar[BAR_WIDTH] = '\0';
  if (columns > others) fprintf(stderr, "\r\033[KLoading %s%s[%s] %3d %%", path, most > 0 ? " " : "", bar, percent);
  else fprintf(stderr, "\r\033[K%3d %%", percent);
}

static bool on_progress(float fraction, void *user_data) {
  (void)user_data;
  const int percent = (int)(100 * fraction);
  if (loading.draws && percent != loading.shown) {
    draw_bar(fraction, percent);
    loading.shown = percent;
  }
  return !interrupt_pending();
}

static void on_log(uint32_t level, const char *target, const char *message, void *user_data) {
  (void)user_data;
  const bool warning = level == XSERV_LOG_WARNING && loading.is_loading;
  if (!warning && !loading.verbose) return;
  if (loading.is_loading) wipe();
  fprintf(stderr, "%s: %s: %s\n", loading.command, warning ? "warning" : target, message);
}

int report_error(const char *command) {
  fprintf(stderr, "%s: %s\n", command, xserv_last_error());
  return 1;
}

int load_model(const char *command, const char *path, load_arguments *arguments, xserv_model **model) {
  loading.command = command;
  loading.path = path;
  loading.verbose = arguments->verbose;
  loading.draws = terminal_is_drawable(STDERR_FILENO);
  loading.is_loading = true;
  loading.shown = -1;
  arguments->options.progress = on_progress;
  arguments->options.log = on_log;
  interrupt_begin(true);
  if (loading.draws) on_progress(0, NULL); /* at once: files may be slow to open */
  xserv_status status = xserv_load(path, &arguments->options, model);
  wipe();
  loading.is_loading = false;
  const bool interrupted = interrupt_take();
  interrupt_begin(false);
  if (interrupted) {
    if (status == XSERV_STATUS_OK) xserv_model_free(*model);
    fprintf(stderr, "%s: interrupted while the model was loading\n", command);
    return EXIT_INTERRUPTED;
  }
  return status == XSERV_STATUS_OK ? 0 : report_error(command);
}
