"""Lease around any other operators: `GPUAllocateOperator`, `GPUReleaseOperator` and `gpu_lease`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from airflow.sdk import BaseOperator, TaskGroup, XComArg

from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.task_demand import end_entry
from resource_manager.airflow.task_state import identity_of
from resource_manager.airflow.task_trigger.base import MIN_DEFERRAL_S
from resource_manager.airflow.task_trigger.waits import AnswerTrigger
from resource_manager.airflow.use_meter import warn_when_idle
from resource_manager.airflow.version_compat import AirflowException, AirflowFailException
from resource_manager.core.changes import Outcome
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.core.names import short
from resource_manager.jobs.airflow_api import ENDED_TASK_STATES
from resource_manager.jobs.launchers.devices import MPS_PERCENTAGE, device_environment
from resource_manager.jobs.reconcile import RUN_SCOPE, may_be_in_use
from resource_manager.jobs.registered_process import register_process
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.plurals import numbered_gpus
from resource_manager.manager.results import Allocation, Submission

ENDING_S = MIN_DEFERRAL_S + 5.0
"""The reconciler's `ENDING_S` with the heartbeat of this Airflow."""

UNKNOWN = "unknown"

_NOT_ONE = (
    "lease must be the allocation of one GPUAllocateOperator, allocate.output: for those of a mapped one, "
    "use GPUReleaseOperator.partial(…).expand(lease=allocate.output)"
)

MEMBERS = "members"
"""XCom of `GPUAllocateOperator` with the members of its lease."""


class GPUAllocateOperator(GPUOperator):
    """Wait in the triggerer for GPUs and return the allocation; the lease outlives this task.

    `GPUReleaseOperator` ends the lease, or the reconciler once the DAG run has ended.
    Parameters as for `GPUOperator`; `ttl` is a day if None.
    """

    ui_color = "#d0e0f0"

    default_ttl = timedelta(days=1)

    def execute_request(self, context: Any, event: dict[str, Any]) -> Allocation:
        """Return the allocation, at once or after a wait; ask again after an outage of at most `max_wait`."""
        with outlasting_outages(self, "execute_request", event, begins=True, at_most=self.max_wait):
            allocation = self.lease(context, self.manager, labels={"scope": RUN_SCOPE})
        for member in allocation["members"]:
            self.log.info("allocated %s of %s", numbered_gpus(member["gpu_ids"]), member["server_name"])
        context["ti"].xcom_push(key=MEMBERS, value=allocation["members"])
        return allocation


class GPUReleaseOperator(BaseOperator):
    """End a lease of `GPUAllocateOperator`; as a teardown, succeed also if the lease has already ended.

    The outcome is SUCCESS only if all tasks between the two succeeded: only such a lease teaches a runtime.

    :param lease: allocation that `GPUAllocateOperator` returned: `allocate.output`.
    :param gpu_conn_id: connection of type `gpu_manager`.
    """

    template_fields: Sequence[str] = ("lease",)
    ui_color = "#d0e0f0"

    def __init__(self, *, lease: Any, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if isinstance(lease, XComArg) and getattr(getattr(lease, "operator", None), "is_mapped", False):
            raise TypeError(f"{self.task_id}: {_NOT_ONE}")
        self.lease = lease
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any) -> None:
        self.execute_release(context, {})

    def execute_release(self, context: Any, event: dict[str, Any]) -> None:
        """End the lease, unless it has ended."""
        with outlasting_outages(self, "execute_release", event):
            if not self.lease:
                self.log.info("nothing was allocated")
                return
            manager = GPUManagerHook(self.gpu_conn_id, task=self).get_conn()
            if not _is_allocation(self.lease):
                raise AirflowFailException(f"{_NOT_ONE}; got {short(repr(self.lease))}")
            entry = _entry_of(manager, self.lease)
            if entry is None:
                self.log.info("the lease had already ended")
                return
            identity = identity_of(context)
            _require_dag(entry, identity)
            states = self._states_between(context, entry, identity)
            succeeded, runs_again = states <= {"success"}, not states <= {*ENDED_TASK_STATES, UNKNOWN}
            is_over = succeeded or "has_waited" in event
            if runs_again or (not is_over and may_be_in_use(manager, entry)):
                why = "runs again" if runs_again else "may have been ended by a user"
                self.log.info("a task of the lease %s; looking again in %g s", why, ENDING_S)
                trigger = AnswerTrigger({"has_waited": True}, ENDING_S, gpu_conn_id=self.gpu_conn_id)
                self.defer(trigger=trigger, method_name="execute_release")
            end_entry(manager, entry, Outcome.SUCCESS if states and succeeded else None)

    def _states_between(
        self, context: Any, entry: Mapping[str, Any], identity: TaskIdentity
    ) -> set[str | None]:
        """Return the states of the tasks between the allocation and this release, as far as is known."""
        labels = entry["labels"]
        if (labels.get("dag_id"), labels.get("run_id")) != (identity.dag_id, identity.run_id):
            return set()
        try:
            return {
                state
                for task in self.get_flat_relatives(upstream=True)
                if labels.get("task_id") in task.get_flat_relative_ids(upstream=True)
                for state in _states_of(context["ti"], task.task_id)
            }
        except Exception as error:  # the lease ends all the same
            self.log.warning("it is unknown how the tasks of the lease ended: %s", error)
            return {UNKNOWN}


