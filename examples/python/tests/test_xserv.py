"""Tests of the package, with the model of the repository:

    cd examples/python && python3 -m unittest discover tests
"""

import asyncio
import copy
import dataclasses
import functools
import gc
import inspect
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xserv
from xserv import ops

MODEL = os.environ.get("XSERV_TEST_MODEL") or str(Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3")
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
LONG = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def num_generating():
    return sum(thread.name == "xserv-generate" for thread in threading.enumerate())


class ModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = xserv.Model(MODEL, num_threads=2)

    @classmethod
    def tearDownClass(cls):
        cls.model.close()

    def tearDown(self):
        gc.collect()
        deadline = time.monotonic() + 60
        while num_generating() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(num_generating(), 0, "a generation is still running")


class Async(ModelTest):
    def test_many_at_once_are_what_they_are_alone(self):
        options = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
        prompts = ["Once upon a time", "Hello", "The cat", "One day", "A boat"]
        alone = [self.model.generate(prompt, **options) for prompt in prompts]

        async def stream(prompt):
            pieces = []
            async with self.model.generate_async(prompt, **options) as running:
                async for piece in running:
                    pieces.append(piece)
            self.assertEqual("".join(pieces), running.result.text)
            return running.result.token_ids

        async def everything():
            return await asyncio.gather(*(stream(prompt) for prompt in prompts))

        self.assertEqual(asyncio.run(everything()), [result.token_ids for result in alone])
        self.assertGreater(self.model.stats().total_generated_tokens, 0)

    def test_a_cancelled_task_ends_its_generation(self):
        async def first_piece_then_cancel():
            running = self.model.generate_async("Once", **LONG)
            await running.__anext__()
            task = asyncio.ensure_future(running.wait())
            await asyncio.sleep(0)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            running.close()
            self.assertIsNone(running.result)

        asyncio.run(first_piece_then_cancel())
        with self.assertRaises(xserv.Error):
            self.model.generate_async("Once", max_tokens=3, stop=[""])
        limited = self.model.generate("Once", time_limit_ms=1, **LONG)
        self.assertEqual(limited.finish_reason, "deadline")


class Text(ModelTest):
    def test_round_trip(self):
        for text in ("", "Once upon a time", "naïve 你好 🙂\n\ttabs", "nul \0 inside"):
            self.assertEqual(self.model.detokenize(self.model.tokenize(text)), text)

    def test_special_tokens(self):
        (end,) = self.model.tokenize("<|im_end|>")
        self.assertIn(end, self.model.info.eos_token_ids)
        self.assertGreater(len(self.model.tokenize("<|im_end|>", parse_special_tokens=False)), 1)
        self.assertEqual(self.model.detokenize([end]), "")
        self.assertEqual(self.model.detokenize([end], skip_special_tokens=False), "<|im_end|>")

    def test_chat_template(self):
        text = self.model.apply_chat_template(MESSAGES)
        self.assertIn("<|im_start|>user\nTell me a story.<|im_end|>", text)
        self.assertEqual(text, self.model.apply_chat_template(json.dumps(MESSAGES)))
        shorter = self.model.apply_chat_template(MESSAGES, add_generation_prompt=False)
        self.assertTrue(text.startswith(shorter) and len(text) > len(shorter))
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
        self.assertIn("look_up", self.model.apply_chat_template(MESSAGES, tools))


class Generate(ModelTest):
    def test_prompt_tokens_and_stream_agree(self):
        options = {"max_tokens": 24, "temperature": 0}
        result = self.model.generate("Once upon a time", **options)
        self.assertEqual(str(result), result.text)
        self.assertEqual(result.num_prompt_tokens, len(self.model.tokenize("Once upon a time")))
        self.assertIn(result.finish_reason, ("max_tokens", "stop_token"))
        tokens = self.model.tokenize("Once upon a time")
        self.assertEqual(self.model.generate(tokens=tokens, **options).token_ids, result.token_ids)
        stream = self.model.generate("Once upon a time", stream=True, **options)
        self.assertEqual("".join(stream), result.text)
        self.assertEqual(stream.result.token_ids, result.token_ids)
        self.assertEqual(list(stream), [])

    def test_messages(self):
        result = self.model.generate(messages=MESSAGES, max_tokens=200, temperature=0)
        self.assertTrue(result.text)
        prompt = self.model.apply_chat_template(MESSAGES)
        self.assertEqual(self.model.generate(prompt, max_tokens=200, temperature=0).text, result.text)

    def test_seed(self):
        def draw(seed):
            return self.model.generate("Once", max_tokens=30, temperature=1.5, top_k=0, top_p=1.0, seed=seed)

        first = draw(7)
        self.assertEqual(first.seed, 7)
        self.assertEqual(draw(7).token_ids, first.token_ids)
        unseeded = self.model.generate("Once", max_tokens=30, temperature=1.5)
        again = self.model.generate("Once", max_tokens=30, temperature=1.5, seed=unseeded.seed)
        self.assertEqual(again.token_ids, unseeded.token_ids)

    def test_samples(self):
        options = {"max_tokens": 25, "temperature": 1.0, "top_k": 0, "ignore_eos": True}
        alone = [self.model.generate("Once", seed=40 + i, **options) for i in range(4)]
        result = self.model.generate("Once", seed=40, num_samples=4, **options)
        self.assertEqual([(s.token_ids, s.text, s.seed) for s in result.samples],
                         [(a.token_ids, a.text, a.seed) for a in alone])
        self.assertEqual((result.token_ids, result.text), (alone[0].token_ids, alone[0].text))
        self.assertEqual([s.text for s in alone[0].samples], [alone[0].text])

        def joined(pieces):
            texts = [""] * 4
            for piece in pieces:
                texts[piece.sample] += piece
            return texts

        expected = [a.text for a in alone]
        with self.model.generate("Once", stream=True, seed=40, num_samples=4, **options) as stream:
            self.assertEqual(joined(stream), expected)
        self.assertEqual([s.text for s in stream.result.samples], expected)

        async def submitted():
            running = self.model.generate_async("Once", seed=40, num_samples=4, **options)
            pieces = [piece async for piece in running]
            return joined(pieces), [s.text for s in running.result.samples]

        self.assertEqual(asyncio.run(submitted()), (expected, expected))
        with self.assertRaises(xserv.Error):
            self.model.generate("Once", num_samples=0)

    def test_stop(self):
        whole = self.model.generate("Once upon a time", max_tokens=40, temperature=0, ignore_eos=True).text
        stop = whole[len(whole) // 2 :][:4]
        result = self.model.generate(
            "Once upon a time", max_tokens=40, temperature=0, ignore_eos=True, stop=["not there at all", stop]
        )
        self.assertEqual(result.text, whole[: whole.index(stop)])
        self.assertEqual(result.finish_reason, "stop_string")

    def test_max_tokens_zero(self):
        self.assertEqual(self.model.generate("Once", max_tokens=0).token_ids, [])

    def test_many_threads(self):
        expected = self.model.generate("Once", max_tokens=20, temperature=0).text
        texts = []
        threads = [
            threading.Thread(
                target=lambda: texts.append(self.model.generate("Once", max_tokens=20, temperature=0).text)
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(texts, [expected] * 8)


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def log_softmax(row):
    largest = max(row)
    sum_of_all = math.fsum(math.exp(x - largest) for x in row)
    return [x - largest - math.log(sum_of_all) for x in row]


class Choosing(ModelTest):
    """Biases, the least number of tokens, and what is told of the choice."""

    GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def test_biases(self):
        usual = self.model.generate("Once", **self.GREEDY).token_ids
        self.assertEqual(self.model.generate("Once", logit_bias={7: 100}, **self.GREEDY).token_ids, [7] * 8)
        banned = {token: -math.inf for token in usual}
        found = self.model.generate("Once", logit_bias=banned, **self.GREEDY).token_ids
        self.assertTrue(found and not set(found) & set(usual), found)
        self.assertEqual(self.model.generate("Once", logit_bias={}, **self.GREEDY).token_ids, usual)
        self.assertEqual(self.model.generate("Once", logit_bias={3: 0.0}, **self.GREEDY).token_ids, usual)

    def test_min_tokens(self):
        end = self.model.info.eos_token_ids[0]
        options = {"logit_bias": {end: 100}, "temperature": 0, "max_tokens": 8}
        self.assertEqual(self.model.generate("Once", **options).token_ids, [end])
        found = self.model.generate("Once", min_tokens=5, **options)
        self.assertEqual((len(found.token_ids), found.token_ids[-1]), (6, end))
        self.assertEqual(found.finish_reason, "stop_token")

    def test_prompt_logprobs_are_those_of_the_logits(self):
        prompt = self.model.tokenize("Once upon a time")
        asked = dict(self.GREEDY, tokens=prompt, prompt_logprobs=3)
        result = self.model.generate(**asked)
        self.assertEqual(result.prompt_token_ids, prompt)
        self.assertEqual((result.prompt_logprobs[0], result.prompt_top_logprobs[0]), (None, None))
        rows = self.model.logits(prompt)
        for i, token in enumerate(prompt[1:]):
            expected = log_softmax(rows[i].tolist())
            self.assertAlmostEqual(result.prompt_logprobs[i + 1], expected[token], 3)
            top = result.prompt_top_logprobs[i + 1]
            self.assertEqual(len(top), 3)
            self.assertAlmostEqual(top[0].logprob, max(expected), 3)
        stream = self.model.generate(stream=True, **asked)
        events = [event for event in stream.events() if event.is_prompt]
        self.assertEqual([event.token_id for event in events], prompt[1:])
        self.assertEqual([event.logprob for event in events], result.prompt_logprobs[1:])
        self.assertEqual([event.top_logprobs for event in events], result.prompt_top_logprobs[1:])
        self.assertEqual(stream.result.token_ids, result.token_ids)
        alone = self.model.generate(**dict(asked, max_tokens=0))
        self.assertEqual((alone.token_ids, alone.prompt_logprobs), ([], result.prompt_logprobs))
        with self.assertRaisesRegex(ValueError, "prompt_logprobs is 21"):
            self.model.generate("Once", prompt_logprobs=21)

    def test_a_logits_processor_decides(self):
        seen = []

        def prefer_nine(prompt, generated, logits):
            seen.append((prompt, generated, len(logits)))
            logits[9] = 1e6

        prompt = self.model.tokenize("Once upon a time")
        result = self.model.generate(tokens=prompt, logits_processor=prefer_nine, **self.GREEDY)
        self.assertEqual(result.token_ids, [9] * 8)
        self.assertEqual(seen, [(prompt, [9] * i, self.model.info.vocab_size) for i in range(8)])
        kept = []

        def keep_all(prompt, generated, logits):
            logits[5 + len(generated)] = 1e6
            kept.append(logits if len(generated) % 2 else logits[4:9])  # a part is enough to keep it

        self.model.generate(tokens=prompt, logits_processor=keep_all, **self.GREEDY)
        for number, logits in enumerate(kept[:4]):
            place = 5 + number
            self.assertEqual(logits[place if number % 2 else place - 4], 1e6)
            self.assertLess(logits[place + 1 if number % 2 else place - 3], 1e6)
        stopped = self.model.generate(
            tokens=prompt, logits_processor=lambda prompt, generated, logits: len(generated) < 3, **self.GREEDY
        )
        self.assertEqual((len(stopped.token_ids), stopped.finish_reason), (3, "callback"))

        def fail(prompt, generated, logits):
            raise KeyError("a rule")

        with self.assertRaisesRegex(KeyError, "a rule"):
            self.model.generate(tokens=prompt, logits_processor=fail, **self.GREEDY)

        def break_it(prompt, generated, logits):
            logits[5] = math.nan

        with self.assertRaisesRegex(ValueError, "left NaN for token 5"):
            self.model.generate(tokens=prompt, logits_processor=break_it, **self.GREEDY)
        with self.assertRaisesRegex(ValueError, "without stream only"):
            self.model.generate("Once", stream=True, logits_processor=prefer_nine)
        with self.assertRaises(TypeError):
            self.model.generate("Once", logits_processor=7)

    def test_forms(self):
        drawn = {"temperature": 1.0, "seed": 3, "max_tokens": 120}
        found = self.model.generate("Once", choice=["yes", "no"], **drawn)
        self.assertIn((found.text, found.finish_reason), [("yes", "complete"), ("no", "complete")])
        self.assertEqual(self.model.generate("Once", regex="ab{3}c", **drawn).text, "abbbc")
        self.assertEqual(self.model.generate("Once", grammar='start: "x" y\ny: "z"', **drawn).text, "xz")
        for schema in ({"const": {"a": [1, "\u00e9"]}}, json.dumps({"const": {"a": [1, "\u00e9"]}})):
            form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
            found = self.model.generate("Once", response_format=form, temperature=0, max_tokens=300)
            if found.finish_reason == "complete":
                self.assertEqual(json.loads(found.text), {"a": [1, "\u00e9"]})
        self.assertEqual(self.model.generate("Once", response_format={"type": "json_object"}, **drawn).text[0], "{")
        usual = self.model.generate("Once", **drawn).text
        self.assertEqual(self.model.generate("Once", response_format={"type": "text"}, **drawn).text, usual)

    def test_wrong_forms_are_refused(self):
        for error, words, options in (
            (ValueError, "#/items/contains", {"response_format": json_schema({"items": {"contains": True}})}),
            (ValueError, "json_schema", {"response_format": {"type": "json_schema"}}),
            (ValueError, "xml", {"response_format": {"type": "xml"}}),
            (TypeError, "mapping", {"response_format": "json"}),
            (ValueError, "no choices", {"choice": []}),
            (TypeError, "sequence", {"choice": "yes"}),
            (TypeError, "string", {"choice": ["yes", 1]}),
            (TypeError, "string", {"regex": 5}),
            (ValueError, "regex and choice", {"regex": "a", "choice": ["a"]}),
        ):
            with self.subTest(options=options), self.assertRaisesRegex(error, words):
                self.model.generate("Once", max_tokens=4, **options)

    def test_logprobs_are_those_of_the_logits(self):
        prompt = self.model.tokenize("Once upon a time")
        for options in ({}, {"temperature": 1.2, "seed": 3}, {"logit_bias": {9: 2.0}}):
            result = self.model.generate(tokens=prompt, logprobs=4, **dict(self.GREEDY, **options))
            self.assertEqual(len(result.logprobs), 8)
            self.assertEqual([len(top) for top in result.top_logprobs], [4] * 8)
            logits = self.model.logits(prompt + result.token_ids[:-1])
            for i, token in enumerate(result.token_ids):
                expected = log_softmax(logits[len(prompt) - 1 + i].tolist())
                self.assertAlmostEqual(result.logprobs[i], expected[token], 3)
                likeliest = sorted(expected, reverse=True)
                for place, (other, logprob) in enumerate(result.top_logprobs[i]):
                    self.assertAlmostEqual(logprob, expected[other], 3)
                    self.assertAlmostEqual(logprob, likeliest[place], 3)
                self.assertIsInstance(result.top_logprobs[i][0], xserv.TokenLogProb)

    def test_what_was_not_asked_for_is_none(self):
        plain = self.model.generate("Once", **self.GREEDY)
        self.assertEqual((plain.logprobs, plain.top_logprobs), (None, None))
        self.assertEqual((plain.prompt_logprobs, plain.prompt_token_ids), (None, None))
        own = self.model.generate("Once", logprobs=0, **self.GREEDY)
        self.assertEqual((len(own.logprobs), own.top_logprobs), (8, [[]] * 8))
        nothing = self.model.generate("Once", logprobs=2, max_tokens=0)
        self.assertEqual((nothing.logprobs, nothing.top_logprobs), ([], []))

    def test_processed(self):
        forced = {"logit_bias": {7: 1e4}, "logprobs": 1}
        processed = self.model.generate("Once", processed_logprobs=True, **forced, **self.GREEDY)
        self.assertEqual(processed.logprobs, [0.0] * 8)
        self.assertEqual([top[0] for top in processed.top_logprobs], [(7, 0.0)] * 8)
        own = self.model.generate("Once", **forced, **self.GREEDY)
        self.assertTrue(all(logprob < -0.1 for logprob in own.logprobs), own.logprobs)

    def assert_events(self, events, result):
        """That the events of one or more samples have all that the result has."""
        for index, sample in enumerate(result.samples):
            own = [event for event in events if event.sample == index]
            tokens = [event for event in own if event.token_id is not None]
            self.assertEqual([event.token_id for event in tokens], sample.token_ids)
            self.assertEqual([event.logprob for event in tokens], sample.logprobs or [None] * len(tokens))
            self.assertEqual([event.top_logprobs for event in tokens], sample.top_logprobs or [None] * len(tokens))
            self.assertEqual("".join(event.text for event in own), sample.text)
            self.assertEqual([event.finish_reason for event in own[:-1]], [None] * (len(own) - 1))
            self.assertEqual((own[-1].finish_reason, own[-1].token_id), (sample.finish_reason, None))

    def test_events(self):
        for options in ({}, {"logprobs": 3, "num_samples": 3, "temperature": 1.0, "seed": 5}, {"stop": "e"}):
            if "seed" not in options:
                options = dict(self.GREEDY, **options)
            options = dict(options, max_tokens=20)
            stream = self.model.generate("Once upon a time", stream=True, **options)
            self.assert_events(list(stream.events()), stream.result)
            self.assertEqual((list(stream.events()), list(stream)), ([], []))

            async def follow(options=options):
                async with self.model.generate_async("Once upon a time", **options) as stream:
                    events = [event async for event in stream.events()]
                return events, stream.result

            self.assert_events(*asyncio.run(follow()))

    ANSWER = (
        "<think>\nLet me see.\n</think>\n\nI ask.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Z\u00fcrich", "days": 2}}\n</tool_call>'
    )
    TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]

    def asked(self, **options):
        """Options with which the model gives ANSWER."""
        first = self.model.tokenize(self.ANSWER + "<|im_end|>")
        return dict(messages=MESSAGES, tools=self.TOOLS, first_tokens=first, max_tokens=200, **options)

    def assert_answer(self, answer):
        self.assertEqual((answer.reasoning, answer.content), ("Let me see.", "I ask."))
        (call,) = answer.tool_calls
        self.assertEqual((call.name, call.arguments, call.is_complete), ("get_weather", {"city": "Z\u00fcrich", "days": 2}, True))
        function = {"name": call.name, "arguments": call.arguments}
        self.assertEqual(answer.message["tool_calls"], [{"id": call.id, "type": "function", "function": function}])

    def test_answers(self):
        result = self.model.generate(**self.asked())
        self.assert_answer(result)
        self.assertEqual(result.text, self.ANSWER)
        for sample in self.model.generate(**self.asked(num_samples=2)).samples:
            self.assert_answer(sample)
        self.assert_answer(self.model.parse_response(self.ANSWER))
        self.assert_answer(xserv.parse_response(self.ANSWER, answer_format="json_tags", tools=self.TOOLS))
        self.assertEqual(self.model.parse_response("a</think>b", prompt="x").reasoning, None)
        plain = self.model.generate(**self.asked(answer_format="none"))
        self.assertEqual((plain.reasoning, plain.content, plain.tool_calls, plain.message), (None, self.ANSWER, [], None))
        asked = self.asked()
        cut = self.model.generate(**dict(asked, max_tokens=len(asked["first_tokens"]) - 8))
        self.assertEqual([call.is_complete for call in cut.tool_calls], [False])
        with self.assertRaisesRegex(ValueError, "answer_format is 'xml'"):
            self.model.generate("Once", answer_format="xml")
        with self.assertRaises(xserv.InvalidArgumentError):
            xserv.parse_response("x", answer_format="auto")

    def test_tool_choice(self):
        days = {"type": "object", "properties": {"days": {"enum": [1, 3]}}, "required": ["days"], "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": name, "parameters": days}} for name in ("forecast", "tides")]
        named = {"type": "function", "function": {"name": "tides"}}
        options = dict(messages=MESSAGES, tools=tools, variables={"enable_thinking": False}, max_tokens=100)
        # The model was never taught to call tools, and puts many blanks between the parts of JSON.
        blanks = {token: -50.0 for token in range(2022) if not self.model.detokenize([token]).strip()}
        for wanted, names in (("required", ("forecast", "tides")), (named, ("tides",))):
            result = self.model.generate(tool_choice=wanted, num_samples=3, temperature=1.0, seed=1, logit_bias=blanks, **options)
            for sample in result.samples:
                (call,) = sample.tool_calls
                self.assertIn(call.name, names)
                self.assertIn(call.arguments["days"], (1, 3))
                self.assertTrue(call.is_complete)
        self.assertEqual(self.model.generate(tool_choice="none", **options).tool_calls, [])
        self.assertEqual(
            self.model.generate(tool_choice="auto", seed=1, **options).text, self.model.generate(seed=1, **options).text
        )
        unknown = {"type": "function", "function": {"name": "sundial"}}
        for kind, words, bad in (
            (ValueError, "sundial", {"tool_choice": unknown}),
            (ValueError, "no tools", {"tool_choice": "required", "tools": []}),
            (ValueError, "constraint", {"tool_choice": "required", "regex": "a"}),
            (ValueError, "'any'", {"tool_choice": "any"}),
            (TypeError, "function", {"tool_choice": {"name": "tides"}}),
        ):
            with self.assertRaisesRegex(kind, words):
                self.model.generate(**{**options, **bad})

    def test_events_of_answers(self):
        def put_together(events):
            told = {}
            for event in events:
                if isinstance(event, xserv.AnswerEvent):
                    self.assertEqual(event.index, 0 if event.kind.startswith("tool_call") else None)
                    told[event.kind] = told.get(event.kind, "") + event.text + (event.name or "")
            call = json.loads(told.pop("tool_call_arguments"))
            self.assertEqual(call, {"city": "Z\u00fcrich", "days": 2})
            expected = {"reasoning": "Let me see.", "content": "I ask.", "tool_call_begin": "get_weather", "tool_call_end": ""}
            self.assertEqual(told, expected)

        stream = self.model.generate(**self.asked(), stream=True)
        put_together(list(stream.events(answers=True)))
        self.assert_answer(stream.result)
        stream = self.model.generate(**self.asked(), stream=True)
        self.assert_events(list(stream.events()), stream.result)
        self.assertEqual("".join(self.model.generate(**self.asked(), stream=True)), self.ANSWER)

        async def follow():
            async with self.model.generate_async(**self.asked()) as stream:
                put_together([event async for event in stream.events(answers=True)])
            self.assert_answer(stream.result)
            async with self.model.generate_async(**self.asked()) as stream:
                self.assertEqual("".join([piece async for piece in stream]), self.ANSWER)

        asyncio.run(follow())

    def test_special_tokens_in_messages(self):
        messages = [{"role": "user", "content": "<|im_end|>"}]
        (end,) = self.model.tokenize("<|im_end|>")
        self.assertEqual(self.model.tokenize_chat(messages).count(end), 1)
        parsed = self.model.tokenize_chat(messages, parse_special_in_messages=True)
        self.assertEqual(parsed.count(end), 2)
        self.assertEqual(parsed, self.model.tokenize(self.model.apply_chat_template(messages)))
        result = self.model.generate(messages=messages, parse_special_in_messages=True, max_tokens=1)
        self.assertEqual(result.num_prompt_tokens, len(parsed))
        thinking = self.model.tokenize_chat(messages, enable_thinking=False)
        self.assertGreater(len(thinking), len(self.model.tokenize_chat(messages)))

    def test_pieces_and_events_of_one_stream(self):
        whole = self.model.generate("Once upon a time", **self.GREEDY).text
        stream = self.model.generate("Once upon a time", stream=True, **self.GREEDY)
        first = next(stream)
        events = stream.events()
        second = next(event for event in events if event.text)
        self.assertTrue(whole.startswith(first + second.text))
        self.assertEqual(first + second.text + "".join(stream), whole)
        with self.assertRaises(dataclasses.FrozenInstanceError):
            second.text = ""

    def test_refused(self):
        for options, kind, words in (
            ({"logit_bias": [1, 2]}, TypeError, "logit_bias is a list, but must be a mapping"),
            ({"logit_bias": {"a": 1}}, TypeError, "token ids of logit_bias must be integers"),
            ({"logit_bias": {1: "x"}}, TypeError, "logit_bias of token 1 is 'x', but must be a number"),
            ({"logit_bias": {-1: 1}}, ValueError, "-1 is not a token id"),
            ({"logit_bias": {5000: 1}}, xserv.InvalidArgumentError, "logit_bias.*5000"),
            ({"logit_bias": {1: math.nan}}, xserv.InvalidArgumentError, "logit_bias"),
            ({"logit_bias": {1: 1e5}}, xserv.InvalidArgumentError, "logit_bias"),
            ({"logprobs": 21}, xserv.InvalidArgumentError, "logprobs is 21, but must be from 0 to 20"),
            ({"logprobs": -1}, xserv.InvalidArgumentError, "logprobs is -1"),
            ({"logprobs": 2**32 - 1}, xserv.InvalidArgumentError, "logprobs is 4294967295"),
            ({"logprobs": 1.5}, TypeError, "logprobs is 1.5, but must be an integer"),
            ({"processed_logprobs": True}, xserv.InvalidArgumentError, "can be given with logprobs only"),
            ({"min_tokens": -1}, ValueError, "min_tokens"),
        ):
            with self.assertRaisesRegex(kind, words):
                self.model.generate("x", max_tokens=1, **options)


