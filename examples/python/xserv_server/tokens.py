"""/tokenize and /detokenize, by vLLM's names."""

from __future__ import annotations

import asyncio
from typing import Any, Dict

from starlette.requests import Request

from .chat import template_messages, template_tools, variables_of
from .errors import from_library, invalid
from .requests import DetokenizeRequest, TokenizeRequest, check_model, read_body
from .sampling import check_token
from .state import State


async def tokenize(state: State, request: Request) -> Dict[str, Any]:
    body, _ = await read_body(request, TokenizeRequest)
    check_model(body.model, state.settings.model_names)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages must be given")
    model = state.model

    def compute() -> Any:
        if body.messages is None:
            return model.tokenize(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return model.tokenize_chat(
            template_messages(body.messages),
            template_tools(body.tools) if body.tools else None,
            add_generation_prompt=body.add_generation_prompt is not False,
            **(variables_of(body.chat_template_kwargs) or {}),
        )

    try:
        # A long text takes a while.
        tokens = await asyncio.to_thread(compute)
    except Exception as error:
        raise from_library(error) from error
    return {
        "count": len(tokens),
        "max_model_len": model.info.max_context_tokens,
        "tokens": tokens,
        "token_strs": [state.texts[token] for token in tokens] if body.return_token_strs else None,
    }


async def detokenize(state: State, request: Request) -> Dict[str, Any]:
    body, _ = await read_body(request, DetokenizeRequest)
    check_model(body.model, state.settings.model_names)
    for index, token in enumerate(body.tokens):
        check_token(token, f"tokens[{index}]")
    try:
        text = await asyncio.to_thread(state.model.detokenize, body.tokens, skip_special_tokens=False)
    except Exception as error:
        raise invalid("tokens", str(error)) from error
    return {"prompt": text}
