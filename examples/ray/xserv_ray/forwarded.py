"""The messages between a gateway and a replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Tuple

#: As ASGI has them: names in lower case.
Headers = List[Tuple[bytes, bytes]]


@dataclass
class Forwarded:
    """A request with all of its body.

    key: what its prompt begins with, as a digest; empty for those without a prompt. Requests with the same key are
        sent to the same replica while it has room.
    tried: the replicas that it has been sent to; the router adds to it, in the process of the gateway.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    key: bytes = b""
    tried: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class Head:
    """The beginning of an answer, with as much of its body as was there; the rest follows as bytes."""

    status: int
    headers: Headers
    body: bytes

    @property
    def is_stream(self) -> bool:
        """Whether the rest comes as a stream of events, which the client is to have as they come."""
        return any(name == b"content-type" and b"event-stream" in value for name, value in self.headers)
