"""Queue disciplines: order, backfill, and that no request starves."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import Announced, Cancelled, Change, Queued, Withdrawn
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Node, Request
from resource_manager.core.pending import PendingRequest
from resource_manager.errors import PolicyError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import (
    FIRST_QUEUE_GPU_S,
    ORDERS,
    PRIORITY_AGEING_S,
    STARVATION_LIMIT_S,
    QueueDiscipline,
    get_order,
)
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import node

NAMES = [name + suffix for name in ORDERS for suffix in ("", "+backfill")]


def ask(
    task_id: str,
    gpus: int,
    runtime_s: float | None = None,
    *,
    team: str = "",
    priority: int = 0,
    cpus: int = 1,
    deadline_at: float | None = None,
) -> Request:
    return Request(
        task_id,
        gpus,
        1000,
        {"cpus": cpus},
        team=team,
        priority=priority,
        expected_runtime_s=runtime_s,
        deadline_at=deadline_at,
    )


class Running:
    """Cluster that runs each granted request for its labelled or expected runtime."""

    def __init__(self, nodes: Iterable[Node], order: QueueDiscipline) -> None:
        self.state = ClusterState(nodes)
        self.order = order
        self.now = 0.0
        self.started: dict[str, float] = {}
        self.ends: list[tuple[float, int, str]] = []
        self._tickets = count()

    def submit(self, request: Request) -> None:
        self._apply(allocator.submit(self.state, request, SchedulingPass(first_fit, self.order, self.now)))

    def run_until(self, time: float) -> None:
        while self.ends and self.ends[0][0] <= time:
            self.now, _, task_id = heapq.heappop(self.ends)
            over = lease_steps.release(self.state, task_id, self.now)
            self._apply(
                allocator.with_dispatch(self.state, over, SchedulingPass(first_fit, self.order, self.now))
            )
        self.now = time

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            self.state.apply(change)
        for task_id, lease in self.state.leases.items():
            if task_id not in self.started:
                self.started[task_id] = self.now
                runtime = lease.request.labels.get("runtime_s") or lease.request.expected_runtime_s
                heapq.heappush(self.ends, (self.now + float(runtime or 100), next(self._tickets), task_id))


def served(
    order: QueueDiscipline, *requests: Request, now: float = 0.0, attained: Mapping[str, int] | None = None
) -> list[str]:
    cluster = ClusterState([node("a", 8, 64)])
    cluster.attained = attained or {}
    for request in requests:
        cluster.apply(Queued(request, 0.0, cluster.sequence + 1, 0.0))
    return [pending.lease_id for pending in order(cluster, now)]


def test_tiresias_puts_jobs_that_used_16_gpu_hours_behind_the_others() -> None:
    enough_ms = round(FIRST_QUEUE_GPU_S * 1000)
    used = {"a": enough_ms, "b": enough_ms - 1, "c": 2 * enough_ms}
    order, requests = get_order("tiresias"), [ask(name, 1) for name in "abcd"]
    assert served(order, *requests, attained=used) == ["b", "d", "a", "c"]
    assert served(order, *requests, attained=used, now=STARVATION_LIMIT_S + 1) == ["a", "b", "c", "d"]
    assert served(order, *requests) == ["a", "b", "c", "d"]  # nothing is known


def test_critical_path_counts_what_the_dag_has_after_a_request_as_time_that_it_waited() -> None:
    state = ClusterState([node("a", 0)])
    for sequence, task in enumerate(("alone", "short", "long/7", "weighty"), 1):
        request = ask(task, 1, 600.0, priority=task == "weighty")
        state.apply(Queued(request, 100.0 * sequence, sequence, 400.0))
    after = {"end": ("short", "middle"), "middle": ("long",), "x": ("y",), "y": ("x",)}
    for name, before in after.items():
        state.apply(Announced(ask(name, 1, 1000.0), 400.0, before))
    order = get_order("critical_path")
    named = [entry.lease_id for entry in order(state, 400.0)]
    assert named == ["weighty", "long/7", "short", "alone"], "a step of priority is worth an hour"
    state.apply(Withdrawn("end", 401.0))
    assert [entry.lease_id for entry in order(state, 401.0)] == ["weighty", "long/7", "alone", "short"]
    state.apply(Withdrawn("middle", 402.0))
    assert [entry.lease_id for entry in order(state, 402.0)] == ["weighty", "alone", "short", "long/7"]


def test_critical_path_shortens_a_dag_whose_long_branch_came_last() -> None:
    """On one GPU a run has a short task and one that four hours come after, queued behind it."""
    ends = {}
    for name in ("fifo", "critical_path"):
        running = Running([node("a", 1)], get_order(name))
        running.submit(ask("holder", 1, 60.0))
        for task, runtime_s in (("short", 3600.0), ("head", 3600.0)):
            running.submit(ask(task, 1, runtime_s))
        running.state.apply(Announced(ask("tail", 1, 4 * 3600.0), 0.0, ("head",)))
        running.run_until(9000.0)
        ends[name] = running.started["head"] + 5 * 3600.0
    assert ends["critical_path"] == ends["fifo"] - 3600.0


def test_deadline_puts_the_least_slack_first_and_what_cannot_meet_its_own_back_to_its_priority() -> None:
    order = get_order("deadline")
    requests = [
        ask("plain", 1),
        ask("weighty", 1, priority=2),
        ask("late", 1, 500.0, priority=1, deadline_at=400.0),
        ask("long", 1, 900.0, deadline_at=1000.0),
        ask("soon", 1, deadline_at=200.0),
    ]
    assert served(order, *requests) == ["long", "soon", "weighty", "late", "plain"]
    assert served(order, *requests, now=150.0) == ["soon", "weighty", "late", "plain", "long"]
    assert served(order, *requests, now=STARVATION_LIMIT_S + 1) == [
        "weighty",
        "late",
        "plain",
        "long",
        "soon",
    ]


def test_the_default_order_is_priority_then_arrival() -> None:
    order = get_order(ClusterSettings().order)
    assert order.backfill
    equal = [ask(name, 1) for name in "dacb"]
    assert served(order, *equal, now=10 * PRIORITY_AGEING_S) == ["d", "a", "c", "b"]
    assert served(order, *equal, ask("weighty", 1, priority=2)) == ["weighty", "d", "a", "c", "b"]


@settings(max_examples=200)
@given(
    moments=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    priority=st.sampled_from([0, 1, -7, 2**31 - 1]),
    now=st.floats(-1e6, 1e6),
)
def test_equal_priorities_keep_the_order_of_arrival_when_the_clock_jumps(
    moments: list[float], priority: int, now: float
) -> None:
    cluster = ClusterState([node("a", 8, 64)])
    for number, moment in enumerate(moments):
        cluster.apply(
            Queued(ask(f"equal{number}", 1, priority=priority), moment, cluster.sequence + 1, moment)
        )
        cluster.apply(
            Queued(ask(f"other{number}", 1, priority=number % 3 - 50), moment, cluster.sequence + 1, moment)
        )
    order = [pending.lease_id for pending in get_order("priority")(cluster, now)]
    assert [name for name in order if name < "other"] == [f"equal{i}" for i in range(len(moments))]


def test_a_clock_briefly_far_ahead_does_not_cost_a_request_its_position() -> None:
    cluster = ClusterState([node("a", 8, 64)])
    cluster.apply(Queued(ask("ahead", 1), 1e6, 1, 1e6))  # the clock was wrong, and was corrected afterwards
    cluster.apply(Queued(ask("urgent", 1, priority=5), 100.0, 2, 100.0))
    cluster.apply(Queued(ask("late", 1), 200.0, 3, 200.0))
    assert [pending.lease_id for pending in get_order("priority")(cluster, 300.0)] == [
        "urgent",
        "ahead",
        "late",
    ]


def test_fifo_orders_by_arrival() -> None:
    assert served(get_order("fifo"), ask("b", 1), ask("a", 1)) == ["b", "a"]


def test_priority_grows_with_time_in_the_queue() -> None:
    cluster = ClusterState([node("a", 8, 64)])
    cluster.apply(Queued(ask("old", 1), 0.0, 1, 0.0))
    cluster.apply(Queued(ask("urgent", 1, priority=2), PRIORITY_AGEING_S, 2, PRIORITY_AGEING_S))
    order = get_order("priority")
    assert [pending.lease_id for pending in order(cluster, PRIORITY_AGEING_S)] == ["urgent", "old"]
    cluster.apply(Queued(ask("late", 1, priority=2), 2.5 * PRIORITY_AGEING_S, 3, 2.5 * PRIORITY_AGEING_S))
    assert [w.lease_id for w in order(cluster, 2.5 * PRIORITY_AGEING_S)] == ["urgent", "old", "late"]


def test_srtf_orders_by_runtime_and_srsf_by_service() -> None:
    requests = (ask("wide", 8, 100), ask("long", 1, 300), ask("unknown", 1))
    assert served(get_order("srtf"), *requests) == ["wide", "long", "unknown"]
    assert served(get_order("srsf"), *requests) == ["long", "wide", "unknown"]


def test_fair_share_prefers_the_team_with_the_smaller_share() -> None:
    """Team a asks first and most, but each grant raises its share above that of b."""
    requests = [ask(f"a{i}", 2, team="a") for i in range(3)] + [ask(f"b{i}", 2, team="b") for i in range(2)]
    assert served(get_order("fair_share"), *requests) == ["a0", "b0", "a1", "b1", "a2"]


def test_fair_share_compares_dominant_resources() -> None:
    """a0 takes half of the CPUs, b0 a quarter of the GPUs: b is next until it has more than half."""
    requests = [ask("a0", 1, team="a", cpus=32), ask("a1", 1, team="a")]
    requests += [ask(f"b{i}", 2, team="b") for i in range(3)]
    assert served(get_order("fair_share"), *requests) == ["a0", "b0", "b1", "a1", "b2"]


def test_fair_share_fills_quotas_before_a_team_borrows() -> None:
    """b's quota is three quarters: b comes first up to it, before a may borrow beyond its own quarter."""
    requests = [ask(f"a{i}", 2, team="a") for i in range(3)] + [ask(f"b{i}", 2, team="b") for i in range(4)]
    order = get_order("fair_share", {"a": 0.25, "b": 0.75})
    assert served(order, *requests) == ["a0", "b0", "b1", "b2", "a1", "b3", "a2"]


