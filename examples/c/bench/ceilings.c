#include "ceilings.h"

#include <stdio.h>
#include <stdlib.h>

#include "measure.h"
#include "report.h"

#define ROUNDS 5
#define PATTERN_LEN ((int64_t)1 << 20) /* random numbers, then repeated */
#define COLUMNS 4096                   /* of the matrix that is multiplied by one row */
#define ROW_BYTES ((size_t)256 << 10)  /* of the rows that are searched */

probes gpu_probes(uint32_t dtype) {
  return (probes){XSERV_DEVICE_CUDA, dtype, (size_t)4 << 30, (size_t)512 << 20, 8192, 0.08};
}

/* A tensor of one dimension. */
typedef struct array {
  xserv_owned_tensor *owned;
  xserv_tensor view;
} array;

static xserv_status make_array(const xserv_context *context, uint32_t dtype, int64_t count, array *made) {
  xserv_status status = xserv_owned_tensor_new(context, dtype, 1, &count, &made->owned);
  return status != XSERV_STATUS_OK ? status : xserv_owned_tensor_view(made->owned, &made->view);
}

static size_t element_bytes(const xserv_tensor *tensor) { return tensor->dtype.bits / 8u; }

/* Returns a view of `count` elements from `first` on. The shape is kept in *count. */
static xserv_tensor slice(const xserv_tensor *whole, int64_t first, int64_t *count) {
  xserv_tensor part = *whole;
  part.shape = count;
  part.strides = NULL; /* contiguous */
  part.byte_offset += (uint64_t)first * element_bytes(whole);
  return part;
}

/* Returns a matrix in the memory of an array. */
static xserv_tensor matrix(const xserv_tensor *whole, int64_t shape[2]) {
  xserv_tensor view = *whole;
  view.ndim = 2;
  view.shape = shape;
  view.strides = NULL; /* contiguous, row by row */
  return view;
}

/* Fills an array with random numbers from -1 to 1, made on the host once and doubled on the device
 * until the array is full. */
static xserv_status fill(const xserv_context *context, const array *target, int64_t count, uint64_t seed) {
  array random = {0};
  int64_t filled = count < PATTERN_LEN ? count : PATTERN_LEN;
  float *values = malloc((size_t)filled * sizeof *values);
  if (values == NULL) {
    fprintf(stderr, "bench: out of memory\n");
    exit(1);
  }
  for (int64_t i = 0; i < filled; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
    values[i] = (float)(seed >> 40) / (float)(1 << 23) - 1.0f;
  }
  xserv_status status = make_array(context, XSERV_DTYPE_F32, filled, &random);
  if (status == XSERV_STATUS_OK) {
    xserv_tensor host = random.view;
    host.data = values;
    host.device = (xserv_tensor_device){1, 0}; /* kDLCPU */
    host.byte_offset = 0;
    status = xserv_op_copy(context, &host, &random.view);
  }
  if (status == XSERV_STATUS_OK) {
    xserv_tensor begin = slice(&target->view, 0, &filled);
    status = xserv_op_cast(context, &random.view, &begin);
  }
  for (int64_t at = filled; at < count && status == XSERV_STATUS_OK; at *= 2) {
    int64_t length = at < count - at ? at : count - at;
    xserv_tensor from = slice(&target->view, 0, &length), to = slice(&target->view, at, &length);
    status = xserv_op_copy(context, &from, &to);
  }
  xserv_owned_tensor_free(random.owned);
  free(values);
  return status;
}

/* An operator and its operands. */
typedef struct call {
  const xserv_context *context;
  bool is_product; /* c = a b^T; else c gets the indices of the largest elements of the rows of a */
  xserv_tensor a, b, c;
} call;

static xserv_status queue(const call *call) {
  if (!call->is_product) return xserv_op_argmax(call->context, &call->a, &call->c);
  xserv_gemm_options options;
  xserv_gemm_options_default(&options);
  options.transpose_b = 1;
  return xserv_op_gemm(call->context, &options, &call->a, &call->b, &call->c);
}

/* Returns the seconds of a call, averaged over `count` in a row. */
static xserv_status time_calls(const call *call, uint32_t count, double *seconds) {
  xserv_status status = XSERV_STATUS_OK;
  double began = instant_now().wall;
  for (uint32_t i = 0; i < count && status == XSERV_STATUS_OK; i++) status = queue(call);
  if (status == XSERV_STATUS_OK) status = xserv_context_synchronize(call->context);
  *seconds = (instant_now().wall - began) / count;
  return status;
}

/* Returns the median of several rounds, after a first call that loads the kernel, a second one that
 * determines the number of calls in a round, and a round that brings the device to its steady
 * speed. */
static xserv_status time_operator(const call *call, double round_seconds, double *seconds) {
  double once, rounds[ROUNDS + 1];
  xserv_status status = time_calls(call, 1, &once);
  if (status == XSERV_STATUS_OK) status = time_calls(call, 1, &once);
  const double calls = round_seconds / (once > 1e-6 ? once : 1e-6);
  const uint32_t count = calls < 1 ? 1 : calls > 10000 ? 10000 : (uint32_t)calls;
  for (int i = 0; i <= ROUNDS && status == XSERV_STATUS_OK; i++) status = time_calls(call, count, &rounds[i]);
  if (status == XSERV_STATUS_OK) *seconds = median(rounds + 1, ROUNDS);
  return status;
}

