"""How an operator is told its GPUs, and where what it starts runs: one entry for each family of operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resource_manager.airflow.in_worker import devices_of, reason_of, released
from resource_manager.airflow.lease_renewal import PATIENCE_S
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.airflow.worker_guard import tell_this_process
from resource_manager.core.changes import JobEnd, Outcome
from resource_manager.core.identifiers import as_reason
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.job_preemption import STEP_S, grace_of
from resource_manager.jobs.launchers import Job, JobState, LauncherError
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.launchers.docker_container import mark_of, preempt_file
from resource_manager.jobs.launchers.plain_ssh import parts_of
from resource_manager.jobs.running_job import RunningJob, job_of
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.patience import patiently
from resource_manager.manager.recorded_changes import ended_by_others
from resource_manager.manager.results import Allocation, ReleaseResult

if TYPE_CHECKING:
    from resource_manager.jobs.launchers.docker import DockerLauncher
    from resource_manager.jobs.launchers.ssh import SSHLauncher

AIRFLOW = "airflow.providers"


@dataclass(frozen=True, slots=True)
class Kind:
    """Family of operators that work in the worker; `fill` tells one its devices beyond the environment.

    Without `on_worker` it does not matter on which server the worker runs.
    """

    fill: Callable[[Any, Allocation], None] = lambda operator, allocation: None
    on_worker: bool = True
    has_exit_code: bool = False
    """Whether a task that succeeds ran a command, which ended with 0."""

    def prepare(self, operator: Any, manager: LeaseService, allocation: Allocation) -> Allocation:
        """Make the operator ready; return the allocation.

        If that fails nothing runs: the lease ends at once, and the next one avoids a server at fault.
        """
        try:
            return self.ready(operator, manager, allocation)
        except LeaseNotFoundError as error:
            raise AirflowException("the lease was ended by another client before its job started") from error
        except LauncherError as error:
            how = {"job_end": JobEnd.ENDED, "failed_nodes": [allocation["server_name"]]}
            operator.end_lease(manager, allocation, Outcome.FAILED, as_reason(error), **how)
            raise AirflowException(str(error)) from error
        except BaseException as error:
            operator.end_lease(manager, allocation, Outcome.FAILED, reason_of(error), job_end=JobEnd.ENDED)
            raise

    def ready(self, operator: Any, manager: LeaseService, allocation: Allocation) -> Allocation:
        """Fill the operator in before it runs; return the allocation."""
        self.fill(operator, allocation)
        return allocation

    def tell(self, operator: Any, lease: Allocation) -> float | None:
        """Tell what the operator started that its lease is taken, as `kept_alive` has it done."""
        return tell_this_process(lease)

    def stop(self, operator: Any, allocation: Allocation) -> None:
        """End what the operator started outside this process, which is about to end itself."""
        if not self.on_worker:
            operator.on_kill()

    def end(
        self, operator: Any, manager: LeaseService, allocation: Allocation, outcome: str, reason: str = ""
    ) -> bool:
        """End the lease after the operator's own end; return whether it has ended."""
        operator.end_lease(manager, allocation, outcome, reason)
        return True


