"""A replica: a model, and the application of xserv_server in the replica's own process, without HTTP around it."""

from __future__ import annotations

import asyncio
import os
from typing import Any, AsyncGenerator, List, Optional, Set, Tuple, Union

import ray
import xserv
from ray import serve
from xserv_server import create_app
from xserv_server.cli import load_options_of, options_parser, settings_of

from .forwarded import Forwarded, Head

#: Bytes of an answer that wait to be taken; the application waits beyond them.
MAX_WAITING_BYTES = 1 << 20


def device_index(given: int) -> int:
    """The library's index of the GPU that Ray has given to this process; `given` if it has given none.

    The library counts the GPUs that CUDA_VISIBLE_DEVICES leaves. Ray sets that for each replica, unless it has been
    told not to.
    """
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not assigned:
        return given
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible.index(assigned[0]) if assigned[0] in visible else int(assigned[0])


class Engine:
    """The class of the replicas."""

    def __init__(self, options: List[str]) -> None:
        arguments = options_parser().parse_args(options)
        arguments.device_index = device_index(arguments.device_index)
        self._model = xserv.Model(arguments.model, **load_options_of(arguments))
        self._app = create_app(self._model, settings_of(arguments))
        self._exchanges: "Set[asyncio.Task[None]]" = set()
        self._is_suspect = False

    async def answer(self, request: Forwarded) -> AsyncGenerator[Union[Head, bytes], None]:
        """Answers a request: a Head, and then the rest of the body as it comes."""
        exchange = _Exchange(request)
        task = asyncio.ensure_future(self._app(exchange.scope, exchange.receive, exchange.send))
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)
        task.add_done_callback(lambda _: exchange.end())
        try:
            head = await exchange.head()
            self._is_suspect = self._is_suspect or (head.status == 503 and b'"unavailable"' in head.body)
            yield head
            async for data in exchange.rest():
                yield data
            await task
        finally:
            # If the client, or the gateway, has left, the application finds that out as it does of a connection.
            exchange.disconnect()

    def metrics(self) -> Tuple[str, bytes]:
        """The name of the replica, and its text of /metrics."""
        return serve.get_replica_context().replica_id.unique_id, self._app.state.server.metrics.text()

    async def check_health(self) -> None:
        """Called by Ray Serve from time to time: a replica where it fails is replaced.

        After a request that found no memory or no device, the smallest one tells which: a lost device does not come back.
        """
        if not self._is_suspect:
            return
        try:
            await self._model.generate_async(tokens=[0], max_tokens=1, stream=False)
        except xserv.DeviceLostError:
            raise
        except xserv.Error:
            pass
        self._is_suspect = False

    def __del__(self) -> None:
        """Called by Ray Serve at the end, when nothing runs any more or the time for it is over."""
        if hasattr(self, "_app"):
            self._app.state.server.refuse_new()
            self._app.state.server.end_all()
        if hasattr(self, "_model"):
            self._model.close()


class _Exchange:
    """A request and its answer, as ASGI has them."""

    def __init__(self, request: Forwarded) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": None,
            "server": None,
        }
        self._body: Optional[bytes] = request.body
        self._has_left = asyncio.Event()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._head: Optional[Any] = None
        self._waiting: List[bytes] = []
        self._num_waiting = 0
        self._is_over = False

    # The application's side.

    async def receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        data = message.get("body", b"")
        if data:
            self._waiting.append(data)
            self._num_waiting += len(data)
        if not message.get("more_body", False):
            self._is_over = True
        self._changed.set()
        while self._num_waiting > MAX_WAITING_BYTES and not self._has_left.is_set():
            self._taken.clear()
            await self._taken.wait()

    # The gateway's side.

    def end(self) -> None:
        """Nothing more will be sent."""
        self._is_over = True
        self._changed.set()

    def disconnect(self) -> None:
        self._has_left.set()
        self._taken.set()

    def _take(self) -> bytes:
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._num_waiting = 0
        self._taken.set()
        return data

    async def head(self) -> Head:
        """Waits for the beginning of the answer."""
        await self._changed.wait()
        if self._head is None:
            raise RuntimeError("the application has given no answer")
        return Head(self._head["status"], list(self._head["headers"]), self._take())

    async def rest(self) -> AsyncGenerator[bytes, None]:
        """The rest of the answer: what is there at once, at once."""
        while True:
            self._changed.clear()
            data = self._take()
            if data:
                yield data
            elif self._is_over:
                return
            else:
                await self._changed.wait()
