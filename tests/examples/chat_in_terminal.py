"""Runs the chat example and `xserv chat` in a pseudo-terminal, and presses keys as a person would:

    chat_in_terminal.py TEST PROGRAM MODEL

TEST is the name of one of the functions below without its "test_". PROGRAM is the example for
"example", and xserv for the others.
"""

import os
import pty
import re
import select
import signal
import sys
import tempfile
import termios
import time

LIMIT = 300  # seconds; only reached if something hangs

UP, DOWN, RIGHT, LEFT = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D"
HOME, END, DELETE = "\x1b[H", "\x1b[F", "\x1b[3~"
CTRL_A, CTRL_C, CTRL_D, CTRL_E, CTRL_K, CTRL_U, CTRL_W = "\x01", "\x03", "\x04", "\x05", "\x0b", "\x15", "\x17"
BACKSPACE = "\x7f"
PROMPT = "\n\r\x1b[J> \r\x1b[2C"  # as the editor draws it in a new line


def pasted(text):
    """Returns what a terminal sends for a text that is pasted."""
    return "\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~"


class Terminal:
    def __init__(self, *command, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", **environment})
            os.environ.pop("NO_COLOR", None)
            # Whoever starts the tests may have some ignored, as nohup does, and shells for what runs in the background.
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.execv(command[0], command)
        self.seen = ""
        self.modes = None

    def read(self):
        """Reads what has come; False if the program has ended."""
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            data = b""
        self.seen += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, text):
        """Reads until `text` is on the screen; returns what came up to its end."""
        deadline = time.monotonic() + LIMIT
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text!r} after {self.seen!r}"
            assert self.read(), f"ended without {text!r}: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def press(self, keys):
        """Writes, and reads meanwhile: a terminal holds only some thousand bytes of either."""
        data = keys if isinstance(keys, bytes) else keys.encode()
        while data:
            can_read, can_write, _ = select.select([self.fd], [self.fd], [], LIMIT)
            assert can_read or can_write, "the program reads no keys"
            if can_read:
                assert self.read(), f"ended while keys were pressed: {self.seen!r}"
            elif can_write:
                data = data[os.write(self.fd, data[:1024]) :]

    def press_until(self, keys, text):
        """Presses again and again: a signal between the prompt and the read after it has no effect."""
        deadline = time.monotonic() + LIMIT
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} after {self.seen!r}"
            self.press(keys)
            while text not in self.seen and select.select([self.fd], [], [], 1)[0]:
                assert self.read(), f"ended without {text!r}: {self.seen!r}"
        self.wait_for(text)

    def exit_status(self):
        """Waits for the end; the exit status, or minus the signal that ended it."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.01)[0]:
                self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it does not exit")

    def get_modes(self):
        return termios.tcgetattr(self.fd)

    # The methods below are for xserv chat only.

    def start(self):
        """Waits for the first prompt."""
        self.wait_for("Ctrl-D leaves")
        self.wait_for(PROMPT)
        return self

    def say(self, keys):
        """Presses keys and Enter; returns what is shown until the next prompt."""
        self.press(keys + "\r" if isinstance(keys, str) else keys + b"\r")
        return self.wait_for(PROMPT)

    def leave(self):
        self.press(CTRL_D)
        assert self.exit_status() == 0


def stop_an_answer(chat, model, seed):
    """Returns whether Ctrl-C came before the end of the answer."""
    # Very warm, so that the answer rambles on for as long as the context allows.
    terminal = Terminal(chat, model, "--temperature", "20", "--seed", str(seed))
    terminal.wait_for("> ")
    terminal.press("Tell me a story.\n")
    terminal.wait_for("Tell me a story.\r\n")  # the terminal's echo
    while not terminal.seen.strip():
        terminal.read()
    terminal.press(CTRL_C)
    stopped = "[stopped]" in terminal.wait_for("\r\n> ")

    terminal.press_until("half a line\x03", "(Ctrl-D or /exit leaves)")  # a hint, and the line is dropped
    terminal.wait_for("> ")
    terminal.press("/clear\n")
    terminal.wait_for("> ")
    terminal.press(CTRL_D)
    assert terminal.exit_status() == 0
    return stopped


def test_example(chat, model):
    # An answer may be over before the key is pressed; then another one is tried.
    assert any(stop_an_answer(chat, model, seed) for seed in range(40)), "Ctrl-C never stopped an answer"

    terminal = Terminal(chat, model)
    terminal.wait_for("> ")
    terminal.press("/exit\n")
    assert terminal.exit_status() == 0


def long_text():
    """Some 12,000 tokens, which take seconds on any machine with the slow model."""
    return " ".join(f"word{i}" for i in range(3000))


def answer_long_line(chat, model, start):
    """Returns the answer to a prompt of 2,000 tokens."""
    terminal = Terminal(chat, model, "--temperature", "0", "--max-tokens", "1")
    terminal.wait_for("> ")
    line = long_text()[start : start + 4000]  # a plain terminal's lines are shorter than 4096 bytes
    terminal.press(line + "\n")
    terminal.wait_for(line[-20:] + "\r\n")
    shown = terminal.wait_for("\r\n> ")
    terminal.press("/exit\n")
    assert terminal.exit_status() == 0
    return shown.strip()


def test_example_prompt(chat, model):
    # Without Ctrl-C there must be something to miss: a first token that is text, not a part of a character.
    start = next(start for start in range(1000, 1010) if answer_long_line(chat, model, start).strip("\ufffd"))
    # The signal is sent again and again, as the line may not have been read yet. (The key would have the
    # terminal drop the line.)
    terminal = Terminal(chat, model, "--temperature", "0", "--max-tokens", "1")
    terminal.wait_for("> ")
    line = long_text()[start : start + 4000]
    terminal.press(line + "\n")
    terminal.wait_for(line[-20:] + "\r\n")
    deadline = time.monotonic() + LIMIT
    while "[stopped]" not in terminal.seen and time.monotonic() < deadline:
        os.kill(terminal.pid, signal.SIGINT)
        if select.select([terminal.fd], [], [], 0.05)[0]:
            assert terminal.read(), f"ended: {terminal.seen!r}"
    shown = terminal.wait_for("[stopped]")
    text = shown.replace("(Ctrl-D or /exit leaves)", "").replace("> ", "").strip()
    assert text == "", f"a token came before Ctrl-C stopped the prompt: {text!r}"
    terminal.press("/exit\n")
    assert terminal.exit_status() == 0


def test_editing(xserv, model):
    terminal = Terminal(xserv, "chat", model, LC_ALL="C").start()
    cases = [
        ("/system one two" + CTRL_W + "three", "one three"),
        ("/system ab" + LEFT + "X", "aXb"),
        ("/system ab" + LEFT + LEFT + RIGHT + "X", "aXb"),
        ("system home" + HOME + "/" + END + "!", "home!"),
        ("system home" + "\x1bOH" + "/" + "\x1bOF" + "?", "home?"),
        ("system home" + CTRL_A + "/" + CTRL_E + ".", "home."),
        ("/system 你好" + BACKSPACE + "é", "你é"),
        ("/system 🙂🙂" + LEFT + "é", "🙂é🙂"),
        ("/system e\u0301e\u0301x" + LEFT + BACKSPACE, "e\u0301x"),
        ("/system abc" + LEFT + LEFT + DELETE, "ac"),
        ("/system abc" + LEFT + CTRL_K, "ab"),
        ("junk" + CTRL_U + "/system clean", "clean"),
        ("junk" + LEFT + LEFT + CTRL_U + DELETE + CTRL_D + "/system cleaner", "cleaner"),
        ("/system one two" + "\x1b[1;5D" + "X", "one Xtwo"),
        ("/system unknown\x1b[99;9~ keys\x1bOS", "unknown keys"),
        ("/system a" + "\x1b\r" + "b", "a\r\nb"),
        ("/system " + "x" * 5000, "x" * 5000),
    ]
    for keys, expected in cases:
        terminal.say(keys)
        shown = terminal.say("/system")
        assert f"[system: {expected}]" in shown, f"{keys!r} gave {shown!r} instead of {expected!r}"

    # Bytes that are no UTF-8 are left out.
    terminal.say(b"/system a\xe9b\xff\xc3\xc3\xa9c")
    assert "[system: abéc]" in terminal.say("/system")

    # Wide characters take two columns: the cursor goes back by two.
    terminal.press("你好" + LEFT)
    terminal.wait_for("你好\r\x1b[4C")
    terminal.say(CTRL_U + CTRL_K)

    # History, with what was typed before going there.
    terminal.say("/system first")
    terminal.say("/system second")
    terminal.say("/system typed" + UP + UP + DOWN + DOWN)
    assert "[system: typed]" in terminal.say("/system")
    terminal.say(UP + UP + UP + UP)  # /system, typed, second, first
    assert "[system: first]" in terminal.say("/system")
    terminal.leave()


def test_paste(xserv, model):
    terminal = Terminal(xserv, "chat", model, "--max-tokens", "20").start()
    terminal.say(pasted("/system one\n\n\ttwo\nthree"))
    assert "[system: one\r\n\r\n\ttwo\r\nthree]" in terminal.say("/system")
    terminal.press(pasted("one\r\ntwo\nthree"))
    terminal.wait_for("three")
    terminal.say(" and more")
    shown = terminal.say("/stats")
    assert "turns: 1\r" in shown, f"the pasted text was {shown!r}"
    # More than a terminal's line can hold, and taller than its window.
    long = "\n".join(str(i) for i in range(3000))
    terminal.say(pasted("/system " + long))
    assert "[system: " + long.replace("\n", "\r\n") + "]" in terminal.say("/system")
    terminal.leave()


def test_commands(xserv, model):
    terminal = Terminal(xserv, "chat", model, "--temperature", "0").start()
    for command in ["/fooo", "/think", "/no_think hello"]:
        assert f"there is no command {command.split()[0]}" in terminal.say(command)
    assert "prompt tokens: 0 computed" in terminal.say("/stats"), "a command went to the model"
    assert "/clear" in terminal.say("/help")
    first = terminal.say("Hello!")
    assert "per second" in first
    assert "turns: 1\r" in terminal.say("/stats")
    assert "starts over" in terminal.say("/clear")
    assert "turns: 0\r" in terminal.say("/stats")
    # A path is no command, nor is a command after a space.
    terminal.say("/usr/bin/xserv")
    terminal.say(" /clear")
    assert "turns: 2\r" in terminal.say("/stats")
    terminal.say("")  # an empty line does nothing
    assert "turns: 2\r" in terminal.say("/stats")
    terminal.press(CTRL_C)
    terminal.wait_for("(Ctrl-D or /exit leaves)")
    terminal.wait_for(PROMPT)
    terminal.press("half a line" + CTRL_C)
    terminal.wait_for(PROMPT)
    os.kill(terminal.pid, signal.SIGINT)  # not by a key
    terminal.wait_for("(Ctrl-D or /exit leaves)")
    terminal.wait_for(PROMPT)
    terminal.press("/exit\r")
    assert terminal.exit_status() == 0


def test_interrupt(xserv, model):
    """Ctrl-C stops answers; what comes after it works."""

    def stop(seed):
        terminal = Terminal(xserv, "chat", model, "--temperature", "20", "--seed", str(seed)).start()
        terminal.press("Tell me a story.\r")
        terminal.wait_for("Tell me a story.")
        terminal.wait_for("\r\n")
        while len(terminal.seen) < 50:
            terminal.read()
        terminal.press(CTRL_C)
        stopped = "[stopped]" in terminal.wait_for(PROMPT)
        if stopped:  # else the key came to the prompt after the answer, which has one more after it
            assert "turns: 1\r" in terminal.say("/stats")  # as far as it was printed
        terminal.leave()
        return stopped

    assert any(stop(seed) for seed in range(40)), "Ctrl-C never stopped an answer"


def test_loading(xserv, model):
    """Ctrl-C ends a load, and with it the program."""

    def stop():
        terminal = Terminal(xserv, "chat", model)
        before = terminal.get_modes()
        terminal.wait_for("Loading ")
        terminal.press(CTRL_C)
        while "interrupted while the model was loading" not in terminal.seen:
            if "Ctrl-D leaves" in terminal.seen:  # the model was there before the key
                terminal.wait_for(PROMPT)
                terminal.leave()
                return False
            assert terminal.read(), f"ended with {terminal.seen!r}"
        assert terminal.exit_status() == 130
        assert terminal.get_modes() == before
        return True

    assert any(stop() for _ in range(40)), "Ctrl-C never stopped a load"


def test_plain(xserv, model):
    """A terminal that cannot be drawn on."""
    terminal = Terminal(xserv, "chat", model, "--temperature", "0", TERM="dumb")
    before = terminal.get_modes()
    terminal.wait_for("\n> ")
    terminal.press("Hello!\n")
    terminal.wait_for("Hello!\r\n")
    assert len(terminal.wait_for("\r\n> ")) > 5
    terminal.press_until("half a line" + CTRL_C, "(Ctrl-D or /exit leaves)")
    terminal.wait_for("\r\n> ")
    terminal.press("/stats\n")
    assert "turns: 1\r" in terminal.wait_for("\r\n> ")
    assert "\x1b" not in terminal.seen
    terminal.press(CTRL_D)
    assert terminal.exit_status() == 0
    assert terminal.get_modes() == before


def test_prompt(xserv, model):
    """Ctrl-C stops a prompt: no token of an answer comes."""
    terminal = Terminal(xserv, "chat", model, "--context", "16384").start()
    terminal.press(pasted(long_text()) + "\r")
    terminal.press_until(CTRL_C, "[stopped]")
    terminal.wait_for("there is no answer")
    # It may have been pressed more often than it takes; at the prompt that does nothing.
    terminal.press("/stats\r")
    terminal.wait_for("turns: 0\r")
    assert "generated tokens: 0\r" in terminal.wait_for(PROMPT)
    terminal.leave()


def test_generate(xserv, model):
    """Ctrl-C stops the prompt of xserv generate."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(long_text())
        file.flush()
        terminal = Terminal(xserv, "generate", model, "--file", file.name, "--context", "16384")
        terminal.wait_for("100 %")
        terminal.wait_for("\r\x1b[K")
        time.sleep(0.1)
        terminal.press(CTRL_C)
        assert terminal.exit_status() == 130
        assert terminal.seen.replace("^C", "").strip() == "", terminal.seen  # no token came


