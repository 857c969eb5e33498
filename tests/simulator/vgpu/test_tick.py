"""Gates, guard, arbitration and progress, each calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.vgpu.scenario import Card, Guard, PoolNode, Scheduling
from simulator.vgpu.tick import (
    bandwidth_bucket,
    compute_throttle,
    guard_scale,
    memory_gate,
    sort_by_usage,
    work_done,
)
from tests.simulator.vgpu.small import UNLIMITED, profile, scenario, task, watch

HALF = profile("half", 50, 50, 50, work=100, deadline=4)  # ideal 2 s


@pytest.mark.parametrize(
    ("demand", "granted"), [(0.0, 0.0), (40.0, 40.0), (41.9, 41.9), (42.0, 42.0), (42.1, 40.0), (400.0, 40.0)]
)
def test_memory_gate_cuts_to_the_quota_above_the_threshold(demand: float, granted: float) -> None:
    assert memory_gate(demand, 40.0, 1.05) == granted


def test_bucket_starts_full_drains_and_then_grants_its_refill() -> None:
    # Quota 100, ticks of 0.1 s: 100 tokens at most, 10 come in a tick; a demand of 150 takes 15.
    tokens, granted = 100.0, []
    for _ in range(21):
        value, tokens = bandwidth_bucket(tokens, 150.0, 100.0, 1.0, 1.05, 0.1)
        granted.append(value)
    # The first refill is lost, because the bucket is full: 85 left. Each tick takes 5 more: 0 after the 18th.
    assert granted[:18] == [150.0] * 18
    assert granted[18:] == pytest.approx([100.0, 100.0, 100.0])
    assert tokens == pytest.approx(0.0)


def test_bucket_refills_to_its_size_and_no_further() -> None:
    assert bandwidth_bucket(0.0, 0.0, 100.0, 1.0, 1.05, 0.1)[1] == pytest.approx(10.0)
    assert bandwidth_bucket(95.0, 0.0, 100.0, 1.0, 1.05, 0.1)[1] == 100.0
    assert bandwidth_bucket(0.0, 0.0, 100.0, 0.5, 1.05, 0.1)[1] == pytest.approx(5.0)
    assert bandwidth_bucket(60.0, 0.0, 100.0, 0.5, 1.05, 0.1)[1] == 50.0


def test_an_empty_bucket_lets_a_demand_up_to_the_threshold_pass() -> None:
    assert bandwidth_bucket(0.0, 105.0, 100.0, 1.0, 1.05, 0.1) == (105.0, 0.0)
    granted, tokens = bandwidth_bucket(0.0, 105.1, 100.0, 1.0, 1.05, 0.1)
    assert granted == pytest.approx(100.0)
    assert tokens == 0.0


def test_throttle_cuts_to_quota_times_scale_up_to_the_ceiling() -> None:
    assert compute_throttle(105.0, 100.0, 1.0, 1.4, 1.05) == 105.0
    assert compute_throttle(105.1, 100.0, 1.0, 1.4, 1.05) == 100.0
    assert compute_throttle(150.0, 100.0, 1.1, 1.4, 1.05) == pytest.approx(110.0)
    assert compute_throttle(150.0, 100.0, 1.4, 1.2, 1.05) == pytest.approx(120.0)
    assert compute_throttle(108.0, 100.0, 1.1, 1.4, 1.05) == 108.0
    assert compute_throttle(150.0, 100.0, 1.0, 0.8, 1.05) == pytest.approx(80.0)


def test_guard_raises_by_a_step_and_decays_to_one() -> None:
    scale, raised = 1.0, []
    for _ in range(4):
        scale = guard_scale(scale, True, 0.05, 1.12, 0.03)
        raised.append(scale)
    assert raised == pytest.approx([1.05, 1.10, 1.12, 1.12])
    decayed = []
    for _ in range(5):
        scale = guard_scale(scale, False, 0.05, 1.12, 0.03)
        decayed.append(scale)
    assert decayed == pytest.approx([1.09, 1.06, 1.03, 1.0, 1.0])


def test_arbitration_sorts_by_usage_then_by_start() -> None:
    usage = [5.0, 9.0, 5.0, 7.0]
    order = [0] * 4
    sort_by_usage([0, 0, 1, 2, 3], 1, 5, usage, True, order)
    assert order == [1, 3, 0, 2]
    sort_by_usage([0, 0, 1, 2, 3], 1, 5, usage, False, order)
    assert order == [0, 2, 3, 1]


def test_progress_follows_the_least_satisfied_dimension() -> None:
    assert work_done(50, 20, 10, 50, 20, 10) == 50
    assert work_done(25, 20, 10, 50, 20, 10) == 25
    assert work_done(50, 20, 4, 50, 20, 10) == 20
    assert work_done(50, 5, 4, 50, 20, 10) == 12.5


def test_an_undisturbed_task_takes_its_ideal_time() -> None:
    run, seen = watch(scenario(HALF), task(HALF))
    outcome = run.outcomes[0]
    assert (outcome.state, outcome.start_s, outcome.end_s) == ("completed", 0.0, 2.0)
    assert outcome.interference_ratio == 1.0
    assert outcome.slo_met
    assert len(seen) == 200
    assert seen[-1].progress == pytest.approx(100.0)
    use = run.utilisation["n"]["compute"]  # 50 of 100 for 2 of 10 s
    assert (use.mean, use.std, use.peak) == pytest.approx((0.1, 0.2, 0.5))


def test_arbitration_serves_the_heavy_first_and_cuts_the_rest() -> None:
    """Two tasks fit by quota; the spiking one demands 90, so the other gets 10 of its 50."""
    other = profile("other", 45, 45, 45, work=450, deadline=4)
    run, seen = watch(scenario(HALF, other), task(HALF), task(other, spike=1.0))
    first = [each for each in seen if each.tick == 0]
    assert {each.task_id: each.allowed[0] for each in first} == {"half@0": 50, "other@0": 90}
    assert {each.task_id: each.granted for each in first} == {
        "half@0": (10.0, 10.0, 10.0),
        "other@0": (90.0, 90.0, 90.0),
    }
    assert [(outcome.state, outcome.end_s) for outcome in run.outcomes] == [
        ("completed", 6.0),  # 10 TFLOPS for 5 s, then 50 for 1 s
        ("completed", 5.0),
    ]
    _, seen = watch(scenario(HALF, other, arbitration="light_first"), task(HALF), task(other, spike=1.0))
    assert {each.task_id: each.granted[0] for each in seen if each.tick == 0} == {
        "half@0": 50.0,
        "other@0": 50.0,
    }


def test_gates_cut_the_spiking_task_to_its_quota_so_the_other_is_undisturbed() -> None:
    other = profile("other", 45, 45, 45, work=450, deadline=20)
    gated = replace(UNLIMITED, memory_gate=True, bandwidth_gate=True, compute_gate=True)
    run, seen = watch(scenario(HALF, other, sandbox=gated), task(HALF), task(other, spike=1.0))
    assert all(each.granted == (50.0, 50.0, 50.0) for each in seen if each.task_id == "half@0")
    spiking = [each for each in seen if each.task_id == "other@0"]
    # The bucket starts with 45, loses 0.9 per tick and regains 0.45, except in the first tick: 99 ticks.
    assert spiking[0].allowed == (45.0, 45.0, 90.0)
    assert spiking[98].allowed == pytest.approx((45.0, 45.0, 90.0))
    assert spiking[99].allowed == pytest.approx((45.0, 45.0, 45.0))
    assert min(each.tokens for each in spiking) >= 0
    assert run.outcomes[0].interference_ratio == 1.0
    events = run.outcomes[1].limiter_events
    assert events["memory"] == events["compute"] == len(spiking) == 1000
    assert events["bandwidth"] == pytest.approx(901, abs=1)  # rounding may cut the 99th tick slightly


@pytest.mark.parametrize(("gate", "at"), [("compute_gate", 0), ("memory_gate", 1), ("bandwidth_gate", 2)])
def test_a_disabled_gate_does_nothing(gate: str, at: int) -> None:
    gates = {"memory_gate": True, "bandwidth_gate": True, "compute_gate": True, gate: False}
    small = profile("small", 10, 10, 10, work=1000, deadline=50)
    refill = 0.0 if gate == "bandwidth_gate" else 1.0
    sandbox = replace(UNLIMITED, bandwidth_refill=refill, **gates)
    _, seen = watch(scenario(small, sandbox=sandbox), task(small, spike=1.0))
    assert all(each.allowed[at] == 20.0 for each in seen)
    assert [value for i, value in enumerate(seen[-1].allowed) if i != at] == pytest.approx([10.0, 10.0])


def test_guard_raises_the_scale_when_the_deadline_is_near() -> None:
    """Deadline 5 s: pressure from 4.5 s on (tick 450), a step every 10 ticks, up to 1.12."""
    slow = profile("slow", 50, 5, 5, work=300, deadline=5)
    guarded = scenario(
        slow,
        sandbox=replace(UNLIMITED, compute_gate=True),
        guard=Guard(True, adjust_interval_ticks=10, boost_step=0.05, max_boost=1.12, decay=0.5),
    )
    run, seen = watch(guarded, task(slow, spike=0.5))
    scales = [each.scale for each in seen]
    assert scales[449] == 1.0
    assert scales[450] == scales[459] == pytest.approx(1.05)
    assert scales[460] == pytest.approx(1.10)
    assert scales[470] == scales[-1] == pytest.approx(1.12)
    assert seen[449].granted[0] == 50.0
    assert seen[465].granted[0] == pytest.approx(55.0)
    # 300 TFLOP: 225 in 4.5 s, 5.25 and 5.5 in two steps of 0.1 s, 64.25 at 56 TFLOPS: 115 ticks.
    assert run.outcomes[0].end_s == pytest.approx(4.5 + 0.2 + 1.15)
    unguarded = replace(guarded, guard=Guard(False))
    assert watch(unguarded, task(slow, spike=0.5))[0].outcomes[0].end_s == pytest.approx(6.0)


def test_pressure_begins_50_ms_before_a_short_deadline() -> None:
    """A tenth of 0.2 s would be 20 ms, too short for a step."""
    brief = profile("brief", 50, 5, 5, work=30, deadline=0.2)
    guard = Guard(True, adjust_interval_ticks=1, boost_step=0.05, max_boost=1.1, decay=0.0)
    guarded = scenario(brief, sandbox=replace(UNLIMITED, compute_gate=True), guard=guard)
    _, seen = watch(guarded, task(brief, spike=0.5))
    assert [each.scale for each in seen][14:17] == pytest.approx([1.0, 1.05, 1.1])


def test_a_task_is_dropped_past_one_and_a_half_deadlines() -> None:
    late = profile("late", 50, 5, 5, work=1000, deadline=2)
    run, seen = watch(scenario(late), task(late))
    outcome = run.outcomes[0]
    assert (outcome.state, outcome.slo_met) == ("overtime", False)
    assert outcome.end_s == pytest.approx(3.01)  # the first tick that ends past 3 s
    assert outcome.interference_ratio == pytest.approx(3.01 / 20)
    assert len(seen) == 301


def test_a_deadline_may_be_arbitrarily_far_away() -> None:
    steady = profile("steady", 50, 50, 50, work=600, deadline=1e300)
    [outcome] = watch(scenario(steady), task(steady))[0].outcomes
    assert (outcome.state, outcome.end_s) == ("unfinished", 10.0)
    assert watch(scenario(steady), task(steady), use_numba=True)[0].outcomes == (outcome,)


def test_pending_tasks_start_at_the_first_pass_after_capacity_is_free() -> None:
    big = profile("big", 60, 60, 60, work=60, deadline=1.2)
    where = scenario(big, scheduling=Scheduling(interval_ticks=8, oversubscription=1.0))
    run, _ = watch(where, task(big, 0.0), task(big, 0.5))
    first, second = run.outcomes
    assert (first.start_s, first.end_s) == (0.0, 1.0)
    assert second.start_s == 1.04  # released after tick 99, passes at multiples of 8
    assert second.slowdown == pytest.approx(2.04 - 0.5)
    assert second.interference_ratio == pytest.approx(1.0)
    assert second.slo_met  # 1 s from its start, though 1.54 s from its arrival
    eager = replace(where, scheduling=replace(where.scheduling, retry_every_tick=True))
    assert watch(eager, task(big, 0.0), task(big, 0.5))[0].outcomes[1].start_s == 1.0


def test_without_fallback_a_grant_that_changes_the_best_vendor_takes_effect_at_the_next_pass() -> None:
    """Vendor x has more free, but no node with 60; after 50 of it are allocated, y is the best vendor."""
    either = replace(profile("either", 60, 60, 60, work=60, deadline=4), vendors=("x", "y"))
    small = profile("small", 50, 50, 50, work=50, deadline=4)
    where = scenario(
        either,
        small,
        cards={"half": Card("x", 50, 50, 50), "card": Card("y", 80, 80, 80)},
        nodes=(PoolNode("x1", "half", 1), PoolNode("x2", "half", 1), PoolNode("y1", "card", 1)),
        scheduling=Scheduling(interval_ticks=4, oversubscription=1.0, vendor_fallback=False),
    )
    run, _ = watch(where, task(either), task(small))
    assert [(each.node, each.start_s) for each in run.outcomes] == [("y1", 0.04), ("x1", 0.0)]


@pytest.mark.parametrize(("admission", "start_s"), [("quota", 1.0), ("usage", 0.51), ("max", 1.0)])
def test_ledger_counts_quota_or_usage(admission: str, start_s: float) -> None:
    """The first task is allocated 60 by quota and uses 30: only with usage a second 60 is admitted."""
    lean = profile("lean", 30, 30, 30, work=30, deadline=4)
    scheduling = Scheduling(interval_ticks=1, oversubscription=2.0, admission=admission)  # type: ignore[arg-type]
    run, _ = watch(scenario(lean, scheduling=scheduling), task(lean, 0.0), task(lean, 0.505))
    assert run.outcomes[1].start_s == start_s


@pytest.mark.parametrize(("admission", "start_s"), [("quota", 0.5), ("usage", 5.0), ("max", 5.0)])
def test_usage_and_max_allocate_a_spike_above_the_quota(admission: str, start_s: float) -> None:
    """The spiking task uses 80 of 100 against a quota of 40, until it is done after 5 s."""
    spiky = profile("spiky", 40, 40, 40, work=400, deadline=4)
    calm = profile("calm", 30, 30, 30, work=30, deadline=4)
    scheduling = Scheduling(interval_ticks=1, oversubscription=1.0, admission=admission)  # type: ignore[arg-type]
    where = scenario(spiky, calm, scheduling=scheduling)
    run, _ = watch(where, task(spiky, 0.0, spike=1.0), task(calm, 0.5))
    assert run.outcomes[1].start_s == start_s
