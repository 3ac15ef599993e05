"""Model, Logits, Score, inspect() and plan()."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections import deque
from ctypes import Structure, byref, c_float, c_size_t, c_void_p, sizeof, string_at
from dataclasses import dataclass
from functools import partial
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
from . import _process
from ._async import AsyncTextStream
from ._errors import Error, NotCopyable, closed, invalid_argument
from ._library import check, library
from ._options import GenerateOptions, Messages, Tools
from ._request import (
    build_request,
    choice,
    json_bytes,
    refuse_processor,
    set_number,
    show_options,
    token_array,
    without_nul,
)
from ._stream import Answer, Events, Result, TextStream, take_answer
from ._tensor import CPU, copied_capsule

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it; nothing is to be installed

Path = Union[str, "os.PathLike[str]"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "f32", "f16", "bf16"]
Weights = Literal["as stored", "int8", "int4"]
Embeddings = Literal["as stored", "int8"]
KvCacheFormat = Literal["as computed", "fp8"]
Activations = Literal["as computed", "int8", "unquantised"]
_T = TypeVar("_T")

_DEVICE_NAMES = {number: name for name, number in c.DEVICES.items()}
_DTYPE_NAMES = {number: name for name, number in c.DTYPES.items()}


@dataclass(frozen=True)
class ModelInfo:
    """The description of a loaded model. It stays valid when the model is closed.

    architecture: for example "Qwen3ForCausalLM".
    path: the folder that was opened; for a repo id its snapshot in the local Hugging Face cache.
    device: for example "cpu (avx512-bf16, 2 threads)" or "cuda (NVIDIA H200)".
    device_index: the index of the GPU; 0 on the CPU.
    dtype: the type that is computed with, "f32", "f16" or "bf16" (of weights and KV cache too, unless quantised).
    num_threads: the number of threads that the CPU's kernels use; 0 on a GPU.
    num_parameters: the number of weights; tied embeddings count once.
    weights_bytes: bytes that the weights take in memory.
    kv_bytes_per_token: bytes of KV cache for one token.
    kv_cache_tokens: the number of tokens that the KV cache holds, of all requests together.
    max_context_tokens: the longest context of one request, in tokens: prompt and generated.
    vocab_size: the length of a row of logits; may be larger than the number of tokens that the tokenizer knows.
    hidden_size: the width of the residual stream.
    num_layers: the number of transformer layers.
    num_heads: the number of query heads.
    num_kv_heads: the number of key/value heads.
    head_dim: the width of one head.
    has_tokenizer: whether text can be tokenized; if not, only token ids work.
    has_chat_template: whether messages can be rendered.
    eos_token_ids: tokens that end a generation, from generation_config.json or config.json.
    load_seconds: seconds that the load took.
    workspace_bytes: the most bytes that activations and scratch memory take, as planned at load.
    """

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
    """The description of a model folder. Numbers that are not known are 0.

    path: the folder.
    architecture: as config.json names it, for example "Qwen3ForCausalLM"; empty if it does not.
    supported: whether Model() accepts the folder, memory permitting.
    unsupported_reason: a sentence that says why not; empty if it does.
    has_tokenizer: whether text can be tokenized.
    tokenizer_problem: why not; empty if it can. A missing tokenizer.json does not keep a model from being
        loaded, one that is damaged or not supported does.
    has_chat_template: whether messages can be rendered.
    chat_template_problem: why not; empty if they can. This never keeps a model from being loaded.
    stored_dtypes: the stored element types and their bytes, for example "bf16: 1192099840"; several are
        separated by ", ".
    dtype: the type that dtype="auto" would choose: "f32", "f16" or "bf16".
    num_parameters: the number of weights; tied embeddings count once.
    weights_bytes: bytes that the weights take when loaded with dtype="auto".
    kv_bytes_per_token: bytes of KV cache for one token, likewise.
    max_context_tokens: the longest context that the config allows, in tokens.
    vocab_size: the length of a row of logits.
    hidden_size: the width of the residual stream.
    num_layers: the number of transformer layers.
    num_heads: the number of query heads.
    num_kv_heads: the number of key/value heads.
    head_dim: the width of one head.
    """

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
    """The memory that loading a model would take, of its device: the GPU's for a model on a GPU, else the host's.

    device: the device on which the model would run, "cpu" or "cuda".
    device_index: the index of the GPU; 0 on the CPU.
    dtype: the type that would be computed with: "f32", "f16" or "bf16".
    weights_bytes: bytes of the weights.
    workspace_bytes: the most bytes that activations and scratch memory take while requests run.
    kv_bytes_per_token: bytes of KV cache for one token.
    kv_cache_tokens: the number of tokens that the KV cache would hold, of all requests together; 0 if the model
        does not fit.
    max_context_tokens: the longest context of one request, in tokens; 0 if the model does not fit.
    total_bytes: weights_bytes + workspace_bytes + kv_cache_tokens * kv_bytes_per_token; if the model does not
        fit, with the smallest KV cache that the options allow.
    minimum_bytes: the smallest max_memory_bytes that Model() would accept with these options.
    memory_bytes: the bytes that are available: max_memory_bytes or the free memory, whichever is less; 0 if
        neither is known.
    fits: whether total_bytes is no more than memory_bytes, or the available memory is unknown.
    has_tokenizer: whether text could be tokenized; if not, only token ids would work.
    """

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


@dataclass(frozen=True)
class ModelStats:
    """The state of a model's requests at one moment, and totals since it was loaded. A sample is one
    continuation of a request (num_samples); one that makes room for others is preempted and waits. The KV cache
    has blocks of 32 tokens.

    num_running: samples that are running, which each step computes.
    num_waiting: samples that wait for room, preempted ones included.
    num_preempted: waiting samples that were preempted.
    total_submitted: samples submitted; a call of Model.logits() counts as one, and of Model.score() as one for
        each continuation.
    total_ended: samples ended, for whatever reason.
    total_preemptions: the number of preemptions.
    total_steps: the number of forward passes.
    total_prompt_tokens: prompt tokens computed, including those computed again after a preemption.
    total_generated_tokens: tokens generated.
    total_looked_up_tokens: prompt tokens of admitted requests, all looked up in the prefix cache.
    total_cached_tokens: looked-up tokens whose keys and values were found.
    cache_hit_rate: total_cached_tokens / total_looked_up_tokens, from 0 to 1; 0 at first.
    tokens_per_second: tokens generated per second by all requests together, over the last second or two of work.
    busy_seconds: seconds spent on steps.
    num_kv_blocks: blocks of the KV cache.
    num_used_kv_blocks: blocks that requests use.
    num_cached_kv_blocks: unused blocks whose content is kept for prompts with the same prefix.
    peak_used_kv_blocks: the largest value that num_used_kv_blocks has had.
    peak_memory_bytes: the most bytes that weights, work space and KV cache have taken: on a GPU as its
        allocator counts them, on the CPU with the blocks that have been used.
    step_counts: a histogram of step times: entry i counts the steps shorter than step_bucket_us[i] that are in
        no earlier entry.
    step_bucket_us: the upper bounds of the histogram in microseconds; the last is 2**64 - 1.
    device_busy_seconds: seconds from the beginnings to the ends of steps, by the device's clock.
    device_idle_seconds: seconds between steps in which the device waited for the host although there were requests.
    num_swap_blocks: blocks that the host memory taken for swapping has room for (max_swap_bytes of Model()).
    num_used_swap_blocks: swap blocks in use by preempted requests.
    total_swapped_out_blocks: blocks copied to the host.
    total_swapped_in_blocks: blocks copied back.
    """

    num_running: int
    num_waiting: int
    num_preempted: int
    total_submitted: int
    total_ended: int
    total_preemptions: int
    total_steps: int
    total_prompt_tokens: int
    total_generated_tokens: int
    total_looked_up_tokens: int
    total_cached_tokens: int
    cache_hit_rate: float
    tokens_per_second: float
    busy_seconds: float
    num_kv_blocks: int
    num_used_kv_blocks: int
    num_cached_kv_blocks: int
    peak_used_kv_blocks: int
    peak_memory_bytes: int
    step_counts: Tuple[int, ...]
    step_bucket_us: Tuple[int, ...]
    device_busy_seconds: float
    device_idle_seconds: float
    num_swap_blocks: int
    num_used_swap_blocks: int
    total_swapped_out_blocks: int
    total_swapped_in_blocks: int


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
        elif isinstance(value, ctypes.Array):
            value = tuple(value)
        elif isinstance(value, bytes):
            value = value.decode()
        values[name] = value
    return kind(**values)


def _path(path: Path) -> bytes:
    return without_nul(os.fsencode(path), "a path")


def inspect(path: Path) -> Inspection:
    """Describes a model folder (or repo id in the local Hugging Face cache) without loading it: reads the
    configs, the tokenizer and the headers of the weight files. (Only weights that are declared the same and
    stored twice are compared.) A folder that cannot be loaded is not an error: `supported` is then False and
    `unsupported_reason` says why.

    Raises NotFoundError (there is no such folder or cached repo), InvalidArgumentError (the path is no folder),
    FileError and OutOfMemoryError. Any thread may call it.
    """
    handle = c_void_p()
    check(library.xserv_inspect(_path(path), byref(handle)))
    try:
        info = c.InspectionInfo(struct_size=sizeof(c.InspectionInfo))
        check(library.xserv_inspection_get_info(handle, byref(info)))
        return _dataclass_from(Inspection, info)
    finally:
        library.xserv_inspection_free(handle)


def _load_options(
    device: str,
    dtype: str,
    weights: str,
    embeddings: str,
    kv_cache_format: str,
    activations: str,
    flags: Mapping[str, bool],
    numbers: Mapping[str, int],
    kept_weights: Optional[Path],
) -> c.LoadOptions:
    options = c.LoadOptions()
    library.xserv_load_options_init(byref(options), sizeof(options))
    options.device_kind = choice(c.DEVICES, device, "device")
    options.dtype = choice(c.DTYPES, dtype, "dtype")
    options.weights = choice(c.WEIGHTS, weights, "weights")
    options.embeddings = choice(c.EMBEDDINGS, embeddings, "embeddings")
    options.kv_cache_format = choice(c.KV_CACHE_FORMATS, kv_cache_format, "kv_cache_format")
    options.activations = choice(c.ACTIVATIONS, activations, "activations")
    if kept_weights is not None:
        options.kept_weights = _path(kept_weights)
    for name, flag in flags.items():
        setattr(options, name, flag)
    for name, number in numbers.items():
        set_number(options, name, number)
    return options


def plan(
    path: Path,
    *,
    device: Device = "auto",
    device_index: int = 0,
    dtype: Dtype = "auto",
    weights: Weights = "as stored",
    weights_group_size: int = 0,
    embeddings: Embeddings = "as stored",
    kv_cache_format: KvCacheFormat = "as computed",
    activations: Activations = "as computed",
    num_threads: int = 0,
    max_context_tokens: int = 0,
    kv_cache_tokens: int = 0,
    max_memory_bytes: int = 0,
    max_prefill_tokens: int = 0,
    max_batch_size: int = 0,
    deterministic: bool = False,
    random_weights: bool = False,
    kept_weights: Optional[Path] = None,
) -> MemoryPlan:
    """Returns the memory that Model() would take with the same options (see there), without reading the weights
    and without a GPU. It is the computation by which Model() sizes the KV cache. A model that does not fit is
    not an error: `fits` is then False. The file of kept_weights is neither read nor made: nothing that is planned
    depends on it.

    To plan for a GPU of a given size, pass device="cuda" and its memory, less some hundred MB for the driver, as
    max_memory_bytes. Where there is a GPU it is asked for its free memory, which starts it in this process.

    Raises what Model() raises for a folder or options that it refuses regardless of memory. Any thread may call it.
    """
    flags = dict(deterministic=deterministic, random_weights=random_weights)
    numbers = dict(
        device_index=device_index, num_threads=num_threads, max_context_tokens=max_context_tokens,
        kv_cache_tokens=kv_cache_tokens, max_memory_bytes=max_memory_bytes,
        max_prefill_tokens=max_prefill_tokens, max_batch_size=max_batch_size,
        weights_group_size=weights_group_size,
    )  # fmt: skip
    options = _load_options(
        device, dtype, weights, embeddings, kv_cache_format, activations, flags, numbers, kept_weights
    )
    found = c.MemoryPlan(struct_size=sizeof(c.MemoryPlan))
    check(library.xserv_plan(_path(path), byref(options), byref(found)))
    return _dataclass_from(MemoryPlan, found)


def _run_interruptibly(
    name: str, work: Callable[[], None], interrupt: Callable[[], object], *, calls_python: bool = False
) -> None:
    """Runs work() on a thread of its own and raises what it raises. An exception that reaches this
    thread meanwhile (Ctrl-C, which comes to the main thread only, and only between two bytecodes of
    Python) calls interrupt(), waits for the end of the work, and goes on. So does the end of the program."""
    raised: List[BaseException] = []
    # Not Thread.join(): after an exception in it, a second one may return at once (CPython issue 89437).
    done = threading.Event()

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            _process.end(done)

    thread = threading.Thread(target=body, name=name)
    _process.begin(done, interrupt, calls_python=calls_python)
    try:
        thread.start()
        done.wait()
    except BaseException:
        interrupt()
        while thread.ident is not None and not done.is_set():
            try:
                done.wait()
            except BaseException:  # another Ctrl-C changes nothing: it ends soon
                continue
        _process.end(done)
        raise
    if raised:
        raise raised[0]


#: The most texts that one call of score() or perplexity() has scored at the same time.
_SCORED_AT_ONCE = 64


class Logits:
    """Scores before softmax: float32 [positions][vocab_size], in the object's own memory.

    logits[i] is a row (a memoryview), logits[i, j] a number; negative positions count from the end.
    numpy.asarray(logits) and logits.as_memoryview() share the memory, without a copy, and keep it alive.
    `shape` is (positions, vocab_size).
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self.shape: Tuple[int, int] = (rows, vocab_size)
        self._values = (c_float * (rows * vocab_size))()

    def __repr__(self) -> str:
        return f"<xserv.Logits: float32 [{self.shape[0]}, {self.shape[1]}]>"

    # For copy and pickle; the array of ctypes has a type that neither can name.
    def __reduce__(self) -> Tuple[Any, ...]:
        return (_logits_from, (*self.shape, bytes(self._values)))

    def as_memoryview(self) -> memoryview[float]:
        """The scores as a writable memoryview of format "f" and two dimensions, which shares the memory."""
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

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: Optional[int] = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """Gives a copy of the scores to libraries that speak DLPack: torch.from_dlpack(logits). With copy=False it
        raises BufferError; as_memoryview() shares the memory."""
        if copy is False:
            raise BufferError("logits go out through DLPack as a copy, which copy=False forbids")
        return copied_capsule(self._values, "f32", self.shape, stream, max_version, dl_device)

    def __buffer__(self, flags: int) -> memoryview[Any]:  # Python 3.12 and later
        return memoryview(self._values).cast("B").cast("f", self.shape)


