/* The benchmark, as a program of its own (bench.c beside this folder) and as a command of xserv. */

#ifndef EXAMPLES_BENCH_BENCH_H
#define EXAMPLES_BENCH_BENCH_H

/* Reads a command line and measures. `name` begins its messages about the command line. Returns the
 * exit status; a mistake in the command line ends the program with 2. */
int run_bench(const char *name, int argc, char **argv);

#endif
