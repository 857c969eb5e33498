"""After random commands an explanation says what the same request then gets, on every order and policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from resource_manager import GPUResourceManager, Refusal
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import BACKFILL_SUFFIX, ORDERS
from resource_manager.settings import Settings
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock

FIELDS: dict[str, list[Any]] = {
    "gpu_milli": [250, 500],
    "nodes": [1, 2, 3],
    "spread": ["servers", "pack"],
    "same": ["rack"],
    "priority": [-2, 0, 3],
    "expected_runtime": [30, 60, "2h"],
    "team": ["a", "b", "c", "other"],
    "ttl": [5, 30, 300],
    "gpu_types": [["A100"], ["V100", "A100"], ["H100"]],
    "types": ["first", "best"],
    "gpu_memory": ["10GB", "30GB"],
    "server": ["s0", "s1", "nope"],
    "prefer_server": ["s0", 1],
    "labels_required": [{"rack": "r0"}],
    "preemptible": [True, False],
    "preempt_grace": [0, "1min"],
    "max_runtime": ["10min", "2h"],
    "requeue_after": ["11min"],
    "quarantine": [True],
    "deadline": ["1h", 60],
    "utility": [10.0],
    "target": [100],
}


def random_demand(rng: random.Random) -> dict[str, Any]:
    fields = rng.sample(sorted(FIELDS), rng.choice((0, 1, 2, 3, 5)))
    demand = {field: rng.choice(FIELDS[field]) for field in fields}
    return {**demand, "gpus": rng.randint(1, 6), "cpus": rng.randint(1, 9)}


def random_manager(rng: random.Random, clock: Clock) -> GPUResourceManager:
    nodes = [
        Node(
            f"s{number}",
            number,
            {"cpus": rng.choice((8, 32))},
            tuple(
                Gpu(each, rng.choice(("A100", "V100")), memory_mib=rng.choice((16_000, 40_000)))
                for each in range(rng.choice((2, 4, 8)))
            ),
            address=f"10.0.0.{number + 1}",
            labels={"rack": f"r{number % 2}"},
        )
        for number in range(rng.randint(1, 4))
    ]
    rules = {
        "policy": rng.choice(sorted(POLICIES)),
        "order": rng.choice(sorted(ORDERS)) + rng.choice(("", BACKFILL_SUFFIX)),
    }
    store = MemoryStore(clock=clock)
    return GPUResourceManager(Settings(store="memory://"), store=store, inventory=nodes, cluster=rules)


class Walk:
    """Random commands to a manager, with a clock that they advance."""

    def __init__(self, rng: random.Random, manager: GPUResourceManager, clock: Clock) -> None:
        self.rng, self.manager, self.clock = rng, manager, clock
        self.commands: list[Callable[[], object]] = [
            *(self.submit, self.submit, self.submit, self.release, self.release, self.pass_time),
            *(self.preempt, self.drain, self.resume, self.renew, self.announce, self.window, self.teams),
        ]

    def step(self) -> None:
        with suppress(ResourceManagerError):  # a refusal is a step, too
            self.rng.choice(self.commands)()

    def name(self) -> str:
        return f"t{self.rng.randrange(20)}"

    def submit(self) -> None:
        self.manager.submit(self.name(), **random_demand(self.rng))

    def release(self) -> None:
        self.manager.release(self.name(), outcome=self.rng.choice(("SUCCESS", "FAILED", "")), job_end="ended")

    def pass_time(self) -> None:
        self.clock.now += self.rng.choice((0.5, 5, 30, 120, 1000))

    def preempt(self) -> None:
        self.manager.preempt(self.name())

    def drain(self) -> None:
        self.manager.drain(self.rng.choice(("s0", "s1")), self.rng.choice((None, 0)))

    def resume(self) -> None:
        self.manager.resume(self.rng.choice(("s0", "s1")))

    def renew(self) -> None:
        self.manager.renew(self.name())

    def announce(self) -> None:
        self.manager.announce(self.name(), 2, after=[self.name()], copies=self.rng.randint(1, 3))

    def window(self) -> None:
        begins, ends = (
            datetime.fromtimestamp(self.clock.now + self.rng.choice(after), UTC).isoformat()
            for after in ((-10, 100, 1000), (1500, 5000))
        )
        form = {"servers": ["s0"], "from": begins, "until": ends, "reason": "fans"}
        self.manager.add_maintenance(WindowForm.model_validate(form))

    def teams(self) -> None:
        rng = self.rng
        more: list[dict[str, Any]] = [{}, {"limit": 4}, {"max_runtime": "1h"}]
        form = {
            "teams": {name: {"guaranteed": rng.randint(0, 3), **rng.choice(more)} for name in "abc"},
            "preemption": rng.random() < 0.7,
            "preemption_delay": rng.choice(("0s", "10s")),
            "min_runtime": "0s",
        }
        self.manager.apply(ClusterForm.model_validate(form))


def decided(act: Callable[[], Any]) -> tuple[bool, str, list[tuple[str, list[int]]]]:
    """Return whether the answer is a grant, why it is none, and what it is on."""
    try:
        answer = act()
    except ResourceManagerError as error:
        return False, str(error), []
    if isinstance(answer, Refusal):
        return False, answer.detail.split("; would")[0], []
    if not answer.get("would_be_granted", True):
        return False, answer["reason"].split("; would")[0], []
    return True, "", [(member["server_name"], member["gpu_ids"]) for member in answer["members"]]


@pytest.mark.parametrize("seed", range(8, 16))
def test_an_explanation_is_what_the_request_then_gets(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    manager = random_manager(rng, clock)
    walk = Walk(rng, manager, clock)
    for step in range(80):
        walk.step()
        demand = random_demand(rng)
        explained = decided(partial(manager.explain, "next", **demand))
        waiting = [entry["task_id"] for entry in manager.queue(estimated=False)]
        answered = decided(partial(manager.try_allocate, "next", **demand))
        assert explained == answered, (step, demand, waiting)
        if answered[0]:
            manager.release("next", job_end="ended")
