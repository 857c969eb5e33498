"""Announced demands: once, until the task asks or is not going to, and when that should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core import announced as limits
from resource_manager.core.announced import MAX_ANNOUNCED, MAX_OF_RUN
from resource_manager.core.models import Lease
from resource_manager.errors import InvalidRequestError
from resource_manager.manager import forecasts
from resource_manager.manager.serializers import coming_in_words
from tests.builders import Clock, present


def announce(manager: GPUResourceManager, task: str, run: str = "r1", **options: Any) -> bool:
    """Announce a task of 2 GPUs of a run of the DAG `etl`."""
    return manager.announce(lease(task, run), options.pop("gpus", 2), labels=labels(task, run), **options)


def lease(task: str, run: str = "r1") -> str:
    return f"i:etl/{run}/{task}"


def labels(task: str, run: str = "r1") -> dict[str, str]:
    return {"instance": "i", "dag_id": "etl", "run_id": run, "task_id": task, "map_index": "-1"}


def coming(manager: GPUResourceManager) -> list[dict[str, Any]]:
    return [dict(each) for each in manager.coming()]


def names(manager: GPUResourceManager) -> list[str]:
    return [each["name"] for each in manager.coming()]


@contextmanager
def running(manager: GPUResourceManager, task: str, run: str) -> Iterator[None]:
    """Hold the lease of a task inside, which ends well."""
    manager.submit(lease(task, run), 2, labels=labels(task, run))
    yield
    manager.release(lease(task, run), outcome="SUCCESS")


def play(manager: GPUResourceManager, clock: Clock, run: str, *, lag_s: float, prep_s: float) -> None:
    """Play a run: `prep` asks a minute after it began, takes so long, and `train` asks that much later."""
    announce(manager, "prep", run)
    announce(manager, "train", run, after=[lease("prep", run)])
    clock.now += 60
    with running(manager, "prep", run):
        clock.now += prep_s
    clock.now += lag_s
    with running(manager, "train", run):
        clock.now += 900


def test_a_demand_is_announced_once_and_holds_nothing(manager: GPUResourceManager) -> None:
    assert [announce(manager, "train") for _ in range(2)] == [True, True]
    assert names(manager) == ["etl.train"]
    assert [change["change"] for change in manager.history(what="announce")] == ["announced"]
    granted = manager.allocate("all", gpus=8)
    assert isinstance(granted, Lease)
    assert granted.fencing_token == 1


def test_it_is_served_once_its_task_asks_at_once_or_in_the_queue(manager: GPUResourceManager) -> None:
    for task in ("now", "waits"):
        announce(manager, task, gpus=8)
        manager.submit(lease(task), 8, labels=labels(task))
        assert names(manager) == []
    assert not announce(manager, "now"), "a task that holds a lease needs none"
    assert not announce(manager, "waits")


def test_two_thousand_mapped_tasks_are_one_and_served_by_the_first(manager: GPUResourceManager) -> None:
    announce(manager, "map", copies=2000)
    [each] = manager.coming()
    assert coming_in_words([each], 0.0) == "at an unknown time 4000 more GPUs will be asked for"
    manager.submit(lease("map/1999"), 2, labels={**labels("map"), "map_index": "1999"})
    assert names(manager) == []


@pytest.mark.parametrize("copies", [2.5, "3", True])
def test_a_number_of_copies_that_no_store_keeps_is_refused(manager: GPUResourceManager, copies: Any) -> None:
    with pytest.raises(InvalidRequestError, match="copies must be a whole number"):
        announce(manager, "map", copies=copies)


def test_what_will_not_run_is_withdrawn_and_told_with_the_reason(manager: GPUResourceManager) -> None:
    for task in ("a", "b", "c"):
        announce(manager, task, owner="ada")
    assert manager.withdraw([lease("a"), lease("none")], reason="its branch was skipped") == 1
    assert manager.withdraw([lease("b")], owner="bob") == 0, "it is another's"
    assert names(manager) == ["etl.b", "etl.c"]
    assert manager.history(what="announce")[-1]["reason"] == "its branch was skipped"
    announce(manager, "b", "r2")
    assert manager.withdraw(run="i:etl/r1", reason="the run has ended") == 2
    assert [each["task_id"] for each in manager.coming()] == [lease("b", "r2")]
    manager.reset()
    assert names(manager) == []


def test_a_run_and_all_runs_together_are_bounded(
    manager: GPUResourceManager,
) -> None:
    runs = range(MAX_ANNOUNCED // MAX_OF_RUN)
    for run in runs:
        taken = [announce(manager, f"t{n}", f"r{run}") for n in range(MAX_OF_RUN + 1)]
        assert taken == [True] * MAX_OF_RUN + [False]
    assert not announce(manager, "t", f"r{len(runs)}")


def test_who_announces_most_gives_way_to_others(manager: GPUResourceManager, clock: Clock) -> None:
    """One user's announcements kept those of all others out for a week, or those of a run that was theirs."""
    for number in range(MAX_ANNOUNCED):
        clock.now += 1
        assert announce(manager, f"eve{number}", f"r{number // MAX_OF_RUN}", owner="eve")
    taken = [announce(manager, f"ada{number}", "r0", owner="ada") for number in range(MAX_OF_RUN + 1)]
    assert taken == [True] * MAX_OF_RUN + [False]
    of_ada = {f"etl.ada{number}" for number in range(MAX_OF_RUN)}
    assert {*names(manager)} == of_ada | {f"etl.eve{number}" for number in range(MAX_ANNOUNCED - MAX_OF_RUN)}
    assert manager.history(what="announce")[-2]["reason"].startswith("its owner announced the most")
    assert not announce(manager, "more", "r9", owner="eve")
    assert announce(manager, "bob", "r9", owner="bob")
    assert not announce(manager, "eve0", "r0", owner="ada"), "it is eve's, who came first"


