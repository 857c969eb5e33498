"""The commit protocol: groups, conflicts, the lock, old replicas, recovery windows, stopped callers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager import MemoryStore
from resource_manager.core.changes import Change, Drained, Expired, MaintenanceChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Request
from resource_manager.errors import (
    CapacityError,
    InvalidRequestError,
    LockError,
    LockTimeoutError,
    StaleStateError,
    StateUnconfirmedError,
    StoreUnavailableError,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit import group, group_commits
from resource_manager.manager.commit.asking import Step
from resource_manager.manager.commit.group import Groups, Operation, Repeatable
from resource_manager.manager.commit.group_commits import TRIES_WITHOUT_LOCK
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.queue_view import QueueView
from resource_manager.manager.refusal_wording import lock_busy
from resource_manager.rest.state_follower import StateFollower
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.storage.locks import Lock, ThreadLock, nothing
from resource_manager.storage.once import Once
from tests.eventually import wait_for
from tests.forked import in_child

GPUS = 8


class WatchedStore(MemoryStore):
    """A memory store that counts calls, and runs a test's functions right before commits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.refreshes = 0
        self.commits: list[list[str]] = []
        self.before_commit: list[Callable[[], object]] = []
        """One function for each of the next commits, in order."""

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        self.refreshes += 1
        return super().refresh(replica)

    def commit(self, version: int, changes: Sequence[Change], **options: Any) -> None:
        if self.before_commit:
            self.before_commit.pop(0)()
        super().commit(version, changes, **options)
        self.commits.append([type(change).__name__ for change in changes])


