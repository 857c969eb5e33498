"""`GPUTrainingOperator`: waits for its GPUs, runs a job on them and releases them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from resource_manager.errors import InvalidRequestError, ResourceManagerError
from resource_manager.launchers import (
    Job,
    JobState,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
    job_key,
)
from resource_manager.launchers.devices import device_environment
from resource_manager.manager import GPUResourceManager
from resource_manager.models import MILLI_PER_GPU
from resource_manager.provider.hook import GPUManagerHook
from resource_manager.provider.identity import TaskIdentity
from resource_manager.provider.links import ConsoleLink
from resource_manager.provider.triggers import GrantTrigger, JobTrigger, RunningJob, describe_waiting


class GPUTrainingOperator(BaseOperator):
    """Runs `command` on GPUs of one server, without a worker slot while it waits or trains.

    Every entry, first try, retry, cleared or resumed, does the same: it asks for the lease of this task
    (and gets the one it already holds), starts the lease's job (unless it runs), and defers to a trigger.

    :param gpus: whole GPUs, all of one server.
    :param cpus: CPUs of the same server.
    :param command: a shell command, or a list of arguments that no shell reads.
    :param env: more environment for the job; its devices are added.
    :param launcher: where the job runs: `local`.
    :param server: name or id of the server to try first.
    :param gpu_type: type of GPU, or several that will do.
    :param gpu_milli: thousandths of one GPU, instead of whole ones.
    :param priority: higher goes first where the queue's order says so; the task's `priority_weight` if None.
    :param team: whose share it counts towards; the task's pool if None.
    :param max_wait: how long to wait for the grant before failing; forever if None.
    :param ttl: life of the lease without renewal; whoever watches the job renews it.
    :param gpu_conn_id: connection of type `gpu_manager`; the `GPU_MANAGER_*` settings if None.

    Returns the last line of the job's output, as JSON where it is that; XCom `allocation` has the lease.
    """

    template_fields: Sequence[str] = (
        "gpus",
        "cpus",
        "command",
        "env",
        "server",
        "gpu_type",
        "team",
        "gpu_conn_id",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"command": "bash", "env": "json"}
    operator_extra_links = (ConsoleLink(),)
    ui_color = "#d9ead3"

    def __init__(
        self,
        *,
        gpus: int,
        cpus: int = 1,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        launcher: str = "local",
        server: int | str | None = None,
        gpu_type: str | Sequence[str] = (),
        gpu_milli: int = MILLI_PER_GPU,
        priority: int | None = None,
        team: str | None = None,
        max_wait: timedelta | None = None,
        ttl: timedelta = timedelta(minutes=2),
        gpu_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gpus = gpus
        self.cpus = cpus
        self.command = command
        self.env = env
        self.launcher = launcher
        self.server = server
        self.gpu_type = gpu_type
        self.gpu_milli = gpu_milli
        self.priority = priority
        self.team = team
        self.max_wait = max_wait
        self.ttl = ttl
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any) -> Any:
        """Asks for the lease; goes on with the job if it is granted, else waits in the triggerer."""
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        identity = TaskIdentity.of(context["ti"])
        try:
            status = manager.submit(
                identity.lease_id,
                int(self.gpus),
                int(self.cpus),
                self.server,
                gpu_milli=self.gpu_milli,
                gpu_types=(self.gpu_type,)
                if isinstance(self.gpu_type, str) and self.gpu_type
                else self.gpu_type or (),
                priority=self.priority_weight if self.priority is None else self.priority,
                team=self._team(),
                owner=self.owner,
                ttl_s=self.ttl.total_seconds(),
                quarantine=True,
                labels={**identity.labels, "launcher": self.launcher},
            )
            if status.get("quarantined"):  # nobody watched for a while; it is ours again
                status = manager.renew(identity.lease_id, fencing_token=status["fencing_token"])
        except InvalidRequestError as error:
            raise AirflowFailException(str(error)) from None
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        if status["state"] == "WAITING":
            self._wait(identity, status)
        return self._run_job(context, manager, identity, status)

    def _team(self) -> str:
        if self.team is not None:
            return self.team
        return "" if self.pool == "default_pool" else self.pool

    def _wait(self, identity: TaskIdentity, status: dict[str, Any]) -> NoReturn:
        self.log.info("%s", describe_waiting(status))
        max_wait_s = None if self.max_wait is None else self.max_wait.total_seconds()
        self.defer(
            trigger=GrantTrigger(asdict(identity), self.gpu_conn_id, max_wait_s),
            method_name="execute_granted",
        )

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Goes on after the wait; the lease is asked for again, which answers with the one granted."""
        if event["state"] == "TOO LATE":
            lease_id = TaskIdentity.of(context["ti"]).lease_id
            if GPUManagerHook(self.gpu_conn_id).get_conn().cancel(lease_id, reason="max_wait is over"):
                raise AirflowException(f"no GPUs within max_wait = {self.max_wait}")
        return self.execute(context)

    def _run_job(
        self, context: Any, manager: GPUResourceManager, identity: TaskIdentity, allocation: dict[str, Any]
    ) -> Any:
        token = allocation["fencing_token"]
        job = RunningJob(
            key=job_key(identity.lease_id, token),
            fencing_token=token,
            launcher=self.launcher,
            address=allocation["address"],
            ttl_s=self.ttl.total_seconds(),
        )
        self.log.info(
            "holding GPUs %s and %s CPUs of %s; job %s",
            allocation["gpu_devices"],
            allocation["cpu_count"],
            allocation["server_name"],
            job.key,
        )
        context["ti"].xcom_push(key="allocation", value=allocation)
        try:
            launcher = job.open()
            if launcher.status(job.key).state is JobState.ABSENT:
                launcher.start(self._job(job.key, identity, allocation))
            else:
                self.log.info("the job was started before; going on with it")
        except LauncherUnreachableError as error:
            raise AirflowException(
                f"{error}; the GPUs stay held until the job is known to be gone"
            ) from error
        except LauncherError as error:
            self._release(manager, identity, token, "FAILED")
            raise AirflowFailException(str(error)) from None
        self.defer(
            trigger=JobTrigger(asdict(identity), asdict(job), self.gpu_conn_id),
            method_name="execute_ended",
            kwargs={"job": asdict(job)},
        )

    def _job(self, key: str, identity: TaskIdentity, allocation: dict[str, Any]) -> Job:
        command = ("/bin/sh", "-c", self.command) if isinstance(self.command, str) else tuple(self.command)
        devices = device_environment(
            allocation["vendor"], allocation["gpu_ids"], gpu_milli=allocation["gpu_milli"]
        )
        return Job(
            key=key,
            command=command,
            environment={
                **(self.env or {}),
                **devices,
                "GPU_LEASE_ID": identity.lease_id,
                "GPU_LEASE_FENCING_TOKEN": str(allocation["fencing_token"]),
                "GPU_SERVER": allocation["server_name"],
            },
            gpu_ids=tuple(allocation["gpu_ids"]),
            vendor=allocation["vendor"],
            cpus=allocation["cpu_count"],
            labels=identity.labels,
        )

    def execute_ended(self, context: Any, event: dict[str, Any], job: dict[str, Any]) -> Any:
        """Makes sure that nothing of the job is left, releases its GPUs and says how it ended."""
        running = RunningJob(**job)
        identity = TaskIdentity.of(context["ti"])
        if event["state"] == "unreachable":
            raise AirflowException(f"{event['detail']}; the GPUs stay held until the job is known to be gone")
        if event["state"] == "lease lost":
            raise AirflowException("the lease was ended by someone else, so the job was stopped")
        try:
            self._stop(running.open(), running.key)
        except LauncherError as error:
            raise AirflowException(f"{error}; the GPUs stay held until the job is gone") from error
        succeeded = event["exit_code"] == 0
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        self._release(manager, identity, running.fencing_token, "SUCCESS" if succeeded else "FAILED")
        if event["exit_code"] is None:
            raise AirflowException(
                "the job vanished without an exit code: it was killed, or its server restarted"
            )
        if not succeeded:
            raise AirflowException(f"the job ended with exit code {event['exit_code']}: {event['last_line']}")
        return _value(event["last_line"])

    def _stop(self, launcher: Launcher, key: str) -> None:
        launcher.stop(key)

    def _release(self, manager: GPUResourceManager, identity: TaskIdentity, token: int, outcome: str) -> None:
        manager.release_resources(identity.lease_id, fencing_token=token, outcome=outcome)


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line