def test_invented_teams_share_one_remainder() -> None:
    """Otherwise whoever names a new team for each task comes first with all of them."""
    requests = [ask(f"a{i}", 2, team="a") for i in range(3)]
    requests += [ask(f"e{i}", 2, team=f"invented-{i}") for i in range(3)]
    order = get_order("fair_share", {"a": 0.5})
    assert served(order, *requests) == ["a0", "e0", "a1", "e1", "a2", "e2"]


def test_an_unknown_order_is_refused_by_name() -> None:
    with pytest.raises(
        PolicyError,
        match="unknown queue order 'lifo'; known are critical_path, deadline, fair_share, fair_tree",
    ):
        get_order("lifo")


def test_backfill_starts_a_request_that_ends_before_the_reservation() -> None:
    """Four of eight GPUs are allocated to 100 s, when `all` starts: 60 s end before that, 200 s do not."""
    for name, starts in (("fifo", set()), ("fifo+backfill", {"short"})):
        cluster = Running([node("a", 8, 64)], get_order(name))
        cluster.submit(ask("running", 4, 100))
        cluster.submit(ask("all", 8, 100))
        cluster.submit(ask("long", 2, 200))
        cluster.submit(ask("short", 2, 60))
        assert set(cluster.started) - {"running"} == starts
        cluster.run_until(100)
        assert cluster.started["all"] == 100


