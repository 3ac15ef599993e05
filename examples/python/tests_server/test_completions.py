"""Completions, log-probabilities of both kinds, biases, tokens and forms."""

import asyncio
import json
import math
import re
import unittest

import openai
from support import NAME, Server, story

ONCE = "Once upon a time"
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "people": {"type": "integer", "maximum": 1000}},
    "required": ["name", "people"],
    "additionalProperties": False,
}


class Asking(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)
        cls.client = cls.server.client()
        cls.addClassCleanup(cls.client.close)

    def complete(self, prompt=ONCE, **options):
        return self.client.completions.create(model=NAME, prompt=prompt, **{"max_tokens": 5, "temperature": 0, "seed": 1, **options})

    def chat(self, **options):
        options = {"model": NAME, "messages": story(), "max_tokens": 5, "temperature": 0, "seed": 1, **options}
        return self.client.chat.completions.create(**options)

    def post(self, path, body):
        with self.server.http() as http:
            return http.post(path, json=body)

    def refuse(self, param, ask, **options):
        with self.assertRaises(openai.BadRequestError) as raised:
            ask(**options)
        self.assertEqual(raised.exception.param, param)
        return str(raised.exception)


class Completions(Asking):
    def test_a_text(self):
        answer = self.complete()
        choice = answer.choices[0]
        self.assertEqual((answer.object, choice.index, choice.finish_reason), ("text_completion", 0, "length"))
        self.assertEqual(choice.text, ", a small elephant named")
        self.assertEqual((answer.usage.prompt_tokens, answer.usage.completion_tokens), (4, 5))
        self.assertEqual(self.complete(max_tokens=openai.omit).usage.completion_tokens, 16)
        self.assertEqual(self.complete(max_tokens=0).choices[0].text, "")

    def test_tokens_are_a_prompt(self):
        tokens = self.post("/tokenize", {"prompt": ONCE}).json()["tokens"]
        expected = self.complete().choices[0].text
        self.assertEqual(self.complete(tokens).choices[0].text, expected)
        both = self.complete([tokens, tokens[:2]])
        self.assertEqual([choice.index for choice in both.choices], [0, 1])
        self.assertEqual(both.choices[0].text, expected)

    def test_several_prompts(self):
        prompts = [ONCE, "The capital of", "The opposite of"]
        alone = [self.complete(prompt, n=2, seed=3, temperature=1.0).choices for prompt in prompts]
        together = self.complete(prompts, n=2, seed=3, temperature=1.0).choices
        self.assertEqual([choice.index for choice in together], list(range(6)))
        expected = [choice.text for choices in alone for choice in choices]
        self.assertEqual([choice.text for choice in together], expected)
        texts, reasons = [""] * 6, [None] * 6
        for chunk in self.complete(prompts, n=2, seed=3, temperature=1.0, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        self.assertEqual(texts, expected)
        self.assertEqual(reasons, [choice.finish_reason for choice in together])

    def test_a_stream(self):
        whole = self.complete(max_tokens=40)
        chunks = list(self.complete(max_tokens=40, stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(c.choices[0].text for c in chunks if c.choices), whole.choices[0].text)
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
        self.assertEqual(chunks[-1].choices, [])

    def test_async(self):
        async def run():
            async with self.server.async_client() as client:
                ask = {"model": NAME, "prompt": ONCE, "max_tokens": 5, "temperature": 0}
                whole = await client.completions.create(**ask)
                stream = await client.completions.create(stream=True, **ask)
                pieces = [chunk.choices[0].text async for chunk in stream]
                self.assertEqual("".join(pieces), whole.choices[0].text)

        asyncio.run(run())

    def test_echo(self):
        plain = self.complete().choices[0].text
        self.assertEqual(self.complete(echo=True).choices[0].text, ONCE + plain)
        self.assertEqual(self.complete(echo=True, max_tokens=0).choices[0].text, ONCE)
        tokens = self.post("/tokenize", {"prompt": ONCE}).json()["tokens"]
        self.assertEqual(self.complete(tokens, echo=True).choices[0].text, ONCE + plain)
        chunks = list(self.complete(echo=True, stream=True))
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks), ONCE + plain)
        self.assertEqual(chunks[0].choices[0].text, ONCE)

    def test_what_is_refused(self):
        self.refuse("prompt", self.complete, prompt="")
        self.refuse("prompt", self.complete, prompt=[])
        self.refuse("prompt[1]", self.complete, prompt=["a", ""])
        self.refuse("prompt", self.complete, prompt=[10**6])
        self.refuse("suffix", self.complete, suffix="the end")
        self.refuse("best_of", self.complete, best_of=2)
        self.refuse("logprobs", self.complete, logprobs=21)
        self.refuse("prompt", self.complete, prompt=[5] * 3000)


