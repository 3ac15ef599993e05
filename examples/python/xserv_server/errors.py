"""Errors, in the shape that OpenAI's clients expect: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple

import xserv
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

#: Names of the library's options that are other names in requests.
_PARAMETERS: Dict[str, str] = {
    "num_log_probs": "logprobs",
    "num_prompt_log_probs": "logprobs",
    "num_samples": "n",
    "stop_strings": "stop",
}


class ApiError(Exception):
    """A request that is refused, or that fails."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: Optional[str] = None,
        code: Optional[str] = None,
        kind: str = "invalid_request_error",
        headers: Optional[Mapping[str, str]] = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = dict(headers or {})

    def body(self) -> Dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(to_json(self.body()), self.status, self.headers, media_type="application/json")


def invalid(param: Optional[str], message: str, code: Optional[str] = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def server_error(message: str, status: int = 500, code: Optional[str] = None) -> ApiError:
    return ApiError(status, message, code=code, kind="server_error")


def client_has_left() -> ApiError:
    """Nobody reads it but the log."""
    return ApiError(499, "the client has left", code="client_closed_request")


def shutting_down() -> ApiError:
    return server_error("the server is shutting down", 503, "shutting_down")


def timed_out(seconds: float) -> ApiError:
    return server_error(f"the request took longer than {seconds:g} seconds", 504, "timeout")


def path_of(location: Iterable[object]) -> str:
    """A place in a request as a person writes it, such as messages[0].content."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


#: Names of pydantic's for the alternatives of a union, which are no fields.
_ALTERNATIVES = {"str", "int", "float", "bool", "list", "dict", "NamedTool", "none"}


def _is_field(part: object) -> bool:
    return isinstance(part, int) or bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", str(part))) and part not in _ALTERNATIVES


def _location(error: Mapping[str, Any]) -> Tuple[object, ...]:
    return tuple(part for part in error["loc"] if _is_field(part))


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # The alternative of a union that came furthest is the one that was meant.
    first = max(found, key=lambda each: len(_location(each)))
    place = _location(first)
    others = [each["msg"] for each in found if _location(each) == place and each["type"] != "missing"]
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is not JSON: {first['msg'].partition(': ')[2]}", "invalid_json")
    if not first["loc"]:
        return invalid(None, f"the body must be a JSON object: {first['msg']}")
    name = path_of(place)
    if first["type"] == "missing":
        return invalid(name, f"{name} is missing", "missing_required_parameter")
    said = [message[:1].lower() + message[1:] for message in dict.fromkeys(others)]
    rest = [message.replace("input should be ", "") for message in said[1:]]
    return invalid(name, f"{name}: {' or '.join([*said[:1], *rest])}", "invalid_value")


def _parameter(message: str) -> Optional[str]:
    """The field that a sentence of the library's begins with, if it does."""
    found = re.match(r"(?:of )?([a-z_]+)(?=[\s\[.,:'])", message)
    if message.startswith(("the prompt ", "token id ")):
        return "prompt"
    if message.startswith("calls of tools "):
        return "tool_choice"
    if message.startswith("the tool "):
        return "tools"
    if found is None:
        return None
    name = found.group(1)
    if name in _PARAMETERS:
        return _PARAMETERS[name]
    return name if name in xserv.GenerateOptions.__annotations__ else None


#: The beginnings of the library's messages about the form of an answer.
_ABOUT_FORMS = ("the JSON schema", "the regular expression", "the grammar", "there are no choices", "choice ")


def from_library(error: BaseException, form: Optional[str] = None) -> ApiError:
    """Translates an exception of the package for the client. `form`: the field that asks for the answer's form."""
    message = str(error)
    if form is not None and message.startswith(_ABOUT_FORMS):
        return invalid(form, message, "invalid_form")
    if isinstance(error, xserv.ContextFullError):
        return invalid("messages" if "messages" in message else "prompt", message, "context_length_exceeded")
    if isinstance(error, xserv.TemplateError):
        return invalid("messages", message, "chat_template")
    if isinstance(error, xserv.UnsupportedError):
        return invalid(_parameter(message), message, "unsupported")
    if isinstance(error, (xserv.ClosedError, xserv.CancelledError)):
        return shutting_down()
    if isinstance(error, (xserv.OutOfMemoryError, xserv.DeviceLostError)):
        return server_error(message, 503, "unavailable")
    if isinstance(error, (xserv.InvalidArgumentError, ValueError, TypeError)):
        return invalid(_parameter(message), message, "invalid_value")
    return server_error(message if isinstance(error, xserv.Error) else "the server has failed")
