/* The commands of the program. Each takes its own command line (argv[0] is the command's name) and
 * returns the exit status. */

#ifndef XSERV_PROGRAM_COMMANDS_H
#define XSERV_PROGRAM_COMMANDS_H

int run_chat(int argc, char **argv);
int run_generate(int argc, char **argv);
int run_inspect(int argc, char **argv);
int run_plan(int argc, char **argv);
int run_self_test(int argc, char **argv);

#endif
