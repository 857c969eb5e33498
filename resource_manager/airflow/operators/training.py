"""`GPUTrainingOperator`: wait for GPUs, run a job on them and release them."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar, NoReturn, TypeVar

from resource_manager.airflow.demand import check_duration, end_lease, is_literal, is_of
from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.outages import outlasting_outages, outlasts_outages
from resource_manager.airflow.slurm import task as slurm_task
from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.triggers import (
    LOG_PLACE,
    TAIL_LINES,
    JobTrigger,
    PauseTrigger,
    TriggerState,
    identity_of,
    log_place,
)
from resource_manager.airflow.use_meter import GPU_USAGE, usage_line
from resource_manager.airflow.version_compat import (
    AirflowException,
    AirflowTaskTerminated,
    is_first_try_since_cleared,
)
from resource_manager.core.changes import Outcome
from resource_manager.core.identifiers import as_reason
from resource_manager.errors import LeaseNotFoundError
from resource_manager.jobs.gang_environment import HOSTFILE, gang_environment, hostfile, is_gang
from resource_manager.jobs.gang_job import ORDER_LABEL, DoneWhen, GangJob, StartupOrder
from resource_manager.jobs.launchers import AlreadyEndedError, Job, LauncherError, LauncherUnreachableError
from resource_manager.jobs.launchers.base import check_image
from resource_manager.jobs.launchers.registry import LAUNCHERS
from resource_manager.jobs.preempting import end_jobs, queue_again
from resource_manager.jobs.reconcile import ActionKind
from resource_manager.jobs.running_job import RunningJob, job_of
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.durations import seconds_of
from resource_manager.manager.results import Allocation, Submission
from resource_manager.manager.service import LeaseService
from resource_manager.scheduling.preemption.preempting import restarts_of

ATTEMPT_LABEL = "start_attempt"
"""Label of a gang's lease with the number of the attempt to start it, from the second on."""

START_PAUSE_S = 10.0
"""Pause before the second attempt to start a gang; it doubles before each further one."""

UNREACHABLE_PAUSE_S = 30.0
"""Pause before another attempt to end a preempted job whose server did not answer."""

GPUS_STAY_ALLOCATED = "its GPUs stay allocated until the job is known to be gone"


