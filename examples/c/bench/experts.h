/* The experts that layers of a model have instead of an MLP. */

#ifndef EXAMPLES_BENCH_EXPERTS_H
#define EXAMPLES_BENCH_EXPERTS_H

#include <xserv.h>

typedef struct expert_sizes {
  double weights;      /* numbers in all experts of all layers; 0: there are none */
  double count;        /* experts of a layer */
  double per_token;    /* of these, those that compute a token */
} expert_sizes;

/* Returns the sizes that config.json names, with the defaults of its family; `info` is that of the model. */
expert_sizes experts_of(const xserv_model_info *info);

#endif
