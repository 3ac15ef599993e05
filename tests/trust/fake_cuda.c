/* A CUDA driver without a GPU, for tests: two devices whose memory is the host's, and whose kernels do
 * nothing. Work is done when it is queued. Any call can be made to fail, as the real driver's calls do:
 * for once (out of memory), or for good, as after a fault in a kernel (all later calls on that device).
 *
 * Built as libcuda.so.1 and found through LD_LIBRARY_PATH. Only what the library calls is here. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILED = 719,
  UNKNOWN = 999,
};

/* The classes of functions that a fault can be planned for. */
enum {
  CONTEXT = 1,
  MEMORY = 2,
  MODULE = 4,
  COPY = 8,
  LAUNCH = 16,
  EVENT = 32,
  WAIT = 64,
  RELEASE = 128,
};

#define NUM_DEVICES 2

struct device {
  size_t limit, used;
  /* The error that ended all work, or 0. */
  int lost;
};

struct block {
  struct block *next;
  char *start;
  size_t len;
  struct device *device; /* NULL: pinned host memory */
  bool is_registered;
};

struct stream {
  struct device *device;
  bool is_capturing;
};

struct event {
  struct device *device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static struct device devices[NUM_DEVICES] = {{.limit = (size_t)1 << 30}, {.limit = (size_t)1 << 30}};
static struct block *blocks;
static pid_t initialised_in;
static long num_calls_in_child, num_handles, num_pinned;
static int fault_classes, fault_status;
static long fault_in, num_counted;
static bool never_ready, hangs;
static _Thread_local struct device *contexts[16];
static _Thread_local int num_contexts;

/* ---- For the tests ---- */

/* The call number `n` (from 1, 0: none) from now on of the functions in `classes` on device 0 returns
 * `status`. */
void fake_cuda_fail(int classes, long n, int status) {
  pthread_mutex_lock(&lock);
  fault_classes = classes, fault_in = n, fault_status = status, num_counted = 0;
  pthread_mutex_unlock(&lock);
}

/* The calls counted since `fake_cuda_fail`. */
long fake_cuda_counted(void) { return num_counted; }

/* From now on no event is ever reached: asking says so, and waiting waits if `blocks`, until this is
 * called again with 0. */
void fake_cuda_never_ready(int is_so, int blocks_too) {
  pthread_mutex_lock(&lock);
  never_ready = is_so, hangs = is_so && blocks_too;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&lock);
}

void fake_cuda_set_limit(int device, size_t bytes) { devices[device].limit = bytes; }
size_t fake_cuda_used(int device) { return devices[device].used; }
void fake_cuda_lose(int device, int status) { devices[device].lost = status; }
/* Events, streams, graphs and pinned memory that exist. */
long fake_cuda_handles(void) { return num_handles + num_pinned; }
/* The calls that forked children made, but for cuInit, which says that they must not. */
long fake_cuda_calls_in_child(void) { return num_calls_in_child; }

/* ---- The driver ---- */

static struct device *current(void) { return num_contexts ? contexts[num_contexts - 1] : NULL; }

static bool is_sticky(int status) {
  return status == ILLEGAL_ADDRESS || status == LAUNCH_FAILED;
}

/* Counts a call, and returns what it fails with. To be called with the lock. */
static int count(int class, struct device *device) {
  if (initialised_in == 0) return NOT_INITIALIZED;
  if (initialised_in != getpid()) {
    num_calls_in_child++;
    return NOT_INITIALIZED;
  }
  if (device && device->lost && class != CONTEXT) return device->lost;
  if (device == &devices[0] && fault_classes & class) {
    num_counted++;
    if (fault_in && num_counted == fault_in) {
      if (device && is_sticky(fault_status)) device->lost = fault_status;
      return fault_status;
    }
  }
  return SUCCESS;
}

static int begin(int class, struct device *device) {
  pthread_mutex_lock(&lock);
  int status = count(class, device);
  pthread_mutex_unlock(&lock);
  return status;
}

#define BEGIN(class, device)             \
  do {                                   \
    int status_ = begin(class, device);  \
    if (status_) return status_;         \
  } while (0)

/* For functions that need a current context. */
#define BEGIN_HERE(class)                                        \
  struct device *here = current();                               \
  do {                                                           \
    BEGIN(class, here);                                          \
    if (!here) return INVALID_CONTEXT;                           \
  } while (0)

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}

int cuInit(unsigned flags) {
  (void)flags;
  const char *millis = getenv("FAKE_CUDA_INIT_MS");
  pthread_mutex_lock(&lock);
  if (!initialised_in) initialised_in = getpid();
  int status = initialised_in == getpid() ? SUCCESS : NOT_INITIALIZED;
  pthread_mutex_unlock(&lock);
  if (!status && millis) usleep((useconds_t)atoi(millis) * 1000);
  return status;
}

int cuGetErrorName(int status, const char **name) {
  switch (status) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case UNKNOWN: *name = "CUDA_ERROR_UNKNOWN"; break;
    default: *name = "CUDA_ERROR_OF_A_TEST"; break;
  }
  return SUCCESS;
}

