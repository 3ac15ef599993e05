"""Two replicas answer as one server does."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import httpx
import openai
import pytest
import ray
import yaml
from conftest import MODEL, NAME, NEVER, until

STORY = [{"role": "user", "content": "Tell me a story."}]


def test_answers_are_those_of_the_library(two):
    import xserv

    with xserv.Model(MODEL, device="cpu") as model:
        expected = model.generate(messages=STORY, max_tokens=24, temperature=0).text
    asked = {"model": NAME, "messages": STORY, "max_tokens": 24, "temperature": 0}
    with two.client() as client:
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == expected
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert len(chunks) > 2


def test_an_answer_is_not_held_back(two):
    """The first event is there long before the last: a stream of 2000 tokens is left after one."""
    body = {"model": NAME, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", two.url + "/v1/completions", json=body, timeout=NEVER) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        first = next(answer.iter_lines())
    assert json.loads(first[6:])["choices"][0]["finish_reason"] is None


def test_other_paths(two):
    with two.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        with pytest.raises(openai.NotFoundError) as raised:
            client.models.retrieve("none/such")
        assert raised.value.code == "model_not_found"
    with httpx.Client(base_url=two.url, timeout=NEVER) as http:
        tokens = http.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "Once upon a time"
        assert http.get("/health").json() == {"status": "ok"}
        page = http.get("/")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]


def test_errors_keep_their_shape(two):
    with httpx.Client(base_url=two.url, timeout=NEVER) as http:
        for answer, status, code in (
            (http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}), 400, "invalid_json"),
            (http.post("/v1/completions", content=b"{}"), 415, "unsupported_media_type"),
            (http.post("/v1/completions", json={"model": "other", "prompt": "a"}), 404, "model_not_found"),
            (http.post("/v1/completions", json={"model": NAME, "prompt": []}), 400, None),
            (http.get("/nothing"), 404, "not_found"),
            (http.get("/v1/completions"), 405, "method"),
            (http.get("/health", headers={"host": "evil.example"}), 403, "host"),
            (http.get("/metrics", headers={"host": "evil.example"}), 403, "host"),
            (http.post("/v1/completions", content=b" " * (9 << 20)), 413, "request_too_large"),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), error
            assert error["type"] == "invalid_request_error" and error["message"]


def test_turns_find_their_prefix_and_both_replicas_work(two):
    before = two.metric("xserv_generation_tokens_total")
    assert len(before) == 2

    async def talk(client, number):
        """Three turns, of which the later ones find the earlier ones in the cache."""
        messages = [{"role": "user", "content": f"Tell me a story about the number {number}. " + "It is long. " * 20}]
        for turn in range(3):
            answer = await client.chat.completions.create(model=NAME, messages=messages, max_tokens=24)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert turn == 0 or cached > answer.usage.prompt_tokens / 2, (number, turn, answer.usage)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Go on."},
            ]

    async def run():
        async with two.async_client() as client:
            await asyncio.gather(*(talk(client, number) for number in range(12)))

    asyncio.run(run())
    after = until(lambda: two.metric("xserv_generation_tokens_total"), "metrics")
    worked = [after[name] - before[name] for name in before]
    assert sum(worked) > 0 and min(worked) > 0, worked


def leaves_after_one_event(url, body, patience):
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=NEVER) as answer:
        next(answer.iter_lines())


def leaves_before_the_answer(url, body, patience):
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(url, json=body, timeout=patience)


@pytest.mark.parametrize("leaves", [leaves_after_one_event, leaves_before_the_answer])
def test_who_leaves_stops_its_generation(two, leaves):
    """One who leaves early may do so before a replica has the request, one who leaves late after its last token."""
    body = {"model": NAME, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}

    def generated():
        return sum(two.metric("xserv_engine_generated_tokens_total").values())

    for patience in (0.3, 1, 3, 0.3, 1, 3, 10):
        counted = sum(two.metric("xserv_requests_disconnected_total").values())
        before = generated()
        leaves(two.url + "/v1/completions", body, patience)
        until(lambda: sum(two.metric("xserv_samples_admitted").values()) == 0, "the samples to end")
        with contextlib.suppress(TimeoutError):
            until(lambda: sum(two.metric("xserv_requests_disconnected_total").values()) > counted, "the count", 5)
            break
    else:
        raise AssertionError("nobody who left was counted")
    assert generated() - before < 2000
    assert sum(two.metric("xserv_kv_cache_blocks_used").values()) == 0


def test_each_replica_finds_its_gpu(cluster):
    """Ray hands out GPUs that it only believes in; the index is that among those which a process can see."""

    @ray.remote(num_gpus=1, num_cpus=0)
    class Holder:
        def place(self, environment):
            from xserv_ray.engine import device_index

            os.environ.update(environment)
            return ray.get_runtime_context().get_accelerator_ids()["GPU"][0], device_index(7)

    @ray.remote(num_cpus=0)
    def without():
        from xserv_ray.engine import device_index

        return device_index(7)

    holders = [Holder.remote() for _ in range(2)]
    assert sorted(ray.get([holder.place.remote({}) for holder in holders])) == [("0", 0), ("1", 0)]
    # As where Ray has been told to leave CUDA_VISIBLE_DEVICES alone.
    for visible in ("", "0,1"):
        found = ray.get([holder.place.remote({"CUDA_VISIBLE_DEVICES": visible}) for holder in holders])
        assert sorted(found) == [("0", 0), ("1", 1)]
    assert ray.get(without.remote()) == 7
    for holder in holders:
        ray.kill(holder)


def test_the_configuration_file_is_one():
    from ray.serve.schema import ServeDeploySchema
    from xserv_ray import build

    text = (Path(__file__).parent.parent / "serve.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "xserv_ray.app:build"
    build(application.args)


def test_options_that_there_are_not():
    from xserv_ray import build

    with pytest.raises(ValueError, match="no options of xserv-server"):
        build({"model": MODEL, "options": "--no-such"})
    with pytest.raises(ValueError, match="replica"):
        build({"model": MODEL, "replica": 2})
