"""Responses whose headers are few and known. Starlette's own are made by way of dictionaries and texts, which takes
several times as long, and an application has one for each request."""

from __future__ import annotations

from typing import Any, List, Tuple

from pydantic_core import to_json
from starlette.responses import Response


class QuickResponse(Response):
    """A response with headers as they are sent."""

    def __init__(self, status: int, headers: List[Tuple[bytes, bytes]], body: bytes = b"") -> None:
        self.status_code, self.raw_headers, self.body, self.background = status, headers, body, None


class JsonResponse(QuickResponse):
    """A response of JSON."""

    def __init__(self, content: Any, status: int = 200) -> None:
        body = to_json(content)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        super().__init__(status, headers, body)
