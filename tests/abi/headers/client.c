/*
 * A program as it was written for the first version of the ABI. tests/abi/structs.rs builds it with
 * every header that is kept beside it, and runs it with the library of today.
 */

#include <stdio.h>
#include <string.h>
#include <xserv.h>

#define OK(call)                                                \
  do {                                                          \
    if ((call) != XSERV_STATUS_OK) {                            \
      fprintf(stderr, "%s: %s\n", #call, xserv_last_error());   \
      return 1;                                                 \
    }                                                           \
  } while (0)

static bool count(const xserv_token_event *event, void *user_data) {
  if (event->token_id != XSERV_NO_TOKEN) ++*(unsigned *)user_data;
  return true;
}

static int generate(const xserv_model *model) {
  unsigned num_tokens = 0;
  xserv_request request;
  xserv_result *result = NULL;
  xserv_request_default(&request);
  request.prompt = "Once upon a time";
  request.temperature = 0;
  request.max_tokens = 16;
  request.ignore_eos = 1;
  OK(xserv_generate(model, &request, count, &num_tokens, &result));
  xserv_result_info info = {.struct_size = sizeof info};
  OK(xserv_result_get_info(result, &info));
  if (info.num_tokens != num_tokens) return 1;
  xserv_result_free(result);

  xserv_submit_options options;
  xserv_submission *submission = NULL;
  xserv_submit_options_default(&options);
  OK(xserv_submit(model, &request, &options, &submission));
  xserv_event event = {.struct_size = sizeof event};
  for (num_tokens = 0; event.kind != XSERV_EVENT_DONE;) {
    OK(xserv_next(submission, XSERV_WAIT_FOREVER, &event));
    if (event.kind > XSERV_EVENT_DONE) return 1;
    num_tokens += event.kind == XSERV_EVENT_TOKEN;
  }
  xserv_submission_free(submission);
  printf("%u tokens\n", num_tokens);
  return 0;
}

static int text(const xserv_model *model, const xserv_model_info *info) {
  xserv_tokenize_options options;
  xserv_tokens *tokens = NULL;
  xserv_tokenize_options_default(&options);
  OK(xserv_tokenize(model, "Once", XSERV_NUL_TERMINATED, &options, &tokens));
  size_t num_tokens = 0;
  const uint32_t *ids = xserv_tokens_data(tokens, &num_tokens);
  float logits[65536];
  xserv_logits_options rows;
  xserv_logits_options_default(&rows);
  if (info->vocab_size > sizeof logits / sizeof *logits) return 1;
  OK(xserv_logits(model, ids, num_tokens, &rows, logits, info->vocab_size));
  xserv_tokens_free(tokens);

  xserv_chat_options chat;
  xserv_text *rendered = NULL;
  xserv_chat_options_default(&chat);
  chat.messages_json = "[{\"role\": \"user\", \"content\": \"Hello\"}]";
  OK(xserv_apply_chat_template(model, &chat, &rendered));
  xserv_text_free(rendered);
  return 0;
}

static int operators(void) {
  float a[4] = {1, 2, 3, 4}, b[4] = {1, 0, 0, 1}, c[4] = {0};
  int64_t shape[2] = {2, 2};
  xserv_tensor_device cpu = xserv_tensor_device_of(XSERV_DEVICE_CPU, 0);
  xserv_tensor_dtype f32 = xserv_tensor_dtype_of(XSERV_DTYPE_F32);
  xserv_tensor left = {a, cpu, 2, f32, shape, NULL, 0}, right = {b, cpu, 2, f32, shape, NULL, 0};
  xserv_tensor out = {c, cpu, 2, f32, shape, NULL, 0};
  xserv_context_options options;
  xserv_context *context = NULL;
  xserv_gemm_options gemm;
  xserv_context_options_default(&options);
  options.device_kind = XSERV_DEVICE_CPU;
  options.num_threads = 1;
  OK(xserv_context_new(&options, &context));
  xserv_gemm_options_default(&gemm);
  OK(xserv_op_gemm(context, &gemm, &left, &right, &out));
  xserv_memory_stats stats = {.struct_size = sizeof stats};
  OK(xserv_context_get_memory_stats(context, &stats));
  xserv_context_free(context);
  return memcmp(a, c, sizeof a) != 0;
}

int main(int argc, char **argv) {
  if (argc != 2 || xserv_abi_version() != XSERV_ABI_VERSION) return 2;
  xserv_load_options options;
  xserv_model *model = NULL;
  xserv_load_options_default(&options);
  options.device_kind = XSERV_DEVICE_CPU;
  options.num_threads = 1;
  xserv_memory_plan plan = {.struct_size = sizeof plan};
  OK(xserv_plan(argv[1], &options, &plan));
  OK(xserv_load(argv[1], &options, &model));
  xserv_model_info info = {.struct_size = sizeof info};
  OK(xserv_model_get_info(model, &info));
  xserv_model_stats stats = {.struct_size = sizeof stats};
  OK(xserv_model_get_stats(model, &stats));
  int failed = text(model, &info) || operators() || generate(model);
  xserv_model_free(model);
  return failed;
}
