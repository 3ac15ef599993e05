"""The command xserv-server, and its options for programs that serve the application themselves."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import xserv

from .app import create_app
from .auth import read_keys
from .connection import ConnectionLimits
from .limits import LOOPBACK_HOSTS
from .server import make_server
from .settings import Settings

_KEYS_VARIABLE = "XSERV_API_KEY"


def _number_from(low: float, kind: Any) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value < 1e9:
            raise argparse.ArgumentTypeError(f"{text} must be at least {low:g}")
        return value

    return read


_count, _size, _seconds = _number_from(1, int), _number_from(0, int), _number_from(0, float)


def options_parser() -> argparse.ArgumentParser:
    """Reads the options of the command."""
    parser = argparse.ArgumentParser(
        prog="xserv-server", description="Serves a model over HTTP, as OpenAI's interface has it."
    )
    parser.add_argument("model", help="a folder, or a repo id that is in the local Hugging Face cache")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at; this machine alone by default")
    parser.add_argument("--port", type=_size, default=8000, help="0 chooses one, which is printed (default: 8000)")
    parser.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="the model's name in requests; may be repeated"
    )
    keys = parser.add_argument_group("who may ask", f"Keys are read from {_KEYS_VARIABLE} too, separated by commas.")
    keys.add_argument("--api-key", action="append", metavar="KEY", default=[], help="may be repeated")
    keys.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line, after a name if it has one")
    keys.add_argument("--cors-origin", action="append", metavar="ORIGIN", default=[], help="a web page that may ask")
    keys.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        default=[],
        help="a name of this server for the Host header, or * for any; on a loopback address localhost by default",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body-bytes", type=_count, default=8 << 20, help="of a request (default: 8 MiB)")
    limits.add_argument("--max-running", type=_count, default=256, help="samples in the library at once (default: 256)")
    limits.add_argument("--max-queued", type=_size, default=1024, help="requests that wait; others get 429 (default: 1024)")
    limits.add_argument("--max-connections", type=_count, default=4096, help="(default: 4096)")
    limits.add_argument("--request-seconds", type=_seconds, default=600.0, help="of a request; 0: no limit (default: 600)")
    limits.add_argument("--head-seconds", type=_seconds, default=10.0, help="for a request's headers (default: 10)")
    limits.add_argument("--body-seconds", type=_seconds, default=60.0, help="for a request's body (default: 60)")
    limits.add_argument(
        "--stall-seconds", type=_seconds, default=30.0, help="that a client may take nothing of an answer (default: 30)"
    )
    limits.add_argument("--grace", type=_seconds, default=30.0, help="seconds for answers that run, after SIGTERM (default: 30)")
    load = parser.add_argument_group("the model")
    load.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    load.add_argument("--device-index", type=_size, default=0)
    load.add_argument("--dtype", choices=("auto", "f32", "f16", "bf16"), default="auto")
    load.add_argument("--weights", choices=("as stored", "int8", "int4"), default="as stored")
    load.add_argument(
        "--weights-group-size", type=_size, default=0,
        help="inputs that share a scale; 0: 32 with int4, 128 with int8",
    )  # fmt: skip
    load.add_argument("--embeddings", choices=("as stored", "int8"), default="as stored")
    load.add_argument(
        "--kv-cache-format", choices=("as computed", "fp8"), default="as computed",
        help="what keys and values are stored as: with fp8 there is room for twice as many tokens as with bf16",
    )  # fmt: skip
    load.add_argument(
        "--activations", choices=("as computed", "int8", "unquantised"), default="as computed",
        help="what products with quantised weights take activations as: with int8, prompts of int4 and int8 weights are "
        "faster on the CPU; unquantised: not in 8 bits, even where the config says so",
    )  # fmt: skip
    load.add_argument("--kept-weights", metavar="FILE", help="keep what is quantised there, for later starts")
    for name, what in (
        ("num-threads", "threads of the CPU's kernels"),
        ("max-context-tokens", "the longest context of a request"),
        ("kv-cache-tokens", "tokens in the KV cache, of all requests"),
        ("max-batch-size", "sequences in a step"),
        ("max-prefill-tokens", "prompt tokens in a step"),
    ):
        load.add_argument(f"--{name}", type=_size, default=0, help=f"{what}; 0: the library's choice")
    load.add_argument("--max-memory-bytes", type=int, default=0, help="for weights, work space and KV cache")
    load.add_argument(
        "--max-swap-bytes", type=_size, default=0,
        help="of host memory, for requests that make room; 0: the library's choice, 1: none",
    )  # fmt: skip
    load.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", help="compute every prompt whole")
    load.add_argument("--deterministic", action="store_true", help="the same answers on a GPU to the last bit")
    load.add_argument("--random-weights", action="store_true", help="make the weights up, to time a shape")
    parser.add_argument("--no-page", action="store_true", help="serve no page at /")
    parser.add_argument("--no-request-log", action="store_true", help="print no line of JSON for each request")
    return parser


def _keys(arguments: argparse.Namespace) -> Dict[str, str]:
    keys: Dict[str, str] = {}
    if arguments.api_key_file is not None:
        keys.update(read_keys(arguments.api_key_file))
    given = [*arguments.api_key, *os.environ.get(_KEYS_VARIABLE, "").split(",")]
    for key in filter(None, (each.strip() for each in given)):
        keys.setdefault(key, f"key {len(keys) + 1}")
    return keys


def allowed_hosts_of(arguments: argparse.Namespace) -> List[str]:
    """The names by which requests may call the server; empty: any."""
    names: List[str] = arguments.allowed_host
    if "*" in names:
        return []
    is_loopback = arguments.host.startswith("127.") or arguments.host in ("localhost", "::1")
    return [*LOOPBACK_HOSTS, arguments.host, *names] if is_loopback else names


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the options ask for. Raises ValueError or OSError for keys that cannot be read."""
    name = Path(arguments.model).name if os.path.isdir(arguments.model) else arguments.model
    return Settings(
        model_names=arguments.served_model_name or [name or "model"],
        api_keys=_keys(arguments),
        cors_origins=arguments.cors_origin,
        allowed_hosts=allowed_hosts_of(arguments),
        max_body_bytes=arguments.max_body_bytes,
        max_running=arguments.max_running,
        max_queued=arguments.max_queued,
        request_seconds=arguments.request_seconds,
        page=None if arguments.no_page else Settings.page,
        log_requests=not arguments.no_request_log,
    )


