"""Work of a task in its own worker: the lease's GPUs in the environment, for as long as the lease lives."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

from airflow.sdk import BaseOperator

from resource_manager.airflow.lease_renewal import PATIENCE_S, kept_alive
from resource_manager.airflow.operators.base import HoldsLease
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.task_state import identity_of
from resource_manager.airflow.task_trigger.waits import LeaseEndTrigger
from resource_manager.airflow.use_meter import warn_when_idle
from resource_manager.airflow.version_compat import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    AirflowTaskTimeout,
    DownstreamTasksSkipped,
)
from resource_manager.airflow.worker_guard import (
    children,
    end_children,
    end_this_process,
    guarded,
    tell_this_process,
)
from resource_manager.core.changes import Outcome
from resource_manager.errors import LockTimeoutError, ResourceManagerError
from resource_manager.jobs.launchers import terminal
from resource_manager.jobs.launchers.devices import await_share, job_environment
from resource_manager.jobs.launchers.terminal import OWN_SERVER
from resource_manager.jobs.reconcile import PROCESS_SCOPE
from resource_manager.jobs.registered_process import register_process
from resource_manager.jobs.running_job import job_of
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.durations import seconds_of
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.patience import patiently
from resource_manager.manager.plurals import numbered_gpus
from resource_manager.manager.results import Allocation, ReleaseResult

_EXIT_CODE = re.compile(r"(?:exit code|exit status =|exit status|'StatusCode':) (-?\d+)")

TRY_LABEL = "try"
"""Label of a lease with the try that requested it."""


class RunsInWorker(HoldsLease):
    """Steps of an operator that waits for its GPUs in the triggerer and then works in a worker."""

    preemptible_by_default = False  # what works in a worker cannot go on where it stopped
    default_ttl = timedelta(minutes=1)
    name_in_errors: str
    on_worker = True
    """Whether the work uses the GPUs of the worker's own machine."""
    lease_labels: ClassVar[Mapping[str, str]] = {"scope": PROCESS_SCOPE}
    """Further labels of the lease: it expires, since the worker ends before."""

    def work(self, context: Any) -> Any:
        """Do what the lease is for; its devices are in the environment of this process."""
        raise NotImplementedError

    def execute(self, context: Any) -> Any:
        """Request the lease; work if it is granted and no other try may still use it."""
        try:
            self.require_one_server(self.given_fields()["nodes"])
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        return super().execute(context)

    def execute_request(self, context: Any, event: dict[str, Any], granted_to_this_try: bool = False) -> Any:
        """Take the first steps; after an outage of at most `max_wait` repeat them, but never the work."""
        step, again = "execute_request", {"granted_to_this_try": granted_to_this_try}
        with outlasting_outages(self, step, event, begins=True, at_most=self.wait_limit, **again):
            manager = self.manager
            allocation = self._granted(context, manager, granted_to_this_try)
        context["ti"].xcom_push(key="allocation", value=allocation)
        return self.run_under_lease(context, manager, allocation, lambda: self.work(context))

    def _granted(self, context: Any, manager: LeaseService, granted_to_this_try: bool) -> Allocation:
        """Return this try's allocation, on this worker's server; defer for as long as there is none."""
        identity = identity_of(context)
        this_try = try_of(context)
        where = self.server_of_worker(manager)
        labels = {TRY_LABEL: this_try, **self.lease_labels}
        # Quarantined, it would stay for ever: nobody can look whether a process in a worker is gone.
        while True:
            status = self.lease(context, manager, labels=labels, quarantine=False, **where)
            if not granted_to_this_try and status["labels"].get(TRY_LABEL) != this_try:
                self.end_earlier_try(manager, identity, status)
                continue
            if self.on_worker and (elsewhere := _elsewhere(status)):
                with suppress(LockTimeoutError):  # it will expire
                    manager.release(
                        identity.lease_id, fencing_token=status["fencing_token"], outcome=Outcome.FAILED
                    )
                raise AirflowException(elsewhere)
            if not self.gives_back(manager, status):
                break
            granted_to_this_try = True
        self.log.info("allocated %s of %s", numbered_gpus(status["gpu_ids"]), status["server_name"])
        return status

    def end_earlier_try(self, manager: LeaseService, identity: TaskIdentity, status: Allocation) -> None:
        """Defer until the lease of an earlier try has ended, unless that can be ended now."""
        self.log.info("an earlier try may still use the GPUs; waiting until its lease has ended")
        self.defer(
            trigger=LeaseEndTrigger(identity, status["fencing_token"], gpu_conn_id=self.gpu_conn_id),
            method_name="execute_request",
        )

    @classmethod
    def require_one_server(cls, nodes: Any) -> None:
        """Raise `ValueError` for a gang: the work is one process, of one worker."""
        if nodes not in (None, 1, "1"):
            raise ValueError(
                f"nodes={nodes}: {cls.name_in_errors} in one worker; a job on several servers is "
                "GPUTrainingOperator(nodes=…), or tasks in gpu_lease(nodes=…)"
            )

    def server_of_worker(self, manager: LeaseService) -> dict[str, str]:
        """Return the server named by `GPU_MANAGER_SERVER` as a field, or none if it is not set.

        Raises `AirflowFailException` if the task requires another server.
        """
        here, wanted = os.environ.get(OWN_SERVER), self.given_fields()["server"]
        if here is None or not self.on_worker:
            return {}
        if wanted is None or str(wanted) == here:
            return {"server": here}
        for row in manager.servers():
            if row["server_name"] == here and str(row["server_id"]) == str(wanted):
                return {"server": here}
        raise AirflowFailException(
            f"the task requires server {wanted!r}, but this worker is on {here!r} ({OWN_SERVER}): give "
            "the task the Airflow queue of that server's workers"
        )

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Continue after the wait; this try queued the request, so no other try ran under its lease."""
        with outlasting_outages(self, "execute_granted", event):
            self.fail_if_overdue(context, event)
        return self.execute_request(context, {}, granted_to_this_try=True)

    def run_under_lease(
        self, context: Any, manager: LeaseService, allocation: Allocation, work: Callable[[], Any]
    ) -> Any:
        """Return what the work returns, done with the lease's devices and renewals; then end the lease."""
        try:
            with self.with_devices(manager, allocation):
                result = work()
        except BaseException as error:
            self.end_lease(manager, allocation, outcome_of(error), reason_of(error))
            raise
        self.end_lease(manager, allocation, Outcome.SUCCESS)
        return result

    @contextmanager
    def with_devices(
        self,
        manager: LeaseService,
        allocation: Allocation,
        *,
        ends_in_time: bool = True,
        stop: Callable[[], object] = lambda: None,
        tell: Callable[[Allocation], float | None] = tell_this_process,
    ) -> Iterator[None]:
        """Keep the lease for the block, which has its devices in the environment of this process.

        `stop` ends what runs elsewhere, before this process ends itself; `tell` is that of `kept_alive`.
        """
        lease_id, token = allocation["task_id"], allocation["fencing_token"]
        register_process(lease_id, token)
        task_over = warn_when_idle(manager, allocation, self.log)
        devices = devices_of(allocation)
        try:
            with (
                environment(devices),
                guarded(lease_id, token) if ends_in_time else nullcontext(),
                kept_alive(
                    manager,
                    lease_id,
                    token,
                    seconds_of(self._ttl),
                    grace_s=allocation["preempt_grace_s"],
                    ends_in_time=ends_in_time,
                    end=partial(end_this_process, stop=stop),
                    tell=tell,
                ),
            ):
                if words := await_share(devices):
                    self.log.warning(words)
                before = children()
                try:
                    yield
                except AirflowTaskTimeout:
                    if ends_in_time:  # here, as Airflow calls `on_kill` once the GPUs are free
                        task = cast(BaseOperator, self)
                        has_own = type(task).on_kill is not BaseOperator.on_kill
                        end_children(task.on_kill if has_own else None, before=before)
                    raise
        finally:
            task_over.set()

    def end_lease(
        self, manager: LeaseService, allocation: Allocation, outcome: str, reason: str = "", **how: Any
    ) -> None:
        """Release the lease after the work; the reason is for the history."""
        try:
            released(manager, allocation, outcome=outcome, reason=reason, **how)
        except ResourceManagerError as error:  # a failed release must not hide the work's own result
            self.log.warning("the lease was not released, as far as is known, and will expire: %s", error)


