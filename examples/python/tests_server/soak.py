"""Many streaming clients for a long time, some of which leave at any moment: nothing is lost, and memory stays flat.

    python3 soak.py MODEL [--clients 200] [--minutes 10] [--disconnects 0.2] [--max-tokens 64]

starts a server for the model, and ends with status 1 if anything was not as it should be. Each request is one of some
with known answers (a seed gives the same text whatever else runs), so that a stream is whole only if its text is that
answer to the letter, and what a client has before it leaves must be its beginning. At the end nothing may be left of
anybody: no sample, no block of the KV cache, no file descriptor. A line of JSON says what there was, with the server's
resident memory over the time.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import struct
import sys
import time

from load import memory_of
from support import NEVER, Server

#: Requests that differ.
KINDS = 64
#: Memory is looked at over the last three quarters, if the run is as long as this.
LEAST_MINUTES = 2
#: The growth that is allowed between the second quarter and the last: this share of it, or these MB.
GROWTH, GROWTH_MB = 0.03, 8
#: Pauses between two looks at the memory.
PAUSE = 2


class Report:
    def __init__(self):
        self.whole = self.left = self.events = 0
        self.faults = []
        self.memory = []

    def fault(self, what):
        self.faults.append(what)


def body_of(arguments, kind, stream):
    return {
        "model": arguments.name,
        "messages": [{"role": "user", "content": f"Tell me a story about the number {kind}."}],
        "max_tokens": arguments.max_tokens,
        "ignore_eos": True,
        "seed": kind,
        "stream": stream,
    }


def text_of(data):
    """The text of the whole events in what a stream has sent, and whether its end is among them."""
    events = [line[6:] for line in data[: data.rfind(b"\n\n") + 1].split(b"\n") if line.startswith(b"data: ")]
    is_done = bool(events) and events[-1] == b"[DONE]"
    found = []
    for event in events[: -1 if is_done else None]:
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        found += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return "".join(found), len(events), is_done


async def ask(arguments, report, answers, chance):
    """Sends a request, and reads its answer to the end; or leaves, at some moment and in some manner."""
    kind = chance.randrange(KINDS)
    moments = ("in the request", "at once", "later", "later")
    leaves = chance.choice(moments) if chance.random() < arguments.disconnects else None
    enough = chance.randrange(1, 200 * arguments.max_tokens) if leaves == "later" else None
    reader, writer = await asyncio.open_connection("127.0.0.1", arguments.port)
    try:
        body = json.dumps(body_of(arguments, kind, True)).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        writer.write(request[: chance.randrange(len(request))] if leaves == "in the request" else request)
        await writer.drain()
        parts, size = [], 0
        while leaves in (None, "later") and (enough is None or size < enough):
            part = await reader.read(1 << 16)
            if not part:
                break
            parts.append(part)
            size += len(part)
        else:
            report.left += 1
        head, _, data = b"".join(parts).partition(b"\r\n\r\n")
        if not data:
            if leaves is None:
                report.fault(f"no answer: {head[:200]!r}")
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            report.fault(f"refused: {head[:200]!r}")
            return
        text, events, is_done = text_of(without_chunks(data))
        report.events += events
        if leaves is None or is_done:
            if text != answers[kind] or not is_done:
                report.fault(f"not whole: {text!r} of {answers[kind]!r}")
            else:
                report.whole += 1
        elif not answers[kind].startswith(text):
            report.fault(f"not the beginning: {text!r} of {answers[kind]!r}")
    except (OSError, ValueError, KeyError) as error:
        report.fault(repr(error))
    finally:
        if leaves and chance.random() < 0.5:
            # The connection ends with a reset, as that of a process that was killed.
            connected = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def without_chunks(data):
    """The body of an answer in chunks, as far as it goes."""
    found, position = [], 0
    while True:
        end = data.find(b"\r\n", position)
        if end < 0:
            break
        size = int(data[position:end], 16)
        if size == 0:
            break
        found.append(data[end + 2 : end + 2 + size])
        position = end + 2 + size + 2
    return b"".join(found)


async def client(arguments, report, answers, until, seed):
    chance = random.Random(seed)
    while time.monotonic() < until and len(report.faults) < 100:
        await ask(arguments, report, answers, chance)


async def watch(report, pid):
    while True:
        report.memory.append(memory_of(pid))
        await asyncio.sleep(PAUSE)


async def run(arguments, report, answers, pid):
    watching = asyncio.ensure_future(watch(report, pid))
    until = time.monotonic() + arguments.minutes * 60
    await asyncio.gather(*(client(arguments, report, answers, until, seed) for seed in range(arguments.clients)))
    watching.cancel()


def known_answers(arguments, server):
    """The answers, whole, one after another."""
    with server.http() as http:
        found = [http.post("/v1/chat/completions", json=body_of(arguments, kind, False)).json() for kind in range(KINDS)]
    return [answer["choices"][0]["message"]["content"] for answer in found]


def num_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def check_nothing_is_left(server, files, report):
    for name in ("xserv_samples_admitted", "xserv_requests_queued", "xserv_num_requests_running", "xserv_kv_cache_blocks_used"):
        server.wait_for(name, 0)
    until = time.monotonic() + NEVER
    # The connection that asked for the metrics may be closing.
    while num_files(server.process.pid) > files:
        if time.monotonic() > until:
            report.fault(f"{num_files(server.process.pid)} open files, {files} at the beginning")
            break
        time.sleep(0.1)


def is_flat(memory):
    """Whether what a process takes has stopped growing, by the medians of quarters."""
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return last <= max(second * (1 + GROWTH), second + GROWTH_MB)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--disconnects", type=float, default=0.2, help="the share of requests whose clients leave")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--server", default="", help="more options of xserv-server")
    arguments = parser.parse_args()
    arguments.name = os.path.basename(os.path.normpath(arguments.model))
    report = Report()
    with Server("--no-request-log", *arguments.server.split(), model=arguments.model) as server:
        arguments.port = server.port
        answers = known_answers(arguments, server)
        server.metric("xserv_requests_queued")
        files, began = num_files(server.process.pid), time.monotonic()
        asyncio.run(run(arguments, report, answers, server.process.pid))
        seconds = time.monotonic() - began
        check_nothing_is_left(server, files, report)
        disconnected = server.metric("xserv_requests_disconnected_total")
        server.terminate()
        if server.wait() != 0 or server.errors[1:]:
            report.fault("the server has said: " + "".join(server.errors[1:])[:2000])
    is_long = arguments.minutes >= LEAST_MINUTES
    if is_long and not is_flat(report.memory):
        report.fault("memory grows")
    step = max(len(report.memory) // 20, 1)
    print(
        json.dumps(
            {
                "clients": arguments.clients,
                "seconds": round(seconds),
                "whole": report.whole,
                "left": report.left,
                "left_while_generating": round(disconnected),
                "lost": len(report.faults),
                "faults": report.faults[:10],
                "events_per_second": round(report.events / seconds),
                "memory_mb": report.memory[::step],
                "memory_is_flat": is_flat(report.memory) if is_long else None,
            }
        )
    )
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
