"""Server-sent events: their bytes, and the response that sends them.

Events that are there at once are sent at once: the cost of an event in Python is more that of sending it than that
of making it.
"""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any, AsyncGenerator, AsyncIterator, Callable, Dict, List, Tuple

import asyncio

import xserv
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .responses import QuickResponse
from .state import Generation

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


#: A text as JSON.
quoted: Callable[[str], str] = encode_basestring


def error_event(error: ApiError) -> bytes:
    return b"data: " + to_json(error.body()) + b"\n\n"


def last_events(generation: Generation, error: BaseException, has_begun: bool) -> bytes:
    """The end of a stream that fails. Raises the ApiError instead if there is nothing of the answer yet."""
    found = generation.failure(error)
    if not has_begun:
        raise found from error
    generation.has_ended = True
    if generation.stopped == "disconnected":
        return b""
    generation.entry["error"] = found.code or found.kind
    return error_event(found) + DONE


class ChunkWriter:
    """Makes the events of an answer, of which all but the choice is the same."""

    def __init__(self, fields: Dict[str, Any], with_usage: bool) -> None:
        head = to_json(fields).decode()[:-1]
        self._head = f'data: {head},"choices":[{{"index":'
        self._end = "}],\"usage\":null}\n\n" if with_usage else "}]}\n\n"
        self._fields = fields

    def choice(self, index: int, rest: str) -> str:
        """An event of a choice; `rest` is JSON from after its index."""
        return f"{self._head}{index},{rest}{self._end}"

    def usage(self, usage: Dict[str, Any]) -> bytes:
        return b"data: " + to_json({**self._fields, "choices": [], "usage": usage}) + b"\n\n"


async def merged(
    streams: List[AsyncIterator[List[xserv.TokenEvent]]],
) -> AsyncGenerator[Tuple[int, List[xserv.TokenEvent]], None]:
    """The batches of several streams, each with the index of its stream, as they come."""
    if len(streams) == 1:
        async for batch in streams[0]:
            yield 0, batch
        return
    # A reader that is behind keeps the tasks waiting, and the library keeps the events.
    batches: "asyncio.Queue[Tuple[int, Any]]" = asyncio.Queue(len(streams))

    async def read(index: int, stream: AsyncIterator[List[xserv.TokenEvent]]) -> None:
        try:
            async for batch in stream:
                await batches.put((index, batch))
            await batches.put((index, None))
        except xserv.Error as error:
            await batches.put((index, error))

    tasks = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            index, batch = await batches.get()
            if isinstance(batch, xserv.Error):
                raise batch
            if batch is None:
                num_open -= 1
            else:
                yield index, batch
    finally:
        for task in tasks:
            task.cancel()


class EventStream(QuickResponse):
    """Sends what a generator yields, and finishes the generation, whether or not it comes to its end."""

    def __init__(self, generation: Generation, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(200, _HEADERS)
        self._generation, self._first, self._rest = generation, first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own is woken at each step without the coroutines around this one, of FastAPI and its layers.
        sending = asyncio.ensure_future(self._send_all(send))
        try:
            await sending
        finally:
            sending.cancel()
            self._generation.finish()

    async def _send_all(self, send: Send) -> None:
        generation, rest, data = self._generation, self._rest, self._first
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not generation.has_ended:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await rest.__anext__()
            # Before the end is sent: after it, the connection tells that it is over as if the client had left.
            generation.finish()
            await send({"type": "http.response.body", "body": data, "more_body": False})
        finally:
            await rest.aclose()


async def start(generation: Generation, chunks: AsyncGenerator[bytes, None]) -> Response:
    """Waits for the first events, so that what is refused until then has a status of its own."""
    try:
        first = await chunks.__anext__()
    except BaseException:
        generation.finish()
        raise
    return EventStream(generation, first, chunks)
