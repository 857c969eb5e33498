"""The contract that every store fulfils."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest

from resource_manager.core.attained_service import MAX_JOBS
from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Cancelled,
    Change,
    ClusterSettingsChanged,
    DeadlineRisk,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    Granted,
    InventoryChanged,
    JobPlaced,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
    TeamsChanged,
    Withdrawn,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.inventory import Adoption
from resource_manager.core.models import JobPlace, Lease, Placement, Request, Spread
from resource_manager.core.runtimes import KEPT_RUNTIMES, MAX_CLASSES
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import (
    IdempotencyKeyError,
    LockedError,
    RepeatedError,
    StaleStateError,
    StateClosedError,
    StateLostError,
    StateUnconfirmedError,
)
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.accounting.decayed_use import uses_after
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import MemoryStore, Store
from resource_manager.storage.base import NO_SUSPENSION
from resource_manager.storage.clock import ClockJump, Reading
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.locks import Lock
from resource_manager.storage.once import Once, References
from resource_manager.storage.reports import Sighting
from tests.eventually import wait_for
from tests.forked import in_child
from tests.storage.conftest import STORES, OpenStore, TakeDump
from tests.storage.walk import Walk, add, first_state, granted, servers, started

IN_ONE_PROCESS = {"memory", "fakeredis", "variable", "airflow"}
"""Stores whose state a forked child would have of its own, and Airflow, which does not expect one."""


def fresh(store: Store) -> Snapshot:
    cluster = store.refresh(None)
    assert cluster is not None
    allocator.check(cluster)
    return normal(cluster.snapshot())


def normal(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with leases and queue sorted; a store need not keep their order."""
    return replace(
        snapshot,
        leases=tuple(sorted(snapshot.leases, key=lambda lease: lease.fencing_token)),
        remainders=tuple(sorted(snapshot.remainders, key=lambda lease: lease.fencing_token)),
        pending=tuple(sorted(snapshot.pending, key=lambda pending: pending.sequence)),
    )


def check_clock(store: Store) -> None:
    """Assert that the last answer, though a refusal, left the store's clock as it is."""
    assert abs(store.now() - time.time()) < 60
    assert store.clock is None or store.clock.jump is None


def commit(
    store: Store,
    cluster: ClusterState,
    decide: Callable[[float], list[Change]],
    lock: Lock | None = None,
    once: References = (),
) -> None:
    """Decide, commit and apply; repeat if a busy machine took too long in between."""
    while True:
        now = store.now()
        changes = decide(now)
        uses = uses_after(cluster, changes)
        try:
            store.commit(cluster.version, changes, now=now, lock=lock, once=once, uses=uses)
        except StaleStateError as error:
            if error.actual != cluster.version:
                raise
        else:
            break
    for change in changes:
        cluster.apply(change)
    store.tidy_up(cluster)


def commit_all(store: Store, cluster: ClusterState, *changes: Change) -> None:
    commit(store, cluster, lambda now: list(changes))


def test_an_empty_store_has_no_state(open_client: OpenStore) -> None:
    store = open_client()
    assert store.refresh(None) is None
    assert store.history() == []


def test_only_the_first_state_is_written(open_client: OpenStore) -> None:
    store = open_client()
    assert store.initialise(first_state(4))
    assert not open_client().initialise(first_state(2))
    assert len(fresh(store).nodes) == 4


def test_a_commit_reaches_other_replicas(open_client: OpenStore) -> None:
    writer, reader = open_client(), open_client()
    mine = started(writer)
    theirs = reader.refresh(None)
    assert theirs is not None
    assert reader.refresh(theirs) is theirs, "nothing changed"
    change = granted(mine, "a", writer.now())
    writer.commit(mine.version, [change], now=writer.now())
    assert mine.version == 0, "commit does not change the caller's replica"
    mine.apply(change)
    theirs = reader.refresh(theirs)
    assert theirs is not None
    assert theirs.snapshot() == mine.snapshot()
    assert reader.refresh(theirs) is theirs, "nothing changed"


@pytest.mark.parametrize("number", [2, 9, pytest.param(3000, marks=pytest.mark.thorough)])
def test_a_commit_of_many_changes_is_whole_and_so_is_its_refusal(open_client: OpenStore, number: int) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    keys = [(Once("ada", f"k{place}", "f"), str(place)) for place in range(min(number, 9))]
    for name in ("first", "second"):
        before, last = mine.version, mine.sequence

        def queued(now: float, name: str = name, last: int = last) -> list[Change]:
            return [Queued(Request(f"{name}-{i}", 1), now, last + i, now) for i in range(1, number + 1)]

        commit(store, mine, queued, once=keys if name == "first" else ())
        assert mine.version == before + number
        assert fresh(other) == mine.snapshot()
        with pytest.raises(StaleStateError):
            other.commit(mine.version - 1, queued(other.now()), now=other.now())
        assert fresh(other) == mine.snapshot()
    assert [store.recall(once) for once, _ in keys] == [reference for _, reference in keys]


