/* Whether a model's embedding is also its output matrix, as its folder says. */

#ifndef EXAMPLES_BENCH_TIED_H
#define EXAMPLES_BENCH_TIED_H

#include <stdbool.h>

/*
 * `folder` is that of a model that the library loads (xserv_model_info.path). config.json decides,
 * or, if it does not say, the default of the family. A tied model may still store an output matrix;
 * one that begins with other numbers than the embedding is a matrix of its own.
 */
bool has_tied_embeddings(const char *folder);

#endif
