"""The application in this process, and what it counts."""

import asyncio
import contextlib
import io
import json
import shutil
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount
from support import MODEL, NAME, PACKAGES, Server, story

sys.path.insert(0, str(PACKAGES))
import xserv
from xserv_server import Settings, create_app
from xserv_server.limits import Admission
from xserv_server.logs import RequestLog


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = xserv.Model(MODEL)
        cls.addClassCleanup(cls.model.close)

    def post(self, app, path, body):
        async def send():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, json=body)

        return run(send())

    def app(self, **settings):
        return create_app(self.model, Settings([NAME], log_requests=False, **settings))

    def test_any_server_can_run_it(self):
        answer = self.post(self.app(), "/v1/completions", {"model": NAME, "prompt": "Once", "max_tokens": 3})
        self.assertEqual(answer.json()["usage"]["completion_tokens"], 3)
        body = {"model": NAME, "messages": story(), "max_tokens": 3, "stream": True}
        self.assertTrue(self.post(self.app(), "/v1/chat/completions", body).text.endswith("data: [DONE]\n\n"))

    def test_another_application_can_have_it_below_a_path(self):
        outer = Starlette(routes=[Mount("/below", self.app())])
        body = {"model": NAME, "prompt": "Once", "max_tokens": 3}
        answer = self.post(outer, "/below/v1/completions", body)
        self.assertEqual(answer.json()["usage"]["completion_tokens"], 3)
        self.assertEqual(self.post(outer, "/below/v1/completions", {**body, "n": 0}).json()["error"]["param"], "n")

    def test_other_methods_and_slashes(self):
        async def ask():
            transport = httpx.ASGITransport(self.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for path in ("/v1/completions", "/v1/chat/completions"):
                    answer = await client.get(path)
                    self.assertEqual((answer.status_code, answer.headers["allow"]), (405, "POST"))
                    answer = await client.post(path + "/", json={})
                    self.assertEqual((answer.status_code, answer.headers["location"]), (307, "http://localhost" + path))

        run(ask())

    def test_a_failure_of_the_server_itself(self):
        async def fails(*_):
            raise RuntimeError("a secret of the inside")

        with mock.patch("xserv_server.app.completions", fails), self.assertLogs("xserv_server", "ERROR"):
            answer = self.post(self.app(), "/v1/completions", {"model": NAME, "prompt": "Once"})
        self.assertEqual((answer.status_code, answer.json()["error"]["type"]), (500, "server_error"))
        self.assertNotIn("secret", answer.text)

    def test_a_model_that_has_been_closed(self):
        with xserv.Model(MODEL) as model:
            app = create_app(model, Settings([NAME], log_requests=False))
        for body in ({"prompt": "Once"}, {"prompt": "Once", "stream": True}, {"prompt": ["Once", "Twice"], "stream": True}):
            answer = self.post(app, "/v1/completions", {"model": NAME, **body})
            self.assertEqual((answer.status_code, answer.json()["error"]["code"]), (503, "shutting_down"))

    def test_a_name_is_needed(self):
        with self.assertRaises(ValueError):
            create_app(self.model, Settings([]))

    def test_a_prompt_that_has_begun_a_thought(self):
        from xserv_server.chat import chat_options
        from xserv_server.auth import Caller
        from xserv_server.requests import ChatRequest

        state = self.app().state.server
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "maximum": 9, "minimum": 0}}}
        # As the model would go on after such a prompt.
        prompt = self.model.apply_chat_template(story()) + "<think>\n"
        likely = {self.model.tokenize("</think>")[0]: 30.0}
        for asked in ({"response_format": form}, {"guided_regex": "[0-9]"}, {"guided_choice": ["7", "8"]}):
            body = ChatRequest.model_validate({"model": NAME, "messages": story(), **asked})
            _, options = chat_options(state, body, Caller(None, b""))
            form_alone = {key: value for key, value in options.items() if key in ("response_format", "regex", "choice")}
            self.assertEqual(len(form_alone), 1)
            result = self.model.generate(
                prompt, **form_alone, answer_format=options["answer_format"], max_tokens=60, logit_bias=likely
            )
            self.assertRegex(result.content.strip(), "^[0-9]$")
            self.assertEqual(result.finish_reason, "complete")

    def test_long_bodies_and_many_prompts(self):
        long = "Once upon a time there was a dog. " * 3000
        for body, status in (
            ({"prompt": long, "echo": True, "logprobs": 1}, 400),
            ({"prompt": ["Once"] * 700, "max_tokens": 1}, 200),
            ({"prompt": ["Once"] * 5000, "max_tokens": 1}, 400),
        ):
            answer = self.post(self.app(), "/v1/completions", {"model": NAME, **body})
            self.assertEqual(answer.status_code, status, answer.text[:300])
        body = {"model": NAME, "messages": [{"role": "user", "content": long}], "response_format": {"type": "json_object"}}
        error = self.post(self.app(), "/v1/chat/completions", body).json()["error"]
        self.assertEqual(error["code"], "context_length_exceeded")