def _logits_from(rows: int, vocab_size: int, values: bytes) -> Logits:
    logits = Logits(rows, vocab_size)
    ctypes.memmove(logits._values, values, len(values))
    return logits


@dataclass(frozen=True)
class Score:
    """The likelihood that the model gives a continuation.

    token_ids: the tokens that were scored.
    logprobs: the natural logarithm of the probability of each, after all the tokens before it.
    sum: their sum, the log-likelihood of the continuation.
    is_greedy: whether each token is the likeliest in its place, so that generation with temperature 0 and without
        penalties gives the continuation.
    """

    token_ids: Tuple[int, ...]
    logprobs: Tuple[float, ...]
    sum: float
    is_greedy: bool


def _score_from(ids: Sequence[int], scores: Any) -> Score:
    logprobs = tuple(score.log_prob for score in scores)
    is_greedy = all(score.is_likeliest == 1 for score in scores)
    return Score(tuple(ids), logprobs, math.fsum(logprobs), is_greedy)


def _take_text(handle: c_void_p) -> str:
    try:
        length = c_size_t()
        data = library.xserv_text_data(handle, byref(length))
        return string_at(data, length.value).decode()
    finally:
        library.xserv_text_free(handle)


def _chat_options(
    messages: Messages, tools: Optional[Tools], add_generation_prompt: bool, variables: Mapping[str, Any]
) -> c.ChatOptions:
    options = c.ChatOptions()
    library.xserv_chat_options_init(byref(options), sizeof(options))
    options.messages_json = json_bytes(messages, "messages")
    options.tools_json = None if tools is None else json_bytes(tools, "tools")
    options.template_variables_json = json_bytes(variables, "the variables") if variables else None
    options.add_generation_prompt = add_generation_prompt
    return options


