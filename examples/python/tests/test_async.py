"""Tests of generation for asyncio: descriptors, event loops, order, ends."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import xserv
from xserv import _async
from test_xserv import LONG, MODEL

LONG_PROMPT = "Once upon a time " * 250  # longer than LONG_PROMPT_BYTES, shorter than the context
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
#: Nothing here takes as long; a test that hangs ends with this.
NEVER = 300


def num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def run(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, NEVER)

    return asyncio.run(limited())


def run_program(program):
    """Runs a Python program in a process of its own, and returns what it prints."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(xserv.__file__)))
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", program, MODEL]
    environment = dict(os.environ, PYTHONPATH=path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, env=environment, timeout=NEVER, **pipes)
    if done.returncode or done.stderr:
        raise AssertionError(f"exit status {done.returncode}: {done.stderr.decode()}")
    return done.stdout.decode()


class AsyncTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = xserv.Model(MODEL, num_threads=2)
        cls.expected = cls.model.generate("Once", **SHORT).text
        run(cls.model.generate_async("Once", **SHORT).wait())

    @classmethod
    def tearDownClass(cls):
        cls.model.close()

    def setUp(self):
        self.before = num_descriptors()

    def tearDown(self):
        self.assertEqual(num_descriptors(), self.before, "descriptors were not given back")
        deadline = time.monotonic() + NEVER
        while self.model.stats().num_running + self.model.stats().num_waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        self.assertEqual(self.model.stats().num_running, 0, "a request is still running")


