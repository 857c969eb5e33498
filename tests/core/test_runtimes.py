"""Expected runtime of a request: stated, else learnt from runs of the same class of task, else unknown."""

from __future__ import annotations

from itertools import islice, product
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core import runtimes
from resource_manager.core.changes import Expired, Granted, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.runtimes import (
    JOURNAL_LENGTH,
    KEPT_RUNTIMES,
    MAX_CLASSES,
    LearntRuntimes,
    class_of,
)
from tests.builders import node


def run(
    cluster: ClusterState, lease_id: str, seconds: float, outcome: str = "SUCCESS", **more: object
) -> None:
    request = Request(lease_id, 1, **more)  # type: ignore[arg-type]
    token = cluster.last_fencing_token + 1
    cluster.apply(Granted(Lease(request, (Placement("a", (0,)),), token, 100.0), 100.0))
    cluster.apply(Released(lease_id, token, 100.0 + seconds, outcome))


@pytest.fixture
def cluster() -> ClusterState:
    return ClusterState([node("a", 2)])


def test_the_learnt_runtime_is_the_median_of_the_last_runs(cluster: ClusterState) -> None:
    for number, seconds in enumerate((100.0, 300.0, 200.0)):
        run(cluster, f"train_{number}", seconds)
    assert cluster.runtimes.runtime_of(Request("train_9", 2)) == 200.0
    assert cluster.runtimes.runtime_of(Request("other", 2)) is None


def test_a_stated_runtime_takes_precedence(cluster: ClusterState) -> None:
    run(cluster, "t1", 100.0)
    stated = Request("t2", 2, expected_runtime_s=5.0)
    assert cluster.runtimes.runtime_of(stated) == 5.0


def test_runs_of_one_dag_and_task_are_one_class(cluster: ClusterState) -> None:
    labels = {"instance": "i", "dag_id": "d", "task_id": "t", "run_id": "r1"}
    assert class_of(Request("x", labels=labels)) == "i/d/t"
    run(cluster, "instance:d/r1/t", 60.0, labels=labels)
    runtime_of = cluster.runtimes.runtime_of
    assert runtime_of(Request("y", labels={**labels, "run_id": "r2"})) == 60.0
    assert runtime_of(Request("y", labels={**labels, "instance": "staging"})) is None


def test_a_job_is_of_the_class_of_its_id_also_where_a_replay_numbers_it() -> None:
    for name in ("train_7", "train_7#2", "train_8#13"):
        assert class_of(Request(name)) == "train_#"


def test_what_did_not_succeed_teaches_nothing(cluster: ClusterState) -> None:
    for number, outcome in enumerate(("FAILED", "CANCELLED", "PREEMPTED", "")):
        run(cluster, f"t{number}", 5.0, outcome)
    cluster.apply(Granted(Lease(Request("t9", 1), (Placement("a", (0,)),), 9, 0.0), 0.0))
    cluster.apply(Expired("t9", 9, 50.0))
    assert cluster.runtimes.runs == {}


@pytest.mark.parametrize(
    ("lease_id", "labels"), [("train_1", {"restart_count": "1"}), ("hand:ada@desk/0123abcd", {})]
)
def test_what_was_left_of_a_preempted_job_and_a_run_by_hand_tell_no_runtime_of_a_task(
    cluster: ClusterState, lease_id: str, labels: dict[str, str]
) -> None:
    run(cluster, lease_id, 5.0, labels=labels)
    assert cluster.runtimes.runs == {}


def test_only_the_last_runs_of_the_last_classes_are_kept(cluster: ClusterState) -> None:
    for seconds in (1_000.0, 10.0):
        for _ in range(KEPT_RUNTIMES):
            run(cluster, "a", seconds)
    assert cluster.runtimes.runtime_of(Request("a", 2)) == 10.0
    others = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), MAX_CLASSES)]
    for name in (*others, "a"):
        run(cluster, name, 1.5)
    assert [*cluster.runtimes.runs] == [*others[1:], "a"], "the oldest was forgotten each time"
    assert cluster.runtimes.runs["a"] == (1.5,)


def test_a_run_counts_in_whole_milliseconds_and_at_least_a_second(cluster: ClusterState) -> None:
    run(cluster, "a", 12.3456789)
    run(cluster, "b", 0.25)
    assert cluster.runtimes.runs == {"a": (12.346,), "b": (1.0,)}


@given(
    st.lists(st.sampled_from("abcd"), max_size=6), st.lists(st.sampled_from("abcd"), min_size=1, max_size=6)
)
def test_a_trial_teaches_nothing_and_a_snapshot_keeps_all(before: list[str], tried: list[str]) -> None:
    cluster = ClusterState([node("a", 2)])
    cluster.runtimes = LearntRuntimes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtimes, "MAX_CLASSES", 3)
        for name in before:
            run(cluster, name, 5.0)
        known = list(cluster.runtimes.runs.items())
        for name in "abcd":
            cluster.runtimes.runtime_of(Request(name))
        with cluster.trial():
            for name in tried:
                run(cluster, name, 7.0)
        assert list(cluster.runtimes.runs.items()) == known
        again = ClusterState.from_snapshot(cluster.snapshot()).runtimes
        assert list(again.runs.items()) == known
        for name in "abcd":
            asked = Request(name)
            assert again.runtime_of(asked) == cluster.runtimes.runtime_of(asked)


def test_the_journal_tells_which_classes_changed(cluster: ClusterState) -> None:
    mark = cluster.runtimes.mark
    run(cluster, "a", 5.0)
    with cluster.trial():
        run(cluster, "b", 5.0)
    assert cluster.runtimes.changed_since(mark) == ["a", "b", "b"]
    for _ in range(JOURNAL_LENGTH):
        run(cluster, "c", 5.0)
    assert cluster.runtimes.changed_since(mark) is None
    assert cluster.runtimes.changed_since(cluster.runtimes.mark) == []
