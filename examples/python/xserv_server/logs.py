"""A line of JSON for each request: who, what, how long and how much; never what users write."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from typing import Any, Deque, Dict, Optional, TextIO

from pydantic_core import to_json

#: Lines that wait for a slow reader; those beyond are dropped, and counted in a later one.
MAX_LINES = 10000


#: Seconds between looks at what has come. Lines are not announced one by one: to wake another thread of Python takes
#: the event loop as long as much of a request.
_PAUSE = 0.02


class RequestLog:
    """Writes lines on a thread of its own: a reader that stands still does not stop the server."""

    def __init__(self, file: Optional[TextIO] = None) -> None:
        self._file = file or sys.stdout
        self._lines: "Deque[Dict[str, Any]]" = deque()
        self._num_dropped = 0
        self._something, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="xserv-server-log", daemon=True)
        self._thread.start()

    def write(self, fields: Dict[str, Any]) -> None:
        if self._num_dropped:
            fields["dropped_lines"] = self._num_dropped
        if len(self._lines) < MAX_LINES:
            self._lines.append(fields)
            self._num_dropped = 0
        else:
            self._num_dropped += 1
        if not self._something.is_set():
            self._something.set()

    def close(self) -> None:
        """Writes what is left, for a second at most."""
        self._is_closed = True
        self._something.set()
        self._thread.join(1)

    def _run(self) -> None:
        while True:
            self._something.wait()
            if not self._is_closed:
                time.sleep(_PAUSE)
            # Before all else is looked at: what comes later sets it again.
            self._something.clear()
            is_last = self._is_closed
            found = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._file.write("".join(to_json(fields).decode() + "\n" for fields in found))
                self._file.flush()
            except (OSError, ValueError):  # the reader has gone
                return
            if is_last:
                return


@functools.lru_cache(maxsize=2)
def _stamp(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def entry(method: str, path: str) -> Dict[str, Any]:
    """The line of a request that has just come."""
    now = time.time()
    return {"time": f"{_stamp(int(now))}.{int(now % 1 * 1000):03}Z", "method": method, "path": path}
