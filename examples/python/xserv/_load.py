"""Loads models: what the keywords of Model() and plan() are, and xserv_load_options of include/xserv.h in ctypes. A
keyword that is a number or a switch goes to the field of its name; _load_options() does the rest by hand."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_float,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Literal, Mapping, Optional, Tuple, Type, TypeVar, Union

from . import _library as c
from ._errors import Error, NotCopyable, closed
from ._library import DEVICES, DTYPES, LOG_LEVELS, check, library
from ._process import Closer, run_interruptibly
from ._request import choice, set_number, without_nul

Path = Union[str, "os.PathLike[str]"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "f32", "f16", "bf16"]
Weights = Literal["as stored", "int8", "int4"]
Embeddings = Literal["as stored", "int8"]
KvCacheFormat = Literal["as computed", "fp8"]
Activations = Literal["as computed", "int8", "unquantised"]
_T = TypeVar("_T")

#: The keywords that are words: the field of each, and the numbers of its words.
_CHOICES: Mapping[str, Tuple[str, Mapping[str, int]]] = {
    "device": ("device_kind", DEVICES),
    "dtype": ("dtype", DTYPES),
    "weights": ("weights", {"as stored": 0, "int8": 1, "int4": 2}),
    "embeddings": ("embeddings", {"as stored": 0, "int8": 1}),
    "kv_cache_format": ("kv_cache_format", {"as computed": 0, "fp8": 1}),
    "activations": ("activations", {"as computed": 0, "int8": 1, "unquantised": 2}),
}

_DEVICE_NAMES = {number: name for name, number in DEVICES.items()}
_DTYPE_NAMES = {number: name for name, number in DTYPES.items()}

# Callbacks return C's bool. Each catches its exceptions, because ctypes would return garbage.
ProgressCallback = CFUNCTYPE(c_bool, c_float, c_void_p)
LogCallback = CFUNCTYPE(None, c_uint32, c_char_p, c_char_p, c_void_p)


class LoadOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device_kind", c_uint32),
        ("device_index", c_uint32),
        ("dtype", c_uint32),
        ("num_threads", c_uint32),
        ("max_context_tokens", c_uint64),
        ("kv_cache_tokens", c_uint64),
        ("max_memory_bytes", c_uint64),
        ("max_swap_bytes", c_uint64),
        ("max_prefill_tokens", c_uint64),
        ("max_batch_size", c_uint32),
        ("prefix_cache", c_uint8),
        ("deterministic", c_uint8),
        ("map_files", c_uint8),
        ("random_weights", c_uint8),
        ("progress", ProgressCallback),
        ("progress_user_data", c_void_p),
        ("log", LogCallback),
        ("log_user_data", c_void_p),
        ("weights", c_uint32),
        ("weights_group_size", c_uint32),
        ("embeddings", c_uint32),
        ("kv_cache_format", c_uint32),
        ("kept_weights", c_char_p),
        ("activations", c_uint32),
        ("reserved", c_uint32),
    ]


# Declared here, as this module imports _library.py, whose table thus cannot name the struct.
library.xserv_load_options_init.argtypes = [POINTER(LoadOptions), c_size_t]
library.xserv_load_options_init.restype = None
library.xserv_load.restype = c_uint32
library.xserv_load.argtypes = [c_char_p, POINTER(LoadOptions), POINTER(c_void_p)]
library.xserv_plan.restype = c_uint32
library.xserv_plan.argtypes = [c_char_p, POINTER(LoadOptions), POINTER(c.MemoryPlan)]


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


def dataclass_from(kind: Type[_T], info: Structure) -> _T:
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


def path_bytes(path: Path) -> bytes:
    return without_nul(os.fsencode(path), "a path")


def _load_options(**given: Any) -> LoadOptions:
    options = LoadOptions()
    library.xserv_load_options_init(byref(options), sizeof(options))
    for name, value in given.items():
        if name in _CHOICES:
            field, numbers = _CHOICES[name]
            setattr(options, field, choice(numbers, value, name))
        elif name == "kept_weights":
            options.kept_weights = None if value is None else path_bytes(value)
        else:
            set_number(options, name, value)
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
    options = _load_options(
        device=device, device_index=device_index, dtype=dtype, weights=weights, weights_group_size=weights_group_size,
        embeddings=embeddings, kv_cache_format=kv_cache_format, activations=activations, kept_weights=kept_weights,
        num_threads=num_threads, max_context_tokens=max_context_tokens, kv_cache_tokens=kv_cache_tokens,
        max_memory_bytes=max_memory_bytes, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens,
        deterministic=deterministic, random_weights=random_weights,
    )  # fmt: skip
    found = c.MemoryPlan(struct_size=sizeof(c.MemoryPlan))
    check(library.xserv_plan(path_bytes(path), byref(options), byref(found)))
    return dataclass_from(MemoryPlan, found)


def _free(handle: c_void_p, log_callback: Any) -> None:
    """Frees a model that calls `log_callback` until then."""
    library.xserv_model_free(handle)


class LoadedModel(NotCopyable):
    # The documentation of Model, which is what users see.
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
        Norms, biases and the routers of experts stay as stored.
    weights_group_size: the inputs that share a scale in weights quantised at load, a multiple of 32; 0 (default):
        32 with "int4", 128 with "int8".
    embeddings: what the embedding and the output matrix are kept as, whatever weights says of the layers: "as stored"
        (default), or "int8", with a scale for every 128 inputs.
    kv_cache_format: what the KV cache stores: "as computed" (default), numbers of dtype, or "fp8", floats of 8 bits
        (torch.float8_e4m3fn, without a scale), which take half the memory of bf16, so that there is room for twice
        as many tokens.
    activations: what products with quantised weights take their activations as. "as computed" (default): where the
        config of a folder with FP8 weights quantises activations to FP8, in FP8 with a scale for each token and 128
        inputs; where it quantises them to integers of 8 bits, and weights are such integers with a scale for each row
        (W8A8), steps of more than 256 tokens on Hopper take them so. "unquantised": never, which is nearer to the
        numbers that the weights stand for, and on a GPU takes longer with many tokens. Weights of 4 and 8 bits
        (integers) take them on the CPU as integers of 16 bits, or with "int8" of 8 bits: prompts are faster then, and
        results less exact. In steps of many tokens of a bf16 model that is not deterministic, a processor with AMX or
        AMD's AVX-512 BF16 may take them in bf16 instead; with "int8" only AMX does, in groups of fewer than 64.
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
        self._closer: Optional[Closer] = None
        options = _load_options(
            device=device, device_index=device_index, dtype=dtype, weights=weights,
            weights_group_size=weights_group_size, embeddings=embeddings, kv_cache_format=kv_cache_format,
            activations=activations, kept_weights=kept_weights, num_threads=num_threads, map_files=map_files,
            max_context_tokens=max_context_tokens, kv_cache_tokens=kv_cache_tokens, max_memory_bytes=max_memory_bytes,
            max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens, max_swap_bytes=max_swap_bytes,
            prefix_cache=prefix_cache, deterministic=deterministic, random_weights=random_weights,
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
                    log(LOG_LEVELS.get(level, str(level)), target.decode(), message.decode())
            except BaseException as error:
                if loaded.is_set():
                    raise  # ctypes tells sys.unraisablehook
                raised.append(error)

        options.progress = ProgressCallback(on_progress)
        if log is not None:
            options.log = LogCallback(on_log)
        self._log_callback = options.log  # called until the model is closed
        encoded_path = path_bytes(path)
        handle = c_void_p()
        if log is not None:
            # With what it needs: at the end of the program nothing else may have it.
            self._closer = Closer(partial(_free, handle, options.log))
        self.handle = handle

        def load() -> None:
            check(library.xserv_load(encoded_path, byref(options), byref(handle)))

        try:
            run_interruptibly("xserv-load", load, interrupted.set, calls_python=True)
        except BaseException as error:
            self._release()
            # An exception of a callback is the reason why the load was cancelled.
            raise raised[0] if raised and isinstance(error, Error) else error
        loaded.set()
        if raised:
            self._release()
            raise raised[0]
        self.info: ModelInfo = self._get_info()

    def _live_handle(self) -> int:
        """The handle, for a call of the library."""
        handle = self.handle
        if handle is None or handle.value is None:
            raise closed("model")
        return handle.value

    def _release(self) -> None:
        """Frees the model; a second call does nothing."""
        handle, self.handle = self.handle, None
        if self._closer is not None:
            self._closer.close()
        elif handle is not None:
            library.xserv_model_free(handle)

    def _get_info(self) -> ModelInfo:
        info = c.ModelInfo(struct_size=sizeof(c.ModelInfo))
        check(library.xserv_model_get_info(self.handle, byref(info)))
        return dataclass_from(ModelInfo, info)