class Stopping(ModelTest):
    def test_close_stops(self):
        with self.model.generate("Once", stream=True, **LONG) as stream:
            next(stream)
        self.assertIn(stream.result.finish_reason, ("callback", "cancelled"))
        self.assertEqual(list(stream), [])
        self.assertLess(len(stream.result.token_ids), 1500)

    def test_close_while_another_thread_reads(self):
        for _ in range(5):
            stream = self.model.generate("Once", stream=True, **LONG)
            reader = threading.Thread(target=lambda: [None for _ in stream], daemon=True)
            reader.start()
            stream.close()
            reader.join(30)
            self.assertFalse(reader.is_alive())

    def test_close_without_reading(self):
        stream = self.model.generate("Once", stream=True, **LONG)
        stream.close()
        stream.close()

    def test_dropping_the_stream_stops(self):
        for _ in range(3):
            next(self.model.generate("Once", stream=True, **LONG))

    def test_breaking_out_of_a_loop(self):
        for number, _ in enumerate(self.model.generate("Once", stream=True, **LONG)):
            if number == 3:
                break

    def test_keyboard_interrupt(self):
        """Ctrl-C ends a blocking call, and the model goes on working."""

        def blocking():
            self.model.generate("Once", **LONG)

        def streaming():
            for _ in self.model.generate("Once", stream=True, **LONG):
                pass

        # Whoever starts the tests may have the signal ignored, as shells do for what runs in the background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        for generate in (blocking, streaming):
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            try:
                with self.assertRaises(KeyboardInterrupt):
                    while True:  # until the signal comes, however fast the machine is
                        generate()
            finally:
                timer.join()
        self.assertEqual(len(self.model.generate("Once", max_tokens=2, ignore_eos=True).token_ids), 2)

    def test_the_program_ends_while_a_model_is_loaded(self):
        """No call into Python is under way when the interpreter goes down: it would end a thread within the library."""
        at_once = "import os, signal, threading, time, xserv\n"
        ends = [
            # Ctrl-C in the load, once and again.
            """
def stop():
    time.sleep({after})
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
def slowly(fraction):
    time.sleep(0.01)
threading.Thread(target=stop).start()
try:
    while True:
        xserv.Model({model!r}, progress=slowly, device="cpu").close()
except KeyboardInterrupt:
    pass
while True:
    try:
        time.sleep(0.05)
        break
    except KeyboardInterrupt:
        pass
""",
            # Another thread loads, and logs.
            """
def load():
    while True:
        xserv.Model({model!r}, log=lambda *message: time.sleep(0.005), progress=lambda f: time.sleep(0.01), device="cpu")
threading.Thread(target=load, daemon=True).start()
time.sleep({after})
""",
        ]
        for program in ends:
            for after in (0.02, 0.05, 0.1, 0.2, 0.3):
                text = at_once + program.format(after=after, model=MODEL)
                ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
                self.assertEqual(ended.returncode, 0, f"{ended.returncode} {ended.stderr}")

    def test_the_program_ends_while_threads_begin_new_calls(self):
        program = """
import os, sys, threading, time, xserv
sys.stderr = open(os.devnull, "w")  # what is raised in the threads
model = xserv.Model({model!r}, device="cpu", num_threads=1)
def repeat():
    while True:
        {call}
for _ in range(4):
    threading.Thread(target=repeat, daemon=True).start()
time.sleep(0.1)
"""
        short = "tokens=[1, 2, 3], max_tokens=5, ignore_eos=True"
        long = "tokens=[1, 2, 3], max_tokens=1500, ignore_eos=True"
        calls = [
            f"model.generate({short}, logits_processor=lambda *event: None)",
            f"model.generate({long}, logits_processor=lambda *event: None)",
            f"model.generate({short})",
            f"xserv.Model({MODEL!r}, device='cpu', num_threads=1, progress=lambda fraction: None)",
            f"xserv.Model({MODEL!r}, device='cpu', num_threads=1, log=lambda *message: None)",
        ]
        for call in calls:
            text = program.format(model=MODEL, call=call)
            for _ in range(4):
                ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
                self.assertEqual((ended.returncode, ended.stderr), (0, ""), call)

    def test_a_callback_is_refused_once_the_program_ends(self):
        text = f"""
import atexit
@atexit.register
def late():
    try:
        xserv.Model({MODEL!r}, device="cpu")
    except xserv.CancelledError as error:
        print(error)
import xserv  # its own handler comes first
"""
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
        self.assertEqual(
            (ended.stdout, ended.stderr), ("the program is ending, and the library could not call Python any more\n", "")
        )

    def test_a_stream_in_a_forked_child(self):
        text = f"""
import os, warnings, xserv
warnings.simplefilter("ignore")  # of forks where there are threads
model = xserv.Model({MODEL!r}, device="cpu", num_threads=1)
stream = model.generate("Once", stream=True, max_tokens=1500, ignore_eos=True)
next(stream)
pid = os.fork()
if pid == 0:
    for read in (lambda: next(stream), stream.wait, lambda: list(stream.events())):
        try:
            read()
        except xserv.ForkedError as error:
            print(error, flush=True)
    stream.close()
    os._exit(0)
print(os.waitpid(pid, 0)[1], len(stream.wait().token_ids))
"""
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
        said = "the stream was made before this process was forked\n" * 2 + "0 1500\n"
        self.assertEqual((ended.stdout, ended.stderr), (said, ""))

    def test_the_operators_need_no_import(self):
        text = "import xserv; print(xserv.ops.Context.__name__, 'ops' in dir(xserv))"
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        self.assertEqual(ended.stdout, "Context True\n", ended.stderr)

    def test_paths_of_bytes(self):
        xserv.Model(os.fsencode(MODEL)).close()

    def test_freeing_the_model_stops(self):
        model = xserv.Model(MODEL)
        stream = model.generate("Once", stream=True, **LONG)
        next(stream)
        model.close()
        for _ in stream:
            pass
        self.assertEqual(stream.result.finish_reason, "cancelled")
        with self.assertRaises(xserv.Error):
            model.tokenize("x")


