#include "experts.h"

#include <stdlib.h>

#include "json.h"

/* Returns a number of config.json that is at least 1. */
static double number(const char *config, const char *key, double if_none) {
  const char *said = member(config, key);
  const double value = said != NULL ? strtod(said, NULL) : 0;
  return value >= 1 ? value : if_none;
}

/* Whether a list of JSON has a number. */
static bool has_number(const char *list, uint32_t wanted) {
  if (list == NULL || *list != '[') return false;
  for (const char *at = list + 1; *at != '\0' && *at != ']';) {
    char *end;
    const unsigned long found = strtoul(at, &end, 10);
    if (end != at && found == wanted) return true;
    at = end != at ? end : at + 1;
  }
  return false;
}

expert_sizes experts_of(const xserv_model_info *info) {
  expert_sizes sizes = {0, 1, 1};
  char *config = read_json(info->path, "config.json");
  const char *family = member(config, "model_type");
  double layers = 0, width = 0;
  if (begins_with(family, "\"mixtral\"")) {
    sizes.count = number(config, "num_local_experts", 8);
    sizes.per_token = number(config, "num_experts_per_tok", 2);
    width = number(config, "intermediate_size", 0);
    layers = info->num_layers;
  } else if (begins_with(family, "\"qwen3_moe\"")) {
    sizes.count = number(config, "num_experts", 128);
    sizes.per_token = number(config, "num_experts_per_tok", 8);
    width = number(config, "moe_intermediate_size", 768);
    const uint32_t step = (uint32_t)number(config, "decoder_sparse_step", 1);
    const char *dense = member(config, "mlp_only_layers");
    for (uint32_t layer = 0; layer < info->num_layers; layer++)
      layers += (layer + 1) % step == 0 && !has_number(dense, layer);
  }
  free(config);
  sizes.weights = layers * sizes.count * 3 * width * info->hidden_size; /* gate, up and down */
  return sizes;
}