def test_a_stale_commit_writes_nothing(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    theirs = other.refresh(None)
    assert theirs is not None
    store.commit(0, [granted(mine, "a", store.now())], now=store.now())
    with pytest.raises(StaleStateError) as caught:
        other.commit(0, [granted(theirs, "b", other.now())], now=other.now())
    check_clock(other)
    assert (caught.value.expected, caught.value.actual) == (0, 1)
    for change in caught.value.missed:
        theirs.apply(change)
    assert theirs.version == 1
    assert theirs.snapshot() == fresh(other)
    assert [lease.lease_id for lease in fresh(other).leases] == ["a"]


def test_a_commit_to_an_empty_store_is_stale(open_client: OpenStore) -> None:
    store = open_client()
    with pytest.raises(StaleStateError) as caught:
        store.commit(0, [], now=store.now())
    assert caught.value.actual is None
    assert isinstance(store, MemoryStore) or "write the first" in str(caught.value)
    check_clock(store)
    assert store.refresh(None) is None


def test_a_conflict_on_the_inventory_is_a_stale_state(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    store.commit(0, [granted(mine, "a", store.now())], now=store.now())
    with pytest.raises(StaleStateError) as caught:
        store.commit(0, [InventoryChanged((), store.now())], now=store.now())
    assert (caught.value.expected, caught.value.actual) == (0, 1)
    assert len(fresh(store).nodes) == 4


def test_nodes_that_left_while_closed_come_back_closed(open_client: OpenStore) -> None:
    store = open_client()
    nodes = tuple(
        replace(node, gpus=tuple(replace(gpu, uuid=f"GPU-{node.name}-{gpu.gpu_id}") for gpu in node.gpus))
        for node in servers()
    )
    store.initialise(replace(first_state(), nodes=nodes))
    drained = [Drained(node.name, store.now(), "fans") for node in nodes[1:]]
    closed = [GpuClosed(nodes[1].name, i, nodes[1].gpus[i].uuid, "xid 79", store.now()) for i in (0, 1)]
    changed = replace(nodes[1], gpus=(replace(nodes[1].gpus[0], uuid="GPU-new"), *nodes[1].gpus[1:]))
    steps: list[list[Change]] = [
        [*drained, *closed],
        [InventoryChanged(nodes[:1], store.now())],
        [InventoryChanged((nodes[0], changed, *nodes[2:]), store.now())],
    ]
    version = 0
    for changes in steps:
        store.commit(version, changes, now=store.now())
        version += len(changes)
        state = fresh(open_client())
        assert state.drained == tuple(drained)
        gone = len(state.nodes) == 1
        assert state.closed_gpus == tuple(closed if gone or changes is steps[0] else closed[1:])
    assert fresh(open_client()).nodes[1] == changed, "its GPU 0 is another one now"


def test_a_drained_node_that_left_with_its_last_lease_comes_back_drained(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    lease = granted(mine, "a", store.now(), gpus=8)
    name, nodes = lease.lease.members[0].node, mine.snapshot().nodes
    drained = Drained(name, store.now(), "fans")
    steps: list[Change] = [
        lease,
        drained,
        InventoryChanged(nodes[1:], store.now()),
        Released("a", 1, store.now()),
        InventoryChanged(nodes, store.now()),
    ]
    for version, change in enumerate(steps):
        store.commit(version, [change], now=store.now())
        mine.apply(change)
        assert fresh(open_client()) == normal(mine.snapshot())
    assert mine.by_name[name].drained == drained


def test_a_server_that_left_in_the_same_commit_as_its_last_lease_is_not_cleaned_when_it_comes_back(
    open_client: OpenStore,
) -> None:
    store = open_client()
    mine = started(store)
    lease = Lease(Request("t", 1), (Placement("gpu-server-3", (0,)),), 1, 1.0, 10.0)
    commit_all(store, mine, AgentSeen("gpu-server-3", 1.0), Granted(lease, 1.0))
    commit_all(store, mine, InventoryChanged(servers(3), 2.0))
    commit_all(store, mine, Expired("t", 1, 20.0), InventoryChanged(servers(4), 20.0))
    assert fresh(open_client()) == normal(mine.snapshot())
    assert mine.snapshot().cleaning == ()


def test_a_server_that_left_leaves_its_last_port_to_none_of_its_name(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    first, second, *_ = nodes = mine.snapshot().nodes
    members = (Placement(first.name, (0,), port=29500), Placement(second.name, (0,)))
    steps: list[Change] = [
        Granted(Lease(Request("gang", 1, nodes=2), members, 1, store.now(), 1e12), store.now()),
        Released("gang", 1, store.now()),
        InventoryChanged(nodes[1:], store.now()),
        InventoryChanged(nodes, store.now()),
    ]
    ports = []
    for version, change in enumerate(steps):
        store.commit(version, [change], now=store.now())
        mine.apply(change)
        assert fresh(open_client()) == normal(mine.snapshot())
        ports.append(dict(mine.snapshot().last_ports))
    assert ports == [{first.name: 29500}, {first.name: 29500}, {}, {}]


def test_nothing_is_announced_any_more_of_what_waits_or_is_withdrawn(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    steps: list[Change] = [
        *(Announced(Request(name, 1), store.now()) for name in ("i:d/r/map", "i:d/r/one", "i:d/r/later")),
        Queued(Request("i:d/r/map/7", 1), 0, 1, store.now()),
        Queued(Request("i:d/r/one", 1), 0, 2, store.now()),
        Announced(Request("i:d/r/branch", 1), store.now()),
        Withdrawn("i:d/r/branch", store.now(), "the run has ended"),
        DeadlineRisk("i:d/r/one", store.now(), 1e12),
        DeadlineRisk("i:d/r/one", store.now(), None),
    ]
    for version, change in enumerate(steps):
        store.commit(version, [change], now=store.now())
        mine.apply(change)
        assert fresh(open_client()) == normal(mine.snapshot())
    assert (list(mine.announced), mine.at_risk) == (["i:d/r/later"], {})


def test_settings_and_adoptions_are_of_the_state(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    settings = ClusterSettings("fgd", order="fifo", max_gpus=4, prices={"A100": 2.5})
    first, *others = mine.snapshot().nodes
    adopted = replace(first, gpus=first.gpus[:7])
    steps: list[Change] = [
        ClusterSettingsChanged(settings, store.now()),
        InventoryChanged((adopted, *others), 7.0, adopted=first.name),
        InventoryChanged(tuple(others), 8.0),
        InventoryChanged((adopted, *others), 9.0),
    ]
    for version, change in enumerate(steps):
        store.commit(version, [change], now=store.now())
        state = fresh(open_client())
        assert state.settings == settings
        assert state.adoptions == ((Adoption(first.name, adopted.gpus, 7.0),) if version else ())
    store.commit(4, [InventoryChanged((first, *others), 10.0)], now=store.now())
    assert fresh(open_client()).adoptions == (), "its GPUs are those of another word now"


@pytest.mark.parametrize("end", [Released, Expired])
def test_a_new_lease_of_a_task_keeps_nothing_of_its_earlier_leases(
    open_client: OpenStore, end: type[Released | Expired]
) -> None:
    store = open_client()
    mine = started(store)
    now = store.now()
    lives: list[list[Change]] = [[Renewed("t", 1, now, now + 900)], [Quarantined("t", 2, now)], []]
    for life in lives:
        lease = granted(mine, "t", now)
        number = lease.lease.fencing_token
        for change in (lease, *life):
            store.commit(mine.version, [change], now=store.now())
            mine.apply(change)
        assert fresh(open_client()).leases == tuple(mine.leases.values())
        ended = end("t", number, now)
        store.commit(mine.version, [ended], now=store.now())
        mine.apply(ended)
    assert fresh(open_client()).leases == ()


def test_a_quarantined_lease_that_is_renewed_is_active_again(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    now = store.now()
    granting = granted(mine, "t", now)
    changes: list[Change] = [granting, Quarantined("t", 1, now), Renewed("t", 1, now, now + 900)]
    for version, change in enumerate(changes):
        store.commit(version, [change], now=store.now())
        (lease,) = fresh(open_client()).leases
        assert lease.quarantined == isinstance(change, Quarantined)
    assert lease.expires_at == now + 900


def test_the_places_of_jobs_and_a_revocation_are_read_back(open_client: OpenStore) -> None:
    """Also by a replica that is read anew, after a renewal, and by what is left of a gang."""
    store = open_client()
    mine = started(store)
    members = (Placement("gpu-server-0", (2,)), Placement("gpu-server-1", (0,)))
    places = (JobPlace("ssh", "a:22", "gpu", "m1 a", "/jobs", "f00d", "u"), JobPlace("ssh", machine="m2 b"))
    steps: list[Change] = [
        Granted(Lease(Request("gang", 1, nodes=2), members, 1, 1.0, 1e12), 1.0),
        JobPlaced("gang", 1, places, 2.0),
        Renewed("gang", 1, 3.0, 1e12),
        Quarantined("gang", 1, 4.0, revoked=True),
        MembersReleased("gang", 1, (0,), 5.0),
        Granted(Lease(Request("gang", 1), (Placement("gpu-server-0", (3,)),), 2, 6.0, 1e12), 6.0),
    ]
    for step in steps:
        commit_all(store, mine, step)
        assert fresh(open_client()) == normal(mine.snapshot())
    (rest,) = mine.remainders.values()
    assert (rest.places, rest.revoked) == (places[1:], False)
    assert mine.leases["gang"].places == ()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 6))]
)
def test_every_kind_of_change_is_read_back_as_written(open_client: OpenStore, seed: int) -> None:
    writer, reader = open_client(), open_client()
    mine, walk = started(writer), Walk(seed)
    theirs: ClusterState | None = None
    for step in range(120):
        commit(writer, mine, lambda now: walk.changes(mine, now))
        if step % 7 == 0:
            theirs = reader.refresh(theirs)
    theirs = reader.refresh(theirs)
    assert theirs is not None
    assert normal(theirs.snapshot()) == normal(mine.snapshot()) == fresh(open_client())


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 6))]
)
def test_every_kind_of_change_after_a_restore_is_read_back_as_written(
    open_client: OpenStore, seed: int
) -> None:
    """Also of leases, remainders and preemptions that the restored state had."""
    store, walk = open_client(), Walk(seed)
    mine = started(store)
    members = tuple(Placement(f"gpu-server-{i}", (7,)) for i in range(3))
    commit_all(store, mine, *(AgentSeen(member.node, 1.0) for member in members))
    commit_all(store, mine, Granted(Lease(Request("gang", 1, nodes=3), members, 1, 1.0, 1e12), 1.0))
    commit_all(store, mine, MembersReleased("gang", 1, (0,), 2.0))
    for _ in range(6):
        restored(store, replace(mine.snapshot(), version=mine.version + 100), mine.version)
        mine = whole(store)
        for step in range(20):
            commit(store, mine, partial(walk.changes, mine))
            if step % 7 == 0:
                assert fresh(open_client()) == normal(mine.snapshot())
    assert fresh(open_client()) == normal(mine.snapshot())


