/* Loading a model with a person waiting. */

#ifndef XSERV_PROGRAM_LOAD_H
#define XSERV_PROGRAM_LOAD_H

#include <xserv.h>

#include "arguments.h"

enum { EXIT_INTERRUPTED = 130 }; /* as a shell reports a program that Ctrl-C ended */

/*
 * Loads a model. Where standard error is a terminal it shows progress; warnings are printed, and
 * with --verbose all of the log. Ctrl-C ends the load. `command` begins messages.
 *
 * Returns 0, or the exit status with which the program is to end: the reason has been printed.
 */
int load_model(const char *command, const char *path, load_arguments *arguments, xserv_model **model);

/* Prints the last error. Returns 1, the exit status. */
int report_error(const char *command);

#endif
