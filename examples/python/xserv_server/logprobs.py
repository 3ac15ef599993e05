"""Log-probabilities as chats and as completions tell them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import xserv

#: In the place of minus infinity, which JSON cannot have.
LOWEST = -9999.0


class TokenTexts:
    """The texts of single tokens. A token that is no whole character is written with U+FFFD."""

    def __init__(self, model: xserv.Model) -> None:
        self._model = model
        self._texts: Dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._model.detokenize([token], skip_special_tokens=False)
        return text


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)


def _entry(texts: TokenTexts, token: int, logprob: float) -> Dict[str, Any]:
    text = texts[token]
    # The bytes of a part of a character are not known.
    return {"token": text, "logprob": _number(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def chat_entry(
    texts: TokenTexts, token: int, logprob: Optional[float], top: Optional[Sequence[xserv.TokenLogProb]]
) -> Dict[str, Any]:
    """A token in the logprobs.content of a chat."""
    likeliest = [_entry(texts, each.token_id, each.logprob) for each in top or ()]
    return {**_entry(texts, token, LOWEST if logprob is None else logprob), "top_logprobs": likeliest}


class CompletionLogprobs:
    """The logprobs of a completion: parallel lists, which grow."""

    def __init__(self, texts: TokenTexts, num_top: int, offset: int) -> None:
        self._texts, self._num_top, self._offset = texts, num_top, offset
        self._clear()

    def _clear(self) -> None:
        self._tokens: List[str] = []
        self._logprobs: List[Optional[float]] = []
        self._tops: List[Optional[Dict[str, float]]] = []
        self._offsets: List[int] = []

    def add(self, token: int, logprob: Optional[float], top: Optional[Sequence[xserv.TokenLogProb]]) -> None:
        text = self._texts[token]
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        self._logprobs.append(None if logprob is None else _number(logprob))
        if logprob is None or not self._num_top:
            self._tops.append(None)
            return
        tops: Dict[str, float] = {}
        for each in top or ():
            # Parts of characters may have one text; the likeliest is told.
            tops.setdefault(self._texts[each.token_id], _number(each.logprob))
        tops.setdefault(text, _number(logprob))
        self._tops.append(tops)

    def take(self) -> Dict[str, Any]:
        """Returns what has been added since the last call."""
        found = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops if self._num_top else None,
            "text_offset": self._offsets,
        }
        self._clear()
        return found