def test_the_history_applied_to_the_first_state_gives_the_state(open_client: OpenStore) -> None:
    store = open_client()
    mine, walk = started(store), Walk(22)
    for _ in range(80):
        commit(store, mine, lambda now: walk.changes(mine, now))
    history = open_client().history(limit=10_000)
    assert 40 < mine.version <= 100, "the Variable keeps the last 100"
    assert [version for version, _ in history] == list(range(1, mine.version + 1))
    assert {change.by for _, change in history} == {"", "ada", "unix:bob@gpu-a"}
    assert store.history(after=5, limit=3) == history[5:8]
    assert store.history(after=mine.version) == []
    replay = ClusterState.from_snapshot(first_state())
    for _, change in history:
        replay.apply(change)
    assert normal(replay.snapshot()) == normal(mine.snapshot())


def test_a_lock_tells_whether_it_brought_its_replica_up_to_date(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    replica, theirs = started(store), started(other)
    other.commit(0, [granted(theirs, "a", other.now())], now=other.now())
    lock = store.lock(replica)
    assert lock.acquire(5)
    assert lock.is_fresh == (replica.version == 1)
    assert not lock.is_fresh or "a" in replica.leases
    lock.release()


def test_a_lock_is_acquired_with_a_replica_that_what_it_lacks_does_not_fit(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    add(store, mine, "a")
    strange = ClusterState.from_snapshot(replace(mine.snapshot(), leases=()))
    theirs = refreshed(other, None)
    commit_all(other, theirs, Released("a", 1, 2.0))
    lock = store.lock(strange)
    assert lock.acquire(1.0)
    assert not lock.is_fresh
    commit(store, refreshed(store, None), lambda now: [Drained("gpu-server-1", now)], lock)


def test_only_the_holder_of_a_held_lock_commits(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    lock = store.lock()
    assert lock.acquire(5)
    with pytest.raises(LockedError):
        other.commit(0, [granted(mine, "a", other.now())], now=other.now())
    check_clock(other)
    store.commit(0, [granted(mine, "b", store.now())], now=store.now(), lock=lock)
    lock.release()
    assert [lease.lease_id for lease in fresh(other).leases] == ["b"]
    cluster = other.refresh(None)
    assert cluster is not None
    other.commit(1, [granted(cluster, "a", other.now())], now=other.now())


@pytest.mark.parametrize("state", [name for name in STORES if name not in IN_ONE_PROCESS], indirect=True)
def test_a_forked_child_uses_the_store_of_its_parent(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    lock = store.lock()
    assert lock.acquire(1)
    lock.release()

    def work() -> int:
        add(store, cluster, "child")
        return 0

    assert in_child(work) == 0
    with pytest.raises(StaleStateError):
        add(store, cluster, "parent")
    assert [lease.lease_id for lease in fresh(store).leases] == ["child"]


@pytest.mark.parametrize("ending", ["granted", "cancelled"])
def test_a_waiter_is_woken_when_its_request_is_decided(open_client: OpenStore, ending: str) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    now = store.now()
    queued = Queued(Request("a", 2), now, 1, now)
    store.commit(0, [queued], now=now)
    mine.apply(queued)
    asked = threading.Event()

    def is_decided() -> bool:
        cluster = other.refresh(None)
        assert cluster is not None
        asked.set()
        return "a" not in cluster.pending

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.await_decision, "a", is_decided, 30.0)
        assert asked.wait(30)
        assert not waiting.done()
        change = granted(mine, "a", store.now()) if ending == "granted" else Cancelled("a", store.now())
        begin = time.monotonic()
        store.commit(1, [change], now=store.now())
        told = waiting.result(30)
        assert told is True or told == getattr(change, "lease", None)
        assert time.monotonic() - begin < 15, "woken, not timed out"


def test_a_waiter_returns_at_once_if_decided_and_at_its_timeout_if_not(open_client: OpenStore) -> None:
    store = open_client()
    started(store)
    assert store.await_decision("a", lambda: True, 30.0)
    assert not store.await_decision("a", lambda: False, 0.05)


def test_initialise_and_replace_wait_for_the_lock(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    for step in (store.initialise, store.replace):
        lock = other.lock()
        assert lock.acquire(5)
        timer = threading.Timer(0.1, lock.release)
        timer.start()
        step(first_state())
        timer.join()
        assert len(fresh(other).nodes) == 4


def test_a_lease_given_back_has_its_old_number_and_takes_none_from_later_requests(
    open_client: OpenStore,
) -> None:
    """Each client reads the whole state, so the numbers must be in the store."""
    policy, first = get_policy("first_fit"), Request("first", 8)

    def next_step(decide: Callable[[ClusterState, float], list[Change]]) -> Snapshot:
        store = open_client()
        cluster = started(store)
        commit(store, cluster, lambda now: decide(cluster, now))
        assert fresh(open_client()) == normal(cluster.snapshot())
        return normal(cluster.snapshot())

    def submit(request: Request) -> Snapshot:
        return next_step(
            lambda cluster, now: allocator.submit(cluster, request, SchedulingPass(policy, fifo, now))
        )

    def release(lease_id: str, outcome: str) -> Snapshot:
        return next_step(lambda cluster, now: lease_steps.release(cluster, lease_id, now, outcome=outcome))

    submit(first)
    state = submit(Request("second", 8))
    assert ([lease.sequence for lease in state.leases], state.sequence) == ([1, 2], 2)
    release("second", Outcome.NOT_STARTED)
    state = release("first", Outcome.NOT_STARTED)
    assert [(entry.lease_id, entry.sequence) for entry in state.pending] == [("first", 1), ("second", 2)]
    assert state.sequence == 2
    state = next_step(
        lambda cluster, now: allocator.schedule_pending(cluster, SchedulingPass(policy, fifo, now))
    )
    assert ([lease.sequence for lease in state.leases], state.sequence) == ([1, 2], 2)
    assert submit(Request("third", 8)).leases[-1].sequence == 3
    assert release("first", Outcome.NOT_STARTED).sequence == 4  # given back again: at the end of the queue
    store = open_client()
    store.replace(first_state())
    assert fresh(store).sequence >= 3


def test_replace_keeps_version_fencing_token_and_sequence_growing(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    theirs = other.refresh(None)
    assert theirs is not None
    changes: list[Change] = [
        granted(mine, "a", store.now()),
        Queued(Request("b", 9), store.now(), 1, store.now()),
    ]
    store.commit(0, changes, now=store.now())
    for change in changes:
        mine.apply(change)
    store.replace(first_state(2))
    for client, replica in ((store, mine), (other, theirs)):
        seen = client.refresh(replica)
        assert seen is not None
        assert seen.version > 2
        assert seen.last_fencing_token >= 1
        assert seen.sequence >= 1
        assert (len(seen.nodes), seen.leases, seen.pending) == (2, {}, {})
        version = seen.version
    store.commit(version, [Drained("gpu-server-0", store.now())], now=store.now())
    assert fresh(other).drained


def test_a_store_can_be_filled_from_a_copy_of_another(open_client: OpenStore) -> None:
    cluster = ClusterState.from_snapshot(
        replace(first_state(), version=10**15, last_fencing_token=10**15, sequence=7)
    )
    changes: list[Change] = [
        granted(cluster, "a", 1e9),
        Renewed("a", 10**15 + 1, 1e9, 2e9),
        Queued(Request("w", 3), 1e9, 1, 1e9),
        Queued(Request("x", 4), 1e9, 2, 1e9),
        Drained("gpu-server-1", 1e9, "fans", failed=True),
        InventoryChanged(first_state(3).nodes[1:], 1e9),
    ]
    for change in changes:
        cluster.apply(change)
    cluster.apply(Quarantined("a", 10**15 + 1, 2e9))
    copy = cluster.snapshot()
    assert (len(copy.leases), len(copy.pending), len(copy.drained), len(copy.retired)) == (1, 2, 1, 1)
    store = open_client()
    for write in (store.initialise, store.replace):
        write(copy)
        kept = fresh(open_client())
        assert kept.version >= copy.version
        assert replace(kept, version=copy.version) == copy
    store.replace(first_state(2))
    again = fresh(store)
    assert again.version > copy.version, "no earlier replica passes as current"
    assert again.last_fencing_token >= copy.last_fencing_token
    assert (again.leases, again.pending, again.drained, again.retired) == ((), (), (), ())


def test_a_retired_server_has_a_number_of_its_own_in_every_replica(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    cluster = started(store)
    follower = other.refresh(None)
    commit(store, cluster, lambda now: [granted(cluster, "t", now)])
    commit_all(store, cluster, InventoryChanged((replace(servers()[1], server_id=0),), 0.0))
    for state in (cluster, other.refresh(follower), open_client().refresh(None)):
        assert state is not None
        assert {each.name: each.node.server_id for each in state.nodes} == {
            "gpu-server-1": 0,
            "gpu-server-0": 4,
        }


def test_replace_drops_renewals_and_quarantines(open_client: OpenStore) -> None:
    """A lease of the same id in the new state has neither the renewal nor the quarantine of the old one."""
    store = open_client()
    mine = started(store)
    now = store.now()
    lease = granted(mine, "t", now)
    changes: list[Change] = [lease, Renewed("t", 1, now, now + 900), Quarantined("t", 1, now)]
    store.commit(0, changes, now=now)
    store.replace(replace(first_state(), last_fencing_token=1, leases=(lease.lease,)))
    assert fresh(open_client()).leases == (lease.lease,)


@pytest.mark.parametrize("is_restore", [False, True], ids=["replace", "restore"])
def test_nothing_of_a_state_stays_when_another_takes_its_place(
    open_client: OpenStore, is_restore: bool
) -> None:
    store = open_client()
    mine, walk = started(store), Walk(1)
    for _ in range(120):
        commit(store, mine, lambda now: walk.changes(mine, now))
    ran(store, mine, "train_1", "SUCCESS")
    before = fresh(store)
    assert all((before.watched, before.runtimes, before.attained))
    if is_restore:
        restored(store, replace(first_state(), version=mine.version + 1), mine.version)
    else:
        store.replace(first_state())
    found = fresh(open_client())
    assert replace(found, version=0, last_fencing_token=0, sequence=0) == first_state()


def test_replace_under_a_held_lock(open_client: OpenStore) -> None:
    store = open_client()
    started(store)
    lock = store.lock()
    assert lock.acquire(5)
    store.replace(first_state(2), lock=lock)
    lock.release()
    assert len(fresh(open_client()).nodes) == 2


def test_a_closed_state_is_read_and_takes_no_commit(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    add(store, mine, "a")
    with pytest.raises(StaleStateError):
        other.close_state(0, "gone to postgresql://db/gpus")
    check_clock(other)
    other.close_state(1, "gone to postgresql://db/gpus")
    check_clock(other)
    change = granted(mine, "b", store.now())
    with pytest.raises(StateClosedError, match="gone to postgresql://db/gpus"):
        store.commit(1, [change], now=store.now())
    check_clock(store)
    with pytest.raises(StateClosedError, match="gone to postgresql://db/gpus"):
        store.replace(first_state())
    assert [lease.lease_id for lease in fresh(store).leases] == ["a"]
    assert store.closed == "gone to postgresql://db/gpus"


def restored(store: Store, snapshot: Snapshot, version: int | None, **values: Any) -> str:
    """Restore without a recovery window, unless said otherwise; return the new incarnation."""
    name = new_incarnation(store.now(), store.incarnation)
    options: dict[str, Any] = {"suspended_until": 0.0, "history_until": 0, **values}
    store.restore(snapshot, version, incarnation=name, **options)
    return name


def test_a_restored_state_takes_the_place_of_the_version_that_was_read_and_of_no_other(
    open_client: OpenStore,
) -> None:
    store, other = open_client(), open_client()
    with pytest.raises(StaleStateError):
        restored(store, first_state(), 7)
    restored(store, replace(first_state(2), version=100, last_fencing_token=90), None)
    mine = other.refresh(None)
    assert mine is not None
    before = other.incarnation
    add(other, mine, "late")
    for version in (None, 100):
        with pytest.raises(StaleStateError, match=f"expected version {version or 0}, found 101"):
            restored(store, first_state(3), version)
    assert (mine.leases["late"].fencing_token, len(fresh(store).nodes)) == (91, 2)
    name = restored(store, replace(first_state(3), version=200), 101)
    again = other.refresh(mine)
    assert again is not None, "clients of the earlier incarnation go on with this one"
    assert (other.incarnation, again.version, again.leases) == (name, 200, {})
    assert other.incarnation > before
    add(other, again, "next")


def test_a_restore_opens_a_closed_state_and_keeps_the_history_up_to_the_backup(
    open_client: OpenStore,
) -> None:
    store = open_client()
    mine = started(store)
    add(store, mine, "a")
    backup = mine.snapshot()
    add(store, mine, "b")
    store.close_state(2, "for good")
    restored(store, replace(backup, version=100), 2, history_until=1)
    again = open_client().refresh(None)
    assert again is not None
    add(store, again, "c")
    kept = [change.lease.lease_id for _, change in store.history() if isinstance(change, Granted)]
    assert kept in (["a", "c"], ["c"]), "a store in memory keeps none"
    fresh(store)
    assert not store.closed


@pytest.mark.thorough
def test_after_a_restore_nothing_is_granted_until_its_time(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    mine = started(store)
    add(store, mine, "a")
    restored(store, replace(mine.snapshot(), version=100), 1, suspended_until=store.now() + 1.5)
    restored_one = other.refresh(None)
    assert restored_one is not None
    mine = restored_one
    assert other.suspension.until > other.now()
    with pytest.raises(StateUnconfirmedError) as refusal:
        commit(other, mine, lambda now: [granted(mine, "b", now)])
    assert 0 < refusal.value.remaining_s <= 2
    commit(other, mine, lambda now: [Renewed("a", 1, now, now + 900)])
    wait_for(lambda: other.now() > other.suspension.until + 0.5)
    commit(other, mine, lambda now: [granted(mine, "b", now)])


def test_a_replica_ahead_of_the_store_is_a_lost_state(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    mine.apply(granted(mine, "a", store.now()))
    with pytest.raises(StateLostError):
        store.refresh(mine)


@pytest.mark.parametrize("others", [1, 3], ids=["as_far", "further"])
def test_a_state_that_was_set_back_to_a_dump_and_went_on_is_a_lost_one(
    open_client: OpenStore, take_dump: TakeDump, others: int
) -> None:
    writer, follower, reader, late, early = (open_client() for _ in range(5))
    replicas = {writer: started(writer)}
    add(writer, replicas[writer], "kept")
    bring_back = take_dump()
    replicas |= {store: whole(store) for store in (follower, late)}
    of_the_dump = whole(early)
    add(writer, replicas[writer], "lost")
    replicas[follower] = refreshed(follower, replicas[follower])
    replicas[reader] = whole(reader)
    with pytest.raises(StaleStateError) as stale:
        add(late, replicas[late], "too late")
    for change in stale.value.missed:
        replicas[late].apply(change)
    bring_back()
    newcomer = open_client()
    theirs = whole(newcomer)
    for number in range(others):
        add(newcomer, theirs, f"other-{number}")
    before = fresh(open_client())
    for store, replica in replicas.items():
        assert set(replica.leases) == {"kept", "lost"}
        for _ in range(2):  # also once the other state was read
            with pytest.raises(StateLostError):
                add(store, replica, "next")
            check_clock(store)
            with pytest.raises(StateLostError):
                store.refresh(replica)
            assert whole(store).version == before.version
        assert set(replica.leases) == {"kept", "lost"}, "the two are not mixed"
    assert fresh(open_client()) == before
    assert normal(refreshed(early, of_the_dump).snapshot()) == before, "it goes on from there"
    add(newcomer, theirs, "more")
    assert newcomer.refresh(theirs) is theirs
    newcomer.replace(first_state())
    for store, replica in replicas.items():
        add(store, refreshed(store, replica), f"after-{id(store)}")  # an operator decided


def whole(store: Store) -> ClusterState:
    return refreshed(store, None)


def refreshed(store: Store, replica: ClusterState | None) -> ClusterState:
    cluster = store.refresh(replica)
    assert cluster is not None
    return cluster


def test_the_clock_moves_forward_and_is_shared(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    times = [store.now(), store.now(), other.now(), other.now()]
    assert times[0] <= times[1]
    assert times[2] <= times[3]
    assert max(times) - min(times) < 1.0
    assert abs(times[0] - time.time()) < 5.0


def test_concurrent_writers_lose_nothing(open_client: OpenStore) -> None:
    started(open_client())
    errors: list[BaseException] = []

    def change(store: Store, replica: ClusterState, step: int, name: str, lock: Lock | None) -> None:
        def decide(now: float) -> list[Change]:
            changes: list[Change] = [granted(replica, f"{name}-{step}", now, gpus=1)]
            if step:
                changes += lease_steps.release(replica, f"{name}-{step - 1}", now)
            return changes

        commit(store, replica, decide, lock)

    def write(name: str) -> None:
        try:
            store = open_client()
            for step in range(15):
                replica = store.refresh(None)
                assert replica is not None
                try:
                    change(store, replica, step, name, None)
                except StaleStateError:
                    lock = store.lock()
                    assert lock.acquire(60)
                    replica = store.refresh(replica)
                    assert replica is not None
                    change(store, replica, step, name, lock)
                    lock.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(f"w{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    state = fresh(open_client())
    assert sorted(lease.lease_id for lease in state.leases) == [f"w{n}-14" for n in range(6)]
    assert state.version == 6 * 29


def ran(store: Store, cluster: ClusterState, name: str, outcome: str) -> None:
    """Grant a lease of that name, and release it with that outcome."""
    commit(store, cluster, lambda now: [granted(cluster, name, now)])
    commit(store, cluster, lambda now: [Released(name, cluster.last_fencing_token, now, outcome)])


def test_learnt_runtimes_are_part_of_the_state_and_bounded(open_client: OpenStore) -> None:
    others = {f"other{number}": (9.0,) for number in range(MAX_CLASSES - 3)}
    known = {**others, "train_#": (7.0, *[8.0] * (KEPT_RUNTIMES - 2))}
    store = open_client()
    store.initialise(replace(first_state(), runtimes=known))
    cluster = started(store)
    for number in range(2):
        ran(store, cluster, f"train_{number}", "SUCCESS")
    ran(store, cluster, "eval_1", "FAILED")
    kept = (*[8.0] * (KEPT_RUNTIMES - 2), 1.0, 1.0)
    assert fresh(open_client()).runtimes == {**others, "train_#": kept}, "runs of less than a second are one"
    for name in ("a", "b", "train_9", "c", "d"):
        ran(store, cluster, name, "SUCCESS")
        found = fresh(open_client()).runtimes
        assert list(found.items()) == list(cluster.runtimes.runs.items()), "also the order"
    assert list(found) == [*list(others)[2:], "a", "b", "train_#", "c", "d"]


def test_the_state_keeps_the_runtime_of_a_long_run_and_of_a_dag_s_task(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    labels = {"dag_id": "d", "task_id": "t"}
    for number, seconds in enumerate((86_400.123456, 12.3456)):
        request = Request(f"i:d/r{number}/t", 2, labels=labels)

        def grants(now: float, request: Request = request, seconds: float = seconds) -> list[Change]:
            token = cluster.last_fencing_token + 1
            return [
                Granted(
                    Lease(request, (Placement(cluster.nodes[0].name, (0, 1)),), token, now - seconds), now
                )
            ]

        commit(store, cluster, grants)
        over = Released(request.lease_id, cluster.last_fencing_token, store.now(), "SUCCESS")
        commit_all(store, cluster, over)
    assert cluster.runtimes.runs.keys() == {"/d/t"}
    assert fresh(open_client()).runtimes == cluster.runtimes.runs


def test_what_tells_no_runtime_of_a_task_is_learnt_by_no_store(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    again = {"restart_count": "1"}
    named = {"dag_id": "d", "task_id": "t"}
    for lease_id, labels in (
        ("train_1", again),  # preempted before: it went on from there
        ("i:d/r1/t", {**named, **again}),
        ("hand:ada@desk/0123abcd", {}),  # a random id
        ("hand:ada@desk/0123abcd#2", {"restart_count": "0"}),
        ("hand:ada/0123abcd", {}),
        ("hand:ada@desk/train", {}),
        ("hand:ada@desk/0123abcde", {"restart_count": "0"}),
        ("hand:ada@desk/0123abce", named),
    ):
        request = Request(lease_id, 2, labels=labels)
        place, token = Placement(cluster.nodes[0].name, (0, 1)), cluster.last_fencing_token + 1
        commit_all(store, cluster, Granted(Lease(request, (place,), token, 0.0), 0.0))
        commit_all(store, cluster, Released(lease_id, token, 9.0, "SUCCESS"))
    assert cluster.runtimes.runs.keys() == {"hand:ada@desk/train", "hand:ada@desk/#abcde", "/d/t"}
    assert fresh(open_client()).runtimes == cluster.runtimes.runs


def test_attained_service_is_part_of_the_state_and_bounded(open_client: OpenStore) -> None:
    others = {f"other{number}": 1000 for number in range(MAX_JOBS - 3)}
    store = open_client()
    store.initialise(replace(first_state(), attained=others))
    cluster = started(store)
    names = ("train#2", "b", "c", "train", "d", "c", "e")
    for name, outcome in zip(names, ("FAILED",) * 5 + ("SUCCESS", "FAILED"), strict=True):
        ran(store, cluster, name, outcome)
        found = fresh(open_client()).attained
        assert list(found.items()) == list(cluster.attained.items()), "also the order"
    assert found == {**dict(list(others.items())[1:]), "b": 2000, "train": 4000, "d": 2000, "e": 2000}


def test_a_gang_counts_once_in_the_attained_service_of_the_state(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    members = tuple(Placement(node.name, (0, 1)) for node in cluster.nodes[:2])

    def end(rank: int) -> None:
        token = 1
        commit(store, cluster, lambda now: [MembersReleased("t", token, (rank,), now)])

    request = Request("t", 2, nodes=2)
    commit(store, cluster, lambda now: [Granted(Lease(request, members, 1, now - 86_400.1234), now)])
    end(0)
    known = dict(cluster.attained)
    ran(store, cluster, "u", "FAILED")
    commit(store, cluster, lambda now: [granted(cluster, "t", now)])  # the next try, beside what is left
    end(1)
    assert fresh(open_client()).attained == known | {"u": 2000}
    commit(store, cluster, lambda now: [Expired("t", cluster.last_fencing_token, now)])
    assert fresh(open_client()).attained == cluster.attained == {"u": 2000, "t": known["t"] + 2000}


def test_a_process_that_opens_late_orders_the_queue_as_an_early_one(open_client: OpenStore) -> None:
    store = open_client()
    early = started(store, ClusterSettings(order="tiresias"))
    placement = Placement(early.nodes[0].name, (0, 1))
    greedy = Request("greedy", 2)
    commit(store, early, lambda now: [Granted(Lease(greedy, (placement,), 1, now - 86_400.0), now)])
    commit(store, early, lambda now: [Released("greedy", 1, now, "FAILED")])
    for sequence, request in enumerate((greedy, Request("small", 2)), start=1):
        now = store.now()
        commit_all(store, early, Queued(request, now, sequence, now))
    late = open_client().refresh(None)
    assert late is not None
    for cluster in (early, late):
        order = get_order(cluster.settings.order)
        assert [entry.lease_id for entry in order(cluster, store.now())] == ["small", "greedy"]


def test_grants_are_not_suspended_without_a_restart(open_client: OpenStore) -> None:
    store = open_client()
    started(store)
    assert store.suspension is NO_SUSPENSION


def test_a_jump_of_the_clock_suspends_what_waits_for_owners_for_all(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    cluster = started(store, ClusterSettings(confirmation_window_s=1.0))
    for lease_id in "abc":
        add(store, cluster, lease_id)
    tokens = {lease.lease_id: lease.fencing_token for lease in cluster.leases.values()}
    suspension, is_begun = store.suspend(ClockJump(-3600.0, store.now() - 10))
    assert is_begun
    assert suspension.clock_jump_s == -3600.0
    assert 0 < suspension.until - store.now() <= 1.1
    theirs = other.refresh(None)
    assert theirs is not None
    assert other.suspension.clock_jump_s == -3600.0
    now = other.now()
    for change in (
        granted(theirs, "d", now),
        Expired("a", tokens["a"], now),
        Quarantined("a", tokens["a"], now),
    ):
        with pytest.raises(StateUnconfirmedError, match="clock jumped back by 3600 s, seen") as caught:
            other.commit(theirs.version, [change], now=now)
        assert caught.value.clock_jump_s == -3600.0
    goes_on: list[Change] = [
        Renewed("a", tokens["a"], now, now + 60),
        Released("b", tokens["b"], now),
        Quarantined("c", tokens["c"], now, revoked=True),
        Queued(Request("waits", 1, ttl_s=60.0), now, 4, now),
    ]
    other.commit(theirs.version, goes_on, now=now)
    wait_for(lambda: other.now() > suspension.until)
    after = other.refresh(None)
    assert after is not None
    assert other.suspension is NO_SUSPENSION
    now = other.now()
    other.commit(after.version, [Expired("a", tokens["a"], now)], now=now)


def test_a_jump_is_stored_once_and_its_opposite_again(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    started(store, ClusterSettings(confirmation_window_s=60.0))
    other.refresh(None)
    before = store.now() - 10
    assert store.suspend(ClockJump(3600.0, before))[1]
    late, is_begun = other.suspend(ClockJump(3600.8, before - 1000))
    assert not is_begun, "seen by one who had not looked for long"
    assert late.until <= store.now() + 61
    assert not other.suspend(ClockJump(3599.4, before))[1]
    assert other.suspend(ClockJump(-3600.0, before))[1]
    assert store.suspend(ClockJump(3600.0, before))[1]
    assert store.suspend(ClockJump(3600.0, store.now() + 1))[1], "another one, later"


def test_a_jump_that_is_told_again_is_still_that_of_who_told_it(open_client: OpenStore) -> None:
    """Its first answer may have been lost: else nobody would give leases back what it took of them."""
    store, other = open_client(), open_client()
    started(store, ClusterSettings(confirmation_window_s=60.0))
    other.refresh(None)
    jump = ClockJump(3600.0123456789, store.now() - 10)
    until = store.suspend(jump)[0].until
    again, is_begun = store.suspend(jump)
    assert is_begun
    assert again.until == pytest.approx(until, abs=2), "no second window"
    assert not other.suspend(ClockJump(3600.0123, jump.since))[1]


def test_each_machine_is_known_by_what_it_saw_last(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    started(store)
    assert store.reports.sightings() == {}
    now = store.now()
    store.reports.put_sighting("a", Sighting(now))
    other.reports.put_sighting("b", Sighting(now + 1))
    last = Sighting(now + 2, -3600.0, now + 2, Reading(5.0, now, 0.1))
    other.reports.put_sighting("a", last)
    assert store.reports.sightings() == {"a": last, "b": Sighting(now + 1)}


# ---- idempotency keys ----


def test_a_key_is_kept_with_its_changes_and_refuses_a_second_commit(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    cluster = started(store)
    assert store.recall(Once("ada", "k", "f")) is None
    once = [(Once("ada", "k", "f"), '{"a": 1}'), (Once("ada", "l", "f"), "null")]
    store.commit(0, [granted(cluster, "a", store.now())], now=store.now(), once=once)
    theirs = other.refresh(None)
    assert theirs is not None
    again = Once("ada", "k", "f")
    with pytest.raises(RepeatedError) as caught:
        other.commit(1, [granted(theirs, "b", other.now())], now=other.now(), once=[(again, "{}")])
    assert caught.value.key is again
    assert again.reference_in(caught.value.stored) == '{"a": 1}'
    assert again.repeated
    assert [lease.lease_id for lease in fresh(store).leases] == ["a"], "all or none"
    assert other.recall(Once("ada", "l", "f")) == "null"


def test_a_key_belongs_to_one_request_of_one_caller(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    store.commit(
        0, [granted(cluster, "a", store.now())], now=store.now(), once=[(Once("ada", "k", "f"), "1")]
    )
    assert store.recall(Once("bob", "k", "f")) is None
    with pytest.raises(IdempotencyKeyError, match="used for another request: use a new key"):
        store.recall(Once("ada", "k", "other"))


def test_a_commit_that_was_refused_keeps_no_key(open_client: OpenStore) -> None:
    store = open_client()
    started(store)
    with pytest.raises(StaleStateError):
        store.commit(
            7, [Drained("gpu-server-0", store.now())], now=store.now(), once=[(Once("a", "k", ""), "1")]
        )
    assert store.recall(Once("a", "k", "")) is None


def test_a_reset_is_made_once_and_forgets_no_key(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    store.commit(
        0, [granted(cluster, "a", store.now())], now=store.now(), once=[(Once("ada", "k", "f"), "1")]
    )
    store.replace(first_state(), once=[(Once("ada", "reset", "f"), "null")])
    replica = store.refresh(None)
    assert replica is not None
    add(store, replica, "b")
    with pytest.raises(RepeatedError):
        store.replace(first_state(), once=[(Once("ada", "reset", "f"), "null")])
    assert [lease.lease_id for lease in fresh(store).leases] == ["b"]
    assert store.recall(Once("ada", "k", "f")) == "1"


def test_reports_live_for_a_time_and_their_record_longer(open_client: OpenStore) -> None:
    store, other = open_client(), open_client()
    assert store.reports.records(["gpu-a"]) == store.reports.reports([]) == {}
    store.reports.put("gpu-a", b'{"n": 1}', b"{}", 60.0)
    store.reports.put("gpu-b", b'{"n": 2}', b'{"at": 1}', 60.0)
    store.reports.put("gpu-a", b'{"n": 3}', b'{"at": 2}', 60.0)
    same = other if type(store).__name__ != "MemoryStore" else store
    assert same.reports.reports(["gpu-a", "gpu-b", "gpu-c"]) == {"gpu-a": b'{"n": 3}', "gpu-b": b'{"n": 2}'}
    assert same.reports.records(["gpu-b"]) == {"gpu-b": b'{"at": 1}'}
    store.reports.put("gpu-a", b"{}", b"{}", 0.001)
    wait_for(lambda: not same.reports.reports(["gpu-a"]), 10)
    assert same.reports.records(["gpu-a"]) == {"gpu-a": b"{}"}


def test_where_jobs_did_not_start_is_known_to_every_replica_until_it_is_over(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    ends = [
        (100.0, "gpu-server-0"),
        (100.5, "gpu-server-1"),
        (699.875, "gpu-server-2"),
        (700.0, "gpu-server-0"),
    ]
    known: list[tuple[float, ...]] = []
    for token, (at, node) in enumerate(ends, start=1):
        lease = Lease(Request("t", 1), (Placement(node, (2,)),), token, at - 1, 1e12)
        why = 'host "b":\nrefused'
        over = Released("t", token, at, "FAILED", reason=why, failed_nodes=(node,))
        commit_all(store, mine, Granted(lease, at - 1), over)
        found = fresh(open_client())
        assert found == normal(mine.snapshot())
        known.append(tuple(entry.at for entry in found.failed_starts))
    assert known == [(100.0,), (100.0, 100.5), (100.0, 100.5, 699.875), (100.5, 699.875, 700.0)]
    before = fresh(store)
    store.replace(before)
    assert fresh(open_client()).failed_starts == before.failed_starts
    again = store.refresh(None)
    assert again is not None
    held = Lease(
        Request("u", 1), (Placement("gpu-server-0", (0,)),), again.last_fencing_token + 1, 701.0, 1e12
    )
    commit(store, again, lambda now: [Granted(held, 701.0)])
    commit(store, again, lambda now: [Released("u", held.fencing_token, 702.0, reason="its user ended it")])
    assert fresh(open_client()).failed_starts == before.failed_starts


def test_a_silent_server_is_closed_for_every_replica_until_its_agent_reports_or_it_is_resumed(
    open_client: OpenStore,
) -> None:
    store = open_client()
    mine = started(store)
    lost = AgentLost("gpu-server-0", 61.5, 1.25)
    request = Request("t", 1)
    steps: list[tuple[Change, tuple[AgentLost, ...], bool]] = [
        (AgentSeen("gpu-server-0", 1.0), (), True),
        (Granted(Lease(request, (Placement("gpu-server-0", (2,)),), 1, 2.0, 1e12), 2.0), (), True),
        (lost, (lost,), True),
        (Released("t", 1, 62.0), (lost,), True),
        (AgentSeen("gpu-server-0", 70.0), (), True),
        (Drained("gpu-server-0", 71.0), (), True),
        (Resumed("gpu-server-0", 72.0), (), True),
        (lost, (lost,), True),
        (Resumed("gpu-server-0", 80.0), (), False),
    ]
    for step, silent, is_watched in steps:
        commit_all(store, mine, step)
        found = fresh(open_client())
        assert found == normal(mine.snapshot())
        assert (found.silent, bool(found.watched)) == (silent, is_watched)
    assert [entry.gpu_id for entry in mine.snapshot().cleaning] == [2], "released while nobody could see"


def test_what_members_of_a_gang_held_is_cleaned_by_every_replica(open_client: OpenStore) -> None:
    """On watched servers, also where two members share a GPU; what other members hold is not cleaned yet."""
    store = open_client()
    mine = started(store)
    request = Request("gang", 1, gpu_milli=400, nodes=3, spread=Spread.PACK)
    shared, other = Placement("gpu-server-0", (2,)), Placement("gpu-server-1", (0,))
    members = (shared, shared, other)
    lease = Lease(request, members, 1, 1.0, 1e12)
    steps: list[Change] = [
        AgentSeen("gpu-server-0", 1.0),
        AgentSeen("gpu-server-1", 1.0),
        Granted(lease, 2.0),
        MembersReleased("gang", 1, (1,), 3.5),
        MembersReleased("gang", 1, (0, 2), 4.5),
    ]
    held = []
    for step in steps:
        commit_all(store, mine, step)
        held.append(mine.node("gpu-server-0").gpu_free[2])
        assert fresh(open_client()).cleaning == mine.snapshot().cleaning
    assert held == [1000, 1000, 200, 200, 200]
    cleaning = {(entry.node, entry.gpu_id, entry.milli, entry.since) for entry in mine.snapshot().cleaning}
    assert cleaning == {("gpu-server-0", 2, 800, 4.5), ("gpu-server-1", 0, 400, 4.5)}
    commit(store, mine, lambda now: [GpuCleaned("gpu-server-0", 2, 1, 5.0)])
    assert [entry.node for entry in fresh(open_client()).cleaning] == ["gpu-server-1"]
    assert mine.node("gpu-server-0").gpu_free[2] == 1000


@pytest.mark.parametrize("ends", [[(0,)], [(1,)], [(2,)], [(0,), (2,)], [(1,), (2,)], [(0, 1)]])
def test_what_a_restored_remainder_holds_is_cleaned_where_it_is(
    open_client: OpenStore, ends: list[tuple[int, ...]]
) -> None:
    """Whichever members are left and end together, also beside an earlier part of the same GPU."""
    store = open_client()
    mine = started(store)
    request = Request("gang", 1, gpu_milli=400, nodes=3, spread=Spread.PACK)
    members = (
        Placement("gpu-server-0", (2,)),
        Placement("gpu-server-0", (2,)),
        Placement("gpu-server-1", (0,)),
    )
    ended = tuple(rank for rank in range(3) if rank not in chain(*ends))
    commit_all(store, mine, AgentSeen("gpu-server-0", 1.0), AgentSeen("gpu-server-1", 1.0))
    commit_all(store, mine, Granted(Lease(request, members, 1, 1.0, 1e12), 2.0))
    commit_all(store, mine, MembersReleased("gang", 1, ended, 3.5))
    restored(store, replace(mine.snapshot(), version=100), mine.version)
    mine = whole(store)
    for at, ranks in enumerate(ends, 4):
        commit_all(store, mine, MembersReleased("gang", 1, ranks, float(at)))
        assert fresh(open_client()) == normal(mine.snapshot())
    free = [mine.node("gpu-server-0").gpu_free[2], mine.node("gpu-server-1").gpu_free[0]]
    assert (free, mine.remainders) == ([200, 600], {})


def test_the_preemption_of_a_lease_ends_with_its_members_and_is_not_its_successors(
    open_client: OpenStore,
) -> None:
    """Every replica, read anew or not, knows the same remainder, and a new lease that nobody preempts."""
    store = open_client()
    mine = started(store)
    request = Request("gang", 1, nodes=2)
    members = (Placement("gpu-server-0", (2,)), Placement("gpu-server-1", (0,)))
    again = (Placement("gpu-server-0", (3,)), Placement("gpu-server-1", (1,)))
    steps: list[Change] = [
        Granted(Lease(request, members, 1, 1.0, 1e12), 1.0),
        Renewed("gang", 1, 2.0, 1e12, checkpoint_at=1.5),
        Preempting("gang", 1, "stronger", 1e12, 3.0),
        MembersReleased("gang", 1, (0,), 4.0),
        Granted(Lease(request, again, 2, 5.0, 1e12), 5.0),
    ]
    for step in steps:
        commit_all(store, mine, step)
        assert fresh(open_client()) == normal(mine.snapshot())
    assert mine.leases["gang"].preempted_by == ""
    assert mine.preempting == set()


def test_what_teams_used_goes_with_their_rules(open_client: OpenStore) -> None:
    store = open_client()
    mine = started(store)
    vision, nlp = Team("vision", 4), Team("nlp", 4)
    used: list[set[str]] = []
    for teams in (Teams((vision, nlp)), Teams((nlp,)), Teams((vision,)), Teams()):
        commit_all(store, mine, TeamsChanged(teams, store.now()))
        if not used:
            lease = granted(mine, "t", began := store.now() - 60.0).lease
            lease = replace(lease, request=replace(lease.request, team="vision"))
            commit_all(store, mine, Granted(lease, began))
            commit(store, mine, lambda now: [Released("t", 1, now)])
        found = fresh(open_client())
        assert found == normal(mine.snapshot())
        used.append(set(found.use))
    assert used == [{"vision"}, set(), set(), set()]


def texts(store: Store, *names: str) -> dict[str, str]:
    return store.jobs.texts(names)


def store_jobs(store: Store, cluster: ClusterState, lease_id: str, *rows: JobRow) -> None:
    """Commit a grant with these rows."""
    now = store.now()
    change = granted(cluster, lease_id, now)
    store.commit(cluster.version, [change], now=now, jobs=rows)
    cluster.apply(change)


def test_jobs_are_stored_with_a_commit_and_in_no_change(open_client: OpenStore) -> None:
    writer, reader = open_client(), open_client()
    cluster = started(writer)
    text = json.dumps({"command": ["echo", "é '%s' :x \\ \n"]}) + "x" * 60_000
    store_jobs(writer, cluster, "a", JobRow("a" * 32, "me", text, 60), JobRow("b" * 32, "you", "second", 60))
    assert texts(reader, "a" * 32, "b" * 32, "c" * 32) == {"a" * 32: text, "b" * 32: "second"}
    assert "second" not in str(reader.history()) + str(fresh(reader))
    store_jobs(writer, cluster, "b", JobRow("a" * 32, "me", "replaced", 60))
    assert texts(reader, "a" * 32) == {"a" * 32: "replaced"}


def test_jobs_of_a_refused_commit_are_not_stored(open_client: OpenStore) -> None:
    writer, other = open_client(), open_client()
    cluster, theirs = started(writer), other.refresh(None)
    assert theirs is not None
    store_jobs(writer, cluster, "a")
    with pytest.raises(StaleStateError):
        store_jobs(other, theirs, "b", JobRow("b" * 32, "me", "lost", 60))
    assert texts(writer, "b" * 32) == {}


def test_jobs_end_by_time_which_an_empty_text_changes(open_client: OpenStore) -> None:
    store = open_client()
    cluster = started(store)
    name, other = "a" * 32, "b" * 32
    store_jobs(store, cluster, "a", JobRow(name, "me", "job", 3600), JobRow(other, "me", "job", 3600))
    store_jobs(store, cluster, "b", JobRow(name, "", "", 0.05), JobRow("c" * 32, "", "", 0.05))
    store_jobs(store, cluster, "c", JobRow("d" * 32, "", "", 3600))  # as at the end of a lease without one
    assert texts(store, "d" * 32) == {}
    wait_for(lambda: texts(store, name) == {})
    store_jobs(store, cluster, "d", JobRow(other, "", "", 7200))
    assert texts(store, other) == {other: "job"}


def test_a_text_is_stored_again_under_a_name_whose_time_was_over(open_client: OpenStore) -> None:
    """As the job of a request whose id was used last week."""
    store, reader = open_client(), open_client()
    cluster = started(store)
    name, other = "a" * 32, "b" * 32
    store_jobs(store, cluster, "a", JobRow(name, "me", "first", 0.05))
    store.jobs.write([JobRow(other, "", "first", 0.05)])
    wait_for(lambda: texts(store, name, other) == {})
    store_jobs(store, cluster, "b", JobRow(name, "you", "second", 3600))
    store.jobs.write([JobRow(other, "", "second", 3600)])
    assert texts(reader, name, other) == {name: "second", other: "second"}
    assert reader.jobs.bytes_of("you") == len("second")


def test_jobs_are_counted_for_their_caller(open_client: OpenStore) -> None:
    store, reader = open_client(), open_client()
    cluster = started(store)
    assert store.jobs.bytes_of("me") == 0
    store_jobs(store, cluster, "a", JobRow("a" * 32, "me", "12345", 60), JobRow("b" * 32, "you", "1", 60))
    store_jobs(store, cluster, "b", JobRow("c" * 32, "me", "123", 60), JobRow("d" * 32, "me", "12", 0.05))
    wait_for(lambda: reader.jobs.bytes_of("me") == 8)
    store.jobs.write([JobRow("e" * 32, "me", "1234", 60), JobRow("b" * 32, "me", "12", 60)])
    assert reader.jobs.bytes_of("me") == 14


def test_what_no_caller_stored_counts_for_none(open_client: OpenStore) -> None:
    """Such as results, beside the jobs of a program that names no owner."""
    store, reader = open_client(), open_client()
    cluster = started(store)
    store_jobs(store, cluster, "a", JobRow("a" * 32, None, "result", 60), JobRow("b" * 32, "", "job", 60))
    store.jobs.write([JobRow("c" * 32, None, "output", 60), JobRow("d" * 32, "", "order", 60)])
    assert texts(reader, "a" * 32, "c" * 32) == {"a" * 32: "result", "c" * 32: "output"}
    assert reader.jobs.bytes_of("") == len("job") + len("order")
