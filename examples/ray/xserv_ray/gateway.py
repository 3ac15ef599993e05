"""The application that clients reach: it reads a request, and passes on the answer of a replica.

While nothing of an answer has been sent, a request whose replica is lost goes to another one. An answer that is not a
stream is sent when all of it is here. A stream that has begun ends with an error event instead, as what the client has
of it cannot be taken back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, AsyncIterator, Dict, List, Sequence, Tuple

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from xserv_server.errors import ApiError, server_error, timed_out
from xserv_server.limits import RequestLimits
from xserv_server.requests import LONG_BODY_BYTES
from xserv_server.sse import DONE, error_event

from .forwarded import Forwarded, Head, Headers
from .prefix import key_of

#: Replicas that a request is sent to before it is given up.
MAX_TRIES = 4

#: A replica that is gone, or that cannot be reached.
LOST = (RayActorError, ActorUnavailableError, ReplicaUnavailableError)
#: Any way in which a call of a replica fails.
FAILED = (RayError, RayServeException)

_log = logging.getLogger("xserv_ray")


def gateway_app(
    engines: DeploymentHandle[Any], max_body_bytes: int, allowed_hosts: Sequence[str], seconds: float
) -> ASGIApp:
    """Makes the application. `seconds`: how long a request may wait for its answer to begin; 0: no limit."""
    limits = Middleware(RequestLimits, max_body_bytes=max_body_bytes, allowed_hosts=allowed_hosts)
    return Starlette(routes=[Route("/{path:path}", Gateway(engines, seconds))], middleware=[limits])


class Gateway:
    """The endpoint of all paths."""

    def __init__(self, engines: DeploymentHandle[Any], seconds: float) -> None:
        self._answers = engines.options(method_name="answer", stream=True)
        self._engines, self._seconds = engines, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if request.url.path == "/metrics" and request.method == "GET":
                await (await self._metrics())(scope, receive, send)
                return
            forwarded = await _read(request)
        except ClientDisconnect:
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        passing = asyncio.ensure_future(self._pass_on(forwarded, scope, receive, send))
        watching = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((passing, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not passing.done():
                passing.cancel()
                await asyncio.wait((passing,))
        if not passing.cancelled():
            passing.result()

    async def _pass_on(self, forwarded: Forwarded, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer()
        try:
            try:
                head = await asyncio.wait_for(self._begin(forwarded, answer), self._seconds or None)
            except asyncio.TimeoutError:
                raise timed_out(self._seconds) from None
            await _send(head, answer, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            answer.close()

    async def _begin(self, forwarded: Forwarded, answer: _Answer) -> Head:
        """Gets the beginning of a stream, or all of another answer, from the first replica that gives it. Raises ApiError."""
        for number in range(MAX_TRIES):
            is_last = number + 1 == MAX_TRIES
            try:
                head = await answer.begin(self._answers.remote(forwarded))
                if not head.is_stream:
                    head = replace(head, body=head.body + b"".join([part async for part in answer.rest()]))
            except BackPressureError as error:
                headers = {"retry-after": "1"}
                code, kind = "rate_limit_exceeded", "rate_limit_error"
                raise ApiError(429, "too many requests are waiting; try again", code=code, kind=kind, headers=headers) from error
            except DeploymentUnavailableError as error:
                raise server_error("no replica can be started", 503, "unavailable") from error
            except LOST as error:
                _log.warning("a replica was lost before its answer: %s, %s", forwarded.tried, type(error).__name__)
            except FAILED as error:
                _log.error("a replica failed: %s", forwarded.tried, exc_info=error)
                raise server_error("the server has failed") from error
            else:
                # One that is ending, or that has no device or memory any more.
                if head.status != 503 or is_last:
                    return head
                answer.close()
        raise server_error("the replicas that should have answered are gone; try again", 503, "replica_lost")

    async def _metrics(self) -> Response:
        """The metrics of all replicas, each with its name."""
        try:
            texts = await self._engines.broadcast("metrics").results_async(timeout_s=10)
        except (*FAILED, TimeoutError) as error:
            raise server_error("the replicas give no metrics", 503, "unavailable") from error
        body = merged_metrics([(name, text.decode()) for name, text in texts])
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Answer:
    """The messages of a replica, from one attempt or another."""

    def __init__(self) -> None:
        self._parts: Any = None

    async def begin(self, parts: Any) -> Head:
        self._parts = parts
        try:
            head: Head = await parts.__anext__()
        except Exception:
            # There is nothing to stop, and cancel() would raise the same again.
            self._parts = None
            raise
        return head

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows a Head; nothing, once all of it has been given."""
        if self._parts is None:
            return
        try:
            async for data in self._parts:
                yield data
        except Exception:
            self._parts = None
            raise
        self._parts = None

    def close(self) -> None:
        """The replica then stops working on it, if it still does."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        try:
            parts.cancel()
        except FAILED as error:
            _log.debug("an answer that was left had failed: %r", error)


async def _send(head: Head, answer: _Answer, send: Send) -> None:
    await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
    await send({"type": "http.response.body", "body": head.body, "more_body": True})
    try:
        async for data in answer.rest():
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except FAILED as error:
        _log.warning("a replica was lost in the middle of a stream: %r", error)
        lost = server_error("the replica that answered is gone: the answer is not complete", 503, "replica_lost")
        await send({"type": "http.response.body", "body": error_event(lost) + DONE, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read(request: Request) -> Forwarded:
    body = await request.body()
    headers: Headers = list(request.scope["headers"])
    authorization = next((value for name, value in headers if name == b"authorization"), None)
    key = b""
    if body:
        is_long = len(body) > LONG_BODY_BYTES
        key = await asyncio.to_thread(key_of, body, authorization) if is_long else key_of(body, authorization)
    return Forwarded(request.method, request.scope["path"], request.scope["query_string"], headers, body, key)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Merged(Collector):
    def __init__(self, texts: List[Tuple[str, str]]) -> None:
        self._texts = texts

    def collect(self) -> List[Metric]:
        families: Dict[str, Metric] = {}
        for replica, text in self._texts:
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        return list(families.values())


def merged_metrics(texts: List[Tuple[str, str]]) -> bytes:
    """Texts of /metrics as one, whose samples have the label `replica`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(texts))
    return generate_latest(registry)
