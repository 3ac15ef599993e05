"""Limits of requests: the host they name, the length of their bodies, and how many are under way."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Deque, Sequence, Tuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, shutting_down

#: Hosts by which a server on a loopback address may be called.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="request_too_large")


def header_of(scope: Scope, name: bytes) -> str:
    """The first header of a name; empty if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


def _host_without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


class RequestLimits:
    """A layer around an application, which refuses requests before their bodies are read, or while they are."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, allowed_hosts: Sequence[str]) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._hosts = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise too_long(self._max_body_bytes)
            return message

        await self._app(scope, limited, send)

    def _check(self, scope: Scope) -> None:
        if self._hosts and _host_without_port(header_of(scope, b"host")) not in self._hosts:
            raise ApiError(403, "the server does not go by this Host; --allowed-host adds a name", code="host")
        length = header_of(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise too_long(self._max_body_bytes)


def check_is_json(content_type: str) -> None:
    """Refuses a body that is not declared to be JSON. A web page can send others without asking first."""
    if content_type == "application/json":
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")


class Admission:
    """Lets this many samples into the library at once; requests beyond them wait in a queue, in their order."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.num_running = 0
        self.is_closed = False
        self._queue: "Deque[Tuple[asyncio.Future[None], int]]" = deque()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def enter_now(self, weight: int) -> bool:
        """Lets a request of this many samples in, if it need not wait. Raises ApiError where it cannot wait."""
        if self.is_closed:
            raise shutting_down()
        has_room = not self._queue and self._fits(weight)
        if has_room:
            self.num_running += weight
        return has_room

    async def enter(self, weight: int) -> None:
        """Waits until there is room for a request of this many samples. Raises ApiError where it cannot wait."""
        if self.enter_now(weight):
            return
        if len(self._queue) >= self.max_queued:
            message = f"{self.num_running} samples are running and {len(self._queue)} requests are waiting; try again"
            headers = {"retry-after": "1"}
            raise ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)
        turn: "asyncio.Future[None]" = asyncio.get_running_loop().create_future()
        place: Any = (turn, weight)
        self._queue.append(place)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(weight)  # its turn had come
            elif place in self._queue:
                self._queue.remove(place)
                self._let_in()
            raise

    def leave(self, weight: int) -> None:
        self.num_running -= weight
        self._let_in()

    def close(self) -> None:
        """Refuses those that wait and those that come."""
        self.is_closed = True
        while self._queue:
            turn, _ = self._queue.popleft()
            if not turn.done():
                turn.set_exception(shutting_down())

    def _fits(self, weight: int) -> bool:
        # One that is larger than all the room there is gets all of it.
        return self.num_running == 0 or self.num_running + weight <= self.max_running

    def _let_in(self) -> None:
        while self._queue and self._fits(self._queue[0][1]):
            turn, weight = self._queue.popleft()
            if not turn.done():
                self.num_running += weight
                turn.set_result(None)
