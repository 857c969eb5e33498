"""Invariants of every run: capacity, tokens, progress, leases, and equal results for equal seeds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.scheduling import allocator
from simulator.vgpu.pool import Ledger, slices_needed
from simulator.vgpu.results import SandboxDecision, ScenarioRun
from simulator.vgpu.scenario import Card, Scenario, load_scenario, scenario_names
from simulator.vgpu.simulation import Simulation, simulate
from simulator.vgpu.tasks import demand_series, generate
from tests.simulator.vgpu.small import profile, scenario, task

SLACK = 1e-9


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a built-in scenario, short and overloaded, with random settings."""
    changes = {
        "tasks": draw(st.integers(0, 40)),
        "duration_s": draw(st.sampled_from([4.0, 12.0])),
        "delta_t_s": draw(st.sampled_from([0.01, 0.02, 0.04])),
        "arrival": draw(st.sampled_from(["poisson", "burst", "poisson_burst", "wave"])),
        "arbitration": draw(st.sampled_from(["heavy_first", "light_first"])),
        "progress": draw(st.sampled_from(["compute", "bottleneck"])),
        "scheduling.admission": draw(st.sampled_from(["quota", "usage", "max"])),
        "scheduling.vendor_fallback": draw(st.booleans()),
        "scheduling.retry_every_tick": draw(st.booleans()),
        "sandbox.bandwidth_gate": draw(st.booleans()),
        "sandbox.bandwidth_refill": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "sandbox.compute_gate": draw(st.booleans()),
        "sandbox.compute_ceiling": draw(st.sampled_from([0.8, 1.0, 1.4])),
        "guard.enabled": draw(st.booleans()),
    }
    return hasty(load_scenario(draw(st.sampled_from(scenario_names())), changes))


def hasty(slow: Scenario) -> Scenario:
    """Return the scenario with a tenth of work and deadlines, so that tasks end within a few seconds."""
    return replace(
        slow,
        profiles=tuple(
            replace(each, workload_tflop=each.workload_tflop / 10, deadline_s=each.deadline_s / 10)
            for each in slow.profiles
        ),
    )


@settings(max_examples=40)
@given(where=scenarios(), seed=st.integers(0, 2**31))
def test_every_tick_keeps_the_invariants(where: Scenario, seed: int) -> None:
    granted: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    progress: dict[str, float] = defaultdict(float)

    def check(seen: SandboxDecision) -> None:
        total = granted[seen.tick, seen.node]
        for i in range(3):
            assert 0 <= seen.granted[i] <= seen.allowed[i] <= seen.demand[i] + SLACK
            total[i] += seen.granted[i]
        assert seen.tokens >= 0
        assert 1.0 <= seen.scale <= where.guard.max_boost
        assert seen.progress >= progress[seen.task_id]
        progress[seen.task_id] = seen.progress

    run = simulate(where, seed, observers=[check], use_numba=False)
    capacities = {
        state.name: [state.node.resources[name] for name in ("compute_tflops", "memory_gb", "bandwidth_gbps")]
        for state in Ledger(where).cluster.nodes
    }
    for (_, node), total in granted.items():
        for used, capacity in zip(total, capacities[node], strict=True):
            assert used <= capacity * (1 + SLACK)
    for dimensions in run.utilisation.values():
        assert all(0 <= use.mean <= use.peak <= 1 + SLACK for use in dimensions.values())
    assert [outcome.task_id for outcome in run.outcomes] == [task.task_id for task in run.tasks]
    assert simulate(where, seed, use_numba=False) == run  # unobserved, in long spans of ticks


@settings(max_examples=40)
@given(where=scenarios(), seed=st.integers(0, 2**31))
def test_leases_match_running_tasks_after_every_span(where: Scenario, seed: int) -> None:
    tasks = generate(where.profiles, where.tasks, where.duration_s, where.arrival, seed)
    simulation = Simulation(where, tasks, False, [])
    advance = simulation.advance

    def checked(*arguments: object) -> int:
        allocator.check(simulation.ledger.cluster)
        running = sum(simulation.state.running)
        assert running == len(simulation.ledger.cluster.leases)
        if where.scheduling.partition == "node":
            assert all(count <= 1 for count in simulation.state.running)
        return advance(*arguments)  # type: ignore[arg-type]

    simulation.advance = checked
    simulation.run()


