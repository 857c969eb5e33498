"""Running of the probe as a process of its own, and reading of its answer."""

from __future__ import annotations

import inspect
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from resource_manager.agent import probe
from resource_manager.errors import ResourceManagerError

if TYPE_CHECKING:  # an agent only passes reports on, and must stay small
    from resource_manager.agent.report_format import Report

TIMEOUT_S = 2 * probe.PROBE_TIMEOUT_S
"""Limit of a whole run; the probe gives up earlier and says so."""

END_TIMEOUT_S = 10.0
HANGS = "the probe hangs in the GPU driver and cannot be ended"


class NoReportError(ResourceManagerError):
    """A server of which nothing is known; the message gives the reason."""


def program() -> str:
    """Return the probe's text, to be sent to `python3 -` on a server."""
    return inspect.getsource(probe)


def command(*options: str) -> list[str]:
    """Return the command that runs the probe on this machine, without anything else that is installed."""
    return [sys.executable, "-I", "-S", str(probe.__file__), *options]


def probe_here() -> Report:
    """Return the report of this machine; raises `NoReportError`."""
    try:
        done = subprocess.run(command(), capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoReportError(f"the probe could not run: {error}") from error
    output, complaint = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    return read_answer(done.returncode, output, complaint)


def read_answer(exit_code: int, output: str, complaint: str) -> Report:
    """Return the report that the probe printed last; raises `NoReportError` with the reason if none."""
    from resource_manager.agent.report_format import ReportError, check_report

    if len(output) > probe.MAX_REPORT_BYTES:
        raise NoReportError(f"the probe printed {len(output):,} characters")
    answer = None
    with suppress(ValueError, IndexError, RecursionError):
        answer = json.loads(output.splitlines()[-1])  # the lines before it are a .bashrc's
    if not isinstance(answer, dict):
        raise NoReportError(_reason(exit_code, complaint))
    try:
        report = check_report(answer)
    except ReportError as error:
        raise NoReportError(str(error)) from error
    if report.error is not None:
        raise NoReportError(report.error)
    return report


def _reason(exit_code: int, complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    crash = next((line for line in lines if line.startswith("Fatal Python error: ")), None)
    if crash is not None:
        return f"the GPU library crashed the probe: {crash.partition(': ')[2]}"
    return f"the probe ended with {exit_code}: {lines[-1][:400] if lines else 'no reason given'}"


class RunningProbe:
    """Probe that stays, so that no XID is missed between two reports; started again when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._hanging: subprocess.Popen[bytes] | None = None
        self._complaint = b""

    def report(self, *, with_jobs: bool = False) -> Mapping[str, Any]:
        """Return a report of this moment, as it is; if the probe crashed, one whose `error` says so.

        `with_jobs` it also lists the jobs of the whole machine.
        """
        if self._hanging is not None and self._hanging.poll() is None:  # another would hang, too
            return probe.server_report("none", None, [], HANGS)
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    command("--loop"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            except OSError as error:  # no memory, processes or descriptors are left
                return probe.server_report("none", None, [], f"the probe could not run: {error}")
            assert self._process.stderr is not None
            os.set_blocking(self._process.stderr.fileno(), False)
            self._complaint = b""
        try:
            found = self._ask(self._process, b"jobs\n" if with_jobs else b"\n")
        except (OSError, ValueError):
            return probe.server_report("none", None, [], self._end())
        self._read_complaint(self._process)
        if found.get("error") is not None:
            self._end()
        return found

    def _read_complaint(self, process: subprocess.Popen[bytes]) -> None:
        """Keep the end of what the probe writes to standard error, which must not fill up."""
        assert process.stderr is not None
        self._complaint = (self._complaint + (process.stderr.read() or b""))[-4000:]

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
        """Return the probe's answer; raises `OSError` or `ValueError` if it gives none."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(TIMEOUT_S):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 65536)
                buffer += chunk
                last = buffer[buffer.rfind(b"\n", 0, -1) + 1 :]
                if last.startswith(b"{") and last.endswith(b"\n"):
                    found: dict[str, Any] = json.loads(last)
                    return found
                if not chunk or len(buffer) > probe.MAX_REPORT_BYTES:
                    raise ValueError("no answer")

    def _end(self) -> str:
        """End the process and return why it gave no answer."""
        process, self._process = self._process, None
        if process is None:
            return "the probe was not running"
        if process.poll() is None:
            process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process in a driver that hangs cannot be ended
            process.wait(END_TIMEOUT_S)
        self._read_complaint(process)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            with suppress(OSError):
                pipe.close()
        if process.returncode is None:
            self._hanging = process
            return HANGS
        return _reason(process.returncode, self._complaint.decode("utf-8", "replace"))

    def close(self) -> None:
        """End the probe."""
        self._end()
