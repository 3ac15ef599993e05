#include "limits.h"

#include <math.h>

/* Inputs that share a scale, which is bf16, where embeddings are integers of 8 bits. */
#define EMBEDDING_GROUP 128.0

model_work model_work_of(const xserv_model_info *info, bool tied, uint32_t embeddings, expert_sizes experts) {
  const double embedding = (double)info->vocab_size * info->hidden_size;
  const double stored = info->dtype == XSERV_DTYPE_F32 ? 4 : 2;
  const double bytes = embedding * (embeddings == XSERV_WEIGHTS_INT8 ? 1 + 2 / EMBEDDING_GROUP : stored);
  const double layers = (double)info->num_parameters - embedding * (tied ? 1 : 2);
  const double in_memory = (double)info->weights_bytes - bytes * (tied ? 1 : 2);
  /* Memory beyond the numbers is padding between small tensors, which no step reads. */
  const double layer_bytes = in_memory < layers * stored ? in_memory : layers * stored;
  const double share = layers > 0 ? experts.weights / layers : 0;
  return (model_work){
      .layer_weights = layers - experts.weights,
      .output_weights = embedding,
      .experts = experts,
      .layer_bytes = layer_bytes * (1 - share),
      .output_bytes = bytes,
      .expert_bytes = layer_bytes * share,
      .kv_bytes = (double)info->kv_bytes_per_token,
      /* A product with a key and one with a value: two operations for each element. */
      .attention_flops = 4.0 * info->num_heads * info->head_dim * info->num_layers,
  };
}

/* Returns the share of the experts that at least one of `rows` tokens takes. */
static double read_share(const expert_sizes *experts, double rows) {
  return 1 - pow(1 - experts->per_token / experts->count, rows);
}

double step_weight_bytes(const model_work *work) {
  return work->layer_bytes + work->output_bytes + work->expert_bytes * read_share(&work->experts, 1);
}

static double operation_ms(const ceilings *ceilings, double bytes, double flops) {
  const double read_ms = bytes / ceilings->read_gbs * 1e-6, flops_ms = flops / ceilings->tflops * 1e-9;
  return read_ms > flops_ms ? read_ms : flops_ms;
}

/* Matrices that are multiplied with the same number of rows are taken together: both times grow
 * with the weights only. */
static double product_ms(const ceilings *ceilings, double bytes, double weights, double rows) {
  return operation_ms(ceilings, bytes, 2 * weights * rows);
}

static double experts_ms(const ceilings *ceilings, const model_work *work, double rows) {
  const expert_sizes *experts = &work->experts;
  const double of_a_token = experts->weights * experts->per_token / experts->count;
  return product_ms(ceilings, work->expert_bytes * read_share(experts, rows), of_a_token, rows);
}

static bool are_known(const ceilings *ceilings) { return ceilings->read_gbs > 0 && ceilings->tflops > 0; }

double decode_limit_ms(const ceilings *ceilings, const model_work *work, double batch, double context) {
  if (!are_known(ceilings)) return 0;
  const double pairs = batch * context;
  return product_ms(ceilings, work->layer_bytes, work->layer_weights, batch) +
         experts_ms(ceilings, work, batch) +
         product_ms(ceilings, work->output_bytes, work->output_weights, batch) +
         operation_ms(ceilings, pairs * work->kv_bytes, pairs * work->attention_flops);
}

double prompt_limit_ms(const ceilings *ceilings, const model_work *work, double batch, double num_tokens) {
  if (!are_known(ceilings)) return 0;
  const double pairs = batch * num_tokens * (num_tokens + 1) / 2; /* a token attends to itself and those before */
  return product_ms(ceilings, work->layer_bytes, work->layer_weights, batch * num_tokens) +
         experts_ms(ceilings, work, batch * num_tokens) +
         product_ms(ceilings, work->output_bytes, work->output_weights, batch) +
         operation_ms(ceilings, batch * num_tokens * work->kv_bytes, pairs * work->attention_flops);
}
