"""Model, Logits, Score, and inspect()."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections import deque
from ctypes import byref, c_float, c_size_t, c_void_p, sizeof, string_at
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
    overload,
)

from . import _library as c
from ._async import AsyncTextStream
from ._errors import invalid_argument
from ._library import check, library
from ._load import LoadedModel, Path, dataclass_from, path_bytes
from ._options import GenerateOptions, Messages, Tools
from ._process import run_interruptibly
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


def inspect(path: Path) -> Inspection:
    """Describes a model folder (or repo id in the local Hugging Face cache) without loading it: reads the
    configs, the tokenizer and the headers of the weight files. (Only weights that are declared the same and
    stored twice are compared.) A folder that cannot be loaded is not an error: `supported` is then False and
    `unsupported_reason` says why.

    Raises NotFoundError (there is no such folder or cached repo), InvalidArgumentError (the path is no folder),
    FileError and OutOfMemoryError. Any thread may call it.
    """
    handle = c_void_p()
    check(library.xserv_inspect(path_bytes(path), byref(handle)))
    try:
        info = c.InspectionInfo(struct_size=sizeof(c.InspectionInfo))
        check(library.xserv_inspection_get_info(handle, byref(info)))
        return dataclass_from(Inspection, info)
    finally:
        library.xserv_inspection_free(handle)


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


class Model(LoadedModel):
    __doc__ = LoadedModel.__doc__  # help() looks for it here

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
        self._release()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.close()

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
            run_interruptibly("xserv-logits", compute, lambda: library.xserv_cancel_token_cancel(cancel))
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
            run_interruptibly("xserv-score", compute, lambda: library.xserv_cancel_token_cancel(cancel))
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
        return dataclass_from(ModelStats, stats)


show_options(Model.generate)
show_options(Model.generate_async)