def _take_tokens(handle: c_void_p) -> List[int]:
    try:
        count = c_size_t()
        ids = library.xserv_tokens_data(handle, byref(count))
        return list(ids[: count.value]) if count.value else []
    finally:
        library.xserv_tokens_free(handle)


def _parse_response(
    model: Optional[int], text: str, prompt: Optional[str], tools: Optional[Tools], answer_format: str
) -> Answer:
    options = c.ParseOptions()
    library.xserv_parse_options_init(byref(options), sizeof(options))
    options.prompt = None if prompt is None else without_nul(prompt.encode(), "the prompt")
    options.tools_json = None if tools is None else json_bytes(tools, "tools")
    options.answer_format = choice(c.ANSWER_FORMATS, answer_format, "answer_format")
    data = text.encode()
    handle = c_void_p()
    check(library.xserv_parse_response(model, data, len(data), byref(options), byref(handle)))
    return take_answer(handle)


def parse_response(
    text: str, *, answer_format: str, prompt: Optional[str] = None, tools: Optional[Tools] = None
) -> Answer:
    """Takes a text apart that some model has generated: as Model.parse_response(), without a model. answer_format
    is the name of a form, or "thinking"."""
    return _parse_response(None, text, prompt, tools, answer_format)


def _free(handle: c_void_p, log_callback: Any) -> None:
    """Frees a model that calls `log_callback` until then."""
    library.xserv_model_free(handle)


