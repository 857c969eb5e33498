"""Each rule of `water_gate` by itself, on worlds so small that the plan can be told beforehand."""

from __future__ import annotations

import pytest

from simulator.edge.dataset import Dataset, Job, Task
from simulator.edge.plan import Plan
from simulator.edge.water_gate import plan_water_gate

from .small import LARGE, PREPARE_S, job, world


def matches(plan: Plan) -> list[tuple[int, int]]:
    """(second, task), in order."""
    return [(at, match.task_id) for at, step in sorted(plan.items()) for match in step.matches]


def order(plan: Plan) -> list[int]:
    return [task_id for _, task_id in matches(plan)]


def kinds_used(plan: Plan) -> set[str]:
    return {add.device.kind for step in plan.values() for add in step.adds}


def made(plan: Plan) -> int:
    return sum(len(step.adds) for step in plan.values())


def test_the_shortest_critical_path_goes_first() -> None:
    plan = plan_water_gate(world(job(0, 40), job(0, 10))).plan
    assert matches(plan) == [(3, 1), (13, 0)]


def test_what_runs_is_no_part_of_the_critical_path() -> None:
    """While 100 s of job 0 run, its other task of 5 s goes before the 50 s of a job that came later."""
    plan = plan_water_gate(world(job(0, 100, 5), job(0, 20), job(10, 50), room=2)).plan
    assert order(plan) == [2, 0, 1, 3]


def test_the_task_with_most_children_goes_first_then_the_longest() -> None:
    """Task 0 of 9 s has a child, tasks 2 and 3 have none."""
    dataset = world(job(0, 9, 1, chain=True), job(0, 8, 12))
    jobs = {0: Job(0, 0, (0, 1, 2, 3))}
    tasks = {
        task_id: Task(task_id, 0, 0, task.parents, task.children, task.compute_s)
        for task_id, task in dataset.tasks.items()
    }
    together = Dataset(
        "made",
        dataset.categories,
        jobs,
        tasks,
        dataset.devices,
        *(dataset.cpus,) * 2,
        dataset.ue_rate,
        dataset.ue_bs,
    )
    assert order(plan_water_gate(together).plan)[:2] == [0, 3]


@pytest.mark.parametrize(("busy_s", "executors"), [(11, 1), (12, 2)])
def test_an_executor_that_is_free_soon_is_waited_for(busy_s: int, executors: int) -> None:
    """Busy from 3 on; who comes at 6 waits for it if it is free within the 3 s of preparing and 5 more."""
    plan = plan_water_gate(world(job(0, busy_s), job(6, 10), room=2)).plan
    assert made(plan) == executors
    assert matches(plan)[1][0] == (3 + busy_s if executors == 1 else 6 + PREPARE_S)


def test_spare_executors_give_way_the_oldest_first() -> None:
    """Three categories, room for two: the third takes the place of the first, not of the second."""
    plan = plan_water_gate(world(job(0, 5), job(1, 5), job(20, 5), room=2, categories=(0, 1, 2))).plan
    deletes = [executor_id for step in plan.values() for executor_id in step.deletes]
    assert deletes == [0]
    assert order(plan) == [0, 1, 2]


def test_an_executor_is_kept_for_the_task_it_was_reserved_for() -> None:
    """Prepared for the task of 40 s; a shorter one comes in the second in which it is ready, and waits."""
    plan = plan_water_gate(world(job(0, 40), job(3, 10))).plan
    assert matches(plan) == [(3, 0), (43, 1)]


def test_a_host_that_spilled_creates_nothing_more_in_that_second() -> None:
    """One executor is busy, one spare, and there is room for one. The large task, whose turn it is, fits
    only when both are gone; until then no room is taken from it, though the last task would fit."""
    jobs = (job(0, 60), job(0, 5), job(20, 4), job(20, 10))
    plan = plan_water_gate(world(*jobs, room=3, categories=(0, 2, LARGE, 1))).plan
    assert matches(plan)[-2:] == [(66, 2), (73, 3)]


@pytest.mark.parametrize(("ahead_s", "kinds"), [(29, {"Cloud"}), (30, {"Cloud", "BS"})])
def test_a_station_takes_only_what_it_ends_before_the_host_gets_to_it(ahead_s: int, kinds: set[str]) -> None:
    """10 s are 30 on a station; the host has so much work ahead, in tasks shorter than those 10 s."""
    ahead = job(0, *[9] * (ahead_s // 9), ahead_s % 9)
    assert kinds_used(plan_water_gate(world(ahead, job(0, 10), stations=1)).plan) == kinds


def test_the_work_of_the_jobs_between_counts_too() -> None:
    """Levels 20 and 38: 27 s are too many for the first job behind, 30 s not for the second."""
    dataset = world(job(0, 5, 5, 5, 5), job(0, 9, 9), job(0, 10), stations=1)
    plan = plan_water_gate(dataset).plan
    on_station = {add.executor_id for step in plan.values() for add in step.adds if add.device.kind == "BS"}
    tasks = {m.task_id for step in plan.values() for m in step.matches if m.executor_id in on_station}
    assert tasks == {6}


@pytest.mark.parametrize(("ahead", "kinds"), [(5, set()), (6, {"UE"})])
def test_a_user_device_has_to_move_the_data_twice(ahead: int, kinds: set[str]) -> None:
    """10 s are 50 there, and 100 units at 10 a second take 10 s down and 10 up: 70; ahead are 65 or 78."""
    dataset = world(job(0, *[13] * ahead), job(0, 10, 5, chain=True, data=100), stations=1, ues=1)
    used = kinds_used(plan_water_gate(dataset, ("Cloud", "UE")).plan)
    assert used - {"Cloud"} == kinds
