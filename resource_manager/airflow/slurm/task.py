"""Steps of a task on Slurm that a worker takes: submit the job or find it, and collect its result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

from resource_manager.airflow.slurm.trigger import SlurmEvent, SlurmTrigger, copy_output
from resource_manager.airflow.task_demand import demand_of
from resource_manager.airflow.task_results import keep_end
from resource_manager.airflow.task_state import identity_of
from resource_manager.airflow.task_trigger.events import EndState, TaskEnd
from resource_manager.airflow.version_compat import (
    AirflowException,
    AirflowFailException,
    is_first_try_since_cleared,
)
from resource_manager.core.models import JobPlace
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.job_template import JobTemplate
from resource_manager.jobs.launchers import Job, JobState, LauncherError, LauncherUnreachableError
from resource_manager.jobs.launchers.base import BatchRequest
from resource_manager.jobs.launchers.slurm import Seen, SlurmLauncher, arguments_of
from resource_manager.jobs.slurm_records import publish
from resource_manager.jobs.task_identity import TaskIdentity

NAME = "slurm"

TIME_FACTOR = 2.0
"""Part of the expected runtime that a job may take at most, unless `execution_timeout` says its time."""

UNUSED = (
    *("gpu_milli", "vendor", "labels_required", "prefer_server", "server", "spread", "same", "prefer_same"),
    *("link", "types", "gpu_memory", "priority", "preemptible", "preempt_signal", "preemption_delay"),
    *("utility", "target", "sensitivity", "idle_below", "idle_after", "idle_action", "on_idle"),
    *("max_runtime", "requeue_after", "deadline"),
)
"""Fields of a demand that only our own allocator reads; Slurm has options of its own for some."""


def place_of(operator: Any) -> JobPlace:
    """Return the login node of the task's connection, else of this machine."""
    return JobPlace(NAME, "", operator.launcher_conn_id or "")


def begin(operator: Any, context: Any, *, again: bool = False) -> Any:
    """Submit the task's job, unless it is there already, and wait for its end in the triggerer.

    What is there `again`, in a try that has begun one before, is no job of before a clear.
    """
    identity = identity_of(context)
    asked = _batch_request(operator, context, identity)
    place = place_of(operator)
    try:
        with closing(SlurmLauncher(place)) as launcher:
            key = launcher.current(identity.lease_id)
            is_cleared = is_first_try_since_cleared(context["ti"], operator.retries or 0)
            if operator.restart_on_clear and is_cleared and not again:
                operator.log.info("the task was cleared: its job of before ends, and a new one starts")
                launcher.stop(key)
                key = launcher.current(identity.lease_id)
            if launcher.status(key).state is JobState.ABSENT:
                launcher.start(_job(operator, key, asked))
                operator.log.info("submitted job %s to Slurm", key)
            else:
                operator.log.info("job %s is on Slurm already; watching it", key)
            _publish(operator, launcher)  # the reconciler must find it, though no triggerer ever takes it
    except LauncherUnreachableError as error:
        raise AirflowException(f"{error}; a job that Slurm has taken is found by the next try") from error
    except LauncherError as error:
        raise AirflowException(f"Slurm did not take the job: {error}") from error
    unreachable_s = operator.unreachable_timeout.total_seconds()
    return operator.defer(
        trigger=SlurmTrigger(identity, key, asdict(place), unreachable_s, gpu_conn_id=operator.gpu_conn_id),
        method_name="execute_on_slurm",
    )


