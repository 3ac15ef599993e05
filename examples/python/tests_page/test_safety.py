"""Nothing that a model writes can become a program: markdown, attacks, and the policy of the page."""

import unittest

from support import Answer, PageTest, expect, said

ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1)",
    "[click](data:text/html,<script>1</script>)",
    "[click](vbscript:x)",
    "![pixel](https://example.invalid/pixel.png)",
    "[**<b onclick='window.hit=1'>x</b>**](https://example.org/\"onmouseover=window.hit=1)",
    "```<script>window.hit=1</script>\n<script>window.hit = 1</script>\n```",
    "```x onmouseover=window.hit=1\n</code></pre><script>window.hit = 1</script>\n```",
    "| <script>window.hit=1</script> | b |\n|---|---|\n| <img src=x onerror=window.hit=1> | `</code><script>` |",
    "# <style>* { display: none }</style>",
    "> - 1. <a href='javascript:window.hit=1'>x</a>",
    "https://example.org/<script>window.hit=1</script>",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "{{constructor.constructor('window.hit=1')()}} ${window.hit=1}",
    "<meta http-equiv=refresh content='0;url=https://example.invalid'>",
    "<form action=https://example.invalid><button>x</button></form>",
]

MARKDOWN = """# Title

Some **bold**, *italic*, ~~struck~~ and `code`, 2*3*4, snake_case_name, \\*stars\\*.

- one
- two
  - inner
    still inner

3. three
4. four

> quoted
> text

---

| a | b |
|---|:-:|
| 1 | **2** |

```python
def f():
    return "<b>"
```

A [link](https://example.org/a), https://example.org/b. And ~~~.
"""


class Safety(PageTest):
    def test_nothing_in_a_text_runs(self):
        requested = []
        self.page.on("request", lambda request: requested.append(request.url))
        for attack in ATTACKS:
            call = {"index": 0, "id": attack, "function": {"name": attack, "arguments": attack}}
            self.server.answers[attack] = Answer(
                [{"reasoning_content": attack}, *said(attack).deltas, {"tool_calls": [call]}]
            )
            self.page.locator("#new").click()
            self.send(attack)
            self.wait_for_the_end()
            self.page.locator("summary").click()
        self.reload()
        for number in range(len(ATTACKS)):
            self.page.locator("#chats .open").nth(number).click()
            for node in self.page.locator("#log a").all():
                node.hover()
        self.assertIsNone(self.page.evaluate("() => window.hit ?? null"))
        made = "() => document.querySelectorAll('#log :is(script, img, iframe, style, form, meta, object, embed)').length"
        self.assertEqual(self.page.evaluate(made), 0)
        self.assertEqual([url for url in requested if not url.startswith((self.server.url, "data:"))], [])

    def test_links_lead_to_pages_alone(self):
        self.server.answers["Links"] = said("\n\n".join([*ATTACKS, "[good](https://example.org/x?y=1)"]))
        self.send("Links")
        self.wait_for_the_end()
        links = self.page.locator("#log a")
        self.assertGreater(links.count(), 1)
        for link in links.all():
            self.assertRegex(link.get_attribute("href"), "^https://example.(org|invalid)/")
            self.assertEqual(link.get_attribute("target"), "_blank")
            self.assertIn("noopener", link.get_attribute("rel"))
            self.assertEqual(link.evaluate("node => node.getAttributeNames().sort().join()"), "href,rel,target")

    def test_the_policy_is_in_force(self):
        self.expected_complaints = ["Content Security Policy", "ERR_BLOCKED_BY_CSP", "404", "unsafe-eval"]
        self.page.evaluate(
            "() => { const add = (node) => document.body.append(node);"
            "const script = document.createElement('script'); script.textContent = 'window.hit = 1'; add(script);"
            "const box = document.createElement('div'); box.innerHTML = '<img src=x onerror=\"window.hit = 1\">'; add(box);"
            "const far = document.createElement('script'); far.src = 'https://example.invalid/x.js'; add(far);"
            "// What the browser's driver runs by itself is free of the policy.\n"
            "setTimeout(() => { window.tried = 1; eval('window.hit = 1'); }); }"
        )
        sent = self.page.evaluate("() => fetch('https://example.invalid/').then(() => true, () => false)")
        self.assertFalse(sent)
        self.page.wait_for_function("window.tried")
        self.assertIsNone(self.page.evaluate("() => window.hit ?? null"))
        self.assertGreater(len([text for text in self.complaints if "Content Security Policy" in text]), 3)

    def test_markdown(self):
        self.server.answers["Markdown"] = said(MARKDOWN, size=3, pause=0.001)
        self.send("Markdown")
        self.wait_for_the_end()
        text = self.last_text()
        for tag, words in (
            ("h1", ["Title"]),
            ("strong", ["bold", "2"]),
            ("em", ["italic"]),
            ("del", ["struck"]),
            ("p code", ["code"]),
            ("ul ul li", ["inner still inner"]),
            ("ol li", ["three", "four"]),
            ("blockquote", ["quoted text"]),
            ("th", ["a", "b"]),
            ("td", ["1", "2"]),
            ("pre", ['def f():\n    return "<b>"']),
            (".block span", ["python"]),
            ("a", ["link", "https://example.org/b"]),
        ):
            expect(text.locator(tag)).to_have_text(words)
        expect(text.locator("p").first).to_contain_text("2*3*4, snake_case_name, *stars*")
        self.assertEqual(text.locator("ol").get_attribute("start"), "3")
        self.assertEqual(text.locator("hr").count(), 1)

    def test_code_is_copied(self):
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.server.answers["Code"] = said("```sh\necho '<b>'\n\nls\n```")
        self.send("Code")
        self.wait_for_the_end()
        self.page.get_by_label("Copy the code").click()
        expect(self.page.get_by_label("Copy the code")).to_have_text("Copied")
        self.assertEqual(self.page.evaluate("() => navigator.clipboard.readText()"), "echo '<b>'\n\nls")

    def test_no_text_holds_the_page(self):
        """Texts at which a careless parser takes time beyond all measure, or recurses without end.

        A page that is held never shows that the answer has ended.
        """
        texts = ["*" * 50_000, "[" * 50_000, "`" * 50_001, "> " * 20_000 + "x", "**a" * 15_000, "[a](" * 12_000,
                 "- " * 20_000, "\n".join(" " * min(n, 12) + "- x" for n in range(3000)), "|" * 50_000 + "\n" + "|-" * 9000,
                 "_a " * 15_000, "https://" * 8000, "1. " * 15_000, "~" * 40_000, " " * 50_000 + "x", "\\" * 50_000,
                 "#" * 50_000, "\u202e" * 1000 + "\0" + "\U0001f600" * 5000]  # fmt: skip
        for number, text in enumerate(texts):
            with self.subTest(text=text[:10]):
                self.server.answers[f"t{number}"] = said(text, size=len(text) // 8 + 1)
                self.page.locator("#new").click()
                self.send(f"t{number}")
                self.wait_for_the_end()
                expect(self.page.locator("article .error")).to_have_count(0)


if __name__ == "__main__":
    unittest.main()
