"""xserv: runs Qwen3, Qwen2.5, Llama, Mistral, Mixtral and GPT-2 from Hugging Face folders, inside your process.

    with xserv.Model("path/to/folder") as model:
        print(model.generate("Once upon a time", max_tokens=64).text)
"""

from typing import Any, List

from ._async import AsyncTextStream
from ._errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    DeviceLostError,
    Error,
    FileError,
    ForkedError,
    InternalError,
    InvalidArgumentError,
    InvalidFileError,
    NoDeviceError,
    NotFoundError,
    OutOfMemoryError,
    TemplateError,
    UnsupportedError,
)
from ._library import library as _loaded
from ._load import MemoryPlan, ModelInfo, plan
from ._model import Inspection, Logits, Model, ModelStats, Score, inspect, parse_response
from ._options import GenerateOptions
from ._stream import Answer, AnswerEvent, Piece, Result, TextStream, TokenEvent, TokenLogProb, ToolCall
from ._tensor import Tensor

__version__ = "0.3.0.dev0"

#: The version of the library that was loaded.
library_version: str = _loaded.xserv_version().decode()

__all__ = [
    "Answer",
    "AnswerEvent",
    "AsyncTextStream",
    "CancelledError",
    "ClosedError",
    "ContextFullError",
    "DeviceLostError",
    "Error",
    "FileError",
    "ForkedError",
    "GenerateOptions",
    "Inspection",
    "InternalError",
    "InvalidArgumentError",
    "InvalidFileError",
    "Logits",
    "MemoryPlan",
    "Model",
    "ModelInfo",
    "ModelStats",
    "NoDeviceError",
    "NotFoundError",
    "OutOfMemoryError",
    "Piece",
    "Result",
    "Score",
    "TemplateError",
    "Tensor",
    "TextStream",
    "TokenEvent",
    "TokenLogProb",
    "ToolCall",
    "UnsupportedError",
    "inspect",
    "library_version",
    "parse_response",
    "plan",
]


def __getattr__(name: str) -> Any:
    # The operators are read when they are used.
    if name == "ops":
        from importlib import import_module

        return import_module("xserv.ops")
    raise AttributeError(f"module 'xserv' has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted([*globals(), "ops"])
