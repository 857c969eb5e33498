"""`GPUTrainingOperator`: wait for GPUs, run a job on them and release them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.slurm import task as slurm_task
from resource_manager.airflow.slurm.trigger import end_unless_wanted
from resource_manager.airflow.task_demand import check_duration, end_lease, is_literal, owner_of
from resource_manager.airflow.task_results import drop_end, kept_end
from resource_manager.airflow.task_state import identity_of, is_wanted
from resource_manager.airflow.task_trigger.events import EndState, TaskEnd
from resource_manager.airflow.task_trigger.plan import TaskPlan
from resource_manager.airflow.task_trigger.trigger import TaskTrigger
from resource_manager.airflow.use_meter import GPU_USAGE, usage_line
from resource_manager.airflow.version_compat import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTerminated,
    is_first_try_since_cleared,
)
from resource_manager.airflow.wait_log import describe_wait
from resource_manager.errors import InvalidRequestError
from resource_manager.jobs.gang_job import ORDER_LABEL, DoneWhen, StartupOrder
from resource_manager.jobs.job_template import JobTemplate
from resource_manager.jobs.launchers import Job, LauncherError
from resource_manager.jobs.launchers.base import check_image
from resource_manager.jobs.launchers.registry import LAUNCHERS
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.durations import seconds_of
from resource_manager.manager.recorded_changes import LEASE_GONE

NO_COMMAND = "command is missing: only an image has one of its own"


class GPUTrainingOperator(GPUOperator):
    """Run a job on GPUs, of one server or `nodes` servers, without a worker slot while it waits or trains.

    A worker asks for the GPUs, and leaves: a trigger waits for the grant, starts the job, watches it, and
    releases the GPUs at its end. A worker collects the result. A retry or a cleared task goes on with the
    lease that it has, and with the job that runs.

    :param command: shell command, or list of arguments that are not passed through a shell.
    :param image: container image, for the `docker` launcher; only then may `command` be left out.
    :param env: further environment for the job; the variables of its devices are added.
    :param launcher: `local` (this machine), `ssh` or `docker` (the granted server, by its address in the
        inventory), `agent` (there, by its agent), or `slurm`. Default: `docker` if there is an image, else
        `agent` if all servers of the lease have a `job_user`, else `local`.
    :param launcher_conn_id: connection of the launcher: of type ssh (also for `slurm`), or docker (for the
        registry).
    :param slurm: further options of `sbatch` for the launcher `slurm`, which places the job itself, such as
        `{"partition": "gpu"}`; the job then has no lease.
    :param container: further options for the container, as Docker's `create_host_config` names them.
    :param unreachable_timeout: longest time that the job's server may be unreachable before this try fails,
        and that the output of a job that has ended may not come.
    :param startup_order: of a gang (`nodes` above 1): `together`, or `workers_first`, rank 0 last.
    :param done_when: success of a gang: `all` members ended with exit code 0, or `rank0` did.
    :param start_attempts: most attempts to start a gang, each on a new lease, before this try fails.
    :param restart_on_clear: start a new job when the task is cleared; by default it goes on with the job that
        runs. Retries go on with it in any case.
    :param stale_grace_s: seconds from SIGTERM to SIGKILL for the other members when one has failed.

    Further parameters as for `GPUOperator`. The trigger that watches the job renews its lease.

    The task returns the last line of the job's output, parsed if it is JSON (without NaN, which an XCom
    cannot hold); XCom `allocation` has the lease. `execution_timeout` counts from the start of the job.
    """

    template_fields: Sequence[str] = (
        *GPUOperator.template_fields,
        "command",
        "image",
        "env",
        "launcher",
        "slurm",
    )
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
        slurm: Mapping[str, str] | None = None,
        ttl: float | str | timedelta = default_ttl,
        unreachable_timeout: timedelta = timedelta(minutes=10),
        startup_order: str = StartupOrder.TOGETHER.value,
        done_when: str = DoneWhen.ALL.value,
        start_attempts: int = 3,
        stale_grace_s: float = 60.0,
        restart_on_clear: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(ttl=ttl, **kwargs)
        self.command = command
        self.image = image
        self.env = env
        self.launcher = launcher
        self.launcher_conn_id = launcher_conn_id
        self.container = container
        self.slurm = slurm
        self.unreachable_timeout = unreachable_timeout
        check_duration(self.task_id, "unreachable_timeout", unreachable_timeout)
        _check_launcher(self.task_id, launcher, image, container, slurm)
        if not (command or image):
            raise ValueError(f"{self.task_id}: {NO_COMMAND}")
        self.startup_order = _one_of(StartupOrder, "startup_order", startup_order)
        self.done_when = _one_of(DoneWhen, "done_when", done_when)
        if not isinstance(start_attempts, int) or start_attempts < 1:
            raise ValueError(f"start_attempts must be 1 or more, got {start_attempts!r}")
        if not isinstance(stale_grace_s, int | float) or not 0 <= stale_grace_s < math.inf:
            raise ValueError(f"stale_grace_s must be a number of seconds from 0 on, got {stale_grace_s!r}")
        self.start_attempts = start_attempts
        self.stale_grace_s = stale_grace_s
        self.restart_on_clear = restart_on_clear
        self._identity: TaskIdentity | None = None
        self._asked_by = ""

    def execute(self, context: Any) -> Any:
        """Ask for GPUs, and leave the worker: the trigger goes on until the job's result is known."""
        if self.launcher == slurm_task.NAME:
            self._identity, _ = identity_of(context)
            return slurm_task.begin(self, context)
        return self.execute_request(context, {})

    def execute_on_slurm(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the result of a job on Slurm, or raise its failure."""
        return _value(slurm_task.go_on(self, context, event))

    def execute_request(self, context: Any, event: dict[str, Any]) -> Any:
        """Take the only step before the wait; repeat it after an outage of at most `max_wait`."""
        with outlasting_outages(self, "execute_request", event, begins=True, at_most=self.max_wait):
            self._identity, plain_identity = identity_of(context)
            self._asked_by = owner_of(self, context)
            manager, after_token = self.manager, 0
            if is_first_try_since_cleared(context["ti"], self.retries or 0):
                drop_end(self._identity)
                if self.restart_on_clear:
                    self.log.info("the task was cleared: its job of before ends, and a new one starts")
                    after_token = end_lease(manager, self._identity, self._asked_by)
            elif context["ti"].try_number > 1 and (end := kept_end(self._identity)) is not None:
                self.log.info("the job of an earlier try has ended, and no worker has collected its end")
                return self.execute_ended(context, end.plain())
            job, labels = self.job_template(), {}
            labels["launcher"] = job.launcher_name
            if self.startup_order is not StartupOrder.TOGETHER:
                labels[ORDER_LABEL] = self.startup_order.value
            demand, _ = self.request(context, manager, labels=labels)
        timeout = self.execution_timeout
        plan = TaskPlan(
            demand=demand,
            job=job,
            is_weight=self.has_weight,
            ttl_s=seconds_of(self._ttl),
            max_wait_s=self.max_wait_s,
            timeout_s=None if timeout is None else timeout.total_seconds(),
            unreachable_s=self.unreachable_timeout.total_seconds(),
            done_when=self.done_when,
            start_attempts=self.start_attempts,
            stale_grace_s=self.stale_grace_s,
        )
        return self.defer(
            trigger=TaskTrigger(plain_identity, plan.to_dict(), self.gpu_conn_id, after_token),
            method_name="execute_ended",
        )

    def job_template(self) -> JobTemplate:
        """Return the job; raises `AirflowFailException` if it cannot be handed to the triggerer."""
        # Native rendering turns arguments into numbers, and an empty text into None.
        given = self.command or ()
        if not (given or self.image):
            raise AirflowFailException(NO_COMMAND)
        job = JobTemplate(
            command=("/bin/sh", "-c", given) if isinstance(given, str) else tuple(map(str, given)),
            image=self.image or "",
            env={name: str(value) for name, value in (self.env or {}).items()},
            launcher=self.launcher or "",
            conn_id=self.launcher_conn_id,
            container=self.container or {},
        )
        try:
            job.to_dict()
        except InvalidRequestError as error:
            raise AirflowFailException(str(error)) from None
        return job

    def execute_ended(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the job's result or raise its failure; its GPUs are free already."""
        end = TaskEnd.model_validate(event)
        try:
            return self._result(context, end)
        finally:
            self._collected(context)

    def _collected(self, context: Any) -> None:
        """Drop the end that was kept until now: the next try is a new one."""
        identity, _ = identity_of(context)
        try:
            drop_end(identity)
        except Exception as error:
            self.log.warning("the end of this task may be collected again by its next try: %s", error)

    def _result(self, context: Any, end: TaskEnd) -> Any:
        if end.waited_s is not None:
            self.log.info("%s", describe_wait(end.waited_s, end.reasons))
        if end.gpu_usage is not None:
            self.log.info("%s", usage_line(end.gpu_usage))
            context["ti"].xcom_push(key=GPU_USAGE, value=end.gpu_usage)
        for rank, lines in end.tails.items():
            for line in lines:
                self.log.info("[rank %s] %s", rank, line)
        if end.has_succeeded:
            return _value(end.last_line)
        if end.state is EndState.NEVER_FITS:
            raise AirflowFailException(end.detail)
        raise AirflowException(self._failure(end))

    def _failure(self, end: TaskEnd) -> str:
        """Return the sentence with which the try fails."""
        job = "the job" if end.rank is None else f"rank {end.rank} on {end.server}"
        match end.state:
            case EndState.MAX_WAIT_EXCEEDED:
                return self.too_long(end.reasons)
            case EndState.TIMED_OUT if not end.detail:
                return f"the job was stopped after execution_timeout = {self.execution_timeout}"
            case EndState.GPU_FAILED:
                return f"the job was stopped, as one of its GPUs failed: {end.detail}"
            case EndState.LEASE_LOST:
                return f"{end.detail or LEASE_GONE}, so the job was stopped"
            case EndState.JOB_UNREACHABLE if end.rank is not None:
                return f"rank {end.rank} is out of reach: {end.detail}"
            case EndState.JOB_ENDED if end.detail:
                return f"{job} was stopped: {end.detail}"
            case EndState.JOB_ENDED if end.exit_code is None:
                return f"{job} vanished without an exit code: it was killed, or its server restarted"
            case EndState.JOB_ENDED:
                return f"{job} ended with exit code {end.exit_code}: {end.last_line}"
        return end.detail

    def on_kill(self) -> None:
        """End the job and its lease if a user ended the task while it was in a worker.

        Airflow calls this between two steps of `execute`; it raises `AirflowTaskTerminated`, so that
        `execute` does not continue and start a job on free GPUs.
        """
        if self._identity is None:
            return
        if self.launcher == slurm_task.NAME:
            if end_unless_wanted(self._identity, slurm_task.place_of(self)):
                raise AirflowTaskTerminated("the task was ended in Airflow")
        elif not is_wanted(self._identity):
            end_lease(self.manager, self._identity, self._asked_by)
            raise AirflowTaskTerminated("the task was ended in Airflow")


def _check_launcher(
    task_id: str,
    launcher: str,
    image: str,
    container: Mapping[str, Any] | None,
    slurm: Mapping[str, str] | None,
) -> None:
    """Raise `ValueError` for a launcher that is unknown, or for another job, if no template gives it."""
    if not is_literal(launcher):
        return
    if launcher and launcher not in LAUNCHERS:
        raise ValueError(f"{task_id}: launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    if slurm and launcher != slurm_task.NAME:
        raise ValueError(f"{task_id}: slurm is for launcher={slurm_task.NAME!r}, got {launcher!r}")
    if container and launcher not in ("", "docker"):
        raise ValueError(f"{task_id}: container is for launcher='docker', got {launcher!r}")
    try:
        check_image(launcher, Job(task_id, (), image=image))
    except LauncherError as error:
        raise ValueError(f"{task_id}: {error}") from None


Choice = TypeVar("Choice", bound=StrEnum)


def _one_of(choices: type[Choice], name: str, value: str) -> Choice:
    """Return the choice of that value; raises `ValueError`."""
    try:
        return choices(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}") from None


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
