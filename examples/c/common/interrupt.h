/* Ctrl-C as something to poll for. */

#ifndef EXAMPLES_INTERRUPT_H
#define EXAMPLES_INTERRUPT_H

#include <stdbool.h>

/*
 * Handles SIGINT from here on, and returns a descriptor that can be read once it has come. A signal
 * handler may call next to nothing, least of all the library; this one writes a byte to a pipe, for
 * which the program polls together with whatever else it waits for.
 *
 * once: the second Ctrl-C ends the program as if it were not handled, for times in which it may not
 * be asked for. Another call changes that.
 */
int interrupt_begin(bool once);

/* Returns whether Ctrl-C was pressed since the last interrupt_take(). */
bool interrupt_pending(void);

/* Does the same, and forgets it. */
bool interrupt_take(void);

#endif