def _is_allocation(value: Any) -> bool:
    return isinstance(value, Mapping) and {"task_id", "fencing_token"} <= value.keys()


def _entry_of(manager: LeaseService, allocation: Mapping[str, Any]) -> Submission | None:
    """Return the lease of an allocation as it is now, None if it has ended."""
    entry = manager.status_of(allocation["task_id"])
    is_there = entry is not None and entry.get("fencing_token") == allocation["fencing_token"]
    return entry if is_there else None


def _refuse(allocate: str, context: Any = None, **_: Any) -> None:
    raise AirflowFailException(
        f"the lease of this task's gpu_lease has ended, its GPUs may be others' by now: clear {allocate}, too"
    )


def _require_dag(entry: Mapping[str, Any], identity: TaskIdentity) -> None:
    """Raise `AirflowFailException` for a lease of another DAG or Airflow, which an XCom may name."""
    labels = entry["labels"]
    for name, what, own in (
        ("instance", "Airflow instance", identity.instance),
        ("dag_id", "DAG", identity.dag_id),
    ):
        if labels.get(name) != own:
            raise AirflowFailException(
                f"lease {name_in_words(entry)} belongs to the {what} {labels.get(name)!r}, not to this one, "
                f"{own!r}: release it there"
            )


def _states_of(task_instance: Any, task_id: str) -> set[str | None]:
    """Return the states of all instances of the task in the DAG run and, in a mapped group, index."""
    map_index = task_instance.map_index
    states = task_instance.get_task_states(
        dag_id=task_instance.dag_id,
        task_ids=[task_id],
        run_ids=[task_instance.run_id],
        map_index=map_index if map_index is not None and map_index >= 0 else None,
    )
    return set(states.get(task_instance.run_id, {}).values()) or {UNKNOWN}


def join_lease(task_instance: Any) -> None:
    """Make this process a job of the `gpu_lease` around its task, if there is one; warn when that idles."""
    allocate = _allocate_around(task_instance.task)
    if allocate is None:
        return
    if allocate.is_mapped:
        raise AirflowException(
            f"{allocate.task_id} is mapped: put it and the tasks under its leases into a mapped task group"
        )
    mapped = next(allocate.iter_mapped_task_groups(), None) is not None
    index = {"map_indexes": task_instance.map_index} if mapped else {}
    allocation = task_instance.xcom_pull(task_ids=allocate.task_id, **index)
    if not allocation:
        return
    register_process(allocation["task_id"], allocation["fencing_token"])
    manager = GPUManagerHook(allocate.gpu_conn_id).get_conn()
    warn_when_idle(manager, allocation, allocate.log)
    if not (task_instance.task.is_teardown or _entry_of(manager, allocation)):
        # What is raised here is only logged. A task that was deferred is resumed instead of executed.
        task = task_instance.task
        task.execute = task.resume_execution = partial(_refuse, allocate.task_id)


