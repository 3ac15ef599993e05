"""Declares the C functions of libxserv.so: include/xserv.h in ctypes."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Callable, Type

from ._errors import error_of
from ._find import load
from ._options import Request

ABI_VERSION = 1
UNSET_INT = 0xFFFFFFFF
UNSET_FLOAT = -3.402823466e38
SEED_RANDOM = 0xFFFFFFFFFFFFFFFF
NO_TOKEN = 0xFFFFFFFF
LOGITS_LAST, LOGITS_ALL = 0, 1
DEVICES = {"cpu": 0, "cuda": 1, "auto": 2}
DTYPES = {"auto": 0, "f32": 1, "f16": 2, "bf16": 3}
LOG_LEVELS = {1: "warning", 2: "info", 3: "debug"}
FINISH_REASONS = {
    0: "stop_token",
    1: "stop_string",
    2: "max_tokens",
    3: "context_full",
    4: "callback",
    5: "cancelled",
    6: "deadline",
    7: "complete",
}
(
    CONSTRAINT_NONE,
    CONSTRAINT_JSON_SCHEMA,
    CONSTRAINT_JSON_OBJECT,
    CONSTRAINT_REGEX,
    CONSTRAINT_GRAMMAR,
    CONSTRAINT_CHOICE,
) = range(6)
EVENT_NONE, EVENT_TOKEN, EVENT_TEXT, EVENT_END, EVENT_DONE, EVENT_PROMPT = range(6)
#: The kinds that tell the parts of an answer, by their names here.
ANSWER_EVENTS = {
    6: "reasoning",
    7: "content",
    8: "tool_call_begin",
    9: "tool_call_arguments",
    10: "tool_call_end",
}
#: Those of them that tell of a call.
CALL_EVENTS = frozenset((8, 9, 10))
ANSWER_FORMATS = {
    "none": 0,
    "auto": 1,
    "thinking": 2,
    "json_tags": 3,
    "xml_tags": 4,
    "bare_json": 5,
    "marked_json": 6,
}
TOOL_CHOICES = {"auto": 0, "none": 1, "required": 2}
TOOL_CHOICE_NAMED = 3
WAIT_FOREVER = 0xFFFFFFFF
STEP_BUCKETS = 20


class ModelInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("architecture", c_char_p),
        ("path", c_char_p),
        ("device", c_char_p),
        ("device_kind", c_uint32),
        ("device_index", c_uint32),
        ("dtype", c_uint32),
        ("num_threads", c_uint32),
        ("num_parameters", c_uint64),
        ("weights_bytes", c_uint64),
        ("kv_bytes_per_token", c_uint64),
        ("kv_cache_tokens", c_uint64),
        ("max_context_tokens", c_uint64),
        ("vocab_size", c_uint32),
        ("hidden_size", c_uint32),
        ("num_layers", c_uint32),
        ("num_heads", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("num_eos_token_ids", c_uint32),
        ("has_tokenizer", c_uint8),
        ("has_chat_template", c_uint8),
        ("reserved", c_uint8 * 2),
        ("eos_token_ids", POINTER(c_uint32)),
        ("load_seconds", c_double),
        ("workspace_bytes", c_uint64),
    ]


class InspectionInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("path", c_char_p),
        ("architecture", c_char_p),
        ("unsupported_reason", c_char_p),
        ("tokenizer_problem", c_char_p),
        ("chat_template_problem", c_char_p),
        ("stored_dtypes", c_char_p),
        ("num_parameters", c_uint64),
        ("weights_bytes", c_uint64),
        ("kv_bytes_per_token", c_uint64),
        ("max_context_tokens", c_uint64),
        ("dtype", c_uint32),
        ("vocab_size", c_uint32),
        ("hidden_size", c_uint32),
        ("num_layers", c_uint32),
        ("num_heads", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("supported", c_uint8),
        ("has_tokenizer", c_uint8),
        ("has_chat_template", c_uint8),
        ("reserved", c_uint8),
    ]


class MemoryPlan(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device_kind", c_uint32),
        ("device_index", c_uint32),
        ("dtype", c_uint32),
        ("fits", c_uint8),
        ("has_tokenizer", c_uint8),
        ("reserved", c_uint8 * 2),
        ("weights_bytes", c_uint64),
        ("workspace_bytes", c_uint64),
        ("kv_bytes_per_token", c_uint64),
        ("kv_cache_tokens", c_uint64),
        ("max_context_tokens", c_uint64),
        ("total_bytes", c_uint64),
        ("minimum_bytes", c_uint64),
        ("memory_bytes", c_uint64),
    ]


class LogitsOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("rows", c_uint32), ("reserved", c_uint32), ("cancel", c_void_p)]


class TokenScore(Structure):
    _fields_ = [("log_prob", c_float), ("is_likeliest", c_uint32)]


class ScoreOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("cancel", c_void_p), ("cache_key", c_uint64)]


class TokenizeOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("add_special_tokens", c_uint8),
        ("parse_special_tokens", c_uint8),
        ("reserved", c_uint8 * 6),
    ]


class ChatOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("messages_json", c_char_p),
        ("tools_json", c_char_p),
        ("template_variables_json", c_char_p),
        ("add_generation_prompt", c_uint8),
        ("parse_special_in_messages", c_uint8),
        ("reserved", c_uint8 * 6),
    ]


class LogProb(Structure):
    _fields_ = [("token_id", c_uint32), ("log_prob", c_float)]


class TokenEvent(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("text", c_void_p),
        ("text_len", c_size_t),
        ("token_id", c_uint32),
        ("num_tokens", c_uint32),
        ("sample", c_uint32),
        ("reserved", c_uint32),
    ]


class ToolCall(Structure):
    _fields_ = [
        ("id", c_char_p),
        ("name", c_char_p),
        ("arguments_json", c_void_p),
        ("arguments_len", c_size_t),
        ("is_complete", c_uint32),
        ("reserved", c_uint32),
    ]


class ParseOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("prompt", c_char_p),
        ("tools_json", c_char_p),
        ("answer_format", c_uint32),
        ("reserved", c_uint32),
    ]


class ResultInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("text", c_void_p),
        ("text_len", c_size_t),
        ("token_ids", POINTER(c_uint32)),
        ("num_tokens", c_size_t),
        ("num_prompt_tokens", c_size_t),
        ("finish_reason", c_uint32),
        ("reserved", c_uint32),
        ("seed", c_uint64),
        ("time_to_first_token_seconds", c_double),
        ("total_seconds", c_double),
        ("prompt_tokens_per_second", c_double),
        ("tokens_per_second", c_double),
        ("num_cached_tokens", c_size_t),
        ("num_preemptions", c_uint32),
        ("num_samples", c_uint32),
        ("log_probs", POINTER(c_float)),
        ("top_log_probs", POINTER(LogProb)),
        ("num_top_log_probs", c_size_t),
        ("prompt_tokens", POINTER(c_uint32)),
        ("prompt_log_probs", POINTER(c_float)),
        ("prompt_top_log_probs", POINTER(LogProb)),
        ("num_prompt_top_log_probs", c_size_t),
        ("reasoning", c_void_p),
        ("reasoning_len", c_size_t),
        ("content", c_void_p),
        ("content_len", c_size_t),
        ("tool_calls", POINTER(ToolCall)),
        ("num_tool_calls", c_size_t),
        ("message_json", c_char_p),
    ]


WakeCallback = CFUNCTYPE(None, c_void_p)


class SubmitOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("wake", WakeCallback),
        ("wake_user_data", c_void_p),
        ("wake_fd", c_int32),
        ("events", c_uint32),
    ]


class Event(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_uint32),
        ("sample", c_uint32),
        ("text", c_void_p),
        ("text_len", c_size_t),
        ("token_id", c_uint32),
        ("num_tokens", c_uint32),
        ("finish_reason", c_uint32),
        ("reserved", c_uint32),
        ("log_prob", c_float),
        ("num_top_log_probs", c_uint32),
        ("top_log_probs", POINTER(LogProb)),
        ("tool_call_id", c_char_p),
        ("tool_name", c_char_p),
        ("tool_call_index", c_uint32),
        ("tool_call_is_complete", c_uint32),
    ]


class ModelStats(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_running", c_uint64),
        ("num_waiting", c_uint64),
        ("num_preempted", c_uint64),
        ("total_submitted", c_uint64),
        ("total_ended", c_uint64),
        ("total_preemptions", c_uint64),
        ("total_steps", c_uint64),
        ("total_prompt_tokens", c_uint64),
        ("total_generated_tokens", c_uint64),
        ("total_looked_up_tokens", c_uint64),
        ("total_cached_tokens", c_uint64),
        ("cache_hit_rate", c_double),
        ("tokens_per_second", c_double),
        ("busy_seconds", c_double),
        ("num_kv_blocks", c_uint64),
        ("num_used_kv_blocks", c_uint64),
        ("num_cached_kv_blocks", c_uint64),
        ("peak_used_kv_blocks", c_uint64),
        ("peak_memory_bytes", c_uint64),
        ("step_counts", c_uint64 * STEP_BUCKETS),
        ("step_bucket_us", c_uint64 * STEP_BUCKETS),
        ("device_busy_seconds", c_double),
        ("device_idle_seconds", c_double),
        ("num_swap_blocks", c_uint64),
        ("num_used_swap_blocks", c_uint64),
        ("total_swapped_out_blocks", c_uint64),
        ("total_swapped_in_blocks", c_uint64),
    ]


TokenCallback = CFUNCTYPE(c_bool, POINTER(TokenEvent), c_void_p)

# Handles are c_void_p: numbers that only the library understands.
_SIZE = POINTER(c_size_t)
_HANDLE = POINTER(c_void_p)
_FUNCTIONS = {
    "xserv_version": (c_char_p, []),
    "xserv_abi_version": (c_uint32, []),
    "xserv_last_error": (c_char_p, []),
    "xserv_status_name": (c_char_p, [c_uint32]),
    "xserv_model_free": (None, [c_void_p]),
    "xserv_model_get_info": (c_uint32, [c_void_p, POINTER(ModelInfo)]),
    "xserv_inspect": (c_uint32, [c_char_p, _HANDLE]),
    "xserv_inspection_get_info": (c_uint32, [c_void_p, POINTER(InspectionInfo)]),
    "xserv_inspection_free": (None, [c_void_p]),
    "xserv_tokenize_options_init": (None, [POINTER(TokenizeOptions), c_size_t]),
    "xserv_tokenize": (c_uint32, [c_void_p, c_char_p, c_size_t, POINTER(TokenizeOptions), _HANDLE]),
    "xserv_tokens_data": (POINTER(c_uint32), [c_void_p, _SIZE]),
    "xserv_tokens_free": (None, [c_void_p]),
    "xserv_detokenize": (c_uint32, [c_void_p, POINTER(c_uint32), c_size_t, c_bool, _HANDLE]),
    "xserv_text_data": (c_void_p, [c_void_p, _SIZE]),
    "xserv_text_free": (None, [c_void_p]),
    "xserv_chat_options_init": (None, [POINTER(ChatOptions), c_size_t]),
    "xserv_apply_chat_template": (c_uint32, [c_void_p, POINTER(ChatOptions), _HANDLE]),
    "xserv_tokenize_chat": (c_uint32, [c_void_p, POINTER(ChatOptions), _HANDLE]),
    "xserv_logits_options_init": (None, [POINTER(LogitsOptions), c_size_t]),
    "xserv_logits": (c_uint32, [c_void_p, POINTER(c_uint32), c_size_t, POINTER(LogitsOptions), POINTER(c_float), c_size_t]),
    "xserv_score_options_init": (None, [POINTER(ScoreOptions), c_size_t]),
    "xserv_score": (
        c_uint32,
        [c_void_p, POINTER(c_uint32), c_size_t, c_size_t, POINTER(ScoreOptions), POINTER(TokenScore), c_size_t],
    ),
    "xserv_request_init": (None, [POINTER(Request), c_size_t]),
    "xserv_cancel_token_new": (c_uint32, [_HANDLE]),
    "xserv_cancel_token_cancel": (c_uint32, [c_void_p]),
    "xserv_cancel_token_free": (None, [c_void_p]),
    "xserv_generate": (c_uint32, [c_void_p, POINTER(Request), TokenCallback, c_void_p, _HANDLE]),
    "xserv_result_get_info": (c_uint32, [c_void_p, POINTER(ResultInfo)]),
    "xserv_result_get_sample": (c_uint32, [c_void_p, c_size_t, POINTER(ResultInfo)]),
    "xserv_result_free": (None, [c_void_p]),
    "xserv_parse_options_init": (None, [POINTER(ParseOptions), c_size_t]),
    "xserv_parse_response": (c_uint32, [c_void_p, c_char_p, c_size_t, POINTER(ParseOptions), _HANDLE]),
    "xserv_submit_options_init": (None, [POINTER(SubmitOptions), c_size_t]),
    "xserv_submit": (c_uint32, [c_void_p, POINTER(Request), POINTER(SubmitOptions), _HANDLE]),
    "xserv_next": (c_uint32, [c_void_p, c_uint32, POINTER(Event)]),
    "xserv_poll": (c_uint32, [c_void_p, POINTER(c_uint8)]),
    "xserv_cancel": (c_uint32, [c_void_p]),
    "xserv_submission_take_result": (c_uint32, [c_void_p, _HANDLE]),
    "xserv_submission_free": (None, [c_void_p]),
    "xserv_model_get_stats": (c_uint32, [c_void_p, POINTER(ModelStats)]),
}


library: ctypes.CDLL = load(ABI_VERSION, _FUNCTIONS)

# xserv_poll() and xserv_next() without a wait take less than a microsecond. Here they keep the interpreter's
# lock: to give it up and get it back takes milliseconds where another thread computes, and an event loop calls
# them for every stream.
_quick = ctypes.PyDLL(library._name, handle=library._handle)
poll = _quick.xserv_poll
poll.restype, poll.argtypes = c_uint32, [c_void_p, c_void_p]
next_event = _quick.xserv_next
next_event.restype, next_event.argtypes = c_uint32, [c_void_p, c_uint32, c_void_p]


def defaults(kind: Type[Structure], init: Callable[..., None]) -> bytes:
    """The bytes of a struct as the library's function fills it. A copy of them takes less than a call for each
    request, which would let other threads have the interpreter's lock."""
    made = kind()
    init(byref(made), sizeof(made))
    return bytes(made)


def check(code: int) -> None:
    """Raises the Error of a call that failed. Must run on the thread that made the call."""
    if code != 0:
        raise error_of(library.xserv_last_error().decode(), code, library.xserv_status_name(code).decode())