class CallForms(unittest.TestCase):
    """Calls that must be made, in the form of the model's chat template."""

    TURNS = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    JSON = '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}'
    XML = (
        "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments | items %}"
        "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    )
    PARAMETERS = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }

    def ask(self, call, parameters=PARAMETERS):
        """The status and the answer to a request that must call a tool."""
        tool = {"type": "function", "function": {"name": "count", "parameters": parameters}}
        with tempfile.TemporaryDirectory() as folder:
            for file in Path(MODEL).iterdir():
                if file.name != "chat_template.jinja":
                    shutil.copy(file, folder)
            Path(folder, "chat_template.jinja").write_text(self.TURNS.replace("CALL", call))
            with xserv.Model(folder) as model:
                # So small a model may else go on with blanks, which JSON allows.
                closing = {str(token): 20.0 for token in model.tokenize("}")}
                sampling = {"max_tokens": 60, "seed": 1, "logit_bias": closing}
                body = {"model": NAME, "messages": story(), "tools": [tool], **sampling}

                async def send():
                    app = create_app(model, Settings([NAME], log_requests=False))
                    transport = httpx.ASGITransport(app)
                    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                        return await client.post("/v1/chat/completions", json={**body, "tool_choice": "required"})

                answer = run(send())
        return answer.status_code, answer.json()

    def test_forms(self):
        for call in (
            "<tool_call>\n" + self.JSON.replace("KEY", "arguments") + "\n</tool_call>",
            # Bare JSON is a call for the library where the template is one of Llama 3.
            self.JSON.replace("KEY", "parameters") + "{# <|start_header_id|> #}",
            self.XML,
        ):
            status, answer = self.ask(call)
            self.assertEqual(status, 200, answer)
            (choice,) = answer["choices"]
            (call,) = choice["message"]["tool_calls"]
            self.assertEqual(call["function"]["name"], "count")
            self.assertEqual(list(json.loads(call["function"]["arguments"])), ["n"])
            self.assertEqual(choice["finish_reason"], "tool_calls")

    def test_what_cannot_be_enforced(self):
        bare = self.JSON.replace("KEY", "parameters")
        for call in ("", "[{{ c.function.name }}(1)]", bare):
            status, answer = self.ask(call)
            error = answer["error"]
            self.assertEqual((status, error["param"], error["code"]), (400, "tool_choice", "unsupported"))
        pattern = {"type": "object", "properties": {"n": {"type": "string", "pattern": "a"}}}
        status, answer = self.ask(self.XML, pattern)
        error = answer["error"]
        self.assertEqual((status, error["param"], error["code"]), (400, "tools", "unsupported"))
        status, answer = self.ask(self.XML, {"type": "object", "properties": {"n": {"not": {}, "type": "integer"}}})
        error = answer["error"]
        self.assertEqual((status, error["param"], error["code"]), (400, "tools", "invalid_form"))


