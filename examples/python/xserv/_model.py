"""Model, Logits, inspect() and plan()."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import Structure, byref, c_float, c_size_t, c_void_p, sizeof, string_at
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    overload,
)

from . import _library as c
from ._library import check, library
from ._request import GenerateOptions, Messages, build_request, choice, json_bytes, set_number, token_array
from ._async import AsyncTextStream
from ._stream import Result, TextStream

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it; nothing is to be installed

Path = Union[str, "os.PathLike[str]"]
_T = TypeVar("_T")

_DEVICE_NAMES = {number: name for name, number in c.DEVICES.items()}
_DTYPE_NAMES = {number: name for name, number in c.DTYPES.items()}


@dataclass(frozen=True)
class ModelInfo:
    """The description of a loaded model. The fields are those of xserv_model_info in xserv.h."""

    architecture: str
    path: str
    device: str
    device_index: int
    dtype: str
    num_threads: int
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_tokens: int
    max_context_tokens: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_tokenizer: bool
    has_chat_template: bool
    eos_token_ids: List[int]
    load_seconds: float
    workspace_bytes: int


@dataclass(frozen=True)
class Inspection:
    """The description of a model folder. The fields are those of xserv_inspection_info in xserv.h."""

    path: str
    architecture: str
    supported: bool
    unsupported_reason: str
    has_tokenizer: bool
    tokenizer_problem: str
    has_chat_template: bool
    chat_template_problem: str
    stored_dtypes: str
    dtype: str
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    max_context_tokens: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that loading a model would take. The fields are those of xserv_memory_plan in xserv.h."""

    device: str
    device_index: int
    dtype: str
    weights_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_cache_tokens: int
    max_context_tokens: int
    total_bytes: int
    minimum_bytes: int
    memory_bytes: int
    fits: bool
    has_tokenizer: bool


def _dataclass_from(kind: Type[_T], info: Structure) -> _T:
    """Copies the fields that a struct and a dataclass both have."""
    values: Dict[str, Any] = {}
    for name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        if name == "device" and not hasattr(info, name):
            value: Any = _DEVICE_NAMES.get(info.device_kind, "unknown")
        else:
            value = getattr(info, name)
        if name == "dtype":
            value = _DTYPE_NAMES.get(value, "unknown")
        elif name == "eos_token_ids":
            value = value[: info.num_eos_token_ids] if info.num_eos_token_ids else []
        elif name in ("supported", "fits") or name.startswith("has_"):
            value = bool(value)
        elif isinstance(value, bytes):
            value = value.decode()
        values[name] = value
    return kind(**values)


def _path(path: Path) -> bytes:
    text = os.fspath(path)
    if "\0" in text:
        raise ValueError("a path cannot contain a NUL character")
    return text.encode()


def inspect(path: Path) -> Inspection:
    """Inspects a model folder without reading its weights. A folder that cannot be loaded is not an
    error: `supported` is then False and `unsupported_reason` says why."""
    handle = c_void_p()
    check(library.xserv_inspect(_path(path), byref(handle)))
    try:
        info = c.InspectionInfo(struct_size=sizeof(c.InspectionInfo))
        check(library.xserv_inspection_get_info(handle, byref(info)))
        return _dataclass_from(Inspection, info)
    finally:
        library.xserv_inspection_free(handle)


def _load_options(device: str, dtype: str, flags: Mapping[str, bool], numbers: Mapping[str, int]) -> c.LoadOptions:
    options = c.LoadOptions()
    library.xserv_load_options_init(byref(options), sizeof(options))
    options.device_kind = choice(c.DEVICES, device, "device")
    options.dtype = choice(c.DTYPES, dtype, "dtype")
    for name, flag in flags.items():
        setattr(options, name, flag)
    for name, number in numbers.items():
        set_number(options, name, number)
    return options


def plan(
    path: Path,
    *,
    device: str = "auto",
    device_index: int = 0,
    dtype: str = "auto",
    num_threads: int = 0,
    max_context_tokens: int = 0,
    kv_cache_tokens: int = 0,
    max_memory_bytes: int = 0,
    max_prefill_tokens: int = 0,
    max_batch_size: int = 0,
    deterministic: bool = False,
    random_weights: bool = False,
) -> MemoryPlan:
    """Returns the memory that Model() would take with the same options, without reading the weights
    and without a GPU. A model that does not fit is not an error: `fits` is then False."""
    flags = dict(deterministic=deterministic, random_weights=random_weights)
    numbers = dict(
        device_index=device_index, num_threads=num_threads, max_context_tokens=max_context_tokens,
        kv_cache_tokens=kv_cache_tokens, max_memory_bytes=max_memory_bytes,
        max_prefill_tokens=max_prefill_tokens, max_batch_size=max_batch_size,
    )  # fmt: skip
    options = _load_options(device, dtype, flags, numbers)
    found = c.MemoryPlan(struct_size=sizeof(c.MemoryPlan))
    check(library.xserv_plan(_path(path), byref(options), byref(found)))
    return _dataclass_from(MemoryPlan, found)


