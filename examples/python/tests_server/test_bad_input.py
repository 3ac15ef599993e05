"""Requests that no client should send: every answer is an error in OpenAI's shape, and the server goes on."""

import json
import socket
import time
import unittest

from support import NAME, NEVER, Server, story

JSON = {"content-type": "application/json"}


def head_of(path="/v1/completions", method="POST", **headers):
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class BadInput(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(
            "--max-body-bytes", "1000000", "--head-seconds", "0.5", "--body-seconds", "0.7", "--stall-seconds", "1",
            "--max-connections", "40",
        )  # fmt: skip
        cls.addClassCleanup(cls.server.close)
        cls.http = cls.server.http()
        cls.addClassCleanup(cls.http.close)

    def tearDown(self):
        self.server.wait_for("xserv_samples_admitted", 0)
        answer = self.http.post("/v1/completions", json={"model": NAME, "prompt": "Once", "max_tokens": 1})
        self.assertEqual(answer.status_code, 200, answer.text)
        self.assertIsNone(self.server.process.poll())
        # Mistakes of clients are no errors of the server.
        self.assertEqual("".join(self.server.errors[1:]), "")

    def check(self, answer, status, param=None):
        self.assertEqual(answer.status_code, status, answer.text)
        self.assertEqual(answer.headers["content-type"], "application/json")
        error = answer.json()["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertTrue(error["message"])
        self.assertEqual(error["param"], param, error)
        return error

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.server.port), NEVER)
        self.addCleanup(connection.close)
        return connection

    def answer_of(self, connection):
        """The status and the error of what comes until the connection is closed."""
        data = b""
        while True:
            more = connection.recv(1 << 16)
            if not more:
                break
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)["error"] if body else None

    def test_bodies_that_are_no_json(self):
        for body in (b"", b"{", b"[1, 2", b"\xff\xfe", b'{"model": "\\ud800"}', b"NaN", b"[" * 100000, b'{"a":' * 100000, b"\0"):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                self.check(self.http.post(path, content=body, headers=JSON), 400)
        for body in (b"[]", b"5", b"null", b'"text"'):
            self.check(self.http.post("/v1/completions", content=body, headers=JSON), 400)

    def test_bodies_of_other_types(self):
        body = json.dumps({"model": NAME, "prompt": "a"}).encode()
        # A web page of another origin can send these without asking.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            headers = {"content-type": kind} if kind else {}
            self.check(self.http.post("/v1/completions", content=body, headers=headers), 415)
        answer = self.http.post("/v1/completions", content=body, headers={"content-type": "application/json; charset=utf-8"})
        self.assertEqual(answer.status_code, 200)

    def test_wrong_types_are_told_by_name(self):
        for name, value in (
            ("model", 5), ("stream", "yes"), ("n", "2"), ("n", 0), ("n", 1.5), ("n", 10**30), ("n", True), ("max_tokens", -1),
            ("max_tokens", "many"), ("max_tokens", 1e5), ("temperature", "hot"), ("temperature", -0.1), ("temperature", None),
            ("temperature", [1]), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("presence_penalty", 3),
            ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", "x"), ("seed", 2**70), ("stop", 5), ("stop", {}),
            ("logit_bias", [1]), ("logit_bias", "x"), ("stream_options", 5), ("user", {"not": "a string"}),
            ("response_format", "json"), ("min_tokens", -1), ("ignore_eos", 1), ("stop_token_ids", "a"),
        ):  # fmt: skip
            for path, more in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": story()})):
                answer = self.http.post(path, json={"model": NAME, "max_tokens": 1, **more, name: value})
                if value is None or name == "user":
                    self.assertEqual(answer.status_code, 200, answer.text)
                else:
                    with self.subTest(name=name, value=value, path=path):
                        self.check(answer, 400, name)

    def test_unknown_parameters_are_told_by_name(self):
        for name, value in (
            ("temprature", 1), ("use_beam_search", True), ("length_penalty", 2.0), ("best_of", 3), ("bad_words", ["a"]),
            ("prompt_logprobs", 1), ("truncate_prompt_tokens", 4), ("prediction", {}), ("verbosity", "low"),
        ):  # fmt: skip
            body = {"model": NAME, "prompt": "a", "max_tokens": 1, name: value}
            error = self.check(self.http.post("/v1/completions", json=body), 400, name)
            self.assertIn(name, error["message"])
        body = {"model": NAME, "messages": story(), "stream_options": {"unheard_of": 1}, "stream": True}
        self.check(self.http.post("/v1/chat/completions", json=body), 400, "stream_options.unheard_of")
        body = {"model": NAME, "messages": story(), "stream_options": {"include_usage": True}}
        self.check(self.http.post("/v1/chat/completions", json=body), 400, "stream_options")

    def test_messages(self):
        for messages, param in (
            ([], "messages"), ("text", "messages"), ([5], "messages[0]"), ([{}], "messages[0].role"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([*story(), {"role": "wizard", "content": "a"}], "messages[1].role"),
            ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].text"),
        ):  # fmt: skip
            answer = self.http.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
            with self.subTest(messages=messages):
                self.assertEqual(answer.status_code, 400)
                self.assertTrue(answer.json()["error"]["param"].startswith(param.rpartition(".")[0]), answer.text)

    def test_unknown_models_and_paths(self):
        body = {"model": "gpt-4o", "prompt": "a"}
        error = self.check(self.http.post("/v1/completions", json=body), 404, "model")
        self.assertEqual(error["code"], "model_not_found")
        long = self.http.post("/v1/completions", json={"model": "x" * 10**5, "prompt": "a"})
        self.assertLess(len(long.text), 1000)
        self.check(self.http.post("/v1/completions", json={"prompt": "a"}), 400, "model")
        self.check(self.http.get("/v1/nothing"), 404)
        self.check(self.http.get("/../../etc/passwd"), 404)
        self.check(self.http.get("/v1/completions"), 405)
        self.check(self.http.delete("/v1/models"), 405)

    def test_a_long_body_is_refused_by_its_declared_length(self):
        connection = self.connect()
        connection.sendall(head_of(content_length=100 << 20))
        data = connection.recv(1 << 16)
        self.assertTrue(data.startswith(b"HTTP/1.1 413 "), data)

    def test_a_long_body_is_refused_whatever_it_declares(self):
        def pieces():
            for _ in range(100):
                yield b" " * (1 << 20)

        memory = self.memory()
        with self.server.http() as http:
            self.check(http.post("/v1/completions", content=pieces(), headers=JSON), 413)
            self.check(http.post("/v1/completions", content=b" " * (100 << 20), headers=JSON), 413)
        self.assertLess(self.memory() - memory, 64 << 10)

    def memory(self):
        with open(f"/proc/{self.server.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    def test_what_is_no_http(self):
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n" + b"x" * 100):
            connection = self.connect()
            connection.sendall(data)
            status, error = self.answer_of(connection)
            self.assertEqual((status, error["type"]), (400, "invalid_request_error"))

    def test_endless_headers(self):
        connection = self.connect()
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for number in range(100):
                connection.sendall(f"x-{number}: {'a' * 4000}\r\n".encode())
        except OSError:
            return  # closed already
        try:
            self.assertEqual(self.answer_of(connection)[0], 431)
        except ConnectionError:
            pass

    def test_slow_heads_and_bodies(self):
        silent, slow, body = self.connect(), self.connect(), self.connect()
        slow.sendall(b"POST /v1/completions HT")
        body.sendall(head_of(content_length=100) + b'{"model"')
        self.assertEqual(self.answer_of(slow)[0], 408)
        self.assertEqual(self.answer_of(body)[0], 408)
        self.assertEqual(silent.recv(1), b"")

    def test_a_trickling_body(self):
        connection = self.connect()
        connection.sendall(head_of(content_length=1000))
        try:
            for _ in range(1000):
                connection.sendall(b" ")
                time.sleep(0.02)
            self.fail("the server has taken all of it")
        except OSError:
            pass

    def test_half_open_connections(self):
        connections = [self.connect() for _ in range(30)]
        for connection in connections:
            connection.sendall(head_of(content_length=50))
        # One that closes its half has left.
        half = self.connect()
        half.sendall(head_of(content_length=50))
        half.shutdown(socket.SHUT_WR)
        self.assertEqual(half.recv(1), b"")
        self.assertEqual(self.http.get("/health").status_code, 200)
        for connection in connections:
            self.assertEqual(self.answer_of(connection)[0], 408)

    def test_too_many_connections(self):
        connections = [self.connect() for _ in range(60)]
        refused = 0
        for connection in connections:
            data = connection.recv(1 << 16)
            refused += data.startswith(b"HTTP/1.1 503 ")
        self.assertGreaterEqual(refused, 20)

    def test_a_client_that_takes_nothing(self):
        # Its window is small, and the answer long.
        connection = socket.socket()
        self.addCleanup(connection.close)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(NEVER)
        connection.connect(("127.0.0.1", self.server.port))
        prompts = ["Once upon a time"] * 100
        body = {"model": NAME, "prompt": prompts, "max_tokens": 300, "stream": True, "ignore_eos": True, "logprobs": 20}
        data = json.dumps(body).encode()
        connection.sendall(head_of(content_length=len(data)) + data)
        self.server.wait_for("xserv_requests_disconnected_total", 1)

    def test_pipelined_requests_of_one_who_leaves(self):
        before = self.server.metric("xserv_requests_disconnected_total")
        connection = self.connect()
        body = json.dumps({"model": NAME, "prompt": "Once", "max_tokens": 1900, "stream": True, "ignore_eos": True}).encode()
        connection.sendall((head_of(content_length=len(body)) + body) * 5)
        connection.recv(100)
        connection.close()
        self.server.wait_for("xserv_requests_disconnected_total", before + 1)

    def test_one_who_leaves_after_a_long_body(self):
        """A body that comes at once pauses the reading, which has to go on for the end of the connection to be seen."""
        for is_stream in (True, False):
            before = self.server.metric("xserv_requests_disconnected_total")
            fields = {"prompt": "Once", "max_tokens": 1900, "stream": is_stream, "ignore_eos": True, "user": "u" * 300000}
            body = json.dumps({"model": NAME, **fields}).encode()
            with socket.create_connection(("127.0.0.1", self.server.port), NEVER) as connection:
                connection.sendall(head_of(content_length=len(body)) + body)
                self.server.wait_for("xserv_samples_admitted", 1)
            self.server.wait_for("xserv_requests_disconnected_total", before + 1)

    def test_other_hosts(self):
        # A page that has had its own name resolved to this machine.
        self.check(self.http.get("/v1/models", headers={"host": "evil.example"}), 403)
        for host in ("localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST"):
            self.assertEqual(self.http.get("/v1/models", headers={"host": host}).status_code, 200)

    def test_other_origins(self):
        for method, headers in (("GET", {}), ("OPTIONS", {"access-control-request-method": "POST"})):
            answer = self.http.request(method, "/v1/models", headers={"origin": "http://evil.example", **headers})
            self.assertNotIn("access-control-allow-origin", answer.headers)


if __name__ == "__main__":
    unittest.main()