@pytest.mark.parametrize("name", scenario_names())
def test_compiled_equals_interpreted_to_the_bit(name: str) -> None:
    where = hasty(load_scenario(name, {"duration_s": 40, "tasks": 120, "arrival": "poisson_burst"}))
    assert simulate(where, 11, use_numba=True) == simulate(where, 11, use_numba=False)


@settings(max_examples=25)
@given(where=scenarios(), seed=st.integers(0, 2**31))
def test_compiled_equals_interpreted_with_any_settings(where: Scenario, seed: int) -> None:
    assert repr(simulate(where, seed, use_numba=True)) == repr(simulate(where, seed, use_numba=False))


def test_runs_are_equal_for_equal_seeds_only() -> None:
    where = hasty(load_scenario("A3", {"duration_s": 20, "tasks": 30}))
    assert simulate(where, 1, use_numba=False) == simulate(where, 1, use_numba=False)
    assert simulate(where, 1, use_numba=False) != simulate(where, 2, use_numba=False)


def mean_ir(run: ScenarioRun) -> float:
    """Return the mean IR of completed tasks; the tasks cut off by the end of the run are random."""
    return mean(each.interference_ratio or 0 for each in run.outcomes if each.state == "completed")


def test_the_length_of_a_tick_has_little_effect_on_mean_ir() -> None:
    """Halving it moves mean IR by less than 0.5 %, doubling it by less than 2 %, in every seed."""
    for seed in (1, 2, 3):
        changes = {"tasks": 100, "duration_s": 160}
        half, whole, double = (
            mean_ir(simulate(load_scenario("A3", {**changes, "delta_t_s": delta_t}), seed))
            for delta_t in (0.005, 0.01, 0.02)
        )
        assert half == pytest.approx(whole, rel=0.005)
        assert double == pytest.approx(whole, rel=0.02)


def test_spikes_are_on_a_grid_independent_of_the_tick() -> None:
    heavy = next(
        each
        for each in generate(load_scenario("A3").profiles, 5, 100, "poisson", 3)
        if each.spike_probability > 0.1
    )
    fine = demand_series(heavy, 200, 4000, 0.005)
    grid = demand_series(heavy, 100, 2000, 0.01)
    coarse = demand_series(heavy, 50, 1000, 0.02)
    assert coarse == pytest.approx(grid.reshape(3, 1000, 2).mean(axis=2))
    assert fine[:, ::2] == pytest.approx(grid)
    assert fine.mean() == pytest.approx(grid.mean(), rel=1e-3)
    # A longer view of the same task begins with the shorter one.
    assert (demand_series(heavy, 100, 3000, 0.01)[:, :2000] == grid).all()


def test_the_mean_demand_equals_the_drawn_one() -> None:
    heavy = next(
        each
        for each in generate(load_scenario("A3").profiles, 5, 100, "poisson", 3)
        if each.spike_probability > 0.1
    )
    whole_periods = round(10 * heavy.period_s / 0.01)
    series = demand_series(heavy, 0, whole_periods, 0.01)
    for i, demand in enumerate(heavy.profile.demand):
        expected = demand * (1 + heavy.spike_probability * heavy.spike_amplitude)
        assert series[i].mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("arrival", "window", "share"),
    [
        ("burst", (0.0, 0.1), 0.6),
        ("poisson_burst", (0.45, 0.55), 0.7 * 0.1 + 0.3),
        ("poisson", (0.2, 0.3), 0.1),
    ],
)
def test_arrival_modes_have_the_expected_density(
    arrival: str, window: tuple[float, float], share: float
) -> None:
    profiles = tuple(each for each in load_scenario("A1").profiles if each.window is None)
    tasks = generate(profiles, 4000, 100.0, arrival, 1)
    inside = sum(window[0] <= each.arrival_s / 100 < window[1] for each in tasks)
    assert inside / 4000 == pytest.approx(share, abs=0.03)
    assert all(0 <= each.arrival_s <= 100 for each in tasks)
    assert all(first.arrival_s <= second.arrival_s for first, second in pairwise(tasks))


def test_waves_are_dense_at_both_ends() -> None:
    profiles = tuple(each for each in load_scenario("A1").profiles if each.window is None)
    tasks = generate(profiles, 4000, 100.0, "wave", 1)
    # (1 - cos 2 pi u) / 2 < 0.1 for u < 0.1024 or u > 0.8976
    assert sum(each.arrival_s < 10 for each in tasks) / 4000 == pytest.approx(0.205, abs=0.03)
    assert sum(each.arrival_s > 90 for each in tasks) / 4000 == pytest.approx(0.205, abs=0.03)


