"""Invariants of every policy on generated datasets, and their scores on the public ones."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resource_manager.scheduling import allocator
from simulator.edge.command import POLICIES
from simulator.edge.dataset import KINDS, METRIC_PERIOD_S, TIERS, Dataset
from simulator.edge.dataset_files import read_dataset
from simulator.edge.environment import Environment
from simulator.edge.published import PUBLISHED_SCORES, published_score
from simulator.edge.random_dataset import generate
from simulator.edge.scorer import Score, TaskRun, score_plan
from simulator.edge.timetable import arrays_of, devices_of, plan_timetable, search
from simulator.edge.transfers import transfer_s, upload_s
from simulator.edge.water_gate import plan_water_gate
from simulator.errors import SimulationError
from tests.simulator.edge.small import job, world

datasets = st.builds(
    generate,
    st.integers(0, 10_000),
    jobs=st.integers(1, 6),
    hosts=st.integers(1, 3),
    stations=st.integers(0, 3),
    ues=st.integers(0, 30),
    tasks_per_job=st.integers(1, 8),
)


class Watched(Environment):
    """Environment that checks the leases of every second before the clock advances."""

    def advance(self) -> None:
        allocator.check(self.cluster)
        for state in self.cluster.nodes:
            assert min(state.free.values()) >= 0, f"{state.name} is overcommitted at {self.now}"
        super().advance()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dataset=datasets, tiers=st.sampled_from(list(TIERS)))
def test_every_plan_is_valid_and_scored_as_planned(
    policy: str, dataset: Dataset, tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for module in ("timetable", "water_gate"):
            patch.setattr(f"simulator.edge.{module}.Environment", Watched)
        patch.setattr("simulator.edge.timetable.MAX_TRIALS", 3)
        world = POLICIES[policy](dataset, TIERS[tiers])
    score = score_plan(dataset, world.plan)
    assert score.end_s == world.end_s
    assert not score.failed
    assert (score.task_rate, score.job_rate) == (1, 1)
    assert {run.device.kind for run in score.runs} <= set(TIERS[tiers])
    assert_valid(dataset, score)
    if policy == "timetable":
        assert all(run.completed for run in score.runs), "no task is started where it would be killed"


def assert_valid(dataset: Dataset, score: Score) -> None:
    """Check that no executor runs two tasks at once, and that every completed run has its exact duration."""
    by_executor: dict[int, list[TaskRun]] = defaultdict(list)
    for run in score.runs:
        by_executor[run.executor_id].append(run)
    for runs in by_executor.values():
        runs.sort(key=lambda run: run.matched_s)
        assert all(a.end_s <= b.matched_s for a, b in itertools.pairwise(runs))
    completed = {run.task_id: run for run in score.runs if run.completed}
    for run in completed.values():
        task = dataset.tasks[run.task_id]
        assert run.matched_s >= dataset.jobs[task.job_id].arrival_s
        begin = run.matched_s
        for parent, size in task.parents:
            there = max(run.matched_s, completed[parent].end_s)
            took = transfer_s(dataset, kept_on(dataset, completed[parent]), run.device, there, size)
            assert took is not None
            begin = max(begin, there + took)
        end = begin + task.compute_s * run.device.compute_factor
        if run.device.kind == "UE":
            uploaded = upload_s(dataset, run.device, end, task.output_size)
            assert uploaded is not None
            end += uploaded[0]
            assert dataset.is_online(run.device, run.matched_s)
        assert run.end_s == end


def kept_on(dataset: Dataset, run: TaskRun):
    """Return the device with the output, derived from the run by the start of the upload."""
    if run.device.kind != "UE":
        return run.device
    task = dataset.tasks[run.task_id]
    for computed in range(run.end_s, run.matched_s, -1):
        uploaded = upload_s(dataset, run.device, computed, task.output_size)
        if uploaded is not None and computed + uploaded[0] == run.end_s:
            return uploaded[1]
    raise AssertionError("no upload ends when the task did")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_plan(policy: str) -> None:
    first, again = (POLICIES[policy](generate(7, jobs=4), seed=3).plan for _ in range(2))
    assert first == again


def test_more_trials_never_give_a_worse_plan() -> None:
    dataset = generate(5, jobs=12, ues=40)
    few, many = (
        score_plan(dataset, plan_timetable(dataset, tasks_placed=trials * len(dataset.tasks)).plan)
        for trials in (2, 20)
    )
    assert many.mean_jct_s <= few.mean_jct_s


def test_the_ends_of_many_late_jobs_sum_to_more_than_32_bits_hold() -> None:
    dataset = world(*[job(900_000, 1)] * 1_200, room=1_200)
    devices = devices_of(dataset, KINDS)

    def progress(done: int, total: int) -> None:
        assert done <= total

    timetable = search(dataset, devices, arrays_of(dataset, devices), 0, 1, progress)
    assert set(timetable.end.tolist()) == {900_001}


def test_a_plan_without_hosts_is_refused() -> None:
    for plan in POLICIES.values():
        with pytest.raises(SimulationError, match="a plan needs the cloud hosts, and kinds is"):
            plan(generate(1, jobs=1), ("BS", "UE"))


def test_a_task_too_large_for_every_host_is_refused(tables: Path) -> None:
    path = tables / "category_table.csv"
    path.write_text(path.read_text().replace("0,2,2,3", "0,9,2,3"))
    for plan in POLICIES.values():
        with pytest.raises(SimulationError, match="task 0 asks for 9 CPUs and 2 MiB, and no host has that"):
            plan(read_dataset(tables))


def test_devices_are_nodes_and_executors_leases(tables: Path) -> None:
    world = Environment(read_dataset(tables), KINDS)
    host, category = world.devices[0], world.dataset.categories[0]
    executor = world.add(category, host)
    assert world.node(host).free == {"cpus": 6, "memory_mib": 6}
    assert world.cluster.leases["executor-0"].placement.node == "Cloud-0"
    while world.now < METRIC_PERIOD_S // 2:
        world.advance()
    assert world.node(world.devices[3]).node.resources == {"cpus": 3, "memory_mib": 3}  # BS 0 from 600 on
    assert not world.node(world.devices[5]).is_open  # the user device is offline
    world.delete(executor)
    assert world.node(host).free == {"cpus": 8, "memory_mib": 8}
    assert not world.cluster.leases


PUBLIC = [
    "test0",
    *(pytest.param(f"test{number}", marks=pytest.mark.e2e) for number in range(1, 7)),
]
"""The public datasets; the larger ones take half a minute or more."""


@pytest.fixture(scope="module", params=PUBLIC)
def public(request: pytest.FixtureRequest, shared_data: Path) -> Dataset:
    """One of the public datasets, read once for all its tests."""
    return read_dataset(shared_data / "edge" / request.param)


WATER_GATE_SCORES = {
    "test0": (29254.09, 29314.42, 29369.29),
    "test1": (20503.54, 24272.55, 24812.54),
    "test2": (27482.47, 27658.01, 27782.75),
    "test3": (26400.36, 26449.21, 26641.61),
    "test4": (21467.42, 22155.23, 22958.66),
    "test5": (26061.75, 27959.39, 28410.73),
    "test6": (26165.05, 27134.89, 27734.39),
}
"""Public dataset -> the scores of this `water_gate`, by tiers."""


@pytest.mark.slow
def test_water_gate_reaches_its_scores(public: Dataset) -> None:
    scores = [score_plan(public, plan_water_gate(public, kinds).plan) for kinds in TIERS.values()]
    assert tuple(score.score for score in scores) == WATER_GATE_SCORES[public.name]
    assert all(score.job_rate == 1 for score in scores)


def test_water_gate_improves_with_every_tier_and_reaches_the_published_means() -> None:
    for host, station, ue in WATER_GATE_SCORES.values():
        assert host <= station <= ue
    for tiers, scores in zip(TIERS, zip(*WATER_GATE_SCORES.values(), strict=True), strict=True):
        assert sum(scores) >= sum(PUBLISHED_SCORES[tiers][:7])


@pytest.mark.slow
def test_timetable_beats_the_published_scores_with_a_quarter_of_its_default_effort(public: Dataset) -> None:
    score = score_plan(public, plan_timetable(public, tasks_placed=10_000).plan)
    assert (score.task_rate, score.job_rate) == (1, 1)
    published = published_score(public.name, "host+bs+ue")
    assert published is not None
    assert score.score > published + 200
