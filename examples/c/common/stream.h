/* A request whose text is passed on as it comes, and that can be stopped at any time. */

#ifndef EXAMPLES_STREAM_H
#define EXAMPLES_STREAM_H

#include <stdbool.h>
#include <stddef.h>

#include <xserv.h>

/* Receives text: whole UTF-8 characters, NUL-terminated. Returns false to stop. */
typedef bool (*stream_callback)(const char *text, size_t len, void *user_data);

/*
 * Runs a request of one sample until it ends, its callback returns false, or `stop_fd` can be read
 * (it is left to the caller to read it). The callback of xserv_generate() could stop a request too,
 * but only with a token: a long prompt would have to be computed to its end first. Here the thread
 * sleeps until there are events or a reason to stop, which may come at any time.
 *
 * result: receives a handle that the caller frees with xserv_result_free(), or NULL if the request
 * was stopped.
 */
xserv_status stream(const xserv_model *model, const xserv_request *request, int stop_fd, stream_callback callback,
                    void *user_data, xserv_result **result);

#endif
