"""Servers with agents, each a process with a folder of jobs, which a test carries messages to and from."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from resource_manager.agent.job_runner import AgentJobs
from resource_manager.core.identifiers import token_of_key
from resource_manager.jobs.directories import job_files, job_states
from tests.agent.reporting import as_text, gpu, process, report
from tests.faults.bugs import BUGS
from tests.faults.worker import die_with_parent

INTERVAL_S = 0.5


def serve(server: str, root: str, bug: str, pipe: Any) -> None:
    """Be the agent of a server: take the answers that come by the pipe; on None send what it runs."""
    die_with_parent()
    if bug:
        BUGS[bug]()
    jobs = AgentJobs(server, root, changed=lambda: None, say=lambda line: None)
    while True:
        answer = pipe.recv()
        if answer is None:
            pipe.send(jobs.report())
        else:
            jobs.take(answer)


class AgentServer:
    """A server: its folder, its agent's process, and what its probe would say."""

    def __init__(self, name: str, folder: Path, gpu_uuids: Sequence[str], bug: str) -> None:
        self.name, self.root = name, folder / name
        self.lists_jobs = False
        """Whether the next report is to list the jobs."""

        self._gpu_uuids, self._bug = gpu_uuids, bug
        self._uptime_s, self._boots = 100.0, 0
        self._is_paused = False
        self.start()

    def start(self) -> None:
        """Start the agent."""
        self.known = ""
        context = multiprocessing.get_context("forkserver")
        self._pipe, other = context.Pipe()
        arguments = (self.name, str(self.root), self._bug, other)
        self._agent = context.Process(target=serve, args=arguments, daemon=True)
        self._agent.start()
        other.close()
        self._is_paused = False

    @property
    def pid(self) -> int:
        """The agent's process."""
        return self._agent.pid or 0

    @property
    def runs(self) -> bool:
        return self._agent.is_alive() and not self._is_paused

    def kill_agent(self) -> None:
        self._agent.kill()
        self._agent.join()
        self._pipe.close()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self._is_paused = True

    def go_on(self, pid: int) -> None:
        """End the pause of that process, if it is still the agent."""
        if self.pid == pid and self._agent.is_alive():
            os.kill(pid, signal.SIGCONT)
            self._is_paused = False

    def revive(self) -> None:
        """Start the agent unless it runs."""
        if not self._agent.is_alive():
            self.start()

    def die(self) -> None:
        self.kill_agent()
        for each in self.processes():
            with suppress(psutil.Error):
                each.kill()

    def boot(self) -> None:
        self._boots += 1
        self._uptime_s = 0.0
        self.revive()

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of jobs here."""
        mark = f"{self.root}/"
        found = []
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = each.environ().get("GPU_JOB_LOCK", "").startswith(mark)
                if is_ours and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    def job_keys(self) -> list[str]:
        """Return the jobs of which there is a process, as a probe finds them."""
        return [str(key) for key in job_states.running(str(self.root))["running"]]

    def tokens(self) -> set[int]:
        """Return the fencing tokens of those jobs."""
        return {token_of_key(key) for key in self.job_keys()}

    def tell(self, answer: Mapping[str, Any], pid: int) -> None:
        """Bring an answer to the process that asked for it, if it is still there."""
        if self.runs and self.pid == pid:
            with suppress(OSError):
                self._pipe.send(answer)
                self.known = answer["known"]

    def report(self, gpus_of: Mapping[str, Mapping[str, Sequence[str]]]) -> bytes | None:
        """Return a report, None if the agent gives none; `gpus_of` has the GPUs of jobs by key and server."""
        jobs = self._jobs() if self.runs else None
        if jobs is None:
            return None
        keys = self.job_keys()
        on_gpu: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for number, key in enumerate(keys):
            for uuid in gpus_of.get(key, {}).get(self.name, ()):
                on_gpu[uuid].append(process(1000 + number, job=key, lease_source="cgroup"))
        self._uptime_s += 0.01
        return as_text(
            report(
                time.time(),
                *(gpu(0, uuid=uuid, processes=on_gpu[uuid]) for uuid in self._gpu_uuids),
                name=self.name,
                uptime_s=self._uptime_s,
                boot_id=f"boot-{self._boots}",
                interval_s=INTERVAL_S,
                machine=job_files.machine(),
                **({"jobs": {"keys": keys, "complete": True}} if self.lists_jobs else {}),
                **jobs,
            )
        )

    def _jobs(self) -> dict[str, Any] | None:
        try:
            self._pipe.send(None)
            return dict(self._pipe.recv()) if self._pipe.poll(10.0) else None
        except (OSError, EOFError):
            return None
