"""Environment of a planner: devices are nodes, executors are leases, and every command is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.changes import Drained, InventoryChanged, Resumed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Node, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.manager.plurals import counted
from resource_manager.scheduling.allocator import grant
from resource_manager.scheduling.lease_steps import release
from simulator.edge.dataset import KINDS, METRIC_PERIOD_S, Category, Dataset, Device, Kind
from simulator.edge.plan import Add, Commands, Match, Plan
from simulator.edge.transfers import transfer_s, upload_s
from simulator.engine import EventQueue
from simulator.errors import SimulationError

NEVER_S = 1 << 30
"""End of a task that cannot end: its device goes offline during a transfer."""


@dataclass(slots=True, eq=False)
class Executor:
    """Lease on a device for tasks of one category.

    It prepares until `free_from_s`; while it runs `task_id`, `free_from_s` is the expected end of the task.
    """

    executor_id: int
    category: Category
    device: Device
    created_s: int
    free_from_s: int
    task_id: int | None = None

    @property
    def lease_id(self) -> str:
        return f"executor-{self.executor_id}"

    def is_free(self, now: int) -> bool:
        return self.task_id is None and self.free_from_s <= now


class Environment:
    """State at the second `now`: executors and tasks; `plan` has the commands so far.

    A task is executable when its job has arrived and all its parents have ended; only such tasks may be
    matched here. (The rules allow a match as soon as one parent has ended, but such a task only blocks
    its executor.)
    """

    def __init__(self, dataset: Dataset, kinds: tuple[Kind, ...] = KINDS) -> None:
        self.dataset = dataset
        self.devices = [device for device in dataset.devices if device.kind in kinds]
        self.now = 0
        self.plan: Plan = {}
        self.nodes = {device.index: _node(device, *dataset.first_capacity(device)) for device in self.devices}
        self._resizes = {
            second: [(i, _node(dataset.devices[i], *size)) for i, *size in changes if i in self.nodes]
            for second, changes in dataset.capacity_changes.items()
        }
        self.cluster = ClusterState(self.nodes.values())
        self.on_device: list[dict[int, Executor]] = [{} for _ in dataset.devices]
        self.running: dict[int, Executor] = {}
        self.end_s: dict[int, int] = {}
        self.executable: dict[int, None] = {}  # in the order in which they became executable
        self._kept_on: dict[int, Device] = {}
        self._parents_left = {task.task_id: len(task.parents) for task in dataset.tasks.values()}
        self._ends: EventQueue[tuple[int, Executor, Device]] = EventQueue()
        self._last_executor_id = -1
        self._arrivals: dict[int, list[int]] = {}
        for job in dataset.jobs.values():
            self._arrivals.setdefault(job.arrival_s, []).append(job.job_id)
        # Jobs with an arrival, start, end or kill; the policy clears the set.
        self.touched_jobs: set[int] = set()
        for device in self.devices:
            if not dataset.is_online(device, 0):
                self.cluster.apply(Drained(device.name, 0, "offline"))
        self._arrive()

    # ---- reading ----

    def node(self, device: Device) -> NodeState:
        """Return the node of a device; `free` has its free cpus and memory_mib."""
        return self.cluster.by_server_id[device.index]

    def expected_end(self, task_id: int, device: Device, start_s: int) -> tuple[int, Device] | None:
        """Return (end, device that keeps the data) if an executor of the device starts the task at `start_s`.

        All parents must have ended by then. None if a user device goes offline during a transfer.
        """
        dataset = self.dataset
        task = dataset.tasks[task_id]
        moved = 0
        for parent, size in task.parents:
            took = transfer_s(dataset, self._kept_on[parent], device, start_s, size)
            if took is None:
                return None
            moved = max(moved, took)
        end = start_s + moved + task.compute_s * device.compute_factor
        if device.kind != "UE":
            return end, device
        uploaded = upload_s(dataset, device, end, task.output_size)
        return None if uploaded is None else (end + uploaded[0], uploaded[1])

    @property
    def done(self) -> bool:
        return len(self.end_s) == len(self.dataset.tasks)

    # ---- commands ----

    def delete(self, executor: Executor) -> None:
        """Delete an executor; its running task has to start again."""
        if executor.created_s == self.now:
            raise SimulationError(f"executor {executor.executor_id} is deleted in the second of its creation")
        self._commands().deletes.append(executor.executor_id)
        self._end_lease(executor, "deleted")

    def add(self, category: Category, device: Device) -> Executor:
        """Create an executor; raise `CapacityError` if it does not fit."""
        self._last_executor_id += 1
        ready_s = self.now + max(1, category.prepare_s)
        executor = Executor(self._last_executor_id, category, device, self.now, ready_s)
        request = Request(
            executor.lease_id,
            resources=_resources(category.cpus, category.memory_mib),
            required_node=device.name,
        )
        self.cluster.apply(grant(self.cluster, request, (Placement(device.name),), self.now))
        self._commands().adds.append(Add(executor.executor_id, category.category_id, device))
        self.on_device[device.index][executor.executor_id] = executor
        return executor

    def match(self, executor: Executor, task_id: int) -> None:
        """Start an executable task on a free executor of its category."""
        category_id = self.dataset.tasks[task_id].category_id
        if not executor.is_free(self.now) or category_id != executor.category.category_id:
            raise SimulationError(f"executor {executor.executor_id} cannot take task {task_id} now")
        del self.executable[task_id]
        self.touched_jobs.add(self.dataset.tasks[task_id].job_id)
        self._commands().matches.append(Match(executor.executor_id, task_id))
        self.running[task_id] = executor
        executor.task_id = task_id
        expected = self.expected_end(task_id, executor.device, self.now)
        executor.free_from_s = NEVER_S if expected is None else expected[0]
        if expected is not None:
            self._ends.schedule(expected[0], (task_id, executor, expected[1]), priority=task_id)

    def _commands(self) -> Commands:
        return self.plan.setdefault(self.now, Commands())

    def _end_lease(self, executor: Executor, outcome: str) -> None:
        for change in release(self.cluster, executor.lease_id, self.now, outcome=outcome):
            self.cluster.apply(change)
        del self.on_device[executor.device.index][executor.executor_id]
        if executor.task_id is not None:
            del self.running[executor.task_id]
            self.executable[executor.task_id] = None
            self.touched_jobs.add(self.dataset.tasks[executor.task_id].job_id)

    # ---- the clock ----

    def advance(self) -> None:
        """Advance one second: ends, capacity of base stations and user devices, devices offline, arrivals."""
        before, self.now = self.now, self.now + 1
        for event in self._ends.pop_due(self.now):
            self._complete(*event)
        second = self.now % METRIC_PERIOD_S
        if resizes := self._resizes.get(second):
            for index, node in resizes:
                self._evict(index, node)
                self.nodes[index] = node
            self.cluster.apply(InventoryChanged(tuple(self.nodes.values()), self.now))
        for index in self.dataset.leaving.get(before % METRIC_PERIOD_S, ()):
            if index in self.nodes:
                for executor in list(self.on_device[index].values()):
                    self._end_lease(executor, "its device went offline")
                self.cluster.apply(Drained(self.nodes[index].name, self.now, "offline"))
        for index in self.dataset.joining.get(second, ()):
            if index in self.nodes:
                self.cluster.apply(Resumed(self.nodes[index].name, self.now))
        self._arrive()

    def _complete(self, task_id: int, executor: Executor, kept_on: Device) -> None:
        if self.running.get(task_id) is not executor:
            return  # it was killed meanwhile
        del self.running[task_id]
        executor.task_id = None
        self.end_s[task_id] = executor.free_from_s
        self._kept_on[task_id] = kept_on
        self.touched_jobs.add(self.dataset.tasks[task_id].job_id)
        for child, _ in self.dataset.tasks[task_id].children:
            self._parents_left[child] -= 1
            if not self._parents_left[child]:
                self.executable[child] = None

    def _evict(self, index: int, node: Node) -> None:
        """End the oldest executors until the others fit the new capacity."""
        held = self.on_device[index]
        used_cpus = sum(executor.category.cpus for executor in held.values())
        used_mib = sum(executor.category.memory_mib for executor in held.values())
        for executor in list(held.values()):  # ids grow with the time of creation
            if used_cpus <= node.resources["cpus"] and used_mib <= node.resources["memory_mib"]:
                return
            used_cpus -= executor.category.cpus
            used_mib -= executor.category.memory_mib
            self._end_lease(executor, "capacity shrank")

    def _arrive(self) -> None:
        for job_id in self._arrivals.get(self.now, ()):
            self.touched_jobs.add(job_id)
            for task_id in self.dataset.jobs[job_id].task_ids:
                if not self._parents_left[task_id]:
                    self.executable[task_id] = None


def _node(device: Device, cpus: int, memory_mib: int) -> Node:
    return Node(device.name, device.index, _resources(cpus, memory_mib))


def _resources(cpus: int, memory_mib: int) -> dict[str, int]:
    return {"cpus": cpus, "memory_mib": memory_mib}


def check_feasible(dataset: Dataset, kinds: tuple[Kind, ...]) -> None:
    """Raise `SimulationError` without hosts, or if a task requests more than any has: it might never end."""
    if "Cloud" not in kinds:
        raise SimulationError(f"a plan needs the cloud hosts, and kinds is {kinds}")
    hosts = [dataset.first_capacity(device) for device in dataset.devices if device.kind == "Cloud"]
    for task in dataset.tasks.values():
        category = dataset.categories[task.category_id]
        if not any(category.cpus <= cpus and category.memory_mib <= memory for cpus, memory in hosts):
            raise SimulationError(
                f"dataset {dataset.name}: task {task.task_id} asks for {counted(category.cpus, 'CPU')} and "
                f"{category.memory_mib} MiB, and no host has that"
            )
