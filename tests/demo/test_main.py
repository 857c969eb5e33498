"""What the demo says when it cannot do what it was asked for; tests/e2e runs it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from demo import __main__ as demo
from demo import compose


def test_a_file_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda picture, history: history.write_text(""))
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    result: Any = CliRunner().invoke(demo.main, ["--history", "/nonexistent/history.jsonl"])
    assert result.exit_code == 1
    assert result.stderr.startswith("demo failed: [Errno 2] No such file or directory")
    assert len(result.stderr.splitlines()) == 1


def test_an_error_while_the_stack_runs_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(home))
    monkeypatch.setattr(demo, "Stack", nullcontext)
    with pytest.raises(OSError, match="no space is left"), demo._stack():
        raise OSError("no space is left")
    assert not home.exists()


def test_a_stack_that_does_not_start_keeps_its_folder_with_the_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(home: Path) -> None:
        raise demo.StackError("Redis did not start")

    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(demo, "Stack", fail)
    with pytest.raises(demo.StackError), demo._stack():
        pass
    assert tmp_path.exists()


def test_compose_without_docker_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result: Any = CliRunner().invoke(compose.main)
    assert result.exit_code == 1
    assert result.output == (
        "compose check failed: there is no program docker here; install Docker with Compose\n"
    )
