#define _DEFAULT_SOURCE /* TIOCGWINSZ, sigaction */

#include "terminal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "utf8.h"

/* Text that is pasted comes between ESC [200~ and ESC [201~ from here on; colours end. */
#define BEGIN "\033[?2004h"
#define END "\033[?2004l\033[0m"

static struct termios modes[3]; /* by terminal_mode */
static volatile sig_atomic_t current = TERMINAL_AS_FOUND;
static volatile sig_atomic_t resumed;
static pid_t owner;

/* From here to on_fatal_signal(): called by signal handlers too, so that only a few functions of the
 * system may be called. */

static void write_all(const char *bytes, size_t len) {
  while (len > 0) {
    ssize_t written = write(STDOUT_FILENO, bytes, len);
    if (written < 0 && errno != EINTR) return;
    if (written > 0) {
      bytes += written;
      len -= (size_t)written;
    }
  }
}

static void apply(terminal_mode mode) {
  /* A program in the background must leave the terminal to the one that has it. */
  if (tcgetpgrp(STDIN_FILENO) != getpgrp()) return;
  tcsetattr(STDIN_FILENO, TCSANOW, &modes[mode]);
}

static void restore(void) {
  if (current == TERMINAL_AS_FOUND || getpid() != owner) return;
  write_all(END, sizeof END - 1);
  apply(TERMINAL_AS_FOUND);
}

static void take_default(int signal_number) {
  struct sigaction action = {.sa_handler = SIG_DFL};
  sigset_t set;
  sigemptyset(&action.sa_mask);
  sigemptyset(&set);
  sigaddset(&set, signal_number);
  sigaction(signal_number, &action, NULL);
  raise(signal_number);
  sigprocmask(SIG_UNBLOCK, &set, NULL);
}

static void on_fatal_signal(int signal_number) {
  restore();
  take_default(signal_number);
}

static void handle(int signal_number, void (*handler)(int)) {
  struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, found;
  sigemptyset(&action.sa_mask);
  if (sigaction(signal_number, NULL, &found) == 0 && found.sa_handler != SIG_IGN)
    sigaction(signal_number, &action, NULL);
}

static void on_stop(int signal_number) {
  const int saved = errno;
  restore();
  take_default(signal_number);
  handle(signal_number, on_stop); /* it was continued */
  errno = saved;
}

static void on_continue(int signal_number) {
  const int saved = errno;
  (void)signal_number;
  if (current != TERMINAL_AS_FOUND) {
    apply((terminal_mode)current);
    write_all(BEGIN, sizeof BEGIN - 1);
    resumed = 1;
  }
  errno = saved;
}

static void on_resize(int signal_number) { (void)signal_number; /* wakes whoever polls */ }

bool terminal_begin(void) {
  static const int fatal[] = {SIGHUP, SIGQUIT, SIGTERM, SIGPIPE, SIGALRM, SIGABRT, SIGSEGV,
                              SIGBUS, SIGILL,  SIGFPE,  SIGXCPU, SIGUSR1, SIGUSR2};
  if (!isatty(STDIN_FILENO) || !terminal_is_drawable(STDOUT_FILENO) || tcgetattr(STDIN_FILENO, &modes[0]) != 0)
    return false;
  owner = getpid();
  struct termios *editing = &modes[TERMINAL_EDITING];
  *editing = modes[TERMINAL_AS_FOUND];
  editing->c_lflag &= ~(tcflag_t)(ICANON | ECHO | IEXTEN | ISIG);
  editing->c_iflag &= ~(tcflag_t)(ICRNL | INLCR | IGNCR | IXON | ISTRIP);
  editing->c_cc[VMIN] = 1;
  editing->c_cc[VTIME] = 0;
  modes[TERMINAL_WATCHING] = *editing;
  modes[TERMINAL_WATCHING].c_lflag |= ISIG;
  for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) handle(fatal[i], on_fatal_signal);
  handle(SIGTSTP, on_stop);
  handle(SIGCONT, on_continue);
  handle(SIGWINCH, on_resize);
  atexit(restore);
  return true;
}

void terminal_set(terminal_mode mode) {
  const terminal_mode before = (terminal_mode)current;
  if (mode == TERMINAL_AS_FOUND) restore();
  current = (sig_atomic_t)mode;
  if (mode == TERMINAL_AS_FOUND) return;
  if (before == TERMINAL_AS_FOUND) write_all(BEGIN, sizeof BEGIN - 1);
  apply(mode);
}

void terminal_suspend(void) { kill(0, SIGTSTP); }

bool terminal_was_resumed(void) {
  const bool was = resumed != 0;
  resumed = 0;
  return was;
}

void terminal_size(int fd, size_t *columns, size_t *rows) {
  struct winsize size;
  const bool known = ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0;
  *columns = known ? size.ws_col : 80;
  *rows = known ? size.ws_row : 24;
}

bool terminal_is_drawable(int fd) {
  const char *name = getenv("TERM");
  return isatty(fd) && name != NULL && strcmp(name, "dumb") != 0;
}

bool terminal_write_text(const char *text, size_t len) {
  static int is_terminal = -1;
  if (is_terminal < 0) is_terminal = isatty(STDOUT_FILENO);
  size_t from = 0;
  for (size_t at = 0; is_terminal && at < len;) {
    uint32_t character;
    const size_t bytes = utf8_decode(text + at, len - at, &character);
    if (bytes == 0 || (utf8_is_control(character) && character != '\n' && character != '\t')) {
      if (fwrite(text + from, 1, at - from, stdout) != at - from || fputs("\xef\xbf\xbd", stdout) < 0) return false;
      from = at + (bytes == 0 ? 1 : bytes);
    }
    at += bytes == 0 ? 1 : bytes;
  }
  return fwrite(text + from, 1, len - from, stdout) == len - from && fflush(stdout) == 0;
}