@pytest.mark.parametrize("task", ["new", "old"])
def test_what_was_forgotten_goes_with_the_next_which_may_be_the_same(
    manager: GPUResourceManager, clock: Clock, task: str
) -> None:
    announce(manager, "old")
    clock.now += limits.ANNOUNCED_FOR_S + 1
    assert announce(manager, task)
    assert names(manager) == [f"etl.{task}"]
    assert [change["change"] for change in manager.history(what="announce")] == [
        "announced",
        "withdrawn",
        "announced",
    ]


def test_without_any_history_the_time_is_unknown_and_it_says_whose(manager: GPUResourceManager) -> None:
    announce(manager, "prep")
    announce(manager, "train", after=[lease("prep")])
    assert [each["detail"] for each in manager.coming()] == [
        f"no earlier run of {lease('prep')} is known",
        f"no earlier run of {lease('prep')} is known",
    ]


def test_after_three_runs_a_time_is_known_which_moves_as_the_run_goes_on(
    manager: GPUResourceManager, clock: Clock
) -> None:
    for number in range(3):
        play(manager, clock, f"r{number}", lag_s=120, prep_s=600)
    announce(manager, "prep", "r9")
    announce(manager, "train", "r9", after=[lease("prep", "r9")])
    began = clock.now
    prep, train = coming(manager)
    assert (prep["name"], train["name"]) == ("etl.prep", "etl.train")
    assert prep["at"] == pytest.approx(began + 60, rel=0.3, abs=30)
    assert prep["at"] + 300 < train["at"] < began + 1500
    clock.now += 60
    with running(manager, "prep", "r9"):
        clock.now += 590
        [train] = coming(manager)
        assert train["at"] > clock.now + 30, "prep and the lag are to come"
        clock.now += 10
    clock.now += 300
    [late] = coming(manager)
    assert clock.now <= late["earliest"] <= late["at"] <= late["latest"], "longer than ever: any moment"


@pytest.mark.parametrize("runtime_s", [3600.0, None])
def test_what_comes_after_a_task_that_waits_is_told_by_its_start_whoever_asks_first(
    manager: GPUResourceManager, clock: Clock, runtime_s: float | None
) -> None:
    """A command that only asked what is coming knew no starts: no earlier run was known, it said."""
    for number in range(3):
        play(manager, clock, f"r{number}", lag_s=120, prep_s=600)
    manager.submit("busy", 8, expected_runtime=runtime_s)
    announce(manager, "train", "r9", after=[lease("prep", "r9")])
    manager.submit(lease("prep", "r9"), 2, labels=labels("prep", "r9"))
    [train] = coming(GPUResourceManager(manager.settings, store=manager.store))
    if runtime_s is None:
        assert train["detail"] == f"it is unknown when {lease('prep', 'r9')} starts"
    else:
        assert train["at"] == pytest.approx(clock.now + 3600 + 600 + 120, rel=0.1)


