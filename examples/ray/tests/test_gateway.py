"""The gateway alone, with replicas that do as they are told."""

import asyncio
import json

import httpx
import pytest
from conftest import NEVER
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from xserv_ray.forwarded import Head
from xserv_ray.gateway import MAX_TRIES, gateway_app, merged_metrics

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
GONE = ActorDiedError()
WAITS = object()


class Parts:
    """The script of one attempt: parts of an answer, and exceptions where it fails."""

    def __init__(self, script):
        self.script, self.is_cancelled = list(script), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.script:
            raise StopAsyncIteration
        part = self.script.pop(0)
        if part is WAITS:
            await asyncio.sleep(NEVER)
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self):
        self.is_cancelled = True


class Engines:
    """A handle, each call of which is an attempt."""

    def __init__(self, *scripts):
        self.attempts = [Parts(script) for script in scripts]
        self.calls = []

    def options(self, **_):
        return self

    def remote(self, forwarded):
        self.calls.append(forwarded)
        return self.attempts[len(self.calls) - 1]


def ask(engines, seconds=NEVER, body=b'{"prompt":"a"}', limit=1000):
    async def run():
        transport = httpx.ASGITransport(gateway_app(engines, limit, (), seconds))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions?a=b", content=body, headers={"x-own": "1"})

    return asyncio.run(run())


def test_all_of_a_request_and_of_an_answer_is_passed_on():
    engines = Engines([Head(201, [*JSON, (b"x-their", b"2")], b"1"), b"2", b"3"])
    answer = ask(engines)
    assert (answer.status_code, answer.text, answer.headers["x-their"]) == (201, "123", "2")
    (forwarded,) = engines.calls
    assert (forwarded.method, forwarded.path, forwarded.query) == ("POST", "/v1/completions", b"a=b")
    assert forwarded.body == b'{"prompt":"a"}' and forwarded.key and (b"x-own", b"1") in forwarded.headers


@pytest.mark.parametrize("failure", [GONE, ActorUnavailableError("gone", None), Head(503, JSON, b"{}")], ids=str)
def test_what_has_not_begun_goes_elsewhere(failure):
    engines = Engines([failure], [failure], [Head(200, STREAM, b"data: 1\n\n"), b"data: [DONE]\n\n"])
    answer = ask(engines)
    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
    assert len(engines.calls) == 3
    # The same object each time: the router has written on it where it was.
    assert all(call is engines.calls[0] for call in engines.calls)


def test_it_is_given_up_at_last():
    engines = Engines(*[[GONE]] * MAX_TRIES)
    answer = ask(engines)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert len(engines.calls) == MAX_TRIES
    # An answer of the replica's own is better than that.
    engines = Engines(*[[Head(503, JSON, b"mine")]] * MAX_TRIES)
    assert (ask(engines).text, len(engines.calls)) == ("mine", MAX_TRIES)


def test_a_stream_that_has_begun_is_told():
    engines = Engines([Head(200, STREAM, b"data: 1\n\n"), b"data: 2\n\n", GONE])
    events = ask(engines).text.split("\n\n")
    assert events[:2] == ["data: 1", "data: 2"] and events[3:] == ["data: [DONE]", ""]
    assert json.loads(events[2][6:])["error"]["code"] == "replica_lost"
    assert len(engines.calls) == 1


def test_an_answer_that_is_no_stream_begins_when_all_of_it_is_here():
    # Also if the replica is lost after the last part, and before it says that this was the last.
    engines = Engines([Head(200, JSON, b"["), GONE], [Head(200, JSON, b"["), b"1]", GONE], [Head(200, JSON, b"["), b"2]"])
    assert (ask(engines).text, len(engines.calls)) == ("[2]", 3)


def test_what_fails_in_an_answer_that_is_no_stream_is_told():
    engines = Engines([Head(200, JSON, b"["), RayServeException("a bug")])
    answer = ask(engines)
    assert (answer.status_code, len(engines.calls)) == (500, 1)
    assert answer.json()["error"]["message"] == "the server has failed"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), 429, "rate_limit_exceeded"),
        (DeploymentUnavailableError("Engine"), 503, "unavailable"),
        (RayServeException("a bug"), 500, None),
    ],
    ids=str,
)
def test_what_another_replica_would_not_mend(failure, status, code):
    engines = Engines([failure])
    answer = ask(engines)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "bug" not in answer.text and len(engines.calls) == 1


def test_it_does_not_wait_for_ever():
    engines = Engines([WAITS])
    answer = ask(engines, seconds=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert engines.attempts[0].is_cancelled


def test_a_body_that_is_too_long_reaches_nobody():
    engines = Engines()
    answer = ask(engines, body=b" " * 1001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert engines.calls == []


def test_a_client_that_leaves_stops_the_attempt():
    async def run(script, has_begun):
        engines, sent = Engines(script), []
        gateway, messages = gateway_app(engines, 1000, (), NEVER), [{"type": "http.request", "body": b""}]

        async def receive():
            if messages:
                return messages.pop()
            while not engines.calls or (has_begun and not sent):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": [], "root_path": ""}
        await asyncio.wait_for(gateway(scope, receive, send), NEVER)
        assert engines.attempts[0].is_cancelled and bool(sent) == has_begun

    asyncio.run(run([WAITS], has_begun=False))
    asyncio.run(run([Head(200, STREAM, b"data: 1\n\n"), WAITS], has_begun=True))


def test_metrics_are_one_text():
    text = '# HELP a_total All.\n# TYPE a_total counter\na_total{path="/"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    merged = merged_metrics([("x", text), ("y", text)]).decode().splitlines()
    assert merged == [
        "# HELP a_total All.",
        "# TYPE a_total counter",
        'a_total{path="/",replica="x"} 1.0',
        'a_total{path="/",replica="y"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{replica="x"} 2.0',
        'b{replica="y"} 2.0',
    ]
