"""`GPUTrainingOperator`: wait for GPUs, run a job on them and release them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowTaskTerminated

from resource_manager.airflow.demand import end_lease, launcher_labels, seconds
from resource_manager.airflow.hook import Manager
from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.triggers import LOG_PLACE, JobTrigger, TriggerState, identity_of, log_place
from resource_manager.core.changes import Outcome
from resource_manager.jobs.launchers import Job, JobState, LauncherError, LauncherUnreachableError
from resource_manager.jobs.reconcile import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.results import Allocation

GPUS_STAY_ALLOCATED = "its GPUs stay allocated until the job is known to be gone"


class GPUTrainingOperator(GPUOperator):
    """Run a job on GPUs of one server, without a worker slot while it waits or trains.

    Every execution (first try, retry, cleared or resumed) takes the same steps: request the lease of this
    task, which returns the one it already holds; start the lease's job unless it runs; defer to a trigger.

    :param command: shell command, or list of arguments that are not passed through a shell.
    :param image: container image, for the `docker` launcher; `command` may then be left out.
    :param env: further environment for the job; the variables of its devices are added.
    :param launcher: `local` (this machine), `ssh` or `docker` (the granted server, by its address in the
        inventory). Default: `docker` if there is an image, else `local`.
    :param launcher_conn_id: connection of the launcher: of type ssh, or docker (for the registry).
    :param container: further options for the container, as Docker's `create_host_config` names them.
    :param unreachable_timeout: longest time that the job's server may be unreachable before this try fails.

    Further parameters as for `GPUOperator`. The trigger that watches the job renews its lease.

    The task returns the last line of the job's output, parsed if it is JSON (without NaN, which an XCom
    cannot hold); XCom `allocation` has the lease. `execution_timeout` counts from the start of the job.
    """

    template_fields: Sequence[str] = (*GPUOperator.template_fields, "command", "image", "env", "launcher")
    template_fields_renderers: ClassVar[dict[str, str]] = {"command": "bash", "env": "json"}
    ui_color = "#d9ead3"
    default_ttl = timedelta(minutes=2)

    def __init__(
        self,
        *,
        command: str | Sequence[str] = (),
        image: str = "",
        env: Mapping[str, str] | None = None,
        launcher: str = "",
        launcher_conn_id: str | None = None,
        container: Mapping[str, Any] | None = None,
        ttl: float | str | timedelta = default_ttl,
        unreachable_timeout: timedelta = timedelta(minutes=10),
        **kwargs: Any,
    ) -> None:
        super().__init__(ttl=ttl, **kwargs)
        self.command = command
        self.image = image
        self.env = env
        self.launcher = launcher
        self.launcher_conn_id = launcher_conn_id
        self.container = container
        self.unreachable_timeout = unreachable_timeout
        self._identity: TaskIdentity | None = None

    def execute(self, context: Any) -> Any:
        """Request the lease; run the job if it is granted, else wait in the triggerer."""
        self._identity, _ = identity_of(context)
        launcher = self.launcher or ("docker" if self.image else "local")
        manager = self.manager
        labels = launcher_labels(launcher, self.launcher_conn_id)
        self._run_job(context, manager, self.lease(context, manager, labels=labels))

    def _run_job(self, context: Any, manager: Manager, allocation: Allocation) -> NoReturn:
        identity, plain_identity = identity_of(context)
        job = RunningJob.of(allocation)
        if job is None:
            raise AirflowFailException(f"lease {allocation['task_id']!r} was granted without a launcher")
        self.log.info(
            "allocated GPUs %s and %s CPUs of %s; job %s",
            allocation["gpu_devices"],
            allocation["cpu_count"],
            allocation["server_name"],
            job.key,
        )
        context["ti"].xcom_push(key="allocation", value=allocation)
        context["ti"].xcom_push(key=LOG_PLACE, value=log_place(job))
        started_at = time.time()
        try:
            with closing(job.open()) as launcher:
                if launcher.status(job.key).state is JobState.ABSENT:
                    launcher.start(self._job(job.key, allocation))
                else:
                    self.log.info("the job was started by an earlier execution; watching it")
                    started_at = allocation["granted_at"]
        except LauncherUnreachableError as error:
            raise AirflowException(f"{error}; {GPUS_STAY_ALLOCATED}") from error
        except LauncherError as error:
            end_lease(manager, identity, self.owner, Outcome.FAILED)
            raise AirflowException(str(error)) from error
        timeout = self.execution_timeout
        self.defer(
            trigger=JobTrigger(
                plain_identity,
                asdict(job),
                seconds(self._ttl),
                self.gpu_conn_id,
                self.unreachable_timeout.total_seconds(),
                None if timeout is None else timeout.total_seconds(),
                started_at,
            ),
            method_name="execute_ended",
        )

    def _job(self, key: str, allocation: Allocation) -> Job:
        # Native rendering turns arguments into numbers, and an empty text into None.
        given = self.command or ()
        command = ("/bin/sh", "-c", given) if isinstance(given, str) else tuple(map(str, given))
        return Job(
            key=key,
            command=command,
            environment={
                **{name: str(value) for name, value in (self.env or {}).items()},
                "GPU_LEASE_ID": allocation["task_id"],
                "GPU_LEASE_FENCING_TOKEN": str(allocation["fencing_token"]),
                "GPU_SERVER": allocation["server_name"],
            },
            image=self.image,
            gpu_ids=tuple(allocation["gpu_ids"]),
            gpu_uuids=tuple(allocation["gpu_uuids"]),
            gpu_milli=allocation["gpu_milli"],
            gpu_memory_mib=allocation["gpu_memory_mib"],
            vendor=allocation["vendor"] or "nvidia",
            cpus=allocation["cpu_count"],
            labels={**allocation["labels"], "lease": str(allocation["fencing_token"])},
            container=self.container or {},
        )

    def execute_ended(self, context: Any, event: dict[str, Any]) -> Any:
        """Stop what is left of the job, release its GPUs, and return its result or raise its failure."""
        if event["state"] == TriggerState.JOB_UNREACHABLE:
            raise AirflowException(f"{event['detail']}; {GPUS_STAY_ALLOCATED}")
        if event["state"] == TriggerState.LEASE_LOST:
            raise AirflowException("the lease was ended by another client, so the job was stopped")
        succeeded = event.get("exit_code") == 0
        identity, _ = identity_of(context)
        end_lease(self.manager, identity, self.owner, Outcome.SUCCESS if succeeded else Outcome.FAILED)
        if event["state"] == TriggerState.TIMED_OUT:
            raise AirflowException(f"the job was stopped after execution_timeout = {self.execution_timeout}")
        if event["exit_code"] is None:
            raise AirflowException(
                "the job vanished without an exit code: it was killed, or its server restarted"
            )
        if not succeeded:
            raise AirflowException(f"the job ended with exit code {event['exit_code']}: {event['last_line']}")
        return _value(event["last_line"])

    def on_kill(self) -> None:
        """End the job and its lease if a user ended the task while it was in a worker.

        Airflow calls this between two steps of `execute`; it raises `AirflowTaskTerminated`, so that
        `execute` does not continue and start a job on free GPUs.
        """
        if self._identity is not None and not is_wanted(self._identity):
            end_lease(self.manager, self._identity, self.owner)
            raise AirflowTaskTerminated("the task was ended in Airflow")


def _value(line: str) -> Any:
    """Return the line parsed as JSON if an XCom can hold the value, else as text: the job has succeeded."""
    try:
        value = json.loads(line, parse_int=_of_64_bits)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return line
    return value


def _of_64_bits(digits: str) -> int:
    """Parse an integer of at most 64 bits, the limit of msgpack between Airflow's worker and supervisor."""
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits} has more than 64 bits")
    return number