class Readers(AsyncTest):
    def test_a_second_task_is_refused_and_the_first_goes_on(self):
        async def both():
            with xserv.Model(MODEL, max_batch_size=1) as model:
                # The model computes the other one until it is closed: the stream has no event before that.
                other = model.generate_async("Once", **LONG)
                stream = model.generate_async("Once", **SHORT)
                first = asyncio.ensure_future(stream.wait())
                await asyncio.sleep(0)
                with self.assertRaisesRegex(RuntimeError, "another task is reading this stream"):
                    await stream.__anext__()
                other.close()
                return await first

        self.assertEqual(run(both()).text, self.expected)

    def test_close_ends_the_wait_of_a_task(self):
        async def closed_by(close):
            with xserv.Model(MODEL, max_batch_size=1) as model:
                # The model computes the other one, which nobody reads: the event loop sleeps.
                other = model.generate_async("Once", **LONG)
                stream = model.generate_async("Once", **LONG)
                task = asyncio.ensure_future(stream.wait())
                await asyncio.sleep(0)
                close(stream)
                with self.assertRaisesRegex(ValueError, "closed before its end"):
                    await task
                self.assertEqual([piece async for piece in stream], [])
                self.assertIn("closed after", repr(stream))
                other.close()

        def in_a_thread(stream):
            threading.Timer(0.05, stream.close).start()  # while the loop sleeps

        real, threads = _async.AsyncTextStream._close, []

        def close_and_tell(stream):
            threads.append(threading.get_ident())
            real(stream)

        run(closed_by(lambda stream: stream.close()))
        with mock.patch.object(_async.AsyncTextStream, "_close", close_and_tell):
            run(closed_by(in_a_thread))
        self.assertEqual(set(threads), {threading.get_ident()}, "only there does it end the sleep of the loop")

    def test_a_stream_keeps_its_model(self):
        async def model_is_dropped():
            stream = xserv.Model(MODEL).generate_async("Once", **SHORT)
            gc.collect()
            return await stream  # as stream.wait()

        self.assertEqual(run(model_is_dropped()).finish_reason, "max_tokens")

    def test_closing_the_model_ends_the_wait_of_a_task(self):
        async def closed():
            model = xserv.Model(MODEL)
            stream = model.generate_async("Once", **LONG)
            task = asyncio.ensure_future(stream.wait())
            await asyncio.sleep(0)
            model.close()
            return await task

        self.assertEqual(run(closed()).finish_reason, "cancelled")

    def test_aclosing_and_cancellation_end_the_generation(self):
        async def left():
            stream = self.model.generate_async("Once", **LONG)
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(stream.aclose)
                await stream.__anext__()
            self.assertIsNone(stream.result)
            cancelled = self.model.generate_async("Once", **LONG)
            task = asyncio.ensure_future(cancelled.wait())
            await cancelled_after_a_piece(cancelled, task)

        async def cancelled_after_a_piece(stream, task):
            while not stream._num_pieces:
                await asyncio.sleep(0)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual([piece async for piece in stream], [])

        run(left())

    def test_a_reader_that_is_behind_lets_others_run(self):
        num_turns = 0

        async def others():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async def behind():
            ended = self.model.stats().total_ended
            stream = self.model.generate_async("Once", max_tokens=400, temperature=0, ignore_eos=True)
            while self.model.stats().total_ended == ended:
                time.sleep(0.001)  # all pieces wait for the reader
            task = asyncio.ensure_future(others())
            num_pieces = len([piece async for piece in stream])
            task.cancel()
            return num_pieces

        num_pieces = run(behind())
        self.assertGreater(num_pieces, 200)
        self.assertGreaterEqual(num_turns, num_pieces // _async.PIECES_AT_ONCE)


class Descriptors(AsyncTest):
    def test_streams_of_a_loop_share_one(self):
        async def many():
            before = num_descriptors()
            with xserv.Model(MODEL) as other:
                streams = [model.generate_async("Once", **SHORT) for model in (self.model, other) for _ in range(100)]
                self.assertEqual(num_descriptors(), before + 1)
                results = await asyncio.gather(*(stream.wait() for stream in streams))
            self.assertEqual({result.text for result in results}, {self.expected})
            self.assertEqual(num_descriptors(), before)

        run(many())

    def test_six_hundred_requests_with_few_descriptors(self):
        program = (
            "import asyncio, resource, sys, xserv\n"
            "model = xserv.Model(sys.argv[1])\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
            "async def all():\n"
            "    one = lambda: model.generate_async('Once', max_tokens=2, temperature=0, ignore_eos=True).wait()\n"
            "    return await asyncio.gather(*(one() for _ in range(600)))\n"
            "print({len(result.token_ids) for result in asyncio.run(all())})\n"
        )
        self.assertEqual(run_program(program).strip(), "{2}")

    def test_streams_that_are_dropped_unread(self):
        async def drop():
            for _ in range(3):
                self.model.generate_async("Once", **LONG)
            stream = self.model.generate_async("Once", **LONG)
            await stream.__anext__()

        run(drop())
        self.model.generate_async("Once", **LONG)

    def test_a_stream_that_outlives_its_loop(self):
        async def start():
            stream = self.model.generate_async("Once", **LONG)
            await stream.__anext__()
            return stream

        stream = run(start())

        async def go_on():
            with self.assertRaisesRegex(RuntimeError, "belongs to another event loop"):
                await stream.__anext__()

        run(go_on())
        stream.close()
        run(self.model.generate_async("Once", **SHORT).wait())

    def test_a_stream_that_another_thread_drops(self):
        async def drop():
            before = num_descriptors()
            streams = [self.model.generate_async("Once", **LONG)]
            thread = threading.Thread(target=streams.clear)
            thread.start()
            thread.join()
            while num_descriptors() > before:
                await asyncio.sleep(0)

        run(drop())

    def test_a_request_that_is_refused(self):
        async def refused():
            with self.assertRaises(xserv.InvalidArgumentError):
                self.model.generate_async("Once", stop=[""])
            # The reader learns it where the prompt is long.
            for prompt, options, error in (
                (LONG_PROMPT, {"stop": [""]}, xserv.InvalidArgumentError),
                (LONG_PROMPT * 8, {}, xserv.ContextFullError),
            ):
                stream = self.model.generate_async(prompt, **options)
                with self.assertRaises(error):
                    await stream.wait()
                self.assertEqual([piece async for piece in stream], [])

        with self.assertRaises(xserv.InvalidArgumentError):
            self.model.generate_async("Once", stop=[""])
        run(refused())

    def test_a_fork(self):
        """The child shares the parent's epoll descriptor, and must not take the parent's eventfd from it."""
        program = """
import asyncio, gc, os, sys, warnings, xserv
warnings.simplefilter("ignore")  # of forks where there are threads
model = xserv.Model(sys.argv[1])

def child():
    xserv.Model(sys.argv[1]).close()
    async def generate():
        own = xserv.Model(sys.argv[1])
        return await own.generate_async("Once", max_tokens=3, ignore_eos=True).wait()
    assert len(asyncio.run(generate()).token_ids) == 3

async def parent():
    streams = [model.generate_async("Once", max_tokens=200, ignore_eos=True) for _ in range(3)]
    tasks = [asyncio.ensure_future(stream.wait()) for stream in streams]
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            asyncio.events._set_running_loop(None)
            for stream in streams:
                stream.close()
            del streams, stream
            gc.collect()
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            assert not [link for link in links if os.path.exists(link) and "eventfd" in os.readlink(link)]
            child()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    return [len(result.token_ids) for result in await asyncio.wait_for(asyncio.gather(*tasks), 200)]

print(asyncio.run(parent()))
"""
        self.assertEqual(run_program(program).strip(), "[200, 200, 200]")


class Loops(AsyncTest):
    def test_one_after_another(self):
        for _ in range(3):
            self.assertEqual(run(self.model.generate_async("Once", **SHORT).wait()).text, self.expected)

    def test_a_stream_made_before_its_loop(self):
        stream = self.model.generate_async("Once", **SHORT)
        self.assertIn("running", repr(stream))
        self.assertEqual(run(stream.wait()).text, self.expected)
        self.assertIn("max_tokens after 4 tokens", repr(stream))

    def test_in_several_threads(self):
        texts = []

        async def several():
            streams = [self.model.generate_async("Once", **SHORT) for _ in range(10)]
            return [result.text for result in await asyncio.gather(*(stream.wait() for stream in streams))]

        threads = [threading.Thread(target=lambda: texts.extend(run(several()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(texts, [self.expected] * 40)

    def test_a_loop_that_is_closed_with_a_task_that_waits(self):
        loop = asyncio.new_event_loop()
        stream = self.model.generate_async("Once", **LONG)

        async def start():
            task = asyncio.ensure_future(stream.wait())
            task._log_destroy_pending = False
            await asyncio.sleep(0)

        loop.run_until_complete(start())
        loop.close()
        del stream, start

    def test_uvloop(self):
        try:
            import uvloop
        except ImportError:
            self.skipTest("uvloop is not installed")
        first = uvloop.new_event_loop()
        first.run_until_complete(asyncio.sleep(0))
        first.close()
        self.before = num_descriptors()  # it keeps a pipe for itself
        loop = uvloop.new_event_loop()

        async def several():
            long = self.model.generate_async(LONG_PROMPT, **SHORT)
            streams = [self.model.generate_async("Once", **SHORT) for _ in range(20)]
            await long.wait()
            return [result.text for result in await asyncio.gather(*(stream.wait() for stream in streams))]

        try:
            self.assertEqual(loop.run_until_complete(several()), [self.expected] * 20)
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


class FailingEnds(AsyncTest):
    """The result cannot be had, as when memory is short."""

    def test_the_last_events_are_given_before_the_failure(self):
        real = _async.library

        class Library:
            def __getattr__(self, name):
                return getattr(real, name)

            def xserv_submission_take_result(self, submission, result):
                return real.xserv_submission_take_result(None, result)

        async def read():
            stream = self.model.generate_async("Once", **SHORT)
            while self.model.stats().num_running + self.model.stats().num_waiting:
                await asyncio.sleep(0.01)
            found = []
            with self.assertRaises(xserv.Error):
                async for batch in stream.batches():
                    found += batch
            return found

        with mock.patch.object(_async, "library", Library()):
            found = run(read())
        self.assertEqual("".join(event.text for event in found), self.expected)


class LongPrompts(AsyncTest):
    """They are tokenized on another thread."""

    def submitted(self, before_submit=lambda: None):
        """Records on which thread the library is given each request, after a call of before_submit()."""
        real, calls = _async.library, []

        class Library:
            def __getattr__(self, name):
                return getattr(real, name)

            def xserv_submit(self, model, request, options, submission):
                before_submit()
                calls.append((request._obj.max_tokens, threading.get_ident()))
                return real.xserv_submit(model, request, options, submission)

        patch = mock.patch.object(_async, "library", Library())
        patch.start()
        self.addCleanup(patch.stop)
        return calls

    def test_the_thread_and_the_order(self):
        calls = self.submitted()

        async def in_order():
            prompts = ["Once", LONG_PROMPT, "Once", LONG_PROMPT, "Once"]
            options = [dict(SHORT, max_tokens=4 + i) for i in range(5)]
            streams = [self.model.generate_async(prompt, **given) for prompt, given in zip(prompts, options)]
            results = await asyncio.gather(*(stream.wait() for stream in streams))
            await self.model.generate_async("Once", **dict(SHORT, max_tokens=9)).wait()
            return [result.token_ids for result in results]

        found = run(in_order())
        expected = self.model.generate("Once", **dict(SHORT, max_tokens=8)).token_ids
        self.assertEqual([found[0], found[2], found[4]], [expected[:4], expected[:6], expected])
        self.assertEqual(found[3], self.model.generate(LONG_PROMPT, **dict(SHORT, max_tokens=7)).token_ids)
        here = threading.get_ident()
        self.assertEqual([(number, ident == here) for number, ident in calls],
                         [(4, True), (5, False), (6, False), (7, False), (8, False), (9, True)])

    def test_messages_count_as_text(self):
        calls = self.submitted()

        async def answer():
            messages = [{"role": "user", "content": LONG_PROMPT}]
            return await self.model.generate_async(messages=messages, **SHORT).wait()

        self.assertEqual(len(run(answer()).token_ids), 4)
        self.assertNotEqual(calls[0][1], threading.get_ident())

    def test_cancelled_while_it_is_tokenized(self):
        """Also where others come after it: each stays in its place, and none is lost."""
        for leave in ("cancel", "close", "drop"):
            with self.subTest(leave):
                is_there, may_go_on = threading.Event(), threading.Event()

                def stop_the_first():
                    if threading.get_ident() != here and not is_there.is_set():
                        is_there.set()
                        may_go_on.wait(NEVER)

                here = threading.get_ident()
                self.submitted(stop_the_first)

                async def left():
                    streams = [self.model.generate_async(LONG_PROMPT, **LONG)]
                    task = asyncio.ensure_future(streams[0].wait())
                    after = self.model.generate_async("Once", **SHORT)
                    forgotten = self.model.generate_async("Once", **LONG)
                    while not is_there.is_set():
                        await asyncio.sleep(0)
                    if leave == "close":
                        streams[0].close()
                        with self.assertRaises(ValueError):
                            await task
                    else:
                        task.cancel()
                        with self.assertRaises(asyncio.CancelledError):
                            await task
                    if leave == "drop":
                        del task
                        streams.clear()
                    forgotten.close()
                    may_go_on.set()
                    return (await after.wait()).text

                self.assertEqual(run(left()), self.expected)
                mock.patch.stopall()

    def test_the_loop_ends_while_it_is_tokenized(self):
        is_there, may_go_on = threading.Event(), threading.Event()

        def stop():
            is_there.set()
            may_go_on.wait(NEVER)

        self.submitted(stop)
        before = self.model.stats()
        loop = asyncio.new_event_loop()

        async def start():
            stream = self.model.generate_async(LONG_PROMPT, **LONG)
            while not is_there.is_set():
                await asyncio.sleep(0)
            return stream

        streams = [loop.run_until_complete(start())]
        streams.clear()
        loop.close()
        # The library is about to be told the descriptor: it must not become another file's.
        self.assertEqual(num_descriptors(), self.before + 1)
        may_go_on.set()
        deadline = time.monotonic() + NEVER
        while time.monotonic() < deadline:
            stats = self.model.stats()
            if stats.total_submitted == stats.total_ended > before.total_ended and num_descriptors() == self.before:
                break
            time.sleep(0.001)
        self.assertLess(stats.total_generated_tokens, before.total_generated_tokens + 200, "it was not cancelled")


class Counting(unittest.TestCase):
    def test_who_was_passed_over_is_found_when_another_leaves(self):
        """The eventfd counts the submissions that have events, so that not all are asked. One may have been found
        before it was counted, and be freed then, so that it never is: another one was passed over for it."""

        async def count():
            loop = asyncio.get_running_loop()
            wakeups = _async.Wakeups(loop)
            members = [mock.Mock(), mock.Mock()]
            for member in members:
                self.assertTrue(wakeups.join(member))
            early = wakeups._running[1] = loop.create_future()
            passed_over = wakeups._queued[2] = loop.create_future()
            idle = wakeups._queued[3] = loop.create_future()
            with mock.patch.object(_async, "poll", lambda handle, address: handle < 3):
                os.write(wakeups.fd, (1).to_bytes(8, sys.byteorder))
                await early
                await asyncio.sleep(0)
                self.assertFalse(passed_over.done())
                wakeups.leave(members[0])
                await passed_over
                self.assertFalse(idle.done())
            wakeups.leave(members[1])
            self.assertEqual(wakeups.fd, -1)

        run(count())

    def test_none_is_asked_if_as_many_are_counted_as_wait(self):
        async def count():
            loop = asyncio.get_running_loop()
            wakeups = _async.Wakeups(loop)
            member = mock.Mock()
            wakeups.join(member)
            waiting = wakeups._running[1], wakeups._queued[2] = loop.create_future(), loop.create_future()
            with mock.patch.object(_async, "poll", mock.Mock(side_effect=AssertionError)):
                os.write(wakeups.fd, (2).to_bytes(8, sys.byteorder))
                await asyncio.gather(*waiting)
            self.assertEqual((wakeups._running, wakeups._queued), ({}, {}))
            wakeups.leave(member)

        run(count())

    def test_an_event_that_came_while_nobody_waited(self):
        """The reader of a stream saw that it had no further events, and did something else when one came, so that its
        wake-up woke nobody."""
        with xserv.Model(MODEL, num_threads=2) as model:

            async def read():
                stream = model.generate_async("Once", max_tokens=600, ignore_eos=True)
                count = 0
                async for batch in stream.batches():
                    count += len(batch)
                    await asyncio.sleep(0.002)  # the loop reads the descriptor meanwhile
                return count

            self.assertGreater(run(read()), 600)


if __name__ == "__main__":
    unittest.main()
