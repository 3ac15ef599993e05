/*
 * The least time that a step of a model can take on a machine: the sum, over the operations of the
 * step, of the time to read what the operation needs or to multiply, whichever is longer.
 *
 * Reads are those of the weights, and of the keys and values of the cache; computations are the
 * products with both. Activations, norms and the row of the embedding that a token takes are left
 * out: fused kernels hardly move them. A model with sliding windows, of which xserv_model_info does
 * not tell, counts as if every layer saw the whole context.
 *
 * Of the experts that layers have instead of an MLP, those are read that at least one token of the step
 * takes: as many as on average if each token takes any of them with the same probability. A router that
 * prefers some of them has fewer read.
 */

#ifndef EXAMPLES_BENCH_LIMITS_H
#define EXAMPLES_BENCH_LIMITS_H

#include <stdbool.h>

#include <xserv.h>

#include "experts.h"

/* The rates of a machine. */
typedef struct ceilings {
  double read_gbs; /* GB/s that memory can be read at; 0: not known */
  double tflops;   /* TFLOP/s of large matrix products; 0: not known */
} ceilings;

/* The sizes of what the operations of a model read and compute. */
typedef struct model_work {
  double layer_weights;   /* numbers in all weights but the embedding, the output matrix and experts */
  double output_weights;  /* numbers in the output matrix */
  expert_sizes experts;
  double layer_bytes;     /* what these take in memory, quantised or not */
  double output_bytes;
  double expert_bytes;
  double kv_bytes;        /* bytes of keys and values of a token, in all layers */
  double attention_flops; /* for a query and a key, in all layers */
} model_work;

/*
 * Returns the sizes of a model; `tied` says whether the embedding is also the output matrix, and
 * `embeddings`, an xserv_weights, as what both are kept. An output matrix that its folder stores
 * quantised counts as if it were not, and the layers as that much smaller. Experts take the share of the
 * layers' bytes that they have of their numbers.
 */
model_work model_work_of(const xserv_model_info *info, bool tied, uint32_t embeddings, expert_sizes experts);

/*
 * Returns the bytes of weights that a step of one token reads, without an embedding that is not also
 * the output matrix.
 */
double step_weight_bytes(const model_work *work);

/*
 * Returns the least milliseconds of a step that gives `batch` requests a token each, with `context`
 * tokens before it in each; 0 if one of the rates is unknown.
 */
double decode_limit_ms(const ceilings *ceilings, const model_work *work, double batch, double context);

/*
 * Returns the least milliseconds of `batch` prompts of num_tokens, up to the logits of each one's
 * last token; 0 if one of the rates is unknown.
 */
double prompt_limit_ms(const ceilings *ceilings, const model_work *work, double batch, double num_tokens);

#endif
