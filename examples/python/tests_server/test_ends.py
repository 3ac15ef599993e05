"""Ends: clients that leave, queues that are full, requests that take too long, and the server's own end."""

import asyncio
import json
import signal
import threading
import time
import unittest

import httpx
import openai
from support import NAME, NEVER, Server, story

#: Far more tokens than the tests wait for.
LONG = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}


def long_body(**options):
    return {"model": NAME, "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, **options}


class Leaving(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        self.server.wait_for("xserv_samples_admitted", 0)
        self.steps = self.server.metric("xserv_engine_generated_tokens_total")

    def check_it_has_stopped(self):
        self.server.wait_for("xserv_samples_admitted", 0)
        self.server.wait_for("xserv_num_requests_running", 0)
        self.server.wait_for("xserv_kv_cache_blocks_used", 0)
        generated = self.server.metric("xserv_engine_generated_tokens_total") - self.steps
        self.assertLess(generated, 1990)

    def test_from_a_stream(self):
        with self.server.client() as client:
            stream = client.completions.create(stream=True, **LONG)
            next(iter(stream))
            stream.close()
        self.check_it_has_stopped()

    def test_from_a_whole_answer(self):
        with self.assertRaises(httpx.TimeoutException):
            httpx.post(self.server.url + "/v1/completions", json=long_body(), timeout=0.15)
        self.check_it_has_stopped()

    def test_from_one_of_several_prompts(self):
        with self.server.client() as client:
            options = {**LONG, "prompt": ["Once", "Upon", "A time"]}
            stream = client.completions.create(stream=True, n=2, **options)
            next(iter(stream))
            stream.close()
        self.check_it_has_stopped()

    def test_by_cancelling_a_task(self):
        async def run():
            async with self.server.async_client() as client:
                async def read():
                    async for _ in await client.completions.create(stream=True, **LONG):
                        pass

                tasks = [asyncio.ensure_future(read()) for _ in range(10)]
                await asyncio.sleep(0.2)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(run())
        self.server.wait_for("xserv_samples_admitted", 0)
        self.server.wait_for("xserv_kv_cache_blocks_used", 0)


class Queues(unittest.TestCase):
    def test_a_full_queue_says_so(self):
        with Server("--max-running", "2", "--max-queued", "1") as server, server.client() as client:
            running = [client.completions.create(stream=True, **LONG) for _ in range(2)]
            for stream in running:
                next(iter(stream))
            waited = []
            waiting = threading.Thread(
                target=lambda: waited.append(client.completions.create(model=NAME, prompt="Once", max_tokens=2))
            )
            waiting.start()
            server.wait_for("xserv_requests_queued", 1)
            with self.assertRaises(openai.RateLimitError) as raised:
                client.completions.create(model=NAME, prompt="Once")
            self.assertEqual(raised.exception.type, "rate_limit_error")
            self.assertGreaterEqual(int(raised.exception.response.headers["retry-after"]), 1)
            self.assertEqual(waited, [])
            # One that has waited, and leaves, leaves the queue.
            for stream in running:
                stream.close()
            waiting.join(NEVER)
            self.assertEqual(waited[0].usage.completion_tokens, 2)
            server.wait_for("xserv_samples_admitted", 0)

    def test_who_leaves_the_queue(self):
        with Server("--max-running", "1", "--max-queued", "5") as server, server.client() as client:
            stream = client.completions.create(stream=True, **LONG)
            next(iter(stream))
            with self.assertRaises(httpx.TimeoutException):
                httpx.post(server.url + "/v1/completions", json=long_body(), timeout=0.15)
            server.wait_for("xserv_requests_queued", 0)
            stream.close()
            server.wait_for("xserv_samples_admitted", 0)
            # More samples than there is room for have all of it.
            several = client.completions.create(model=NAME, prompt=["a", "b", "c"], n=2, max_tokens=2)
            self.assertEqual(len(several.choices), 6)
            server.terminate()
            self.assertEqual(server.wait(), 0)
        lines = [json.loads(line) for line in server.log]
        self.assertEqual(sorted(line["status"] for line in lines), [200, 200, 499])
        self.assertEqual([line["error"] for line in lines if line["status"] == 499], ["client_closed_request"])
        self.assertEqual([line for line in server.errors if "Traceback" in line], [])

    def test_a_request_that_takes_too_long(self):
        with Server("--request-seconds", "0.2") as server, server.client() as client:
            with self.assertRaises(openai.InternalServerError) as raised:
                client.completions.create(**LONG)
            self.assertEqual((raised.exception.status_code, raised.exception.code), (504, "timeout"))
            with self.assertRaises(openai.APIError) as raised:
                for _ in client.completions.create(stream=True, **LONG):
                    pass
            self.assertEqual(raised.exception.code, "timeout")
            with self.assertRaises(openai.APIError) as raised:
                for _ in client.chat.completions.create(
                    model=NAME, messages=story(), stream=True, extra_body={"ignore_eos": True}
                ):
                    pass
            self.assertEqual(raised.exception.code, "timeout")
            client.completions.create(model=NAME, prompt="Once", max_tokens=2)


class Shutdown(unittest.TestCase):
    def stream_lines(self, server, found):
        with httpx.stream("POST", server.url + "/v1/completions", json=long_body(stream=True), timeout=NEVER) as answer:
            for line in answer.iter_lines():
                found.append(line)

    def start(self, server):
        found = []
        reading = threading.Thread(target=self.stream_lines, args=(server, found))
        reading.start()
        until = time.monotonic() + NEVER
        while not found and time.monotonic() < until:
            time.sleep(0.01)
        return found, reading

    def test_answers_finish(self):
        with Server("--grace", "100") as server:
            found, reading = self.start(server)
            idle = server.http()
            self.addCleanup(idle.close)
            idle.get("/health")
            server.terminate()
            reading.join(NEVER)
            self.assertEqual(server.wait(), 0)
        self.assertEqual(found[-2:], ["data: [DONE]", ""])
        self.assertFalse(any("error" in line for line in found))
        self.assertEqual(json.loads(found[-4][6:])["choices"][0]["finish_reason"], "length")

    def test_answers_are_ended_after_the_grace(self):
        with Server("--grace", "0.1") as server:
            found, reading = self.start(server)
            server.terminate()
            reading.join(NEVER)
            self.assertEqual(server.wait(), 0)
        self.assertEqual(found[-2:], ["data: [DONE]", ""])
        error = json.loads(found[-4][6:])["error"]
        self.assertEqual((error["type"], error["code"]), ("server_error", "shutting_down"))
        self.assertEqual([line for line in server.errors if "Traceback" in line], [])

    def test_nothing_new_is_taken(self):
        with Server("--grace", "0.5", "--max-running", "1") as server:
            found, reading = self.start(server)
            # One that waits has not begun: it is told at once.
            statuses = []

            def wait():
                answer = httpx.post(server.url + "/v1/completions", json=long_body(), timeout=NEVER)
                statuses.append((answer.status_code, answer.json()["error"]["code"]))

            waiting = threading.Thread(target=wait)
            waiting.start()
            server.wait_for("xserv_requests_queued", 1)
            server.process.send_signal(signal.SIGINT)
            waiting.join(NEVER)
            reading.join(NEVER)
            self.assertEqual(server.wait(), 0)
        self.assertEqual(statuses, [(503, "shutting_down")])
        self.assertTrue(found)


if __name__ == "__main__":
    unittest.main()