def go_on(operator: Any, context: Any, event: Mapping[str, Any]) -> Any:
    """Return the last line of a job that has succeeded; submit one that was preempted again."""
    identity, end = identity_of(context), SlurmEvent.model_validate(event)
    for reason in end.reasons:
        operator.log.info("it waited on Slurm: %s", reason)
    if end.unreachable:
        raise AirflowException(f"{end.unreachable}; the job may still run, and the next try goes on with it")
    try:
        with closing(SlurmLauncher(place_of(operator))) as launcher:
            key = launcher.current(identity.lease_id)
            seen, last_line = _rest_of_output(operator, launcher, key, end)
            if seen.said is not None and not seen.goes_on:
                if seen.status.exit_code == 0 and seen.said.state != "PREEMPTED":
                    keep_end(identity, TaskEnd(state=EndState.JOB_ENDED, exit_code=0, last_line=last_line))
                launcher.stop(key)
                _publish(operator, launcher)
    except LauncherError as error:
        raise AirflowException(f"the job's end could not be collected: {error}") from error
    said, exit_code = seen.said, seen.status.exit_code
    if said is None or seen.goes_on:  # somebody has removed it, or changed what kept it from running
        return begin(operator, context, again=True)
    job = f"job {said.id}{f' on {said.where}' if said.where else ''}"
    if said.never:
        raise AirflowFailException(f"{job} can never run on Slurm: {said.wait}")
    if said.state == "PREEMPTED":
        operator.log.warning("Slurm preempted %s; submitting it again", job)
        return begin(operator, context, again=True)
    context["ti"].xcom_push(key="slurm_job", value={"id": said.id, "where": said.where})
    if exit_code == 0:
        operator.log.info("Slurm ran %s", job)
        return last_line
    if said.end:
        raise AirflowException(f"{said.end} ({job})")
    if exit_code is None:
        raise AirflowException(f"{job} vanished from Slurm without an exit code")
    raise AirflowException(f"the job ended with exit code {exit_code}: {last_line}")


def _rest_of_output(operator: Any, launcher: SlurmLauncher, key: str, end: SlurmEvent) -> tuple[Seen, str]:
    """Write what is left of the output to the log; return what was seen then, and the last line."""
    offset, last_line = end.offset, end.last_line
    while True:
        seen = launcher.read_all({key: offset}).jobs[key]
        if not seen.text:
            return seen, last_line
        offset, last_line = seen.offset, copy_output(seen.text, operator.log) or last_line


def _publish(operator: Any, launcher: SlurmLauncher) -> None:
    try:
        publish(launcher, operator.manager)
    except (ResourceManagerError, AirflowException) as error:
        operator.log.warning("what became of the job is not shown yet: %s", error)


def _batch_request(operator: Any, context: Any, identity: TaskIdentity) -> BatchRequest:
    """Return what is asked of Slurm; raises `AirflowFailException` for what it cannot be asked."""
    if str(operator.done_when) != "all" or str(operator.startup_order) != "together":
        raise AirflowFailException("on Slurm all members start together, and all must succeed")
    given = operator.given_fields()
    unused = {name: given[name] for name in UNUSED} | {"max_wait": operator.max_wait}
    for name, value in unused.items():
        if value is not None:
            raise AirflowFailException(f"{name} has no meaning on Slurm: leave it out, or use slurm={{...}}")
    demand = demand_of(operator, given, context, identity.lease_id)
    if len(demand.gpu_types) > 1:
        raise AirflowFailException("gpu_types: Slurm takes one type; use slurm={'constraint': 'a100|h100'}")
    further = dict(demand.resources)
    memory_mib = int(further.pop("memory_mib", 0))
    if further:
        raise AirflowFailException(
            f"resources: {sorted(further)[0]!r} has no meaning on Slurm; memory_mib has"
        )
    timeout = operator.execution_timeout
    expected_s = None if demand.expected_runtime is None else TIME_FACTOR * demand.expected_runtime
    asked = BatchRequest(
        gpus=demand.gpus,
        gpu_type=demand.gpu_types[0] if demand.gpu_types else "",
        nodes=demand.nodes,
        cpus=demand.cpus,
        memory_mib=memory_mib,
        time_s=expected_s if timeout is None else timeout.total_seconds(),
        grace_s=demand.preempt_grace,
        options=operator.slurm,
        about={
            "task_id": identity.lease_id,
            "labels": {**demand.labels, **identity.labels},
            "conn_id": operator.launcher_conn_id or "",
            "owner": demand.owner,
            "team": demand.team,
            "gpus": demand.gpus,
            "nodes": demand.nodes,
        },
    )
    try:
        arguments_of(asked)
    except LauncherError as error:
        raise AirflowFailException(str(error)) from None
    return asked


def _job(operator: Any, key: str, request: BatchRequest) -> Job:
    job: JobTemplate = operator.job_template()
    lease = {"GPU_LEASE_ID": str((request.about or {})["task_id"])}
    return Job(key, job.command, {**job.env, **lease}, image=job.image, batch=request)