def test_backfill_is_conservative() -> None:
    """`c` would delay not the head but the second in the queue: it stays pending although GPUs are idle."""
    cluster = Running([node("a", 4, 64), node("b", 4, 64)], get_order("fifo+backfill"))
    cluster.submit(ask("x", 4, 100))
    cluster.submit(ask("y", 2, 50))
    cluster.submit(ask("head", 4, 100))  # reserved on b at 50
    cluster.submit(ask("second", 4, 100))  # reserved on a at 100
    cluster.submit(ask("c", 2, 60))  # would occupy b beyond 50
    cluster.submit(ask("d", 2, 40))
    assert set(cluster.started) == {"x", "y", "d"}
    cluster.run_until(100)
    assert cluster.started["head"] == 50
    assert cluster.started["second"] == 100


def test_backfill_lets_no_request_overtake_an_unknown_runtime() -> None:
    cluster = Running([node("a", 8, 64)], get_order("fifo+backfill"))
    cluster.submit(ask("running", 4))
    cluster.submit(ask("all", 8, 100))
    cluster.submit(ask("short", 2, 1))
    assert set(cluster.started) == {"running"}


@pytest.mark.parametrize("name", NAMES)
def test_a_flood_starves_no_request(name: str) -> None:
    """Small, short, urgent requests of other teams keep coming; one request needs the whole server."""
    cluster = Running([node("a", 4, 64)], get_order(name))
    big = ask("big", 4, 10 * STARVATION_LIMIT_S, team="rich", priority=0)
    deadline = STARVATION_LIMIT_S + 10 * PRIORITY_AGEING_S
    step = 600.0
    for number in range(int(deadline / step)):
        cluster.run_until(number * step)
        cluster.submit(ask(f"small{number}", 2, 1.5 * step, team=f"poor{number % 7}", priority=5))
        if number == 1:
            cluster.submit(big)
        if "big" in cluster.started:
            break
    assert "big" in cluster.started


