/* Options that several commands have. */

#ifndef XSERV_PROGRAM_ARGUMENTS_H
#define XSERV_PROGRAM_ARGUMENTS_H

#include <xserv.h>

#include "../common/options.h"

enum { MAX_OPTIONS = 24 }; /* rows of a table, with the one that ends it */

/* The arguments for loading a model. */
typedef struct load_arguments {
  xserv_load_options options;
  bool no_prefix_cache, deterministic, random, verbose;
  command_option rows[MAX_OPTIONS];
} load_arguments;

/* Sets the defaults and the rows, which point into the struct. */
void load_arguments_begin(load_arguments *self);

/* Completes `options`; call it when the command line has been read. */
void load_arguments_end(load_arguments *self);

/* The arguments for sampling. The fields point into the struct. */
typedef struct sampling_arguments {
  xserv_request request;
  text_list stops;
  uint32_t thinking; /* 0: as the template does by itself, 1: on, 2: off */
  command_option rows[MAX_OPTIONS];
} sampling_arguments;

void sampling_arguments_begin(sampling_arguments *self);
void sampling_arguments_end(sampling_arguments *self);

/* Returns the template variables that turn thinking on or off; NULL for 0. */
const char *thinking_variables(uint32_t thinking);

#endif
