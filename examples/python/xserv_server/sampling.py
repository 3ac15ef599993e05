"""Requests' parameters as options of the library."""

from __future__ import annotations

from typing import Any, Dict, Optional, cast

import xserv

from .auth import Caller
from .errors import invalid
from .requests import Sampling

#: Fields of a request that the library has by the same name. Those below get their values changed on the way, and two
#: are not of this file: the length, and the form of the answer.
SAME = frozenset(
    name
    for name in Sampling.model_fields
    if name in xserv.GenerateOptions.__annotations__ and name not in ("max_tokens", "response_format")
)


def sampling_options(body: Sampling, caller: Caller, request_seconds: float) -> xserv.GenerateOptions:
    """The options that chats and completions have in common, but for the length, log-probabilities and the form."""
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise invalid("best_of", f"best_of is {body.best_of}, but can only be n, which is {n}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options can be given with stream only")
    # Most requests give few of them.
    options = cast(xserv.GenerateOptions, {name: getattr(body, name) for name in body.model_fields_set & SAME})
    options["num_samples"] = n
    if body.stop is not None:
        options["stop"] = _stop(body)
    if body.stop_token_ids is not None:
        options["stop_token_ids"] = _token_ids(body.stop_token_ids, "stop_token_ids")
    if body.logit_bias is not None:
        options["logit_bias"] = _logit_bias(body.logit_bias)
    options["cache_key"] = caller.cache_key(body.cache_salt)
    if body.top_k is not None:
        options["top_k"] = max(body.top_k, 0)  # -1 is vLLM's name for all
    if body.seed is not None:
        options["seed"] = body.seed % (2**64 - 1)
    if request_seconds:
        options["time_limit_ms"] = max(int(request_seconds * 1000), 1)
    return options


def _stop(body: Sampling) -> Any:
    texts = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for index, text in enumerate(texts):
        place = "stop" if isinstance(body.stop, str) else f"stop[{index}]"
        if not 1 <= len(text.encode()) <= 1024:
            raise invalid(place, f"{place} must have 1 to 1024 bytes")
        if "\0" in text:
            raise invalid(place, f"{place} cannot contain a NUL character")
    if len(texts) > 64:
        raise invalid("stop", f"stop has {len(texts)} strings, but at most 64 are allowed")
    return texts


def _token_ids(ids: Any, name: str) -> Any:
    for index, token in enumerate(ids or ()):
        check_token(token, f"{name}[{index}]")
    return ids


def check_token(token: int, place: str) -> None:
    if not 0 <= token < 2**32:
        raise invalid(place, f"{place} is {token}, which is no token id")


def _logit_bias(biases: Optional[Dict[str, float]]) -> Optional[Dict[int, float]]:
    if not biases:
        return None
    found: Dict[int, float] = {}
    for key, bias in biases.items():
        place = f"logit_bias[{key[:20]!r}]"
        if not (key.isascii() and key.isdigit() and int(key[:11]) < 2**32):
            raise invalid("logit_bias", f"{place} is no token id")
        if not -100 <= bias <= 100:
            raise invalid("logit_bias", f"{place} is {bias:g}, but must be from -100 to 100")
        found[int(key)] = bias
    return found
