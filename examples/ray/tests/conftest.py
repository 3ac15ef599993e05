"""A Ray of its own on this machine, and applications on it."""

import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
import pytest

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parent), str(HERE.parent.parent / "python")]
MODEL = os.environ.get("XSERV_TEST_MODEL") or str(HERE.parent.parent / "models" / "tiny-qwen3")
NAME = Path(MODEL).name
#: Nothing here takes as long; a test that hangs ends with this.
NEVER = 300

# Replicas are processes of their own, which find the packages by this.
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's processes know each other by it; without one it would write one into the home folder.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
sys.path[:0] = PATHS

import ray  # noqa: E402
from ray import serve  # noqa: E402


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def until(condition, what, seconds=NEVER):
    """Waits until a condition holds, and returns what it gives."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= end:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.1)


class Cluster:
    """Ray and Ray Serve on this machine; deploy() puts an application there."""

    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        #: Sockets are in it, whose paths must be short.
        self._folder = tempfile.mkdtemp(prefix="xserv-ray-")
        ray.init(
            address="local",
            _temp_dir=self._folder,
            _node_ip_address="127.0.0.1",
            num_cpus=8,
            num_gpus=2,  # Ray counts what it is told: no process here opens one
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})

    def close(self):
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def deploy(self, **arguments):
        from xserv_ray import build

        options = "--no-request-log --device cpu --num-threads 1 " + arguments.pop("options", "")
        serve.run(build({"model": MODEL, "options": options, **arguments}), route_prefix="/")

    def engines(self):
        """The names of the actors of the replicas that live."""
        actors = ray.util.list_named_actors(all_namespaces=True)
        return sorted(actor["name"] for actor in actors if "#Engine#" in actor["name"])

    def running(self):
        """Returns the number of replicas that take requests."""
        deployment = serve.status().applications["default"].deployments["Engine"]
        return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")

    def kill(self, name):
        """Ends the process of a replica at once, as a crash would."""
        ray.kill(ray.get_actor(name, namespace="serve"))

    def client(self, **options):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=NEVER, **options)

    def async_client(self, **options):
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=NEVER, **options)

    def metric(self, name):
        """The numbers of a line of /metrics, by replica."""
        text = httpx.get(self.url + "/metrics", timeout=NEVER).raise_for_status().text
        found = re.findall(rf'^{name}\{{replica="([^"]+)"\}} (\S+)$', text, re.MULTILINE)
        return {replica: float(number) for replica, number in found}


@pytest.fixture(scope="session")
def cluster():
    made = Cluster()
    yield made
    made.close()


@pytest.fixture(scope="module")
def two(cluster):
    """Two replicas."""
    cluster.deploy(replicas=2)
    return cluster
