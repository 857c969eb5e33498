"""`GPUTrainingOperator`: waits for its GPUs, runs a job on them and releases them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from resource_manager.launchers import Job, JobState, LauncherError, LauncherUnreachableError
from resource_manager.models import MILLI_PER_GPU
from resource_manager.provider.demand import (
    Demand,
    describe_waiting,
    end_lease,
    launcher_labels,
    team_of,
)
from resource_manager.provider.hook import DEFAULT_CONNECTION, GPUManagerHook, Manager
from resource_manager.provider.links import ConsoleLink
from resource_manager.provider.task_state import is_wanted
from resource_manager.provider.triggers import GrantTrigger, JobTrigger, identity_of
from resource_manager.reconcile import RunningJob
from resource_manager.task_identity import TaskIdentity

HELD = "its GPUs stay held until it is known to be gone"


class GPUTrainingOperator(BaseOperator):
    """Runs a job on GPUs of one server, without a worker slot while it waits or trains.

    Every entry, first try, retry, cleared or resumed, does the same: it asks for the lease of this task
    (and gets the one it already holds), starts the lease's job (unless it runs), and defers to a trigger.

    :param gpus: whole GPUs, all of one server.
    :param cpus: CPUs of the same server.
    :param command: a shell command, or a list of arguments that no shell reads.
    :param image: container image, for the `docker` launcher; `command` may then be left out.
    :param env: more environment for the job; its devices are added.
    :param launcher: where the job runs: `local` (this machine), `ssh` or `docker` (the granted server, by
        its address in the inventory). `docker` if there is an image, else `local`, if not named.
    :param launcher_conn_id: connection of the launcher: of type ssh, or docker (for the registry).
    :param container: more options for the container, as Docker's `create_host_config` names them.
    :param server: name or id of the server to try first.
    :param gpu_type: type of GPU, or several that will do.
    :param gpu_milli: thousandths of one GPU, instead of whole ones.
    :param priority: higher goes first where the queue's order says so; the task's `priority_weight` if None.
    :param team: whose share it counts towards; the task's pool if None.
    :param max_wait: how long to wait for the grant before failing; forever if None.
    :param expected_runtime: helps to tell others when they may start.
    :param ttl: life of the lease without renewal; whoever watches the job renews it.
    :param unreachable_timeout: how long the job's server may be out of reach before this try fails.
    :param gpu_conn_id: connection of type `gpu_manager`.

    Returns the last line of the job's output, as JSON where it is that; XCom `allocation` has the lease.
    `execution_timeout` counts from the start of the job.
    """

    template_fields: Sequence[str] = (
        "gpus",
        "cpus",
        "command",
        "image",
        "env",
        "launcher",
        "server",
        "gpu_type",
        "team",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"command": "bash", "env": "json"}
    operator_extra_links = (ConsoleLink(),)
    ui_color = "#d9ead3"

    def __init__(
        self,
        *,
        gpus: int | str,
        cpus: int | str = 1,
        command: str | Sequence[str] = (),
        image: str = "",
        env: Mapping[str, str] | None = None,
        launcher: str = "",
        launcher_conn_id: str | None = None,
        container: Mapping[str, Any] | None = None,
        server: int | str | None = None,
        gpu_type: str | Sequence[str] = (),
        gpu_milli: int = MILLI_PER_GPU,
        priority: int | None = None,
        team: str | None = None,
        max_wait: timedelta | None = None,
        expected_runtime: timedelta | None = None,
        ttl: timedelta = timedelta(minutes=2),
        unreachable_timeout: timedelta = timedelta(minutes=10),
        gpu_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gpus = gpus
        self.cpus = cpus
        self.command = command
        self.image = image
        self.env = env
        self.launcher = launcher
        self.launcher_conn_id = launcher_conn_id
        self.container = container
        self.server = server
        self.gpu_type = gpu_type
        self.gpu_milli = gpu_milli
        self.priority = priority
        self.team = team
        self.max_wait = max_wait
        self.expected_runtime = expected_runtime
        self.ttl = ttl
        self.unreachable_timeout = unreachable_timeout
        self.gpu_conn_id = gpu_conn_id
        self._identity: TaskIdentity | None = None

    def execute(self, context: Any) -> Any:
        """Asks for the lease; goes on with the job if it is granted, else waits in the triggerer."""
        self._identity, plain_identity = identity_of(context)
        launcher = self.launcher or ("docker" if self.image else "local")
        demand = Demand(
            self.gpus,
            self.cpus,
            self.server,
            self.gpu_type,
            self.gpu_milli,
            self.priority_weight if self.priority is None else self.priority,
            team_of(self, self.team),
            self.owner,
            self.ttl,
            self.expected_runtime,
            labels=launcher_labels(launcher, self.launcher_conn_id),
        )
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        status = demand.submit(manager, self._identity)
        if status["state"] == "WAITING":
            self.log.info("%s", describe_waiting(status))
            max_wait_s = None if self.max_wait is None else self.max_wait.total_seconds()
            self.defer(
                trigger=GrantTrigger(plain_identity, self.gpu_conn_id, max_wait_s),
                method_name="execute_granted",
            )
        self._run_job(context, manager, status)

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Goes on after the wait; the lease is asked for again, which answers with the one granted."""
        if event["state"] == "TOO LATE":
            identity, _ = identity_of(context)
            if GPUManagerHook(self.gpu_conn_id).get_conn().cancel(identity.lease_id):
                raise AirflowException(f"no GPUs within max_wait = {self.max_wait}")
        return self.execute(context)

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
        try:
            with closing(job.open()) as launcher:
                if launcher.status(job.key).state is JobState.ABSENT:
                    launcher.start(self._job(job.key, allocation))
                else:
                    self.log.info("the job was started before; going on with it")
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
            ),
            method_name="execute_ended",
        )

    def _job(self, key: str, allocation: dict[str, Any]) -> Job:
        command = ("/bin/sh", "-c", self.command) if isinstance(self.command, str) else tuple(self.command)
        return Job(
            key=key,
            command=command if self.command else (),
            environment={
                **{name: str(value) for name, value in (self.env or {}).items()},
                "GPU_LEASE_ID": allocation["task_id"],
                "GPU_LEASE_FENCING_TOKEN": str(allocation["fencing_token"]),
                "GPU_SERVER": allocation["server_name"],
            },
            image=self.image,
            gpu_ids=tuple(allocation["gpu_ids"]),
            gpu_milli=allocation["gpu_milli"],
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
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        end_lease(manager, identity.lease_id, "SUCCESS" if succeeded else "FAILED")
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
        """Ends job and lease if a user ended the task in the moment that it was in a worker."""
        if self._identity is not None and not is_wanted(self._identity):
            end_lease(GPUManagerHook(self.gpu_conn_id).get_conn(), self._identity.lease_id)


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line
