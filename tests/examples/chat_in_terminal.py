"""Runs the chat example in a pseudo-terminal and presses Ctrl-C: chat_in_terminal.py CHAT MODEL"""

import os
import pty
import select
import sys
import time

LIMIT = 300  # seconds; only reached if something hangs


class Terminal:
    def __init__(self, *command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)
        self.seen = ""

    def wait_for(self, text):
        """Reads until `text` is on the screen; returns what came up to its end."""
        deadline = time.monotonic() + LIMIT
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text!r} after {self.seen!r}"
            try:
                data = os.read(self.fd, 4096)
            except OSError:  # the program has ended
                data = b""
            assert data, f"ended without {text!r}: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def press(self, keys):
        os.write(self.fd, keys.encode())

    def press_until(self, keys, text):
        """Presses again and again: a signal between the prompt and the read behind it has no effect."""
        deadline = time.monotonic() + LIMIT
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} after {self.seen!r}"
            self.press(keys)
            while text not in self.seen and select.select([self.fd], [], [], 1)[0]:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
        self.wait_for(text)

    def exit_code(self):
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                assert os.WIFEXITED(status), f"killed by signal {os.WTERMSIG(status)}"
                return os.WEXITSTATUS(status)
            time.sleep(0.01)
        raise AssertionError("it does not exit")


def stop_an_answer(chat, model, seed):
    """Returns whether Ctrl-C came before the end of the answer."""
    # Very warm, so that the answer rambles on for as long as the context allows.
    terminal = Terminal(chat, model, "--temperature", "20", "--seed", str(seed))
    terminal.wait_for("> ")
    terminal.press("Tell me a story.\n")
    terminal.wait_for("Tell me a story.\r\n")  # the terminal's echo
    while not terminal.seen.strip():
        terminal.seen += os.read(terminal.fd, 64).decode(errors="replace")
    terminal.press("\x03")
    stopped = "[stopped]" in terminal.wait_for("\r\n> ")

    terminal.press_until("half a line\x03", "(Ctrl-D or /exit leaves)")  # a hint, and the line is dropped
    terminal.wait_for("> ")
    terminal.press("/clear\n")
    terminal.wait_for("> ")
    terminal.press("\x04")
    assert terminal.exit_code() == 0
    return stopped


def main():
    chat, model = sys.argv[1:]
    # An answer may be over before the key is pressed; then another one is tried.
    assert any(stop_an_answer(chat, model, seed) for seed in range(10)), "Ctrl-C never stopped an answer"

    terminal = Terminal(chat, model)
    terminal.wait_for("> ")
    terminal.press("/exit\n")
    assert terminal.exit_code() == 0


if __name__ == "__main__":
    main()