@dataclass(frozen=True, slots=True)
class KindElsewhere(Kind):
    """Family of operators that start their job on the granted server, where it may outlive the worker.

    The launcher of that name prepares it, and looks whether it is gone: only then its GPUs are free.
    """

    launcher: str = ""
    connection: str = ""
    """Attribute of the operator with the id of its connection."""
    start: Callable[[Any, Any, Job, str], None] = lambda operator, launcher, job, address: None
    """Makes the operator start this job by this launcher at this address."""
    removes: Callable[[Any, RunningJob], bool] = lambda operator, job: True
    """Tells whether the launcher removes what is left of a job that has ended."""
    on_worker: bool = False
    has_exit_code: bool = True

    def ready(self, operator: Any, manager: LeaseService, allocation: Allocation) -> Allocation:
        """Prepare the job, store where it will be, and make the operator start it there."""
        if allocation["job_places"]:
            return allocation
        conn_id = getattr(operator, self.connection)
        running = GangJob.planned(allocation, self.launcher, conn_id).jobs[0]
        if not running.place.address:
            raise LauncherError(f"server {running.server} has no address in the inventory: give it one")
        image = getattr(operator, "image", "")
        job = job_of(allocation, running.key, (), image=image)
        with closing(running.open()) as launcher:
            place = launcher.prepare(job)
            lease_id, token = allocation["task_id"], allocation["fencing_token"]
            allocation = patiently(
                lambda: manager.place_job(lease_id, [place], fencing_token=token), PATIENCE_S
            )
            self.start(operator, launcher, job, running.place.address)
        return allocation

    def tell(self, operator: Any, lease: Allocation) -> float | None:
        """Tell the job itself, and end it once its grace is over: then the operator returns, and fails."""
        if (gang := GangJob.of(lease)) is None:
            return None
        done = gang.preempt(grace_of(lease), lease["preempt_signal"], STEP_S)
        for error in done.left.values():
            operator.log.warning("its command cannot be told that it has to end, trying again: %s", error)
            raise error
        return None if done.is_over else math.inf

    def stop(self, operator: Any, allocation: Allocation) -> None:
        if (gang := GangJob.of(allocation)) is not None:
            gang.stop()

    def end(
        self, operator: Any, manager: LeaseService, allocation: Allocation, outcome: str, reason: str = ""
    ) -> bool:
        """Release the lease if its job is gone; else it is kept, and quarantined."""
        name = name_in_words(allocation)
        try:
            gang = GangJob.of(allocation)
            if gang is not None and gang.is_gone():
                if self.removes(operator, gang.jobs[0]):
                    gang.stop(0.0)
                done = released(manager, allocation, outcome=outcome, job_end=JobEnd.ENDED, reason=reason)
                if done is ReleaseResult.NOT_HELD and outcome != Outcome.SUCCESS:
                    who = ended_by_others(manager, allocation["task_id"]) or "another client ended its lease"
                    operator.log.error("its command was stopped: %s", who)
                return True
            problem = f"what it started still runs on {allocation['server_name']}"
        except ResourceManagerError as error:
            problem = f"it is unknown whether what it started and its lease have ended: {error}"
        operator.log.error(
            "%s; its GPUs stay allocated until that is gone: gpu-manager stop %s ends it", problem, name
        )
        return False


def _fill_bash(operator: Any, allocation: Allocation) -> None:
    if operator.env is not None:
        operator.env = {**operator.env, **devices_of(allocation)}


def _fill_virtualenv(operator: Any, allocation: Allocation) -> None:
    operator.env_vars = {**(operator.env_vars or {}), **devices_of(allocation)}


def _fill_pod(operator: Any, allocation: Allocation) -> None:
    """Choose the node; which of its GPUs the pod gets is bound by Kubernetes, not by the lease."""
    from kubernetes.client import V1EnvVar

    lease = {
        "GPU_LEASE_ID": allocation["task_id"],
        "GPU_LEASE_GPUS": allocation["gpu_devices"],
        "GPU_SERVER": allocation["server_name"],
    }
    own = operator.env_vars or []
    operator.env_vars = (
        {**own, **lease}
        if isinstance(own, dict)
        else [*own, *(V1EnvVar(name=name, value=text) for name, text in lease.items())]
    )
    operator.node_selector = {
        **(operator.node_selector or {}),
        "kubernetes.io/hostname": allocation["server_name"],
    }


