/* Whether a model's embedding is also its output matrix, as its folder says. `folder` is that of a model
 * that the library loads (xserv_model_info.path). */

#ifndef EXAMPLES_BENCH_TIED_H
#define EXAMPLES_BENCH_TIED_H

#include <stdbool.h>

/* Returns what config.json says, or, if it does not say, the default of the family. It decides where the
 * weights are random numbers, whatever files the folder has. */
bool declares_tied_embeddings(const char *folder);

/* Returns whether the weights that are stored are tied. A model that is declared tied may still store an
 * output matrix; one that begins with other numbers than the embedding is a matrix of its own. */
bool has_tied_embeddings(const char *folder);

#endif
