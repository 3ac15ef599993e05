/* What memory and arithmetic of a machine allow: the least time that a step of a model can take. */

#ifndef EXAMPLES_BENCH_LIMITS_H
#define EXAMPLES_BENCH_LIMITS_H

#include <stdbool.h>

#include <xserv.h>

typedef struct limits {
  double read_gbs; /* GB/s that memory can be read at; 0: not known */
  double tflops;   /* TFLOP/s of matrix products that can be sustained; 0: not known */
  bool untied;     /* the embedding is not also the output matrix */
} limits;

/* What is not set becomes that of the model's device, where it has been measured (an H200). */
limits limits_of(limits set, const xserv_model_info *info);

/* Bytes of weights that every step reads: of an embedding that isn't also the output matrix, only a row. */
double step_weight_bytes(const limits *limits, const xserv_model_info *info);

/* Milliseconds of a step that gives `batch` requests a token each, with `context` tokens behind them. 0: not known. */
double decode_limit_ms(const limits *limits, const xserv_model_info *info, double batch, double context);

/* Milliseconds of `batch` prompts of num_tokens, up to the logits of the last token. 0: not known. */
double prompt_limit_ms(const limits *limits, const xserv_model_info *info, double batch, double num_tokens);

#endif