def test_context(xserv, model):
    options = ["--context", "160", "--max-tokens", "30", "--temperature", "0"]
    terminal = Terminal(xserv, "chat", model, *options).start()
    dropped = 0
    for turn in range(12):
        shown = terminal.say(f"What is {turn} plus 3?")
        assert "per second" in shown, f"turn {turn}: {shown!r}"
        dropped += "[the context is full: the oldest turn" in shown
    assert dropped > 0, "12 turns fit into 160 tokens?"
    turns = re.compile(r"turns: \d+")
    before = turns.search(terminal.say("/stats")).group()
    shown = terminal.say("too long " * 200)
    assert "it is not sent" in shown and "holds 160" in shown, shown
    after = turns.search(terminal.say("/stats")).group()
    assert after == before, "a question that is not sent drops no turns"
    assert "per second" in terminal.say("Hello!")
    terminal.leave()


def test_thinking(xserv, model):
    """The model's template opens <think> for the model."""
    terminal = Terminal(xserv, "chat", model, "--max-tokens", "20", "--temperature", "0").start()
    shown = terminal.say("Tell me a story.")
    thought = shown.split("\x1b[2m", 1)[1].split("\x1b[0m")[0]
    assert len(thought) > 10 and "[" not in thought, shown
    assert "there is no answer" in shown
    terminal.leave()


