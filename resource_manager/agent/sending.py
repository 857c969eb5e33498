"""Periodic sending of a server's GPU reports to the service."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from random import Random
from typing import Any
from urllib.parse import urlsplit

from resource_manager import __version__
from resource_manager.agent import mps
from resource_manager.agent.generation import KnownGeneration
from resource_manager.agent.probe import MAX_XIDS_OF_GPU
from resource_manager.agent.running import RunningProbe
from resource_manager.errors import InvalidRequestError, ResourceManagerError, redact

REPORTS = "/reports"
SEND_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
"""Time for a connection, which ends by itself only after minutes where a network drops what is sent."""

CLEANING_INTERVAL_S = 0.5
"""Time between two reports while the service waits for processes to leave a GPU."""

LOOK_S = 1.0
"""Time between two looks at whether a process on a GPU has ended, and between reports after one has."""

HURRY_S = 15.0
"""Time for which reports come faster after a process on a GPU has ended: its lease will soon end, too."""

JITTER = 0.1

spread = Random()
"""Of its own, so that waiting changes no random numbers of the program."""

MAX_REPLY_BYTES = 64 * 2**20
"""Most bytes of an answer: what the jobs that should be on a server need to start takes half of it."""

OLDER = (
    "the service's state is older than one that this agent knows, so its answer is not followed: "
    "gpu-manager store restore"
)


class ReportRefusedError(ResourceManagerError):
    """The service did not accept a report, or did not answer; the next report may succeed."""


class ReportSender:
    """Sender of reports to the services at `urls`, with spaces between: to the last that answered, if any.

    An address may have a path, such as Airflow's `/gpu`. No redirects are followed, which could leak the
    token to another host.
    """

    def __init__(self, urls: str, token: str | None = None) -> None:
        self._services = [_Service(url, token) for url in urls.split() or [""]]

    def send(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a service's answer; raises `ReportRefusedError` with the reason if it takes no report."""
        return self.ask("POST", REPORTS, report)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = SEND_TIMEOUT_S
    ) -> Mapping[str, Any]:
        """Return a service's answer to another call; raises as `send` does."""
        failure: NoAnswerError | None = None
        for service in list(self._services):
            try:
                return service.ask(method, path, body, timeout_s)
            except NoAnswerError as error:
                self._services.append(self._services.pop(0))
                failure = error
        assert failure is not None
        raise failure


class NoAnswerError(ReportRefusedError):
    """A service did not answer."""


class _Service:
    def __init__(self, url: str, token: str | None) -> None:
        self.url = redact(url).rstrip("/")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            said = "{url} {!r}: its host or port is wrong"  # the error may quote a part of a password
            raise InvalidRequestError(said, self.url) from error
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidRequestError(
                "{url} {!r} is not the address of a service, such as http://localhost:5000", self.url
            )
        if token and not (token.isascii() and token.isprintable() and " " not in token):
            raise InvalidRequestError("{token} must be printable ASCII without spaces")
        kind: type[HTTPConnection] = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = partial(kind, host, port)
        self._path = f"{parts.path.rstrip('/')}/api"
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """Return its answer; raises `ReportRefusedError` with the reason if it refuses."""
        connection = self._connection(timeout=min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            text = None if body is None else json.dumps(body)
            connection.request(method, f"{self._path}{path}", text, self._headers)
            with connection.getresponse() as response:
                answer = response.read(MAX_REPLY_BYTES)
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswerError(f"{self.url} does not answer: {reason}") from error
        finally:
            connection.close()
        return self._answer(response, answer, "the report" if path == REPORTS else "the call")

    def _answer(self, response: HTTPResponse, body: bytes, what: str) -> Mapping[str, Any]:
        try:
            answer = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):  # a page of a proxy, also for a service that is out
            said = f"it answered {what} with {response.status} {response.reason}"
            raise NoAnswerError(f"{self.url} is not a GPU manager: {said}")
        if 200 <= response.status < 300:
            return answer
        said = answer.get("detail") or answer.get("error") or response.reason
        kind = ReportRefusedError if response.status < 500 else NoAnswerError
        raise kind(f"{self.url} refused {what}: {response.status}: {str(said)[:500]}")