/* Makes an array of most_bytes, or of as many as there is memory for: the beginning and the end of
 * a read, which are slower, count less in a long one. */
static xserv_status make_large(const xserv_context *context, const probes *probes, size_t bytes_each, array *large,
                               size_t *num_bytes) {
  xserv_status status = XSERV_STATUS_OUT_OF_MEMORY;
  for (*num_bytes = probes->most_bytes; *num_bytes >= probes->least_bytes; *num_bytes /= 2) {
    status = make_array(context, probes->dtype, (int64_t)(*num_bytes / bytes_each), large);
    if (status != XSERV_STATUS_OUT_OF_MEMORY) break;
  }
  return status;
}

static xserv_status measure_reads(const xserv_context *context, const probes *probes, measured *result) {
  const size_t bytes_each = probes->dtype == XSERV_DTYPE_F32 ? 4 : 2;
  array large = {0}, row = {0}, out = {0}, places = {0};
  double product = 0, search = 0;
  xserv_status status = make_large(context, probes, bytes_each, &large, &result->num_bytes);
  const size_t num_bytes = result->num_bytes;
  int64_t weight_shape[2] = {(int64_t)(num_bytes / bytes_each / COLUMNS), COLUMNS};
  int64_t row_shape[2] = {1, COLUMNS}, out_shape[2] = {1, weight_shape[0]};
  int64_t search_shape[2] = {(int64_t)(num_bytes / ROW_BYTES), (int64_t)(ROW_BYTES / sizeof(float))};
  if (status == XSERV_STATUS_OK) status = make_array(context, probes->dtype, COLUMNS, &row);
  if (status == XSERV_STATUS_OK) status = make_array(context, probes->dtype, out_shape[1], &out);
  if (status == XSERV_STATUS_OK) status = make_array(context, XSERV_DTYPE_I32, search_shape[0], &places);
  if (status == XSERV_STATUS_OK) status = fill(context, &large, weight_shape[0] * COLUMNS, 1);
  if (status == XSERV_STATUS_OK) status = fill(context, &row, COLUMNS, 2);
  if (status == XSERV_STATUS_OK) {
    const call call = {context, true, matrix(&row.view, row_shape), matrix(&large.view, weight_shape),
                       matrix(&out.view, out_shape)};
    status = time_operator(&call, probes->round_seconds, &product);
  }
  if (status == XSERV_STATUS_OK) {
    /* The same memory as f32, which takes the fewest comparisons per byte. */
    call call = {.context = context, .a = matrix(&large.view, search_shape), .c = places.view};
    call.a.dtype = (xserv_tensor_dtype){2, 32, 1};
    status = time_operator(&call, probes->round_seconds, &search);
  }
  if (status == XSERV_STATUS_OK)
    result->ceilings.read_gbs = (double)num_bytes / (product < search ? product : search) * 1e-9;
  xserv_owned_tensor_free(large.owned);
  xserv_owned_tensor_free(row.owned);
  xserv_owned_tensor_free(out.owned);
  xserv_owned_tensor_free(places.owned);
  return status;
}

static xserv_status measure_products(const xserv_context *context, const probes *probes, measured *result) {
  const int64_t size = probes->gemm_size;
  int64_t shape[2] = {size, size};
  array arrays[3] = {{0}};
  double seconds = 0;
  xserv_status status = XSERV_STATUS_OK;
  for (uint64_t i = 0; i < 3 && status == XSERV_STATUS_OK; i++) {
    status = make_array(context, probes->dtype, size * size, &arrays[i]);
    if (status == XSERV_STATUS_OK && i < 2) status = fill(context, &arrays[i], size * size, 3 + i);
  }
  if (status == XSERV_STATUS_OK) {
    const call call = {context, true, matrix(&arrays[0].view, shape), matrix(&arrays[1].view, shape),
                       matrix(&arrays[2].view, shape)};
    status = time_operator(&call, probes->round_seconds, &seconds);
  }
  if (status == XSERV_STATUS_OK)
    result->ceilings.tflops = 2 * (double)size * (double)size * (double)size / seconds * 1e-12;
  for (int i = 0; i < 3; i++) xserv_owned_tensor_free(arrays[i].owned);
  return status;
}

bool measure_ceilings(const probes *probes, measured *result) {
  xserv_context_options options;
  xserv_context *context = NULL;
  *result = (measured){0};
  xserv_context_options_default(&options);
  options.device_kind = probes->device_kind;
  xserv_status status = xserv_context_new(&options, &context);
  if (status == XSERV_STATUS_OK) status = measure_reads(context, probes, result);
  /* The memory of the reads is returned to the driver, for the products and their workspace. */
  if (status == XSERV_STATUS_OK) status = xserv_context_trim(context);
  if (status == XSERV_STATUS_OK) status = measure_products(context, probes, result);
  if (status != XSERV_STATUS_OK)
    fprintf(stderr, "bench: no ceilings: %s (%s)\n", xserv_last_error(), xserv_status_name(status));
  xserv_context_free(context);
  return status == XSERV_STATUS_OK;
}
