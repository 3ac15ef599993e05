/* Measures a model, as `xserv bench` does; bench/bench.c says what the numbers mean.
 *
 *     bench MODEL [OPTIONS]
 */

#include "bench/bench.h"

int main(int argc, char **argv) { return run_bench("bench", argc, argv); }
