"""Chats in the page: typing, streaming, stopping, thinking, tools, several conversations, settings."""

import json
import unittest

from standin import CONTEXT
from support import Answer, PageTest, expect, said

CALL = [
    {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


class Chat(PageTest):
    def test_text_comes_piece_by_piece(self):
        words = " ".join(f"word{number}" for number in range(60))
        self.server.answers["Hello"] = said(words, pause=0.05)
        self.page.locator("#input").press_sequentially("Hello")
        self.page.keyboard.press("Enter")
        expect(self.page.locator("article.user")).to_have_text("Hello")
        expect(self.page.locator("#stop")).to_be_visible()
        expect(self.last_text()).to_contain_text("word3")
        self.assertNotIn("word59", self.last_text().inner_text())
        expect(self.last_text()).to_have_text(words)
        self.wait_for_the_end()
        expect(self.page.locator(".stats")).to_contain_text("tokens/s")
        expect(self.page.locator(".stats")).to_contain_text("16 of the prompt's 20 tokens from the cache")
        used = 20 + len(self.server.answers["Hello"].deltas)
        expect(self.page.locator("#used")).to_have_text(f"{used} / {CONTEXT:,}")
        self.assertEqual(self.page.locator("#gauge").get_attribute("aria-valuenow"), str(used))
        (request,) = self.server.requests
        self.assertEqual(request["messages"], [{"role": "user", "content": "Hello"}])
        self.assertEqual((request["model"], request["stream"]), ("stand-in", True))
        self.assertEqual(request["stream_options"], {"include_usage": True})

    def test_earlier_turns_are_sent(self):
        self.server.answers["One"] = Answer([{"reasoning_content": "hm"}, {"content": "First."}])
        for text in ("One", "Zwei – двa 三"):
            self.send(text)
            self.wait_for_the_end()
        expect(self.last_text()).to_have_text("Zwei – двa 三")
        roles = [(message["role"], message["content"]) for message in self.server.requests[1]["messages"]]
        self.assertEqual(roles, [("user", "One"), ("assistant", "First."), ("user", "Zwei – двa 三")])

    def test_stop(self):
        self.server.answers["Long"] = said("so on and " * 2000, pause=0.01)
        self.send("Long")
        expect(self.last_text()).to_contain_text("so on and so on")
        self.page.locator("#stop").click()
        expect(self.page.locator(".remark")).to_have_text("Stopped.")
        self.wait_for_the_end()
        expect(self.page.locator("#input")).to_be_focused()
        for _ in range(100):
            if self.server.num_left:
                break
            self.page.wait_for_timeout(50)
        self.assertEqual(self.server.num_left, 1)
        # Text that had arrived before the stop is part of the conversation.
        self.send("Go on")
        self.wait_for_the_end()
        self.assertTrue(self.server.requests[1]["messages"][1]["content"].startswith("so on and so on"))

    def test_thoughts_are_folded(self):
        thought = [{"reasoning_content": f"thought {number} "} for number in range(40)]
        self.server.answers["Think"] = Answer([*thought, {"content": "Done."}], pause=0.05)
        self.send("Think")
        details = self.page.locator("details.thinking")
        expect(details.locator("summary")).to_have_text("Thinking …")
        self.assertIsNone(details.get_attribute("open"))
        expect(details.locator(".text")).to_be_hidden()
        details.locator("summary").click()
        expect(self.last_text()).to_have_text("Done.")
        self.wait_for_the_end()
        # It stays as the user has left it.
        expect(details.locator(".text")).to_contain_text("thought 0 thought 1")
        expect(details.locator(".text")).to_be_visible()
        expect(details.locator("summary")).to_contain_text("Thought for")

    def test_tools_are_called_and_results_given(self):
        self.page.locator("#settings").click()
        self.page.locator("#tools").fill(json.dumps(TOOLS))
        self.page.locator("text=Save").click()
        self.server.answers["Weather?"] = Answer(CALL, pause=0.02, finish="tool_calls")
        self.send("Weather?")
        call = self.page.locator(".call")
        expect(call.locator("b")).to_have_text("Calls get_weather")
        expect(call.locator("pre")).to_have_text('{\n  "city": "Oslo"\n}')
        call.locator("textarea").fill("12 degrees")
        self.page.locator("text=Send the results").click()
        self.wait_for_the_end()
        expect(self.page.locator(".result pre")).to_have_text("12 degrees")
        expect(self.last_text()).to_have_text("12 degrees")
        first, second = self.server.requests
        self.assertEqual(first["tools"], TOOLS)
        _, asked, result = second["messages"]
        function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        self.assertEqual(asked["tool_calls"], [{"id": "c1", "type": "function", "function": function}])
        self.assertEqual(result, {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "12 degrees"})

    def test_a_call_that_was_cut_is_shown_and_not_sent_again(self):
        self.server.answers["Weather?"] = Answer(CALL[:2], finish="length")
        self.send("Weather?")
        expect(self.page.locator(".remark")).to_contain_text("limit of tokens")
        expect(self.page.locator(".call pre")).to_have_text('{"city": ')
        expect(self.page.locator(".call textarea")).to_have_count(0)
        self.send("And?")
        self.wait_for_the_end()
        self.assertEqual(self.server.requests[1]["messages"], [{"role": "user", "content": "Weather?\n\nAnd?"}])

    def test_try_again(self):
        self.send("Hello")
        self.wait_for_the_end()
        self.server.answers["Hello"] = said("Another answer.")
        self.page.locator("text=Try again").click()
        expect(self.last_text()).to_have_text("Another answer.")
        expect(self.page.locator("article")).to_have_count(2)


class Conversations(PageTest):
    def open_chat(self, title: str) -> None:
        self.page.locator("#chats .open", has_text=title).click()

    def test_two_at_once(self):
        self.server.answers["Slow"] = said("alpha " * 100, size=6, pause=0.05)
        self.send("Slow")
        expect(self.last_text()).to_contain_text("alpha alpha")
        self.page.locator("#new").click()
        expect(self.page.locator("article")).to_have_count(0)
        self.send("Quick")
        expect(self.last_text()).to_have_text("Quick")
        expect(self.page.locator("#chats .running")).to_have_text("Slow")
        self.open_chat("Slow")
        expect(self.page.locator("#stop")).to_be_visible()
        expect(self.last_text()).to_have_text(("alpha " * 100).strip())
        self.wait_for_the_end()
        self.assertNotIn("Quick", self.page.locator("#log").inner_text())
        self.open_chat("Quick")
        expect(self.page.locator("article.user")).to_have_text("Quick")
        self.assertNotIn("alpha", self.page.locator("#log").inner_text())
        for request in self.server.requests:
            self.assertEqual(len(request["messages"]), 1)

    def test_they_are_kept(self):
        for text in ("First one", "Second one"):
            self.page.locator("#new").click()
            self.send(text)
            self.wait_for_the_end()
        self.reload()
        expect(self.page.locator("#chats .open")).to_have_text(["Second one", "First one"])
        expect(self.page.locator("article.user")).to_have_text("Second one")
        self.open_chat("First one")
        expect(self.last_text()).to_have_text("First one")

    def test_an_answer_that_the_reload_cut_is_kept(self):
        self.server.answers["Long"] = said("so on and " * 2000, pause=0.01)
        self.send("Long")
        expect(self.last_text()).to_contain_text("so on and so on")
        self.reload()
        expect(self.last_text()).to_contain_text("so on and so on")
        expect(self.page.locator(".remark")).to_have_text("Stopped.")

    def test_delete_and_undo(self):
        self.send("To be deleted")
        self.wait_for_the_end()
        self.page.get_by_label("Delete To be deleted").click()
        expect(self.page.locator("#chats li")).to_have_count(0)
        self.page.locator("text=Undo").click()
        expect(self.page.locator("article.user")).to_have_text("To be deleted")
        self.page.get_by_label("Delete To be deleted").click()
        self.reload()
        expect(self.page.locator("#state[data-state=ok]")).to_be_attached()
        expect(self.page.locator("#chats li")).to_have_count(0)

    def test_as_many_as_fit_are_kept(self):
        """The oldest go, whether there are too many or they are too long."""
        for count, size in ((130, 10), (40, 400_000)):
            chats = [
                {"id": f"c{n}", "title": f"chat {n}", "changed": n, "messages": [{"role": "user", "content": "x" * size}]}
                for n in range(count)
            ]
            fill = "chats => { localStorage.clear(); for (const chat of chats) { try { "
            fill += "localStorage.setItem('xserv.chat.' + chat.id, JSON.stringify(chat)); } catch {} } }"
            self.page.evaluate(fill, chats)
            self.reload()
            self.page.locator("#new").click()
            self.send("The newest")
            self.wait_for_the_end()
            kept = "() => Object.values(localStorage).filter((text) => text.includes('messages'))"
            found = self.page.evaluate(kept)
            self.assertLessEqual(len(found), 100)
            self.assertLessEqual(sum(map(len, found)), 4_000_000)
            self.assertTrue(any("The newest" in text for text in found))
            self.assertFalse(any('"chat 0"' in text for text in found))

    def test_damaged_storage(self):
        damaged = ["{", "null", "[]", '{"id": 1, "messages": []}', '{"id": "a", "messages": [null, 3, {"role": "user"}]}',
                   '{"id": "b", "title": 7, "messages": [{"role": "assistant", "content": {}, "calls": [null, {}]}]}']  # fmt: skip
        for number, text in enumerate(damaged):
            self.page.evaluate("([key, text]) => localStorage.setItem(key, text)", [f"xserv.chat.{number}", text])
        self.page.evaluate("() => localStorage.setItem('xserv.settings', '[')")
        self.reload()
        expect(self.page.locator("#chats .open")).to_have_count(2)
        for number in range(2):
            self.page.locator("#chats .open").nth(number).click()
        self.page.locator("#new").click()
        self.send("Hello")
        expect(self.last_text()).to_have_text("Hello")

    def test_two_tabs(self):
        other = self.open()
        self.send("In the first tab")
        self.wait_for_the_end()
        expect(other.locator("#chats .open")).to_have_text(["In the first tab"])
        self.send("In the second", other)
        expect(other.locator("article.assistant > .text")).to_have_text("In the second")
        expect(self.page.locator("#chats .open")).to_have_count(2)


class Settings(PageTest):
    expected_complaints = ["401"]

    def test_they_reach_the_server(self):
        self.page.locator("#settings").click()
        for name, value in (("system", "Be brief."), ("temperature", "0,5"), ("top_p", "0.9"), ("max_tokens", "64")):
            self.page.locator(f"#{name}").fill(value)
        self.page.locator("#thinking").select_option("off")
        self.page.locator("#dialog button.filled").click()
        self.send("Hello")
        self.wait_for_the_end()
        request = self.server.requests[0]
        self.assertEqual(request["messages"][0], {"role": "system", "content": "Be brief."})
        self.assertEqual((request["temperature"], request["top_p"], request["max_tokens"]), (0.5, 0.9, 64))
        self.assertEqual(request["chat_template_kwargs"], {"enable_thinking": False})
        self.reload()
        self.page.locator("#settings").click()
        expect(self.page.locator("#temperature")).to_have_value("0.5")

    def test_what_is_not_set_is_not_sent(self):
        self.send("Hello")
        self.wait_for_the_end()
        self.assertEqual(set(self.server.requests[0]), {"model", "messages", "stream", "stream_options"})

    def test_wrong_ones_are_refused_in_words(self):
        self.page.locator("#settings").click()
        for name, value, words in (
            ("temperature", "hot", "Temperature must be a number from 0 to 2"),
            ("max_tokens", "1.5", "Tokens at most must be a number"),
            ("tools", "{", "Tools must be a JSON list"),
            ("key", "schlüssel", "The API key has characters"),
        ):
            self.page.locator(f"#{name}").fill(value)
            self.page.locator("#dialog button.filled").click()
            expect(self.page.locator("#wrong")).to_contain_text(words)
            expect(self.page.locator("#dialog")).to_be_visible()
            self.page.locator(f"#{name}").fill("")

    def test_the_api_key_is_kept_for_the_tab_alone(self):
        self.server.api_key = "secret"
        self.reload()
        expect(self.page.locator("#toast")).to_contain_text("wants an API key")
        self.page.locator("#toast button").click()
        self.page.locator("#key").fill("secret")
        self.page.locator("#dialog button.filled").click()
        expect(self.page.locator("#model")).to_have_value("stand-in")
        self.send("Hello")
        expect(self.last_text()).to_have_text("Hello")
        self.reload()
        expect(self.page.locator("#model")).to_have_value("stand-in")
        self.assertNotIn("secret", self.page.evaluate("() => JSON.stringify(localStorage)"))


class Errors(PageTest):
    expected_complaints = ["429", "400", "503", "500", "Failed to load resource", "ERR_"]

    def test_they_are_said_in_plain_words(self):
        for status, error, words in (
            (429, {"message": "too many requests wait"}, "The server is busy. Try again in 7 seconds."),
            (400, {"message": "temperature: must be less"}, "Temperature: must be less."),
            (400, {"message": "5000 tokens", "code": "context_length_exceeded"}, "no longer fits the context"),
            (503, {"message": "the server is shutting down"}, "takes no requests at the moment"),
            (500, {"message": "oh"}, "The server has failed. Oh."),
            (500, "no object", "The server has failed."),
        ):
            with self.subTest(status=status, error=error):
                self.server.answers["Hello"] = Answer([], status=status, error=error, headers={"retry-after": "7"})
                self.page.locator("#new").click()
                self.send("Hello")
                expect(self.page.locator("article .error > span")).to_contain_text(words)
                expect(self.page.locator("#said")).to_contain_text(words)
        self.server.answers["Hello"] = said("Now it works.")
        self.page.locator("article .error button").click()
        expect(self.last_text()).to_have_text("Now it works.")
        expect(self.page.locator("article .error")).to_have_count(0)

    def test_in_the_middle_of_an_answer(self):
        broken = {"error": {"message": "the device was lost"}}
        for answer, words in (
            (Answer([{"content": "Beginning"}, broken]), "The device was lost."),
            (Answer([{"content": "Beginning"}], finish=None), "broke off before the answer was complete"),
        ):
            self.server.answers["Hello"] = answer
            self.page.locator("#new").click()
            self.send("Hello")
            expect(self.page.locator("article .error > span")).to_contain_text(words)
            expect(self.last_text()).to_have_text("Beginning")

    def test_a_server_that_is_gone(self):
        self.context.set_offline(True)
        self.send("Hello")
        expect(self.page.locator("article .error > span")).to_contain_text("The server cannot be reached")
        expect(self.page.locator("#state")).to_have_attribute("data-state", "bad")


if __name__ == "__main__":
    unittest.main()
