"""The form that an answer must have: what the parameters of a request ask for, as options of the library."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple

from .errors import invalid
from .requests import Sampling


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
