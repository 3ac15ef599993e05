/*
 * The program xserv: language models from the command line, through the public interface of the
 * library only.
 *
 *     xserv chat|generate|bench|inspect|plan [OPTIONS] MODEL
 *     xserv self-test [OPTIONS]
 */

#include <stdio.h>
#include <string.h>

#include <xserv.h>

#include "../bench/bench.h"
#include "commands.h"

static int run_bench_command(int argc, char **argv) { return run_bench("xserv bench", argc, argv); }

static const struct {
  const char *name, *help;
  int (*run)(int argc, char **argv);
} commands[] = {
    {"chat", "a conversation in the terminal", run_chat},
    {"generate", "continue a text, or answer one message", run_generate},
    {"bench", "measure how fast a model is here", run_bench_command},
    {"inspect", "what a model folder holds, and whether it can be run", run_inspect},
    {"plan", "how much memory a model would take", run_plan},
    {"self-test", "whether the operators compute right on this machine", run_self_test},
};
enum { NUM_COMMANDS = sizeof commands / sizeof *commands };

static void print_help(void) {
  puts("usage: xserv COMMAND [MODEL] [OPTIONS]\n"
       "\n"
       "Runs language models. MODEL is a folder as Hugging Face publishes it, or the name of a\n"
       "repository in the local Hugging Face cache, such as Qwen/Qwen3-0.6B.\n"
       "\n"
       "Commands:");
  for (size_t i = 0; i < NUM_COMMANDS; i++) printf("  %-12s %s\n", commands[i].name, commands[i].help);
  puts("\n  xserv COMMAND --help lists the options of a command\n  xserv --version prints the version");
}

static void print_version(void) {
  printf("xserv %s (ABI %u)\n", xserv_version(), (unsigned)xserv_abi_version());
}

/* Printed text may not have been written yet, and the disk may be full. */
static int finish(int exit_code) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return exit_code;
  if (exit_code == 0) perror("xserv: standard output");
  return exit_code == 0 ? 1 : exit_code;
}

int main(int argc, char **argv) {
  if (xserv_abi_version() != XSERV_ABI_VERSION) {
    fprintf(stderr, "xserv: the program was built for ABI %d, but libxserv.so has ABI %u\n", XSERV_ABI_VERSION,
            (unsigned)xserv_abi_version());
    return 1;
  }
  if (argc < 2) {
    fputs("xserv: the command is missing; xserv --help lists the commands\n", stderr);
    return 2;
  }
  for (size_t i = 0; i < NUM_COMMANDS; i++)
    if (strcmp(argv[1], commands[i].name) == 0) return finish(commands[i].run(argc - 1, argv + 1));
  if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
    print_help();
  } else if (strcmp(argv[1], "--version") == 0) {
    print_version();
  } else {
    const char *what = argv[1][0] == '-' ? "option" : "command";
    fprintf(stderr, "xserv: unknown %s %s; xserv --help lists the commands\n", what, argv[1]);
    return 2;
  }
  return finish(0);
}
