"""The settings of an application."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Optional, Sequence

#: Beside this file, where the wheel has it.
PAGE = Path(__file__).resolve().parent / "page.html"


@dataclass(frozen=True)
class Settings:
    """The settings of create_app().

    model_names: the names under which requests may ask for the model; answers have the first.
    api_keys: the names of those who may ask, by their keys; empty: anybody may.
    cors_origins: the origins of web pages that may ask; empty: none but the server's own page.
    allowed_hosts: the names that a request may call the server by (its Host header), without ports; empty: any.
        On a loopback address this keeps web pages from reaching the server by a name of theirs.
    max_body_bytes: the longest body of a request.
    max_running: the most samples that are in the library at once; others wait.
    max_queued: the most requests that wait; more are refused with 429.
    request_seconds: the longest that a request may take once it is in the library; 0: no limit.
    page: the file that is served at /; there is none if it does not exist.
    log_requests: whether each request gives a line of JSON on the standard output.
    """

    model_names: Sequence[str]
    api_keys: Dict[str, str] = field(default_factory=dict, repr=False)
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    max_body_bytes: int = 8 << 20
    max_running: int = 256
    max_queued: int = 1024
    request_seconds: float = 600.0
    page: Optional[Path] = PAGE
    log_requests: bool = True