def load_options_of(arguments: argparse.Namespace) -> Dict[str, Any]:
    """The options of xserv.Model that the options ask for."""
    names = (
        "device", "device_index", "dtype", "weights", "weights_group_size", "embeddings", "kept_weights",
        "kv_cache_format", "activations", "num_threads", "max_context_tokens", "kv_cache_tokens", "max_batch_size",
        "max_prefill_tokens", "max_memory_bytes", "max_swap_bytes", "prefix_cache", "deterministic", "random_weights",
    )  # fmt: skip
    return {name: getattr(arguments, name) for name in names}


def _collect_rarely() -> None:
    """Leaves what there is for good out of Python's garbage collections, and lets them wait for more garbage: requests
    leave next to none."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def main(argv: Optional[List[str]] = None) -> int:
    """Runs the command, and returns its exit status."""
    arguments = options_parser().parse_args(argv)
    try:
        settings = settings_of(arguments)
        with xserv.Model(arguments.model, **load_options_of(arguments)) as model:
            limits = ConnectionLimits(
                arguments.head_seconds, arguments.body_seconds, arguments.stall_seconds, arguments.max_connections
            )
            app = create_app(model, settings)
            server = make_server(app, app.state.server, arguments.host, arguments.port, arguments.grace, limits)
            _collect_rarely()
            # uvicorn raises the signal that has ended it once more, when all is done.
            for ending in (signal.SIGTERM, signal.SIGINT):
                signal.signal(ending, lambda *_: None)
            server.run()
            return 0 if server.started else 1
    except (xserv.Error, ValueError, OSError) as error:
        print(f"xserv-server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
