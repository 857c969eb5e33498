"""Workers as tasks of a real Airflow, which gives each that dies another try."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from demo.stack import Stack
from tests.faults.processes import Process, signalled
from tests.faults.worker import Assignment, main

DAG_ID = "fault_worker"


def work_as_task(assignment: Mapping[str, Any], try_number: int) -> None:
    """Record the task's process, then work; a later try draws again and halts at no commit."""
    told = Assignment(**{**assignment, "services": ()})
    record = Path(told.record)
    if not record.parent.exists():
        return  # its run is long over
    with record.with_suffix(".tries").open("a") as tries:
        tries.write(f"{os.getpid()} {psutil.Process().create_time()}\n")
    if try_number > 1:
        told = replace(told, seed=told.seed + try_number, halts_at=None)
    main(told)
    record.with_suffix(".ended").touch()


class AirflowTask(Process):
    """A worker whose processes are the tries of one task; it has ended once a try came to its end."""

    def __init__(self, assignment: Assignment) -> None:
        self._tries = Path(assignment.record).with_suffix(".tries")
        self._ended = Path(assignment.record).with_suffix(".ended")

    def alive(self) -> list[psutil.Process]:
        """Its living tries, the newest last: more than one where Airflow took one for dead."""
        found = []
        for line in self._tries.read_text().splitlines() if self._tries.exists() else ():
            pid, created = line.split()
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.create_time() == float(created) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def exitcode(self) -> int | None:
        return 0 if self._ended.exists() else None

    def signal(self, number: signal.Signals) -> None:
        for process in self.alive():
            signalled(process.pid, number)

    def runs(self) -> bool:
        return bool(self.alive())

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def supervisors(self) -> list[int]:
        """The processes that speak to the execution API for its tries."""
        found = []
        for process in self.alive():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                parent: int = process.ppid()
                if os.getsid(parent) == os.getsid(
                    process.pid
                ):  # else it is an orphan, and not Airflow's child
                    found.append(parent)
        return found


class Airflow(Stack):
    """Airflow with LocalExecutor on a PostgreSQL: tries are started by its scheduler, at once."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        super().__init__(
            home,
            dags=Path(__file__).parent / "dags",
            start_timeout_s=600.0,
            settings={
                **environment,
                "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
                "AIRFLOW__CORE__PARALLELISM": "16",
                "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "8",
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
                "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
                "AIRFLOW__WORKERS__EXECUTION_API_RETRY_WAIT_MIN": "0.1",
                "AIRFLOW__WORKERS__EXECUTION_API_RETRY_WAIT_MAX": "0.5",
            },
        )
        self._asking = ThreadPoolExecutor(1)

    def start(self, assignment: Assignment) -> tuple[AirflowTask, Future[str]]:
        """The worker, and the name of its DAG run once Airflow gave it: the caller has faults to undo."""
        triggered = self._asking.submit(self.api.trigger, DAG_ID, asdict(assignment))
        return AirflowTask(assignment), triggered

    def give_up(self, triggered: Future[str]) -> None:
        """Ends that DAG run, if it goes on."""
        run_id = triggered.result()
        if self.api.run_state(DAG_ID, run_id) not in {"success", "failed"}:
            self.api.call("PATCH", f"/dags/{DAG_ID}/dagRuns/{run_id}", {"state": "failed"})

    def api_servers(self) -> list[int]:
        """The processes that answer the execution API."""
        titles = ("api_server", "api-server")
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if any(title in word for word in process.cmdline()[:3] for title in titles):
                    found.append(process.pid)
        return found
