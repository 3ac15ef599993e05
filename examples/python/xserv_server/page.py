"""The page at /, and the policy under which a browser runs it: its own scripts and styles, and no others."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from starlette.responses import Response


class _Inline(HTMLParser):
    """Finds the texts of <script> and <style>."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: Dict[str, List[str]] = {"script": [], "style": []}
        self._inside: Optional[str] = None

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        if tag in self.found and not any(name == "src" for name, _ in attrs):
            self._inside = tag
            self.found[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.found[self._inside][-1] += data


def _sources(texts: List[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def policy_of(html: str) -> str:
    """The Content-Security-Policy that permits the page its inline scripts and styles, and its own server."""
    inline = _Inline()
    # A browser reads line ends so, before it computes the digests.
    inline.feed(html.replace("\r\n", "\n").replace("\r", "\n"))
    inline.close()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_sources(inline.found['script'])}",
            f"style-src {_sources(inline.found['style'])}",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


class Page:
    """A page that has been read once."""

    def __init__(self, file: Path) -> None:
        # As it is: digests are of every byte.
        html = file.read_bytes()
        self._html = html
        self._headers = {
            "content-security-policy": policy_of(html.decode()),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def response(self) -> Response:
        return Response(self._html, 200, self._headers, media_type="text/html; charset=utf-8")
