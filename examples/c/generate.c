/*
 * Continues a prompt and prints the text as it is generated.
 *
 *     generate MODEL [PROMPT] [--chat] [OPTIONS]
 *
 * MODEL is a folder as Hugging Face publishes it. With --chat the prompt is sent as a user's
 * message, through the model's own chat template. The text goes to stdout, the rest to stderr.
 */

#include <stdio.h>

#include <xserv.h>

#include "common/options.h"

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
  bool chat = false;
  xserv_load_options load_options;
  xserv_request request;
  xserv_load_options_default(&load_options);
  xserv_request_default(&request);
  const command_option options[] = {
      {"--chat", NULL, OPTION_FLAG, &chat, "send the prompt as a user's message", 0, 0},
      {"--max-tokens", "N", OPTION_UINT32, &request.max_tokens, "end after N tokens", 0, UINT32_MAX - 1},
      {"--temperature", "T", OPTION_FLOAT, &request.temperature, "0: always the most likely token", 0, 0},
      {"--seed", "N", OPTION_UINT64, &request.seed, "draw the same tokens every time", 0, UINT64_MAX - 1},
      {"--threads", "N", OPTION_UINT32, &load_options.num_threads, "on the CPU; 0: one for each core", 0, 1024},
      {0},
  };
  const command command = {"generate", "MODEL [PROMPT]",
                           "Continues a prompt and prints the text as it is generated. MODEL is a folder as\n"
                           "Hugging Face publishes it.",
                           {{"Options", options}}};
  const char *operands[2] = {NULL, "Once upon a time"};
  if (parse_command(&command, argc, argv, operands, 2) == 0) refuse(&command, "no model; --help tells more");
  const char *prompt = operands[1];

  xserv_model *model = NULL;
  xserv_status status = xserv_load(operands[0], &load_options, &model);
  if (status != XSERV_STATUS_OK) return report("load", status);

  xserv_messages *messages = NULL; /* must outlive the call that reads it */
  if (chat) {
    status = xserv_messages_new(&messages);
    if (status == XSERV_STATUS_OK) status = xserv_messages_add(messages, "user", prompt);
    if (status == XSERV_STATUS_OK) request.messages_json = xserv_messages_json(messages);
  } else {
    request.prompt = prompt;
  }
  int exit_code = status == XSERV_STATUS_OK ? generate(model, &request) : report("messages", status);

  xserv_messages_free(messages);
  xserv_model_free(model);
  return exit_code;
}