class Model(NotCopyable):
    """A loaded model: weights, tokenizer, chat template, KV cache and threads.

    Use it as a context manager, or call close(); a model that is dropped is closed. Any thread and any event
    loop may use it, several at once: their requests are computed together. After os.fork() it can be used in
    the parent only.

    path: a folder as Hugging Face publishes it, or a repo id such as "Qwen/Qwen3-0.6B" that is in the local
        Hugging Face cache. The network is never used. The folder is not needed after the load.
    device: "cpu", "cuda" (an NVIDIA GPU), or "auto" (default): a GPU where it can be used and the model runs
        and fits there, else the CPU.
    device_index: the index of the GPU, from 0 (default); 0 on the CPU.
    dtype: the type that is computed with, and of weights and KV cache unless the weights are quantised or
        kv_cache_format says otherwise: "f32", "f16", "bf16", or "auto" (default), the type that is stored.
    weights: what the matrices of the layers are kept as: "as stored" (default; folders whose weights are quantised
        keep them so), or "int8" or "int4", to which numbers of 32 and 16 bits are brought while they are read.
        Norms and biases stay as stored.
    weights_group_size: the inputs that share a scale in weights quantised at load, a multiple of 32; 0 (default):
        32 with "int4", 128 with "int8".
    embeddings: what the embedding and the output matrix are kept as, whatever weights says of the layers: "as stored"
        (default), or "int8", with a scale for every 128 inputs.
    kv_cache_format: what the KV cache stores: "as computed" (default), numbers of dtype, or "fp8", floats of 8 bits
        (torch.float8_e4m3fn, without a scale), which take half the memory of bf16, so that there is room for twice
        as many tokens.
    activations: what products with quantised weights take their activations as. "as computed" (default): where the
        config of a folder with FP8 weights quantises activations to FP8, in FP8 with a scale for each token and 128
        inputs. "unquantised": never, which is nearer to the numbers that the weights stand for, and on a GPU takes
        longer with many tokens. Weights of 4 and 8 bits (integers) take them on the CPU as integers of 16 bits, or with
        "int8" of 8 bits: prompts are faster then, and results less exact. In steps of many tokens of a bf16 model that
        is not deterministic, a processor with AMX or AMD's AVX-512 BF16 may take them in bf16 instead; with "int8" only
        AMX does, in groups of fewer than 64.
    kept_weights: a file in which what weights and embeddings quantise is kept for later loads, or None (default). If
        it is there, it is read instead of what it was made from; else the load makes it. A file of other options or of
        another model, or a damaged one, is refused (InvalidFileError) and never overwritten.
    num_threads: threads of the CPU's kernels, at most 1024; 0 (default): one for each core that the process may
        run on. Results do not depend on it.
    map_files: map the weight files while they are read, instead of reading them. A file that another process
        truncates meanwhile then kills this one. Default False.
    max_context_tokens: the longest context of one request, prompt and generated tokens; 0 (default): the limit
        of the model's config.
    kv_cache_tokens: the number of tokens that the KV cache holds for all requests together; 0 (default): what
        max_memory_bytes leaves room for, or without such a limit nine tenths of a GPU's free memory, and on the
        CPU up to four longest contexts in a quarter of the memory that is left, or one in half of it.
    max_memory_bytes: a limit for weights, work space and KV cache together, in bytes; 0 (default): none. A
        model that does not fit is refused before its weights are read.
    max_batch_size: the most sequences that are computed together in one step, up to 4096; 0 (default): 64 on
        the CPU, 256 on a GPU.
    max_prefill_tokens: the most prompt tokens in one step, of all requests together; 0 (default): 512 on the
        CPU, 2048 on a GPU. Longer prompts are computed in pieces.
    max_swap_bytes: the most bytes of host memory for the keys and values of preempted requests; 0 (default): on
        a GPU an eighth of the available memory, 4 GiB at most, on the CPU none.
    prefix_cache: whether requests share the keys and values of common prefixes. Default True.
    deterministic: whether the output of a request depends on the request alone, to the last bit, as on the CPU it
        always does but with quantised weights in a bf16 model on a processor with AMX or AMD's AVX-512 BF16. It
        costs speed. Default False.
    random_weights: make up the weights, of which only config.json is read: to time a shape without its files.
        Default False.
    progress: called with the fraction of the load, from 0 to 1; may return False to cancel it. What it raises
        cancels it as well, and is raised here.
    log: called with a level ("warning", "info" or "debug"), the part of the library ("load", "scheduler",
        "device") and a line of text; later also on a thread of the model's, until close() has returned. There
        it must be quick, as requests wait for it.

    `info` is the ModelInfo. Ctrl-C ends a load. Raises NotFoundError, FileError, InvalidArgumentError (an
    option; a path that is no folder), InvalidFileError, UnsupportedError (by name), OutOfMemoryError,
    NoDeviceError and CancelledError, which are all Errors.
    """

    _instead = "share it between threads as it is, and load it again in another process"

    def __init__(
        self,
        path: Path,
        *,
        device: Device = "auto",
        device_index: int = 0,
        dtype: Dtype = "auto",
        weights: Weights = "as stored",
        weights_group_size: int = 0,
        embeddings: Embeddings = "as stored",
        kv_cache_format: KvCacheFormat = "as computed",
        activations: Activations = "as computed",
        kept_weights: Optional[Path] = None,
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
        self._closer: Optional[_process.Closer] = None
        flags = dict(
            map_files=map_files, prefix_cache=prefix_cache, deterministic=deterministic, random_weights=random_weights
        )
        numbers = dict(
            device_index=device_index, num_threads=num_threads, max_context_tokens=max_context_tokens,
            kv_cache_tokens=kv_cache_tokens, max_memory_bytes=max_memory_bytes, max_batch_size=max_batch_size,
            max_prefill_tokens=max_prefill_tokens, max_swap_bytes=max_swap_bytes,
            weights_group_size=weights_group_size,
        )  # fmt: skip
        options = _load_options(
            device, dtype, weights, embeddings, kv_cache_format, activations, flags, numbers, kept_weights
        )  # fmt: skip

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
        handle = c_void_p()
        if log is not None:
            # With what it needs: at the end of the program nothing else may have it.
            self._closer = _process.Closer(partial(_free, handle, options.log))
        self.handle = handle

        def load() -> None:
            check(library.xserv_load(encoded_path, byref(options), byref(handle)))

        try:
            _run_interruptibly("xserv-load", load, interrupted.set, calls_python=True)
        except BaseException as error:
            self.close()
            # An exception of a callback is the reason why the load was cancelled.
            raise raised[0] if raised and isinstance(error, Error) else error
        loaded.set()
        if raised:
            self.close()
            raise raised[0]
        self.info: ModelInfo = self._get_info()

    def _live_handle(self) -> int:
        """The handle, for a call of the library."""
        handle = self.handle
        if handle is None or handle.value is None:
            raise closed("model")
        return handle.value

    def __repr__(self) -> str:
        info = self.info
        if self.handle is None:
            return f"<xserv.Model {info.path!r}, closed>"
        millions = info.num_parameters / 1e6
        size = f"{millions:.1f} M" if millions < 1000 else f"{millions / 1000:.1f} B"
        return f"<xserv.Model {info.path!r}: {info.architecture}, {size} parameters, {info.dtype}, {info.device}>"

    def close(self) -> None:
        """Frees the model; a second call does nothing. Calls and streams that still run, in whatever thread, end as
        cancelled: a stream then ends as if it were over, and its result's finish_reason is "cancelled". Later calls
        raise ClosedError; Results and Logits stay valid. A model with a log is closed at the end of the program."""
        handle, self.handle = self.handle, None
        if self._closer is not None:
            self._closer.close()
        elif handle is not None:
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
        """Returns the token ids of a text of at most 16 MiB.

        add_special_tokens: add the special tokens that the tokenizer adds around a text (Qwen and GPT-2: none;
            Llama and Mistral: the one that begins a text, unless the text begins with it).
        parse_special_tokens: turn special tokens written in the text, such as <|im_end|>, into their ids. False
            treats them as ordinary text: use it for text that you do not trust.

        Raises InvalidArgumentError, UnsupportedError (the model has no usable tokenizer) and ClosedError.
        """
        options = c.TokenizeOptions()
        library.xserv_tokenize_options_init(byref(options), sizeof(options))
        options.add_special_tokens, options.parse_special_tokens = add_special_tokens, parse_special_tokens
        data = text.encode()
        handle = c_void_p()
        check(library.xserv_tokenize(self._live_handle(), data, len(data), byref(options), byref(handle)))
        return _take_tokens(handle)

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Bytes that are not UTF-8 become U+FFFD.

        skip_special_tokens: leave special tokens such as <|im_end|> out.

        Raises InvalidArgumentError (an id at or above ModelInfo.vocab_size) and ClosedError.
        """
        handle = c_void_p()
        ids = token_array(tokens)
        check(library.xserv_detokenize(self._live_handle(), ids, len(ids), skip_special_tokens, byref(handle)))
        return _take_text(handle)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Optional[Tools] = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders a conversation with the model's own chat template, as Transformers does.

        messages: a list of {"role": ..., "content": ...}, or the same as JSON.
        tools: a list of tool descriptions, or the same as JSON.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: further keywords are variables of the template, such as enable_thinking=False.

        Raises InvalidArgumentError, TemplateError (the template failed or refused the messages),
        UnsupportedError (the model has no usable template) and ClosedError.
        """
        options = _chat_options(messages, tools, add_generation_prompt, variables)
        handle = c_void_p()
        check(library.xserv_apply_chat_template(self._live_handle(), byref(options), byref(handle)))
        return _take_text(handle)

    def tokenize_chat(
        self,
        messages: Messages,
        tools: Optional[Tools] = None,
        *,
        add_generation_prompt: bool = True,
        parse_special_in_messages: bool = False,
        **variables: Any,
    ) -> List[int]:
        """Returns the token ids of a conversation, as generate(messages=...) has them; to count them, for example.

        parse_special_in_messages: turn special tokens written in messages and tools into their ids, as Transformers
            does. Else they are ordinary text. The other arguments and errors are those of apply_chat_template().
        """
        options = _chat_options(messages, tools, add_generation_prompt, variables)
        options.parse_special_in_messages = parse_special_in_messages
        handle = c_void_p()
        check(library.xserv_tokenize_chat(self._live_handle(), byref(options), byref(handle)))
        return _take_tokens(handle)

    def parse_response(
        self,
        text: str,
        *,
        prompt: Optional[str] = None,
        tools: Optional[Tools] = None,
        answer_format: str = "auto",
    ) -> Answer:
        """Takes a text apart that the model has generated, as generate() does: for programs that have only the text.
        What is no call of a tool is content; no text is an error.

        prompt: the prompt that the text goes on with, or the end of it, which says whether it begins in a thought.
        tools: for the types of parameters, where calls do not tell them.
        answer_format: as in GenerateOptions, but not "none".
        """
        return _parse_response(self._live_handle(), text, prompt, tools, answer_format)

    def logits(self, tokens: Sequence[int], *, last_only: bool = False) -> Logits:
        """Returns the scores, before softmax, of the token that follows each of `tokens`:
        [len(tokens)][vocab_size] in float32, or [1][vocab_size] with last_only, for the token that follows the
        last one.

        Ctrl-C ends the call. Raises InvalidArgumentError (no token, or an id outside the vocabulary),
        ContextFullError, OutOfMemoryError, CancelledError (the model was closed meanwhile) and ClosedError.
        """
        ids = token_array(tokens)
        handle = self._live_handle()
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
            check(library.xserv_logits(handle, ids, len(ids), byref(options), values, len(values)))

        try:
            # So that Ctrl-C ends it.
            _run_interruptibly("xserv-logits", compute, lambda: library.xserv_cancel_token_cancel(cancel))
        finally:
            library.xserv_cancel_token_free(cancel)
        return logits

    def score(
        self,
        prompt: Union[str, Sequence[int]],
        continuations: Sequence[Union[str, Sequence[int]]],
        *,
        cache_key: int = 0,
    ) -> List[Score]:
        """Returns how likely the model holds each of the continuations of a prompt: a Score for each, in their order.

        prompt: a text, tokenized as by tokenize(), or token ids. There must be at least one token.
        continuations: texts or token ids, in any mixture. A text after a text is tokenized together with the prompt,
            as evaluation harnesses do: the tokens of tokenize(prompt + continuation) are scored from where they
            part from those of tokenize(prompt). So where the continuation changes the last tokens of the prompt
            (a blank at the end of a prompt becomes part of the next word), those that take their place are scored
            too. A text after token ids is tokenized by itself, without the special tokens that begin a text, and
            token ids are taken as they are.
        cache_key: keys and values of common prefixes are shared only with calls and requests of the same number.

        The continuations are computed together, in steps that they share with the texts of other threads. The
        prompt's keys and values may come from the prefix cache: with many continuations most of it is computed
        once. With the prompt, a continuation may be as long as the context (ModelInfo.max_context_tokens).

        Ctrl-C ends the call. Raises InvalidArgumentError (no token before the continuation, or an id outside the
        vocabulary), ContextFullError, OutOfMemoryError, UnsupportedError (a text, and the model has no usable
        tokenizer), CancelledError (the model was closed meanwhile) and ClosedError.
        """
        if isinstance(continuations, (str, bytes)):
            kind = type(continuations).__name__
            raise TypeError(f"continuations must be a sequence of texts or token ids, not a {kind}")
        given = self.tokenize(prompt) if isinstance(prompt, str) else list(token_array(prompt, "the prompt"))
        texts: List[Tuple[Any, int]] = []
        for number, continuation in enumerate(continuations):
            num_given = len(given)
            if not isinstance(continuation, str):
                ids = given + list(token_array(continuation, f"continuation {number}"))
            elif isinstance(prompt, str):
                ids = self.tokenize(prompt + continuation)
                num_given = len(os.path.commonprefix([given, ids]))
            else:
                ids = given + self.tokenize(continuation, add_special_tokens=False)
            if num_given == 0:
                raise invalid_argument(
                    f"continuation {number} has no token before it: the prompt must begin with one that stays as it is"
                )
            texts.append((token_array(ids), num_given))
        found = self._score_all(texts, cache_key)
        return [_score_from(ids[num_given:], scores) for (ids, num_given), scores in zip(texts, found)]

    def perplexity(self, text: Union[str, Sequence[int]], *, stride: Optional[int] = None) -> float:
        """Returns the perplexity of a text, or of token ids: exp of minus the mean log-probability of all its tokens
        but the first, which has none before it.

        stride: a text that is longer than the context (ModelInfo.max_context_tokens) is computed in windows as long as
            the context, of which each begins `stride` tokens after the one before and scores the tokens that are new in
            it, as Transformers' guide to perplexity does. Fewer give each token more text before it, and take
            longer. From 1 to one less than the context; None (the default) stands for half of it.

        Ctrl-C ends the call. Raises InvalidArgumentError (fewer than two tokens, an id outside the vocabulary, or a
        stride out of range) and what else score() raises.
        """
        ids = token_array(self.tokenize(text) if isinstance(text, str) else text, "text")
        window = self.info.max_context_tokens
        if stride is None:
            stride = max(window // 2, 1)
        if not 1 <= stride < window:
            raise invalid_argument(f"stride is {stride}, but must be from 1 to {window - 1}")
        if len(ids) < 2:
            raise invalid_argument(f"a perplexity needs at least 2 tokens, but the text has {len(ids)}")
        texts: List[Tuple[Any, int]] = []
        begin, end = 0, 1
        while end < len(ids):
            # Each window scores the tokens that no window before it had.
            num_given, end = end - begin, min(begin + window, len(ids))
            texts.append((token_array(ids[begin:end]), num_given))
            begin += stride
        logprobs = [score.log_prob for scores in self._score_all(texts, 0) for score in scores]
        try:
            return math.exp(-math.fsum(logprobs) / len(logprobs))
        except OverflowError:
            return math.inf

    def _score_all(self, texts: Sequence[Tuple[Any, int]], cache_key: int) -> List[Any]:
        """The scores of each of the texts, arrays of ids, from the index on that stands beside it."""
        handle = self._live_handle()
        options = c.ScoreOptions()
        library.xserv_score_options_init(byref(options), sizeof(options))
        set_number(options, "cache_key", cache_key)
        all_scores = [(c.TokenScore * (len(ids) - num_given))() for ids, num_given in texts]
        cancel = c_void_p()
        check(library.xserv_cancel_token_new(byref(cancel)))
        options.cancel = cancel

        waiting = deque(zip(texts, all_scores))
        errors: List[BaseException] = []

        def score_some() -> None:
            try:
                while waiting and not errors:
                    (ids, num_given), scores = waiting.popleft()
                    check(library.xserv_score(handle, ids, len(ids), num_given, byref(options), scores, len(scores)))
            except IndexError:
                pass  # another thread took the last one
            except BaseException as error:
                errors.append(error)
                library.xserv_cancel_token_cancel(cancel)

        def compute() -> None:
            # Calls at the same time share steps.
            threads: List[threading.Thread] = []
            try:
                for _ in texts[1:_SCORED_AT_ONCE]:
                    thread = threading.Thread(target=score_some)
                    thread.start()
                    threads.append(thread)
            except RuntimeError:
                pass  # there is no room for more, and fewer do as well
            score_some()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]

        try:
            # So that Ctrl-C ends it.
            _run_interruptibly("xserv-score", compute, lambda: library.xserv_cancel_token_cancel(cancel))
        finally:
            library.xserv_cancel_token_free(cancel)
        return all_scores

    @overload
    def generate(
        self, prompt: Optional[str] = None, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: Optional[str] = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> TextStream: ...
    @overload
    def generate(
        self, prompt: Optional[str] = None, *, stream: bool, **options: Unpack[GenerateOptions]
    ) -> Union[Result, TextStream]: ...
    def generate(
        self, prompt: Optional[str] = None, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Union[Result, TextStream]:
        """Generates from exactly one of a prompt (the text to be continued), tokens and messages.

        Returns a Result; with stream=True at once a TextStream, an iterator over the pieces of text whose
        `result` is set when it has ended. Any number of threads may call it; Ctrl-C ends it. A prompt that does
        not leave room for max_tokens is no error: generation then ends with "context_full".

        Raises InvalidArgumentError (the sentence names the option), ContextFullError (the prompt alone is too
        long), TemplateError, UnsupportedError, OutOfMemoryError and ClosedError; with stream=True, what the
        library refuses is raised to whoever reads the stream.
        """
        request, _ = build_request(prompt, options)
        if stream:
            refuse_processor(request)
        running = TextStream(self, self._live_handle(), request, want_events=stream)
        return running if stream else running.wait()

    def generate_async(
        self,
        prompt: Optional[str] = None,
        *,
        stream: Union[bool, Literal["answers"]] = True,
        **options: Unpack[GenerateOptions],
    ) -> AsyncTextStream:
        """Generates for asyncio: `async for piece in stream`, or `await stream.wait()` for the Result. With
        stream=False there is only the Result: no pieces, for which the event loop would be woken. With
        stream="answers" there are the parts of the answer and the ends of samples, for batches() or events() with
        answers=True, and no tokens and pieces.

        The request begins with this call, which returns at once. A text of up to 4096 bytes is tokenized here;
        a longer one on a thread of the loop's default executor, together with the requests for the same model
        that come after it meanwhile, in their order. So is the form of an answer (response_format, regex, grammar,
        choice) compiled, for which no other request waits. What the library refuses is raised here, or where another
        thread is at work to the task that reads the stream. Errors and options are those of generate().
        """
        request, text_bytes = build_request(prompt, options)
        refuse_processor(request)
        if stream not in (True, False, "answers"):
            raise ValueError(f'stream is {stream!r}; it can be True, False or "answers"')
        events: Events = "answers" if stream == "answers" else "all" if stream else "ends"
        return AsyncTextStream(self, self._live_handle(), request, text_bytes, events)

    def stats(self) -> ModelStats:
        """Returns the state of the model's requests. The call is cheap; any thread may make it at any time."""
        stats = c.ModelStats(struct_size=sizeof(c.ModelStats))
        check(library.xserv_model_get_stats(self._live_handle(), byref(stats)))
        return _dataclass_from(ModelStats, stats)


show_options(Model.generate)
show_options(Model.generate_async)
