"""Every change that somebody asked for says who, and none that time or others brought."""

from __future__ import annotations

import asyncio
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager import AsyncGPUResourceManager, GPUResourceManager, MemoryStore, Settings
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import (
    InvalidRequestError,
    LeaseNotFoundError,
    NeverFitsError,
    NotPreemptibleError,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit.asking import MAX_BY, as_caller, asked_by, checked_by, this_user
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.storage.once import Once
from tests.builders import Clock, redefine

PEOPLE = ["ada", "airflow:prod/etl/train", "unix:bob@gpu-a", ""]
TASKS = [f"t{number}" for number in range(8)]
OF_A_TASK = {
    "submit": {"queued", "granted"},
    "allocate": {"granted"},
    "release": {"released", "queued", "granted"},
    "cancel": {"cancelled"},
    "renew": {"renewed"},
    "preempt": {"preempting"},
}
"""Kinds of changes that each step asks for, of the task that it names."""

OF_A_SERVER = {
    "drain": {"drained"},
    "resume": {"resumed"},
    "teams": {"teamschanged"},
    "maintenance": {"maintenancechanged"},
}


def step(manager: GPUResourceManager, rng: random.Random, kind: str, task: str) -> None:
    """Ask for one change, which may be refused."""
    if kind == "submit":
        if manager.status_of(task) is None:
            manager.submit(task, rng.randint(2, 8), ttl=rng.choice((5.0, 60.0)), team=rng.choice("ab"))
    elif kind == "allocate":
        if manager.status_of(task) is None:
            manager.allocate(task, rng.randint(2, 8), ttl=60.0)
    elif kind == "release":
        manager.release(task, outcome=rng.choice(("SUCCESS", "NOT_STARTED", "PREEMPTED")))
    elif kind == "cancel":
        manager.cancel(task)
    elif kind == "renew":
        manager.renew(task)
    elif kind == "preempt":
        manager.preempt(task)
    elif kind == "drain":
        manager.drain(rng.randrange(2))
    elif kind == "resume":
        manager.resume(rng.randrange(2))
    elif kind == "teams":
        rules = Teams((Team("a", rng.randint(0, 8)), Team("b", rng.randint(0, 8))), True, 0.0, 0.0)
        redefine(manager, teams=rules)
    elif kind == "maintenance":
        window = {"servers": [0], "from": "1970-01-01T00:05Z", "until": "1970-01-02T00:00Z", "preempt": True}
        if manager.maintenance():
            manager.remove_maintenance(manager.maintenance()[0]["id"])
        else:
            manager.add_maintenance(WindowForm.of(**window))


def who_asked(change: dict[str, Any], kind: str, task: str, person: str, arrived: int) -> str:
    """Return the name that a change must carry, by what the step was; requests to `arrived` came before."""
    if kind in OF_A_SERVER:
        return person if change["change"] in OF_A_SERVER[kind] else ""
    lease = change.get("lease", change).get("request", change).get("lease_id")
    is_taken_back = change["change"] == "preempting" and not change["preemptor"]
    if is_taken_back or (change["change"] == "granted" and change["lease"]["sequence"] <= arrived):
        return ""
    return person if lease == task and change["change"] in OF_A_TASK.get(kind, ()) else ""


@pytest.mark.thorough
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_in_a_random_walk_every_change_says_who_asked_for_it_and_no_other_does(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    manager = GPUResourceManager(
        Settings(store="memory://"), store=MemoryStore(clock=clock), inventory=default_inventory(2), by=""
    )
    for _ in range(60):
        kind = rng.choice([*OF_A_TASK, *OF_A_TASK, *OF_A_SERVER, "time"])
        task, person = rng.choice(TASKS), rng.choice(PEOPLE)
        clock.now += rng.choice((0.0, 1.0, 30.0))
        before = manager.get_resource_summary()["version"]
        arrived = manager.read(lambda cluster, now: cluster.sequence)
        with asked_by(person):
            with suppress(LeaseNotFoundError, NotPreemptibleError):
                step(manager, rng, kind, task)
            asked_until = manager.get_resource_summary()["version"]
            manager.expire_and_schedule()
        for change in manager.history(before):
            by = who_asked(change, kind, task, person, arrived) if change["version"] <= asked_until else ""
            assert change.get("by", "") == by, (kind, task, change)


def test_a_leader_that_commits_for_others_leaves_each_their_own_name() -> None:
    manager = GPUResourceManager.from_url("memory://")

    def ask(name: str) -> None:
        for number in range(10):
            with asked_by(name):
                manager.allocate(f"{name}-{number}", 2)
                manager.release(f"{name}-{number}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, [f"person{number}" for number in range(8)]))
    for change in manager.history():
        lease_id = change["lease"]["request"]["lease_id"] if "lease" in change else change["lease_id"]
        assert change["by"] == lease_id.partition("-")[0]


def test_tasks_of_one_event_loop_ask_in_their_own_names() -> None:
    async def ask(manager: AsyncGPUResourceManager, name: str) -> None:
        with asked_by(name):
            await manager.submit(name, 2)
            await asyncio.sleep(0)
            await manager.release(name)

    async def both() -> None:
        async with AsyncGPUResourceManager(plain) as manager:
            await asyncio.gather(*(ask(manager, name) for name in ("ada", "bob")))
            await manager.submit("nobody said who", 2)
            changes = [(change["change"], change["by"]) for change in await manager.history()]
            assert sorted(changes[:-1]) == [
                (change, name) for change in ("granted", "released") for name in ("ada", "bob")
            ]
            assert changes[-1] == ("granted", this_user())

    plain = GPUResourceManager.from_url("memory://")
    asyncio.run(both())


def test_a_manager_asks_as_the_user_of_its_process_unless_it_is_given_a_name() -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        manager.allocate("t", 2)
        assert re.fullmatch(r"unix:[^@]+@.+", manager.history()[0]["by"])
    with GPUResourceManager.from_url("memory://", by="nightly") as manager:
        manager.allocate("t", 2)
        with asked_by("ada"):
            manager.release("t")
        assert [change["by"] for change in manager.history()] == ["nightly", "ada"]


def test_an_empty_name_is_not_written() -> None:
    with GPUResourceManager.from_url("memory://", by="") as manager:
        manager.allocate("t", 2)
        assert "by" not in manager.history()[0]


def test_a_repeat_keeps_the_name_of_whoever_asked_first() -> None:
    manager = GPUResourceManager.from_url("memory://")
    for name in ("ada", "bob"):
        with asked_by(name):
            manager.submit("t", 2, once=Once("c", "k", "f"))
            manager.submit("u", 2)
    assert [change["by"] for change in manager.history()] == ["ada", "ada"]


def test_who_asks_learns_the_changes_that_were_made_and_not_those_that_failed() -> None:
    manager = GPUResourceManager.from_url("memory://")
    with asked_by("ada") as asking:
        manager.allocate("t", 2)
        manager.release("t")
        manager.release("t")
        with pytest.raises(NeverFitsError):
            manager.submit("u", 2, gpu_types=["H900"])
    assert [type(change).__name__ for change in asking.changes] == ["Granted", "Released"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\nb", "by has a control or an invisible character"),
        ("ada\u202e", "by has a control or an invisible character"),
        ("   ", "by has nothing but spaces"),
        ("x" * (MAX_BY + 1), f"by may have {MAX_BY} characters, got {MAX_BY + 1}"),
    ],
)
def test_a_name_that_cannot_be_shown_is_refused(name: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why), asked_by(name):
        pytest.fail("it asks")
    with pytest.raises(InvalidRequestError, match=why):
        GPUResourceManager.from_url("memory://", by=name)


def test_the_longest_ids_of_airflow_make_a_name() -> None:
    assert checked_by(f"airflow:{'i' * 40}/{'d' * 250}/{'t' * 250}")


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("ada", "ada"),
        ("unix:root@gpu-a", "user:unix:root@gpu-a"),
        ("agent:gpu-a", "user:agent:gpu-a"),
        ("airflow:prod/etl/train", "user:airflow:prod/etl/train"),
        ("user:unix:root@gpu-a", "user:user:unix:root@gpu-a"),
    ],
)
def test_who_logged_in_has_no_name_of_a_task_an_agent_or_a_machine(name: str, known_as: str) -> None:
    assert as_caller(name) == known_as


def test_what_time_allows_is_not_of_whoever_asks_for_nothing_new() -> None:
    clock = Clock()
    manager = GPUResourceManager(
        Settings(store="memory://"), store=MemoryStore(clock=clock), inventory=default_inventory(1)
    )
    redefine(manager, teams=Teams((Team("a", 8), Team("b", 0)), True, 0.0, 60.0))
    manager.submit("borrows", 8, team="b")
    manager.submit("waits", 8, team="a")
    before = manager.get_resource_summary()["version"]
    clock.now += 61.0
    with asked_by("ada"):
        manager.resume(0, 0)  # it is open
    assert manager.history(before) == []
    manager.expire_and_schedule()
    [change] = manager.history(before)
    assert (change["change"], change.get("by")) == ("preempting", None)
