"""Each rule of `water_gate` alone, on datasets so small that the plan can be calculated by hand."""

from __future__ import annotations

import pytest

from simulator.edge.dataset import Dataset, JobGraph, Task
from simulator.edge.plan import Plan
from simulator.edge.water_gate import plan_water_gate
from tests.simulator.edge.small import LARGE, PREPARE_S, job, world


def matches(plan: Plan) -> list[tuple[int, int]]:
    """Return (second, task) of every match, in order."""
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


def test_running_tasks_are_not_part_of_the_critical_path() -> None:
    """While the 100 s of job 0 run, its other task of 5 s goes before the 50 s of a later job."""
    plan = plan_water_gate(world(job(0, 100, 5), job(0, 20), job(10, 50), room=2)).plan
    assert order(plan) == [2, 0, 1, 3]


def test_the_task_with_most_children_goes_first_then_the_longest() -> None:
    """Task 0 of 9 s has a child, tasks 2 and 3 have none."""
    dataset = world(job(0, 9, 1, chain=True), job(0, 8, 12))
    jobs = {0: JobGraph(0, 0, (0, 1, 2, 3))}
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
def test_a_task_waits_for_an_executor_that_is_free_soon(busy_s: int, executors: int) -> None:
    """It is busy from 3 on; a task that arrives at 6 waits if it is free within 3 s of preparation plus 5."""
    plan = plan_water_gate(world(job(0, busy_s), job(6, 10), room=2)).plan
    assert made(plan) == executors
    assert matches(plan)[1][0] == (3 + busy_s if executors == 1 else 6 + PREPARE_S)


def test_spare_executors_are_deleted_the_oldest_first() -> None:
    """Three categories, capacity for two executors: the third replaces the first, not the second."""
    plan = plan_water_gate(world(job(0, 5), job(1, 5), job(20, 5), room=2, categories=(0, 1, 2))).plan
    deletes = [executor_id for step in plan.values() for executor_id in step.deletes]
    assert deletes == [0]
    assert order(plan) == [0, 1, 2]


def test_an_executor_is_kept_for_the_task_it_was_reserved_for() -> None:
    """It is prepared for the task of 40 s; a shorter task arrives when it is ready, and waits."""
    plan = plan_water_gate(world(job(0, 40), job(3, 10))).plan
    assert matches(plan) == [(3, 0), (43, 1)]


def test_a_host_that_failed_to_place_a_task_creates_no_executor_in_that_second() -> None:
    """Keep free capacity for the large task at the front of the order.

    One executor is busy, one is spare, and one more fits. The large task fits only after both are deleted;
    until then the last task gets no executor, although it would fit.
    """
    jobs = (job(0, 60), job(0, 5), job(20, 4), job(20, 10))
    plan = plan_water_gate(world(*jobs, room=3, categories=(0, 2, LARGE, 1))).plan
    assert matches(plan)[-2:] == [(66, 2), (73, 3)]


@pytest.mark.parametrize(("ahead_s", "kinds"), [(29, {"Cloud"}), (30, {"Cloud", "BS"})])
def test_a_station_takes_a_task_only_if_it_ends_before_the_host_reaches_it(
    ahead_s: int, kinds: set[str]
) -> None:
    """10 s are 30 s on a station; the host has `ahead_s` of work before, in tasks shorter than 10 s."""
    ahead = job(0, *[9] * (ahead_s // 9), ahead_s % 9)
    assert kinds_used(plan_water_gate(world(ahead, job(0, 10), stations=1)).plan) == kinds


def test_the_gate_counts_the_work_of_the_jobs_between() -> None:
    """The levels are 20 and 38: 27 s are too long for the first job behind, 30 s are not for the second."""
    dataset = world(job(0, 5, 5, 5, 5), job(0, 9, 9), job(0, 10), stations=1)
    plan = plan_water_gate(dataset).plan
    on_station = {add.executor_id for step in plan.values() for add in step.adds if add.device.kind == "BS"}
    tasks = {m.task_id for step in plan.values() for m in step.matches if m.executor_id in on_station}
    assert tasks == {6}


@pytest.mark.parametrize(("ahead", "kinds"), [(5, set()), (6, {"UE"})])
def test_the_gate_counts_download_and_upload_of_a_user_device(ahead: int, kinds: set[str]) -> None:
    """10 s are 50 s there, plus 10 s each to download and upload 100 units: 70 s against 65 or 78."""
    dataset = world(job(0, *[13] * ahead), job(0, 10, 5, chain=True, data=100), stations=1, ues=1)
    used = kinds_used(plan_water_gate(dataset, ("Cloud", "UE")).plan)
    assert used - {"Cloud"} == kinds
