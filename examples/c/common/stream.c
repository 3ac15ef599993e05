#include "stream.h"

#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Passes on what there is. Sets `running` to false after the last event, or if the callback says so. */
static xserv_status take_events(const xserv_submission *submission, stream_callback callback, void *user_data,
                                bool *running, bool *stopped) {
  xserv_event event = {.struct_size = sizeof event};
  for (;;) {
    xserv_status status = xserv_next(submission, 0, &event);
    if (status != XSERV_STATUS_OK || event.kind == XSERV_EVENT_NONE) return status;
    *stopped = event.text_len > 0 && !callback(event.text, event.text_len, user_data);
    *running = !*stopped && event.kind != XSERV_EVENT_DONE;
    if (!*running) return status;
  }
}

xserv_status stream(const xserv_model *model, const xserv_request *request, int stop_fd, stream_callback callback,
                    void *user_data, xserv_result **result) {
  xserv_submit_options options;
  xserv_submission *submission = NULL;
  xserv_submit_options_default(&options);
  options.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (options.wake_fd < 0) {
    perror("eventfd");
    exit(1);
  }
  *result = NULL;
  bool running = true, stopped = false;
  xserv_status status = xserv_submit(model, request, &options, &submission);
  while (status == XSERV_STATUS_OK && running) {
    struct pollfd news[] = {{.fd = options.wake_fd, .events = POLLIN}, {.fd = stop_fd, .events = POLLIN}};
    if (poll(news, 2, -1) < 0) continue; /* a signal */
    if (news[1].revents != 0) {
      stopped = true;
      break;
    }
    uint64_t count;
    if (read(options.wake_fd, &count, sizeof count) < 0) continue;
    status = take_events(submission, callback, user_data, &running, &stopped);
  }
  if (status == XSERV_STATUS_OK && !stopped) status = xserv_submission_take_result(submission, result);
  /* This also cancels a request that is still running; nobody has to wait for the layer that is
   * being computed. */
  xserv_submission_free(submission);
  close(options.wake_fd);
  return status;
}
