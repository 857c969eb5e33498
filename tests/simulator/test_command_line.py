"""`gpu-simulate` reports a usage error in one line, in the form of `gpu-manager`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.storage.history_file import collect, write_file
from simulator.cli import main, read_seeds
from simulator.io.files import write_text
from simulator.progress import progress_bar


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "No such option '--nonsense'. See main --help."),
        (["nonsense"], "No such command 'nonsense'. See main --help."),
        (["oasis", "--seed", "x"], "Invalid value for '--seed': 'x' is not a valid integer range."),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {said}")
    assert result.stderr.count("\n") == 1


def test_without_arguments_the_commands_are_listed() -> None:
    result = CliRunner().invoke(main, [])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "  replay " in result.stderr


def test_a_closed_pipe_is_not_reported_as_bad_input() -> None:
    """The end of the pipe is closed before anything is written to it."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "simulator", "serverless", "--workflows", "chain:2"]
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "Error: standard output: No space left on device\n")


def test_seeds_are_numbers_and_ranges_without_repeats() -> None:
    assert read_seeds("3, 1-4,9") == [3, 1, 2, 4, 9]


def test_a_progress_bar_is_drawn_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def __init__(self, is_terminal: bool) -> None:
            super().__init__()
            self.is_terminal = is_terminal

        def isatty(self) -> bool:
            return self.is_terminal

    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for is_terminal in (True, False):
        screen = Screen(is_terminal)
        with redirect_stderr(screen), progress_bar("measuring") as progress:
            progress(3, 7)
        shown.append(screen.getvalue())
    assert "measuring" in shown[0]
    assert "3/7" in shown[0]
    assert shown[1] == ""


def test_an_unwritable_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "no folder").write_text("")
    with pytest.raises(OSError, match="no folder"):
        write_text(tmp_path / "no folder" / "page.html", "")
    with pytest.raises(OSError, match=r"'/proc/page\.html'"):
        write_text(Path("/proc/page.html"), "")


EXTRA = ("numpy", "scipy", "matplotlib", "numba", "jinja2", "highspy", "gymnasium", "pettingzoo", "yaml")


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["replay", "shares", "vgpu", "edge", "oasis", "serverless"])
def test_without_its_extra_a_command_says_in_one_line_how_to_install_it(command: str, tmp_path: Path) -> None:
    manager = GPUResourceManager.from_url("memory://")
    manager.submit("t", 2, expected_runtime=60.0)
    manager.release("t")
    history = tmp_path / "history.jsonl"
    write_file(collect(manager), history)
    given = ("--history", str(history), "--output-dir", str(tmp_path)) if command == "replay" else ()
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRA})); from simulator.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, *given], capture_output=True, text=True, check=False
    )
    [line] = done.stderr.splitlines()
    assert (done.returncode, "need" in line, "[simulator]" in line) == (2, True, True)