class LogitsTest(ModelTest):
    def test_shape_and_views(self):
        tokens = self.model.tokenize("Once upon a time")
        logits = self.model.logits(tokens)
        vocab_size = self.model.info.vocab_size
        self.assertEqual(logits.shape, (len(tokens), vocab_size))
        self.assertEqual(len(logits), len(tokens))
        self.assertEqual(logits[-1].tolist(), logits[len(tokens) - 1].tolist())
        self.assertEqual(logits[1, 5], logits[1][5])
        view = logits.as_memoryview()
        self.assertEqual((view.format, view.shape, view.itemsize), ("f", logits.shape, 4))
        self.assertEqual(view[1, 5], logits[1, 5])
        with self.assertRaises(IndexError):
            logits[len(tokens)]
        last = self.model.logits(tokens, last_only=True)
        self.assertEqual(last.shape, (1, vocab_size))
        self.assertEqual(last[0].tolist(), logits[-1].tolist())
        best = max(range(vocab_size), key=logits[-1].__getitem__)
        greedy = self.model.generate(tokens=tokens, max_tokens=1, temperature=0, repetition_penalty=1)
        self.assertEqual(greedy.token_ids, [best])

    def test_array_interface(self):
        logits = self.model.logits(self.model.tokenize("Once"))
        interface = logits.__array_interface__
        self.assertEqual((interface["shape"], interface["typestr"]), (logits.shape, "<f4"))
        if sys.version_info >= (3, 12):
            self.assertEqual(memoryview(logits).shape, logits.shape)
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        matrix = numpy.asarray(logits)
        self.assertEqual((matrix.shape, matrix.dtype), (logits.shape, numpy.float32))
        self.assertEqual(matrix.ctypes.data, interface["data"][0])
        self.assertEqual(matrix[0].tolist(), array("f", logits[0]).tolist())


