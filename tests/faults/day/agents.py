"""Agents of some servers in one process: `python -m tests.faults.day.agents FOLDER URL NUMBER…`.

The code of `gpu-manager agent --run-jobs`, a few threads for each server. Only what its probe would see is
made up: GPUs that nobody has, and on them the processes of the jobs that the agent runs. Files in the folder
of a server hold its `token` and say what happens to it: `cut` while nothing gets through, `lost` with the
numbers of GPUs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from resource_manager.agent import sending
from resource_manager.agent.generation import KnownGeneration
from resource_manager.agent.job_runner import AgentJobs
from resource_manager.agent.polling import JobPoll
from resource_manager.agent.sending import NoAnswerError, ReportSender, run_agent
from resource_manager.jobs.directories import job_files, job_states
from tests.agent.reporting import gpu, process, report
from tests.faults.day.plan import GPUS, REPORT_S, name_of, uuids_of

BEGUN_S = 10.0
"""Age at which a process that is to be one of a job has become that."""


class CutSender(ReportSender):
    """Sender whose questions and answers get lost while its server is cut off."""

    def __init__(self, url: str, token: str, folder: Path) -> None:
        super().__init__(url, token)
        self._cut = folder / "cut"

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 30.0
    ) -> Mapping[str, Any]:
        self._get_through()
        answer = super().ask(method, path, body, timeout_s)
        self._get_through()
        return answer

    def _get_through(self) -> None:
        if self._cut.exists():
            raise NoAnswerError("the service does not answer: the server is cut off")


class DayProbe:
    """Probe of one server: its GPUs, and the processes of its jobs on them."""

    def __init__(self, number: int, folder: Path, jobs: AgentJobs) -> None:
        self._number, self._folder, self._jobs = number, folder, jobs
        self._known: dict[str, tuple[int, tuple[int, ...]]] = {}

    def report(self, *, with_jobs: bool) -> dict[str, Any]:
        keys = list(job_states.running(str(self._folder / "jobs"))["running"])
        on_gpu: dict[int, list[dict[str, Any]]] = {}
        for key in keys:
            pid, gpus = self._job(key)
            for each in gpus:
                on_gpu.setdefault(each, []).append(process(pid, job=key, lease_source="cgroup"))
        lost = self._folder / "lost"
        gone = {int(word) for word in lost.read_text().split()} if lost.exists() else set()
        uuids = uuids_of(self._number)
        return report(
            time.time(),
            *(
                gpu(each, uuid=uuids[each], processes=on_gpu.get(each, []))
                for each in range(GPUS)
                if each not in gone
            ),
            name=name_of(self._number),
            uptime_s=time.monotonic(),  # the server is older than its agent
            machine=name_of(self._number),
            **({"jobs": {"keys": keys, "complete": True}} if with_jobs else {}),
        )

    def _job(self, key: str) -> tuple[int, tuple[int, ...]]:
        """Return a process of a job and its GPUs; none of both while there is none to be seen."""
        if key not in self._known or not psutil.pid_exists(self._known[key][0]):
            mark = str(self._folder / "jobs" / key / "lock")
            for each in psutil.process_iter():
                with suppress(psutil.Error):
                    if (identity := (each.pid, each.create_time())) in _others:
                        continue
                    own = each.environ()
                    if "GPU_JOB_LOCK" not in own and time.time() - identity[1] > BEGUN_S:
                        _others.add(identity)
                    if own.get("GPU_JOB_LOCK") == mark and "GPU_LEASE_GPUS" in own:
                        self._known[key] = each.pid, tuple(map(int, own["GPU_LEASE_GPUS"].split(",")))
                        break
        return self._known.get(key, (1, ()))

    def close(self) -> None:
        """Leave nothing behind: there is no process of a probe."""


def serve(number: int, folder: Path, url: str) -> None:
    """Be the agent of one server until the process ends."""
    name, token = name_of(number), (folder / "token").read_text()
    job_files.machine = lambda: name  # each server is a machine of its own
    jobs = AgentJobs(name, str(folder / "jobs"), changed=lambda: woken.set(), say=_say)
    woken = threading.Event()
    sender = CutSender(url, token, folder)
    poll = JobPoll(name, CutSender(url, token, folder), jobs, _say)
    poll.ask_again()
    probe = DayProbe(number, folder, jobs)

    def sleep(seconds: float) -> bool:
        is_woken = woken.wait(seconds)
        woken.clear()
        return is_woken

    def run() -> None:
        _probes[threading.get_ident()] = probe
        generation = KnownGeneration(folder / "mark")
        run_agent(name, sender, REPORT_S, sleep=sleep, say=_say, generation=generation, jobs=jobs.report)

    threading.Thread(target=run, daemon=True).start()


_probes: dict[int, DayProbe] = {}
_others: set[tuple[int, float]] = set()
"""Processes, by number and start, that belong to no job: their environments are not read again."""


def _say(line: str) -> None:
    print(f"{time.time():.1f} {line}", file=sys.stderr, flush=True)


def main() -> None:
    folder, url, *servers = sys.argv[1:]
    sending.RunningProbe = lambda: _probes[threading.get_ident()]  # type: ignore[assignment, attr-defined, return-value]
    for number in map(int, servers):
        serve(number, Path(folder) / name_of(number), url)
    threading.Event().wait()


if __name__ == "__main__":
    main()
