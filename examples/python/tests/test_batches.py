"""Tests of generation for servers: events in lists, results without events, forms that take long to compile."""

import asyncio
import dataclasses
import threading
import time
import unittest
from unittest import mock

import xserv
from test_async import LONG_PROMPT, NEVER, SHORT, AsyncTest, run
from xserv import _async


class Batches(AsyncTest):
    """Lists of events, for servers."""

    MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
    TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]

    def test_they_are_the_events(self):
        options = dict(messages=self.MESSAGES, tools=self.TOOLS, max_tokens=60, temperature=0, num_samples=2, logprobs=1)

        async def both():
            one_by_one = self.model.generate_async(**options)
            events = [event async for event in one_by_one.events(answers=True)]
            stream = self.model.generate_async(**options)
            batches = [batch async for batch in stream.batches(answers=True)]
            self.assertEqual(stream.result.text, one_by_one.result.text)
            return events, batches

        def without_ids(events):
            return [dataclasses.replace(event, id=None) if hasattr(event, "id") else event for event in events]

        def of_sample(events, sample):
            return [event for event in without_ids(events) if event.sample == sample]

        events, batches = run(both())
        self.assertTrue(all(1 <= len(batch) <= _async.PIECES_AT_ONCE for batch in batches))
        flat = [event for batch in batches for event in batch]
        for sample in range(2):
            self.assertEqual(of_sample(flat, sample), of_sample(events, sample))
        self.assertIn("tool_call_arguments", [event.kind for event in flat if isinstance(event, xserv.AnswerEvent)])

    def test_without_tokens(self):
        async def collect():
            stream = self.model.generate_async(messages=self.MESSAGES, max_tokens=20, temperature=0)
            return [event async for batch in stream.batches(answers=True, tokens=False) for event in batch], stream

        events, stream = run(collect())
        content = [event.text for event in events if isinstance(event, xserv.AnswerEvent)]
        self.assertEqual("".join(content), stream.result.content)
        ends = [event for event in events if not isinstance(event, xserv.AnswerEvent)]
        self.assertEqual([end.finish_reason for end in ends], [stream.result.finish_reason])

    def test_the_answer_alone(self):
        options = dict(messages=self.MESSAGES, max_tokens=20, temperature=0, num_samples=2)

        async def collect(stream):
            made = self.model.generate_async(stream=stream, **options)
            batches = [batch async for batch in made.batches(answers=True, tokens=stream == "answers")]
            return [event for batch in batches for event in batch], made.result

        alone, result = run(collect("answers"))
        among_others, expected = run(collect(True))
        self.assertEqual(result.text, expected.text)
        for sample in range(2):
            own = [[event for event in events if event.sample == sample] for events in (alone, among_others)]
            self.assertEqual(*own)
            self.assertTrue(all(event.finish_reason for event in own[0] if isinstance(event, xserv.TokenEvent)))
        with self.assertRaisesRegex(ValueError, "stream is 'parts'"):
            self.model.generate_async("Once", stream="parts")

    def test_the_result_comes_with_the_last_events(self):
        async def collect():
            stream = self.model.generate_async("Once", max_tokens=40, ignore_eos=True)
            states = [(batch[-1].finish_reason, stream.result) async for batch in stream.batches()]
            return states, stream.result

        states, result = run(collect())
        self.assertIsNotNone(result)
        for reason, known in states[:-1]:
            self.assertEqual((reason, known), (None, None))
        self.assertEqual(states[-1][0], "max_tokens")

    def test_what_is_there_comes_at_once(self):
        async def collect():
            ended = self.model.stats().total_ended
            stream = self.model.generate_async("Once", max_tokens=100, ignore_eos=True)
            while self.model.stats().total_ended == ended:
                time.sleep(0.01)  # the loop stands still, and the model goes on
            return [batch async for batch in stream.batches()]

        batches = run(collect())
        tokens = [event for batch in batches for event in batch if event.token_id is not None]
        self.assertEqual(len(tokens), 100)
        self.assertEqual([len(batch) for batch in batches[:3]], [_async.PIECES_AT_ONCE] * 3)

    def test_errors_and_cancellation(self):
        async def cancelled():
            stream = self.model.generate_async("Once", max_tokens=1500, ignore_eos=True)
            async for _ in stream.batches():
                stream.close()
            self.assertIsNone(stream.result)

        run(cancelled())
        with self.assertRaises(xserv.ContextFullError):
            run(anext_of(self.model, "Once upon a time " * 2000))

    def test_a_result_alone(self):
        async def collect():
            stream = self.model.generate_async("Once", stream=False, num_samples=2, **SHORT)
            self.assertEqual([piece async for piece in stream], [])
            return stream.result

        result = run(collect())
        self.assertEqual([sample.text for sample in result.samples], [self.expected] * 2)


async def anext_of(model, prompt):
    async for batch in model.generate_async(prompt, max_tokens=1).batches():
        return batch


class Forms(AsyncTest):
    def test_others_do_not_wait_while_one_is_compiled(self):
        real, compiling, others_are_done = _async.library, threading.Event(), threading.Event()

        class Library:
            def __getattr__(self, name):
                return getattr(real, name)

            def xserv_submit(self, model, request, options, submission):
                if request._obj.constraint_kind:
                    compiling.set()
                    others_are_done.wait(NEVER)
                return real.xserv_submit(model, request, options, submission)

        async def ask():
            formed = self.model.generate_async("Once", choice=["yes", "no"])
            while not compiling.is_set():
                await asyncio.sleep(0.01)
            for prompt in ("Once", LONG_PROMPT):
                await self.model.generate_async(prompt, **SHORT).wait()
            others_are_done.set()
            return await formed.wait()

        with mock.patch.object(_async, "library", Library()):
            self.assertIn(run(ask()).text, ("yes", "no"))

    def test_what_is_refused_is_raised_to_the_reader(self):
        async def ask():
            stream = self.model.generate_async("Once", regex="((")
            with self.assertRaises(xserv.InvalidArgumentError):
                await stream.wait()

        run(ask())


if __name__ == "__main__":
    unittest.main()