def run_agent(
    server: str,
    sender: ReportSender,
    interval_s: float,
    *,
    sleep: Callable[[float], object],
    say: Callable[[str], None],
    generation: KnownGeneration,
    jobs: Callable[[], Mapping[str, Any]] = dict,
    taken: Callable[[], object] = lambda: None,
) -> None:
    """Send a report of this server every `interval_s` seconds until `sleep` raises `KeyboardInterrupt`.

    Each pause is up to a tenth less or more, so that agents started at once spread. While the answer names
    GPUs in `cleaning` or a shorter time (`next_s`), and after a process on a GPU has
    ended, reports come faster. If it says `jobs`, the next report lists them. `say` gets a line when a report
    is refused for a new reason, and when one is taken again. The MPS daemons that an answer names are kept
    while this agent runs, also when nobody answers. An answer from an older state than that of
    `generation` is not followed. `jobs` returns what the report says of the jobs that this agent runs;
    `taken` is called after each report whose answer is followed; `sleep` may return True to have the next
    report sent at once.
    """
    probe = RunningProbe()
    own = {"server": server, "interval_s": interval_s, "version": __version__}
    trouble = ""
    hurry_left_s = 0.0
    with_jobs = False
    wanted: object = None
    unsent: dict[str, dict[int, Any]] = {}
    try:
        while True:
            pause_s = interval_s
            daemons = mps.keep(wanted)
            runs = jobs()  # before the probe: what it does not find has left the GPUs of jobs that are over
            report = {**probe.report(with_jobs=with_jobs), **own, **daemons, **runs}
            report["generation"] = generation.mark
            _add_xids(report, unsent)
            try:
                answer = sender.send(report)
                if not generation.take(answer.get("generation")):
                    raise ReportRefusedError(OLDER)
                taken()
                unsent = {pci: xids for pci, xids in unsent.items() if pci not in _xids_of(report)}
                pause_s, with_jobs = _pause_s(answer, interval_s), answer.get("jobs") is True
                if wanted != (wanted := answer.get("mps")):
                    pause_s = min(pause_s, LOOK_S)  # jobs wait for the daemons
                reason = str(report["error"] or "")
            except ReportRefusedError as error:
                reason = str(error)
                unsent |= _xids_of(report)
            if reason != trouble:
                say(reason or "reports are taken again")
                trouble = reason
            if pause_s == interval_s:
                pause_s *= 1 + JITTER * (2 * spread.random() - 1)
            if hurry_left_s > 0:
                pause_s = min(pause_s, LOOK_S)
                hurry_left_s -= pause_s
            if _sleep_until_end(_live_processes(report), pause_s, sleep):
                hurry_left_s = HURRY_S
    except KeyboardInterrupt:
        return
    finally:
        probe.close()


def _xids_of(report: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Return the XIDs in a report by the PCI address of their GPU, then by number."""
    return {
        gpu["pci"]: {xid["xid"]: xid for xid in gpu["xids"]}
        for gpu in report["gpus"]
        if gpu["pci"] and gpu["xids"]
    }


def _add_xids(report: Mapping[str, Any], unsent: Mapping[str, Mapping[int, Any]]) -> None:
    """Add the XIDs of reports that no service took to this one: the probe tells each of them once."""
    later = _xids_of(report)
    for gpu in report["gpus"]:
        if (earlier := unsent.get(gpu["pci"])) is not None:
            gpu["xids"] = list({**earlier, **later.get(gpu["pci"], {})}.values())[-MAX_XIDS_OF_GPU:]


def _pause_s(answer: Mapping[str, Any], interval_s: float) -> float:
    """Return the time until the next report: what the service asks for, if that is sooner."""
    wanted = answer.get("next_s", CLEANING_INTERVAL_S if answer.get("cleaning") else interval_s)
    if not isinstance(wanted, (int, float)) or not wanted >= CLEANING_INTERVAL_S:
        wanted = CLEANING_INTERVAL_S
    return min(interval_s, float(wanted))


def _live_processes(report: Mapping[str, Any]) -> list[int]:
    """Return the processes on GPUs that this agent can see; in a container it may see none."""
    pids = {process["pid"] for gpu in report["gpus"] for process in gpu["processes"] or ()}
    return [pid for pid in sorted(pids) if os.path.exists(f"/proc/{pid}")]


def _sleep_until_end(pids: list[int], pause_s: float, sleep: Callable[[float], object]) -> bool:
    """Sleep for so long, or until one of the processes has ended; return True if one has."""
    left_s = pause_s
    while pids and left_s > 0:
        step_s = min(left_s, LOOK_S)
        if sleep(step_s):
            return False
        left_s -= step_s
        if not all(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
    if left_s > 0:
        sleep(left_s)
    return False
