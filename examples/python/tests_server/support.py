"""A server of its own for tests: a process of uvicorn on a port that the system chooses."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent
MODEL = os.environ.get("XSERV_TEST_MODEL") or str(PACKAGES.parent / "models" / "tiny-qwen3")
NAME = "tiny-qwen3"
#: Nothing here takes as long; a test that hangs ends with this.
NEVER = 120


class Server:
    """A server process. Lines of its standard output are in `log`, those of its standard error in `errors`."""

    def __init__(self, *options, model=MODEL, environment=None, packages=None):
        """`packages`: the folder with the server's package, if it is another than that of these tests."""
        path = os.pathsep.join([str(packages or PACKAGES), os.environ.get("PYTHONPATH", "")])
        own = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        command = [sys.executable, "-m", "xserv_server", str(model), "--port", "0", *options]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # Python looks for the package in the folder where it runs before all others.
        self.process = subprocess.Popen(command, cwd=packages, env=own, **pipes)
        self.log, self.errors = [], []
        self._ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.log), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._ready.wait(NEVER)
        found = [re.search(r"xserv-server: http://.*:(\d+)$", line) for line in self.errors]
        ports = [int(match.group(1)) for match in found if match]
        if not ports:
            self.close()
            raise AssertionError("the server did not start: " + "".join(self.errors))
        self.port = ports[0]
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self, pipe, lines):
        for line in pipe:
            lines.append(line)
            if line.startswith("xserv-server: http"):
                self._ready.set()
        if pipe is self.process.stderr:
            self._ready.set()

    def client(self, api_key="none", **options):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=NEVER, **options)

    def async_client(self, api_key="none", **options):
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=NEVER, **options)

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=NEVER, **options)

    def metric(self, name):
        """The number of a line of /metrics."""
        text = httpx.get(self.url + "/metrics", timeout=NEVER).text
        for line in text.splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name} in {text}")

    def wait_for(self, name, value):
        """Waits until a metric has a value."""
        until = time.monotonic() + NEVER
        while self.metric(name) != value:
            if time.monotonic() > until:
                raise AssertionError(f"{name} is {self.metric(name)}, not {value}")
            time.sleep(0.02)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        status = self.process.wait(NEVER)
        for thread in self._threads:
            thread.join(NEVER)
        return status

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def story():
    return [{"role": "user", "content": "Tell me a story."}]


def text_of(chunks, index=0):
    """The text of a choice of a streamed chat."""
    choices = (choice for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(choice.delta.content or "" for choice in choices)
