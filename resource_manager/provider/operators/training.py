"""`GPUTrainingOperator`: waits for its GPUs, runs a job on them and releases them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowTaskTerminated

from resource_manager.launchers import Job, JobState, LauncherError, LauncherUnreachableError
from resource_manager.provider.demand import end_lease, launcher_labels
from resource_manager.provider.hook import Manager
from resource_manager.provider.operators.base import GPUOperator
from resource_manager.provider.task_state import is_wanted
from resource_manager.provider.triggers import LOG_PLACE, JobTrigger, identity_of, log_place
from resource_manager.reconcile import RunningJob
from resource_manager.task_identity import TaskIdentity

HELD = "its GPUs stay held until it is known to be gone"


class GPUTrainingOperator(GPUOperator):
    """Runs a job on GPUs of one server, without a worker slot while it waits or trains.

    Every entry, first try, retry, cleared or resumed, does the same: it asks for the lease of this task
    (and gets the one it already holds), starts the lease's job (unless it runs), and defers to a trigger.

    :param command: a shell command, or a list of arguments that no shell reads.
    :param image: container image, for the `docker` launcher; `command` may then be left out.
    :param env: more environment for the job; its devices are added.
    :param launcher: where the job runs: `local` (this machine), `ssh` or `docker` (the granted server, by
        its address in the inventory). `docker` if there is an image, else `local`, if not named.
    :param launcher_conn_id: connection of the launcher: of type ssh, or docker (for the registry).
    :param container: more options for the container, as Docker's `create_host_config` names them.
    :param unreachable_timeout: how long the job's server may be out of reach before this try fails.

    and those of `GPUOperator`; whoever watches the job renews its lease.

    Returns the last line of the job's output, as JSON where it is that (and has no NaN, which no XCom can
    hold); XCom `allocation` has the lease.
    `execution_timeout` counts from the start of the job.
    """

    template_fields: Sequence[str] = (*GPUOperator.template_fields, "command", "image", "env", "launcher")
    template_fields_renderers: ClassVar[dict[str, str]] = {"command": "bash", "env": "json"}
    ui_color = "#d9ead3"

    def __init__(
        self,
        *,
        command: str | Sequence[str] = (),
        image: str = "",
        env: Mapping[str, str] | None = None,
        launcher: str = "",
        launcher_conn_id: str | None = None,
        container: Mapping[str, Any] | None = None,
        ttl: timedelta = timedelta(minutes=2),
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
        """Asks for the lease; goes on with the job if it is granted, else waits in the triggerer."""
        self._identity, _ = identity_of(context)
        launcher = self.launcher or ("docker" if self.image else "local")
        manager = self.manager
        labels = launcher_labels(launcher, self.launcher_conn_id)
        self._run_job(context, manager, self.lease(context, manager, labels=labels))

    def _run_job(self, context: Any, manager: Manager, allocation: dict[str, Any]) -> NoReturn:
        _, plain_identity = identity_of(context)
        job = RunningJob.of(allocation)
        if job is None:
            raise AirflowFailException(f"lease {allocation['task_id']!r} was granted without a launcher")
        self.log.info(
            "holding GPUs %s and %s CPUs of %s; job %s",
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
                    self.log.info("the job was started before; going on with it")
                    started_at = allocation["granted_at"]
        except LauncherUnreachableError as error:
            raise AirflowException(f"{error}; {HELD}") from error
        except LauncherError as error:
            end_lease(manager, allocation["task_id"], "FAILED")
            raise AirflowException(str(error)) from error
        timeout = self.execution_timeout
        self.defer(
            trigger=JobTrigger(
                plain_identity,
                asdict(job),
                self.ttl.total_seconds(),
                self.gpu_conn_id,
                self.unreachable_timeout.total_seconds(),
                None if timeout is None else timeout.total_seconds(),
                started_at,
            ),
            method_name="execute_ended",
        )

    def _job(self, key: str, allocation: dict[str, Any]) -> Job:
        # Native rendering makes numbers of arguments, and None of an empty text.
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
            gpu_milli=allocation["gpu_milli"],
            gpu_memory_mib=allocation["gpu_memory_mib"],
            vendor=allocation["vendor"] or "nvidia",
            cpus=allocation["cpu_count"],
            labels={**allocation["labels"], "lease": str(allocation["fencing_token"])},
            container=self.container or {},
        )

    def execute_ended(self, context: Any, event: dict[str, Any]) -> Any:
        """Makes sure that nothing of the job is left, releases its GPUs and says how it ended."""
        if event["state"] == "unreachable":
            raise AirflowException(f"{event['detail']}; {HELD}")
        if event["state"] == "lease lost":
            raise AirflowException("the lease was ended by someone else, so the job was stopped")
        succeeded = event.get("exit_code") == 0
        identity, _ = identity_of(context)
        end_lease(self.manager, identity.lease_id, "SUCCESS" if succeeded else "FAILED")
        if event["state"] == "timeout":
            raise AirflowException(f"the job was stopped after execution_timeout = {self.execution_timeout}")
        if event["exit_code"] is None:
            raise AirflowException(
                "the job vanished without an exit code: it was killed, or its server restarted"
            )
        if not succeeded:
            raise AirflowException(f"the job ended with exit code {event['exit_code']}: {event['last_line']}")
        return _value(event["last_line"])

    def on_kill(self) -> None:
        """Ends job and lease if a user ended the task in the moment that it was in a worker.

        Airflow calls this between two steps of `execute`, which must not go on and start a job on free GPUs.
        """
        if self._identity is not None and not is_wanted(self._identity):
            end_lease(self.manager, self._identity.lease_id)
            raise AirflowTaskTerminated("the task was ended in Airflow")


def _value(line: str) -> Any:
    """The line as JSON where it is that and an XCom can hold it, else as text: the job went well anyway."""
    try:
        value = json.loads(line, parse_int=_of_64_bits)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return line
    return value


def _of_64_bits(digits: str) -> int:
    """All that Airflow's worker can tell its supervisor, in msgpack."""
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits} has more than 64 bits")
    return number
