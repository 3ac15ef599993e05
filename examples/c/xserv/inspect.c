/* xserv inspect: what a model folder holds. */

#include <stdio.h>

#include <xserv.h>

#include "../common/options.h"
#include "commands.h"
#include "fields.h"
#include "load.h"

int run_inspect(int argc, char **argv) {
  bool json = false;
  const char *path = NULL;
  const command_option options[] = {
      {"--json", NULL, OPTION_FLAG, &json, "print a JSON object", 0, 0},
      {0},
  };
  const command command = {"xserv inspect", "MODEL",
                           "Tells what a model folder (or a repository in the Hugging Face cache) holds, and whether\n"
                           "it can be run, without loading it. The exit status is 0 in both cases.",
                           {{"Options", options}}};
  if (parse_command(&command, argc, argv, &path, 1) == 0)
    refuse(&command, "the folder of a model is missing; --help tells more");

  xserv_inspection *inspection = NULL;
  xserv_inspection_info info = {.struct_size = sizeof info};
  xserv_status status = xserv_inspect(path, &inspection);
  if (status == XSERV_STATUS_OK) status = xserv_inspection_get_info(inspection, &info);
  if (status == XSERV_STATUS_OK) {
    field fields[] = {
        text_field("path", info.path),
        text_field("architecture", info.architecture),
        truth_field("supported", info.supported),
        text_field("unsupported_reason", info.unsupported_reason),
        number_field("num_parameters", info.num_parameters),
        text_field("stored_dtypes", info.stored_dtypes),
        text_field("dtype", info.dtype == XSERV_DTYPE_AUTO ? "" : dtype_name(info.dtype)),
        bytes_field("weights_bytes", info.weights_bytes),
        bytes_field("kv_bytes_per_token", info.kv_bytes_per_token),
        number_field("max_context_tokens", info.max_context_tokens),
        number_field("vocab_size", info.vocab_size),
        number_field("hidden_size", info.hidden_size),
        number_field("num_layers", info.num_layers),
        number_field("num_heads", info.num_heads),
        number_field("num_kv_heads", info.num_kv_heads),
        number_field("head_dim", info.head_dim),
        truth_field("has_tokenizer", info.has_tokenizer),
        text_field("tokenizer_problem", info.tokenizer_problem),
        truth_field("has_chat_template", info.has_chat_template),
        text_field("chat_template_problem", info.chat_template_problem),
    };
    /* A table leaves out what is not known. */
    for (size_t i = 0; i < sizeof fields / sizeof *fields && !json; i++)
      if (fields[i].kind != FIELD_TRUTH && fields[i].kind != FIELD_TEXT && fields[i].number == 0)
        fields[i] = text_field(fields[i].name, "");
    print_fields(fields, sizeof fields / sizeof *fields, json);
  }
  xserv_inspection_free(inspection);
  return status == XSERV_STATUS_OK ? 0 : report_error(command.name);
}
