"""The agent's loop over the probe: what it sends, and what it does when nobody takes it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from resource_manager import __version__
from resource_manager.agent import sending
from resource_manager.agent.generation import KnownGeneration
from resource_manager.agent.report_format import read_report
from resource_manager.agent.running import HANGS, RunningProbe
from resource_manager.agent.sending import ReportSender, run_agent
from resource_manager.errors import InvalidRequestError
from tests.agent import mps_control
from tests.eventually import wait_for
from tests.nvml.standin import State, gpu, library, state, uuid_of

__all__ = ["library", "state"]

NOWHERE = Path("/proc/nowhere/mark")
"""Path of a file that cannot be written."""


class Service:
    """HTTP server that keeps the reports it gets and answers them as told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, bytes]] = []
        self.status, self.answer = 200, b'{"cleaning": []}'
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, self.headers["Authorization"], body))
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.answer)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def rounds(
    sender: ReportSender, steps: list[Callable[[], object]], jitter: float = 0.5
) -> tuple[list[float], list[str]]:
    """Run the agent, with a step in each pause, until there is none left; return pauses and lines."""
    pauses: list[float] = []
    said: list[str] = []

    def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    with patch.object(sending.spread, "random", lambda: jitter):
        run_agent("gpu-a", sender, 10.0, sleep=sleep, say=said.append, generation=KnownGeneration(NOWHERE))
    return pauses, said


