"""The form that an answer must have: what the parameters of a request ask for, as options of the library."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Optional, Tuple

import xserv

from .errors import invalid
from .requests import Sampling, Tool

_PROBE = "xserv_probe"

#: A thought that the answer may begin with, and the rest of one that the prompt has begun, in Lark's EBNF.
_THOUGHT = 'thought[suffix="</think>"]: /(.|\\n)*/\n'
_MAY_THINK = 'think: "<think>" thought /\\n{0,2}/\n' + _THOUGHT
_IS_THINKING = "think: thought /\\n{0,2}/\n" + _THOUGHT


def form_of(body: Sampling) -> Tuple[Optional[str], Dict[str, Any]]:
    """The form that a request asks for: the field that does, and at most one option of xserv.GenerateOptions."""
    found: List[Tuple[str, str, Any]] = []
    response = body.response_format
    if response is not None and response.type == "json_object":
        found.append(("response_format", "response_format", {"type": "json_object"}))
    elif response is not None and response.type == "json_schema":
        schema = None if response.json_schema is None else response.json_schema.schema_
        if schema is None:
            raise invalid("response_format.json_schema", "response_format.json_schema.schema is missing")
        found.append(("response_format", "response_format", _of_schema(schema)))
    if body.guided_json is not None:
        found.append(("guided_json", "response_format", _of_schema(body.guided_json, "guided_json")))
    for name in ("regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found.append((f"guided_{name}", name, value))
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_schema is not None:
            form = _of_schema(outputs.json_schema, "structured_outputs.json")
            found.append(("structured_outputs.json", "response_format", form))
        if outputs.json_object:
            found.append(("structured_outputs.json_object", "response_format", {"type": "json_object"}))
        for name in ("regex", "choice", "grammar"):
            value = getattr(outputs, name)
            if value is not None:
                found.append((f"structured_outputs.{name}", name, value))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise invalid(found[1][0], f"{names} cannot be given together")
    if not found:
        return None, {}
    name, option, value = found[0]
    return name, {option: value}


def _of_schema(schema: Any, param: str = "response_format") -> Dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(param, f"{param} is a string, but no JSON") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def is_thinking(prompt: str) -> bool:
    """Whether a rendered prompt has begun a thought, which the answer goes on with."""
    return prompt.rfind("<think>") > prompt.rfind("</think>") and prompt.rstrip().endswith("<think>")


def after_thought(form: Dict[str, Any]) -> Dict[str, Any]:
    """A form for an answer whose prompt has begun a thought: the rest of the thought, and then the form."""
    if "response_format" in form:
        response = form["response_format"]
        schema = response["json_schema"]["schema"] if response["type"] == "json_schema" else {"type": "object"}
        body = "%json " + json.dumps(schema, ensure_ascii=False)
    elif "choice" in form:
        body = " | ".join(json.dumps(text, ensure_ascii=False) for text in form["choice"])
    else:
        name = next(iter(form))
        raise invalid(name, f"a {name} cannot be asked for where the prompt begins a thought; use a JSON schema")
    return {"grammar": f"start: think answer\n{_IS_THINKING}answer: {body}\n"}


class CallForm:
    """How a model writes the call of a tool, if it is JSON between fixed texts, as its chat template shows it."""

    def __init__(self, before: str, name_key: str, arguments_key: str, after: str, may_think: bool) -> None:
        self._before, self._after, self._may_think = before, after, may_think
        self._name_key, self._arguments_key = name_key, arguments_key

    def grammar(self, tools: List[Tool], prompt: str) -> str:
        """A grammar of a call of one of the tools, after a thought where the model may have one."""
        calls = []
        for tool in tools:
            arguments = tool.function.parameters or {"type": "object"}
            schema = {
                "type": "object",
                "properties": {self._name_key: {"const": tool.function.name}, self._arguments_key: arguments},
                "required": [self._name_key, self._arguments_key],
                "additionalProperties": False,
            }
            calls.append("%json " + json.dumps(schema, ensure_ascii=False))
        rules = "".join(f"call_{index}: {call}\n" for index, call in enumerate(calls))
        before, after = (f"{json.dumps(text, ensure_ascii=False)} " if text else "" for text in (self._before, self._after))
        body = f"call: {before}( {' | '.join(f'call_{index}' for index in range(len(calls)))} ) {after}\n"
        if is_thinking(prompt):
            return f"start: think call\n{_IS_THINKING}{body}{rules}"
        if self._may_think and not prompt.rstrip().endswith("</think>"):
            return f"start: think? call\n{_MAY_THINK}{body}{rules}"
        return f"start: call\n{body}{rules}"


def find_call_form(model: xserv.Model) -> Optional[CallForm]:
    """Renders a call with the model's chat template, and sees what is around its JSON. None if a grammar cannot
    express it: no template, no JSON, or special tokens around it."""
    call = {"id": "call_000000000", "type": "function", "function": {"name": _PROBE, "arguments": {"probe": 1}}}
    asked = [{"role": "user", "content": "?"}]
    try:
        opening = model.apply_chat_template(asked, [_tool()])
        whole = model.apply_chat_template(
            [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}],
            [_tool()],
            add_generation_prompt=False,
        )
    except (xserv.Error, ValueError):
        return None
    at = whole.rfind(f'"{_PROBE}"')
    begin = whole.rfind("{", 0, at)
    if at < 0 or begin < 0:
        return None
    try:
        written, length = json.JSONDecoder().raw_decode(whole[begin:])
    except ValueError:
        return None
    names = [key for key, value in written.items() if value == _PROBE]
    arguments = [key for key, value in written.items() if value == {"probe": 1}]
    if len(names) != 1 or len(arguments) != 1 or len(written) != 2:
        return None
    # Between the opening of the turn, as the prompt of an answer has it, and the JSON.
    turn = opening[len(model.apply_chat_template(asked, [_tool()], add_generation_prompt=False)) :]
    turn = turn.partition("<think>")[0].rstrip()
    start = whole.rfind(turn, 0, begin) + len(turn) if turn else begin
    before = re.sub(r"^\s*<think>\s*</think>\s*", "", whole[start:begin]).lstrip()
    after = re.match(r"\s*(?:</[A-Za-z_]+>)?", whole[begin + length :])
    # Models that think have a token for it.
    may_think = len(model.tokenize("</think>", add_special_tokens=False)) == 1
    form = CallForm(before, names[0], arguments[0], after.group().rstrip() if after else "", may_think)
    return form if _is_read_back(model, form) else None


def _tool() -> Dict[str, Any]:
    properties = {"probe": {"type": "integer"}}
    return {
        "type": "function",
        "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": properties}},
    }


def _is_read_back(model: xserv.Model, form: CallForm) -> bool:
    """Whether the library reads a call of this form, and its text has no special token, which no grammar can have."""
    written = {form._name_key: _PROBE, form._arguments_key: {"probe": 1}}
    text = form._before + json.dumps(written) + form._after
    tokens = model.tokenize(text, add_special_tokens=False)
    if model.detokenize(tokens) != text:
        return False
    calls = model.parse_response(text, tools=[_tool()]).tool_calls
    return len(calls) == 1 and calls[0].name == _PROBE and calls[0].arguments == {"probe": 1}