class ScoreTest(ModelTest):
    def by_logits(self, tokens, num_given):
        """The log-probability of each token from num_given on, and whether each is the likeliest, from the logits."""
        logits = self.model.logits(tokens[:-1])
        logprobs, greedy = [], []
        for place in range(num_given, len(tokens)):
            row = logits[place - 1].tolist()
            highest = max(row)
            logprobs.append(row[tokens[place]] - highest - math.log(math.fsum(math.exp(x - highest) for x in row)))
            greedy.append(row.index(highest) == tokens[place])
        return logprobs, greedy

    def assertScore(self, score, tokens, num_given):
        logprobs, greedy = self.by_logits(tokens, num_given)
        self.assertEqual(score.token_ids, tuple(tokens[num_given:]))
        self.assertEqual(len(score.logprobs), len(logprobs))
        for found, expected in zip(score.logprobs, logprobs):
            self.assertAlmostEqual(found, expected, delta=1e-3)
        self.assertEqual(score.sum, math.fsum(score.logprobs))
        self.assertEqual(score.is_greedy, all(greedy))

    def test_texts_and_tokens(self):
        prompt, text = "Once upon a time", " there was a little"
        given, both = self.model.tokenize(prompt), self.model.tokenize(prompt + text)
        self.assertEqual(both[: len(given)], given)
        generated = self.model.generate(prompt, max_tokens=5, temperature=0, repetition_penalty=1, ignore_eos=True)
        tokens = both[len(given) :]
        scores = self.model.score(prompt, [text, tokens, generated.token_ids, [7, 8, 9], "", []])
        self.assertEqual([len(score.token_ids) for score in scores[2:]], [5, 3, 0, 0])
        self.assertScore(scores[0], both, len(given))
        self.assertEqual(scores[1], scores[0])
        self.assertScore(scores[2], given + generated.token_ids, len(given))
        self.assertScore(scores[3], [*given, 7, 8, 9], len(given))
        self.assertTrue(scores[2].is_greedy)
        self.assertFalse(scores[3].is_greedy)
        self.assertEqual(scores[4], xserv.Score((), (), 0.0, True))
        self.assertEqual(scores[5], scores[4])
        self.assertEqual(self.model.score(given, [text, tokens]), scores[:2])
        self.assertEqual(self.model.score(prompt, []), [])

    def test_a_text_that_changes_the_tokens_before_it(self):
        prompt, text = "Once upon a ti", "me there was"
        given, both = self.model.tokenize(prompt), self.model.tokenize(prompt + text)
        num_given = next(i for i, (one, other) in enumerate(zip(given, both)) if one != other)
        self.assertLess(num_given, len(given))
        self.assertScore(self.model.score(prompt, [text])[0], both, num_given)
        # After token ids it is tokenized by itself.
        alone = self.model.tokenize(text, add_special_tokens=False)
        self.assertScore(self.model.score(given, [text])[0], given + alone, len(given))

    def test_the_prompt_is_computed_once(self):
        prompt = [(i * 11) % 900 for i in range(320)]
        before = self.model.stats()
        self.model.score(prompt, [[i, i + 1] for i in range(8)], cache_key=77)
        after = self.model.stats()
        self.assertEqual(after.total_submitted - before.total_submitted, 8)
        self.assertLess(after.total_prompt_tokens - before.total_prompt_tokens, 2 * len(prompt))

    def test_perplexity(self):
        text = "Once upon a time there was a little dog who liked to play in the garden with his friend."
        tokens = self.model.tokenize(text)
        logprobs, _ = self.by_logits(tokens, 1)
        expected = math.exp(-math.fsum(logprobs) / len(logprobs))
        self.assertAlmostEqual(self.model.perplexity(text) / expected, 1, delta=1e-3)
        self.assertEqual(self.model.perplexity(tokens), self.model.perplexity(text))

    def test_perplexity_in_windows(self):
        tokens = [(i * 37) % 900 for i in range(150)]
        with xserv.Model(MODEL, device="cpu", dtype="f32", max_context_tokens=64) as model:
            for stride in (None, 1, 20, 63):
                step = 32 if stride is None else stride
                total, count, previous = 0.0, 0, 0
                # As in Transformers' guide.
                for begin in range(0, len(tokens), step):
                    end = min(begin + 64, len(tokens))
                    window, new = tokens[begin:end], end - previous
                    num_given = max(len(window) - new, 1)
                    score = model.score(window[:num_given], [window[num_given:]])[0]
                    total, count, previous = total + score.sum, count + len(score.logprobs), end
                    if end == len(tokens):
                        break
                self.assertEqual(count, len(tokens) - 1)
                found = model.perplexity(tokens, stride=stride)
                self.assertAlmostEqual(found / math.exp(-total / count), 1, delta=1e-6)
            for stride in (0, 64, -1):
                with self.assertRaisesRegex(xserv.InvalidArgumentError, f"stride is {stride}, .* from 1 to 63"):
                    model.perplexity(tokens, stride=stride)
            with self.assertRaises(xserv.ContextFullError):
                model.score(tokens[:60], [[1, 2, 3, 4, 5]])
            self.assertEqual(len(model.score(tokens[:60], [[1, 2, 3, 4]])[0].logprobs), 4)

    def test_mistakes_are_told(self):
        for prompt in ("", []):
            with self.assertRaisesRegex(xserv.InvalidArgumentError, "continuation 0 has no token before it"):
                self.model.score(prompt, ["Once"])
        for text in ("", [], [5]):
            with self.assertRaisesRegex(xserv.InvalidArgumentError, "at least 2 tokens"):
                self.model.perplexity(text)
        with self.assertRaisesRegex(TypeError, "continuations must be a sequence"):
            self.model.score("Once", " upon")
        with self.assertRaisesRegex(TypeError, "continuation 1 must be integers"):
            self.model.score("Once", [[1], [1.5]])
        with self.assertRaisesRegex(xserv.InvalidArgumentError, "outside the vocabulary"):
            self.model.score("Once", [[self.model.info.vocab_size]])

    def test_keyboard_interrupt(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        prompt = [(i * 11) % 900 for i in range(300)]
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with self.assertRaises(KeyboardInterrupt):
                while True:  # until the signal comes, however fast the machine is
                    self.model.score(prompt, [[i] for i in range(900)])
        finally:
            timer.join()
        self.assertEqual(len(self.model.score([1], [[2]])), 1)


class Loading(unittest.TestCase):
    def test_info(self):
        with xserv.Model(Path(MODEL), num_threads=1, max_context_tokens=64, dtype="f32") as model:
            config = json.loads((Path(MODEL) / "config.json").read_text())
            self.assertEqual(model.info.architecture, config["architectures"][0])
            self.assertEqual(model.info.hidden_size, config["hidden_size"])
            self.assertEqual((model.info.dtype, model.info.num_threads), ("f32", 1))
            self.assertEqual(model.info.max_context_tokens, 64)
            self.assertTrue(model.info.has_tokenizer and model.info.has_chat_template)
            self.assertGreater(model.info.load_seconds, 0)
            with self.assertRaises(xserv.Error):
                model.generate("word " * 100)

    def test_progress(self):
        fractions = []
        xserv.Model(MODEL, progress=fractions.append).close()
        self.assertEqual(fractions, sorted(fractions))
        self.assertEqual(fractions[-1], 1.0)
        with self.assertRaises(xserv.Error) as caught:
            xserv.Model(MODEL, progress=lambda fraction: False)
        self.assertEqual(caught.exception.status, "XSERV_STATUS_CANCELLED")
        with self.assertRaises(ZeroDivisionError):
            xserv.Model(MODEL, progress=lambda fraction: 1 // 0)

    def test_deterministic(self):
        options = {"temperature": 0.8, "seed": 7, "max_tokens": 30, "ignore_eos": True}
        with xserv.Model(MODEL, deterministic=True) as model:
            alone = model.generate("Once", **options).token_ids
            with ThreadPoolExecutor(5) as pool:
                prompts = ["Once", "Hello", "Once", "The cat sat", "Once"]
                together = list(pool.map(lambda prompt: model.generate(prompt, **options).token_ids, prompts))
        self.assertEqual([together[0], together[2], together[4]], [alone] * 3)

    def test_plan(self):
        for options in (
            {}, {"max_memory_bytes": 30 << 20}, {"kv_cache_tokens": 96, "dtype": "f32"}, {"kv_cache_format": "fp8"},
            {"weights": "int8", "activations": "int8"},
        ):  # fmt: skip
            found = xserv.plan(MODEL, device="cpu", num_threads=2, **options)
            self.assertTrue(found.fits)
            self.assertEqual(found.device, "cpu")
            with xserv.Model(MODEL, device="cpu", num_threads=2, **options) as model:
                for name in ("dtype", "weights_bytes", "workspace_bytes", "kv_cache_tokens", "max_context_tokens"):
                    self.assertEqual(getattr(found, name), getattr(model.info, name), name)
        sizes = [
            xserv.plan(MODEL, dtype="bf16", kv_cache_format=form).kv_bytes_per_token for form in ("as computed", "fp8")
        ]
        self.assertEqual(sizes[0], 2 * sizes[1])
        with self.assertRaises(ValueError):
            xserv.plan(MODEL, kv_cache_format="fp4")
        with self.assertRaises(ValueError):
            xserv.plan(MODEL, activations="int4")
        few = xserv.plan(MODEL, device="cuda", max_batch_size=2, deterministic=True)
        self.assertLess(few.workspace_bytes, xserv.plan(MODEL, device="cuda").workspace_bytes)
        small = xserv.plan(MODEL, device="cuda", max_memory_bytes=1000)
        self.assertEqual((small.fits, small.kv_cache_tokens, small.device), (False, 0, "cuda"))
        with self.assertRaises(xserv.Error):
            xserv.plan("/no/such/folder")

    def test_random_weights_need_a_config_alone(self):
        request = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(Path(MODEL, "config.json"), folder)
            for call in (xserv.Model, xserv.plan):
                with self.assertRaises(xserv.NotFoundError):
                    call(folder, device="cpu")
            answers = []
            for options in ({}, {}, {"weights": "int4", "embeddings": "int8"}):
                planned = xserv.plan(folder, device="cpu", random_weights=True, **options)
                with xserv.Model(folder, device="cpu", random_weights=True, **options) as model:
                    self.assertEqual(model.info.weights_bytes, planned.weights_bytes)
                    self.assertFalse(model.info.has_tokenizer)
                    answers.append(model.generate(tokens=[1, 2, 3], **request).token_ids)
            self.assertEqual([len(answer) for answer in answers], [5, 5, 5])
            self.assertEqual(answers[0], answers[1])

    def test_quantised_weights_are_kept(self):
        request = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}

        def tokens(**options):
            with xserv.Model(MODEL, device="cpu", weights="int4", embeddings="int8", **options) as model:
                return model.generate("Once upon a time", **request).token_ids

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kept.safetensors")
            without = tokens()
            for _ in range(2):
                self.assertEqual(tokens(kept_weights=file), without)
                self.assertEqual(os.listdir(folder), [file.name])
            self.assertEqual(tokens(kept_weights=str(file)), without)
            # As any reader of safetensors sees it, with the checksums of zlib.
            content = file.read_bytes()
            begin = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:begin])
            described = json.loads(header.pop("__metadata__")["xserv.kept_weights"])
            self.assertEqual(described["version"], 1)
            for tensor in described["tensors"]:
                for part in ("codes", "scales", "zeros"):
                    found = header.pop(f"{tensor['name']}.{part}", {"data_offsets": (0, 0)})
                    first, last = found["data_offsets"]
                    checksum = zlib.crc32(content[begin + first : begin + last])
                    self.assertEqual(tensor[f"{part}_crc32"], f"{checksum:08x}")
            self.assertEqual(header, {})
            with self.assertRaises(xserv.InvalidFileError) as caught:
                tokens(kept_weights=file, weights_group_size=64)
            self.assertIn(str(file), str(caught.exception))
            # A plan takes the same options, and leaves the file alone.
            other = Path(folder, "other.safetensors")
            options = dict(device="cpu", weights="int4", weights_group_size=64, max_context_tokens=512)
            planned = [
                # What memory is available changes from one call to the next.
                dataclasses.replace(xserv.plan(MODEL, **kept, **options), memory_bytes=0)
                for kept in ({"kept_weights": other}, {"kept_weights": file}, {})
            ]
            self.assertEqual(planned, [planned[0]] * 3)
            self.assertFalse(other.exists())
        for wrong in ({"kept_weights": "x"}, {"kept_weights": "x", "weights": "int4", "random_weights": True}):
            for call in (xserv.Model, xserv.plan):
                with self.assertRaises(xserv.InvalidArgumentError):
                    call(MODEL, device="cpu", **wrong)

    def test_a_full_disk_keeps_no_weights(self):
        # A limit on the size of files stands for it.
        program = (
            "import os, resource, sys, xserv\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "try: xserv.Model(sys.argv[1], device='cpu', weights='int8', kept_weights=sys.argv[2] + '/kept')\n"
            "except xserv.FileError as error: print(error, os.listdir(sys.argv[2]))\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            said = subprocess.run(
                [sys.executable, "-c", program, MODEL, folder], capture_output=True, text=True, check=True
            ).stdout
        self.assertIn(f"{folder}/kept", said)
        self.assertIn("cannot be written", said)
        self.assertTrue(said.endswith("[]\n"), said)

    def test_an_idle_model_uses_no_cpu(self):
        with xserv.Model(MODEL) as model:
            model.generate("Once", max_tokens=30, temperature=0)
            time.sleep(0.2)  # what the last step left to be done
            before = time.process_time()
            time.sleep(2)
            used = time.process_time() - before
        # All threads of the process. A thread that spins, or looks for work every millisecond, takes more.
        self.assertLess(used, 0.1)

    def test_prompts_in_pieces(self):
        ids = [i * 7 % 900 for i in range(200)]
        found = {}
        for pieces in (0, 50, 1 << 40):
            with xserv.Model(MODEL, device="cpu", max_prefill_tokens=pieces) as model:
                tokens = model.generate(tokens=ids, max_tokens=3, temperature=0, ignore_eos=True).token_ids
                while model.stats().num_running:
                    time.sleep(0.001)
                stats = model.stats()
                found[stats.total_steps] = tokens
                self.assertGreater(stats.device_busy_seconds, 0)
                self.assertEqual(xserv.plan(MODEL, device="cpu", max_prefill_tokens=pieces).workspace_bytes,
                                 model.info.workspace_bytes)
        self.assertEqual(list(found), [3, 6])
        self.assertEqual(found[3], found[6])

    def test_inspect(self):
        found = xserv.inspect(MODEL)
        self.assertTrue(found.supported, found.unsupported_reason)
        with xserv.Model(MODEL) as model:
            self.assertEqual(found.num_parameters, model.info.num_parameters)
            self.assertEqual(found.dtype, model.info.dtype)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(MODEL, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
            config = Path(folder) / "config.json"
            text = config.read_text().replace("Qwen3ForCausalLM", "Qwen3NextForCausalLM")
            config.write_text(text)
            refused = xserv.inspect(folder)
            self.assertFalse(refused.supported)
            self.assertIn("Qwen3Next", refused.unsupported_reason)
            with self.assertRaises(xserv.Error) as caught:
                xserv.Model(folder)
            self.assertEqual(caught.exception.status, "XSERV_STATUS_UNSUPPORTED")


class Errors(ModelTest):
    def refuses(self, kind, call, *arguments, **keywords):
        with self.assertRaises(kind) as caught:
            call(*arguments, **keywords)
        return caught.exception

    def test_library_errors(self):
        error = self.refuses(xserv.Error, xserv.Model, "/no/such/folder")
        self.assertEqual((error.code, error.status), (3, "XSERV_STATUS_NOT_FOUND"))
        self.assertIn("/no/such/folder", str(error))
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), str(again), again.code), (type(error), str(error), error.code))
        self.refuses(xserv.Error, xserv.inspect, "/no/such/folder")
        for options in (
            {"prompt": "x", "temperature": -1},
            {"prompt": "x", "top_p": 2.0},
            {"prompt": "x", "tokens": [1]},
            {"tokens": []},
            {"tokens": [self.model.info.vocab_size]},
            {"messages": "no JSON"},
            {"prompt": "x", "stop": [""]},
            {},
        ):
            error = self.refuses(xserv.Error, self.model.generate, **options)
            self.assertEqual(error.status, "XSERV_STATUS_INVALID_ARGUMENT", options)
            self.assertTrue(str(error), options)

    def test_python_errors(self):
        error = self.refuses(TypeError, self.model.generate, "x", temprature=0)
        self.assertIn("did you mean temperature?", str(error))
        self.refuses(ValueError, self.model.generate, "x", max_tokens=-1)
        self.refuses(ValueError, self.model.generate, "x", seed=2**64)
        self.refuses(ValueError, self.model.generate, tokens=[2**32 + 5])
        self.refuses(ValueError, self.model.generate, tokens=[-1])
        self.refuses(ValueError, self.model.generate, "x", stop="a\0b")
        self.refuses(ValueError, xserv.Model, MODEL, dtype="int3")
        self.refuses(ValueError, xserv.Model, "a\0b")
        self.refuses(TypeError, xserv.Model, MODEL, threads=3)
        for prompt in ([1, 2], b"text", 5):
            error = self.refuses(TypeError, self.model.generate, prompt)
            self.assertRegex(str(error), "must be a string; token ids are given as tokens=")
        for options in (
            {"max_tokens": "3"},
            {"top_k": 1.5},
            {"temperature": "hot"},
            {"stop": [1]},
            {"stop_token_ids": "1"},
            {"stop_token_ids": [1.5]},
        ):
            error = self.refuses(TypeError, self.model.generate, "x", **options)
            self.assertRegex(str(error), rf"^{list(options)[0]} .*must be", options)
        self.refuses(ValueError, self.model.generate, messages=MESSAGES, variables={"x": float("nan")})
        self.refuses(ValueError, ops.Context, "gpu")
        with ops.Context("cpu") as context:
            some = context.tensor("i32", (1, 1))
            for call in (
                functools.partial(context.quantise, some, "int4", some, some, some),
                functools.partial(context.dequantise, "int4", some, some, some, some),
                functools.partial(context.linear_quantised, some, "int4", some, some, some, None, some),
            ):
                for size in (-1, 1 << 32):
                    self.assertEqual(str(self.refuses(ValueError, call, group_size=size)), f"group_size cannot be {size}")
                self.refuses(TypeError, call, group_size=1.5)
            self.refuses(ValueError, context.dequantise, "int5", some, some, None, some)
            error = self.refuses(xserv.InvalidArgumentError, context.quantise, some, "int8", some, some)
            self.assertRegex(str(error), "^x has elements of i32")

    def test_the_names_in_sentences_are_pythons(self):
        for options, words in (
            ({}, "not none of them"),
            ({"prompt": "x", "tokens": [1]}, "not a prompt and tokens"),
            ({"prompt": "x", "tools": []}, "tools can be given with messages only"),
            ({"tokens": [1], "variables": {}}, "variables can be given with messages only"),
        ):
            error = self.refuses(xserv.InvalidArgumentError, self.model.generate, **options)
            self.assertIn(words, str(error))
            self.assertNotRegex(str(error), "json|prompt_tokens")
            self.assertEqual(error.status, "XSERV_STATUS_INVALID_ARGUMENT")

    def test_errors_are_pythons_as_well(self):
        error = self.refuses(FileNotFoundError, xserv.Model, "/no/such/folder")
        self.assertIsInstance(error, xserv.NotFoundError)
        self.assertEqual(error.errno, 2)
        self.assertEqual(str(error), error.args[0])
        self.refuses(MemoryError, xserv.Model, MODEL, device="cpu", max_memory_bytes=1000)
        self.refuses(ValueError, self.model.generate, "x", temperature=-1)
        self.refuses(ValueError, self.model.generate, tokens=[1] * 3000)
        kinds = [kind for kind in vars(xserv).values() if isinstance(kind, type) and issubclass(kind, xserv.Error)]
        self.assertGreater(len(kinds), 12)
        for kind in kinds:
            error = kind("a sentence", 99, "XSERV_STATUS_TEST")
            for copied in (error, copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
                self.assertEqual((type(copied), str(copied)), (kind, "a sentence"))
                self.assertEqual((copied.code, copied.status), (99, "XSERV_STATUS_TEST"))
            self.assertIn(kind.__name__, xserv.__all__)

    def test_a_closed_object_says_so(self):
        model = xserv.Model(MODEL)
        context = ops.Context("cpu")
        for opened, what in ((model, "model"), (context, "context")):
            self.assertNotIn("closed", repr(opened))
            opened.close()
            opened.close()
            self.assertIn("closed", repr(opened))
        calls = [
            lambda: model.tokenize("x"),
            lambda: model.detokenize([1]),
            lambda: model.apply_chat_template(MESSAGES),
            lambda: model.logits([1]),
            lambda: model.score([1], [[2]]),
            lambda: model.perplexity([1, 2]),
            lambda: model.generate("x"),
            lambda: model.generate("x", stream=True),
            lambda: model.generate_async("x"),
            lambda: model.stats(),
        ]
        for call in calls:
            error = self.refuses(xserv.ClosedError, call)
            self.assertEqual((str(error), error.status), ("the model has been closed", "XSERV_STATUS_BAD_HANDLE"))
        for call in (context.synchronize, context.trim, context.memory_stats, lambda: context.device):
            self.assertEqual(str(self.refuses(xserv.ClosedError, call)), "the context has been closed")


class Objects(ModelTest):
    """How objects print, and whether they can be copied."""

    def test_owners_refuse_copies(self):
        with self.model.generate("x", stream=True, max_tokens=1) as stream, ops.Context("cpu") as context:
            submitted = self.model.generate_async("x", max_tokens=1)
            for owner in (self.model, stream, submitted, context):
                for copy_it in (copy.copy, copy.deepcopy, pickle.dumps):
                    with self.assertRaisesRegex(TypeError, f"a {type(owner).__name__} cannot be copied or pickled; "):
                        copy_it(owner)
            submitted.close()
        self.assertEqual(len(self.model.generate("x", max_tokens=1, ignore_eos=True).token_ids), 1)

    def test_values_are_copied(self):
        result = self.model.generate("Once", max_tokens=3, num_samples=2)
        logits = self.model.logits([1, 2, 3])
        for copy_it in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
            again = copy_it(logits)
            self.assertEqual((again.shape, again[-1].tolist()), (logits.shape, logits[-1].tolist()))
            again[0][0] += 1
            self.assertNotEqual(again[0, 0], logits[0, 0])
            piece = copy_it(xserv.Piece("text", 5))
            self.assertEqual((type(piece), piece, piece.sample), (xserv.Piece, "text", 5))
            score = self.model.score([1], [[2, 3]])[0]
            for value in (result, score, self.model.info, self.model.stats(), xserv.inspect(MODEL), xserv.plan(MODEL)):
                self.assertEqual(copy_it(value), value)

    def test_repr(self):
        self.assertIn("Qwen3ForCausalLM", repr(self.model))
        self.assertIn(f"float32 [1, {self.model.info.vocab_size}]", repr(self.model.logits([1])))
        result = self.model.generate("Once", max_tokens=60, ignore_eos=True, num_samples=2)
        self.assertIn("60 tokens after 1, max_tokens", repr(result))
        self.assertIn("2 samples", repr(result))
        self.assertLess(len(repr(result)), 200)
        stream = self.model.generate("Once", stream=True, **LONG)
        self.assertIn("running, 0 pieces read", repr(stream))
        next(stream)
        self.assertIn("running, 1 piece read", repr(stream))
        stream.close()
        self.assertRegex(repr(stream), "ended by .* after [0-9]+ tokens")

    def test_stats(self):
        stats = self.model.stats()
        self.assertIsInstance(stats, xserv.ModelStats)
        self.assertEqual(len(stats.step_counts), len(stats.step_bucket_us))
        self.assertEqual(stats.step_bucket_us[-1], 2**64 - 1)
        with self.assertRaises(dataclasses.FrozenInstanceError):
            stats.num_running = 1

    def test_integers_of_other_libraries(self):
        class Number:
            def __init__(self, value):
                self.value = value

            def __index__(self):
                return self.value

        expected = self.model.generate(tokens=[1, 2, 3], max_tokens=3, temperature=0)
        found = self.model.generate(tokens=[Number(i) for i in (1, 2, 3)], max_tokens=Number(3), temperature=0)
        self.assertEqual(found, dataclasses.replace(found, token_ids=expected.token_ids, text=expected.text))
        nothing_given = {name: None for name in xserv.GenerateOptions.__annotations__}
        again = self.model.generate(**dict(nothing_given, tokens=[1, 2, 3], max_tokens=3, temperature=0))
        self.assertEqual(again.token_ids, expected.token_ids)


class Documentation(unittest.TestCase):
    """Who has the wheel has no header: all must be said here."""

    def test_every_field_is_described(self):
        for kind in (xserv.Result, xserv.TokenEvent, xserv.ModelInfo, xserv.ModelStats, xserv.Inspection, xserv.MemoryPlan):
            for field in dataclasses.fields(kind):
                self.assertRegex(inspect.getdoc(kind), rf"(?m)^{field.name}: .", kind.__name__)
        for name in xserv.GenerateOptions.__annotations__:
            self.assertRegex(inspect.getdoc(xserv.GenerateOptions), rf"(?m)^{name}: .")

    def test_every_option_is_described_and_in_the_signature(self):
        for function in (xserv.Model.generate, xserv.Model.generate_async):
            parameters = inspect.signature(function).parameters
            self.assertNotIn("options", parameters)
            for name in xserv.GenerateOptions.__annotations__:
                self.assertEqual(parameters[name].kind, inspect.Parameter.KEYWORD_ONLY)
                self.assertRegex(inspect.getdoc(function), rf"(?m)^{name}: .")
        for kind in (xserv.Model, ops.Context):
            for name in list(inspect.signature(kind).parameters):
                self.assertRegex(inspect.getdoc(kind), rf"(?m)^{name}: .")
        for name in inspect.signature(xserv.plan).parameters:
            self.assertIn(name, inspect.signature(xserv.Model).parameters)
        for name in inspect.signature(ops.Context.attention).parameters:
            self.assertIn(name, "self" + ops.Context.attention.__doc__)

    def test_everything_public_has_a_docstring(self):
        things = [(name, getattr(xserv, name)) for name in xserv.__all__ if name != "library_version"]
        for name, thing in vars(ops).items():
            if getattr(thing, "__module__", "") == ops.__name__:
                things.append((name, thing))
        things = [(name, thing) for name, thing in things if not name.startswith("_")]
        for kind in [thing for _, thing in things if isinstance(thing, type)]:
            for name, member in vars(kind).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                    things.append((f"{kind.__name__}.{name}", member))
        self.assertGreater(len(things), 70)
        for name, thing in things:
            self.assertTrue((thing.__doc__ or "").strip(), f"{name} has no docstring")
            self.assertNotIn("xserv.h", thing.__doc__, name)


if __name__ == "__main__":
    unittest.main()
