"""The page without a mouse, on a phone, light and dark, and for those who hear it."""

import unittest

from support import PageTest, expect, said


class Keyboard(PageTest):
    def focused(self) -> str:
        found = "() => document.activeElement.id || document.activeElement.getAttribute('aria-label') || "
        return self.page.evaluate(found + "document.activeElement.textContent")

    def test_a_conversation_without_a_mouse(self):
        keyboard = self.page.keyboard
        expect(self.page.locator("#input")).to_be_focused()
        keyboard.type("First line")
        keyboard.press("Shift+Enter")
        keyboard.type("second line")
        self.assertEqual(self.server.requests, [])
        keyboard.press("Enter")
        self.wait_for_the_end()
        self.assertEqual(self.server.requests[0]["messages"][0]["content"], "First line\nsecond line")
        self.server.answers["Long"] = said("so on and " * 2000, pause=0.01)
        keyboard.type("Long")
        keyboard.press("Enter")
        expect(self.last_text()).to_contain_text("so on and")
        keyboard.press("Escape")
        expect(self.page.locator(".remark")).to_have_text("Stopped.")
        expect(self.page.locator("#input")).to_be_focused()
        keyboard.press("Enter")
        keyboard.type("   ")
        keyboard.press("Enter")
        self.assertEqual(len(self.server.requests), 2)

    def test_the_order_of_the_focus(self):
        self.send("Hello")
        self.wait_for_the_end()
        self.page.locator(".skip").focus()
        found = []
        while len(found) < 20 and (not found or found[-1] != "send"):
            found.append(self.focused())
            self.page.keyboard.press("Tab")
        expected = ["Skip to the message", "new", "Hello", "Delete Hello", "theme", "settings"]
        self.assertEqual(found[:6], expected)
        self.assertEqual(found[-4:], ["Copy", "Try again", "input", "send"])

    def test_skip_dialog_and_list(self):
        keyboard = self.page.keyboard
        self.send("Hello")
        self.wait_for_the_end()
        self.page.locator("#settings").focus()
        keyboard.press("Enter")
        expect(self.page.locator("#dialog")).to_be_visible()
        keyboard.press("Escape")
        expect(self.page.locator("#dialog")).to_be_hidden()
        expect(self.page.locator("#settings")).to_be_focused()
        self.page.locator("#new").focus()
        keyboard.press("Enter")
        expect(self.page.locator("#input")).to_be_focused()
        self.page.locator("#chats .open").focus()
        keyboard.press("Enter")
        expect(self.page.locator("article.user")).to_have_text("Hello")
        self.page.get_by_label("Delete Hello").focus()
        keyboard.press("Enter")
        expect(self.page.locator("#input")).to_be_focused()

    def test_what_is_heard(self):
        collect = "() => { window.heard = []; const said = document.getElementById('said');"
        collect += "new MutationObserver(() => window.heard.push(said.textContent)).observe(said, {childList: true}); }"
        self.page.evaluate(collect)
        self.server.answers["Hello"] = said("Good morning.", pause=0.1)
        self.send("Hello")
        expect(self.page.locator("#said")).to_have_text("The answer is complete. Good morning.")
        # Once at the beginning and once at the end, and not with every token.
        heard = self.page.evaluate("() => window.heard")
        self.assertEqual(heard, ["The model is answering.", "The answer is complete. Good morning."])
        self.assertEqual(self.page.locator("#said").get_attribute("aria-live"), "polite")
        nameless = """() => [...document.querySelectorAll('button, input, textarea, select, [role=img], [role=meter]')]
            .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length)).map((node) => node.outerHTML)"""
        self.assertEqual(self.page.evaluate(nameless), [])


class Looks(PageTest):
    options = {"color_scheme": "dark"}

    def lightness(self) -> float:
        color = self.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in color[4:-1].split(",")) / 765

    def test_themes(self):
        self.assertLess(self.lightness(), 0.2)
        self.page.emulate_media(color_scheme="light")
        expect(self.page.locator("html")).to_have_attribute("data-theme", "light")
        self.assertGreater(self.lightness(), 0.8)
        self.page.locator("#theme").click()
        self.assertLess(self.lightness(), 0.2)
        self.reload()
        self.assertLess(self.lightness(), 0.2)
        self.assertEqual(self.page.locator("#theme").get_attribute("aria-pressed"), "true")

    def test_contrast(self):
        """Texts have the contrast of WCAG AA in both themes."""
        ratio = """([front, back]) => {
          const style = getComputedStyle(document.documentElement), luminance = (name) => {
            const hex = style.getPropertyValue(name).trim().slice(1);
            const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
              .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
          return (high + 0.05) / (low + 0.05);
        }"""
        pairs = [("--text", "--bg"), ("--text", "--tint"), ("--muted", "--bg"), ("--muted", "--surface"),
                 ("--muted", "--code"), ("--accent", "--bg"), ("--on-accent", "--accent"), ("--danger", "--danger-tint")]  # fmt: skip
        for _ in range(2):
            for pair in pairs:
                with self.subTest(pair=pair):
                    self.assertGreaterEqual(self.page.evaluate(ratio, list(pair)), 4.5)
            self.page.locator("#theme").click()


class Phone(PageTest):
    options = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}

    def test_everything_fits_and_works(self):
        wide = "wide" * 60
        self.server.answers["Hello"] = said(
            f"{wide}\n\n```\n{wide}\n```\n\n| {wide} | b |\n|---|---|\n| 1 | {wide} |\n\n`{wide}` https://example.org/{wide}"
        )
        self.send("Hello")
        self.wait_for_the_end()
        self.assertLessEqual(self.page.evaluate("() => document.documentElement.scrollWidth"), 360)
        self.assertLessEqual(self.page.evaluate("() => document.getElementById('log').scrollWidth"), 360)
        expect(self.page.locator("#nav")).to_be_hidden()
        self.page.locator("#menu").tap()
        expect(self.page.locator("#nav")).to_be_visible()
        self.page.locator("#new").tap()
        expect(self.page.locator("#nav")).to_be_hidden()
        self.send("Another")
        expect(self.last_text()).to_have_text("Another")
        self.page.locator("#menu").tap()
        self.page.locator("#chats .open", has_text="Hello").tap()
        expect(self.page.locator("article.user")).to_have_text("Hello")
        self.page.locator("#menu").tap()
        self.page.keyboard.press("Escape")
        expect(self.page.locator("#nav")).to_be_hidden()
        self.page.locator("#settings").tap()
        self.page.locator("#cancel").scroll_into_view_if_needed()
        box = self.page.locator("#dialog").bounding_box()
        self.assertLessEqual(box["x"] + box["width"], 360)


class Scrolling(PageTest):
    def test_it_follows_until_the_reader_scrolls(self):
        self.server.answers["Long"] = said("\n\n".join(f"Paragraph {number}." for number in range(120)), size=20, pause=0.02)
        self.send("Long")
        expect(self.last_text()).to_contain_text("Paragraph 40.")
        end = "() => { const log = document.getElementById('log'); return log.scrollHeight - log.scrollTop - log.clientHeight; }"
        self.assertLess(self.page.evaluate(end), 60)
        self.page.evaluate("() => { document.getElementById('log').scrollTop = 0; }")
        expect(self.page.locator("#latest")).to_be_visible()
        expect(self.last_text()).to_contain_text("Paragraph 70.")
        self.assertEqual(self.page.evaluate("() => document.getElementById('log').scrollTop"), 0)
        self.page.locator("#latest").click()
        self.wait_for_the_end()
        self.assertLess(self.page.evaluate(end), 60)


if __name__ == "__main__":
    unittest.main()
