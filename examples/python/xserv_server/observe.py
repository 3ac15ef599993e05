"""A layer around an application that counts its answers, logs them, and answers for it where it fails."""

from __future__ import annotations

import logging
import time
from typing import FrozenSet, Optional

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import server_error
from .logs import RequestLog, entry
from .metrics import Metrics

#: Asked for again and again, by machines.
QUIET = ("/health", "/metrics")

_failures = logging.getLogger("xserv_server")


class Observed:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: FrozenSet[str], log: Optional[RequestLog]) -> None:
        self._app, self._metrics, self._paths, self._log = app, metrics, paths, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path not in self._paths:  # a label of one's own for every path would fill the memory
            path = "/v1/models/*" if path.startswith("/v1/models/") else "other"
        fields = scope["xserv.log"] = entry(scope["method"], path)
        began, status = time.perf_counter(), 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            # The traceback has no text of a user's: frames and the sentence alone.
            _failures.error("a request to %s failed", path, exc_info=error)
            if status:
                raise
            await server_error("the server has failed").response()(scope, receive, observed)
        finally:
            self._metrics.responses.add(1, (path, str(status or "none")))
            if self._log is not None and path not in QUIET:
                client = scope.get("client")
                fields.update(status=status, seconds=round(time.perf_counter() - began, 6))
                fields["client"] = client[0] if client else None
                self._log.write(fields)