class Counts(unittest.TestCase):
    def test_what_metrics_tell(self):
        with Server("--no-request-log") as server, server.client() as client:
            usages = [client.completions.create(model=NAME, prompt="Once", max_tokens=5).usage for _ in range(3)]
            stream = client.chat.completions.create(
                model=NAME, messages=story(), stream=True, max_tokens=8, stream_options={"include_usage": True}
            )
            usages.append([chunk.usage for chunk in stream][-1])
            with server.http() as http:
                http.post("/v1/completions", content=b"{")
                http.get("/never/seen/before")
                text = http.get("/metrics").text
            self.assertEqual(server.log, [])
        found = {family.name: family for family in text_string_to_metric_families(text)}

        def value(name, suffix="", **labels):
            samples = [s for s in found[name].samples if s.name == name + suffix and s.labels == labels]
            self.assertEqual(len(samples), 1, (name, suffix, labels))
            return samples[0].value

        self.assertEqual(value("xserv_prompt_tokens", "_total"), sum(usage.prompt_tokens for usage in usages))
        self.assertEqual(value("xserv_generation_tokens", "_total"), sum(usage.completion_tokens for usage in usages))
        self.assertEqual(value("xserv_http_responses", "_total", path="/v1/completions", status="200"), 3)
        self.assertEqual(value("xserv_http_responses", "_total", path="/v1/completions", status="415"), 1)
        self.assertEqual(value("xserv_http_responses", "_total", path="other", status="404"), 1)
        for name in ("xserv_time_to_first_token_seconds", "xserv_e2e_request_latency_seconds"):
            self.assertEqual(value(name, "_count"), 4)
            self.assertEqual(value(name, "_bucket", le="+Inf"), 4)
        self.assertGreaterEqual(value("xserv_inter_token_latency_seconds", "_count"), 3)
        self.assertEqual(value("xserv_requests_queued"), 0)
        self.assertGreater(value("xserv_kv_cache_blocks"), 0)
        self.assertGreaterEqual(value("xserv_prefix_cache_queries", "_total"), value("xserv_prefix_cache_hits", "_total"))
        steps = [sample.value for sample in found["xserv_step_seconds"].samples if sample.name.endswith("_bucket")]
        self.assertEqual(steps, sorted(steps))
        self.assertEqual(steps[-1], value("xserv_engine_steps", "_total"))


class Parts(unittest.TestCase):
    def test_turns_are_taken_in_order(self):
        async def check():
            admission, order = Admission(2, 10), []

            async def ask(name, weight):
                await admission.enter(weight)
                order.append(name)

            await admission.enter(2)
            waiting = [asyncio.ensure_future(ask(*each)) for each in (("large", 2), ("small", 1), ("other", 1))]
            await asyncio.sleep(0)
            self.assertEqual(admission.num_queued, 3)
            admission.leave(1)
            await asyncio.sleep(0)
            self.assertEqual(order, [])  # the small one does not overtake
            waiting[0].cancel()
            await asyncio.sleep(0.01)
            self.assertEqual(order, ["small"])
            admission.leave(1)
            admission.leave(1)
            await asyncio.gather(*waiting, return_exceptions=True)
            self.assertEqual((order, admission.num_running), (["small", "other"], 1))

        run(check())

    def test_a_log_has_every_line_at_its_end(self):
        file = io.StringIO()
        with contextlib.closing(RequestLog(file)) as log:
            for number in range(500):
                log.write({"a": number})
                if number == 250:
                    time.sleep(0.05)  # the thread has written some
        self.assertEqual([json.loads(line)["a"] for line in file.getvalue().splitlines()], list(range(500)))

    def test_a_log_whose_reader_stands_still(self):
        go_on = threading.Event()

        class Slow(io.StringIO):
            def write(self, text):
                go_on.wait(60)
                return super().write(text)

        file = Slow()
        with contextlib.closing(RequestLog(file)) as log:
            with mock.patch("xserv_server.logs.MAX_LINES", 10):
                log.write({"a": 0})
                while log._lines:
                    time.sleep(0.01)  # that line is being written
                for number in range(1, 30):
                    log.write({"a": number})
                go_on.set()
                while log._lines:
                    time.sleep(0.01)
                log.write({"a": 30})
        lines = [json.loads(line) for line in file.getvalue().splitlines()]
        self.assertEqual([line["a"] for line in lines], [*range(11), 30])
        self.assertEqual(lines[-1]["dropped_lines"], 19)

    def test_a_log_whose_reader_has_gone(self):
        class Gone(io.StringIO):
            def write(self, _):
                raise BrokenPipeError

        with contextlib.closing(RequestLog(Gone())) as log:
            for _ in range(20000):
                log.write({"a": 1})


if __name__ == "__main__":
    unittest.main()
