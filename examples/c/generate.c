/*
 * Continues a prompt and prints the text as it is generated.
 *
 *     generate MODEL [PROMPT] [--chat] [--max-tokens N] [--temperature T] [--seed N] [--threads N]
 *
 * MODEL is a folder as Hugging Face publishes it. With --chat the prompt is sent as a user's
 * message, through the model's own chat template. The text goes to stdout, the rest to stderr.
 */

#include <stdio.h>
#include <string.h>

#include <xserv.h>

#include "common/options.h"
#include "common/text_buffer.h"

/* Called for every token. Returning false would stop the generation. */
static bool print_text(const xserv_token_event *event, void *user_data) {
  FILE *out = user_data;
  return fwrite(event->text, 1, event->text_len, out) == event->text_len && fflush(out) == 0;
}

/* Every failing call leaves a sentence for people, which is printed here. */
static int report(const char *what, xserv_status status) {
  fprintf(stderr, "%s: %s (%s)\n", what, xserv_last_error(), xserv_status_name(status));
  return 1;
}

static int generate(const xserv_model *model, const xserv_request *request) {
  xserv_result *result = NULL;
  xserv_status status = xserv_generate(model, request, print_text, stdout, &result);
  if (status != XSERV_STATUS_OK) return report("generate", status);
  putchar('\n');
  fflush(stdout);

  xserv_result_info info = {.struct_size = sizeof info};
  status = xserv_result_get_info(result, &info);
  if (status == XSERV_STATUS_OK)
    fprintf(stderr, "[%zu prompt tokens, %zu generated, %.1f tokens per second]\n",
            info.num_prompt_tokens, info.num_tokens, info.tokens_per_second);
  xserv_result_free(result);
  return status == XSERV_STATUS_OK ? 0 : report("result", status);
}

int main(int argc, char **argv) {
  const char *model_path = NULL, *prompt = NULL;
  bool chat = false;
  xserv_load_options load_options;
  xserv_request request;
  xserv_load_options_default(&load_options);
  xserv_request_default(&request);

  for (int i = 1; i < argc; i++) {
    uint64_t number = 0;
    if (strcmp(argv[i], "--chat") == 0) {
      chat = true;
    } else if (option_number(argc, argv, &i, "--max-tokens", UINT32_MAX - 1, &number)) {
      request.max_tokens = (uint32_t)number;
    } else if (option_number(argc, argv, &i, "--seed", UINT64_MAX - 1, &number)) {
      request.seed = number;
    } else if (option_number(argc, argv, &i, "--threads", 1024, &number)) {
      load_options.num_threads = (uint32_t)number;
    } else if (option_float(argc, argv, &i, "--temperature", &request.temperature)) {
      /* stored */
    } else if (argv[i][0] == '-' && argv[i][1] != '\0') {
      fprintf(stderr, "generate: unknown option %s\n", argv[i]);
      return 2;
    } else if (model_path == NULL) {
      model_path = argv[i];
    } else if (prompt == NULL) {
      prompt = argv[i];
    } else {
      fprintf(stderr, "generate: more than one prompt; put it in quotes\n");
      return 2;
    }
  }
  if (model_path == NULL) {
    fprintf(stderr, "usage: generate MODEL [PROMPT] [--chat] [--max-tokens N] [--temperature T] "
                    "[--seed N] [--threads N]\n");
    return 2;
  }
  if (prompt == NULL) prompt = "Once upon a time";

  xserv_model *model = NULL;
  xserv_status status = xserv_load(model_path, &load_options, &model);
  if (status != XSERV_STATUS_OK) return report("load", status);

  text_buffer messages = {0}; /* must outlive the call that reads it */
  if (chat) {
    text_append(&messages, "[");
    text_append_message(&messages, "user", prompt, strlen(prompt));
    text_append(&messages, "]");
    request.messages_json = messages.data;
  } else {
    request.prompt = prompt;
  }
  int exit_code = generate(model, &request);

  text_free(&messages);
  xserv_model_free(model);
  return exit_code;
}
