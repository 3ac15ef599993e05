"""What a request costs a server, in processor time:

    python3 cost.py MODEL [--package FOLDER ...] [--rounds 5] [--requests 200] [--max-tokens 8]

starts a server for the model, or one for each --package (a folder with xserv and xserv_server, as of another checkout), and
sends them requests in turn. Prints the microseconds that a request takes of the event loop's thread and of all threads:
medians of the rounds, which other programs on the machine disturb less than rates. With a model that computes next to
nothing, such as tiny-qwen3, nearly all of it is the server's own.
"""

import argparse
import asyncio
import os
import statistics

from load import Counts, ask
from support import PACKAGES, Server


def microseconds(pid):
    """Processor time so far: of the event loop's thread, and of all that live."""

    def of(thread):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            return int(file.read().split()[0]) / 1000

    return of(pid), sum(map(of, os.listdir(f"/proc/{pid}/task")))


async def send(arguments, clients, requests):
    counts, numbers = Counts(), iter(range(requests))

    async def client():
        for number in numbers:
            await ask(arguments, counts, number, None)

    await asyncio.gather(*(client() for _ in range(clients)))
    if counts.whole != requests:
        raise SystemExit(f"only {counts.whole} of {requests} requests came to their end")


def measure(arguments, server, clients, is_stream):
    arguments.host, arguments.port, arguments.no_stream = "127.0.0.1", server.port, not is_stream
    before = microseconds(server.process.pid)
    asyncio.run(send(arguments, clients, arguments.requests))
    after = microseconds(server.process.pid)
    return [(late - early) / arguments.requests for early, late in zip(before, after)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--package", action="append", help="a folder with xserv and xserv_server; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=8)
    arguments = parser.parse_args()
    arguments.vary, arguments.name = False, os.path.basename(os.path.normpath(arguments.model))
    packages = [os.path.abspath(package) for package in arguments.package or [PACKAGES]]
    model = os.path.abspath(arguments.model) if os.path.isdir(arguments.model) else arguments.model
    servers = [Server(model=model, packages=package) for package in packages]
    try:
        for is_stream in (True, False):
            for clients in (1, 8):
                found = [[] for _ in servers]
                for number in range(-1, arguments.rounds):
                    places = range(len(servers)) if number % 2 else reversed(range(len(servers)))
                    for place in places:
                        spent = measure(arguments, servers[place], clients, is_stream)
                        if number >= 0:  # the first round warms up
                            found[place].append(spent)
                kind = "streamed" if is_stream else "whole"
                print(f"{kind}, {clients} at once:")
                for package, spent in zip(packages, found):
                    loop, whole = (statistics.median(each) for each in zip(*spent))
                    print(f"  {loop:6.0f} us of the event loop, {whole:6.0f} us in all: {package}")
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    main()
