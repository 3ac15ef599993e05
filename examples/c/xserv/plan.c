/* xserv plan: the memory that a model would take. */

#include <stdio.h>

#include <xserv.h>

#include "arguments.h"
#include "commands.h"
#include "fields.h"
#include "load.h"

int run_plan(int argc, char **argv) {
  bool json = false;
  const char *path = NULL;
  load_arguments load;
  load_arguments_begin(&load);
  const command_option options[] = {
      {"--json", NULL, OPTION_FLAG, &json, "print a JSON object", 0, 0},
      {0},
  };
  const command command = {"xserv plan", "MODEL",
                           "Tells how much memory a model would take with these options, before a weight is read.\n"
                           "To plan for a GPU that is not here: --device cuda --max-memory SIZE. The exit status is 0\n"
                           "whether the model fits or not.",
                           {{"Options", options}, {"Model", load.rows}}};
  if (parse_command(&command, argc, argv, &path, 1) == 0)
    refuse(&command, "the folder of a model is missing; --help tells more");
  load_arguments_end(&load);

  xserv_memory_plan plan = {.struct_size = sizeof plan};
  if (xserv_plan(path, &load.options, &plan) != XSERV_STATUS_OK) return report_error(command.name);
  const bool is_known = plan.memory_bytes > 0;
  const field fields[] = {
      text_field("device", device_name(plan.device_kind)),
      number_field("device_index", plan.device_index),
      text_field("dtype", dtype_name(plan.dtype)),
      is_known ? truth_field("fits", plan.fits) : unknown_field("fits", "unknown: there is no GPU here; give --max-memory"),
      bytes_field("total_bytes", plan.total_bytes),
      bytes_field("weights_bytes", plan.weights_bytes),
      bytes_field("workspace_bytes", plan.workspace_bytes),
      bytes_field("kv_cache_bytes", plan.kv_cache_tokens * plan.kv_bytes_per_token),
      bytes_field("kv_bytes_per_token", plan.kv_bytes_per_token),
      number_field("kv_cache_tokens", plan.kv_cache_tokens),
      number_field("max_context_tokens", plan.max_context_tokens),
      bytes_field("minimum_bytes", plan.minimum_bytes),
      is_known ? bytes_field("memory_bytes", plan.memory_bytes) : unknown_field("memory_bytes", "unknown"),
      truth_field("has_tokenizer", plan.has_tokenizer),
  };
  print_fields(fields, sizeof fields / sizeof *fields, json);
  return 0;
}
