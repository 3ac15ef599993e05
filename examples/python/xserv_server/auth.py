"""API keys: who asks, and whose prefixes of prompts a request may share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Mapping, Optional

from .errors import ApiError


@dataclass(frozen=True)
class Caller:
    """Who asks.

    name: for logs; None where keys are not asked for.
    secret: the digest of the key; empty without one.
    """

    name: Optional[str]
    secret: bytes

    def cache_key(self, salt: Optional[str] = None) -> int:
        """The number that keeps the cached prefixes of one key, and of one salt, from those of others."""
        if not self.secret and not salt:
            return 0
        digest = hashlib.sha256(self.secret + b"\0" + (salt or "").encode()).digest()
        return int.from_bytes(digest[:8], "big") % (2**64 - 2) + 1


_ANYBODY = Caller(None, b"")


class Keys:
    """The keys of a server, by their digests: to look one up takes as long whatever it is."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = {_digest(key): name for key, name in names.items()}

    def caller(self, authorization: Optional[str]) -> Caller:
        """Returns who sends this Authorization header. Raises ApiError for one without a key of the server's."""
        if not self._names:
            return _ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("an API key is needed, in the header Authorization: Bearer KEY")
        digest = _digest(key.strip())
        name = self._names.get(digest)
        if name is None:
            raise _unauthorized("the API key is not one of this server's")
        return Caller(name, digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", kind="authentication_error", headers=headers)


def read_keys(file: Path) -> Dict[str, str]:
    """Reads a file of keys: one a line, after a name for the logs if it has one; # begins a comment."""
    keys: Dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ValueError(f"{file}, line {number}: a line has a name and a key, or a key alone")
        key = words[-1]
        if key in keys:
            raise ValueError(f"{file}, line {number}: the key has been given before")
        keys[key] = words[0] if len(words) == 2 else f"key {len(keys) + 1}"
    if not keys:
        raise ValueError(f"{file} has no API key")
    return keys
