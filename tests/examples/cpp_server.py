"""Talks to examples/cpp/server.cpp as clients do, good ones and bad ones:  cpp_server.py SERVER MODEL"""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading

LIMIT = 120  # seconds; nothing here takes as long
STORY = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 12}


class Server:
    def __init__(self, program, model):
        self.process = subprocess.Popen([program, model, "0"], stderr=subprocess.PIPE, text=True)
        self.port = int(self.process.stderr.readline().rpartition(":")[2])

    def ask(self, method, path, body=None, headers={}):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def chat(self, **fields):
        return self.ask("POST", "/v1/chat/completions", {**STORY, **fields})

    def refuses(self, words, status=400, param=None, **fields):
        self.is_error(self.chat(**fields), words, status, param)

    def is_error(self, answer, words, status=400, param=None):
        assert answer[0] == status, answer
        error = json.loads(answer[1])["error"]
        assert words in error["message"] and error["param"] == param, answer
        assert error["type"] == "invalid_request_error", answer


def events(text):
    *lines, last = [line for line in text.split("\n\n") if line]
    assert last == "data: [DONE]", text
    return [json.loads(line[len("data: ") :]) for line in lines]


def answers(server):
    assert server.ask("GET", "/health") == (200, '{"status":"ok"}')
    status, text = server.ask("GET", "/v1/models")
    (model,) = json.loads(text)["data"]
    assert status == 200 and model["id"] == "tiny-qwen3" and model["max_model_len"] > 100, text

    status, text = server.chat(model="tiny-qwen3")
    whole = json.loads(text)
    choice = whole["choices"][0]
    assert status == 200 and whole["object"] == "chat.completion", text
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) > 5, text
    assert choice["finish_reason"] in ("length", "stop"), text
    assert 1 <= whole["usage"]["completion_tokens"] <= 12 and whole["usage"]["prompt_tokens"] > 5, text

    status, text = server.chat(stream=True, stream_options={"include_usage": True})
    found = events(text)
    assert status == 200 and found[-1]["choices"] == [] and found[-1]["usage"] == {
        **whole["usage"], "prompt_tokens_details": found[-1]["usage"]["prompt_tokens_details"]
    }, text  # fmt: skip
    deltas = [event["choices"][0]["delta"] for event in found[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"], text
    assert found[-2]["choices"][0]["finish_reason"] == choice["finish_reason"], text
    assert len(deltas) > 3, text
    assert "usage" not in events(server.chat(stream=True)[1])[0]

    stopped = json.loads(server.chat(stop=[choice["message"]["content"][3:6]])[1])["choices"][0]
    assert stopped["message"]["content"] == choice["message"]["content"][:3] and stopped["finish_reason"] == "stop", stopped


def refusals(server):
    server.refuses("there is no parameter best", param="best", best=3)
    server.refuses("temperature must be a number", param="temperature", temperature="hot")
    server.refuses("max_tokens must be a number", param="max_tokens", max_tokens=1.5)
    server.refuses("max_tokens must be a number", param="max_tokens", max_tokens=-1)
    server.refuses("max_tokens must be a number", param="max_tokens", max_tokens=10**12)
    server.refuses("there is no model", param="model", model="gpt")
    server.refuses("stream must be true or false", param="stream", stream="yes")
    server.refuses("stop must be a text", param="stop", stop=[3])
    server.refuses("messages must be a list", param="messages", messages="Hello")
    server.refuses("content", messages=[{"role": "user", "content": 3}])
    server.refuses("tools", tools={"no": "list"})
    server.refuses("token", messages=[{"role": "user", "content": "word " * 20000}])
    chat = "/v1/chat/completions"
    server.is_error(server.ask("POST", chat, b"{"), "not JSON")
    server.is_error(server.ask("POST", chat, b'{"messages": "\xff"}'), "not JSON")
    server.is_error(server.ask("POST", chat, b"[]"), "must be an object")
    server.is_error(server.ask("POST", chat, b'{"temperature": 1e999}'), "not JSON")
    server.is_error(server.ask("POST", chat, b'{"messages": ' + b"[" * 1_000_000), "nested")
    server.is_error(server.ask("POST", chat, STORY, {"Content-Type": "text/plain"}), "application/json")
    server.is_error(server.ask("GET", "/nothing"), "nothing at this path", 404)
    server.is_error(server.ask("GET", "/health", headers={"Host": "evil.example:80"}), "evil.example", 403)
    # A body that is too large is refused by what it declares, or the connection ends.
    try:
        server.is_error(server.ask("POST", chat, b" " * (9 << 20)), "too large", 413)
    except OSError:
        pass
    with socket.create_connection(("127.0.0.1", server.port), LIMIT) as rubbish:
        rubbish.sendall(b"\x00\xff\r\n\r\n" * 100)


def stream_of(server, count):
    """Opens a stream of as many tokens as the context takes, and reads the first of its bytes."""
    body = json.dumps({**STORY, "max_tokens": count, "stream": True, "temperature": 1.5}).encode()
    client = socket.create_connection(("127.0.0.1", server.port), LIMIT)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    return client


def clients_that_leave(server):
    """More of them than there are threads for connections: each must make room for the next."""
    for _ in range(3):
        clients = [stream_of(server, 2000) for _ in range(40)]
        for client in clients:
            client.close()
    status, text = server.chat()
    assert status == 200, text


def many_at_once(server):
    expected, found = server.chat()[1], []
    content = lambda text: json.loads(text)["choices"][0]["message"]["content"]  # noqa: E731
    threads = [threading.Thread(target=lambda: found.append(server.chat()[1])) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [content(text) for text in found] == [content(expected)] * 20, found


def main():
    program, model = sys.argv[1:]
    server = Server(program, model)
    try:
        for part in (answers, refusals, clients_that_leave, many_at_once):
            part(server)
            print(part.__name__, "ok", flush=True)
        client = stream_of(server, 2000)  # it ends with the server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
        client.close()
        print("end ok")
    finally:
        server.process.kill()
        server.process.wait()


main()
