/* xserv self-test: whether the operators compute what they should on this machine. */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <xserv.h>

#include "../common/options.h"
#include "commands.h"
#include "load.h"

enum { MAX_OPERATORS = 64 };

/* The comparisons of an operator, taken together. */
typedef struct summary {
  char name[32];
  unsigned num_comparisons, num_failed, num_unsupported;
  double error, bound; /* of the comparison whose error is the largest share of its bound */
} summary;

typedef struct tally {
  bool verbose;
  size_t num_operators;
  summary operators[MAX_OPERATORS];
} tally;

/* The bound is 0 where every bit has to be right. */
static double share_of(double error, double bound) {
  if (bound > 0) return error / bound;
  return error > 0 ? HUGE_VAL : 0;
}

static summary *find(tally *self, const char *name) {
  for (size_t i = 0; i < self->num_operators; i++)
    if (strncmp(self->operators[i].name, name, sizeof self->operators[i].name - 1) == 0) return &self->operators[i];
  if (self->num_operators == MAX_OPERATORS) return NULL;
  summary *added = &self->operators[self->num_operators++];
  snprintf(added->name, sizeof added->name, "%s", name);
  return added;
}

static bool take_line(const xserv_self_test_line *line, void *user_data) {
  tally *self = user_data;
  if (self->verbose || line->outcome == XSERV_SELF_TEST_FAILED) puts(line->text);
  summary *of = find(self, line->operator_name);
  if (of == NULL) return true;
  of->num_comparisons++;
  if (line->outcome == XSERV_SELF_TEST_UNSUPPORTED) {
    of->num_unsupported++;
    return true;
  }
  if (line->outcome == XSERV_SELF_TEST_FAILED) of->num_failed++;
  if (share_of(line->max_error, line->bound) > share_of(of->error, of->bound)) {
    of->error = line->max_error;
    of->bound = line->bound;
  }
  return true;
}

int run_self_test(int argc, char **argv) {
  tally found = {0};
  xserv_context_options options;
  xserv_context_options_default(&options);
  const command_option rows[] = {
      {"--device", "cpu|cuda|auto", OPTION_CHOICE, &options.device_kind, "where (auto: the GPU if there is one)", 0, 0},
      {"--device-index", "N", OPTION_UINT32, &options.device_index, "which GPU, from 0 (0)", 0, UINT32_MAX},
      {"--threads", "N", OPTION_UINT32, &options.num_threads, "threads of the CPU (0: one for each core)", 0, 1024},
      {"--verbose", NULL, OPTION_FLAG, &found.verbose, "print every comparison", 0, 0},
      {0},
  };
  const command command = {"xserv self-test", "",
                           "Runs every operator at small sizes and compares it with plain arithmetic in float64 and, on\n"
                           "a GPU, with the CPU. Takes a few seconds; needs no model. The exit status is 1 if one is wrong.",
                           {{"Options", rows}}};
  parse_command(&command, argc, argv, NULL, 0);

  const xserv_status status = xserv_self_test(&options, take_line, &found);
  for (size_t i = 0; i < found.num_operators; i++) {
    const summary *of = &found.operators[i];
    printf("%-14s %-7s %4u comparisons, largest error %.2e, bound %.2e", of->name, of->num_failed > 0 ? "FAILED" : "ok",
           of->num_comparisons - of->num_unsupported, of->error, of->bound);
    if (of->num_failed > 0) printf(", %u failed", of->num_failed);
    if (of->num_unsupported > 0) printf(", %u variants are not here", of->num_unsupported);
    putchar('\n');
  }
  return status == XSERV_STATUS_OK ? 0 : report_error(command.name);
}
