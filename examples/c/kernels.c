/* Calls the library's operators on memory of its own: one layer of a transformer, in miniature.
 *
 *     kernels [cpu|cuda]
 *
 * Without an argument it uses CUDA where possible. Every result is compared with a plain loop. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xserv.h>

#include "common/options.h"

enum { TOKENS = 12, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, HIDDEN = HEADS * HEAD_DIM, VOCAB = 100 };

static xserv_context *context;
static int failures;

static void check(xserv_status status, const char *what) {
  if (status == XSERV_STATUS_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, xserv_status_name(status), xserv_last_error());
  exit(1);
}

/* A tensor on the context's device, and the same values on the host. */
typedef struct {
  xserv_owned_tensor *owned;
  xserv_tensor view;   /* of the device's memory */
  xserv_tensor host;   /* of `values`: the same shape on the CPU */
  void *values;
  size_t count;
} tensor;

static tensor make(uint32_t dtype, uint32_t ndim, const int64_t *shape) {
  tensor t;
  memset(&t, 0, sizeof t);
  check(xserv_owned_tensor_new(context, dtype, ndim, shape, &t.owned), "xserv_owned_tensor_new");
  check(xserv_owned_tensor_view(t.owned, &t.view), "xserv_owned_tensor_view");
  t.count = 1;
  for (uint32_t i = 0; i < ndim; i++) t.count *= (size_t)shape[i];
  t.values = calloc(t.count, 4);
  if (!t.values) exit(1);
  t.host = t.view;
  t.host.data = t.values;
  t.host.device.device_type = 1; /* the CPU */
  t.host.device.device_id = 0;
  return t;
}

/* Small numbers that look random but are the same in every run. */
static tensor make_floats(uint32_t ndim, const int64_t *shape) {
  static uint32_t state = 1;
  tensor t = make(XSERV_DTYPE_F32, ndim, shape);
  for (size_t i = 0; i < t.count; i++) {
    state = state * 1664525u + 1013904223u;
    ((float *)t.values)[i] = (float)(state >> 8) / (float)(1 << 23) - 1.0f;
  }
  check(xserv_op_copy(context, &t.host, &t.view), "xserv_op_copy");
  return t;
}

static tensor make_ints(int64_t count, int32_t limit) {
  tensor t = make(XSERV_DTYPE_I32, 1, &count);
  for (int64_t i = 0; i < count; i++) ((int32_t *)t.values)[i] = (int32_t)(i * 7) % limit;
  check(xserv_op_copy(context, &t.host, &t.view), "xserv_op_copy");
  return t;
}

static float *fetch(tensor *t) {
  check(xserv_op_copy(context, &t->view, &t->host), "xserv_op_copy");
  return t->values;
}

static void drop(tensor *t) {
  xserv_owned_tensor_free(t->owned);
  free(t->values);
}

static void compare(const char *name, tensor *got, const double *want) {
  const float *values = fetch(got);
  double worst = 0;
  for (size_t i = 0; i < got->count; i++) {
    double error = fabs(values[i] - want[i]) / (1 + fabs(want[i]));
    if (!(error <= worst)) worst = error;
  }
  int is_good = worst <= 2e-5;
  failures += !is_good;
  printf("%-12s largest error %.1e  %s\n", name, worst, is_good ? "ok" : "WRONG");
}

