"""Replicas that are killed, that come and that go, under load."""

import asyncio
import random

import openai
import pytest
from conftest import NAME, NEVER, until

TOKENS = 400


class Load:
    """Clients that ask again and again, and what has become of their requests."""

    def __init__(self, cluster, num_streaming, num_whole, tokens=TOKENS):
        self.cluster, self.tokens = cluster, tokens
        self.kinds = [True] * num_streaming + [False] * num_whole
        self.whole = self.told = 0
        self.lost = []
        self.goes_on = True
        #: Streams that have had an event, and have not come to their end.
        self.open = 0

    async def ask(self, client, stream, number):
        # Prompts of their own: requests of all kinds are on both replicas.
        asked = {
            "model": NAME,
            "messages": [{"role": "user", "content": f"Tell me a story about the number {number}."}],
            "max_tokens": self.tokens,
            "extra_body": {"ignore_eos": True},
        }
        has_begun = False
        try:
            if not stream:
                answer = await client.chat.completions.create(**asked)
                assert answer.usage.completion_tokens == self.tokens
            else:
                reasons = []
                async for chunk in await client.chat.completions.create(stream=True, **asked):
                    if not has_begun:
                        has_begun = True
                        self.open += 1
                    reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
                assert reasons == ["length"], reasons
            self.whole += 1
        except openai.APIError as error:
            # A stream that has begun is told by an event. Nothing else may fail.
            if has_begun and getattr(error, "code", None) == "replica_lost":
                self.told += 1
            else:
                self.lost.append((stream, has_begun, repr(error)))
        except AssertionError as error:
            self.lost.append((stream, has_begun, repr(error)))
        finally:
            if has_begun:
                self.open -= 1

    async def client(self, client, stream, seed):
        chance = random.Random(seed)
        while self.goes_on:
            await self.ask(client, stream, chance.randrange(10**6))

    async def run(self, script):
        """Runs the clients, and a script on another thread meanwhile; they then finish what they have begun."""
        async with self.cluster.async_client() as client:
            tasks = [asyncio.ensure_future(self.client(client, kind, seed)) for seed, kind in enumerate(self.kinds)]
            try:
                await asyncio.to_thread(script, self)
            finally:
                self.goes_on = False
                await asyncio.wait_for(asyncio.gather(*tasks), NEVER)


def test_a_killed_replica_loses_nothing_that_had_not_begun(two):
    engines = two.engines()
    assert len(engines) == 2
    killed = []

    def script(load):
        # Which streams are in their middle at a replica's end is a matter of chance: some are after a few ends.
        while len(killed) < 2 or (load.told == 0 and len(killed) < 30):
            # Answers have come to their end since the last time, and others are under way.
            until(lambda: load.whole >= 4 and load.open >= 4, "streams in their middle")
            name = two.engines()[0]
            two.kill(name)
            killed.append(name)
            until(lambda: name not in two.engines() and len(two.engines()) == two.running() == 2, "another replica")
            load.whole = 0

    # Long ones: of a short answer the gateway has all before a replica's end.
    load = Load(two, num_streaming=12, num_whole=8, tokens=1200)
    asyncio.run(load.run(script))
    assert load.lost == []
    assert len(set(killed)) == len(killed)
    # Some streams were cut off, and said so.
    assert load.told > 0
    until(lambda: sum(two.metric("xserv_samples_admitted").values()) == 0, "the samples to end")


def test_all_replicas_killed_at_once_are_waited_for(two):
    until(lambda: two.running() == 2, "two replicas")
    for name in two.engines():
        two.kill(name)
    with two.client() as client:
        answer = client.completions.create(model=NAME, prompt="Once upon a time", max_tokens=4)
        assert answer.usage.completion_tokens == 4


def test_more_than_can_wait_is_refused(cluster):
    cluster.deploy(replicas=1, options="--max-running 2 --max-queued 2")
    asked = {"model": NAME, "prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    async def run():
        async with cluster.async_client() as client:
            return await asyncio.gather(
                *(client.completions.create(**asked) for _ in range(16)), return_exceptions=True
            )

    found = asyncio.run(run())
    refused = [each for each in found if isinstance(each, openai.RateLimitError)]
    assert refused and len(refused) < 16, found
    assert all(each.type == "rate_limit_error" and "retry-after" in each.response.headers for each in refused)
    assert all(each in refused or each.usage.completion_tokens == 1500 for each in found)


def test_replicas_follow_the_load_and_lose_nothing(cluster):
    cluster.deploy(
        min_replicas=1, max_replicas=2, target_requests=2, upscale_seconds=0.5, downscale_seconds=1, options="--grace 60"
    )
    until(lambda: cluster.running() == 1, "one replica")
    load = Load(cluster, num_streaming=4, num_whole=4, tokens=100)
    asyncio.run(load.run(lambda _: until(lambda: cluster.running() == 2, "a second replica")))
    assert load.lost == [] and load.told == 0 and load.whole > 0
    # Few enough for one: the other finishes what it has, and goes.
    load = Load(cluster, num_streaming=1, num_whole=0, tokens=100)
    asyncio.run(load.run(lambda _: until(lambda: len(cluster.engines()) == 1, "the second replica to go")))
    assert load.lost == [] and load.told == 0 and load.whole > 0


def test_a_model_that_is_not_there_says_so(cluster):
    with pytest.raises(RuntimeError):
        cluster.deploy(replicas=1, model="/no/such/folder")
