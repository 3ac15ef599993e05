"""API keys, and what users may not learn of each other."""

import inspect
import json
import os
import tempfile
import unittest
from pathlib import Path

import openai
import xserv
from support import MODEL, NAME, PACKAGES, Server, story
from xserv_server.cli import load_options_of, options_parser

SECRET = "The secret word of the first user is marmalade, and nobody else may know it. " * 4


class Keys(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
            file.write("# who may ask\nalice sk-alice\nbob   sk-bob  # the second\n\nsk-unnamed\n")
            file.flush()
            cls.server = Server(
                "--api-key-file", file.name, "--api-key", "sk-option", "--cors-origin", "http://page.example",
                environment={"XSERV_API_KEY": "sk-environment"},
            )  # fmt: skip
        cls.addClassCleanup(cls.server.close)

    def ask(self, key, **options):
        with self.server.client(api_key=key) as client:
            return client.chat.completions.create(**{"model": NAME, "messages": story(), "max_tokens": 4, **options})

    def test_who_may_ask(self):
        for key in ("sk-alice", "sk-bob", "sk-unnamed", "sk-option", "sk-environment"):
            self.ask(key)
        for key in ("sk-alicf", "sk-alic", "sk-alice1", "alice", "SK-ALICE", "none"):
            with self.assertRaises(openai.AuthenticationError) as raised:
                self.ask(key)
            self.assertEqual(raised.exception.code, "invalid_api_key")
            self.assertNotIn(key, str(raised.exception).replace("API key", ""))

    def test_every_path_with_content_asks_for_a_key(self):
        with self.server.http() as http:
            for method, path in (
                ("GET", "/v1/models"), ("GET", f"/v1/models/{NAME}"), ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
            ):  # fmt: skip
                for headers in ({}, {"authorization": "sk-alice"}, {"authorization": "Basic sk-alice"}):
                    answer = http.request(method, path, headers=headers)
                    self.assertEqual(answer.status_code, 401, path)
                    self.assertEqual(answer.headers["www-authenticate"], "Bearer")
            self.assertEqual(http.get("/health").status_code, 200)
            self.assertEqual(http.get("/metrics").status_code, 200)

    def test_a_wrong_key_is_refused_before_the_body_is_read(self):
        with self.server.http() as http:
            self.assertEqual(http.post("/v1/completions", content=b"{").status_code, 401)

    def cached(self, key, **options):
        messages = [{"role": "user", "content": SECRET}]
        return self.ask(key, messages=messages, **options).usage.prompt_tokens_details.cached_tokens

    def test_prefixes_are_shared_with_oneself_alone(self):
        self.assertEqual(self.cached("sk-alice"), 0)
        self.assertGreater(self.cached("sk-alice"), 20)
        # Neither the count nor the time tells another user what the first has asked.
        self.assertEqual(self.cached("sk-bob"), 0)
        self.assertEqual(self.cached("sk-alice", extra_body={"cache_salt": "one"}), 0)
        self.assertGreater(self.cached("sk-alice", extra_body={"cache_salt": "one"}), 20)
        self.assertEqual(self.cached("sk-bob", extra_body={"cache_salt": "one"}), 0)

    def test_logs_have_names_and_no_texts(self):
        with self.server.http() as http:
            headers = {"authorization": "Bearer sk-bob"}
            for path, body in (
                ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "marmalade!"}], "max_tokens": 5}),
                ("/v1/completions", {"model": NAME, "prompt": "marmalade!", "max_tokens": 5, "stream": True}),
                ("/v1/completions", {"model": NAME, "prompt": "a", "marmalade!": 1}),
                ("/tokenize", {"prompt": "marmalade!"}),
            ):
                http.post(path, json=body, headers=headers)
            http.get("/marmalade!?sk-bob", headers=headers)
        server = Server("--api-key", "sk-own")
        with server:
            with server.client("sk-own") as client:
                client.completions.create(model=NAME, prompt="marmalade!", max_tokens=3, extra_body={"ignore_eos": True})
            server.terminate()
            self.assertEqual(server.wait(), 0)
        (line,) = map(json.loads, server.log)
        self.assertEqual((line["path"], line["status"], line["key"], line["model"]), ("/v1/completions", 200, "key 1", NAME))
        self.assertEqual((line["prompt_tokens"] > 0, line["completion_tokens"], line["finish_reasons"]), (True, 3, ["max_tokens"]))
        for line in [*self.server.log, *self.server.errors, *server.log, *server.errors]:
            for secret in ("marmalade", "sk-"):
                self.assertNotIn(secret, line)

    def test_an_origin_that_is_allowed(self):
        with self.server.http() as http:
            asked = {"origin": "http://page.example", "access-control-request-method": "POST",
                     "access-control-request-headers": "authorization,content-type"}  # fmt: skip
            answer = http.options("/v1/chat/completions", headers=asked)
            self.assertEqual(answer.headers["access-control-allow-origin"], "http://page.example")
            other = http.options("/v1/chat/completions", headers={**asked, "origin": "http://evil.example"})
            self.assertNotIn("access-control-allow-origin", other.headers)


