"""What the commands of the simulators say of input that they refuse."""

from __future__ import annotations

from click.testing import Result


def assert_refused(result: Result, message: str) -> None:
    """Assert that all it said is one line with the message."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