int main(int argc, char **argv) {
  xserv_context_options options;
  xserv_context_options_default(&options);
  const command command = {"kernels", "[cpu|cuda]",
                           "Computes one layer of a transformer, in miniature, with the library's operators, and\n"
                           "compares the results with plain loops.", {{0}}};
  const char *device = NULL;
  parse_command(&command, argc, argv, &device, 1);
  if (device != NULL) {
    const bool cuda = strcmp(device, "cuda") == 0;
    if (!cuda && strcmp(device, "cpu") != 0) refuse(&command, "the device must be cpu or cuda, not \"%s\"", device);
    options.device_kind = cuda ? XSERV_DEVICE_CUDA : XSERV_DEVICE_CPU;
  }
  check(xserv_context_new(&options, &context), "xserv_context_new");
  uint32_t kind;
  check(xserv_context_get_device(context, &kind), "xserv_context_get_device");
  printf("on %s\n", kind == XSERV_DEVICE_CUDA ? "CUDA" : "the CPU");

  const int64_t vocab_hidden[] = {VOCAB, HIDDEN}, tokens_hidden[] = {TOKENS, HIDDEN}, hidden[] = {HIDDEN};
  const int64_t square[] = {HIDDEN, HIDDEN};
  const int64_t q_shape[] = {1, TOKENS, HEADS, HEAD_DIM}, kv_shape[] = {1, TOKENS, KV_HEADS, HEAD_DIM};
  tensor table = make_floats(2, vocab_hidden), ids = make_ints(TOKENS, VOCAB), x = make_floats(2, tokens_hidden);
  tensor weight = make_floats(1, hidden), normed = make_floats(2, tokens_hidden);
  tensor matrix = make_floats(2, square), product = make_floats(2, tokens_hidden);
  tensor gated = make_floats(2, tokens_hidden), shares = make_floats(2, tokens_hidden);
  tensor q = make_floats(4, q_shape), k = make_floats(4, kv_shape), v = make_floats(4, kv_shape);
  tensor mixed = make_floats(4, q_shape);
  static double want[TOKENS * HIDDEN];

  check(xserv_op_embedding(context, &table.view, &ids.view, &x.view), "xserv_op_embedding");
  const float *xs = fetch(&x), *w = weight.values;
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < HIDDEN; i++)
      want[t * HIDDEN + i] = ((float *)table.values)[((int32_t *)ids.values)[t] * HIDDEN + i];
  compare("embedding", &x, want);

  check(xserv_op_rms_norm(context, &x.view, &weight.view, 1e-6f, &normed.view), "xserv_op_rms_norm");
  for (int t = 0; t < TOKENS; t++) {
    double sum = 0;
    for (int i = 0; i < HIDDEN; i++) sum += (double)xs[t * HIDDEN + i] * xs[t * HIDDEN + i];
    for (int i = 0; i < HIDDEN; i++) want[t * HIDDEN + i] = xs[t * HIDDEN + i] / sqrt(sum / HIDDEN + 1e-6) * w[i];
  }
  compare("rms_norm", &normed, want);

  check(xserv_op_gemm(context, NULL, &normed.view, &matrix.view, &product.view), "xserv_op_gemm");
  const float *a = fetch(&normed), *b = matrix.values;
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < HIDDEN; i++) {
      double sum = 0;
      for (int j = 0; j < HIDDEN; j++) sum += (double)a[t * HIDDEN + j] * b[j * HIDDEN + i];
      want[t * HIDDEN + i] = sum;
    }
  compare("gemm", &product, want);

  check(xserv_op_silu_mul(context, &product.view, &normed.view, &gated.view), "xserv_op_silu_mul");
  const float *p = fetch(&product);
  for (int i = 0; i < TOKENS * HIDDEN; i++) want[i] = p[i] / (1 + exp(-p[i])) * a[i];
  compare("silu_mul", &gated, want);

  check(xserv_op_softmax(context, &gated.view, &shares.view), "xserv_op_softmax");
  const float *g = fetch(&gated);
  for (int t = 0; t < TOKENS; t++) {
    double sum = 0;
    for (int i = 0; i < HIDDEN; i++) sum += exp(g[t * HIDDEN + i]);
    for (int i = 0; i < HIDDEN; i++) want[t * HIDDEN + i] = exp(g[t * HIDDEN + i]) / sum;
  }
  compare("softmax", &shares, want);

  /* NULL options: every query sees every key. */
  check(xserv_op_attention(context, NULL, &q.view, &k.view, &v.view, &mixed.view), "xserv_op_attention");
  const float *qs = q.values, *ks = k.values, *vs = v.values;
  for (int t = 0; t < TOKENS; t++)
    for (int h = 0; h < HEADS; h++) {
      const int kv = h / (HEADS / KV_HEADS);
      double scores[TOKENS], sum = 0;
      for (int j = 0; j < TOKENS; j++) {
        double dot = 0;
        for (int d = 0; d < HEAD_DIM; d++)
          dot += (double)qs[(t * HEADS + h) * HEAD_DIM + d] * ks[(j * KV_HEADS + kv) * HEAD_DIM + d];
        sum += scores[j] = exp(dot / sqrt(HEAD_DIM));
      }
      for (int d = 0; d < HEAD_DIM; d++) {
        double out = 0;
        for (int j = 0; j < TOKENS; j++) out += scores[j] / sum * vs[(j * KV_HEADS + kv) * HEAD_DIM + d];
        want[(t * HEADS + h) * HEAD_DIM + d] = out;
      }
    }
  compare("attention", &mixed, want);

  xserv_memory_stats stats;
  stats.struct_size = sizeof stats;
  check(xserv_context_synchronize(context), "xserv_context_synchronize");
  check(xserv_context_get_memory_stats(context, &stats), "xserv_context_get_memory_stats");
  printf("%llu bytes in use, %llu taken from the system in %llu calls\n", (unsigned long long)stats.allocated,
         (unsigned long long)stats.reserved, (unsigned long long)stats.num_driver_calls);

  tensor *all[] = {&table, &ids, &x, &weight, &normed, &matrix, &product, &gated, &shares, &q, &k, &v, &mixed};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) drop(all[i]);
  xserv_context_free(context);
  return failures != 0;
}