asked = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.one_of(st.none(), st.integers(1, 500)),
        st.integers(1, 500),
        st.sampled_from("abc"),
        st.integers(0, 3),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(script=asked)
def test_every_request_starts(name: str, script: list[tuple[int, int | None, int, str, int, int]]) -> None:
    """A request that fits an empty cluster starts, with any expected and any actual runtimes."""
    cluster = Running([node("a", 4, 64), node("b", 2, 64)], get_order(name))
    for number, (gpus, expected, actual, team, urgency, gap) in enumerate(script):
        cluster.run_until(cluster.now + gap)
        request = Request(
            f"t{number}",
            gpus,
            resources={"cpus": 1},
            team=team,
            priority=urgency,
            expected_runtime_s=expected,
            labels={"runtime_s": str(actual)},
        )
        cluster.submit(request)
        allocator.check(cluster.state)
    cluster.run_until(1e9)
    assert len(cluster.started) == len(script)
    assert not cluster.state.pending
    assert not cluster.state.leases


@settings(max_examples=60)
@given(script=asked)
def test_backfill_delays_no_earlier_request(
    script: list[tuple[int, int | None, int, str, int, int]],
) -> None:
    """With exact estimates, a request starts no later than without the requests behind it."""
    starts: dict[str, float] = {}
    for length in range(1, len(script) + 1):
        cluster = Running([node("a", 4, 64), node("b", 2, 64)], get_order("fifo+backfill"))
        for number, (gpus, _, runtime, _, _, _) in enumerate(script[:length]):
            cluster.submit(ask(f"t{number}", gpus, runtime))
        cluster.run_until(1e9)
        for task_id, start in starts.items():
            assert cluster.started[task_id] <= start
        starts = cluster.started


class TestOrdersThatAreKept:
    """The kept orders equal sorting anew, whatever came and went, also inside a trial."""

    @given(st.data())
    def test_equal_sorting_anew(self, data: st.DataObject) -> None:
        cluster = ClusterState([node("s", 8, 64)])
        now = 1_000.0
        for number in range(data.draw(st.integers(1, 12))):
            now += data.draw(st.sampled_from([0.0, 0.3, 5_000.0, -0.2, -7_000.0]))
            pending = sorted(cluster.pending)
            if bool(pending) and data.draw(st.booleans()):
                with cluster.trial():
                    cluster.apply(Cancelled(data.draw(st.sampled_from(pending)), now))
                cluster.apply(Cancelled(data.draw(st.sampled_from(pending)), now))
            else:
                request = Request(f"r{number}", gpus=1, priority=data.draw(st.integers(0, 2)))
                for change in allocator.enqueue(cluster, [request], now):
                    cluster.apply(change)
            arrived = sorted(cluster.pending.values(), key=lambda entry: entry.sequence)
            assert get_order("fifo")(cluster, now) == arrived

            def aged(entry: PendingRequest, arrived: list[PendingRequest] = arrived) -> float:
                since = min(later.queued_at for later in arrived[arrived.index(entry) :])
                return since / PRIORITY_AGEING_S - entry.request.priority

            assert get_order("priority")(cluster, now) == sorted(arrived, key=aged)

    def test_the_clock_of_a_server_may_be_estimated_differently(self) -> None:
        cluster = ClusterState([node("s", 8, 64)])
        for number, now in enumerate((10.0, 9.5, 8.0)):
            for change in allocator.enqueue(cluster, [Request(f"r{number}", gpus=1)], now):
                cluster.apply(change)
        assert [entry.queued_at for entry in cluster.pending.values()] == [10.0, 10.0, 8.0]