def _run_interruptibly(name: str, work: Callable[[], None], interrupt: Callable[[], None]) -> None:
    """Runs work() on a thread of its own and raises what it raises. An exception that reaches this
    thread meanwhile (Ctrl-C, which comes to the main thread only, and only between two bytecodes of
    Python) calls interrupt(), waits for the end of the work, and goes on."""
    raised: List[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, name=name)
    try:
        thread.start()
        thread.join()
    except BaseException:
        interrupt()
        thread.join()
        raise
    if raised:
        raise raised[0]


class Logits:
    """Scores before softmax, float32 [positions][vocab].

    logits[i] is a row (a memoryview), logits[i, j] a number. numpy.asarray(logits) and
    logits.as_memoryview() share the memory, without a copy.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self.shape: Tuple[int, int] = (rows, vocab_size)
        self._values = (c_float * (rows * vocab_size))()

    def as_memoryview(self) -> memoryview[float]:
        return memoryview(self._values).cast("B").cast("f", self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, index: int) -> memoryview[float]: ...
    @overload
    def __getitem__(self, index: Tuple[int, int]) -> float: ...
    def __getitem__(self, index: Any) -> Any:
        row, column = index if isinstance(index, tuple) else (index, None)
        rows, vocab_size = self.shape
        if not -rows <= row < rows:
            raise IndexError(f"row {row} of {rows}")
        start = row % rows * vocab_size
        view = memoryview(self._values).cast("B").cast("f")[start : start + vocab_size]
        return view if column is None else view[column]

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        data = (ctypes.addressof(self._values), False)
        return {"shape": self.shape, "typestr": "<f4", "data": data, "version": 3}

    def __buffer__(self, flags: int) -> memoryview[Any]:  # Python 3.12 and later
        return memoryview(self._values).cast("B").cast("f", self.shape)


def _take_text(handle: c_void_p) -> str:
    try:
        length = c_size_t()
        data = library.xserv_text_data(handle, byref(length))
        return string_at(data, length.value).decode()
    finally:
        library.xserv_text_free(handle)


class Model:
    """A loaded model. Use it as a context manager, or call close(); any thread may use it.

    Options, all optional: device ("auto", "cpu", "cuda"), dtype ("auto", "f32", "f16", "bf16"),
    device_index, num_threads, map_files, max_context_tokens, kv_cache_tokens, max_memory_bytes, max_batch_size,
    max_prefill_tokens, max_swap_bytes, prefix_cache, deterministic, random_weights; and two callables: progress(fraction), which may
    return False to cancel the load, and log(level, target, message), which is also called on another thread later. Their meaning is that of xserv_load_options in xserv.h.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        device_index: int = 0,
        dtype: str = "auto",
        num_threads: int = 0,
        map_files: bool = False,
        max_context_tokens: int = 0,
        kv_cache_tokens: int = 0,
        max_memory_bytes: int = 0,
        max_batch_size: int = 0,
        max_prefill_tokens: int = 0,
        max_swap_bytes: int = 0,
        prefix_cache: bool = True,
        deterministic: bool = False,
        random_weights: bool = False,
        progress: Optional[Callable[[float], Optional[bool]]] = None,
        log: Optional[Callable[[str, str, str], None]] = None,
    ) -> None:
        self.handle: Optional[c_void_p] = None
        flags = dict(
            map_files=map_files, prefix_cache=prefix_cache, deterministic=deterministic, random_weights=random_weights
        )
        numbers = dict(
            device_index=device_index, num_threads=num_threads, max_context_tokens=max_context_tokens,
            kv_cache_tokens=kv_cache_tokens, max_memory_bytes=max_memory_bytes, max_batch_size=max_batch_size,
            max_prefill_tokens=max_prefill_tokens, max_swap_bytes=max_swap_bytes,
        )  # fmt: skip
        options = _load_options(device, dtype, flags, numbers)

        raised: List[BaseException] = []
        interrupted = threading.Event()

        def on_progress(fraction: float, _: Any) -> bool:
            try:
                return not interrupted.is_set() and (progress is None or progress(fraction) is not False)
            except BaseException as error:  # must not cross the C code
                raised.append(error)
                return False

        loaded = threading.Event()

        def on_log(level: int, target: bytes, message: bytes, _: Any) -> None:
            try:
                if log is not None:
                    log(c.LOG_LEVELS.get(level, str(level)), target.decode(), message.decode())
            except BaseException as error:
                if loaded.is_set():
                    raise  # ctypes tells sys.unraisablehook
                raised.append(error)

        options.progress = c.ProgressCallback(on_progress)
        if log is not None:
            options.log = c.LogCallback(on_log)
        self._log_callback = options.log  # called until the model is closed
        encoded_path = _path(path)
        self.handle = handle = c_void_p()

        def load() -> None:
            check(library.xserv_load(encoded_path, byref(options), byref(handle)))

        try:
            _run_interruptibly("xserv-load", load, interrupted.set)
        except BaseException as error:
            self.close()
            # What a callback raised is the reason why the load was cancelled.
            raise raised[0] if raised and isinstance(error, c.Error) else error
        loaded.set()
        if raised:
            self.close()
            raise raised[0]
        self.info: ModelInfo = self._get_info()

    def close(self) -> None:
        """Frees the model. Calls that still run in other threads end as cancelled."""
        handle, self.handle = self.handle, None
        if handle is not None:
            library.xserv_model_free(handle)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.close()

    def _get_info(self) -> ModelInfo:
        info = c.ModelInfo(struct_size=sizeof(c.ModelInfo))
        check(library.xserv_model_get_info(self.handle, byref(info)))
        return _dataclass_from(ModelInfo, info)

    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> List[int]:
        """Turns text into token ids."""
        options = c.TokenizeOptions()
        library.xserv_tokenize_options_init(byref(options), sizeof(options))
        options.add_special_tokens, options.parse_special_tokens = add_special_tokens, parse_special_tokens
        data = text.encode()
        handle = c_void_p()
        check(library.xserv_tokenize(self.handle, data, len(data), byref(options), byref(handle)))
        try:
            count = c_size_t()
            ids = library.xserv_tokens_data(handle, byref(count))
            return list(ids[: count.value]) if count.value else []
        finally:
            library.xserv_tokens_free(handle)

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turns token ids into text."""
        handle = c_void_p()
        ids = token_array(tokens)
        check(library.xserv_detokenize(self.handle, ids, len(ids), skip_special_tokens, byref(handle)))
        return _take_text(handle)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders a conversation with the model's template. Further keywords are variables of the
        template, such as enable_thinking=False."""
        options = c.ChatOptions()
        library.xserv_chat_options_init(byref(options), sizeof(options))
        options.messages_json = json_bytes(messages)
        options.tools_json = None if tools is None else json_bytes(tools)
        options.template_variables_json = json_bytes(variables) if variables else None
        options.add_generation_prompt = add_generation_prompt
        handle = c_void_p()
        check(library.xserv_apply_chat_template(self.handle, byref(options), byref(handle)))
        return _take_text(handle)

    def logits(self, tokens: Sequence[int], *, last_only: bool = False) -> Logits:
        """Returns the scores of the token that follows each of `tokens`, or only the last of them."""
        ids = token_array(tokens)
        rows = 1 if last_only else len(ids)
        logits = Logits(rows, self.info.vocab_size)
        options = c.LogitsOptions()
        library.xserv_logits_options_init(byref(options), sizeof(options))
        options.rows = c.LOGITS_LAST if last_only else c.LOGITS_ALL
        cancel = c_void_p()
        check(library.xserv_cancel_token_new(byref(cancel)))
        options.cancel = cancel

        def compute() -> None:
            values = logits._values
            check(library.xserv_logits(self.handle, ids, len(ids), byref(options), values, len(values)))

        try:
            # So that Ctrl-C ends it.
            _run_interruptibly("xserv-logits", compute, lambda: library.xserv_cancel_token_cancel(cancel))
        finally:
            library.xserv_cancel_token_free(cancel)
        return logits

    @overload
    def generate(
        self, prompt: Optional[str] = None, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: Optional[str] = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> TextStream: ...
    def generate(
        self, prompt: Optional[str] = None, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Union[Result, TextStream]:
        """Generates from exactly one of a prompt, tokens= and messages=.

        Returns a Result; with stream=True an iterator over the pieces of text, whose `result` is set
        when it has ended. Further keywords: tools, variables (of the chat template), max_tokens,
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        seed, stop (a string or several), stop_token_ids, ignore_eos, skip_special_tokens,
        add_generation_prompt, add_special_tokens, parse_special_tokens, priority, time_limit_ms,
        cache_key, num_samples (result.samples has them all, piece.sample tells whose a piece is). They mean what
        xserv_request in xserv.h says; what is not given comes from the model's generation_config.json.
        """
        running = TextStream(self, build_request(prompt, **options), want_text=stream)
        return running if stream else running.wait()

    def generate_async(self, prompt: Optional[str] = None, **options: Unpack[GenerateOptions]) -> AsyncTextStream:
        """As generate(), for asyncio: `async for piece in stream`, or `await stream.wait()` for the Result."""
        return AsyncTextStream(self, build_request(prompt, **options))

    def stats(self) -> Dict[str, Any]:
        """Returns the state of the model's requests; the keys are the fields of xserv_model_stats in xserv.h."""
        stats = c.ModelStats(struct_size=sizeof(c.ModelStats))
        check(library.xserv_model_get_stats(self.handle, byref(stats)))
        values = {name: getattr(stats, name) for name, *_ in stats._fields_ if name != "struct_size"}
        return {name: list(value) if name.startswith("step_") else value for name, value in values.items()}