def test_mps_daemons_of_an_answer_are_kept_and_reported_next(
    state: State, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("MPS_STANDIN", str(mps_control.install(tmp_path / "bin")))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    shared = {"folder": str(tmp_path / "mps"), "uuids": [uuid_of(0)]}
    service.answer = json.dumps({"cleaning": [], "mps": shared}).encode()

    def last_share_ends() -> None:
        service.answer = json.dumps({"cleaning": [], "mps": {**shared, "uuids": []}}).encode()

    pauses, said = rounds(ReportSender(service.url), [lambda: None, last_share_ends, lambda: None])
    reports = [read_report(body) for _, _, body in service.requests]
    assert [report.mps for report in reports] == [None, [uuid_of(0)], [uuid_of(0)], []]
    assert pauses[0] == 1.0, "a job waits for the daemon"
    assert pauses[1] == 10.0
    assert said == []


def test_jobs_are_listed_in_the_report_after_an_answer_that_asks_for_them(
    state: State, service: Service
) -> None:
    def answer(text: bytes) -> Callable[[], object]:
        return lambda: setattr(service, "answer", text)

    service.answer = b'{"cleaning": [], "jobs": true}'
    rounds(ReportSender(service.url), [answer(b'{"cleaning": []}'), lambda: None])
    reports = [read_report(body) for _, _, body in service.requests]
    assert [found.jobs is not None for found in reports] == [False, True, False]


def test_reports_are_sent_with_name_token_and_path(state: State, service: Service) -> None:
    sender = ReportSender(f"{service.url}/gpu/", "gpm_secret")
    pauses, said = rounds(sender, [lambda: state.write(gpu(4, "event 1 xid 79"))])
    assert (pauses, said) == ([10.0, 10.0], [])
    assert [(path, token) for path, token, _ in service.requests] == [
        ("/gpu/api/reports", "Bearer gpm_secret")
    ] * 2
    first, second = (read_report(body) for _, _, body in service.requests)
    assert first.server == second.server == "gpu-a"
    assert first.version == __version__
    assert [found.uuid for found in first.gpus] == [uuid_of(0), uuid_of(1)]
    assert [found.uuid for found in second.gpus] == [uuid_of(4)]
    assert first.uptime_s is not None
    assert second.uptime_s is not None
    assert second.uptime_s > first.uptime_s


def test_xids_of_reports_that_nobody_took_come_with_the_next_one(state: State, service: Service) -> None:
    """The library tells each of them once, and a GPU with some of them has to be closed."""
    service.status, service.answer = 503, b'{"error": "out"}'

    def breaks() -> None:
        state.write(gpu(0, "event 1 xid 48"), gpu(1))

    def back() -> None:
        service.status, service.answer = 200, b'{"cleaning": []}'
        state.write(gpu(0, "event 1 xid 48", "event 2 xid 13"), gpu(1))

    rounds(ReportSender(service.url), [breaks, lambda: None, back, lambda: None])
    reports = [read_report(body) for _, _, body in service.requests]
    assert [[xid.xid for xid in report.gpus[0].xids or ()] for report in reports] == [
        [],
        [48],
        [48],
        [48, 13],
        [],
    ]
    assert all(report.gpus[1].xids == [] for report in reports)


def test_while_a_gpu_is_cleaned_reports_come_each_half_second(state: State, service: Service) -> None:
    service.answer = b'{"cleaning": [{"gpu_id": 0}]}'

    def clean() -> None:
        service.answer = b'{"cleaning": []}'

    pauses, _ = rounds(ReportSender(service.url), [lambda: None, clean])
    assert pauses == [0.5, 0.5, 10.0]


def test_after_a_process_on_a_gpu_has_ended_reports_come_each_second(state: State, service: Service) -> None:
    """Its lease is about to end: the service should learn soon that the GPU is clean."""
    with subprocess.Popen(["sleep", "60"]) as job:
        state.write(gpu(0, f"process {job.pid} 1048576"))

        def end() -> None:
            job.kill()
            job.wait()
            state.write(gpu(0))

        looks: list[Callable[[], object]] = [lambda: None, lambda: None, end]
        pauses, _ = rounds(ReportSender(service.url), [*looks, *[lambda: None] * 16])
    reports = [read_report(body) for _, _, body in service.requests]
    assert [len(found.gpus[0].processes or ()) for found in reports[:2]] == [1, 0]
    assert pauses == [1.0] * 3 + [1.0] * 15 + [10.0] * 2


def test_a_refusal_is_said_once_and_the_agent_goes_on(state: State, service: Service) -> None:
    service.status, service.answer = 403, b'{"detail": "the token is of server gpu-b"}'

    def accept() -> None:
        service.status, service.answer = 204, b""

    pauses, said = rounds(ReportSender(service.url), [lambda: None, accept])
    assert len(service.requests) == 3
    assert pauses == [10.0] * 3
    assert said == [
        f"{service.url} refused the report: 403: the token is of server gpu-b",
        "reports are taken again",
    ]


def test_a_service_that_is_away_is_said_once(state: State) -> None:
    pauses, [said] = rounds(ReportSender("http://127.0.0.1:1"), [lambda: None])
    assert len(pauses) == 2
    assert "http://127.0.0.1:1 does not answer" in said


def test_the_next_service_takes_the_reports_of_one_that_is_away(state: State, service: Service) -> None:
    sender = ReportSender(f"http://127.0.0.1:1 {service.url}", "gpm_secret")
    pauses, said = rounds(sender, [lambda: None], jitter=1.0)
    assert (len(service.requests), said) == (2, [])
    assert pauses == [11.0] * 2, "agents that were started at once do not stay together"
    service.status = 503
    _, [said_once] = rounds(sender, [])
    assert "127.0.0.1:1 does not answer" in said_once


@pytest.mark.parametrize("status", [200, 404])
def test_a_page_of_a_proxy_is_no_answer_whatever_its_status(
    state: State, service: Service, status: int
) -> None:
    service.status, service.answer = status, b"<html>404 page not found</html>"
    _, [said] = rounds(ReportSender(service.url), [])
    assert said.startswith(f"{service.url} is not a GPU manager: it answered the report with {status} ")


def test_the_jobs_of_a_whole_server_are_an_answer(service: Service) -> None:
    jobs = [{"key": f"j-{number}", "spec": {"environment": {"A": "x" * 2**16}}} for number in range(128)]
    service.answer = json.dumps({"jobs": jobs}).encode()
    assert ReportSender(service.url).send({})["jobs"] == jobs


def test_a_redirection_is_not_followed(state: State, service: Service) -> None:
    service.status = 302
    _, [said] = rounds(ReportSender(service.url, "gpm_secret"), [])
    assert "302" in said
    assert len(service.requests) == 1


def test_a_machine_without_processes_is_reported(state: State) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    running = RunningProbe()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        assert running.report()["error"] == "the probe could not run: [Errno 24] Too many open files"
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert running.report()["error"] is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        running.close()


KEPT = (
    "import ctypes, sys; print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True); input()"
)
"""Program that traces a process (PTRACE_SEIZE): its parent does not see its end before this has ended."""


def test_beside_a_probe_that_cannot_be_ended_there_is_no_second_one(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource_manager.agent.running.END_TIMEOUT_S", 0.2)
    running, this = RunningProbe(), psutil.Process()
    others = {child.pid for child in this.children()}
    running.report()
    (pid,) = {child.pid for child in this.children()} - others
    with subprocess.Popen(
        [sys.executable, "-c", KEPT, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tracer:
        assert tracer.stdout is not None
        if tracer.stdout.readline() != b"0\n":
            pytest.skip("needs the right to trace processes")
        state.write(gpu(0), machine=["fail nvmlDeviceGetCount_v2 999"])
        assert "Unknown" in running.report()["error"]
        for _ in range(2):
            assert running.report()["error"] == HANGS
        assert {child.pid for child in this.children()} - others == {pid, tracer.pid}
        assert tracer.stdin is not None
        tracer.stdin.close()
    state.write(gpu(0))
    assert running.report()["error"] is None
    running.close()


def test_a_crash_of_the_library_is_reported_and_the_probe_started_again(
    state: State, service: Service
) -> None:
    _, said = rounds(
        ReportSender(service.url),
        [
            lambda: state.write(gpu(0), machine=["crash nvmlDeviceGetName"]),
            lambda: state.write(gpu(0), machine=["fail nvmlInit_v2 18"]),
            lambda: state.write(gpu(0)),
        ],
    )
    reports = [read_report(body) for _, _, body in service.requests]
    assert [len(report.gpus) for report in reports] == [2, 0, 0, 1]
    crash, mismatch = (report.error or "" for report in reports[1:3])
    assert crash == "the GPU library crashed the probe: Segmentation fault"
    assert "version mismatch" in mismatch
    assert said == [crash, mismatch, "reports are taken again"]


@pytest.mark.parametrize("url", ["", "gpu-host", "ftp://gpu-host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^url "):
        ReportSender(url)


def test_a_token_with_a_line_break_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"^token ") as caught:
        ReportSender("http://host", "gpm_secret\n")
    assert "secret" not in str(caught.value)


def gpu_manager(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "resource_manager.cli", *arguments]


def test_once_prints_or_sends_one_report(state: State, service: Service) -> None:
    shown = subprocess.run(
        gpu_manager("agent", "--server", "gpu-a", "--once", "--json"), capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert (report["server"], len(report["gpus"]), report["gpus"][0]["health"]) == ("gpu-a", 2, [])
    sent = subprocess.run(
        gpu_manager("--url", service.url, "agent", "--server", "gpu-a", "--once", "--token", "gpm_a"),
        capture_output=True,
        text=True,
    )
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "", "")
    [(path, token, body)] = service.requests
    assert (path, token) == ("/api/reports", "Bearer gpm_a")
    assert len(read_report(body).gpus) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--server", "a b", "--once", "--json"], 2, "--server 'a b' is not the name of a server"),
        (["--server", "a", "--json"], 2, "--json goes with --once"),
        (["--server", "a"], 2, "--url is missing"),
        (["--server", "a", "--url", "x"], 2, "--url 'x' is not the address of a service"),
        (["--server", "a", "--url", "http://h", "--every", "0"], 2, "must be above 0 and at most a day"),
        (["--server", "a", "--url", "http://127.0.0.1:1", "--once"], 3, "does not answer"),
    ],
)
def test_bad_input_is_one_line(state: State, arguments: list[str], code: int, line: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GPU_MANAGER_URL"}
    done = subprocess.run(
        gpu_manager("agent", *arguments), capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr


@pytest.mark.parametrize("program", ["resource_manager.cli", "resource_manager.agent"])
def test_an_agent_whose_log_is_on_a_full_disk_goes_on(state: State, service: Service, program: str) -> None:
    service.status = 500
    words = ["--url", service.url, "agent", "--server", "gpu-a"] if program.endswith("cli") else []
    own = {"GPU_MANAGER_SERVER": "gpu-a", "GPU_MANAGER_URL": service.url, "STATE_DIRECTORY": "/gone"}
    with (
        open("/dev/full", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", program, *words], env={**os.environ, **own}, stderr=log
        ) as agent,
    ):
        try:
            wait_for(lambda: bool(service.requests), 20)
            with pytest.raises(subprocess.TimeoutExpired):
                agent.wait(2)
        finally:
            agent.kill()


@pytest.mark.parametrize("words", ["cli agent", "cli agent --run-jobs", "agent"])
def test_an_agent_tells_a_service_nothing_of_the_state_of_another(
    state: State, service: Service, words: str, tmp_path: Path
) -> None:
    """It would take its own state for an older one, and grant nothing."""
    service.answer = b'{"cleaning": [], "generation": "0c/1/1.0"}'
    module, *options = words.split()
    marks = tmp_path / "marks"
    own = {"GPU_MANAGER_SERVER": "gpu-a", "STATE_DIRECTORY": str(marks)}
    own["GPU_MANAGER_JOBS_DIR"] = str(tmp_path / "jobs")
    for count, url in enumerate((service.url, service.url.replace("127.0.0.1", "localhost")), 1):
        named = ["--server", "gpu-a", "--url", url] if options else []
        service.requests.clear()
        with subprocess.Popen(
            [sys.executable, "-m", f"resource_manager.{module}", *options, *named],
            env={**os.environ, **own, "GPU_MANAGER_URL": url},
        ) as agent:
            try:
                wait_for(lambda count=count: len(list(marks.glob("*.mark"))) == count)  # type: ignore[misc]
            finally:
                agent.kill()
        reports = [body for path, _, body in service.requests if path == "/api/reports"]
        assert read_report(reports[0]).generation is None


def test_an_agent_is_small_and_cheap(state: State, service: Service) -> None:
    """At most 60 MB with its probe, and 1 % of a core with a report each 10 s: 0.1 s of processor each."""
    state.write(*(gpu(number, "nvlink 0 switch 00000000:C1:00.0") for number in range(8)))
    process = subprocess.Popen(
        gpu_manager("agent", "--server", "gpu-a", "--url", service.url, "--every", "0.05"),
        stderr=subprocess.PIPE,
    )
    try:
        wait_for(lambda: len(service.requests) >= 5)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        assert len(family) == 2

        def used_s() -> float:
            times = [each.cpu_times() for each in family]
            return sum(time.user + time.system for time in times)

        begun, before = len(service.requests), used_s()
        wait_for(lambda: len(service.requests) >= begun + 20)
        per_report_s = (used_s() - before) / 20
        memory = sum(each.memory_full_info().pss for each in family)
        print(f"{per_report_s * 1000:.1f} ms a report, {memory / 1e6:.1f} MB")
        assert per_report_s <= 0.1
        assert memory <= 60e6
    finally:
        process.terminate()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    wait_for(lambda: not family[1].is_running() or family[1].status() == psutil.STATUS_ZOMBIE)
