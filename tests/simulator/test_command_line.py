"""`gpu-simulate`: what is wrong with the words after it is said in one line, as `gpu-manager` says it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from simulator.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "No such option '--nonsense'. See main --help."),
        (["nonsense"], "No such command 'nonsense'. See main --help."),
        (["oasis", "--seed", "x"], "Invalid value for '--seed': 'x' is not a valid integer."),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {said}")
    assert result.stderr.count("\n") == 1


def test_without_words_the_commands_are_listed() -> None:
    result = CliRunner().invoke(main, [])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "  replay " in result.stderr