class GPUTrainingOperator(GPUOperator):
    """Run a job on GPUs, of one server or `nodes` servers, without a worker slot while it waits or trains.

    Every execution (first try, retry, cleared or resumed) takes the same steps: request the lease of this
    task, which returns the one it already holds; start the lease's job unless it runs; defer to a trigger.

    :param command: shell command, or list of arguments that are not passed through a shell.
    :param image: container image, for the `docker` launcher; `command` may then be left out.
    :param env: further environment for the job; the variables of its devices are added.
    :param launcher: `local` (this machine), `ssh` or `docker` (the granted server, by its address in the
        inventory). Default: `docker` if there is an image, else `local`.
    :param launcher_conn_id: connection of the launcher: of type ssh, or docker (for the registry).
    :param slurm: further options of `sbatch` for the launcher `slurm`, which places the job itself, such as
        `{"partition": "gpu"}`; the job then has no lease.
    :param container: further options for the container, as Docker's `create_host_config` names them.
    :param unreachable_timeout: longest time that the job's server may be unreachable before this try fails.
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
        _check_launcher(self.task_id, launcher, image)
        self.startup_order = _one_of(StartupOrder, "startup_order", startup_order)
        self.done_when = _one_of(DoneWhen, "done_when", done_when)
        if start_attempts < 1:
            raise ValueError(f"start_attempts must be 1 or more, got {start_attempts}")
        if not 0 <= stale_grace_s < math.inf:
            raise ValueError(f"stale_grace_s must be a number of seconds from 0 on, got {stale_grace_s}")
        self.start_attempts = start_attempts
        self.stale_grace_s = stale_grace_s
        self.restart_on_clear = restart_on_clear
        self._identity: TaskIdentity | None = None

    def execute(self, context: Any) -> Any:
        """Request the lease; run the job if it is granted, else wait in the triggerer."""
        if self.launcher == slurm_task.NAME:
            self._identity, _ = identity_of(context)
            return slurm_task.begin(self, context)
        return self.execute_request(context, {})

    def execute_on_slurm(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the result of a job on Slurm, or raise its failure."""
        return _value(slurm_task.go_on(self, context, event))

    def execute_request(self, context: Any, event: dict[str, Any]) -> Any:
        """Take the first steps; repeat them after an outage of at most `max_wait`."""
        with outlasting_outages(self, "execute_request", event, at_most=self.max_wait):
            if self.restart_on_clear and is_first_try_since_cleared(context["ti"], self.retries or 0):
                self.log.info("the task was cleared: its job of before ends, and a new one starts")
                identity, _ = identity_of(context)
                self._end(self.manager, identity, Outcome.CANCELLED)
            return self._request(context)

    @outlasts_outages
    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Continue after the wait with this try's lease."""
        self.fail_if_overdue(context, event)
        return self._request(context)

    def _request(self, context: Any, attempt: int = 1) -> Any:
        self._identity, _ = identity_of(context)
        manager = self.manager
        labels = {"launcher": self._launcher}
        if self.startup_order is not StartupOrder.TOGETHER:
            labels[ORDER_LABEL] = self.startup_order.value
        if attempt > 1:
            labels[ATTEMPT_LABEL] = str(attempt)
        allocation = self.lease(context, manager, labels=labels)
        if allocation["preempted_by"] is not None:
            return self._preempted(context, manager, allocation)
        return self._run_job(context, manager, allocation)

    def _run_job(self, context: Any, manager: LeaseService, allocation: Allocation) -> Any:
        _, plain_identity = identity_of(context)
        gang = GangJob.of(allocation)
        try:
            if self.gives_back(manager, allocation, gang):
                return self._request(context)
        except LauncherError as error:
            self._not_started(context, manager, allocation, error)
        if gang is None:
            allocation, gang = self._placed(context, manager, allocation)
        for member, job in zip(allocation["members"], gang.jobs, strict=True):
            self.log.info(
                "%sallocated GPUs %s and %s CPUs of %s; job %s",
                f"rank {job.rank}: " if is_gang(allocation) else "",
                ",".join(map(str, member["gpu_ids"])),
                member["cpu_count"],
                member["server_name"],
                job.key,
            )
        if len(gang.jobs) > 1:
            self.log.info(
                "this log is of rank 0; of others, while the job runs: gpu-manager logs -f --rank N %s",
                shlex.quote(allocation["task_id"]),
            )
        context["ti"].xcom_push(key="allocation", value=allocation)
        context["ti"].xcom_push(key=LOG_PLACE, value=log_place(gang.jobs[0]))
        started_at = time.time()
        try:
            if not gang.start([self._job(job, allocation) for job in gang.jobs]):
                self.log.info("the job was started by an earlier execution; watching it")
                started_at = allocation["granted_at"]
        except AlreadyEndedError as error:
            self.log.warning("%s; asking for GPUs again", error)
            identity, _ = identity_of(context)
            self._end(manager, identity, Outcome.CANCELLED)
            return self._request(context)
        except LauncherError as error:
            self._not_started(context, manager, allocation, error)
        timeout = self.execution_timeout
        return self.defer(
            trigger=JobTrigger(
                plain_identity,
                [job.to_dict() for job in gang.jobs],
                seconds_of(self._ttl),
                self.gpu_conn_id,
                self.unreachable_timeout.total_seconds(),
                None if timeout is None else timeout.total_seconds(),
                started_at,
                self.done_when.value,
                self.stale_grace_s,
            ),
            method_name="execute_ended",
        )

    @property
    def _launcher(self) -> str:
        return self.launcher or ("docker" if self.image else "local")

    def _placed(
        self, context: Any, manager: LeaseService, allocation: Allocation
    ) -> tuple[Allocation, GangJob]:
        """Prepare the job, and store where it is about to start; return the allocation with these places.

        Nothing runs if that fails: the lease ends at once, and the next one avoids those servers.
        """
        planned = GangJob.planned(allocation, self._launcher, self.launcher_conn_id)
        prepared = planned.prepare([self._job(job, allocation) for job in planned.jobs])
        if prepared.failed:
            error = next(iter(prepared.failed.values()))
            self._not_started(context, manager, allocation, error, tuple(prepared.failed))
        try:
            allocation = manager.place_job(
                allocation["task_id"], prepared.places, fencing_token=allocation["fencing_token"]
            )
        except LeaseNotFoundError as error:
            raise AirflowException("the lease was ended by another client before its job started") from error
        gang = GangJob.of(allocation)
        assert gang is not None  # it was placed just now
        return allocation, gang

    def _not_started(
        self,
        context: Any,
        manager: LeaseService,
        allocation: Allocation,
        error: LauncherError,
        failed_nodes: Sequence[str] = (),
    ) -> NoReturn:
        """Fail the try; a gang that can be stopped and released starts again after a pause instead.

        The next lease avoids the servers on which the job is known not to have started. What a server out of
        reach may still run stays quarantined.
        """
        if (
            allocation["job_places"]
            and not is_gang(allocation)
            and isinstance(error, LauncherUnreachableError)
        ):
            raise AirflowException(f"{error}; {GPUS_STAY_ALLOCATED}") from error
        identity, _ = identity_of(context)
        why = {
            "reason": as_reason(error),
            "failed_nodes": failed_nodes or ([error.server] if error.server else []),
        }
        self._end(manager, identity, Outcome.FAILED, **why)
        if not is_gang(allocation):
            raise AirflowException(str(error)) from error
        attempt = int(allocation["labels"].get(ATTEMPT_LABEL, 1))
        if attempt >= self.start_attempts:
            raise AirflowException(
                f"the gang did not start in {attempt} attempts (start_attempts): {error}"
            ) from error
        pause_s = START_PAUSE_S * 2 ** (attempt - 1)
        self.log.warning(
            "start %s of %s failed, queueing again in %g s: %s", attempt, self.start_attempts, pause_s, error
        )
        self.defer(
            trigger=PauseTrigger(pause_s), method_name="execute_again", kwargs={"attempt": attempt + 1}
        )

    @outlasts_outages
    def execute_again(self, context: Any, event: dict[str, Any], attempt: int) -> Any:
        """Request a lease again after a start that failed."""
        return self._request(context, attempt)

    def _end(self, manager: LeaseService, identity: TaskIdentity, outcome: Outcome, **why: Any) -> None:
        """End job and lease, and log what of it may still run."""
        done = end_lease(manager, identity, self.owner, outcome, **why)
        if done is not None and done.action is ActionKind.PARTLY_RELEASED:
            self.log.warning("%s; the GPUs of that member stay allocated until it is gone", done.detail)

    def _job(self, running: RunningJob, allocation: Allocation) -> Job:
        # Native rendering turns arguments into numbers, and an empty text into None.
        given = self.command or ()
        command = ("/bin/sh", "-c", given) if isinstance(given, str) else tuple(map(str, given))
        gang = is_gang(allocation)
        return job_of(
            allocation,
            running.key,
            command,
            rank=running.rank,
            environment={
                **{name: str(value) for name, value in (self.env or {}).items()},
                **gang_environment(allocation, running.rank),
                "GPU_RESTART_COUNT": str(restarts_of(allocation["labels"])),
            },
            image=self.image,
            labels={**allocation["labels"], "lease": str(allocation["fencing_token"])},
            # Members meet at their servers' addresses, which a container has only in their network.
            container={**({"network_mode": "host"} if gang else {}), **(self.container or {})},
            files={HOSTFILE: hostfile(allocation)} if gang else {},
        )

    @outlasts_outages
    def execute_ended(self, context: Any, event: dict[str, Any]) -> Any:
        """Stop what is left of the job, release its GPUs, and return its result or raise its failure."""
        identity, _ = identity_of(context)
        if (usage := event.get(GPU_USAGE)) is not None:
            self.log.info("%s", usage_line(usage))
            context["ti"].xcom_push(key=GPU_USAGE, value=usage)
        if event["state"] == TriggerState.JOB_UNREACHABLE:
            if "rank" in event:
                self._end(self.manager, identity, Outcome.FAILED)
                raise AirflowException(f"rank {event['rank']} is out of reach: {event['detail']}")
            raise AirflowException(f"{event['detail']}; {GPUS_STAY_ALLOCATED}")
        manager = self.manager
        if event.get("exit_code") != 0 and (entry := self._taken(manager, identity, event)) is not None:
            if entry["state"] == "WAITING" or entry["preempted_by"] is None:
                return self._request(context)
            return self._preempted(context, manager, entry)
        if event["state"] == TriggerState.LEASE_LOST:
            entry = manager.status_of(identity.lease_id)
            if entry is not None and entry["state"] == "ERROR" and entry["revoked"]:
                self._end(manager, identity, Outcome.CANCELLED)
            raise AirflowException("the lease was ended by another client, so the job was stopped")
        return self._finish(context, event)

    def _finish(self, context: Any, event: Mapping[str, Any]) -> Any:
        """End the lease, and return the job's result or raise its failure."""
        identity, _ = identity_of(context)
        succeeded = event.get("exit_code") == 0
        for rank, lines in event.get("tails", {}).items():
            for line in lines:
                self.log.info("[rank %s] %s", rank, line)
        self._end(self.manager, identity, Outcome.SUCCESS if succeeded else Outcome.FAILED)
        if event["state"] == TriggerState.TIMED_OUT:
            raise AirflowException(f"the job was stopped after execution_timeout = {self.execution_timeout}")
        if event["state"] == TriggerState.GPU_FAILED:
            raise AirflowException(f"the job was stopped, as one of its GPUs failed: {event['detail']}")
        job = f"rank {event['rank']} on {event['server']}" if "rank" in event else "the job"
        if event["exit_code"] is None:
            raise AirflowException(
                f"{job} vanished without an exit code: it was killed, or its server restarted"
            )
        if not succeeded:
            raise AirflowException(f"{job} ended with exit code {event['exit_code']}: {event['last_line']}")
        return _value(event["last_line"])

    def _taken(
        self, manager: LeaseService, identity: TaskIdentity, event: Mapping[str, Any]
    ) -> Submission | None:
        """Return the task's lease or pending request if a preemption is why its job ended, else None."""
        entry = manager.status_of(identity.lease_id)
        if entry is None or not is_of(entry, identity):
            return None
        # Another process may have ended the job: the request waits again, or has a new lease already.
        if entry["state"] == "WAITING" or entry["fencing_token"] != event.get(
            "fencing_token", entry["fencing_token"]
        ):
            return entry
        return entry if entry["preempted_by"] is not None else None

    def _preempted(self, context: Any, manager: LeaseService, allocation: Allocation) -> Any:
        """End the job of a lease that is being preempted, and wait for another one; the try goes on.

        A job that still ends with exit code 0 has succeeded. One that cannot be known to be gone keeps its
        GPUs, and is tried again later.
        """
        gang = GangJob.of(allocation)
        self.log.warning("the lease is %s; ending its job", allocation["reason"])
        try:
            if gang is None:  # its job was not placed
                queue_again(manager, allocation, None)
                return self._request(context)
            done = end_jobs(manager, allocation, gang)
            if done.left:
                raise next(iter(done.left.values()))
            last_line = self._copy_end(gang)
            if done.has_succeeded or done.has_failed:
                exit_codes = [status.exit_code for status in done.statuses.values()]
                exit_code = next((code for code in exit_codes if code != 0), 0)
                state = TriggerState.JOB_ENDED.value
                return self._finish(context, {"state": state, "exit_code": exit_code, "last_line": last_line})
            queue_again(manager, allocation, gang)
        except LauncherError as error:
            self.log.error("the job may still run: %s; %s", error, GPUS_STAY_ALLOCATED)
            self.defer(trigger=PauseTrigger(UNREACHABLE_PAUSE_S), method_name="execute_later")
        except LeaseNotFoundError:
            self.log.info("another process has ended the job and queued the request again")
        return self._request(context)

    def _copy_end(self, gang: GangJob) -> str:
        """Write the end of the job's output to the log; return its last line."""
        lines = [line for line in gang.tail().splitlines() if line.strip()]
        for line in lines[-TAIL_LINES:]:
            self.log.info("%s", line)
        return lines[-1] if lines else ""

    @outlasts_outages
    def execute_later(self, context: Any, event: dict[str, Any]) -> Any:
        """End the job of a preempted lease, whose server did not answer before."""
        return self._request(context)

    def on_kill(self) -> None:
        """End the job and its lease if a user ended the task while it was in a worker.

        Airflow calls this between two steps of `execute`; it raises `AirflowTaskTerminated`, so that
        `execute` does not continue and start a job on free GPUs.
        """
        if self._identity is not None and self.launcher == slurm_task.NAME:
            slurm_task.end_unless_wanted(self, self._identity)
        elif self._identity is not None and not is_wanted(self._identity):
            end_lease(self.manager, self._identity, self.owner)
            raise AirflowTaskTerminated("the task was ended in Airflow")


def _check_launcher(task_id: str, launcher: str, image: str) -> None:
    """Raise `ValueError` for a launcher that is unknown, or runs no such job, if no template gives it."""
    if not (launcher and is_literal(launcher)):
        return
    if launcher not in LAUNCHERS:
        raise ValueError(f"{task_id}: launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
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
