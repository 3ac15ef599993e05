"""All kinds of clients at once: each gets its own answer, and nothing is left of those who left."""

import asyncio
import json
import os
import random
import unittest

import httpx
from support import NAME, NEVER, Server, story

WORDS = ("hot", "big", "happy", "early", "left", "easy", "dirty", "win")
CITY = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}


class Mixture(unittest.TestCase):
    maxDiff = None

    def test_everybody_gets_their_own(self):
        with Server("--max-running", "40", "--max-queued", "30", "--no-request-log") as server:
            descriptors = f"/proc/{server.process.pid}/fd"
            self.run_all(server)
            num_open = len(os.listdir(descriptors))
            self.run_all(server)
            self.assertLessEqual(len(os.listdir(descriptors)), num_open + 5)
            self.assertEqual("".join(server.errors[1:]), "")

    def run_all(self, server):
        asyncio.run(asyncio.wait_for(self.clients(server), NEVER))
        for name in ("xserv_samples_admitted", "xserv_requests_queued", "xserv_num_requests_running"):
            server.wait_for(name, 0)
        server.wait_for("xserv_kv_cache_blocks_used", 0)

    async def clients(self, server):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=NEVER, limits=limits) as http:
            bodies = [self.body_of(word) for word in WORDS]
            self.expected = [(await http.post("/v1/completions", json=body)).json()["choices"] for body in bodies]
            await asyncio.gather(*(self.client(http, number) for number in range(60)))

    def body_of(self, word):
        return {"model": NAME, "prompt": f"The opposite of {word} is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    async def client(self, http, number):
        chance = random.Random(number)
        for _ in range(4):
            await chance.choice((self.asks, self.streams, self.leaves, self.errs, self.wants_a_form))(http, chance)

    async def post(self, http, path, body):
        """Tries again where the queue is full."""
        while True:
            answer = await http.post(path, json=body)
            if answer.status_code != 429:
                return answer
            await asyncio.sleep(0.02)

    async def asks(self, http, chance):
        picked = [chance.randrange(len(WORDS)) for _ in range(chance.randrange(1, 4))]
        body = {**self.body_of(""), "prompt": [f"The opposite of {WORDS[index]} is" for index in picked]}
        choices = (await self.post(http, "/v1/completions", body)).json()["choices"]
        self.assertEqual([each["text"] for each in choices], [self.expected[index][0]["text"] for index in picked])

    async def streams(self, http, chance):
        index = chance.randrange(len(WORDS))
        answer = await self.post(http, "/v1/completions", {**self.body_of(WORDS[index]), "stream": True})
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        self.assertEqual(events.pop(), "[DONE]")
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        self.assertEqual(text, self.expected[index][0]["text"])

    async def leaves(self, http, chance):
        body = {"model": NAME, "messages": story(), "stream": chance.random() < 0.5, "n": chance.randrange(1, 4), "ignore_eos": True}
        try:
            await asyncio.wait_for(http.post("/v1/chat/completions", json=body), chance.random() * 0.2)
        except asyncio.TimeoutError:
            pass

    async def errs(self, http, chance):
        body = chance.choice((b"{", b'{"model": 5}', b'{"model": "tiny-qwen3", "prompt": "a", "temperature": -1}'))
        answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        self.assertEqual(answer.status_code, 400)

    async def wants_a_form(self, http, chance):
        form = {"type": "json_schema", "json_schema": {"schema": CITY}}
        body = {"model": NAME, "messages": story(), "max_tokens": 20, "response_format": form, "seed": chance.randrange(99)}
        answer = await self.post(http, "/v1/chat/completions", body)
        self.assertTrue(answer.json()["choices"][0]["message"]["content"].startswith("{"), answer.text)


if __name__ == "__main__":
    unittest.main()