class Notes:
    """An observer that records everything."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []

    def measured(self, name: str, value: float) -> None:
        self.values.append((name, value))

    def of(self, name: str) -> list[float]:
        return [value for measured, value in self.values if measured == name]


def on(store: MemoryStore, lock_timeout_s: float = 20.0) -> Transactions:
    """Transactions of a manager of one server with 8 GPUs."""
    made = Transactions(store, lock_timeout_s)
    first = ClusterState(default_inventory(1, GPUS, 64)).snapshot()
    made.initialise(replace(first, settings=ClusterSettings(order="fifo")))
    return made


def granting(state: Transactions, task_id: str, gpus: int = 1, ttl_s: float = 60.0) -> Step:
    request = Request(task_id, gpus=gpus, ttl_s=ttl_s)
    return lambda cluster, now: allocator.allocate(cluster, request, state.deciding(cluster, now))


def releasing(state: Transactions, task_id: str) -> Step:
    return lambda cluster, now: state.with_dispatch(cluster, lease_steps.release(cluster, task_id, now), now)


def holders(cluster: ClusterState, now: float) -> set[str]:
    return set(cluster.leases)


def grant(state: Transactions, task_id: str, gpus: int = 1, ttl_s: float = 60.0) -> set[str]:
    """Return the tasks with leases right after that request."""
    return state.run(granting(state, task_id, gpus, ttl_s), holders)


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def state(store: WatchedStore, notes: Notes) -> Transactions:
    made = on(store)
    made.observer = notes.measured
    return made


@pytest.fixture
def other(store: WatchedStore) -> Transactions:
    """Transactions of another process on the same store."""
    return on(store)


class TestOneStep:
    def test_is_answered_on_the_state_right_after(self, state: Transactions, store: WatchedStore) -> None:
        assert state.run(granting(state, "a"), holders) == {"a"}
        assert store.commits == [["Granted"]]

    def test_without_changes_commits_nothing(self, state: Transactions, store: WatchedStore) -> None:
        assert state.run(lambda cluster, now: [], holders) == set()
        assert store.commits == []

    def test_its_error_is_the_callers_and_changes_nothing(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        def step(cluster: ClusterState, now: float) -> list[Change]:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            state.run(step, holders)
        assert store.commits == []

    def test_an_error_of_the_reader_comes_after_the_commit(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            state.run(granting(state, "a"), lambda cluster, now: 1 / 0)
        assert state.read(holders) == {"a"}

    def test_can_be_run_alone(self, state: Transactions) -> None:
        assert state.run(granting(state, "a"), holders, exclusive=True) == {"a"}

    def test_comes_after_the_expirations_that_are_due(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            group_commits, "MAX_DECISION_S", math.inf
        )  # a machine that pauses splits the step
        now = [1_000.0]
        store = WatchedStore(clock=lambda: now[0])
        state = on(store)
        grant(state, "early", GPUS // 2, ttl_s=10)
        grant(state, "early too", GPUS // 2, ttl_s=10)
        now[0] += 11
        with caplog.at_level(logging.WARNING):
            assert state.run(granting(state, "late", GPUS), holders) == {"late"}
        assert store.commits[2:] == [["Expired", "Expired", "Granted"]]
        assert caplog.messages == ["not renewed in time: early vnpm, early too f462"]

    def test_logs_no_expiration_that_is_not_committed(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [1_000.0]
        store = WatchedStore(clock=lambda: now[0])
        state = on(store)
        grant(state, "late", ttl_s=10)
        now[0] += 11

        def refuse() -> None:
            raise StateUnconfirmedError("restarted", remaining_s=5.0)

        store.before_commit.append(refuse)
        with caplog.at_level(logging.WARNING):
            state.expire_and_schedule()
        assert caplog.messages == ["restarted"]

    def test_is_measured(self, state: Transactions, notes: Notes) -> None:
        grant(state, "a")
        assert [name for name, _ in notes.values] == ["commit_s"]
        assert 0 <= notes.of("commit_s")[0] < 60


class TestTheUnlockedReplica:
    def test_is_read_without_the_store(
        self, state: Transactions, other: Transactions, store: WatchedStore
    ) -> None:
        assert state.peek_replica(holders) == set()
        grant(other, "a")
        refreshes = store.refreshes
        assert state.peek_replica(holders) == set()
        assert store.refreshes == refreshes

    def test_is_refreshed_before_a_request_is_refused(
        self, state: Transactions, other: Transactions, store: WatchedStore
    ) -> None:
        def held_by_a(cluster: ClusterState, now: float) -> str:
            if "a" not in cluster.leases:
                raise InvalidRequestError("no a here")
            return cluster.leases["a"].placement.node

        with pytest.raises(InvalidRequestError, match="no a here"):
            state.peek_replica(held_by_a)
        grant(other, "a")
        assert state.peek_replica(held_by_a) == "gpu-server-0"


class TestConflicts:
    def test_missed_changes_come_with_the_refusal(
        self, state: Transactions, other: Transactions, store: WatchedStore, notes: Notes
    ) -> None:
        grant(state, "a")
        store.before_commit = [lambda: grant(other, "theirs")]
        other.read(holders)
        before = store.refreshes
        assert state.run(granting(state, "b"), holders) == {"a", "theirs", "b"}
        assert store.commits[-1] == ["Granted"]
        assert store.refreshes == before
        assert notes.of("commit_conflicts") == [1]

    def test_a_refusal_without_missed_changes_leads_to_a_refresh(
        self, state: Transactions, other: Transactions, store: WatchedStore
    ) -> None:
        def stale() -> None:
            grant(other, "theirs")
            raise StaleStateError(1, 2)

        grant(state, "a")
        store.before_commit = [stale]
        assert grant(state, "b") == {"a", "theirs", "b"}

    def test_several_of_them_lead_to_the_lock(
        self, state: Transactions, other: Transactions, store: WatchedStore, notes: Notes
    ) -> None:
        races = [lambda n=n: grant(other, f"theirs {n}") for n in range(TRIES_WITHOUT_LOCK)]
        # The commit of the race itself takes the next function, which does nothing.
        store.before_commit = [turn for race in races for turn in (race, lambda: None)]
        assert "ours" in grant(state, "ours")
        assert notes.of("commit_conflicts") == [1] * TRIES_WITHOUT_LOCK
        assert len(notes.of("lock_wait_s")) == 1
        assert 0 <= notes.of("lock_wait_s")[0] < 60

    def test_a_held_lock_is_waited_for(self, state: Transactions, store: WatchedStore, notes: Notes) -> None:
        grant(state, "a")
        lock = store.lock()
        assert lock.acquire(0)
        with after(0.05, lock.release):
            assert grant(state, "b") == {"a", "b"}
        assert notes.of("commit_conflicts") == [1]
        assert len(notes.of("lock_wait_s")) == 1

    def test_who_waited_for_the_lock_begins_with_it_the_next_time(
        self, state: Transactions, store: WatchedStore, notes: Notes
    ) -> None:
        grant(state, "a")
        lock = store.lock()
        assert lock.acquire(0)
        with after(0.05, lock.release):
            grant(state, "b")
        assert grant(state, "c") == {"a", "b", "c"}
        assert grant(state, "d") == {"a", "b", "c", "d"}
        assert notes.of("commit_conflicts") == [1], "of b alone"
        assert len(notes.of("lock_wait_s")) == 2, "of b and c; c found the lock free"

    def test_the_wait_for_the_lock_ends_at_its_timeout(self, store: WatchedStore) -> None:
        state = on(store, lock_timeout_s=0.05)
        grant(state, "a")
        assert store.lock().acquire(0)
        with pytest.raises(LockTimeoutError, match=r"^the lock was busy for 0\.05 s; nothing was"):
            grant(state, "b")
        assert len(store.commits) == 1

    def test_an_expired_lock_is_acquired_again(
        self, state: Transactions, store: WatchedStore, notes: Notes
    ) -> None:
        grant(state, "a")
        store.before_commit = [refuse] * (TRIES_WITHOUT_LOCK + 2)
        assert grant(state, "b") == {"a", "b"}
        assert notes.of("commit_conflicts") == [1] * (TRIES_WITHOUT_LOCK + 2)
        assert len(notes.of("lock_wait_s")) == 3

    def test_retries_under_the_lock_end_at_its_timeout(self, store: WatchedStore) -> None:
        state = on(store, lock_timeout_s=0.0)
        grant(state, "a")
        store.before_commit = [refuse] * 50
        with pytest.raises((StaleStateError, LockTimeoutError)):
            grant(state, "b")
        assert len(store.before_commit) == 50 - TRIES_WITHOUT_LOCK - 1

    def test_a_failed_release_of_the_lock_does_not_undo_the_commit(
        self, state: Transactions, store: WatchedStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        def lost(lock: Lock) -> None:
            raise LockError("it was lost")

        grant(state, "a")
        store.before_commit = [refuse] * TRIES_WITHOUT_LOCK
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(store.lock()), "release", lost)
            assert grant(state, "b") == {"a", "b"}
        assert caplog.messages == ["the lock could not be released and will expire: it was lost"]


class TestRefusalsUnderContention:
    @pytest.fixture(autouse=True)
    def look_again_s(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Time in which a refusal is decided again: a minute, so that no pause of the machine matters."""
        monkeypatch.setattr(group_commits, "LOOK_AGAIN_S", getattr(request, "param", 60.0))

    @pytest.fixture
    def looks(self) -> list[float]:
        return []

    @pytest.fixture
    def step(self, state: Transactions, looks: list[float]) -> Step:
        """A step that is refused at its first look and granted at its second."""
        granted = granting(state, "b")

        def step(cluster: ClusterState, now: float) -> list[Change]:
            looks.append(now)
            return granted(cluster, now) if len(looks) > 1 else []

        return step

    @pytest.fixture
    def contended(self, state: Transactions, store: WatchedStore) -> None:
        store.lock = lambda replica=None: WaitedFor(store._order)  # type: ignore[method-assign]
        store.before_commit = [refuse] * TRIES_WITHOUT_LOCK
        grant(state, "a")

    def ask(self, state: Transactions, step: Step) -> set[str]:
        return state.run(step, holders, may_retry=lambda cluster: "b" not in cluster.leases)

    @pytest.mark.usefixtures("contended")
    def test_they_are_decided_again(self, state: Transactions, step: Step) -> None:
        assert self.ask(state, step) == {"a", "b"}

    @pytest.mark.usefixtures("contended")
    @pytest.mark.parametrize("look_again_s", [0.0], indirect=True)
    def test_old_ones_are_answered(self, state: Transactions, step: Step) -> None:
        assert self.ask(state, step) == {"a"}

    @pytest.mark.usefixtures("contended")
    def test_what_needs_no_change_is_answered_at_once(
        self, state: Transactions, step: Step, looks: list[float]
    ) -> None:
        assert state.run(step, holders, may_retry=lambda cluster: "a" not in cluster.leases) == {"a"}
        assert len(looks) == 1

    def test_without_contention_they_are_answered_at_once(
        self, state: Transactions, step: Step, looks: list[float]
    ) -> None:
        assert self.ask(state, step) == set()
        assert len(looks) == 1

    @pytest.mark.usefixtures("contended")
    def test_in_the_recovery_window_they_are_answered_at_once(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        def suspend() -> None:
            raise StateUnconfirmedError("grants pause", remaining_s=60.0)

        store.before_commit = [suspend]
        assert self.ask(state, granting(state, "b")) == {"a"}


class WaitedFor(ThreadLock):
    """A lock that another process always holds when it is asked for."""

    def acquire(self, timeout_s: float, meanwhile: Callable[[], object] = nothing) -> bool:
        acquired = super().acquire(timeout_s, meanwhile)
        self.waited = True
        return acquired


class TestOldReplicas:
    def test_a_refusal_is_decided_again_on_the_newest_state(
        self, state: Transactions, other: Transactions
    ) -> None:
        grant(state, "a", GPUS)
        other.run(releasing(other, "a"), holders)
        assert grant(state, "b", GPUS) == {"b"}

    def test_a_grant_needs_no_refresh(self, state: Transactions, store: WatchedStore) -> None:
        grant(state, "a")
        before = store.refreshes
        grant(state, "b")
        assert store.refreshes == before

    def test_a_refusal_on_a_fresh_state_needs_no_refresh(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        state.run(lambda cluster, now: [], holders)
        assert store.refreshes == 2, "one finds no state, one reads the first state"

    def test_reading_refreshes_unless_the_replica_is_young_enough(
        self, state: Transactions, other: Transactions, store: WatchedStore
    ) -> None:
        grant(state, "a")
        grant(other, "b")
        assert state.read(holders, max_age_s=60) == {"a"}
        assert state.read(holders) == {"a", "b"}
        before = store.refreshes
        state.read(holders, max_age_s=60)
        assert store.refreshes == before

    def test_reading_updates_the_replica_instead_of_replacing_it(self, state: Transactions) -> None:
        grant(state, "a")
        replica = state._replica.cluster
        assert replica is not None
        assert state.read(lambda cluster, now: cluster is replica)

    def test_an_empty_store_is_read_as_a_cluster_without_servers_and_stays_empty(self) -> None:
        store = WatchedStore()
        empty = Transactions(store, 20.0)
        assert empty.read(lambda cluster, now: cluster.nodes) == []
        assert empty.run(lambda cluster, now: [], holders) == set()
        assert store.refresh(None) is None

    def test_the_first_change_is_decided_again_on_what_another_process_wrote_first(self) -> None:
        store = WatchedStore()
        empty = Transactions(store, 20.0)
        assert empty.read(holders) == set()
        first = on(store)
        seen: list[int] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            seen.append(len(cluster.nodes))
            return [Drained(cluster.nodes[0].name, now)] if cluster.nodes else [MaintenanceChanged((), now)]

        empty.run(step, holders)
        assert seen == [0, 1]
        assert first.read(lambda cluster, now: cluster.nodes[0].drained is not None)

    def test_replacing_the_state_waits_for_the_lock(self, state: Transactions, store: WatchedStore) -> None:
        grant(state, "a")
        lock = store.lock()
        assert lock.acquire(0)
        with after(0.05, lock.release):
            state.replace(ClusterState(default_inventory(1, GPUS, 64)).snapshot())
        assert state.read(holders) == set()


class TestTheRecoveryWindow:
    """After a failover, grants pause until owners have renewed."""

    @staticmethod
    def unconfirmed() -> None:
        raise StateUnconfirmedError("the store was restarted", remaining_s=60)

    def test_pauses_grants_and_accepts_releases(
        self, state: Transactions, store: WatchedStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        grant(state, "a")
        store.before_commit = [self.unconfirmed]
        assert grant(state, "b") == {"a"}
        assert caplog.messages == ["the store was restarted"]
        assert state.run(releasing(state, "a"), holders) == set()

    def test_a_second_refusal_in_it_is_raised_to_the_caller(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        grant(state, "a")
        store.before_commit = [self.unconfirmed, self.unconfirmed]
        with pytest.raises(StateUnconfirmedError):
            state.run(releasing(state, "a"), holders)

    def test_may_be_detected_under_the_lock(
        self, state: Transactions, store: WatchedStore, notes: Notes
    ) -> None:
        grant(state, "a")
        store.before_commit = [*[refuse] * TRIES_WITHOUT_LOCK, self.unconfirmed]
        assert state.run(releasing(state, "a"), holders) == set()
        assert len(notes.of("lock_wait_s")) == 2


def unwritable() -> None:
    raise InvalidRequestError("a jobplaced change cannot be stored: a is no place")


class TestThreadsOfOneProcess:
    def test_one_whose_change_cannot_be_written_fails_alone(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b")
            meanwhile.comes("c")
            store.before_commit += [unwritable, lambda: None, unwritable]
        assert meanwhile.granted == {"a", "b"}
        assert [(each, type(error)) for each, error in meanwhile.errors.items()] == [
            ("c", InvalidRequestError)
        ]
        assert state.read(holders) == {"a", "b"}

    def test_one_commit_carries_all_operations_that_arrived_meanwhile(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b")
            meanwhile.comes("c")
        assert store.commits == [["Granted"], ["Granted", "Granted"]]
        assert meanwhile.granted == {"a", "b", "c"}

    def test_a_caller_returns_while_the_next_group_is_carried_out(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        second, third = Pause(), Pause()
        with Meanwhile(state, store) as meanwhile:
            store.before_commit = [second, third]
            meanwhile.comes("b")
            meanwhile.comes("c")
            meanwhile.goes_on()
            second.reached()
            meanwhile.comes("d")
            second.ends()
            third.reached()
            meanwhile.ended("b")
            meanwhile.ended("c")
            assert meanwhile.granted == {"a", "b", "c"}
            third.ends()
        assert meanwhile.granted == {"a", "b", "c", "d"}

    def test_who_comes_during_the_wait_for_the_lock_is_in_the_commit(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        lock = store.lock()
        assert lock.acquire(0)
        with Meanwhile(state, store) as meanwhile:
            waiting = meanwhile.waits_for_the_lock()
            meanwhile.goes_on()
            waiting.wait(10)
            meanwhile.comes("b")
            meanwhile.comes("c", GPUS)
            lock.release()
        assert store.commits == [["Granted", "Granted"]]
        assert meanwhile.granted == {"a", "b"}

    def test_nobody_joins_an_operation_that_runs_alone(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        lock = store.lock()
        assert lock.acquire(0)
        with Meanwhile(state, store, exclusive=True) as meanwhile:
            waiting = meanwhile.waits_for_the_lock()
            meanwhile.goes_on()
            waiting.wait(10)
            meanwhile.comes("b")
            lock.release()
        assert store.commits == [["Granted"], ["Granted"]]
        assert meanwhile.granted == {"a", "b"}

    def test_an_operation_that_runs_alone_is_in_no_group_either_once_it_was_left(self) -> None:
        """As after expirations that took long; another caller comes before it is carried out again."""
        alone, other = (Operation(lambda cluster, now: [], holders, by="") for _ in range(2))
        groups_made: list[list[Operation[Any]]] = []

        def lead(operations: list[Operation[Any]], deadline: float) -> None:
            groups_made.append(list(operations))
            for operation in operations if len(groups_made) > 1 else ():
                operation.done = True

        groups = Groups(lead)
        groups.mutex = TakenNext(lambda: groups.carry_out(other, 5.0))  # type: ignore[assignment]
        groups.carry_out(alone, 5.0, exclusive=True)
        assert groups_made == [[alone], [other], [alone]]

    def test_later_ones_decide_on_top_of_earlier_ones(self, state: Transactions, store: WatchedStore) -> None:
        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b", GPUS - 1)
            meanwhile.comes("c", GPUS - 1)
        assert meanwhile.granted == {"a", "b"}
        assert meanwhile.errors == {}

    def test_an_error_of_one_does_not_affect_the_others(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b", GPUS - 1)
            meanwhile.raises("c", ZeroDivisionError())
            meanwhile.comes("d", GPUS)
        assert meanwhile.errors.keys() == {"c"}
        assert isinstance(meanwhile.errors["c"], ZeroDivisionError)
        assert meanwhile.granted == {"a", "b"}

    def test_expirations_are_an_operation_of_their_own(self) -> None:
        now = [1_000.0]
        store = WatchedStore(clock=lambda: now[0])
        state = on(store)
        grant(state, "early", 1, ttl_s=10)
        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b")
            meanwhile.comes("c")
            now[0] += 11
        assert [kinds for kinds in store.commits if "Expired" in kinds] == [["Expired", "Granted", "Granted"]]
        now[0] += 61
        assert {type(change) for change in state.expire_and_schedule()} == {Expired}
        assert state.expire_and_schedule() == []

    def test_a_caller_that_times_out_has_no_effect(self, store: WatchedStore) -> None:
        state = on(store, lock_timeout_s=0.05)
        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b")
            meanwhile.ended("b")
        error = meanwhile.errors["b"]
        assert isinstance(error, LockTimeoutError)
        assert str(error) == str(lock_busy(0.05))
        assert grant(state, "c") == {"a", "c"}

    def test_a_request_that_comes_twice_at_once_is_carried_out_once(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        with Meanwhile(state, store) as meanwhile:
            for task_id in "bcd":  # the same request, whose client asked again, between two others
                meanwhile.comes(task_id, once=Once("ada", "key", "f"))
                meanwhile.comes(f"other {task_id}", once=Once("bob", f"key {task_id}", "f"))
        assert meanwhile.errors == {}
        assert meanwhile.granted == {"a", "b", "other b", "other c", "other d"}
        assert meanwhile.leases["c"] >= {"a", "b"}

    def test_the_others_continue_when_the_leader_is_stopped(
        self, state: Transactions, store: WatchedStore
    ) -> None:
        def stop() -> None:
            raise KeyboardInterrupt

        with Meanwhile(state, store) as meanwhile:
            meanwhile.comes("b")
            meanwhile.comes("c")
            store.before_commit = [stop]
        stopped = [task_id for task_id, error in meanwhile.errors.items() if error.args == ("stopped",)]
        assert len(stopped) == 1
        assert {"b", "c"} - set(stopped) <= meanwhile.granted
        assert grant(state, "d") == {"a", "b", "c", "d"} - set(stopped)

    def test_a_caller_stopped_while_waiting_has_no_effect(
        self, state: Transactions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Stopped:
            def acquire(self, timeout: float) -> bool:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(state._groups, "mutex", Stopped())
            with pytest.raises(KeyboardInterrupt):
                grant(state, "a")
        assert grant(state, "b") == {"b"}

    def test_a_caller_stopped_behind_another_has_no_effect(
        self, state: Transactions, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Stopped:
            def acquire(self, timeout: float = -1) -> bool:
                if timeout >= 0:
                    raise KeyboardInterrupt
                return True

        with Meanwhile(state, store) as meanwhile:
            with monkeypatch.context() as patch:
                patch.setattr(group, "threading", SimpleNamespace(Lock=Stopped))
                meanwhile.comes("b")
                meanwhile.ended("b")
            meanwhile.comes("c")
        assert meanwhile.errors["b"].args == ("stopped",)
        assert meanwhile.granted == {"a", "c"}
        assert grant(state, "d") == {"a", "c", "d"}

    def test_a_replica_interrupted_in_a_change_is_not_used_again(self, state: Transactions) -> None:
        def stop(cluster: ClusterState, now: float) -> list[Change]:
            cluster.leases.clear()
            raise KeyboardInterrupt

        grant(state, "a")
        for stopped in (lambda: state.read(stop)), (lambda: state.run(stop, holders)):
            with pytest.raises(KeyboardInterrupt):
                stopped()
            assert state.read(holders) == {"a"}


def refuse() -> None:
    """Fail a commit as if another client had been faster, without the missed changes."""
    raise StaleStateError(0, 1)


class after:
    """Run the action that many seconds later, and wait for it at the end."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, action)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exception: object) -> None:
        self._timer.join()


class Pause:
    """A function that says when it is called, and returns when it may."""

    def __init__(self) -> None:
        self._called = threading.Event()
        self._goes_on = threading.Event()

    def __call__(self) -> None:
        self._called.set()
        self._goes_on.wait(30)

    def reached(self) -> None:
        assert self._called.wait(10)

    def ends(self) -> None:
        self._goes_on.set()


class TakenNext:
    """A mutex that another caller takes when it is first free."""

    def __init__(self, caller: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._callers = [caller]

    def acquire(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()
        if self._callers:
            self._callers.pop()()


class Meanwhile:
    """Callers that arrive, in that order, during the commit of the first one (task `a`)."""

    def __init__(self, state: Transactions, store: WatchedStore, *, exclusive: bool = False) -> None:
        self._state = state
        self._store = store
        self._exclusive = exclusive
        self._threads: dict[str, threading.Thread] = {}
        self._first = Pause()
        self.leases: dict[str, set[str]] = {}
        self.errors: dict[str, Exception] = {}

    @property
    def granted(self) -> set[str]:
        return {task_id for task_id, leases in self.leases.items() if task_id in leases}

    def goes_on(self) -> None:
        """End the commit of the first caller."""
        self._first.ends()

    def waits_for_the_lock(self) -> threading.Event:
        """Return what is set once somebody has asked for the lock."""
        asked = threading.Event()
        lock_of = self._store.lock

        def lock(replica: ClusterState | None = None) -> Lock:
            asked.set()
            return lock_of(replica)

        self._store.lock = lock  # type: ignore[method-assign]
        return asked

    def comes(self, task_id: str, gpus: int = 1, once: Once | None = None) -> None:
        self._start(task_id, granting(self._state, task_id, gpus), once=once)

    def raises(self, task_id: str, error: Exception) -> None:
        def step(cluster: ClusterState, now: float) -> list[Change]:
            raise error

        self._start(task_id, step)

    def ended(self, task_id: str) -> None:
        self._threads[task_id].join(10)
        assert not self._threads[task_id].is_alive()

    def __enter__(self) -> Meanwhile:
        self._store.before_commit = [self._first]
        self._start("a", granting(self._state, "a"), waits=False, exclusive=self._exclusive)
        self._first.reached()
        return self

    def __exit__(self, *exception: object) -> None:
        self.goes_on()
        for thread in self._threads.values():
            thread.join(10)
            assert not thread.is_alive()

    def _start(
        self,
        task_id: str,
        step: Step,
        *,
        waits: bool = True,
        exclusive: bool = False,
        once: Once | None = None,
    ) -> None:
        def holders_again(cluster: ClusterState, now: float, reference: object) -> set[str]:
            return holders(cluster, now)

        repeatable = None if once is None else Repeatable(once, lambda *_: None, holders_again)

        def call() -> None:
            try:
                self.leases[task_id] = self._state.run(step, holders, exclusive=exclusive, once=repeatable)
            except KeyboardInterrupt:
                self.errors[task_id] = RuntimeError("stopped")
            except Exception as error:
                self.errors[task_id] = error

        arrived = self._state._groups._arrived
        before = len(arrived)
        thread = threading.Thread(target=call, daemon=True)
        self._threads[task_id] = thread
        thread.start()
        deadline = time.monotonic() + 10
        while waits and len(arrived) == before and thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)


class SlowStore(MemoryStore):
    """A store that answers no read before it may; then it says that it did not answer, if it `fails`."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.initialise(ClusterState(default_inventory(2)).snapshot())
        self.reads = 0
        self.may_answer = threading.Semaphore(0)
        self._fails = fails

    def refresh(self, known: ClusterState | None) -> ClusterState | None:
        self.reads += 1
        assert self.may_answer.acquire(timeout=60)
        if self._fails:
            raise StoreUnavailableError("it did not answer within 5 s")
        return super().refresh(known)


def servers(cluster: ClusterState, now: float) -> int:
    return len(cluster.nodes)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["decisions", "queue", "service"])
def test_who_asks_while_the_store_is_read_waits_for_it_twice_at_most(way: str, fails: bool) -> None:
    """Not for all those in turn who asked before."""
    store = SlowStore(fails=fails)
    answers: list[object] = []
    asks: dict[str, Callable[[], object]] = {
        "decisions": partial(Transactions(store, 60.0).read, servers),
        "queue": partial(QueueView(store, lambda cluster, now: []).read, servers),
        "service": partial(StateFollower(store).read, servers),
    }

    def ask() -> None:
        try:
            answers.append(asks[way]())
        except StoreUnavailableError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(20)]
    for thread in threads:
        thread.start()
    wait_for(lambda: store.reads == 1)
    time.sleep(0.05)  # the others ask meanwhile
    store.may_answer.release(20)
    for thread in threads:
        thread.join(60)
    assert answers == 20 * ["it did not answer within 5 s" if fails else 2]
    assert store.reads < 10, "two, if all have asked by then"


@pytest.mark.parametrize("fails", [False, True])
def test_a_reading_that_began_before_somebody_asked_is_not_theirs(fails: bool) -> None:
    store = SlowStore(fails=fails)
    replica, follower = Replica(store), StateFollower(store)
    store.may_answer.release(4)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError) if fails else nullcontext():
            replica.as_of(time.monotonic())
        with pytest.raises(StoreUnavailableError) if fails else nullcontext():
            follower.read(servers)
    assert store.reads == 4


def test_a_reading_may_lack_what_was_committed_before_somebody_asked_in_its_midst() -> None:
    store = SlowStore(fails=False)
    replica = Replica(store)
    reading = threading.Thread(target=replica.as_of, args=(time.monotonic(),))
    reading.start()
    wait_for(lambda: store.reads == 1)
    asked_at = time.monotonic()
    store.may_answer.release(2)
    reading.join(60)
    replica.as_of(asked_at)
    assert store.reads == 2


class MisreadStore(MemoryStore):
    """A store whose whole state is read without its leases while it `misreads`, or cannot be read at all."""

    def __init__(self) -> None:
        super().__init__()
        self.misreads = False
        self.is_contradictory = False

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        if replica is None and self.is_contradictory:
            raise CapacityError("task 'a' already holds a lease")
        cluster = super().refresh(replica)
        if replica is None and cluster is not None and self.misreads:
            return ClusterState.from_snapshot(replace(cluster.snapshot(), leases=()))
        return cluster


@pytest.fixture
def misread() -> tuple[MisreadStore, Transactions]:
    """A store, and transactions that know the leases in it: two."""
    store = MisreadStore()
    others = on(store)
    grant(others, "a")
    grant(others, "b")
    store.misreads = True
    return store, others


@pytest.mark.parametrize("way", ["decisions", "queue", "service"])
def test_a_copy_of_the_state_that_a_change_does_not_fit_is_read_anew(
    way: str, misread: tuple[MisreadStore, Transactions], caplog: pytest.LogCaptureFixture
) -> None:
    store, others = misread
    ways: dict[str, Callable[[], Callable[..., set[str]]]] = {
        "decisions": lambda: Transactions(store, 60.0).read,
        "queue": lambda: QueueView(store, lambda cluster, now: []).read,
        "service": lambda: StateFollower(store).read,
    }
    read = ways[way]()
    assert read(holders) == set()
    store.misreads, store.is_contradictory = False, True
    others.run(releasing(others, "a"), holders)
    with pytest.raises(CapacityError):  # what is stored cannot be read: that is no fault of the copy
        read(holders)
    store.is_contradictory = False
    caplog.clear()
    assert read(holders) == {"b"}
    [record] = caplog.records
    assert "a change does not fit this copy" in record.getMessage()


def test_a_conflict_whose_changes_do_not_fit_is_decided_on_the_state_read_anew(
    misread: tuple[MisreadStore, Transactions],
) -> None:
    store, others = misread
    state = on(store)
    assert state.read(holders) == set()
    store.misreads = False
    others.run(releasing(others, "a"), holders)
    assert grant(state, "c") == {"b", "c"}


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    """As where PyTorch forks its workers while another thread renews the lease: the child hung for good."""
    transactions = Transactions(WatchedStore(), lock_timeout_s=1.0)
    inside, over = threading.Event(), threading.Event()

    def slow(cluster: ClusterState, now: float) -> None:
        inside.set()
        over.wait(60)

    thread = threading.Thread(target=lambda: transactions.read(slow))
    thread.start()
    inside.wait(60)
    try:
        assert in_child(lambda: transactions.read(lambda cluster, now: len(cluster.nodes))) == 0
    finally:
        over.set()
        thread.join()
