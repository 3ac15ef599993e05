/* Preloaded into a program: allocations of the C library fail when the program says so.
 *
 * Compiled by tests/trust/allocations.rs. The functions behind malloc have these names in glibc.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *pointer, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *pointer);

enum { NONE, ONCE, FROM_THEN_ON };

static atomic_int is_on;
static atomic_int mode;
static atomic_long failing;
static atomic_long calls;
/* Blocks that are allocated, whether calls are counted or not. */
static atomic_long blocks;

/* Sets which calls fail, of those that will be counted: none, the one with the number `nth`, from 1,
 * or all from it on. Starts to count again, once it is switched on. */
void xserv_fail_malloc(int new_mode, long nth) {
  atomic_store(&is_on, 0);
  atomic_store(&mode, new_mode);
  atomic_store(&failing, nth);
  atomic_store(&calls, 0);
}

/* Switches it on or off: calls are counted, and may fail, only while it is on. */
void xserv_fail_malloc_switch(int on) { atomic_store(&is_on, on); }

/* Returns the number of blocks that are allocated. */
long xserv_fail_malloc_blocks(void) { return atomic_load(&blocks); }

/* Returns the number of calls that were counted. */
long xserv_fail_malloc_calls(void) { return atomic_load(&calls); }

static int fails(void) {
  if (!atomic_load_explicit(&is_on, memory_order_relaxed))
    return 0;
  int now = atomic_load_explicit(&mode, memory_order_relaxed);
  long call = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) + 1;
  long nth = atomic_load_explicit(&failing, memory_order_relaxed);
  if ((now == ONCE && call == nth) || (now == FROM_THEN_ON && call >= nth)) {
    errno = ENOMEM;
    return 1;
  }
  return 0;
}

static void *counted(void *pointer) {
  if (pointer != NULL)
    atomic_fetch_add_explicit(&blocks, 1, memory_order_relaxed);
  return pointer;
}

void *malloc(size_t size) { return fails() ? NULL : counted(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) {
  return fails() ? NULL : counted(__libc_calloc(count, size));
}

void free(void *pointer) {
  if (pointer != NULL)
    atomic_fetch_sub_explicit(&blocks, 1, memory_order_relaxed);
  __libc_free(pointer);
}

void *realloc(void *pointer, size_t size) {
  if (pointer == NULL)
    return malloc(size);
  if (size == 0) {
    free(pointer);
    return NULL;
  }
  return fails() ? NULL : __libc_realloc(pointer, size);
}

void *memalign(size_t alignment, size_t size) {
  return fails() ? NULL : counted(__libc_memalign(alignment, size));
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
  void *pointer = memalign(alignment, size);
  if (pointer == NULL)
    return ENOMEM;
  *out = pointer;
  return 0;
}