def test_modes(xserv, model):
    """However the program ends, the terminal is as before."""

    def end(how, expected, *options):
        terminal = Terminal(xserv, "chat", model, *options)
        before = terminal.get_modes()
        terminal.start()
        assert terminal.get_modes() != before, "the editor needs other modes"
        how(terminal)
        status = terminal.exit_status()
        assert status == expected, f"{status} after {how}"
        assert terminal.get_modes() == before, f"the terminal's modes have changed after {how}"
        assert "\x1b[?2004l" in terminal.seen, "pasted text is still bracketed"

    def kill(number, keys=""):
        def how(terminal):
            terminal.press(keys)
            if keys:
                terminal.wait_for("Tell")
            os.kill(terminal.pid, number)

        return how

    end(lambda terminal: terminal.press(CTRL_D), 0)
    end(lambda terminal: terminal.press("/exit\r"), 0)
    end(kill(signal.SIGTERM), -signal.SIGTERM)
    end(kill(signal.SIGHUP), -signal.SIGHUP)
    end(kill(signal.SIGSEGV), -signal.SIGSEGV)
    end(kill(signal.SIGTERM, "Tell me a story.\r"), -signal.SIGTERM, "--temperature", "20")


def test_suspend(xserv, model):
    """Ctrl-Z in a shell with job control, and back."""
    terminal = Terminal("/bin/bash", "--norc", "-i", PS1="shell: ")
    terminal.wait_for("shell: ")
    terminal.press(f"{xserv} chat {model} --temperature 0\n")
    terminal.start()
    terminal.press("Hello")
    terminal.wait_for("Hello\r")
    terminal.press("\x1a")
    terminal.wait_for("Stopped")
    terminal.wait_for("shell: ")
    terminal.press("stty -a\n")
    assert " icanon" in terminal.wait_for("shell: ")
    terminal.press("fg\n")
    terminal.wait_for("> Hello\r")
    terminal.press("!\r")
    assert "per second" in terminal.wait_for(PROMPT)
    terminal.press(CTRL_D)
    terminal.wait_for("shell: ")
    terminal.press("exit\n")
    terminal.exit_status()


def main():
    test, program, model = sys.argv[1:]
    globals()[f"test_{test}"](program, model)


if __name__ == "__main__":
    main()
