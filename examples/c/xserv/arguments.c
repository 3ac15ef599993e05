#include "arguments.h"

#include <string.h>

void load_arguments_begin(load_arguments *self) {
  memset(self, 0, sizeof *self);
  xserv_load_options *options = &self->options;
  xserv_load_options_default(options);
  const command_option rows[] = {
      {"--device", "cpu|cuda|auto", OPTION_CHOICE, &options->device_kind,
       "where the model runs\n(auto: the GPU if it runs and fits there)", 0, 0},
      {"--device-index", "N", OPTION_UINT32, &options->device_index, "which GPU, from 0 (0)", 0, UINT32_MAX},
      {"--dtype", "auto|f32|f16|bf16", OPTION_CHOICE, &options->dtype,
       "type of weights and KV cache (auto: as stored)", 0, 0},
      {"--weights", "stored|int8|int4", OPTION_CHOICE, &options->weights,
       "what the layers' matrices are kept as (stored: as the\nfiles have them; the others are quantised at load)", 0, 0},
      {"--group-size", "N", OPTION_UINT32, &options->weights_group_size,
       "inputs that share a scale in weights quantised at load\n(0: 32 with int4, 128 with int8)", 0, 1 << 20},
      {"--embeddings", "stored|int8", OPTION_CHOICE, &options->embeddings,
       "what the embedding and the output matrix are kept as\n(stored: as the files have them)", 0, 0},
      {"--kept-weights", "FILE", OPTION_TEXT, &options->kept_weights,
       "keep what is quantised in FILE: read if it is there,\nelse made", 0, 0},
      {"--threads", "N", OPTION_UINT32, &options->num_threads, "threads of the CPU (0: one for each core)", 0, 1024},
      {"--max-memory", "SIZE", OPTION_SIZE, &options->max_memory_bytes,
       "the most memory for weights, work space and KV cache:\n500M, 8G or 8GiB in units of 1024, 8GB of 1000", 0, 0},
      {"--context", "N", OPTION_UINT64, &options->max_context_tokens,
       "longest context of a request, in tokens\n(0: what the model allows)", 0, UINT64_MAX},
      {"--kv-cache-tokens", "N", OPTION_UINT64, &options->kv_cache_tokens,
       "tokens in the KV cache, of all requests\n(0: as many as there is memory for)", 0, UINT64_MAX},
      {"--kv-cache", "computed|fp8", OPTION_CHOICE, &options->kv_cache_format,
       "what the KV cache stores\n(computed: numbers of the type computed with)", 0, 0},
      {"--activations", "computed|int8|unquantised", OPTION_CHOICE, &options->activations,
       "what products with quantised weights take theirs as\n(computed: FP8 where the config says so; int8: with\n"
       "int4 and int8 on the CPU; unquantised: never FP8)", 0, 0},
      {"--max-prefill-tokens", "N", OPTION_UINT64, &options->max_prefill_tokens,
       "prompt tokens in one step (0: 512, 2048 on a GPU)", 0, UINT64_MAX},
      {"--max-batch-size", "N", OPTION_UINT32, &options->max_batch_size,
       "sequences in one step (0: 64, 256 on a GPU)", 0, 4096},
      {"--deterministic", NULL, OPTION_FLAG, &self->deterministic,
       "the same tokens to the last bit, on a GPU too", 0, 0},
      {"--no-prefix-cache", NULL, OPTION_FLAG, &self->no_prefix_cache, "compute every prompt whole", 0, 0},
      {"--random", NULL, OPTION_FLAG, &self->random,
       "random weights: MODEL needs no weights, to time its shape", 0, 0},
      {"--verbose", NULL, OPTION_FLAG, &self->verbose, "print the library's log", 0, 0},
      {0},
  };
  _Static_assert(sizeof rows <= sizeof self->rows, "MAX_OPTIONS must grow");
  memcpy(self->rows, rows, sizeof rows);
}

void load_arguments_end(load_arguments *self) {
  if (self->no_prefix_cache) self->options.prefix_cache = 0;
  if (self->random) self->options.random_weights = 1;
  if (self->deterministic) self->options.deterministic = 1;
}

void sampling_arguments_begin(sampling_arguments *self) {
  memset(self, 0, sizeof *self);
  xserv_request *request = &self->request;
  xserv_request_default(request);
  const command_option rows[] = {
      {"--max-tokens", "N", OPTION_UINT32, &request->max_tokens, "end after N tokens", 0, UINT32_MAX - 1},
      {"--temperature", "T", OPTION_FLOAT, &request->temperature, "0: always the most likely token", 0, 0},
      {"--top-k", "N", OPTION_UINT32, &request->top_k, "keep the N most likely tokens; 0: all", 0, UINT32_MAX - 1},
      {"--top-p", "P", OPTION_FLOAT, &request->top_p, "keep the most likely tokens of probability P together", 0, 0},
      {"--min-p", "P", OPTION_FLOAT, &request->min_p, "drop tokens less likely than P times the likeliest", 0, 0},
      {"--repetition-penalty", "X", OPTION_FLOAT, &request->repetition_penalty,
       "above 1: avoid tokens of prompt and answer", 0, 0},
      {"--presence-penalty", "X", OPTION_FLOAT, &request->presence_penalty,
       "above 0: avoid tokens of the answer", 0, 0},
      {"--frequency-penalty", "X", OPTION_FLOAT, &request->frequency_penalty,
       "the same, for each time that they came", 0, 0},
      {"--seed", "N", OPTION_UINT64, &request->seed, "draw the same tokens every time", 0, UINT64_MAX - 1},
      {"--stop", "TEXT", OPTION_TEXTS, &self->stops, "end before this text; may be given several times", 0, 0},
      {"--thinking", "auto|on|off", OPTION_CHOICE, &self->thinking,
       "whether to think first, where the chat template\nhas the variable enable_thinking", 0, 0},
      {0},
  };
  _Static_assert(sizeof rows <= sizeof self->rows, "MAX_OPTIONS must grow");
  memcpy(self->rows, rows, sizeof rows);
}

void sampling_arguments_end(sampling_arguments *self) {
  self->request.stop_strings = self->stops.values;
  self->request.num_stop_strings = self->stops.len;
  self->request.template_variables_json = thinking_variables(self->thinking);
}

const char *thinking_variables(uint32_t thinking) {
  return thinking == 1 ? "{\"enable_thinking\": true}" : thinking == 2 ? "{\"enable_thinking\": false}" : NULL;
}
