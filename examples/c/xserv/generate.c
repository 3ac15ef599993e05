/* xserv generate: continues a text, or answers one message. */

#define _POSIX_C_SOURCE 200809L /* isatty */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <xserv.h>

#include "../common/interrupt.h"
#include "../common/stream.h"
#include "../common/text_buffer.h"
#include "arguments.h"
#include "commands.h"
#include "fields.h"
#include "load.h"
#include "terminal.h"
#include "utf8.h"

static const char name[] = "xserv generate";

/* The output so far, for when there is no result. */
typedef struct output {
  bool json;
  bool failed; /* standard output cannot be written */
  text_buffer text;
} output;

static bool take_text(const char *text, size_t len, void *user_data) {
  output *out = user_data;
  text_append_bytes(&out->text, text, len);
  if (!out->json) out->failed = !terminal_write_text(text, len);
  return !out->failed;
}

/* Reads a file to its end ("-": standard input), less the line break at the end of it. */
static bool read_file(const char *path, text_buffer *text) {
  const bool from_stdin = strcmp(path, "-") == 0;
  FILE *file = from_stdin ? stdin : fopen(path, "rb");
  char bytes[4096];
  size_t len;
  while (file != NULL && (len = fread(bytes, 1, sizeof bytes, file)) > 0) text_append_bytes(text, bytes, len);
  const bool good = file != NULL && !ferror(file);
  if (!good) fprintf(stderr, "%s: %s: %s\n", name, from_stdin ? "standard input" : path, strerror(errno));
  if (file != NULL && !from_stdin) fclose(file);
  if (text->len > 0 && text->data[text->len - 1] == '\n') text_truncate(text, text->len - 1);
  return good;
}

static void print_json(const xserv_result_info *info) {
  field text = text_field("text", info->text);
  text.number = info->text_len;
  const field fields[] = {
      text,
      text_field("finish_reason", finish_name(info->finish_reason)),
      number_field("num_prompt_tokens", info->num_prompt_tokens),
      number_field("num_cached_tokens", info->num_cached_tokens),
      number_field("num_tokens", info->num_tokens),
      number_field("seed", info->seed),
      real_field("time_to_first_token_seconds", info->time_to_first_token_seconds),
      real_field("total_seconds", info->total_seconds),
      real_field("prompt_tokens_per_second", info->prompt_tokens_per_second),
      real_field("tokens_per_second", info->tokens_per_second),
      {.name = "token_ids", .kind = FIELD_IDS, .ids = info->token_ids, .number = info->num_tokens},
  };
  print_fields(fields, sizeof fields / sizeof *fields, true);
}

static int run(const xserv_model *model, const xserv_request *request, bool json) {
  output out = {.json = json};
  xserv_result *result = NULL;
  xserv_result_info info = {.struct_size = sizeof info};
  xserv_status status = stream(model, request, interrupt_begin(false), take_text, &out, &result);
  int exit_code = 0;
  if (status == XSERV_STATUS_OK && result != NULL) status = xserv_result_get_info(result, &info);
  if (status == XSERV_STATUS_OK && result == NULL) {
    exit_code = out.failed ? 1 : EXIT_INTERRUPTED;
    if (out.failed) fprintf(stderr, "%s: standard output cannot be written\n", name);
    if (json) fprintf(stderr, "%s: interrupted\n", name);
    else if (!out.failed) putchar('\n');
  } else if (status == XSERV_STATUS_OK && json) {
    print_json(&info);
  } else if (status == XSERV_STATUS_OK) {
    putchar('\n');
    fflush(stdout);
    if (isatty(STDERR_FILENO))
      fprintf(stderr, "[%zu prompt tokens, %zu generated, %.1f tokens per second]\n", info.num_prompt_tokens,
              info.num_tokens, info.tokens_per_second);
  } else {
    if (out.text.len > 0 && !json) putchar('\n');
    fflush(stdout);
    exit_code = report_error(name);
  }
  xserv_result_free(result);
  text_free(&out.text);
  return exit_code;
}

int run_generate(int argc, char **argv) {
  bool chat = false, json = false;
  const char *file = NULL, *system_text = NULL, *operands[2] = {NULL, NULL};
  load_arguments load;
  sampling_arguments sampling;
  load_arguments_begin(&load);
  sampling_arguments_begin(&sampling);
  const command_option options[] = {
      {"--chat", NULL, OPTION_FLAG, &chat,
       "answer the prompt, through the model's chat template,\ninstead of continuing it", 0, 0},
      {"--system", "TEXT", OPTION_TEXT, &system_text, "with --chat: a system message before it", 0, 0},
      {"--file", "FILE", OPTION_TEXT, &file, "read the prompt from a file; -: from standard input", 0, 0},
      {"--json", NULL, OPTION_FLAG, &json, "print a JSON object when the text is complete", 0, 0},
      {0},
  };
  const command command = {name, "MODEL [PROMPT]",
                           "Continues a prompt, and prints the text as it is generated. MODEL is a folder as Hugging\n"
                           "Face publishes it, or the name of a repository in the local Hugging Face cache. Without a\n"
                           "PROMPT it is read from --file, or from standard input; a line break at its end is left\n"
                           "out. What is not set below is as the model's generation_config.json says.",
                           {{"Options", options}, {"Sampling", sampling.rows}, {"Model", load.rows}}};
  const size_t num_operands = parse_command(&command, argc, argv, operands, 2);
  if (num_operands == 0) refuse(&command, "the folder of a model is missing; --help tells more");
  if (num_operands == 2 && file != NULL)
    refuse(&command, "PROMPT and --file are given, but only one prompt is possible");
  if (system_text != NULL && !chat) refuse(&command, "--system needs --chat");
  if (sampling.thinking != 0 && !chat) refuse(&command, "--thinking needs --chat");
  if (num_operands == 1 && file == NULL && isatty(STDIN_FILENO))
    refuse(&command, "the prompt is missing: give one in quotes, or --file");
  load_arguments_end(&load);
  sampling_arguments_end(&sampling);
  utf8_begin();

  text_buffer prompt = {0};
  xserv_messages *messages = NULL;
  int exit_code = 0;
  if (num_operands == 2) text_append(&prompt, operands[1]);
  else if (!read_file(file != NULL ? file : "-", &prompt)) return 1;
  text_append_bytes(&prompt, "", 0); /* its data is not NULL */
  if (chat) {
    if (strlen(prompt.data) != prompt.len) {
      fprintf(stderr, "%s: the prompt contains a NUL, which no message can have\n", name);
      exit_code = 1;
    } else if (xserv_messages_new(&messages) != XSERV_STATUS_OK ||
               (system_text != NULL && xserv_messages_add(messages, "system", system_text) != XSERV_STATUS_OK) ||
               xserv_messages_add(messages, "user", prompt.data) != XSERV_STATUS_OK) {
      exit_code = report_error(name);
    }
    sampling.request.messages_json = xserv_messages_json(messages);
  } else {
    sampling.request.prompt = prompt.data;
    sampling.request.prompt_len = prompt.len;
  }
  xserv_model *model = NULL;
  if (exit_code == 0) exit_code = load_model(name, operands[0], &load, &model);
  if (exit_code == 0) {
    exit_code = run(model, &sampling.request, json);
    xserv_model_free(model);
  }
  text_free(&prompt);
  xserv_messages_free(messages);
  return exit_code;
}
