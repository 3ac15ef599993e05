/* Preloaded into a process: makes one call fail that opens, reads, maps or asks about files, as a failing
 * disk, lack of memory or descriptors, or a signal would. Off but for the calls between
 * `fail_reads_begin` and `fail_reads_end`. Calls on files outside of the folder given there are not
 * touched. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, STAT = 4, LINK = 8, MAP = 16 };
enum { SHORT = -1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static atomic_bool is_on;
static int classes, error;
static void (*meddle)(void);
static long fail_at, count;
static char failed[64];

/* From now on calls of these classes are counted whose file is in `path`; the one with number `n` (from 1)
 * fails with `errno_or_short`, or reads little if that is -1; if there is a function, it is called instead
 * before the call, which then does what it always does. */
void fail_reads_begin(const char *path, int classes_, long n, int errno_or_short, void (*before)(void)) {
  pthread_mutex_lock(&lock);
  snprintf(folder, sizeof folder, "%s", path);
  classes = classes_, fail_at = n, error = errno_or_short, meddle = before, count = 0;
  failed[0] = 0;
  pthread_mutex_unlock(&lock);
  atomic_store(&is_on, true);
}

/* Ends that, and returns the number of calls counted. */
long fail_reads_end(void) {
  atomic_store(&is_on, false);
  return count;
}

/* The description of a failure, or "". */
const char *fail_reads_failed(void) { return failed; }

static bool is_inside(const char *path) {
  size_t len = strlen(folder);
  return strncmp(path, folder, len) == 0 && (path[len] == '/' || path[len] == 0);
}

/* Whether this call is to fail; `path`, or `fd` if that is NULL, says of which file it is. */
static bool fails(int class, const char *name, const char *path, int fd) {
  if (!atomic_load(&is_on) || !(classes & class)) return false;
  char link[64], target[PATH_MAX];
  if (!path) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long len = syscall(SYS_readlinkat, AT_FDCWD, link, target, sizeof target - 1);
    if (len < 0) return false;
    target[len] = 0;
    path = target;
  }
  if (!is_inside(path)) return false;
  pthread_mutex_lock(&lock);
  bool is_it = ++count == fail_at;
  if (is_it) {
    const char *file = strrchr(path, '/');
    snprintf(failed, sizeof failed, "%s of %.40s", name, file ? file + 1 : path);
  }
  pthread_mutex_unlock(&lock);
  if (is_it && meddle) {
    atomic_store(&is_on, false);
    meddle();
    atomic_store(&is_on, true);
    return false;
  }
  if (is_it && error != SHORT) errno = error;
  return is_it;
}

/* The function that this one stands before. */
#define REAL(name)                                                   \
  static __typeof__(name) *real;                                     \
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);

static int mode_of(int flags, va_list arguments) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, int) : 0;
}

#define OPEN_LIKE(name)                                              \
  int name(const char *path, int flags, ...) {                       \
    REAL(name);                                                      \
    if (fails(OPEN, #name, path, -1)) return -1;                     \
    va_list arguments;                                               \
    va_start(arguments, flags);                                      \
    int mode = mode_of(flags, arguments);                            \
    va_end(arguments);                                               \
    return real(path, flags, mode);                                  \
  }

OPEN_LIKE(open)
OPEN_LIKE(open64)

#define OPENAT_LIKE(name)                                            \
  int name(int at, const char *path, int flags, ...) {               \
    REAL(name);                                                      \
    if (fails(OPEN, #name, path, -1)) return -1;                     \
    va_list arguments;                                               \
    va_start(arguments, flags);                                      \
    int mode = mode_of(flags, arguments);                            \
    va_end(arguments);                                               \
    return real(at, path, flags, mode);                              \
  }

OPENAT_LIKE(openat)
OPENAT_LIKE(openat64)

/* A third of what is wanted, at least one byte. */
static size_t little(size_t len) { return len < 3 ? (len ? 1 : 0) : len / 3; }

ssize_t read(int fd, void *to, size_t len) {
  REAL(read);
  if (fails(READ, "read", NULL, fd)) {
    if (error != SHORT) return -1;
    len = little(len);
  }
  return real(fd, to, len);
}

#define PREAD_LIKE(name, offset_type)                                \
  ssize_t name(int fd, void *to, size_t len, offset_type at) {       \
    REAL(name);                                                      \
    if (fails(READ, #name, NULL, fd)) {                              \
      if (error != SHORT) return -1;                                 \
      len = little(len);                                             \
    }                                                                \
    return real(fd, to, len, at);                                    \
  }

PREAD_LIKE(pread, off_t)
PREAD_LIKE(pread64, off64_t)

#define STAT_LIKE(name, type)                                        \
  int name(const char *path, struct type *to) {                      \
    REAL(name);                                                      \
    return fails(STAT, #name, path, -1) ? -1 : real(path, to);       \
  }

STAT_LIKE(stat, stat)
STAT_LIKE(stat64, stat64)
STAT_LIKE(lstat, stat)
STAT_LIKE(lstat64, stat64)

#define FSTAT_LIKE(name, type)                                       \
  int name(int fd, struct type *to) {                                \
    REAL(name);                                                      \
    return fails(STAT, #name, NULL, fd) ? -1 : real(fd, to);         \
  }

FSTAT_LIKE(fstat, stat)
FSTAT_LIKE(fstat64, stat64)

int statx(int at, const char *restrict path, int flags, unsigned mask, struct statx *restrict to) {
  REAL(statx);
  /* The standard library passes NULL to find out whether there is such a call, which the declaration
   * rules out. */
  const char *volatile file = path;
  bool by_fd = file && !*file;
  if (file && fails(STAT, "statx", by_fd ? NULL : file, at)) return -1;
  return real(at, path, flags, mask, to);
}

ssize_t readlink(const char *path, char *to, size_t len) {
  REAL(readlink);
  return fails(LINK, "readlink", path, -1) ? -1 : real(path, to, len);
}

char *realpath(const char *path, char *to) {
  REAL(realpath);
  return fails(LINK, "realpath", path, -1) ? NULL : real(path, to);
}

#define MMAP_LIKE(name, offset_type)                                                         \
  void *name(void *at, size_t len, int protection, int flags, int fd, offset_type offset) { \
    REAL(name);                                                                              \
    if (fd >= 0 && fails(MAP, #name, NULL, fd)) return MAP_FAILED;                           \
    return real(at, len, protection, flags, fd, offset);                                     \
  }

MMAP_LIKE(mmap, off_t)
MMAP_LIKE(mmap64, off64_t)
