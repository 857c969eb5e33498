"""Every grant and every preemption of a random history is decided again in its replay.

A real manager goes through everything that it can do, on a clock that stands still as often as not.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resource_manager import GPUResourceManager
from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Change,
    GpuCleaned,
    GpuClosed,
    Granted,
    JobPlaced,
    Outcome,
    Quarantined,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import IDLE
from resource_manager.core.models import Gpu, JobPlace, Lease, Node
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import by_arrival, get_order
from resource_manager.scheduling.queue.runtime_limits import preempted_at_limit
from resource_manager.settings import Settings
from resource_manager.storage.history_file import History, change_of, collect, snapshot_of, to_lines
from resource_manager.storage.memory import MemoryStore
from simulator.replay.agreement import differences
from simulator.replay.history import workload_of
from simulator.replay.job_runs import Record
from simulator.replay.metrics import summarise
from simulator.replay.replay import Replay
from tests.builders import Clock, redefine

POLICIES = ("first_fit", "best_fit", "least_loaded", "round_robin", "fgd")
ORDERS = ("fifo", "priority", "srtf", "fair_share", "fair_usage", "fair_tree", "tiresias", "critical_path")
RULES = (
    Teams(),
    Teams((Team("a", 6, weight=2.0), Team("b", 3, limit=8)), True, 0.0, 0.0),
    Teams((Team("a", 4), Team("b", 4, parent="a"), Team("c", 2)), True, 60.0, 30.0, half_life_s=600.0),
    Teams((Team("a", 5, max_runtime_s=900.0), Team("c", max_gpus_per_owner=4)), True, 10.0, 5.0),
    Teams((Team("a", 6), Team("b", limit=4))),
)
OUTCOMES = (*Outcome, "")
STEPS = {
    "submit": 30, "allocate": 6, "batch": 3, "release": 14, "fail": 4, "end": 12, "renew": 5, "cancel": 3,
    "preempt": 4,
    "members": 4, "remainder": 4, "teams": 2, "drain": 2, "resume": 3, "window": 2, "no_window": 1,
    "inventory": 1, "adopt": 1, "agent": 2, "close": 2, "open": 3, "clean": 5, "place": 1, "revoke": 1,
    "announce": 6, "withdraw": 1,
    "idle": 3, "look": 8, "tick": 16,
}  # fmt: skip


def inventory(*names: str, gpus: int = 4, cpus: int = 32) -> tuple[Node, ...]:
    return tuple(
        Node(
            name,
            ord(name) - ord("a"),
            {"cpus": cpus},
            tuple(Gpu(i, "A100" if name < "c" else "H100", uuid=f"GPU-{name}{i}") for i in range(gpus)),
            address=name,
            labels={"rack": "12"[name > "b"]},
        )
        for name in names
    )


class Step(NamedTuple):
    """One thing to do; the number decides to what."""

    kind: str
    seed: int


@dataclass(frozen=True)
class Course:
    """What a manager is set to, and what is done with it."""

    policy: str
    order: str
    states_runtimes: bool
    rules: Teams
    steps: list[Step]


@st.composite
def courses(draw: st.DrawFn, most: int = 80) -> Course:
    states_runtimes = draw(st.booleans())
    backfill = "+backfill" if draw(st.booleans()) else ""
    kinds = [kind for kind, weight in STEPS.items() for _ in range(weight)]
    step = st.builds(Step, st.sampled_from(kinds), st.integers(0, 10**6))
    return Course(
        draw(st.sampled_from(POLICIES)),
        draw(st.sampled_from(ORDERS)) + backfill,
        states_runtimes,
        draw(st.sampled_from((*RULES, RULES[1], RULES[1]))),
        draw(st.lists(step, min_size=20, max_size=most)),
    )


class Driver:
    """A manager on a clock of its own, and those who use it."""

    def __init__(self, course: Course) -> None:
        self.clock = Clock()
        self.course = course
        self.jobs = 0
        """Number of requests that were granted or queued for the first time."""
        store = MemoryStore(clock=self.clock)
        self.manager = GPUResourceManager(
            Settings(store="memory://"),
            store=store,
            cluster={"policy": course.policy, "order": course.order},
            inventory=inventory("a", "b", "c"),
        )

    def run(self) -> History:
        redefine(self.manager, teams=self.course.rules)
        for step in self.course.steps:
            draw = random.Random(step.seed)
            with suppress(ResourceManagerError):  # an operation that is refused leaves no trace
                getattr(self, f"do_{step.kind}")(draw)
            self.clock.now += draw.choice((0.0, 0.0, 0.5, 3.0))
        history = collect(self.manager)
        before, *changes = map(json.loads, to_lines(history))
        return History(snapshot_of(before), tuple(map(change_of, changes)))

    # ---- what is there ----

    @property
    def state(self) -> ClusterState:
        return self.manager.read(lambda cluster, now: cluster)

    def lease(self, draw: random.Random, among: Callable[[Lease], bool] = lambda lease: True) -> Lease:
        found = [lease for _, lease in sorted(self.state.leases.items()) if among(lease)]
        if not found:
            raise ResourceManagerError("there is none")
        return draw.choice(found)

    def demand(self, draw: random.Random) -> dict[str, Any]:
        nodes = draw.choice((1, 1, 1, 1, 2, 3))
        gpus = draw.choice((1, 1, 2, 2, 3, 4))
        known = self.course.states_runtimes
        values: dict[str, Any] = {
            "lease_id": f"s{draw.randrange(14)}",
            "gpus": gpus,
            "cpus": draw.choice((1, 4, 12)),
            "team": draw.choice("abcd"),
            "owner": draw.choice(("ada", "bob")),
            "priority": draw.choice((0, 0, 1, 5)),
            "preemptible": draw.random() < 0.85,
            "preempt_grace": draw.choice((5.0, 60.0)),
            "preemption_delay": draw.choice((None, None, 0.0, 45.0)),
            "ttl": draw.choice((20.0, 200.0, 5000.0, 5000.0)),
            "quarantine": draw.random() < 0.4,
            "expected_runtime": draw.choice((15.0, 90.0, 900.0)) if known else None,
            "nodes": nodes,
            "max_runtime": draw.choice((None, None, None, 90.0)),
            "requeue_after": draw.choice((None, None, None, 75.0)),
            "on_idle": draw.choice(("end", "requeue")),
        }
        if gpus == 1 and nodes == 1 and draw.random() < 0.5:
            values["gpu_milli"] = draw.choice((250, 500))
        if nodes > 1:
            values["spread"] = draw.choice(("servers", "pack"))
        if draw.random() < 0.1:
            values["gpu_types"] = ["H100"]
        return values

    @contextmanager
    def counting(self, *demands: dict[str, Any]) -> Iterator[None]:
        """Count those of the demands that are granted or queued, and were not before."""
        before = self.state.sequence
        yield
        leases, pending = self.state.leases, self.state.pending
        found = (leases.get(name) or pending.get(name) for name in {each["lease_id"] for each in demands})
        self.jobs += sum(each is not None and each.sequence > before for each in found)

    def commit(self, make: Callable[[ClusterState, float], Sequence[Change]]) -> None:
        self.manager.commit(lambda cluster, now: list(make(cluster, now)))

    def commit_for(self, lease: Lease, make: Callable[[float], Change]) -> None:
        """Commit a change of the lease, unless it ends in the same commit."""
        token = lease.fencing_token
        self.commit(
            lambda cluster, now: (
                [make(now)]
                if (held := cluster.leases.get(lease.lease_id)) and held.fencing_token == token
                else []
            )
        )

    # ---- requests ----

    def do_submit(self, draw: random.Random) -> None:
        demand = self.demand(draw)
        with self.counting(demand):
            self.manager.submit(**demand)

    def do_announce(self, draw: random.Random) -> None:
        after = [f"s{draw.randrange(14)}" for _ in range(draw.randrange(3))]
        self.manager.announce(**self.demand(draw), after=after)

    def do_withdraw(self, draw: random.Random) -> None:
        self.manager.withdraw([f"s{draw.randrange(14)}"])

    def do_allocate(self, draw: random.Random) -> None:
        demand = self.demand(draw)
        with self.counting(demand):
            self.manager.try_allocate(**demand)

    def do_batch(self, draw: random.Random) -> None:
        demands = [self.demand(draw) for _ in range(3)]
        with self.counting(*demands):
            self.manager.try_allocate_batch(demands)

    def do_cancel(self, draw: random.Random) -> None:
        if self.state.pending:
            self.manager.cancel(draw.choice(sorted(self.state.pending)))

    # ---- leases ----

    def do_release(self, draw: random.Random) -> None:
        lease = self.lease(draw)
        self.manager.release(lease.lease_id, outcome=draw.choice(OUTCOMES))

    def do_fail(self, draw: random.Random) -> None:
        """A job does not start on a server; the next try, or the same request, is to avoid it."""
        lease = self.lease(draw)
        node = draw.choice(lease.members).node
        outcome = draw.choice(("FAILED", "NOT_STARTED"))
        self.manager.release(lease.lease_id, outcome=outcome, failed_nodes=[node])

    def do_end(self, draw: random.Random) -> None:
        """A preempted job ends, nearly always because of that."""
        lease = self.lease(draw, lambda lease: bool(lease.preempted_by))
        self.manager.release(lease.lease_id, outcome=draw.choice(("PREEMPTED",) * 4 + ("SUCCESS",)))

    def do_renew(self, draw: random.Random) -> None:
        saved_at = draw.choice((None, self.clock.now - 1.0))
        self.manager.renew(self.lease(draw).lease_id, checkpoint_at=saved_at)

    def do_preempt(self, draw: random.Random) -> None:
        by = draw.choice(["", *sorted(self.state.pending)])
        self.manager.preempt(self.lease(draw).lease_id, preemptor=by)

    def do_idle(self, draw: random.Random) -> None:
        lease = self.lease(draw, lambda lease: not (lease.preempted_by or lease.quarantined))
        self.commit(
            lambda cluster, now: (
                preempted_at_limit(cluster.ledger, held, IDLE, now)
                if (held := cluster.leases.get(lease.lease_id)) and held.fencing_token == lease.fencing_token
                else []
            )
        )

    def do_members(self, draw: random.Random) -> None:
        lease = self.lease(draw, lambda lease: len(lease.members) > 1)
        ranks = draw.sample(range(len(lease.members)), draw.randint(1, len(lease.members)))
        self.manager.release_members(
            lease.lease_id, ranks, fencing_token=lease.fencing_token, outcome=draw.choice(OUTCOMES)
        )

    def do_remainder(self, draw: random.Random) -> None:
        if not self.state.remainders:
            return
        lease = self.state.remainders[draw.choice(sorted(self.state.remainders))]
        if draw.random() < 0.5:
            self.manager.release(lease.lease_id, fencing_token=lease.fencing_token)
        else:
            rank = draw.choice(lease.ranks)
            self.manager.release_members(lease.lease_id, [rank], fencing_token=lease.fencing_token)

    def do_place(self, draw: random.Random) -> None:
        lease = self.lease(draw)
        places = (JobPlace("ssh"),) * len(lease.members)
        self.commit_for(lease, lambda now: JobPlaced(lease.lease_id, lease.fencing_token, places, now))

    def do_revoke(self, draw: random.Random) -> None:
        lease = self.lease(draw)
        self.commit_for(
            lease, lambda now: Quarantined(lease.lease_id, lease.fencing_token, now, revoked=True)
        )

    # ---- rules, servers, GPUs ----

    def do_teams(self, draw: random.Random) -> None:
        redefine(self.manager, teams=draw.choice(RULES))

    def do_drain(self, draw: random.Random) -> None:
        self.manager.drain(draw.choice("abc"), failed=draw.random() < 0.5)

    def do_resume(self, draw: random.Random) -> None:
        self.manager.resume(draw.choice("abcd"))

    def do_window(self, draw: random.Random) -> None:
        begin = self.clock.now + draw.choice((0.0, 40.0, 400.0))
        self.manager.add_maintenance(
            WindowForm.of(
                servers=draw.sample("abc", draw.randint(1, 2)),
                **{"from": iso(begin), "until": iso(begin + draw.choice((50.0, 500.0)))},
                every=draw.choice((None, None, "week")),
                preempt=draw.random() < 0.7,
            )
        )

    def do_no_window(self, draw: random.Random) -> None:
        if self.state.windows:
            self.manager.remove_maintenance(draw.choice(self.state.windows).window_id)

    def do_inventory(self, draw: random.Random) -> None:
        nodes = draw.choice(
            (
                inventory("a", "b", "c"),
                inventory("a", "b", "c", "d"),
                inventory("a", "c"),
                inventory("a", "b", "c", cpus=40),
                (*inventory("a", "b"), *inventory("c", gpus=3)),
            )
        )
        redefine(self.manager, nodes=nodes)

    def do_adopt(self, draw: random.Random) -> None:
        name = draw.choice("abc")
        self.manager.adopt(name, inventory(name, gpus=draw.choice((3, 4, 5)))[0].gpus)

    def do_agent(self, draw: random.Random) -> None:
        name = draw.choice("abc")

        def decide(cluster: ClusterState, now: float) -> list[Change]:
            state = cluster.node(name)
            is_silent = not state.watched or state.silent is not None
            return [AgentSeen(name, now) if is_silent else AgentLost(name, now, now)]

        self.commit(decide)

    def do_close(self, draw: random.Random) -> None:
        name, gpu_id, stop = draw.choice("abc"), draw.randrange(4), draw.random() < 0.5
        self.commit(
            lambda cluster, now: [
                GpuClosed(cluster.node(name).name, gpu_id, f"GPU-{name}{gpu_id}", "xid 79", now, stop)
            ]
        )

    def do_open(self, draw: random.Random) -> None:
        closed = [(state.name, gpu_id) for state in self.state.nodes for gpu_id in sorted(state.closed_gpus)]
        name, gpu_id = draw.choice(closed or [("a", 0)])
        self.manager.resume(name, gpu_id)

    def do_clean(self, draw: random.Random) -> None:
        """An agent sees that all is clean on its server."""
        dirty = [state.name for state in self.state.nodes if state.cleaning]
        if dirty:
            name = draw.choice(dirty)
            self.commit(
                lambda cluster, now: [
                    GpuCleaned(entry.node, entry.gpu_id, entry.fencing_token, now)
                    for entry in cluster.node(name).cleaning.values()
                ]
            )

    # ---- time ----

    def do_look(self, draw: random.Random) -> None:
        self.manager.expire_and_schedule()

    def do_tick(self, draw: random.Random) -> None:
        self.clock.now += draw.choice((1.0, 10.0, 60.0, 600.0))


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def replayed(history: History, policy: str, order: str) -> tuple[Record, ClusterState]:
    replay = Replay(workload_of(history, "history"), get_policy(policy), get_order(order))
    return replay.run(), replay.cluster


def own_id(name: str) -> str:
    """Return the id that a job had in the recording."""
    return name.partition("#")[0]


def queue_of(cluster: ClusterState) -> list[str]:
    return [own_id(entry.lease_id) for entry in by_arrival(cluster, 0.0)]


def held_in(cluster: ClusterState) -> list[tuple[Any, ...]]:
    return sorted(
        (
            lease.fencing_token,
            own_id(lease.lease_id),
            lease.ranks,
            lease.quarantined,
            own_id(lease.preempted_by),
            lease.checkpoint_at,
        )
        for lease in (*cluster.leases.values(), *cluster.remainders.values())
    )


def check_live_decisions(course: Course) -> None:
    driver = Driver(course)
    history = driver.run()
    record, state = replayed(history, course.policy, course.order)
    assert differences(record) == []
    assert summarise(record)["jobs"] == len(record.job_runs) == driver.jobs
    leases = [part.lease for job_run in record.job_runs.values() for part in job_run.leases]
    assert len(leases) == sum(isinstance(change, Granted) for change in history.changes)
    assert queue_of(state) == queue_of(driver.state)
    assert held_in(state) == held_in(driver.state)


def check_other_decisions(course: Course, policy: str, order: str) -> None:
    driver = Driver(course)
    record, state = replayed(driver.run(), policy, order)
    allocator.check(state)
    assert summarise(record)["jobs"] == len(record.job_runs) == driver.jobs
    again = ClusterState.from_snapshot(record.workload.start)
    for change in record.changes:
        again.apply(change)
    assert (queue_of(again), held_in(again)) == (queue_of(state), held_in(state))
    for job_run in record.job_runs.values():
        if job_run.started_at is not None and job_run.job.runtime_s < math.inf:
            assert job_run.ended_at is not None


LIMITED_IN_A_WINDOW = [
    Step("batch", 874350),
    *[Step("submit", 0)] * 14,
    Step("submit", 660),
    Step("release", 0),
    Step("window", 1032),
    Step("tick", 52),
    Step("submit", 1),
]
"""A lease reaches its limit in a maintenance window that preempts: it is preempted once, by the limit."""


WINDOW_AFTER_TEAMS = [
    Step(*step)
    for step in (
        ("submit", 5523), ("submit", 285), ("submit", 786459), ("release", 0), ("submit", 79), ("fail", 1151),
        ("release", 0), ("release", 2349), ("members", 651), ("tick", 0), ("submit", 633183), ("submit", 0),
        ("teams", 162679), ("window", 1341),
    )
]  # fmt: skip
"""A window is added after the teams were changed, by a call of its own, which does not look at the queue."""


@settings(max_examples=150)
@given(courses())
@example(Course("first_fit", "fifo", False, RULES[1], LIMITED_IN_A_WINDOW))
@example(Course("first_fit", "fifo", False, RULES[1], WINDOW_AFTER_TEAMS))
def test_under_the_live_policy_and_order_every_decision_is_the_recorded_one(course: Course) -> None:
    """Each job is there once with all its leases, and what is left at the end is the live state."""
    check_live_decisions(course)


ENDS_FOR_NOBODY = [
    Step(*step)
    for step in (
        ("submit", 21556), ("submit", 25585), ("submit", 3228), ("release", 1155), ("submit", 105),
        ("submit", 1000000), ("idle", 28442), ("submit", 86), ("submit", 20202), ("close", 779320),
        ("agent", 91014), ("release", 655), ("tick", 9409), ("submit", 12040), ("idle", 92),
    )
]  # fmt: skip
"""A gang waits for a lease that its limit ends later: meanwhile nobody is preempted for it."""


@settings(max_examples=60)
@given(courses(), st.sampled_from(POLICIES), st.sampled_from(ORDERS))
@example(Course("best_fit", "priority+backfill", False, RULES[1], ENDS_FOR_NOBODY), "fgd", "srtf")
def test_under_another_policy_and_order_each_job_is_there_once_and_ends(
    course: Course, policy: str, order: str
) -> None:
    for other in (order, f"{order}+backfill"):
        check_other_decisions(course, policy, other)


@pytest.mark.e2e
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(courses(most=160))
def test_many_histories_are_replayed_exactly(course: Course) -> None:
    check_live_decisions(course)
