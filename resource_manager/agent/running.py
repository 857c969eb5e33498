"""Running of the probe as a process of its own, and reading of its answer."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from contextlib import suppress

from resource_manager.agent import probe
from resource_manager.agent.reports import MAX_REPORT_BYTES, Report, ReportError, check_report
from resource_manager.errors import ResourceManagerError

TIMEOUT_S = 2 * probe.PROBE_TIMEOUT_S
"""Limit of a whole run; the probe gives up earlier and says so."""


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
    if len(output) > MAX_REPORT_BYTES:
        raise NoReportError(f"the probe printed {len(output):,} characters")
    answer = None
    with suppress(ValueError, IndexError, RecursionError):
        answer = json.loads(output.splitlines()[-1])  # the lines before it are a .bashrc's
    if isinstance(answer, dict) and "error" in answer:
        raise NoReportError(str(answer["error"])[:1000])
    if exit_code != 0 or not isinstance(answer, dict):
        raise NoReportError(_reason(exit_code, complaint))
    try:
        return check_report(answer)
    except ReportError as error:
        raise NoReportError(str(error)) from error


def _reason(exit_code: int, complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    crash = next((line for line in lines if line.startswith("Fatal Python error: ")), None)
    if crash is not None:
        return f"the GPU library crashed the probe: {crash.partition(': ')[2]}"
    return f"the probe ended with {exit_code}: {lines[-1][:500] if lines else 'no reason given'}"