class Page(unittest.TestCase):
    """The page at /, whichever it is, runs its own scripts alone."""

    def test_a_page(self):
        import sys

        sys.path.insert(0, str(PACKAGES))
        from xserv_server.page import Page, policy_of

        html = "<!doctype html><style>a{}</style><script>let x = '<b>';\r\n</script><script src=x.js></script>"
        policy = policy_of(html)
        # By: printf 'a{}' | openssl dgst -sha256 -binary | base64
        self.assertIn("style-src 'sha256-X1RutGBrXCt9KkSaXMK7tHftWiRscFHOhxsS8tv8hBk=';", policy)
        # The line ends as a browser reads it.
        self.assertIn("script-src 'sha256-rQOXoR2ohy2GW9+BSrGjgzm8ztpJvSlAssXRqZwi6IQ=';", policy)
        self.assertNotIn("unsafe", policy)
        self.assertTrue(policy.startswith("default-src 'none';"))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "page.html")
            file.write_bytes(html.encode())
            answer = Page(file).response()
        self.assertEqual(answer.body, html.encode())
        self.assertEqual(answer.headers["content-security-policy"], policy)
        self.assertTrue(answer.headers["content-type"].startswith("text/html"))

    def test_what_the_server_has(self):
        has_page = (PACKAGES / "xserv_server" / "page.html").is_file()
        for options, expected in ((), 200 if has_page else 404), (("--no-page",), 404):
            with Server(*options) as server, server.http() as http:
                answer = http.get("/")
                self.assertEqual(answer.status_code, expected)
                if expected == 200:
                    self.assertIn("default-src 'none'", answer.headers["content-security-policy"])


class Start(unittest.TestCase):
    """Errors of a server that does not start."""

    def fails(self, *options, **more):
        with self.assertRaises(AssertionError) as raised:
            Server(*options, **more).close()
        return str(raised.exception)

    def test_reasons(self):
        self.assertIn("xserv-server: ", self.fails(model="/no/such/folder"))
        self.assertIn("/no/such/file", self.fails("--api-key-file", "/no/such/file"))
        self.assertIn("--port", self.fails("--port", "-5"))
        with tempfile.NamedTemporaryFile("w") as file:
            self.assertIn("has no API key", self.fails("--api-key-file", file.name))
            file.write("one two three\n")
            file.flush()
            self.assertIn("line 1", self.fails("--api-key-file", file.name))

    def test_every_option_of_a_load_has_an_option_of_the_command(self):
        given = (
            "--weights", "int8", "--weights-group-size", "64", "--embeddings", "int8", "--kept-weights", "/tmp/file",
            "--kv-cache-format", "fp8", "--max-swap-bytes", "1", "--no-prefix-cache",
        )  # fmt: skip
        options = load_options_of(options_parser().parse_args(["model", *given]))
        of_a_load = {
            name: parameter.default
            for name, parameter in inspect.signature(xserv.Model.__init__).parameters.items()
            if parameter.kind == inspect.Parameter.KEYWORD_ONLY
        }
        # The first two are functions; files that are mapped end a server when someone cuts them short.
        for name in ("progress", "log", "map_files"):
            of_a_load.pop(name)
        self.assertEqual(options.keys(), of_a_load.keys())
        self.assertEqual(load_options_of(options_parser().parse_args(["model"])), of_a_load)
        with tempfile.TemporaryDirectory() as folder:
            options.update(device="cpu", num_threads=2, kept_weights=str(Path(folder, "kept")))
            for _ in range(2):
                with xserv.Model(MODEL, **options) as model:
                    self.assertTrue(model.generate("Once", max_tokens=2).text)

    def test_a_port_in_use(self):
        with Server() as server:
            said = self.fails("--port", str(server.port))
        self.assertIn("in use", said)
        self.assertNotIn("Traceback", said)


if __name__ == "__main__":
    os.environ.pop("XSERV_API_KEY", None)
    unittest.main()
