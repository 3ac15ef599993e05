/*
 * Calls every function of xserv.h once or more, refusals included, and frees everything: what
 * tests/valgrind runs. exercise MODEL ROUNDS
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xserv.h>

#define REQUIRE(condition)                                                                     \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "line %d: not true: %s (%s)\n", __LINE__, #condition, xserv_last_error()); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)
#define OK(call) REQUIRE((call) == XSERV_STATUS_OK)
#define REFUSED(call) REQUIRE((call) != XSERV_STATUS_OK && xserv_last_error()[0] != '\0')

static bool on_progress(float fraction, void *user_data) {
  *(float *)user_data = fraction;
  return true;
}

static bool cancel_load(float fraction, void *user_data) {
  (void)fraction;
  (void)user_data;
  return false;
}

static void on_log(uint32_t level, const char *target, const char *message, void *user_data) {
  (void)level, (void)target;
  *(size_t *)user_data += strlen(message);
}

static bool stop_after_three(const xserv_token_event *event, void *user_data) {
  (void)user_data;
  return event->token_id == XSERV_NO_TOKEN || event->num_tokens < 3;
}

static void exercise_text(const xserv_model *model) {
  const char *words = "Once upon a time, 你好 🙂";
  xserv_tokenize_options options;
  xserv_tokens *tokens = NULL;
  xserv_text *text = NULL;
  xserv_tokenize_options_default(&options);
  OK(xserv_tokenize(model, words, XSERV_NUL_TERMINATED, &options, &tokens));
  size_t count = 0, len = 0;
  const uint32_t *ids = xserv_tokens_data(tokens, &count);
  REQUIRE(ids != NULL && count > 0);
  OK(xserv_detokenize(model, ids, count, true, &text));
  REQUIRE(strcmp(xserv_text_data(text, &len), words) == 0 && len == strlen(words));
  xserv_text_free(text);
  REFUSED(xserv_tokenize(model, "\xff", 1, NULL, &tokens));
  REFUSED(xserv_detokenize(model, (const uint32_t[]){UINT32_MAX}, 1, true, &text));

  xserv_detokenizer *detokenizer = NULL;
  const char *piece = NULL;
  size_t total = 0;
  OK(xserv_detokenizer_new(model, true, &detokenizer));
  for (size_t i = 0; i < count; i++) {
    OK(xserv_detokenizer_push(detokenizer, ids[i], &piece, &len));
    total += len;
  }
  OK(xserv_detokenizer_finish(detokenizer, &piece, &len));
  REQUIRE(total + len == strlen(words));
  xserv_detokenizer_free(detokenizer);
  xserv_tokens_free(tokens);

  xserv_chat_options chat;
  xserv_chat_options_default(&chat);
  REFUSED(xserv_apply_chat_template(model, &chat, &text));
  chat.messages_json = "[{\"role\": \"user\", \"content\": \"Hello!\"}]";
  chat.tools_json = "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]";
  chat.template_variables_json = "{\"enable_thinking\": false}";
  OK(xserv_apply_chat_template(model, &chat, &text));
  xserv_text_free(text);
}

static void exercise_logits(const xserv_model *model) {
  xserv_model_info info = {.struct_size = sizeof info};
  OK(xserv_model_get_info(model, &info));
  const uint32_t ids[] = {1, 2, 3};
  float *logits = malloc(3 * info.vocab_size * sizeof *logits);
  REQUIRE(logits != NULL);
  xserv_logits_options rows;
  xserv_logits_options_default(&rows);
  rows.rows = XSERV_LOGITS_ALL;
  OK(xserv_logits(model, ids, 3, &rows, logits, 3 * (size_t)info.vocab_size));
  OK(xserv_logits(model, ids, 3, NULL, logits, info.vocab_size));
  REFUSED(xserv_logits(model, ids, 3, NULL, logits, 5));
  REFUSED(xserv_logits(model, ids, 0, NULL, logits, info.vocab_size));
  free(logits);

  xserv_score_options scoring;
  xserv_score_options_default(&scoring);
  scoring.cache_key = 7;
  xserv_token_score scores[2];
  OK(xserv_score(model, ids, 3, 1, &scoring, scores, 2));
  REQUIRE(scores[0].log_prob <= 0 && scores[1].is_likeliest <= 1);
  OK(xserv_score(model, ids, 3, 3, NULL, NULL, 0));
  REFUSED(xserv_score(model, ids, 3, 0, NULL, scores, 2));
  REFUSED(xserv_score(model, ids, 3, 1, NULL, scores, 3));
}

static void exercise_generate(const xserv_model *model) {
  xserv_request request;
  xserv_result *result = NULL;
  xserv_request_default(&request);
  REFUSED(xserv_generate(model, &request, NULL, NULL, &result));
  request.prompt = "Once upon a time";
  request.max_tokens = 6;
  request.temperature = 0.8f;
  request.top_p = 0.9f;
  request.seed = 3;
  request.stop_strings = (const char *const[]){"never there", "nor this"};
  request.num_stop_strings = 2;
  OK(xserv_generate(model, &request, stop_after_three, NULL, &result));
  xserv_result_info info = {.struct_size = sizeof info};
  OK(xserv_result_get_info(result, &info));
  REQUIRE(info.num_tokens <= 3 && strcmp(info.text, xserv_result_text(result)) == 0);
  xserv_result_free(result);
  OK(xserv_generate(model, &request, NULL, NULL, NULL));

  xserv_cancel_token *cancel = NULL;
  OK(xserv_cancel_token_new(&cancel));
  OK(xserv_cancel_token_cancel(cancel));
  request.cancel = cancel;
  OK(xserv_generate(model, &request, NULL, NULL, &result));
  OK(xserv_result_get_info(result, &info));
  REQUIRE(info.finish_reason == XSERV_FINISH_CANCELLED);
  xserv_result_free(result);
  xserv_cancel_token_free(cancel);
}

static void *generate_in_a_thread(void *model) {
  exercise_generate(model);
  REFUSED(xserv_load("/no/such/folder", NULL, (xserv_model **)&model)); /* leaves a message in this thread */
  return NULL;
}

