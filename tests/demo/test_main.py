"""What the demo says when it cannot do what it was asked for; tests/e2e runs it."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from demo import __main__ as demo


def test_a_file_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda picture, history: history.write_text(""))
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    result: Any = CliRunner().invoke(demo.main, ["--history", "/nonexistent/history.jsonl"])
    assert result.exit_code == 1
    assert result.stderr.startswith("demo failed: [Errno 2] No such file or directory")
    assert len(result.stderr.splitlines()) == 1
