"""The beginning of a request's prompt, and the replicas that have most likely computed it before.

A conversation is known by its beginning: the tools, the system's messages and the beginning of the first other message.
All of its turns have the same key, and so have all requests that share a long beginning. Replicas are ranked by
rendezvous hashing of the key: every gateway ranks them alike without asking the others, and a replica that comes or
goes moves no key between those that stay. A replica that has more than its share of what runs stands behind the others,
so that a beginning that is common to all is spread over as many replicas as its load needs.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from pydantic_core import from_json, to_json

#: Characters of the first message, or of a prompt, that are looked at.
PREFIX_CHARS = 512
#: Tokens of a prompt of token ids that are looked at.
PREFIX_TOKENS = 128
#: The load above the mean at which requests go elsewhere: a share of it, and a number.
LOAD_FACTOR, LOAD_SLACK = 1.25, 4


def key_of(body: bytes, authorization: Optional[bytes]) -> bytes:
    """The key of a request. Empty where there is none: the replica says what is wrong with the body, if anything is.

    Users with different API keys or salts share no cached prefixes, and so their keys differ.
    """
    try:
        fields = from_json(body)
    except ValueError:
        return b""
    if not isinstance(fields, dict):
        return b""
    beginning = _beginning(fields)
    if beginning is None:
        return b""
    return _digest(to_json([beginning, fields.get("cache_salt")]) + b"\0" + (authorization or b""))


def _beginning(fields: Dict[str, Any]) -> Any:
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list) and messages:
        taken: List[Any] = [fields.get("tools")]
        for message in messages:
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ("system", "developer"):
                taken.append(_cut(message.get("content")) if isinstance(message, dict) else None)
                break
            taken.append(message)
        return taken
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return _cut(prompt) if prompt else None


def _cut(content: Any) -> Any:
    """The beginning of a text, of tokens, or of the texts of a message's parts."""
    if isinstance(content, str):
        return content[:PREFIX_CHARS]
    if isinstance(content, list) and content:
        if isinstance(content[0], int):
            return content[:PREFIX_TOKENS]
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))[:PREFIX_CHARS]
    return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def ranked(key: bytes, replicas: Iterable[str], loads: Mapping[str, int], tried: Sequence[str]) -> List[str]:
    """Replicas in the order in which a request should try them.

    Those where it has failed come last, and before them those that have more than their share of the running requests.
    Within these groups replicas stand by the key; without a key, those with less to do come first.
    """
    found = list(replicas)
    running = sum(loads.get(replica, 0) for replica in found)
    bound = LOAD_FACTOR * (running + 1) / max(len(found), 1) + LOAD_SLACK

    def place(replica: str) -> Any:
        load, draw = loads.get(replica, 0), _digest(key + replica.encode())
        order = (draw,) if key else (load, draw)
        return (replica in tried, load >= bound, order)

    return sorted(found, key=place)
