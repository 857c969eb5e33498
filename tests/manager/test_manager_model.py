"""Random steps through two managers on one store, against a plain model of the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.errors import DuplicateTaskError, LeaseNotFoundError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.server_views import summary
from resource_manager.scheduling.allocator import check
from resource_manager.storage import Store, open_store

SERVERS, GPUS, CPUS = 3, 8, 64
TTL_S = 10_000.0
"""Longer than a test on a real clock runs; a fake clock jumps."""
TASKS = st.sampled_from([f"task{i}" for i in range(12)])
DEMANDS = st.tuples(st.integers(2, 8), st.sampled_from([1, 8, 32, 64]))


@dataclass
class Held:
    server: int
    gpus: list[int]
    cpus: int
    ends: float


@dataclass
class Model:
    """First fit in server order, first come first served, in the simplest form."""

    now: float = 0.0
    held: dict[str, Held] = field(default_factory=dict)
    queue: list[tuple[str, int, int]] = field(default_factory=list)
    drained: set[int] = field(default_factory=set)

    def free(self, server: int) -> tuple[list[int], int]:
        mine = [held for held in self.held.values() if held.server == server]
        taken = {gpu for held in mine for gpu in held.gpus}
        return [gpu for gpu in range(GPUS) if gpu not in taken], CPUS - sum(held.cpus for held in mine)

    def place(self, task: str, gpus: int, cpus: int) -> bool:
        for server in range(SERVERS):
            free_gpus, free_cpus = self.free(server)
            if server not in self.drained and len(free_gpus) >= gpus and free_cpus >= cpus:
                self.held[task] = Held(server, free_gpus[:gpus], cpus, self.now + TTL_S)
                return True
        return False

    def serve(self) -> None:
        while self.queue and self.place(*self.queue[0]):
            self.queue.pop(0)

    def expire(self) -> None:
        over = [task for task, held in self.held.items() if held.ends <= self.now]
        for task in over:
            del self.held[task]
        if over:
            self.serve()


class ManagerMachine(RuleBasedStateMachine):
    make_stores: Callable[[Callable[[], float]], list[Store]]
    has_fake_clock = True

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(now=1e9)
        rules = {"lease_ttl_s": TTL_S}
        inventory = default_inventory(SERVERS)
        self.managers = [
            GPUResourceManager(Settings(), store=store, inventory=inventory, cluster=rules)
            for store in type(self).make_stores(lambda: self.model.now)
        ]
        self.turn = 0

    def teardown(self) -> None:
        for manager in self.managers:
            manager.close()

    @property
    def manager(self) -> GPUResourceManager:
        """One of the two in turn, so that each works on a state that the other has changed."""
        self.turn += 1
        return self.managers[self.turn // 2 % 2]

    def known(self, task: str) -> tuple[int, int] | None:
        if task in self.model.held:
            held = self.model.held[task]
            return len(held.gpus), held.cpus
        return next(((gpus, cpus) for name, gpus, cpus in self.model.queue if name == task), None)

    @rule(task=TASKS, demand=DEMANDS)
    def allocate(self, task: str, demand: tuple[int, int]) -> None:
        self.model.expire()
        before = self.known(task)
        if before is not None and before != demand:
            with pytest.raises(DuplicateTaskError):
                self.manager.allocate_resources(task, *demand)
            return
        result = self.manager.allocate_resources(task, *demand)
        if before is None and not self.model.queue:
            self.model.place(task, *demand)
        assert (result is not None) == (task in self.model.held)

    @rule(task=TASKS, demand=DEMANDS)
    def submit(self, task: str, demand: tuple[int, int]) -> None:
        self.model.expire()
        before = self.known(task)
        if before is not None and before != demand:
            with pytest.raises(DuplicateTaskError):
                self.manager.submit(task, *demand)
            return
        result = self.manager.submit(task, *demand)
        if before is None:
            self.model.queue.append((task, *demand))
            self.model.serve()
        assert result["state"] == ("RUNNING" if task in self.model.held else "WAITING")

    @rule(task=TASKS)
    def release(self, task: str) -> None:
        self.model.expire()
        assert self.manager.release_resources(task) == (task in self.model.held)
        if self.model.held.pop(task, None):
            self.model.serve()

    @rule(task=TASKS)
    def cancel(self, task: str) -> None:
        self.model.expire()
        pending = [entry for entry in self.model.queue if entry[0] == task]
        assert self.manager.cancel(task) == bool(pending)
        if pending:
            self.model.queue.remove(pending[0])
            self.model.serve()

    @rule(task=TASKS)
    def renew(self, task: str) -> None:
        self.model.expire()
        if task in self.model.held:
            self.manager.renew(task)
            self.model.held[task].ends = self.model.now + TTL_S
        else:
            with pytest.raises(LeaseNotFoundError):
                self.manager.renew(task)

    @rule(server=st.integers(0, SERVERS - 1))
    def drain(self, server: int) -> None:
        self.model.expire()
        self.manager.drain(server)
        self.model.drained.add(server)

    @rule(server=st.integers(0, SERVERS - 1))
    def resume(self, server: int) -> None:
        self.model.expire()
        self.manager.resume(server)
        self.model.drained.discard(server)
        self.model.serve()

    @precondition(lambda self: self.has_fake_clock)
    @rule(seconds=st.sampled_from([TTL_S / 100, TTL_S / 2, TTL_S - 1, TTL_S]))
    def pass_time(self, seconds: float) -> None:
        self.model.now += seconds

    @rule()
    def expire_and_schedule(self) -> None:
        self.model.expire()
        self.manager.expire_and_schedule()
        self.model.serve()

    @rule(demands=st.lists(DEMANDS, min_size=1, max_size=4))
    def batch(self, demands: list[tuple[int, int]]) -> None:
        requests: list[dict[str, Any]] = [
            {"task_id": f"batch{i}", "required_gpus": gpus, "required_cpus": cpus}
            for i, (gpus, cpus) in enumerate(demands)
        ]
        if any(self.known(request["task_id"]) for request in requests):
            return
        self.model.expire()
        results = self.manager.allocate_batch(requests)
        if not self.model.queue:
            for request in requests:
                self.model.place(*request.values())
        assert [result is not None for result in results] == [
            request["task_id"] in self.model.held for request in requests
        ]

    @invariant()
    def both_managers_see_the_model(self) -> None:
        """Leases that are due count until the next change by any manager; reading changes nothing."""
        expected = {task: (held.server, held.gpus, held.cpus) for task, held in self.model.held.items()}
        for manager in self.managers:
            assert {
                lease["task_id"]: (lease["server_id"], lease["gpu_ids"], lease["cpu_count"])
                for lease in manager.leases()
            } == expected
            assert [entry["task_id"] for entry in manager.queue()] == [
                task for task, _, _ in self.model.queue
            ]
        stored = self.managers[0].store.refresh(None)
        assert stored is not None
        check(stored)
        assert [manager.get_resource_summary() for manager in self.managers] == [summary(stored)] * len(
            self.managers
        )


def run(machine: type[ManagerMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.thorough
def test_memory_store() -> None:
    def stores(clock: Callable[[], float]) -> list[Store]:
        return [MemoryStore(clock=clock)] * 2

    class Machine(ManagerMachine):
        make_stores = staticmethod(stores)

    run(Machine, 60)


@pytest.mark.parametrize("server", ["embedded_redis", "system_redis"])
def test_redis_store(server: str, request: pytest.FixtureRequest) -> None:
    redis = request.getfixturevalue(server)

    def stores(clock: Callable[[], float]) -> list[Store]:
        url = redis.fresh_url()
        return [open_store(url), open_store(url)]

    class Machine(ManagerMachine):
        make_stores = staticmethod(stores)
        has_fake_clock = False

    run(Machine, 15)
