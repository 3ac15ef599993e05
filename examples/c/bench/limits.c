#include "limits.h"

#include <string.h>

limits limits_of(limits set, const xserv_model_info *info) {
  /* Measured on one: reads by the best of several kernels, bf16 products at the clock that they settle at. */
  const bool is_h200 = strstr(info->device, "H200") != NULL;
  if (set.read_gbs == 0 && is_h200) set.read_gbs = 4706;
  if (set.tflops == 0 && is_h200) set.tflops = 680;
  return set;
}

static double embedding(const xserv_model_info *info) { return (double)info->vocab_size * info->hidden_size; }

double step_weight_bytes(const limits *limits, const xserv_model_info *info) {
  double weights = (double)info->num_parameters - (limits->untied ? embedding(info) : 0);
  return weights * (info->dtype == XSERV_DTYPE_F32 ? 4 : 2);
}

double decode_limit_ms(const limits *limits, const xserv_model_info *info, double batch, double context) {
  if (limits->read_gbs == 0) return 0;
  double bytes = step_weight_bytes(limits, info) + batch * context * (double)info->kv_bytes_per_token;
  return bytes / limits->read_gbs * 1e-6;
}

double prompt_limit_ms(const limits *limits, const xserv_model_info *info, double batch, double num_tokens) {
  if (limits->tflops == 0) return 0;
  /* Two operations for each weight and token, of the output matrix for one token; and for each pair of a token
   * and one before it, a product with a key and one with a value. */
  double linear = (double)info->num_parameters - embedding(info) * (limits->untied ? 2 : 1);
  double pairs = num_tokens * num_tokens / 2;
  double attention = 4 * pairs * info->num_heads * info->head_dim * info->num_layers;
  return batch * (2 * linear * num_tokens + 2 * embedding(info) + attention) / limits->tflops * 1e-9;
}