def _allocate_around(task: Any) -> Any:
    """Return the allocation, of the innermost group with one, whose lease the task is under, or None.

    It comes before the task, and its release, if it has one, does not: that comes after all but teardowns.
    """
    allocates, releases = "GPUAllocateOperator", "GPUReleaseOperator"
    if task.task_type in (allocates, releases):
        return None
    before, group = task.get_flat_relative_ids(upstream=True), task.task_group
    is_released_later = task.is_teardown or _is_before_a(releases, task)
    while group is not None:
        earlier = [child for child in group.children.values() if child.node_id in before]  # no groups
        ended = {
            task_id
            for child in earlier
            if child.task_type == releases
            for task_id in child.get_flat_relative_ids(upstream=True)
        }
        for child in earlier:
            if child.task_type == allocates and child.task_id not in ended:
                return child if is_released_later or not _is_before_a(releases, child) else None
        group = group.parent_group
    return None


def _is_before_a(task_type: str, task: Any) -> bool:
    return any(each.task_type == task_type for each in task.get_flat_relatives(upstream=False))


@dataclass(frozen=True, slots=True)
class GPULease:
    """Lease of a task group, as values for the templated fields of its tasks."""

    allocate: GPUAllocateOperator

    @property
    def output(self) -> Any:
        """Allocation as an argument of a task."""
        return self.allocate.output

    @property
    def members(self) -> Any:
        """Members of the lease as an argument of a task: one a server, in the order of their ranks."""
        return XComArg(self.allocate, MEMBERS)

    def value(self, key: str) -> str:
        """Return a template of a key of the allocation: `lease.value("server_name")`."""
        return f"{{{{ {self._pull()}['{key}'] }}}}"

    @property
    def devices(self) -> str:
        """Template of the names that NVIDIA's runtimes know the GPUs by: their UUIDs, or else numbers."""
        allocation = self._pull()
        return f"{{{{ ({allocation}['gpu_uuids'] or {allocation}['gpu_ids']) | join(',') }}}}"

    def environment(self, vendor: str = "nvidia") -> dict[str, str]:
        """Return the environment of a task that runs on the server itself, outside a container.

        It sets no memory limit for a GPU fraction.
        """
        devices = self.devices if vendor == "nvidia" else self.value("gpu_devices")
        milli = self.allocate.gpu_milli or MILLI_PER_GPU
        is_known = isinstance(milli, int)  # else it is a template, or what another task returns
        fixed = device_environment(vendor, (), gpu_milli=milli if is_known else 1)
        if MPS_PERCENTAGE in fixed and not is_known:
            fixed[MPS_PERCENTAGE] = f"{{{{ '%g' % ({self._pull()}['gpu_milli'] / 10) }}}}"
        environment = {
            name: devices if name.endswith("VISIBLE_DEVICES") else value for name, value in fixed.items()
        }
        return {**environment, "GPU_SERVER": self.value("server_name"), "GPU_LEASE_ID": self.value("task_id")}

    def docker_command(self, image: str, command: str = "") -> str:
        """Return a template of the `docker run` of `build_docker_cmd`, for an SSH or Bash operator.

        Image and command are taken as they are: templates in them are not rendered.
        """
        return (
            f"{{{{ macros.gpu_resource_manager.build_docker_cmd({self._pull()}, {image!r}, {command!r}) }}}}"
        )

    def _pull(self) -> str:
        """Return the template expression of the allocation; in a mapped task group, of the same map index."""
        mapped = next(self.allocate.iter_mapped_task_groups(), None) is not None
        index = ", map_indexes=ti.map_index" if mapped else ""
        return f"ti.xcom_pull(task_ids='{self.allocate.task_id}'{index})"


@contextmanager
def gpu_lease(
    gpus: int | str, cpus: int | str = 1, *, group_id: str = "gpu_lease", **arguments: Any
) -> Iterator[GPULease]:
    """Open a task group whose tasks share one lease, granted before the first and released after the last.

    The release is a teardown: it runs even if tasks fail.

    :param gpus: whole GPUs, all of one server, or with `nodes` of each.
    :param cpus: CPUs of the same server.
    :param group_id: id of the task group.
    :param arguments: further arguments of `GPUAllocateOperator`.
    """
    gpu_conn_id = arguments.pop("gpu_conn_id", DEFAULT_CONNECTION)
    with TaskGroup(group_id):
        allocate = GPUAllocateOperator(
            task_id="allocate", gpus=gpus, cpus=cpus, gpu_conn_id=gpu_conn_id, **arguments
        )
        release = GPUReleaseOperator(task_id="release", lease=allocate.output, gpu_conn_id=gpu_conn_id)
        with release.as_teardown(setups=allocate):
            yield GPULease(allocate)