int cuGetErrorString(int status, const char **text) {
  (void)status;
  *text = "an error of the fake driver";
  return SUCCESS;
}

int cuDeviceGetCount(int *found) {
  *found = NUM_DEVICES;
  return initialised_in == getpid() ? SUCCESS : NOT_INITIALIZED;
}

int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= NUM_DEVICES) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

int cuDeviceGetName(char *name, int len, int device) {
  snprintf(name, (size_t)len, "Fake %d", device);
  return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = devices[device].limit;
  return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: *value = 132; break;              /* multiprocessors */
    case 38: *value = 50 << 20; break;         /* L2 */
    case 75: *value = 9; break;                /* compute capability */
    case 76: *value = 0; break;
    case 97: *value = 232448; break;           /* shared memory of a block */
    default: *value = 0; break;
  }
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  BEGIN(MEMORY, &devices[device]);
  *context = &devices[device];
  return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
  *context = current();
  return begin(0, NULL);
}

int cuCtxPushCurrent_v2(void *context) {
  BEGIN(CONTEXT, context);
  if (num_contexts == 16) return INVALID_CONTEXT;
  contexts[num_contexts++] = context;
  return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
  *context = current();
  if (!num_contexts) return INVALID_CONTEXT;
  num_contexts--;
  return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  BEGIN_HERE(0);
  *total = here->limit;
  *free_bytes = here->used < here->limit ? here->limit - here->used : 0;
  return SUCCESS;
}

static int add_block(struct device *device, char *start, size_t len, bool is_registered) {
  struct block *block = malloc(sizeof *block);
  if (!block) return OUT_OF_MEMORY;
  *block = (struct block){blocks, start, len, device, is_registered};
  blocks = block;
  if (device) {
    device->used += len;
  } else {
    num_pinned++;
  }
  return SUCCESS;
}

static int take_memory(struct device *device, void **start, size_t len) {
  if (len == 0) return INVALID_VALUE;
  if (device && (len > device->limit || device->used > device->limit - len)) return OUT_OF_MEMORY;
  /* Zeros, and what is not touched costs nothing. */
  *start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*start == MAP_FAILED) return OUT_OF_MEMORY;
  int status = add_block(device, *start, len, false);
  if (status) munmap(*start, len);
  return status;
}

static int give_back(char *start, bool is_device, bool is_registered) {
  for (struct block **at = &blocks; *at; at = &(*at)->next) {
    struct block *block = *at;
    if (block->start != start || !block->device == is_device) continue;
    if (block->is_registered != is_registered) return INVALID_VALUE;
    *at = block->next;
    if (block->device) {
      block->device->used -= block->len;
    } else {
      num_pinned--;
    }
    if (!is_registered) munmap(start, block->len);
    free(block);
    return SUCCESS;
  }
  return INVALID_VALUE;
}

int cuMemAlloc_v2(uint64_t *start, size_t len) {
  BEGIN_HERE(MEMORY);
  void *memory = NULL;
  pthread_mutex_lock(&lock);
  int status = take_memory(here, &memory, len);
  pthread_mutex_unlock(&lock);
  *start = (uint64_t)(uintptr_t)memory;
  return status;
}

int cuMemFree_v2(uint64_t start) {
  BEGIN_HERE(RELEASE);
  pthread_mutex_lock(&lock);
  int status = give_back((char *)(uintptr_t)start, true, false);
  pthread_mutex_unlock(&lock);
  return status;
}

int cuMemHostAlloc(void **start, size_t len, unsigned flags) {
  (void)flags;
  BEGIN_HERE(MEMORY);
  pthread_mutex_lock(&lock);
  int status = take_memory(NULL, start, len);
  pthread_mutex_unlock(&lock);
  return status;
}

int cuMemFreeHost(void *start) {
  BEGIN_HERE(RELEASE);
  pthread_mutex_lock(&lock);
  int status = give_back(start, false, false);
  pthread_mutex_unlock(&lock);
  return status;
}

int cuMemHostRegister_v2(void *start, size_t len, unsigned flags) {
  (void)flags;
  BEGIN_HERE(MEMORY);
  pthread_mutex_lock(&lock);
  int status = add_block(NULL, start, len, true);
  pthread_mutex_unlock(&lock);
  return status;
}

int cuMemHostUnregister(void *start) {
  BEGIN_HERE(RELEASE);
  pthread_mutex_lock(&lock);
  int status = give_back(start, false, true);
  pthread_mutex_unlock(&lock);
  return status;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *start, unsigned flags) {
  (void)flags;
  BEGIN_HERE(MEMORY);
  *address = (uint64_t)(uintptr_t)start;
  return SUCCESS;
}

int cuMemGetAddressRange_v2(uint64_t *start, size_t *len, uint64_t address) {
  BEGIN_HERE(0);
  int status = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (struct block *block = blocks; block; block = block->next) {
    uint64_t first = (uint64_t)(uintptr_t)block->start;
    if (address < first || address - first >= block->len) continue;
    *start = first, *len = block->len, status = SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static bool is_capturing(struct stream *stream) { return (uintptr_t)stream > 2 && stream->is_capturing; }

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, struct stream *stream) {
  BEGIN_HERE(COPY);
  if (!is_capturing(stream)) memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, len);
  return SUCCESS;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t len, struct stream *stream) {
  BEGIN_HERE(COPY);
  if (!is_capturing(stream)) memset((void *)(uintptr_t)to, value, len);
  return SUCCESS;
}

