"""Steps of a task on Slurm that a worker takes: submit the job or find it, and collect its result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

from resource_manager.airflow.demand import ATTRIBUTES, demand_of
from resource_manager.airflow.slurm.trigger import SlurmEnd, SlurmState, SlurmTrigger
from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.version_compat import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTerminated,
    is_first_try_since_cleared,
)
from resource_manager.core.models import MILLI_PER_GPU, JobPlace
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.launchers import Job, JobState, LauncherError, LauncherUnreachableError
from resource_manager.jobs.launchers.base import BatchRequest
from resource_manager.jobs.launchers.slurm import SlurmLauncher, arguments_of
from resource_manager.jobs.slurm_records import publish
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.demand import Demand, given_value

NAME = "slurm"

TIME_FACTOR = 2.0
"""Part of the expected runtime that a job may take at most, unless `execution_timeout` says its time."""

UNUSED = (
    "gpu_milli",
    "vendor",
    "labels_required",
    "prefer_server",
    "server",
    "spread",
    "same",
    "prefer_same",
    "utility",
    "target",
    "idle_below",
)
"""Fields of a demand that only our own allocator reads; Slurm has options of its own for some."""


def begin(operator: Any, context: Any) -> Any:
    """Submit the task's job, unless it is there already, and wait for its end in the triggerer."""
    identity = _identity_of(context)
    asked = _asked(operator, context, identity)
    place = JobPlace(NAME, "", operator.launcher_conn_id or "")
    try:
        with closing(SlurmLauncher(place)) as launcher:
            key = launcher.current(identity.lease_id)
            if operator.restart_on_clear and is_first_try_since_cleared(context["ti"], operator.retries or 0):
                operator.log.info("the task was cleared: its job of before ends, and a new one starts")
                launcher.stop(key)
                key = launcher.current(identity.lease_id)
            _submit(operator, launcher, _job(operator, key, asked))
            _publish(operator, launcher)  # the reconciler must find it, though no triggerer ever takes it
    except LauncherUnreachableError as error:
        raise AirflowException(f"{error}; a job that Slurm has taken is found by the next try") from error
    except LauncherError as error:
        raise AirflowException(f"Slurm did not take the job: {error}") from error
    return operator.defer(
        trigger=SlurmTrigger(
            asdict(identity),
            key,
            asdict(place),
            operator.gpu_conn_id,
            operator.unreachable_timeout.total_seconds(),
        ),
        method_name="execute_on_slurm",
    )


def _submit(operator: Any, launcher: SlurmLauncher, job: Job) -> None:
    if launcher.status(job.key).state is not JobState.ABSENT:
        operator.log.info("job %s is on Slurm already; watching it", job.key)
        return
    launcher.start(job)
    operator.log.info("submitted job %s to Slurm", job.key)


def _publish(operator: Any, launcher: SlurmLauncher) -> None:
    try:
        publish(launcher, operator.manager)
    except (ResourceManagerError, AirflowException) as error:
        operator.log.warning("what became of the job is not shown yet: %s", error)


def go_on(operator: Any, context: Any, event: Mapping[str, Any]) -> Any:
    """Return the last line of a job that has succeeded; submit one that was preempted again."""
    identity, end = _identity_of(context), SlurmEnd.model_validate(event)
    for reason in end.reasons:
        operator.log.info("it waited on Slurm: %s", reason)
    if end.state is SlurmState.UNREACHABLE:
        raise AirflowException(f"{end.detail}; the job may still run, and the next try goes on with it")
    if end.state is SlurmState.ABSENT:
        return begin(operator, context)
    try:
        with closing(SlurmLauncher(JobPlace(NAME, "", operator.launcher_conn_id or ""))) as launcher:
            launcher.stop(launcher.current(identity.lease_id))
            _publish(operator, launcher)
    except LauncherError as error:
        raise AirflowException(f"the job's end could not be collected: {error}") from error
    if end.state is SlurmState.NEVER_RUNS:
        raise AirflowFailException(f"job {end.job_id} can never run on Slurm: {end.detail}")
    if end.preempted:
        operator.log.warning("Slurm preempted job %s; submitting it again", end.job_id)
        return begin(operator, context)
    if end.where:
        operator.log.info("Slurm ran job %s on %s", end.job_id, end.where)
    context["ti"].xcom_push(key="slurm_job", value={"id": end.job_id, "where": end.where})
    if end.exit_code == 0:
        return end.last_line
    raise AirflowException(_failure(end))


def end_unless_wanted(operator: Any, identity: TaskIdentity) -> None:
    """End the job if a user ended the task while it was in a worker; raises `AirflowTaskTerminated` then."""
    if is_wanted(identity):
        return
    with closing(SlurmLauncher(JobPlace(NAME, "", operator.launcher_conn_id or ""))) as launcher:
        launcher.stop(launcher.current(identity.lease_id))
    raise AirflowTaskTerminated("the task was ended in Airflow")


def _failure(end: SlurmEnd) -> str:
    if end.detail:
        return f"{end.detail} (job {end.job_id}{f' on {end.where}' if end.where else ''})"
    if end.exit_code is None:
        return f"job {end.job_id} vanished from Slurm without an exit code"
    return f"the job ended with exit code {end.exit_code}: {end.last_line}"


def _asked(operator: Any, context: Any, identity: TaskIdentity) -> BatchRequest:
    """Return what is asked of Slurm; raises `AirflowFailException` for what it cannot be asked."""
    if str(operator.done_when) != "all" or str(operator.startup_order) != "together":
        raise AirflowFailException("on Slurm all members start together, and all must succeed")
    given = {name: given_value(getattr(operator, attribute)) for name, attribute in ATTRIBUTES.items()}
    for name in UNUSED:
        if given[name] is not None:
            raise AirflowFailException(f"{name} has no meaning on Slurm: leave it out, or use slurm={{...}}")
    demand: Demand = demand_of(operator, given, context, identity.lease_id)
    if len(demand.gpu_types) > 1:
        raise AirflowFailException("gpu_types: Slurm takes one type; use slurm={'constraint': 'a100|h100'}")
    assert demand.gpu_milli == MILLI_PER_GPU  # it is among the unused
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
            "lease_id": identity.lease_id,
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


def _job(operator: Any, key: str, asked: BatchRequest) -> Job:
    given = operator.command or ()
    command = ("/bin/sh", "-c", given) if isinstance(given, str) else tuple(map(str, given))
    environment = {name: str(value) for name, value in (operator.env or {}).items()}
    lease = {"GPU_LEASE_ID": str((asked.about or {})["lease_id"])}
    return Job(key, command, {**environment, **lease}, image=operator.image or "", batch=asked)


def _identity_of(context: Any) -> TaskIdentity:
    try:
        return TaskIdentity.of(context["ti"], instance_id())
    except ResourceManagerError as error:
        raise AirflowException(str(error)) from error