static void exercise_everything(const char *path) {
  xserv_inspection *inspection = NULL;
  REFUSED(xserv_inspect("/no/such/folder", &inspection));
  OK(xserv_inspect(path, &inspection));
  xserv_inspection_info found = {.struct_size = sizeof found};
  OK(xserv_inspection_get_info(inspection, &found));
  REQUIRE(found.supported);
  xserv_inspection_free(inspection);

  xserv_memory_plan plan = {.struct_size = sizeof plan};
  REFUSED(xserv_plan("/no/such/folder", NULL, &plan));
  OK(xserv_plan(path, NULL, &plan));
  REQUIRE(plan.total_bytes >= plan.weights_bytes + plan.workspace_bytes);

  float progress = 0;
  size_t logged = 0;
  xserv_model *model = NULL;
  xserv_load_options options;
  xserv_load_options_default(&options);
  options.num_threads = 2;
  options.progress = cancel_load;
  REFUSED(xserv_load(path, &options, &model));
  options.progress = on_progress;
  options.progress_user_data = &progress;
  options.log = on_log;
  options.log_user_data = &logged;
  OK(xserv_load(path, &options, &model));
  REQUIRE(progress == 1.0f);

  exercise_text(model);
  exercise_logits(model);
  exercise_generate(model);
  pthread_t threads[2];
  for (int i = 0; i < 2; i++)
    REQUIRE(pthread_create(&threads[i], NULL, generate_in_a_thread, model) == 0);
  for (int i = 0; i < 2; i++) REQUIRE(pthread_join(threads[i], NULL) == 0);

  xserv_model_free(model);
  xserv_model_free(model); /* freed before: does nothing */
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  REQUIRE(xserv_abi_version() == XSERV_ABI_VERSION && xserv_version()[0] != '\0');
  REQUIRE(strcmp(xserv_status_name(3), "XSERV_STATUS_NOT_FOUND") == 0);
  for (int round = atoi(argv[2]); round > 0; round--) exercise_everything(argv[1]);
  xserv_model_free(NULL);
  xserv_tokens_free(NULL);
  xserv_text_free(NULL);
  xserv_detokenizer_free(NULL);
  xserv_result_free(NULL);
  xserv_inspection_free(NULL);
  xserv_cancel_token_free(NULL);
  return 0;
}
