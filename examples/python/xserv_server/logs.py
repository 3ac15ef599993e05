"""A line of JSON for each request: who, what, how long and how much; never what users write."""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any, Dict, Optional, TextIO

from pydantic_core import to_json

#: Lines that wait for a slow reader; those beyond are dropped, and counted in a later one.
MAX_LINES = 10000


class RequestLog:
    """Writes lines on a thread of its own: a reader that stands still does not stop the server."""

    def __init__(self, file: Optional[TextIO] = None) -> None:
        self._file = file or sys.stdout
        self._lines: "queue.Queue[Optional[Dict[str, Any]]]" = queue.Queue(MAX_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="xserv-server-log", daemon=True)
        self._thread.start()

    def write(self, fields: Dict[str, Any]) -> None:
        if self._num_dropped:
            fields["dropped_lines"] = self._num_dropped
        try:
            self._lines.put_nowait(fields)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Writes what is left, for a second at most."""
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(1)

    def _run(self) -> None:
        while True:
            fields = self._lines.get()
            if fields is None:
                return
            try:
                self._file.write(to_json(fields).decode() + "\n")
                if self._lines.empty():
                    self._file.flush()
            except (OSError, ValueError):  # the reader has gone
                return


def entry(method: str, path: str) -> Dict[str, Any]:
    """The line of a request that has just come."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return {"time": f"{stamp}.{int(now % 1 * 1000):03}Z", "method": method, "path": path}
