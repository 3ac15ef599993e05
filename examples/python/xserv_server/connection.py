"""Connections that cannot hold the server up: uvicorn's protocol with limits of time and size."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Type

from pydantic_core import to_json
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError
from .state import WHEN_LEFT

#: Bytes of a request line and headers.
MAX_HEAD_BYTES = 64 << 10

_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


@dataclass(frozen=True)
class ConnectionLimits:
    """
    head_seconds: from the connection, or the first byte of a later request, to the end of the headers.
    body_seconds: from there to the end of the body.
    stall_seconds: how long a client may take nothing of what is sent to it.
    max_connections: connections at once; those beyond are refused.
    """

    head_seconds: float = 10.0
    body_seconds: float = 60.0
    stall_seconds: float = 30.0
    max_connections: int = 4096


class Connection(HttpToolsProtocol):
    """A connection whose clients must send and take what is theirs in time."""

    limits = ConnectionLimits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._reading: Optional[asyncio.TimerHandle] = None
        self._stalled: Optional[asyncio.TimerHandle] = None
        self._head_bytes = 0
        self._in_head = True
        self._cycles: List[RequestResponseCycle] = []
        self._watched: Dict[RequestResponseCycle, Callable[[], None]] = {}

    # The transport's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "the server has no room for another connection")
        else:
            self._limit_reading(self.limits.head_seconds)

    def connection_lost(self, exc: Optional[Exception]) -> None:
        for timer in (self._reading, self._stalled):
            if timer is not None:
                timer.cancel()
        # The base class reports only the last of the requests that were sent one after another, without waiting.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
            # It refers to this object, which refers to the scope.
            scope: Any = cycle.scope
            scope.pop(WHEN_LEFT, None)
        self.pipeline.clear()
        super().connection_lost(exc)
        watched, self._watched = self._watched, {}
        for cycle, has_left in watched.items():
            if not cycle.response_complete:
                has_left()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._head_bytes == 0 and self._reading is None:
                self._limit_reading(self.limits.head_seconds)
            self._head_bytes += len(data)
        super().data_received(data)
        # A head that is complete has reset the count.
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers take more than {MAX_HEAD_BYTES} bytes")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    # The parser's side.

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._limit_reading(self.limits.body_seconds)
        scope: Any = self.scope
        scope[WHEN_LEFT] = self.when_left
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._end_reading()

    # The application's side.

    def when_left(self, scope: Scope, has_left: Callable[[], None]) -> Optional[Callable[[], Any]]:
        """Calls a function, once and on the loop's thread, if the client leaves before it has all of the answer to a
        request, whose body has been read. An application would need a task for each request, to wait for it in
        receive(). Returns the function that ends this; None if the request is none of this connection's."""
        cycle = next((cycle for cycle in self._cycles if cycle.scope is scope), None)
        if cycle is None:
            return None
        if cycle.disconnected:
            has_left()
        else:
            self._watched[cycle] = has_left
            # As receive() does: a body that came at once may have paused it, and then nobody would see the end.
            self.flow.resume_reading()
        return partial(self._watched.pop, cycle, None)

    # Limits.

    def _limit_reading(self, seconds: float) -> None:
        self._end_reading()
        self._reading = self.loop.call_later(seconds, self._too_slow)

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _too_slow(self) -> None:
        self._reading = None
        if self._in_head and self._head_bytes == 0:
            self.transport.close()
        elif any(not cycle.response_complete for cycle in self._cycles[:-1]) or (
            self._cycles and self._cycles[-1].response_started
        ):
            # An answer is on its way, or has been given before the body was there.
            self.transport.abort()
        else:
            self._refuse(408, "the request was not complete in time")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not HTTP")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without the application, and closes the connection."""
        if self.transport.is_closing():
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = to_json(ApiError(status, message, kind=kind).body())
        head = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"Bad Request"))
        head += b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + body)
        self.transport.close()
        # If the client does not take it, it must not stay open for that.
        self.loop.call_later(self.limits.stall_seconds, self.transport.abort)


def with_limits(limits: ConnectionLimits) -> Type[Connection]:
    """The class of connections with these limits."""
    return type("Connection", (Connection,), {"limits": limits})