def test_tasks_with_a_window_arrive_in_it() -> None:
    tasks = generate(load_scenario("A1").profiles, 200, 320.0, "poisson_burst", 9)
    heavy = [each for each in tasks if each.profile.name == "llm-heavy"]
    assert len(heavy) == 40
    assert all(0.33 * 320 <= each.arrival_s <= 0.37 * 320 for each in heavy)


def test_a_spike_adds_to_the_oscillation() -> None:
    """At the maximum of a sine of amplitude 0.5, with a spike of 1: 1 + 0.5 + 1 times the mean."""
    kind = profile("kind", 10, 20, 30, work=100, deadline=10)
    crest = replace(task(kind, spike=1.0), amplitudes=(0.5, 0.5, 0.5), period_s=1e6, phase=0.25)
    assert demand_series(crest, 0, 1, 0.01)[:, 0] == pytest.approx([25.0, 50.0, 75.0])


@pytest.mark.parametrize(
    ("demand", "slices"),
    [((30, 1, 1), 3), ((1, 30, 1), 3), ((1, 1, 200 / 7), 2), ((100, 1, 1), 7), ((101, 1, 1), 8)],
)
def test_slices_are_rounded_up_in_the_most_demanding_dimension(
    demand: tuple[float, float, float], slices: int
) -> None:
    """A card has seven slices, each a seventh of 100 TFLOPS, 100 GB and 100 GB/s."""
    assert slices_needed(demand, Card("x", 100, 100, 100, slices=7)) == slices


def test_slices_are_a_hard_limit_and_fill_a_card() -> None:
    """An A100 cut in 7: llm-heavy (210, 48, 1100) needs 5 slices, preprocess 3: 5 + 3 > 7."""
    where = load_scenario("A2-MIG", {"scheduling.interval_ticks": 1})
    names = ("llm-heavy", "preprocess-pipeline", "multimodal-online")
    kinds = {each.name: each for each in where.profiles if each.name in names}
    where = replace(where, nodes=(where.nodes[1],), profiles=tuple(kinds.values()), duration_s=4.0)
    heavy, small, middle = (kinds[name] for name in names)
    seen: list[SandboxDecision] = []
    tasks = [task(heavy, 0.0, spike=1.0), task(small, 0.1), task(middle, 0.2)]
    simulate(where, 0, tasks=tasks, observers=[seen.append], use_numba=False)
    assert {each.task_id for each in seen} == {"llm-heavy@0"}
    first = seen[0]
    assert first.quota == pytest.approx((312 * 5 / 7, 80 * 5 / 7, 2039 * 5 / 7))
    assert first.granted == pytest.approx(first.quota)
    seen.clear()
    tasks = [task(small, 0.0), task(middle, 0.1)]  # 3 + 4 slices
    simulate(where, 0, tasks=tasks, observers=[seen.append], use_numba=False)
    assert {each.task_id for each in seen} == {"preprocess-pipeline@0", "multimodal-online@0.1"}


def test_with_a_node_per_task_the_other_tasks_stay_pending() -> None:
    kind = load_scenario("A1").profiles[0]
    where = scenario(replace(kind, vendors=("x",), compute_tflops=10, memory_gb=10, bandwidth_gbps=10))
    where = replace(where, scheduling=replace(where.scheduling, partition="node"))
    small = where.profiles[0]
    run = simulate(where, 0, tasks=[task(small, 0.0), task(small, 1.0)], use_numba=False)
    assert [each.state for each in run.outcomes] == ["unfinished", "never_started"]


def test_that_a_task_has_its_node_alone_changes_no_score() -> None:
    """Of both vendors: 90/776 + 30/184 + 480/5167 for nvidia is less than 90/714 + 30/172.8 + 480/3840."""
    where = load_scenario("A2")
    ledger = Ledger(where)
    kinds = {each.name: each for each in where.profiles}
    leases = [ledger.admit(name, kinds[name], 0.0) for name in ("llm-batch", "preprocess-pipeline")]
    assert [lease and lease.placement.node for lease in leases] == ["nv-node-1", "nv-node-2"]


def test_a_run_without_tasks_is_valid() -> None:
    run = simulate(load_scenario("A3", {"tasks": 0, "duration_s": 1}), 0, use_numba=False)
    assert run.outcomes == ()
    assert run.utilisation["nv-node-1"]["compute"].peak == 0
