"""Loads a server with streaming clients, some of which leave in the middle:

    python3 load.py MODEL [--clients 200] [--seconds 60] [--disconnects 0.1] [--max-tokens 64] [--vary] [--no-stream]

starts a server for the model, or uses the one at --url, and prints a line of JSON: events and tokens a second, what was
lost, the time to the first token, the server's memory at the beginning and the end, the processor time of its event loop
for each event, and, with --direct, the rate of the library alone at the same concurrency. Requests have the same length, so that
they all begin and end together, or with --vary a quarter to seven quarters of it. The steady rates are those from
--warm-up seconds on, until the first client stops, by the library's own count.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time

from support import Server


class Counts:
    def __init__(self):
        self.events = self.tokens = self.whole = self.left = self.lost = self.refused = 0
        self.first = []


def length_of(arguments, number):
    """The tokens of request `number`."""
    if not arguments.vary:
        return arguments.max_tokens
    return random.Random(number).randrange(arguments.max_tokens // 4, arguments.max_tokens * 7 // 4 + 1)


def body_of(arguments, number):
    body = {
        "model": arguments.name,
        "messages": [{"role": "user", "content": f"Tell me a story about the number {number}."}],
        "max_tokens": length_of(arguments, number),
        "ignore_eos": True,
        "stream": not arguments.no_stream,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


async def ask(arguments, counts, number, leaves_after):
    """Sends a request and reads its answer to the end, or leaves after this many events."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(arguments.host, arguments.port)
    try:
        body = body_of(arguments, number)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        if arguments.no_stream:
            answer = await reader.read()
            if b" 429 " in answer[:20]:
                counts.refused += 1
                await asyncio.sleep(0.1)
                return
            counts.tokens += json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"]
            counts.whole += 1
            return
        events, tail, is_first = 0, b"", True
        while True:
            data = await reader.read(1 << 16)
            if not data:
                break
            if is_first and b" 429 " in data[:20]:
                counts.refused += 1
                await asyncio.sleep(0.1)
                return
            if is_first:
                counts.first.append(time.perf_counter() - began)
                is_first = False
            found = data.count(b"data: ")
            events += found
            counts.events += found
            tail = (tail + data)[-1000:]
            if leaves_after is not None and events >= leaves_after:
                counts.left += 1
                counts.tokens += events
                return
        if b"data: [DONE]" in tail and b'"error"' not in tail:
            counts.whole += 1
            counts.tokens += int(tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0])
        else:
            counts.lost += 1
    except (OSError, ValueError):
        counts.lost += 1
    finally:
        writer.close()


async def client(arguments, counts, until, seed):
    chance = random.Random(seed)
    while time.perf_counter() < until:
        leaves = chance.random() < arguments.disconnects
        await ask(arguments, counts, chance.randrange(10**6), chance.randrange(1, arguments.max_tokens) if leaves else None)


def memory_of(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) // 1024


def loop_seconds(pid):
    """Processor time of the thread of the event loop: in Python, and in the kernel."""
    with open(f"/proc/{pid}/task/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:13]]


async def tokens_of_server(arguments):
    """The tokens that the server's library has generated so far; None if the server does not tell."""
    reader, writer = await asyncio.open_connection(arguments.host, arguments.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    value = text.partition("\nxserv_engine_generated_tokens_total ")[2].partition("\n")[0]
    return float(value) if value else None


async def steady_rate(arguments, count):
    """Tokens a second between the end of the warm-up and that of the load; `count` tells how many there are."""
    await asyncio.sleep(arguments.warm_up)
    began, first = time.perf_counter(), await count()
    await asyncio.sleep(arguments.seconds - arguments.warm_up)
    last = await count()
    return None if last is None else round((last - first) / (time.perf_counter() - began), 1)


async def run(arguments, pid):
    warm = Counts()
    await asyncio.gather(*(ask(arguments, warm, number, None) for number in range(8)))
    counts = Counts()
    began, memory, used = time.perf_counter(), memory_of(pid) if pid else 0, loop_seconds(pid) if pid else []
    halfway = asyncio.create_task(asyncio.sleep(arguments.seconds / 2))
    steady = asyncio.create_task(steady_rate(arguments, lambda: tokens_of_server(arguments)))
    clients = [client(arguments, counts, began + arguments.seconds, seed) for seed in range(arguments.clients)]
    running = asyncio.gather(*clients)
    await halfway
    middle = memory_of(pid) if pid else 0
    await running
    seconds = time.perf_counter() - began
    made = counts.events or counts.whole
    return {
        "clients": arguments.clients,
        "seconds": round(seconds, 1),
        "whole": counts.whole,
        "left": counts.left,
        "refused": counts.refused,
        "lost": counts.lost,
        "events_per_second": round(counts.events / seconds),
        "tokens_per_second": round(counts.tokens / seconds),
        "steady_tokens_per_second": await steady,
        "first_token_p50_ms": round(statistics.median(counts.first) * 1000, 1) if counts.first else None,
        "memory_mb": [memory, middle, memory_of(pid) if pid else 0],
        "loop_us_per_event": [
            round((now - before) / max(made, 1) * 1e6, 1) for now, before in zip(loop_seconds(pid) if pid else (), used)
        ],
    }


async def direct(arguments):
    """The library's own rates in this process, with as many requests at once."""
    import xserv

    with xserv.Model(arguments.model, random_weights=arguments.random_weights) as model:
        tokens, until = 0, time.perf_counter() + arguments.seconds

        async def one(seed):
            nonlocal tokens
            chance = random.Random(seed)
            while time.perf_counter() < until:
                number = chance.randrange(10**6)
                text = f"Tell me a story about the number {number}."
                options = {"max_tokens": length_of(arguments, number), "ignore_eos": True}
                result = await model.generate_async(
                    messages=[{"role": "user", "content": text}], stream=False, **options
                )
                tokens += len(result.token_ids)

        async def count():
            return model.stats().total_generated_tokens

        began = time.perf_counter()
        steady = asyncio.create_task(steady_rate(arguments, count))
        await asyncio.gather(*(one(seed) for seed in range(arguments.clients)))
        rate = round(tokens / (time.perf_counter() - began))
        return {"direct_tokens_per_second": rate, "direct_steady_tokens_per_second": await steady}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--disconnects", type=float, default=0.1)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vary", action="store_true")
    parser.add_argument("--warm-up", type=float, default=0)
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--server", default="", help="more options of xserv-server")
    parser.add_argument("--url", help="host:port of a server that runs")
    parser.add_argument("--name", help="the model's name there")
    arguments = parser.parse_args()
    arguments.name = arguments.name or os.path.basename(os.path.normpath(arguments.model))
    if arguments.url:
        arguments.host, _, port = arguments.url.rpartition(":")
        arguments.port = int(port)
        report = asyncio.run(run(arguments, None))
    else:
        options = ["--no-request-log", *arguments.server.split()]
        if arguments.random_weights:
            options.append("--random-weights")
        with Server(*options, model=arguments.model) as server:
            arguments.host, arguments.port = "127.0.0.1", server.port
            report = asyncio.run(run(arguments, server.process.pid))
    if arguments.direct:
        report.update(asyncio.run(direct(arguments)))
    print(json.dumps(report))
    return 1 if report["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
