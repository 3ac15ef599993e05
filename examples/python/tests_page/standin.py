"""A server for the tests of the page: it speaks OpenAI's protocol, and answers as a test has written it down."""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

PAGE = Path(__file__).resolve().parents[1] / "xserv_server" / "page.html"
CONTEXT = 4096


def policy_of(html: str) -> str:
    """The Content-Security-Policy of the page: its own scripts and styles, its own server, and nothing else."""

    def digests(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in found)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Answer(NamedTuple):
    """The server's answer to a message."""

    deltas: List[Dict[str, Any]]
    #: Seconds before each delta.
    pause: float = 0.0
    finish: Optional[str] = "stop"
    #: In the place of an answer: a status and the error's fields.
    status: int = 200
    error: Optional[Dict[str, Any]] = None
    headers: Dict[str, str] = {}


def said(text: str, size: int = 4, **options: Any) -> Answer:
    """An answer of this text, in pieces."""
    return Answer([{"content": text[at : at + size]} for at in range(0, len(text), size)], **options)


class StandIn:
    """The server, on a port of its own. `answers` has an Answer for each message; other messages are repeated."""

    def __init__(self) -> None:
        self.answers: Dict[str, Answer] = {}
        self.requests: List[Dict[str, Any]] = []
        self.paths: List[str] = []
        self.api_key: Optional[str] = None
        self.num_left = 0
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                stand_in.paths.append(self.path)
                if self.path == "/":
                    html = PAGE.read_text(encoding="utf-8")
                    headers = {"content-security-policy": policy_of(html), "content-type": "text/html; charset=utf-8"}
                    self.whole(200, html.encode(), headers)
                elif self.path == "/health":
                    self.json(200, {"status": "ok"})
                elif self.path == "/v1/models" and self.may():
                    model = {"id": "stand-in", "object": "model", "max_model_len": CONTEXT}
                    self.json(200, {"object": "list", "data": [model]})
                elif self.path != "/v1/models":
                    self.json(404, {"error": {"message": "there is nothing at this path"}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if not self.may():
                    return
                stand_in.requests.append(body)
                message = body["messages"][-1]["content"]
                answer = stand_in.answers.get(message) or said(message)
                if answer.error is not None:
                    self.json(answer.status, {"error": answer.error}, answer.headers)
                    return
                try:
                    self.stream(answer)
                except (BrokenPipeError, ConnectionResetError):
                    stand_in.num_left += 1
                self.close_connection = True

            def may(self) -> bool:
                if stand_in.api_key in (None, (self.headers["authorization"] or "").partition(" ")[2]):
                    return True
                self.json(401, {"error": {"message": "the key is wrong", "code": "invalid_api_key"}})
                return False

            def stream(self, answer: Answer) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                for delta in answer.deltas:
                    time.sleep(answer.pause)
                    if "error" in delta:
                        self.event(delta)
                    else:
                        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                if answer.finish is None:
                    return
                self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
                generated = len(answer.deltas)
                usage = {"prompt_tokens": 20, "completion_tokens": generated, "total_tokens": 20 + generated}
                self.event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 16}}})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, content: Dict[str, Any]) -> None:
                data = f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
                # In two parts, which need not end where a character does.
                half = len(data) // 2
                self.wfile.write(data[:half])
                self.wfile.flush()
                self.wfile.write(data[half:])
                self.wfile.flush()

            def json(self, status: int, content: Dict[str, Any], headers: Dict[str, str] = {}) -> None:
                self.whole(status, json.dumps(content).encode(), {"content-type": "application/json", **headers})

            def whole(self, status: int, data: bytes, headers: Dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