class Logprobs(Asking):
    def test_completions(self):
        answer = self.complete(logprobs=3, echo=True)
        logprobs = answer.choices[0].logprobs
        self.assertEqual("".join(logprobs.tokens), answer.choices[0].text)
        self.assertEqual(logprobs.text_offset, [sum(map(len, logprobs.tokens[:i])) for i in range(9)])
        self.assertEqual((logprobs.token_logprobs[0], logprobs.top_logprobs[0]), (None, None))
        rows = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs))
        for token, logprob, top in rows[1:]:
            self.assertIn(len(top), (3, 4))
            self.assertEqual(top[token], logprob)
            self.assertLessEqual(sum(map(math.exp, top.values())), 1.0001)
        for token, logprob, top in rows[4:]:  # greedy
            self.assertEqual(logprob, max(top.values()))

    def test_a_stream_of_completions_has_the_same(self):
        for options in ({"echo": True}, {"n": 2, "temperature": 1.0, "seed": 3}, {"n": 2, "echo": True}):
            whole = self.complete(logprobs=2, **options)
            found = [([], [], [], []) for _ in whole.choices]
            for chunk in self.complete(logprobs=2, stream=True, **options):
                part = chunk.choices[0].logprobs
                for column, more in zip(
                    found[chunk.choices[0].index],
                    (part.tokens, part.token_logprobs, part.top_logprobs, part.text_offset),
                ):
                    column.extend(more)
            for choice, columns in zip(whole.choices, found):
                logprobs = choice.logprobs
                self.assertEqual(columns[0], logprobs.tokens)
                self.assertEqual(columns[3], logprobs.text_offset)
                for streamed, expected in zip(columns[1], logprobs.token_logprobs):
                    self.assertTrue(streamed == expected or abs(streamed - expected) < 1e-4)

    def test_prompts_are_scored_as_the_library_does(self):
        import xserv
        from support import MODEL

        with xserv.Model(MODEL) as model:
            (score,) = model.score(model.tokenize(ONCE)[:1], [model.tokenize(ONCE)[1:]])
        logprobs = self.complete(logprobs=0, echo=True, max_tokens=0).choices[0].logprobs.token_logprobs
        for own, expected in zip(logprobs[1:], score.logprobs):
            self.assertAlmostEqual(own, expected, places=4)

    def test_chats(self):
        answer = self.chat(logprobs=True, top_logprobs=4)
        content = answer.choices[0].logprobs.content
        self.assertEqual(len(content), answer.usage.completion_tokens)
        self.assertEqual("".join(entry.token for entry in content), answer.choices[0].message.content)
        for entry in content:
            self.assertEqual(bytes(entry.bytes).decode(), entry.token)
            self.assertEqual(len(entry.top_logprobs), 4)
            self.assertEqual(entry.logprob, max(each.logprob for each in entry.top_logprobs))
        streamed = [
            entry
            for chunk in self.chat(logprobs=True, top_logprobs=4, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
        self.assertEqual([entry.token for entry in streamed], [entry.token for entry in content])
        self.assertEqual(self.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs, [])
        self.refuse("top_logprobs", self.chat, top_logprobs=3)
        self.refuse("top_logprobs", self.chat, logprobs=True, top_logprobs=21)
        self.refuse("logprobs", self.chat, logprobs=3)

    def test_biases(self):
        token = self.post("/tokenize", {"prompt": " zebra"}).json()["tokens"][0]
        text = self.post("/detokenize", {"tokens": [token]}).json()["prompt"]
        self.assertEqual(self.complete(logit_bias={str(token): 100}).choices[0].text, text * 5)
        self.assertEqual(self.chat(logit_bias={str(token): 100}).choices[0].message.content, text * 5)
        likely = self.post("/tokenize", {"prompt": "Once"}).json()["tokens"][0]
        self.assertFalse(self.chat(logit_bias={str(likely): -100}).choices[0].message.content.startswith("Once"))
        for bad in ({"5": 101}, {"5": -101}, {"x": 1}, {"-1": 1}, {"99999": 1}, {"5": "much"}, {str(10**30): 1}):
            message = self.refuse_bias(bad)
            self.assertIn("logit_bias", message, bad)

    def refuse_bias(self, bias):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.complete(logit_bias=bias)
        self.assertTrue(raised.exception.param.startswith("logit_bias"), raised.exception.param)
        return str(raised.exception)


class Forms(Asking):
    def parsed(self, **options):
        options = {"max_tokens": 200, "temperature": 1.0, "seed": 1, **options}
        return json.loads(self.chat(**options).choices[0].message.content)

    def test_a_schema(self):
        form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
        for seed in range(3):
            self.assertEqual(set(self.parsed(response_format=form, seed=seed)), {"name", "people"})
        text = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in self.chat(response_format=form, stream=True, max_tokens=200)
        )
        self.assertEqual(set(json.loads(text)), {"name", "people"})

    def test_a_schema_by_the_client(self):
        import pydantic

        class Answer(pydantic.BaseModel):
            likes: bool

        parsed = self.client.chat.completions.parse(
            model=NAME, messages=story(), response_format=Answer, max_tokens=50, logit_bias=self.likely("}"), seed=1
        )
        self.assertIsInstance(parsed.choices[0].message.parsed, Answer)

    def test_any_object(self):
        form = {"type": "json_object"}
        self.assertIsInstance(self.parsed(response_format=form, logit_bias=self.likely("{}")), dict)

    def test_the_names_of_vllm(self):
        schema = {"type": "integer", "minimum": 0, "maximum": 99}
        for extra in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
            self.assertIn(self.parsed(extra_body=extra), range(100))
        for extra in ({"guided_regex": r"[0-9]{3}"}, {"structured_outputs": {"regex": r"[0-9]{3}"}}):
            self.assertTrue(re.fullmatch(r"\d{3}", self.complete(extra_body=extra).choices[0].text))
        for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
            self.assertIn(self.chat(extra_body=extra).choices[0].message.content, ("yes", "no"))
        grammar = 'start: "a" ("b" | "c")+ "d"'
        for extra in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
            text = self.complete(extra_body=extra, max_tokens=40, logit_bias=self.likely("d")).choices[0].text
            self.assertTrue(re.fullmatch("a[bc]+d", text), text)
        whole = self.complete(extra_body={"structured_outputs": {"choice": ["yes"]}}).choices[0]
        self.assertEqual((whole.text, whole.finish_reason), ("yes", "stop"))

    def likely(self, text):
        return {str(token): 20 for token in self.post("/tokenize", {"prompt": text}).json()["tokens"]}

    def test_a_text_is_no_form(self):
        expected = self.chat().choices[0].message.content
        self.assertEqual(self.chat(response_format={"type": "text"}).choices[0].message.content, expected)

    def test_what_is_refused(self):
        self.refuse("response_format.type", self.chat, response_format={"type": "xml"})
        self.refuse("response_format.json_schema", self.chat, response_format={"type": "json_schema"})
        for schema in ({"type": "nothing"}, {"type": "object", "not": {}}, {"$ref": "http://example.com/x"}):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            self.refuse("response_format", self.chat, response_format=form)
        self.refuse("guided_choice", self.complete, extra_body={"guided_regex": "a", "guided_choice": ["a"]})
        for name, form in (("regex", "(("), ("grammar", "start: ("), ("choice", []), ("choice", [""])):
            self.refuse(f"guided_{name}", self.complete, extra_body={f"guided_{name}": form})
            outputs = {"structured_outputs": {name: form}}
            self.refuse(f"structured_outputs.{name}", self.complete, extra_body=outputs)

    def test_a_heavy_form_does_not_hold_others_up(self):
        nested = {"type": "string", "pattern": "(a|b|ab){1,400}(c|d|cd){1,400}"}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested}}

        async def run():
            async with self.server.async_client() as client:
                ask = {"model": NAME, "messages": story(), "max_tokens": 2}
                heavy = [
                    asyncio.ensure_future(client.chat.completions.create(response_format=form, **ask))
                    for _ in range(3)
                ]
                light = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(8)))
                self.assertTrue(all(answer.usage.completion_tokens for answer in light))
                for outcome in await asyncio.gather(*heavy, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        self.assertIsInstance(outcome, openai.BadRequestError)

        asyncio.run(run())


class Tokens(Asking):
    def test_there_and_back(self):
        for text in (ONCE, "Grüße, 世界 🌍", "<|im_end|> ends", ""):
            found = self.post("/tokenize", {"model": NAME, "prompt": text}).json()
            self.assertEqual(found["count"], len(found["tokens"]))
            self.assertEqual(found["max_model_len"], 2048)
            self.assertIsNone(found["token_strs"])
            self.assertEqual(self.post("/detokenize", {"tokens": found["tokens"]}).json(), {"prompt": text})

    def test_a_conversation(self):
        found = self.post("/tokenize", {"messages": story(), "return_token_strs": True}).json()
        self.assertEqual(found["token_strs"][:2], ["<|im_start|>", "user"])
        self.assertEqual(found["count"], self.chat().usage.prompt_tokens)
        opened = self.post("/tokenize", {"messages": story(), "add_generation_prompt": False}).json()["count"]
        self.assertLess(opened, found["count"])

    def test_what_is_refused(self):
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": story()}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ):
            answer = self.post(path, body)
            self.assertEqual((answer.status_code, answer.json()["error"]["param"]), (400, param), body)
        self.assertEqual(self.post("/tokenize", {"model": "other", "prompt": "a"}).status_code, 404)
