"""The page with the server that serves it, and a model. Skipped where the server's packages are not installed."""

import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

from support import PageTest, expect

PACKAGES = Path(__file__).resolve().parents[1]
MODEL = os.environ.get("XSERV_TEST_MODEL") or str(PACKAGES.parent / "models" / "tiny-qwen3")
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "xserv_server.app")


def is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


@unittest.skipUnless(all(map(is_there, NEEDED)), "the server's packages are not installed")
class RealServer(PageTest):
    def start_server(self) -> str:
        command = [sys.executable, "-m", "xserv_server", MODEL, "--port", "0", "--no-request-log"]
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(PACKAGES)]).strip(os.pathsep)
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.process.communicate, timeout=120)
        self.addCleanup(self.process.terminate)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"xserv-server: (http://\S+)$", line)
            if found:
                return found.group(1)
        raise AssertionError("the server did not start")

    def test_a_chat(self):
        expect(self.page.locator("#state[data-state=ok]")).to_be_attached()
        expect(self.page.locator("#model")).to_have_value("tiny-qwen3")
        for number, text in enumerate(("Tell me a story.", "Tell me another one."), 1):
            self.send(text)
            expect(self.page.locator(".stats")).to_have_count(number)
            self.assertNotEqual(self.last_text().inner_text(), "")
        expect(self.page.locator("article .error")).to_have_count(0)
        self.assertGreater(int(self.page.locator("#gauge").get_attribute("aria-valuenow")), 20)

    def test_settings_are_understood(self):
        self.page.locator("#settings").click()
        for name, value in (("system", "Be brief."), ("temperature", "0"), ("top_p", "0.9"), ("max_tokens", "8")):
            self.page.locator(f"#{name}").fill(value)
        self.page.locator("#thinking").select_option("on")
        self.page.locator("#tools").fill('[{"type": "function", "function": {"name": "get_time"}}]')
        self.page.locator("#dialog button.filled").click()
        self.send("Tell me a story.")
        expect(self.page.locator(".remark")).to_contain_text("limit of tokens")
        expect(self.page.locator("article .error")).to_have_count(0)

    def test_stop(self):
        self.send("Tell me a story.")
        expect(self.page.locator("#stop, .stats").first).to_be_attached()
        self.page.keyboard.press("Escape")
        self.wait_for_the_end()
        expect(self.page.locator("article .error")).to_have_count(0)


if __name__ == "__main__":
    unittest.main()