static int new_handle(struct device *device, size_t size, void **handle) {
  struct event *made = calloc(1, size);
  if (!made) return OUT_OF_MEMORY;
  made->device = device;
  *handle = made;
  __atomic_add_fetch(&num_handles, 1, __ATOMIC_RELAXED);
  return SUCCESS;
}

static void free_handle(void *handle) {
  free(handle);
  __atomic_sub_fetch(&num_handles, 1, __ATOMIC_RELAXED);
}

int cuStreamCreate(void **stream, unsigned flags) {
  (void)flags;
  BEGIN_HERE(MEMORY);
  return new_handle(here, sizeof(struct stream), stream);
}

int cuStreamDestroy_v2(struct stream *stream) {
  BEGIN_HERE(RELEASE);
  free_handle(stream);
  return SUCCESS;
}

int cuStreamGetCtx(struct stream *stream, void **context) {
  BEGIN_HERE(0);
  *context = (uintptr_t)stream > 2 ? stream->device : here;
  return SUCCESS;
}

/* Waits as long as the device hangs. */
static int wait_for_device(struct device *here) {
  pthread_mutex_lock(&lock);
  int status = count(WAIT, here);
  while (!status && hangs) pthread_cond_wait(&released, &lock);
  pthread_mutex_unlock(&lock);
  /* Work takes some time, so that requests meet each other. */
  usleep(100);
  return status;
}

int cuStreamSynchronize(struct stream *stream) {
  struct device *here = current();
  if (!here) return INVALID_CONTEXT;
  if (is_capturing(stream)) return 900;
  return wait_for_device(here);
}

int cuStreamBeginCapture_v2(struct stream *stream, int mode) {
  (void)mode;
  BEGIN_HERE(LAUNCH);
  if ((uintptr_t)stream <= 2) return INVALID_HANDLE;
  stream->is_capturing = true;
  return SUCCESS;
}

int cuStreamEndCapture(struct stream *stream, void **graph) {
  stream->is_capturing = false;
  *graph = NULL;
  BEGIN_HERE(LAUNCH);
  return new_handle(here, sizeof(struct event), graph);
}

int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
  (void)graph, (void)flags;
  BEGIN_HERE(MEMORY);
  return new_handle(here, sizeof(struct event), executable);
}

int cuGraphDestroy(void *graph) {
  BEGIN_HERE(RELEASE);
  free_handle(graph);
  return SUCCESS;
}

int cuGraphExecDestroy(void *executable) {
  BEGIN_HERE(RELEASE);
  free_handle(executable);
  return SUCCESS;
}

int cuGraphLaunch(void *executable, struct stream *stream) {
  (void)executable, (void)stream;
  BEGIN_HERE(LAUNCH);
  return SUCCESS;
}

int cuEventCreate(void **event, unsigned flags) {
  (void)flags;
  BEGIN_HERE(MEMORY);
  return new_handle(here, sizeof(struct event), event);
}

int cuEventDestroy_v2(void *event) {
  BEGIN_HERE(RELEASE);
  free_handle(event);
  return SUCCESS;
}

int cuEventRecord(struct event *event, struct stream *stream) {
  (void)event, (void)stream;
  BEGIN_HERE(EVENT);
  return SUCCESS;
}

int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
  (void)stream, (void)event, (void)flags;
  BEGIN_HERE(EVENT);
  return SUCCESS;
}

int cuEventQuery(struct event *event) {
  (void)event;
  BEGIN_HERE(EVENT);
  return never_ready ? NOT_READY : SUCCESS;
}

int cuEventSynchronize(struct event *event) {
  (void)event;
  struct device *here = current();
  if (!here) return INVALID_CONTEXT;
  return wait_for_device(here);
}

int cuEventElapsedTime_v2(float *millis, struct event *from, struct event *to) {
  (void)from, (void)to;
  *millis = 0.01f;
  BEGIN_HERE(EVENT);
  return SUCCESS;
}

int cuModuleLoadData(void **module, const void *image) {
  BEGIN_HERE(MODULE);
  *module = (void *)image;
  return SUCCESS;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)name;
  BEGIN_HERE(MODULE);
  *function = module;
  return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
  (void)attribute, (void)function;
  BEGIN_HERE(0);
  *value = 0;
  return SUCCESS;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  BEGIN_HERE(0);
  return SUCCESS;
}

int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
  (void)config, (void)function, (void)arguments, (void)extra;
  BEGIN_HERE(LAUNCH);
  return SUCCESS;
}

int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *start, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  (void)type, (void)rank, (void)start, (void)sizes, (void)strides, (void)box, (void)steps;
  (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  BEGIN_HERE(0);
  memset(map, 0, 128);
  return SUCCESS;
}
