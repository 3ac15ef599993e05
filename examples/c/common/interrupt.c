#define _POSIX_C_SOURCE 200809L /* sigaction, pipe, fcntl */

#include "interrupt.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int ends[2] = {-1, -1};

static void on_interrupt(int signal_number) {
  (void)signal_number;
  const int saved = errno;
  /* A pipe that is full has been told before. */
  if (write(ends[1], "", 1) < 0) errno = saved;
  errno = saved;
}

int interrupt_begin(bool once) {
  static bool is_ignored; /* by whoever started the program, a shell in the background for example */
  struct sigaction action = {.sa_handler = on_interrupt}, found;
  if (ends[0] < 0) {
    is_ignored = sigaction(SIGINT, NULL, &found) == 0 && found.sa_handler == SIG_IGN;
    if (pipe(ends) != 0) {
      perror("pipe");
      exit(1);
    }
    for (int i = 0; i < 2; i++) {
      fcntl(ends[i], F_SETFL, O_NONBLOCK);
      fcntl(ends[i], F_SETFD, FD_CLOEXEC);
    }
  }
  action.sa_flags = SA_RESTART | (once ? (int)SA_RESETHAND : 0);
  sigemptyset(&action.sa_mask);
  if (!is_ignored) sigaction(SIGINT, &action, NULL);
  return ends[0];
}

bool interrupt_pending(void) {
  struct pollfd news = {.fd = ends[0], .events = POLLIN};
  return poll(&news, 1, 0) > 0;
}

bool interrupt_take(void) {
  char bytes[64];
  bool any = false;
  while (read(ends[0], bytes, sizeof bytes) > 0) any = true;
  return any;
}