def test_lags_are_learnt_though_nobody_reads_for_longer_than_the_history_that_is_walked(
    manager: GPUResourceManager, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "MAX_WALK", 10)
    manager.submit("other", 1, ttl=86_400)
    for number in range(3):
        play(manager, clock, f"r{number}", lag_s=120, prep_s=600)
        manager.check_deadlines()
        for _ in range(forecasts.MAX_WALK + 1):
            manager.renew("other")
    announce(manager, "train", "r9", after=[lease("prep", "r9")])
    assert coming(manager)[0]["at"] == pytest.approx(clock.now + 120, rel=0.3)


def test_a_lag_that_changed_by_ten_moves_the_interval_within_some_runs(
    manager: GPUResourceManager, clock: Clock
) -> None:
    for number in range(10):
        play(manager, clock, f"a{number}", lag_s=60, prep_s=60)
    for number in range(8):
        play(manager, clock, f"b{number}", lag_s=600, prep_s=60)
    announce(manager, "train", "c")
    [train] = coming(manager)
    assert train["latest"] > clock.now + 500


def test_a_clock_that_jumps_back_gives_no_time_before_now(manager: GPUResourceManager, clock: Clock) -> None:
    play(manager, clock, "r1", lag_s=60, prep_s=60)
    play(manager, clock, "r2", lag_s=60, prep_s=60)
    announce(manager, "prep", "r3")
    clock.now -= 3600
    assert all(each["earliest"] is None or each["earliest"] >= clock.now for each in manager.coming())
    with running(manager, "prep", "r3"):
        assert names(manager) == []


def test_tasks_that_come_after_each_other_are_no_endless_loop(manager: GPUResourceManager) -> None:
    announce(manager, "a", after=[lease("b")])
    announce(manager, "b", after=[lease("a")])
    announce(manager, "c")
    assert sorted(names(manager)) == ["etl.a", "etl.b", "etl.c"]


@pytest.mark.parametrize(
    "wrong", [{"after": ["x"] * 51}, {"copies": -1}, {"copies": 10**9}, {"after": ["\x00"]}, {"gpus": 99}]
)
def test_a_wrong_announcement_is_refused(manager: GPUResourceManager, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"after|copies|gpus"):
        announce(manager, "train", **wrong)


def test_the_estimate_of_a_start_knows_what_is_coming(manager: GPUResourceManager, clock: Clock) -> None:
    """Of two that wait for one job, the second is overtaken by a weightier task that is announced."""
    for number in range(5):
        run = f"r{number}"
        announce(manager, "weighty", run, gpus=8)
        clock.now += 60
        manager.submit(lease("weighty", run), 8, labels=labels("weighty", run))
        clock.now += 600
        manager.release(lease("weighty", run), outcome="SUCCESS")
    manager.submit("now", 8, expected_runtime=600)
    manager.submit("next", 8, expected_runtime=600)
    before = manager.queue()[0]["estimated_start"]
    announce(manager, "weighty", "r9", gpus=8, priority=100)
    clock.now += 1
    after = manager.explain_named("next")["estimated_start"]
    assert before["at"] == pytest.approx(clock.now + 600, abs=10)
    assert after["at"] == pytest.approx(clock.now + 1200, abs=60)


@pytest.mark.parametrize("is_running", [True, False])
def test_the_queue_is_read_while_a_copy_of_what_is_announced_runs_or_waits(
    manager: GPUResourceManager, clock: Clock, is_running: bool
) -> None:
    """Plays queue copies by their own ids: one that was there already made every read of the queue fail."""
    for number in range(5):
        play(manager, clock, f"r{number}", lag_s=300, prep_s=600)
    if not is_running:
        manager.submit("busy", 8, expected_runtime=6000)
    manager.submit(f"{lease('prep', 'r9')}/0", 8, expected_runtime=6000)
    manager.submit("waits", 8, expected_runtime=600)
    assert announce(manager, "prep", "r9", copies=2)
    start = manager.queue()[-1]["estimated_start"]
    assert present(start["at"]) == pytest.approx(clock.now + (6000 if is_running else 12_000), abs=60)
