#!/usr/bin/env python3
"""Measures what the settings of sampling cost: many requests at once, with settings that people use.

    PYTHONPATH=examples/python python3 tests/bench/sampling.py FOLDER [--requests 256] [--prompt 128] [--tokens 256]
        [--repeats 3] [--device auto] [--random] [--json] [--only WORDS]

Each setting runs in turn, and all of them again for every repeat, so that a machine that changes its speed changes it
for all. The rate is that of the fastest run, in generated tokens a second of the whole run; the ratio is to the rate
of sampling with a temperature alone. --random makes up the weights, of which only config.json is read. --only keeps
the settings whose names contain one of the words, which are separated by commas, beside the first. The answers of the
constraints never end by themselves, so that all settings generate as many tokens.
"""

import argparse
import ctypes
import json
import random
import time

import xserv
from xserv import _library as c
from xserv._options import LogitBias, Request

CHAT = dict(temperature=0.7, top_k=20, top_p=0.95)
PENALTIES = dict(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
# Forms that have no end within any number of tokens that is measured.
RECORD = dict(
    type="object", additionalProperties=False, required=["name", "age", "tags", "kind", "score"],
    properties=dict(
        name=dict(type="string", maxLength=40), age=dict(type="integer", minimum=0, maximum=150),
        tags=dict(type="array", items=dict(type="string", maxLength=12), maxItems=4),
        kind=dict(enum=["person", "place", "thing"]), score=dict(type="number"),
    ),
)
SCHEMA = json.dumps(dict(type="array", items=RECORD, minItems=10000))
CHOICE = "((yes|no|perhaps|in the afternoon|never before)[,;] )+"
SETTINGS = {
    "temperature": dict(temperature=0.7),
    "greedy": dict(),
    "top-k 20, top-p 0.95": CHAT,
    "the same, three penalties": dict(CHAT, **PENALTIES),
    "the same, 50 biases": dict(CHAT, **PENALTIES, bias=50),
    "greedy, repetition penalty": dict(repetition_penalty=1.1),
    "top-k 20, top-p 0.95, 5 log-probs": dict(CHAT, num_log_probs=5),
    "the same, processed": dict(CHAT, num_log_probs=5, processed_log_probs=1),
    "all of these": dict(CHAT, **PENALTIES, bias=50, num_log_probs=5),
    "top-p 0.95": dict(temperature=1.0, top_p=0.95),
    "top-k 1000": dict(temperature=1.0, top_k=1000),
    "min-p 0.05": dict(temperature=1.0, min_p=0.05),
    "typical-p 0.9": dict(temperature=1.0, typical_p=0.9),
    "JSON schema": dict(temperature=0.7, constraint=(c.CONSTRAINT_JSON_SCHEMA, SCHEMA)),
    "choice/regex": dict(temperature=0.7, constraint=(c.CONSTRAINT_REGEX, CHOICE)),
    "JSON schema, half of the requests": dict(temperature=0.7, constraint=(c.CONSTRAINT_JSON_SCHEMA, SCHEMA), every=2),
}


def check(status):
    if status:
        raise RuntimeError(c.library.xserv_last_error().decode())


def request_with(setting, prompt, max_tokens, seed):
    request = Request()
    c.library.xserv_request_init(ctypes.byref(request), ctypes.sizeof(Request))
    ids = (ctypes.c_uint32 * len(prompt))(*prompt)
    values = dict(dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0), **setting)
    num_biases = values.pop("bias", 0)
    biases = (LogitBias * num_biases)(*[LogitBias(100 + 7 * i, -1.0) for i in range(num_biases)])
    kind, text = values.pop("constraint", (0, ""))
    text = text.encode()
    if kind and seed % values.pop("every", 1) == 0:
        request.constraint_kind, request.constraint, request.constraint_len = kind, text, len(text)
    for name, value in values.items():
        setattr(request, name, value)
    request.prompt_tokens, request.num_prompt_tokens = ctypes.cast(ids, type(request.prompt_tokens)), len(prompt)
    if num_biases:
        request.logit_bias = ctypes.cast(biases, type(request.logit_bias))
        request.num_logit_bias = num_biases
    request.max_tokens, request.ignore_eos, request.seed = max_tokens, 1, seed
    return request, (ids, biases, text)  # which must live until the request is submitted


def run(handle, setting, num_requests, prompt_tokens, max_tokens):
    """Returns the generated tokens a second of a run of all requests."""
    dice = random.Random(time.monotonic_ns())
    prompts = [[dice.randrange(1000, 30000) for _ in range(prompt_tokens)] for _ in range(num_requests)]
    requests = [request_with(setting, prompt, max_tokens, seed) for seed, prompt in enumerate(prompts)]
    options = c.SubmitOptions()
    c.library.xserv_submit_options_init(ctypes.byref(options), ctypes.sizeof(c.SubmitOptions))
    options.events = 1 << c.EVENT_DONE
    event = c.Event(struct_size=ctypes.sizeof(c.Event))
    submissions = []
    began = time.monotonic()
    for request, _ in requests:
        submission = ctypes.c_void_p()
        check(c.library.xserv_submit(handle, ctypes.byref(request), ctypes.byref(options), ctypes.byref(submission)))
        submissions.append(submission)
    for submission in submissions:
        event.kind = c.EVENT_NONE
        while event.kind != c.EVENT_DONE:
            check(c.library.xserv_next(submission, c.WAIT_FOREVER, ctypes.byref(event)))
    seconds = time.monotonic() - began
    for submission in submissions:
        c.library.xserv_submission_free(submission)
    return num_requests * max_tokens / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    model = xserv.Model(
        arguments.folder, device=arguments.device, random_weights=arguments.random,
        kv_cache_tokens=arguments.requests * (arguments.prompt + arguments.tokens + 64),
    )
    handle, sizes = model._live_handle(), (arguments.requests, arguments.prompt, arguments.tokens)
    words = (arguments.only or "").split(",")
    settings = {name: setting for name, setting in SETTINGS.items() if any(word in name for word in words)}
    settings = {"temperature": SETTINGS["temperature"], **settings}
    # The first kernels are loaded, and the compiler of constraints is made.
    run(handle, {}, arguments.requests, arguments.prompt, 8)
    run(handle, SETTINGS["JSON schema"], arguments.requests, arguments.prompt, 8)
    rates = {name: [] for name in settings}
    for _ in range(arguments.repeats):
        for name, setting in settings.items():
            rates[name].append(run(handle, setting, *sizes))
    base = max(rates["temperature"])
    rows = [dict(setting=name, tokens_per_second=max(all_), ratio=max(all_) / base) for name, all_ in rates.items()]
    if arguments.json:
        print(json.dumps(dict(requests=sizes[0], prompt=sizes[1], tokens=sizes[2], rows=rows)))
        return
    print(f"{sizes[0]} requests of {sizes[1]} + {sizes[2]} tokens, best of {arguments.repeats}")
    for row in rows:
        print(f"{row['setting']:36} {row['tokens_per_second']:10.0f} tok/s   {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
