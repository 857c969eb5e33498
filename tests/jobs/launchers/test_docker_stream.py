"""Lines of a container's log, of which the engine keeps two streams as records of at most 16 KiB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from resource_manager.jobs.launchers import docker_stream
from resource_manager.jobs.launchers.docker_stream import HOLD_S, LOG_CHUNK_BYTES

pytest.importorskip("docker")

OUT, ERR = 1, 2
BEGAN = 1_700_000_000
PART = "x" * 16384


class Log:
    """Engine with one log: its records in their order, each with seconds, stream and text."""

    base_url, api_version = "http://engine", "1.43"

    def __init__(self) -> None:
        self.records: list[tuple[int, int, str]] = []
        self.offset = 0
        self.now = 0.0

    @contextmanager
    def get(self, url: str, *, params: dict[str, Any], **options: Any) -> Iterator[Log]:
        self._since = float(params["since"])
        yield self

    def raise_for_status(self) -> None:
        pass

    def iter_content(self, size: int) -> Iterator[bytes]:
        for at, stream, text in self.records:
            if BEGAN + at >= self._since:
                stamp = datetime.fromtimestamp(BEGAN + at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000000000Z")
                data = f"{stamp} {text}".encode()
                yield bytes((stream, 0, 0, 0)) + len(data).to_bytes(4, "big") + data

    def read(self, *, is_over: bool = False) -> str:
        """Return what is told next, as to somebody who follows."""
        text, self.offset, self.is_all = docker_stream.log_chunk(
            self, "t", self.offset, is_over=is_over, clock=lambda: int((BEGAN + self.now) * 1e9)
        )
        return text


@pytest.fixture
def log() -> Log:
    return Log()


LONG = (
    *((1, OUT, "one\n"), (2, OUT, PART), (3, ERR, "warning\n"), (2, OUT, PART), (4, ERR, PART)),
    *((2, OUT, "end\n"), (5, OUT, "two\n"), (4, ERR, "end\n")),
)
LINES = ["one\n", f"{PART}{PART}end\n", "warning\n", f"{PART}end\n", "two\n"]


@pytest.mark.parametrize("every", [1, 2, 3, 5, len(LONG)])
def test_a_long_line_is_whole_and_told_once_whatever_the_other_stream_prints(log: Log, every: int) -> None:
    told = ""
    for number, record in enumerate(LONG, 1):
        log.records.append(record)
        if number % every == 0:
            told += log.read()
    told += log.read()
    assert told == "".join(LINES)
    assert log.read() == ""


def test_a_line_that_does_not_end_keeps_those_of_the_other_stream_back_for_a_while_only(log: Log) -> None:
    """As a progress bar does, which is one line until it is complete."""
    log.records += [(0, ERR, PART), (1, OUT, "epoch 1\n")]
    log.now = HOLD_S
    assert log.read() == ""
    log.now = HOLD_S + 1
    assert log.read() == f"epoch 1\n{PART}"
    log.records += [(2, OUT, "epoch 2\n")]
    assert log.read() == "epoch 2\n"


def test_a_line_that_does_not_end_is_waited_for_while_nothing_else_is_printed(log: Log) -> None:
    log.records += [(0, ERR, PART)]
    log.now = 10 * HOLD_S
    assert log.read() == ""
    log.records += [(0, ERR, "end\n")]
    assert log.read() == f"{PART}end\n"


def test_of_a_job_that_is_over_the_last_lines_are_told_as_they_are(log: Log) -> None:
    log.records += [(0, OUT, "one\n"), (1, ERR, PART), (2, OUT, "two\n"), (3, OUT, "half")]
    assert (log.read(is_over=True), log.is_all) == ("one\n", False)
    assert (log.read(is_over=True), log.is_all) == (f"two\n{PART}\nhalf", True)


def test_of_a_line_longer_than_one_reading_the_beginning_is_told(log: Log) -> None:
    log.records += [(0, OUT, PART)] * (LOG_CHUNK_BYTES // len(PART) + 5) + [
        (0, OUT, "end\n"),
        (1, OUT, "two\n"),
    ]
    assert len(log.read()) == LOG_CHUNK_BYTES
    assert log.read() == "two\n"
