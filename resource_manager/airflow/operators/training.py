"""`GPUTrainingOperator`: wait for GPUs, run a job on them and release them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.slurm import task as slurm_task
from resource_manager.airflow.slurm.trigger import end_unless_wanted
from resource_manager.airflow.task_demand import check_duration, end_lease, is_literal, owner_of
from resource_manager.airflow.task_results import drop_collected, drop_end, kept_end
from resource_manager.airflow.task_state import identity_of, is_wanted
from resource_manager.airflow.task_trigger.events import EndState, TaskEnd, storable
from resource_manager.airflow.task_trigger.plan import TaskPlan
from resource_manager.airflow.task_trigger.trigger import TaskTrigger
from resource_manager.airflow.use_meter import usage_line
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
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.recorded_changes import LEASE_GONE

RESERVED = {"__classname__", "__id__", "__type"}
"""Names of a dictionary that Airflow takes for an object of its own, or refuses."""

MAX_DEPTH = 100
"""Most levels of a value; Airflow refuses one of some 250."""

TRIES_LABEL = "airflow_tries"
"""Label of a request with what a clear changes in Airflow."""

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

    Further parameters as for `GPUOperator`; `ttl` is two minutes if None. The trigger that watches the job
    renews its lease.

    The task returns the last line of the job's output, parsed if it is JSON that an XCom can hold (NaN it
    cannot); XCom `allocation` has the lease. `execution_timeout` counts from the start of the job.
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

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        """Return the mapped form of the operator, as of Airflow's, with its arguments checked."""
        _check_job(str(arguments.get("task_id", "partial")), arguments)
        return super().partial(**arguments)

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
        unreachable_timeout: timedelta = timedelta(minutes=10),
        startup_order: str = StartupOrder.TOGETHER.value,
        done_when: str = DoneWhen.ALL.value,
        start_attempts: int = 3,
        stale_grace_s: float = 60.0,
        restart_on_clear: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command = command
        self.image = image
        self.env = env
        self.launcher = launcher
        self.launcher_conn_id = launcher_conn_id
        self.container = container
        self.slurm = slurm
        self.unreachable_timeout = unreachable_timeout
        self.startup_order = startup_order
        self.done_when = done_when
        self.start_attempts = start_attempts
        self.stale_grace_s = stale_grace_s
        _check_job(self.task_id, vars(self))
        if not (command or image):
            raise ValueError(f"{self.task_id}: {NO_COMMAND}")
        self.restart_on_clear = restart_on_clear
        self._identity: TaskIdentity | None = None
        self._asked_by = ""

    def execute(self, context: Any) -> Any:
        """Ask for GPUs, and leave the worker: the trigger goes on until the job's result is known."""
        try:
            _check_job(self.task_id, vars(self))  # with what templates gave
        except (TypeError, ValueError) as error:
            raise AirflowFailException(str(error)) from None
        if self.launcher == slurm_task.NAME:
            self._identity = identity_of(context)
            end = self._uncollected(context, self._identity)
            return slurm_task.begin(self, context) if end is None else _value(end.last_line)
        return super().execute(context)

    def execute_on_slurm(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the result of a job on Slurm, or raise its failure."""
        return _value(slurm_task.go_on(self, context, event))

    def execute_request(self, context: Any, event: dict[str, Any]) -> Any:
        """Take the only step before the wait; repeat it after an outage of at most `max_wait`."""
        with outlasting_outages(self, "execute_request", event, begins=True, at_most=self.max_wait):
            self._identity = identity_of(context)
            self._asked_by = owner_of(self, context)
            manager, after_token = self.manager, 0
            if (end := self._uncollected(context, self._identity)) is not None:
                return self.execute_ended(context, end.plain())
            if self.restart_on_clear and self._is_cleared(context) and self._is_of_before(context, manager):
                self.log.info("the task was cleared: its job of before ends, and a new one starts")
                after_token = end_lease(manager, self._identity, self._asked_by)
            job, labels = self.job_template(), {TRIES_LABEL: _tries(context)}
            labels["launcher"] = job.launcher_name
            if self.startup_order != StartupOrder.TOGETHER:
                labels[ORDER_LABEL] = str(self.startup_order)
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
            done_when=DoneWhen(self.done_when),
            start_attempts=self.start_attempts,
            stale_grace_s=self.stale_grace_s,
        )
        return self.defer(
            trigger=TaskTrigger(self._identity, plan.to_dict(), after_token, gpu_conn_id=self.gpu_conn_id),
            method_name="execute_ended",
        )

    def _is_cleared(self, context: Any) -> bool:
        return is_first_try_since_cleared(context["ti"], self.retries or 0)

    def _is_of_before(self, context: Any, manager: LeaseService) -> bool:
        """Return whether the task's lease, if there is one, may be of before a clear.

        A retry looks like one if the DAG has fewer `retries` than when its run began.
        """
        entry = manager.status_of(identity_of(context).lease_id)
        return entry is not None and entry["labels"].get(TRIES_LABEL) != _tries(context)

    def _uncollected(self, context: Any, identity: TaskIdentity) -> TaskEnd | None:
        """Return an earlier try's end that Airflow does not have; drop one of before this run or clear."""
        if context["ti"].try_number == 1 or self._is_cleared(context):
            drop_end(identity)
            return None
        if (end := kept_end(identity)) is not None:
            self.log.info("the job of an earlier try has ended, and Airflow does not have its end")
        return end

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
        if not end.has_succeeded:  # a success is dropped once Airflow has it, by the listener
            drop_collected(context["ti"])
        if end.waited_s is not None:
            self.log.info("%s", describe_wait(end.waited_s, end.reasons))
        if end.gpu_usage is not None:
            self.log.info("%s", usage_line(end.gpu_usage))
            context["ti"].xcom_push(key="gpu_usage", value=end.gpu_usage)
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


def _tries(context: Any) -> str:
    """Return the tries allowed, and how often the run was cleared, which Airflow counts for all since 3.2."""
    return f"{context['ti'].max_tries}.{getattr(context.get('dag_run'), 'clear_number', 0)}"


def _check_job(operator: str, given: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `ValueError` for a wrong parameter of a job, where no template gives it.

    Those that are not there are given when a task is mapped. `operator` begins the error.
    """
    check_duration(operator, "unreachable_timeout", given.get("unreachable_timeout", timedelta()), none=False)
    for name in ("env", "container", "slurm"):
        value = given.get(name)
        if value and is_literal(value) and not isinstance(value, Mapping):
            raise TypeError(
                f"{operator}: {name} must be a dictionary, got a {type(value).__name__}: one template for "
                "all of it needs a DAG with render_template_as_native_obj=True"
            )
    for name, choices in {"startup_order": StartupOrder, "done_when": DoneWhen}.items():
        if name in given and given[name] not in [*choices]:
            raise ValueError(f"{operator}: {name} must be one of {', '.join(choices)}, got {given[name]!r}")
    attempts, grace_s = given.get("start_attempts", 1), given.get("stale_grace_s", 0.0)
    if not isinstance(attempts, int) or attempts < 1:
        raise ValueError(f"{operator}: start_attempts must be 1 or more, got {attempts!r}")
    if not isinstance(grace_s, int | float) or not 0 <= grace_s < math.inf:
        raise ValueError(f"{operator}: stale_grace_s must be a number of seconds from 0 on, got {grace_s!r}")
    launcher: Any = given.get("launcher")
    if not is_literal(launcher):
        return
    if launcher and launcher not in LAUNCHERS:
        raise ValueError(f"{operator}: launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    if given.get("slurm") and launcher != slurm_task.NAME:
        raise ValueError(f"{operator}: slurm is for launcher={slurm_task.NAME!r}, got {launcher!r}")
    container = given.get("container")
    if isinstance(container, Mapping) and "restart_policy" in container:
        raise ValueError(
            f"{operator}: container: leave out restart_policy, since a job's end frees its GPUs: set retries"
        )
    if container and launcher not in ("", "docker"):
        raise ValueError(f"{operator}: container is for launcher='docker', got {launcher!r}")
    try:
        if "image" in given or launcher != "docker":
            check_image(launcher, Job(operator, (), image=given.get("image", "")))
    except LauncherError as error:
        raise ValueError(f"{operator}: {error}") from None


def _value(line: str) -> Any:
    """Return the line parsed as JSON if an XCom can hold the value, else as text: the job has succeeded."""
    try:
        value = json.loads(line, parse_int=_of_64_bits)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return storable(line)
    return value if _fits(value) else line


def _fits(value: Any, depth: int = 0) -> bool:
    """Return whether Airflow takes a value of JSON: not with a NUL, which PostgreSQL does not have."""
    if isinstance(value, dict):
        return RESERVED.isdisjoint(value) and _fits([*value, *value.values()], depth)
    if isinstance(value, list):
        return depth < MAX_DEPTH and all(_fits(part, depth + 1) for part in value)
    return not isinstance(value, str) or "\0" not in value


def _of_64_bits(digits: str) -> int:
    """Parse an integer of at most 64 bits, the limit of msgpack between Airflow's worker and supervisor."""
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits} has more than 64 bits")
    return number
