#!/usr/bin/env python3
"""A GPU that is shared: other programs take its memory, and a fault takes the device itself.

    cargo build --release
    pip install torch                      # fills the memory, and causes the fault
    python3 tests/trust/gpu.py

With 64, 256, 1024 and 2048 MiB left by another program, a load and a KV cache that is too large are answered with
OUT_OF_MEMORY or work, and a model that is loaded goes on with the tokens that it gave before. A hundred loads and frees leave
the device's memory as it was. When a fault of the host's own CUDA code takes the device, the model answers DEVICE_LOST, the CPU
still works in that process, and another process goes on without a wrong token. Takes a minute; prints what it saw
and fails if a sentence of this is not true. Does nothing, and says so, without an NVIDIA GPU or PyTorch.
"""
import collections
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "examples/python"
MODEL = str(REPOSITORY / "examples/models/tiny-qwen3")
PROMPT = "Once upon a time"
MIB = 1 << 20
LEFT = [64, 256, 1024, 2048]
CYCLES = 100


def import_xserv():
    sys.path.insert(0, str(PACKAGE))
    import xserv

    return xserv


def story(model, tokens=64):
    return model.generate(PROMPT, max_tokens=tokens, temperature=0).text


# The functions below are run by processes beside this one, chosen by the first argument.


def hog(left):
    """Takes all memory of the device but `left` MiB, says how much is left, and waits for a line."""
    import torch

    taken = [torch.zeros(1, device="cuda")]
    while (free := torch.cuda.mem_get_info()[0]) > (left + 4) * MIB:
        try:
            taken.append(torch.empty(min(free - left * MIB, 8192 * MIB), dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            break
    print(torch.cuda.mem_get_info()[0] // MIB, flush=True)
    sys.stdin.readline()


def load(kv_cache_tokens):
    xserv = import_xserv()
    try:
        with xserv.Model(MODEL, device="cuda", kv_cache_tokens=kv_cache_tokens) as model:
            story(model, 8)
            print("works")
    except xserv.Error as error:
        print(error.status, error)


def neighbour(seconds):
    """Generates until a line comes, at least for `seconds`, and says how often and how often wrongly."""
    import threading
    import time

    with import_xserv().Model(MODEL, device="cuda") as model:
        want = story(model)
        print("ready", flush=True)
        asked = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
        end, runs, wrong = time.time() + seconds, 0, 0
        while time.time() < end or not asked.is_set():
            runs += 1
            wrong += story(model) != want
        print(runs, wrong)


def victim():
    """Loses the device to a fault that is not the library's, while a generation runs."""
    import threading
    import time

    xserv = import_xserv()
    import torch

    outcomes = collections.Counter()
    model = xserv.Model(MODEL, device="cuda")

    def run():
        for _ in range(400):
            try:
                story(model, 200)
                outcomes["works"] += 1
            except xserv.Error as error:
                outcomes[str(error.status)] += 1

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    try:
        torch.zeros(4, device="cuda")[torch.tensor([10_000_000], device="cuda")].cpu()
        print("the fault did not happen")
    except Exception:  # PyTorch's own type, whose name has changed
        pass
    thread.join()
    try:
        xserv.Model(MODEL, device="cuda")
        print("loads again")
    except xserv.Error as error:
        outcomes[f"load: {error.status}"] += 1
    model.close()
    with xserv.Model(MODEL, device="cpu") as model:
        story(model, 8)
    print(dict(outcomes))


# The attacks.


def beside(*arguments):
    """Starts this file as another process."""
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(process):
    """Lets it go on, and returns what it still says. No attack may end a process."""
    said, _ = process.communicate("\n", timeout=120)
    assert process.returncode == 0, f"a process ended with {process.returncode}"
    return said.strip()


def check_memory():
    xserv = import_xserv()
    for left in LEFT:
        other = beside("hog", left)
        free = other.stdout.readline().strip()
        loads, large = end(beside("load", 0)), end(beside("load", 30_000_000))
        end(other)
        print(f"{free} MiB left: a load {loads[:70]}; 30,000,000 tokens of KV cache: {large[:40]}")
        assert loads == "works" or "OUT_OF_MEMORY" in loads, loads
        assert "OUT_OF_MEMORY" in large, large
    assert end(beside("load", 0)) == "works", "with the memory back"

    with xserv.Model(MODEL, device="cuda") as model:
        want = story(model)
        for left in LEFT:
            other = beside("hog", left)
            other.stdout.readline()
            same = sum(story(model) == want for _ in range(4))
            end(other)
            print(f"{left} MiB left during generations: {same} of 4 as before")
            assert same == 4


def check_cycles():
    import torch

    xserv = import_xserv()
    torch.zeros(1, device="cuda")
    free = []
    for _ in range(CYCLES):
        with xserv.Model(MODEL, device="cuda") as model:
            story(model, 8)
        free.append(torch.cuda.mem_get_info()[0])
    print(f"{CYCLES} loads and frees: {free[0] // MIB} MiB free after the first, {free[-1] // MIB} after the last")
    assert free[-1] >= free[0], "device memory is lost"


def check_lost():
    other = beside("neighbour", 5)
    assert other.stdout.readline().strip() == "ready"
    said = end(beside("victim"))
    runs, wrong = end(other).split()
    print(f"device lost: {said}; another process: {runs} generations, {wrong} wrong")
    assert "'XSERV_STATUS_DEVICE_LOST'" in said and "'load: XSERV_STATUS_DEVICE_LOST': 1" in said, said
    assert wrong == "0"


def main():
    try:
        import torch

        found = torch.cuda.is_available()
    except ImportError:
        found = False
    if not found:
        print("skipped: this needs an NVIDIA GPU and PyTorch")
        return
    check_memory()
    check_cycles()
    check_lost()
    print("passed")


if __name__ == "__main__":
    name, *numbers = sys.argv[1:] or ["main"]
    {"hog": hog, "load": load, "neighbour": neighbour, "victim": victim, "main": main}[name](*map(int, numbers))
