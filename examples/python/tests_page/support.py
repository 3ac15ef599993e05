"""A browser for the tests of the page, and what they do with it."""

import os
import shutil
import unittest
from typing import Any, List, Optional

from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright
from standin import Answer, StandIn, said

__all__ = ["Answer", "PageTest", "expect", "said"]

#: The browser: Debian's package chromium, unless the environment names another.
CHROMIUM = os.environ.get("XSERV_CHROMIUM") or shutil.which("chromium") or ""
expect.set_options(timeout=20_000)


class PageTest(unittest.TestCase):
    """Each test has a server, and a browser that knows nothing yet. A complaint of the browser fails the test."""

    _playwright: Playwright
    _browser: Browser
    options: Any = {}
    #: Messages that the browser may write: it reports the answers 401 and so on that a test wants.
    expected_complaints: List[str] = []

    @classmethod
    def setUpClass(cls) -> None:
        cls._playwright = sync_playwright().start()
        cls.addClassCleanup(cls._playwright.stop)
        # As root Chromium has no sandbox.
        cls._browser = cls._playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        cls.addClassCleanup(cls._browser.close)

    def start_server(self) -> str:
        """Starts the server of a test, and returns the page's address."""
        self.server = StandIn()
        self.addCleanup(self.server.close)
        return self.server.url

    def setUp(self) -> None:
        self.url = self.start_server()
        self.context = self._browser.new_context(**self.options)
        self.addCleanup(self.context.close)
        self.complaints: List[str] = []
        self.page = self.open()

    def tearDown(self) -> None:
        said_besides = [text for text in self.complaints if not any(part in text for part in self.expected_complaints)]
        self.assertEqual(said_besides, [])

    def open(self) -> Page:
        page = self.context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(self.url)
        self.wait_for_the_model(page)
        return page

    def wait_for_the_model(self, page: Page) -> None:
        """Waits until the page knows the server's model, or says why not."""
        expect(page.locator("#model option[value], #toast:not([hidden])").first).to_be_attached()

    def reload(self) -> None:
        self.page.reload()
        self.wait_for_the_model(self.page)

    def send(self, text: str, page: Optional[Page] = None) -> None:
        page = page or self.page
        page.locator("#input").fill(text)
        page.locator("#input").press("Enter")

    def wait_for_the_end(self) -> None:
        expect(self.page.locator("#send")).to_be_visible()

    def last_text(self) -> Any:
        return self.page.locator("article.assistant").last.locator("> .text")
