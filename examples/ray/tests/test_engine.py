"""A replica's exchange with its application, and its health, without Ray around them."""

import asyncio

import pytest
from conftest import NEVER
from xserv_ray.engine import MAX_WAITING_BYTES, Engine
from xserv_ray.forwarded import Forwarded, Head

REQUEST = Forwarded("POST", "/path", b"a=b", [(b"x-own", b"1")], b"body")
START = {"type": "http.response.start", "status": 201, "headers": [(b"x-their", b"2")]}


def body(data, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


class Replica(Engine):
    """A replica whose application cannot be ended in good order, and has no need of it."""

    def __del__(self):
        pass


def engine(app=None, model=None):
    """A replica around an application and a model of the test's own."""
    made = Replica.__new__(Replica)
    made._app, made._exchanges, made._is_suspect = app, set(), False
    if model is not None:
        made._model = model
    return made


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, NEVER))


def test_the_application_gets_the_request_as_it_was():
    seen = []

    async def app(scope, receive, send):
        seen.extend([scope, await receive()])
        await send(START)
        await send(body(b"whole", more=False))

    async def ask():
        return [part async for part in engine(app).answer(REQUEST)]

    # A whole answer is one part.
    assert run(ask()) == [Head(201, [(b"x-their", b"2")], b"whole")]
    scope, message = seen
    assert (scope["method"], scope["path"], scope["query_string"], scope["headers"]) == (
        "POST", "/path", b"a=b", [(b"x-own", b"1")],
    )  # fmt: skip
    assert message == {"type": "http.request", "body": b"body", "more_body": False}


def test_parts_come_as_they_are_made_and_together_if_they_are_there():
    goes_on = asyncio.Event()

    async def app(scope, receive, send):
        await send(START)
        await send(body(b"1"))
        await goes_on.wait()
        await send(body(b"2"))
        await send(body(b"3"))
        await send(body(b"", more=False))

    async def ask():
        parts = engine(app).answer(REQUEST)
        assert (await parts.__anext__()).body == b"1"
        goes_on.set()
        return [part async for part in parts]

    assert run(ask()) == [b"23"]


def test_who_takes_nothing_is_waited_for():
    sent = []

    async def app(scope, receive, send):
        await send(START)
        for number in range(8):
            await send(body(b"x" * (MAX_WAITING_BYTES // 2)))
            sent.append(number)
        await send(body(b"", more=False))

    async def ask():
        parts = engine(app).answer(REQUEST)
        size = len((await parts.__anext__()).body)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(sent) < 8
        async for part in parts:
            size += len(part)
        return size

    assert run(ask()) == 4 * MAX_WAITING_BYTES


def test_the_application_learns_who_has_left():
    ended = []

    async def app(scope, receive, send):
        await receive()
        await send(START)
        # It sends more than is taken, and is not held up by that once nobody is there.
        await send(body(b"x" * (MAX_WAITING_BYTES + 1)))
        await send(body(b"x" * (MAX_WAITING_BYTES + 1)))
        ended.append(await receive())

    async def ask():
        replica = engine(app)
        parts = replica.answer(REQUEST)
        await parts.__anext__()
        await parts.aclose()
        while replica._exchanges:
            await asyncio.sleep(0)

    run(ask())
    assert ended == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_application_that_fails_is_no_end_of_an_answer(has_begun):
    async def app(scope, receive, send):
        if has_begun:
            await send(START)
            await send(body(b"1"))
        raise LookupError("a bug")

    async def ask():
        return [part async for part in engine(app).answer(REQUEST)]

    with pytest.raises(LookupError if has_begun else RuntimeError):
        run(ask())


class FailingModel:
    """A model whose next generations fail so."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    async def generate_async(self, **options):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


def test_a_lost_device_fails_the_health_check():
    import xserv

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send(body(b'{"error":{"code":"unavailable"}}', more=False))

    async def check(*errors):
        model = FailingModel(*errors)
        replica = engine(app, model)
        await replica.check_health()
        assert model.calls == 0
        async for _ in replica.answer(REQUEST):
            pass
        await replica.check_health()
        return replica, model

    # Memory that was short is there again, or not; the replica stays.
    for errors in ((), (xserv.OutOfMemoryError("no memory", 7, "XSERV_STATUS_OUT_OF_MEMORY"),)):
        replica, model = run(check(*errors))
        assert model.calls == 1
        run(replica.check_health())
        assert model.calls == 1
    with pytest.raises(xserv.DeviceLostError):
        run(check(xserv.DeviceLostError("the device is lost", 14, "XSERV_STATUS_DEVICE_LOST")))