def try_of(context: Any) -> str:
    """Return the number of a try and Airflow's id of it: a run that is made again counts from 1 again."""
    return f"{context['ti'].try_number}:{context['ti'].id}"


def released(manager: LeaseService, allocation: Allocation, **how: Any) -> ReleaseResult:
    """Release the lease of work that is over, again while the manager does not answer.

    One that is gone after a call without an answer was released by that call.
    """
    tries = 0

    def release() -> ReleaseResult:
        nonlocal tries
        tries += 1
        return manager.release(allocation["task_id"], fencing_token=allocation["fencing_token"], **how)

    result = patiently(release, PATIENCE_S)
    return ReleaseResult.RELEASED if tries > 1 and result is ReleaseResult.NOT_HELD else result


def _elsewhere(allocation: Allocation) -> str:
    """Return why this worker is not on the granted server; empty if it is."""
    granted, address = allocation["server_name"], allocation["members"][0]["address"]
    if terminal.is_here(address, granted):
        return ""
    return (
        f"the GPUs were granted on {granted} (address {address or 'none'}), but this worker is on "
        f"{terminal.own_name()}: give the task the Airflow queue of one server's workers, each with "
        f"{OWN_SERVER}, or run its command by SSHOperator or GPUTrainingOperator(launcher='ssh')"
    )


def outcome_of(error: BaseException) -> str:
    """Return the outcome of work that ended by that exception; empty for a skip and a reschedule."""
    if isinstance(error, AirflowSkipException | AirflowRescheduleException):
        return ""
    return Outcome.SUCCESS if isinstance(error, DownstreamTasksSkipped) else Outcome.FAILED


def reason_of(error: BaseException) -> str:
    """Return the exit code that an operator's error tells, as Bash, SSH and Docker have it; else its class.

    No more of the words of an error: they may hold a secret, and every reader sees the history.
    """
    first_line = str(error).partition("\n")[0]
    if isinstance(error, AirflowException) and (told := _EXIT_CODE.search(first_line)):
        return f"exit code {told[1]}"
    return type(error).__name__


def devices_of(allocation: Allocation) -> dict[str, str]:
    """Return the environment with the lease and its devices."""
    return job_environment(job_of(allocation, "", ()))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