def _start_by_ssh(operator: Any, launcher: SSHLauncher, job: Job, address: str) -> None:
    from airflow.providers.ssh.hooks.ssh import CMD_TIMEOUT, SSHHook

    user, host, port = parts_of(address)
    operator.remote_host = host
    if not operator.ssh_conn_id and "ssh_hook" not in vars(operator):
        given = {"conn_timeout": operator.conn_timeout, "banner_timeout": operator.banner_timeout}
        operator.ssh_hook = SSHHook(remote_host=host or "", cmd_timeout=None, **given)
    hook = operator.ssh_hook
    if not isinstance(operator.cmd_timeout, int | float | None) and hook.cmd_timeout == CMD_TIMEOUT:
        operator.log.warning("cmd_timeout ends this command after %s s: None is no limit", CMD_TIMEOUT)
    hook.remote_host, hook.port, hook.username = host, port or hook.port, user or hook.username
    if operator.command is None:
        return
    operator.log.info("command under the lease: %s", operator.command)
    operator.get_pty = operator.get_pty or operator.command.startswith("sudo")
    operator.command = launcher.foreground(job, operator.command)


def _start_container(operator: Any, launcher: DockerLauncher, job: Job, address: str) -> None:
    """Name the container by the job's key, by which the launcher finds it, and give it the devices."""
    requests = launcher.device_requests(job)
    if job.gpu_ids and not requests:
        raise LauncherError(
            f"DockerOperator passes no device files, as {job.vendor} needs: use GPUTrainingOperator(image=…)"
        )
    operator.docker_url = launcher.engine
    operator.container_name = job.key
    operator.device_requests = requests
    devices = job_environment(job, renumbered=True)
    operator.environment = {**operator.environment, **devices, **mark_of(job.key), **preempt_file()}
    labels = {f"gpu-manager.{name}": value for name, value in job.labels.items()}
    own = operator.labels or {}
    operator.labels = (
        {**own, **labels} if isinstance(own, dict) else [*own, *(f"{name}={labels[name]}" for name in labels)]
    )


def _is_left_over(operator: Any, job: RunningJob) -> bool:
    """Return whether a container is there that the operator removes: its worker died before."""
    if operator.auto_remove == "never":
        return False
    with closing(job.open()) as launcher:
        found = launcher.status(job.key)
    return found.state is JobState.FINISHED and (operator.auto_remove == "force" or found.exit_code == 0)


KINDS = {
    f"{AIRFLOW}.standard.operators.bash.BashOperator": Kind(_fill_bash, has_exit_code=True),
    f"{AIRFLOW}.standard.operators.python._BasePythonVirtualenvOperator": Kind(_fill_virtualenv),
    f"{AIRFLOW}.cncf.kubernetes.operators.pod.KubernetesPodOperator": Kind(_fill_pod, on_worker=False),
    f"{AIRFLOW}.ssh.operators.ssh.SSHOperator": KindElsewhere(
        launcher="ssh", connection="ssh_conn_id", start=_start_by_ssh
    ),
    f"{AIRFLOW}.docker.operators.docker.DockerOperator": KindElsewhere(
        launcher="docker",
        connection="docker_conn_id",
        start=_start_container,
        removes=_is_left_over,
    ),
}
"""Class of Airflow's -> what is done with its subclasses; with others only the environment is set."""

NOT_LEASED = {
    f"{AIRFLOW}.docker.operators.docker_swarm.DockerSwarmOperator": "Swarm chooses the server",
    f"{AIRFLOW}.ssh.operators.ssh_remote_job.SSHRemoteJobOperator": "its job outlives it: use SSHOperator",
    f"{AIRFLOW}.standard.operators.hitl.HITLOperator": "a person answers after its execute: use gpu_lease",
    f"{AIRFLOW}.standard.operators.trigger_dagrun.TriggerDagRunOperator": (
        "Airflow triggers the run after its execute: use gpu_lease"
    ),
}
"""Class of Airflow's -> why a lease that ends with its `execute` would not last as long as its work."""


def kind_of(operator: type) -> Kind:
    """Return the kind of an operator's class, by its bases; raises `TypeError` if it cannot be leased."""
    for base in operator.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in NOT_LEASED:
            raise TypeError(f"with_gpus: not for {operator.__name__}: {NOT_LEASED[name]}")
        if name in KINDS:
            return KINDS[name]
    return Kind()
