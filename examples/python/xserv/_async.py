"""Generation for asyncio, without threads: the event loop waits for a file descriptor."""

from __future__ import annotations

import asyncio
import os
from ctypes import byref, c_void_p, sizeof, string_at
from typing import Any, AsyncIterator, Optional

from . import _library as c
from ._library import check, library
from ._stream import Piece, Result, take_result


class AsyncTextStream(AsyncIterator[Piece]):
    """The pieces of a text, as they are generated. `result` is the Result once it has ended.

    Any number of streams run at once on one model, and are computed together. close(), the end of an async with
    block, or dropping the stream stops a generation that still runs; so does cancelling the task that waits.
    """

    def __init__(self, model: Any, request: c.Request) -> None:
        self._submission: Optional[c_void_p] = None
        self.result: Optional[Result] = None
        self._read_fd, self._write_fd = os.pipe()
        try:
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)
            options = c.SubmitOptions()
            library.xserv_submit_options_init(byref(options), sizeof(options))
            options.wake_fd = self._write_fd
            handle = c_void_p()
            check(library.xserv_submit(model.handle, byref(request), byref(options), byref(handle)))
            self._submission = handle
        except BaseException:
            self._close_pipe()
            raise

    def __aiter__(self) -> "AsyncTextStream":
        return self

    async def __anext__(self) -> Piece:
        while self._submission is not None:
            event = c.Event(struct_size=sizeof(c.Event))
            try:
                check(library.xserv_next(self._submission, 0, byref(event)))
            except BaseException:
                self.close()
                raise
            if event.kind == c.EVENT_NONE:
                await self._news()
            elif event.kind == c.EVENT_DONE:
                handle = c_void_p()
                check(library.xserv_submission_take_result(self._submission, byref(handle)))
                self.result = take_result(handle)
                self.close()
            elif event.text_len:
                return Piece(string_at(event.text, event.text_len).decode(), event.sample)
        raise StopAsyncIteration

    async def _news(self) -> None:
        """Waits until the library has written into the pipe."""
        loop = asyncio.get_running_loop()
        news = loop.create_future()
        loop.add_reader(self._read_fd, lambda: news.done() or news.set_result(None))
        try:
            await news
        except BaseException:
            loop.remove_reader(self._read_fd)
            self.close()
            raise
        loop.remove_reader(self._read_fd)
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            pass

    async def wait(self) -> Result:
        """Reads to the end and returns the result."""
        async for _ in self:
            pass
        if self.result is None:
            raise ValueError("the stream was closed before its end")
        return self.result

    def close(self) -> None:
        """Stops the generation if it still runs."""
        submission, self._submission = self._submission, None
        if submission is not None:
            # Nothing is written into the pipe after this.
            library.xserv_submission_free(submission)
            self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)

    async def __aenter__(self) -> "AsyncTextStream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_submission", None) is not None:
            self.close()
