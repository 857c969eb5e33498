"""The proof of a day finds what a day may break; the day itself is `python -m tests.faults.day`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    Outcome,
    Preempting,
    Queued,
    Released,
    Resumed,
)
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from tests.faults.day import plan
from tests.faults.day.by_hand import MAX_TRIES, SHORT_ID, Desk, Present, renamed
from tests.faults.day.forked import ForkedProgram
from tests.faults.day.gaps import CLEANED, estimates, gaps, unexplained
from tests.faults.day.page import page_of
from tests.faults.day.proof import Evidence, Look, broken, not_shown, remarks, spans

SHORT = plan.DayJob("job_000", 0, 1, 2, 10.0, "vision", 0, False, True, False)
SAVING = replace(SHORT, name="job_001", team="search", preemptible=True)


def granted(name: str, token: int, at: float, node: str = "gpu-00", *gpus: int) -> Granted:
    request = Request(f"a1:day_00/run/{name}", 2)
    return Granted(Lease(request, (Placement(node, gpus or (0, 1)),), token, at, queued_at=at), at)


def released(name: str, token: int, at: float, outcome: str = Outcome.SUCCESS) -> Released:
    return Released(f"a1:day_00/run/{name}", token, at, outcome)


def cancelled(request: Request, at: float) -> Cancelled:
    return Cancelled(request.lease_id, at)


def beats(name: str, token: int, begin: float, steps: range, node: str = "gpu-00") -> list[dict[str, Any]]:
    fixed = {"task": f"a1:day_00/run/{name}", "server": node, "gpus": "0,1", "member": ""}
    process = f"{token}-7-{begin}"
    return [{**fixed, "process": process, "step": step, "at": begin + step - steps[0]} for step in steps]


def on_slurm(name: str, begin: float) -> list[dict[str, Any]]:
    own = {"task": f"slurm/{name}", "process": f"0-9-{begin}"}
    return [{**beat, **own} for beat in beats(name, 0, begin, range(5), "n1")]


def task(tries: int = 1, state: str = "success", unrecorded: tuple[int, ...] = ()) -> dict[str, Any]:
    return {
        "state": state,
        "try_number": tries,
        "unrecorded": list(unrecorded),
        "began": 91.0,
        "ended": 140.0,
    }


GOOD_CHANGES: list[Change] = [
    granted("job_000", 1, 100.0),
    released("job_000", 1, 112.0),
    granted("job_001", 2, 113.0),
    Preempting("a1:day_00/run/job_001", 2, "other", 120.0, 115.0),
    released("job_001", 2, 117.0, Outcome.PREEMPTED),
    granted("job_001", 3, 118.0, "gpu-01"),
    released("job_001", 3, 131.0),
]
GOOD_BEATS = [
    *beats("job_000", 1, 101.0, range(11)),
    *beats("job_001", 2, 114.0, range(3)),
    *beats("job_001", 3, 119.0, range(3, 14), "gpu-01"),
]
GOOD = Evidence(
    jobs=[SHORT, SAVING],
    began=90.0,
    ended=140.0,
    faults=[(120.0, "a server vanishes")],
    tasks={"job_000": task(), "job_001": task()},
    beats=GOOD_BEATS,
    changes=GOOD_CHANGES,
    left=[],
    dead_gpus=[],
    vanished="gpu-31",
    window=(["gpu-40"], 200.0, 300.0),
)


def with_changes(*changes: Change) -> Callable[[Evidence], Evidence]:
    return lambda good: replace(good, changes=[*good.changes, *changes])


BROKEN: dict[str, tuple[str, Callable[[Evidence], Evidence]]] = {
    "two leases of a GPU": (
        "allocated to job_000 and thief at once",
        with_changes(granted("thief", 4, 105.0)),
    ),
    "a token given twice": ("do not rise", with_changes(granted("late", 1, 135.0, "gpu-02"))),
    "a process without a lease": (
        "without a lease",
        lambda good: replace(good, beats=[*good.beats, *beats("job_000", 9, 101.0, range(1), "gpu-05")]),
    ),
    "a process that outlives its lease": (
        "still ran on gpu-00 when job_001 was granted",
        lambda good: replace(good, beats=[*good.beats, *beats("job_000", 1, 101.0, range(20))]),
    ),
    "a job that failed": (
        "did not succeed",
        lambda good: replace(good, tasks={**good.tasks, "job_000": task(state="failed")}),
    ),
    "two processes on a GPU of Slurm": (
        "GPU 0 of n1 had processes of slurm/job_000",
        lambda good: replace(good, beats=[*good.beats, *on_slurm("job_000", 100.0), *on_slurm("x", 103.0)]),
    ),
    "a victim that is lost": (
        "did not succeed",
        lambda good: replace(good, tasks={"job_000": task()}),
    ),
    "a try used up": (
        "needed 2 tries",
        lambda good: replace(good, tasks={**good.tasks, "job_001": task(tries=2)}),
    ),
    "a success without the work": (
        "did not run for its 10 s",
        lambda good: replace(good, beats=GOOD_BEATS[:5] + GOOD_BEATS[11:]),
    ),
    "a step done twice": (
        "lost steps",
        lambda good: replace(
            good, beats=[*GOOD_BEATS[:14], *beats("job_001", 3, 119.0, range(2, 13), "gpu-01")]
        ),
    ),
    "a grant of a dead GPU": (
        "that was gone",
        with_changes(GpuClosed("gpu-03", 0, "", "uuid missing", 120.0), granted("x", 4, 121.0, "gpu-03")),
    ),
    "a grant on a server drained as failed": (
        "that was gone",
        with_changes(Drained("gpu-31", 121.0, "", True), granted("x", 4, 122.0, "gpu-31")),
    ),
    "a dead GPU that nobody notices": (
        "nobody noticed",
        lambda good: replace(good, dead_gpus=[("gpu-05", 0)]),
    ),
    "a job during maintenance": (
        "during its maintenance",
        lambda good: replace(
            good,
            changes=[*good.changes, granted("x", 4, 190.0, "gpu-40"), released("x", 4, 250.0)],
            beats=[*good.beats, *beats("x", 4, 190.0, range(50), "gpu-40")],
        ),
    ),
    "a lease that is left": ("left over", lambda good: replace(good, left=["job_000"])),
}


def test_a_day_without_a_fault_breaks_nothing() -> None:
    assert broken(GOOD) == []
    assert list(not_shown(GOOD)) == [
        "no job lost a GPU or its server",
        "nobody waited",
        "nobody ran a job from a terminal",
    ]


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_promise_is_found(name: str) -> None:
    words, spoil = BROKEN[name]
    assert any(words in line for line in broken(spoil(GOOD))), broken(spoil(GOOD))


def test_a_job_that_was_struck_may_need_another_try() -> None:
    struck = replace(GOOD, vanished="gpu-01", tasks={**GOOD.tasks, "job_001": task(tries=2)})
    assert broken(struck) == []


def test_a_job_on_a_server_that_was_cut_off_may_need_another_try() -> None:
    tries = {**GOOD.tasks, "job_001": task(tries=2)}
    assert broken(replace(GOOD, cuts=[("gpu-01", 120.0, 180.0)], tasks=tries)) == []
    assert broken(replace(GOOD, cuts=[("gpu-01", 140.0, 180.0)], tasks=tries)) != []


def test_jobs_that_an_upgrade_or_a_restore_met_may_need_another_try() -> None:
    tries = replace(GOOD, tasks={**GOOD.tasks, "job_001": task(tries=2)})
    assert broken(replace(tries, faults=[(100.0, "all is upgraded")])) == []
    assert broken(replace(tries, faults=[(150.0, "all is upgraded")])) != []
    assert broken(replace(tries, lost=(125.0, 128.0))) == []
    assert broken(replace(tries, lost=(133.0, 135.0))) != []


def test_a_gpu_that_was_opened_again_may_be_granted() -> None:
    closed = GpuClosed("gpu-03", 0, "", "rogue process", 120.0)
    ends: list[Change] = [granted("x", 4, 122.0, "gpu-03"), released("x", 4, 123.0)]
    assert broken(replace(GOOD, changes=[*GOOD.changes, closed, *ends])) != []
    assert broken(replace(GOOD, changes=[*GOOD.changes, closed, GpuOpened("gpu-03", 0, 121.0), *ends])) == []


def test_a_lease_that_the_restore_lost_is_no_other_holder_of_its_gpus() -> None:
    lost = replace(GOOD, changes=[*GOOD.changes, granted("x", 4, 132.0), granted("y", 5, 137.0)])
    assert any("at once" in line for line in broken(lost))
    assert broken(replace(lost, lost=(131.5, 135.0))) == []


def test_a_lease_that_was_granted_and_lost_between_two_looks_at_the_history_is_one() -> None:
    """The harness reads the history, and the state goes back to a backup a moment later."""
    ran = [*GOOD_BEATS, *beats("job_009", 39, 132.1, range(5), "gpu-05")]
    unseen = replace(GOOD, beats=ran, changes=[*GOOD_CHANGES, granted("x", 40, 150.0, "gpu-02")])
    assert any("without a lease" in line for line in broken(unseen))
    lost = replace(unseen, lost=(131.5, 132.0))
    assert any("without a lease" in line for line in broken(lost)), "so many were not granted in a moment"
    ran = [*GOOD_BEATS, *beats("job_009", 4, 132.1, range(5), "gpu-05")]
    lost = replace(lost, beats=ran)
    assert broken(lost) == []
    taken = replace(lost, changes=[*lost.changes, granted("y", 41, 133.0, "gpu-05")])
    assert broken(taken) == ["job_009 still ran on gpu-05 when y was granted its GPUs"]


def test_a_fifth_of_the_jobs_comes_through_airflow_and_some_come_each_way() -> None:
    jobs = plan.draw(1, 300, 600.0)
    assert 40 <= sum(not job.by_hand for job in jobs) <= 80
    assert {job.way for job in jobs} == {*plan.WAYS}
    assert {job.way for job in jobs if job.nodes > 1} == {"operator", "submit"}
    assert not any(job.team == "search" and not job.preemptible for job in jobs if job.way != "slurm")
    assert 0.5 < sum(job.nodes * job.gpus * job.seconds for job in jobs) / (240 * 600) < plan.LOAD


def look(at: float, kind: str, **bounds: float) -> Look:
    return Look(at, "job_001", 0, kind, "why", **bounds)


GRANTED = GOOD.changes[2]
assert isinstance(GRANTED, Granted)
WAITED = replace(GRANTED, lease=replace(GRANTED.lease, queued_at=102.0, granted_at=124.0))
"""Grant of GPUs that are free from 112.0 to a job that waits from 102.0, at 124.0."""


@pytest.mark.parametrize(
    ("looks", "pauses", "why"),
    [
        ([], [], ""),
        ([look(120.0, "no_capacity")], [], ""),
        ([look(115.0, "behind_queue")], [], ""),
        ([look(115.0, "behind_queue"), look(122.0, "quota")], [], "quota"),
        ([], [(100.0, 122.0)], "nothing was granted: recovery or upgrade"),
        ([], [(100.0, 115.0)], ""),
    ],
)
def test_a_gap_is_explained_by_what_was_seen_in_all_of_it(
    looks: list[Look], pauses: list[tuple[float, float]], why: str
) -> None:
    found = replace(GOOD, changes=[*GOOD.changes[:2], WAITED], looks=looks, pauses=pauses)
    [gap] = gaps(found, spans(found.changes))
    assert (gap.name, gap.begin, gap.end, gap.why) == ("job_001", 112.0, 124.0, why)
    assert unexplained([gap]) == ([] if why else [gap])
    assert unexplained([replace(gap, begin=122.0)]) == []


ON_ONE = replace(Request("a1:day_00/run/large", 8), required_node="gpu-00")
SINCE: list[Change] = [
    InventoryChanged(nodes=(Node("gpu-00", 0, {}, tuple(Gpu(number) for number in range(8))),), at=95.0),
    *GOOD.changes[:2],
    granted("busy", 4, 101.0, "gpu-00", 6, 7),
]
OWN = Queued(Request("a1:day_00/run/job_001", 2), 102.0, 5, 102.0)
TAKEN = replace(WAITED, at=124.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([OWN, TAKEN], ""),
        ([Queued(ON_ONE, 101.5, 3, 101.5), OWN, TAKEN], "behind_queue"),
        ([Queued(ON_ONE, 101.5, 3, 101.5), OWN, cancelled(ON_ONE, 116.0), TAKEN], ""),
        ([Queued(ON_ONE, 101.5, 3, 101.5), OWN, cancelled(ON_ONE, 122.0), TAKEN], "behind_queue"),
        ([OWN, GpuCleaned("gpu-00", 0, 1, 121.5), TAKEN], CLEANED),
        ([OWN, GpuCleaned("gpu-00", 0, 1, 118.0), TAKEN], ""),
        ([OWN, GpuCleaned("gpu-00", 3, 1, 121.5), TAKEN], ""),
    ],
)
def test_a_gap_that_nobody_saw_is_explained_by_the_changes(changes: list[Change], why: str) -> None:
    found = replace(GOOD, changes=[*SINCE, *changes])
    *_, gap = gaps(found, spans(found.changes))
    assert (gap.name, gap.begin, gap.end, gap.why) == ("job_001", 112.0, 124.0, why)
    assert gaps(replace(found, lost=(50.0, 60.0)), spans(found.changes))[-1].why == (
        why if why == CLEANED else ""
    )


def test_a_server_that_is_closed_until_it_was_searched_is_not_free() -> None:
    for opened, began in (
        (Resumed("gpu-00", 122.5), 122.5),
        (GpuOpened("gpu-00", 1, 122.5), 122.5),
        (Resumed("gpu-01", 122.5), 112.0),
        (GpuOpened("gpu-00", 3, 122.5), 112.0),
        (Resumed("gpu-00", 124.5), 112.0),
    ):
        changes = [*GOOD.changes[:2], WAITED, opened]
        [gap] = gaps(replace(GOOD, changes=changes), spans(changes))
        assert (gap.begin, gap.end) == (began, 124.0)


def test_a_gpu_whose_lease_a_restore_brought_back_is_not_free() -> None:
    again = released("job_000", 1, 122.5)
    for lost, began in (((110.0, 115.0), 122.5), ((0.0, 0.0), 112.0)):
        changes = [*GOOD.changes[:2], again, WAITED] if lost[1] else [*GOOD.changes[:2], WAITED]
        [gap] = gaps(replace(GOOD, changes=changes, lost=lost), spans(changes, lost))
        assert (gap.begin, gap.end) == (began, 124.0)


def test_a_server_under_maintenance_is_not_free() -> None:
    for servers, end, began in (
        (["gpu-00"], 123.0, 123.0),
        (["gpu-01"], 123.0, 112.0),
        (["gpu-00"], 125.0, 112.0),
    ):
        found = replace(GOOD, changes=[*GOOD.changes[:2], WAITED], window=(servers, 110.0, end))
        [gap] = gaps(found, spans(found.changes))
        assert (gap.begin, gap.end) == (began, 124.0)


def test_a_job_that_waits_again_did_not_wait_while_it_ran() -> None:
    before, preempted = (
        granted("job_001", 5, 90.0, "gpu-07"),
        released("job_001", 5, 123.0, Outcome.PREEMPTED),
    )
    changes = [before, *GOOD.changes[:2], preempted, WAITED]
    *_, gap = gaps(replace(GOOD, changes=changes), spans(changes))
    assert (gap.begin, gap.end) == (123.0, 124.0)


def test_first_estimates_are_counted_with_bounds_or_without() -> None:
    found = replace(GOOD, changes=[*GOOD.changes[:2], WAITED])
    for looks, counts in (
        ([look(103.0, "no_capacity"), look(104.0, "no_capacity", earliest=110.0, latest=125.0)], (1, 1, 0)),
        ([look(104.0, "no_capacity", latest=120.0), look(105.0, "no_capacity", latest=130.0)], (1, 0, 1)),
        ([look(104.0, "no_capacity", earliest=130.0)], (1, 0, 0)),
    ):
        assert estimates(replace(found, looks=looks), spans(found.changes)) == counts


def waits_again(token: int, at: float, node: str) -> Granted:
    """Return a grant to a job that waits from 102.0, and again whenever it was preempted."""
    again = granted("job_001", token, at, node)
    return replace(again, lease=replace(again.lease, queued_at=102.0))


AGAIN: list[Change] = [
    waits_again(2, 113.0, "gpu-00"),
    released("job_001", 2, 117.0, Outcome.PREEMPTED),
    waits_again(3, 118.0, "gpu-01"),
    released("job_001", 3, 131.0),
]
"""Two waits of a job, of 11 s and of 1 s."""


def test_an_estimate_is_of_the_start_that_ended_its_wait() -> None:
    first, second = look(103.0, "no_capacity", latest=114.0), look(117.2, "no_capacity", latest=117.5)
    late = look(117.5, "no_capacity", latest=120.0)
    for looks, counts in (
        ([first], (1, 1, 0)),
        ([first, second, late], (2, 1, 1)),
        ([look(119.0, "no_capacity", latest=130.0)], (0, 0, 0)),
    ):
        assert estimates(replace(GOOD, looks=looks), spans(AGAIN)) == counts


def test_a_job_that_waits_again_waited_from_its_end_on() -> None:
    page = page_of(replace(GOOD, changes=AGAIN), [])
    assert "A job waited 6 s in the mean, 11 s at most." in page


def test_an_interval_that_is_not_known_is_no_estimate() -> None:
    start = {"at": 5.0, "earliest": 4.0, "latest": 6.0, "plays": 1, "confidence": "few data"}
    entry: Any = {"task_id": "x", "sequence": 1, "kind": "quota", "reason": "", "estimated_start": start}
    assert Look.of(1.0, entry).latest is None
    start["plays"] = 40
    assert Look.of(1.0, entry).latest == 6.0


def test_what_people_ran_is_told_by_the_name_of_its_job() -> None:
    names = {"hand:a@b/1f": "hand:day/0/job_007"}
    begin = granted("x", 1, 1.0)
    begin = replace(begin, lease=replace(begin.lease, request=Request("hand:a@b/1f", 2)))
    changes = (begin, Released("hand:a@b/1f", 1, 2.0))
    [span] = spans([renamed(change, names) for change in changes])
    assert (span.name, span.end) == ("job_007", 2.0)


def test_a_command_of_the_day_is_the_program_itself(tmp_path: Path) -> None:
    """With the environment of its own, its exit code and what it says."""
    said = tmp_path / "said"
    named = {"GPU_MANAGER_URL": "http://127.0.0.1:1", "GPU_MANAGER_TOKEN": "gpm_1"}
    assert ForkedProgram(["leases", "--no-such"], named, said).wait() == 2
    assert "No such option" in said.read_text()
    waits = ForkedProgram(["run", "--gpus", "1", "--", "true"], named, said)
    waits.kill()
    assert waits.wait() == -signal.SIGKILL


def test_the_reason_of_a_wait_names_no_lease_of_who_waits() -> None:
    said = (
        "gpu-manager: root@vm h24f waits at position 3: the runtime of lease root@vm 99fg is unknown\n"
        "gpu-manager: root@vm h24f: GPU 3 (GPU-8f6a2c1e) and 1 CPU of gpu-01, fencing token 7\n"
    )
    assert {*SHORT_ID.findall(said)} == {"h24f"}


LOST = replace(GOOD, tasks={**GOOD.tasks, "job_001": task(tries=2, unrecorded=(1,))})
"""Airflow has lost the record of a try, and all else shows that the job ran right."""


@pytest.mark.parametrize(("status", "tries"), [(None, MAX_TRIES), ({"state": "RUNNING"}, 1)])
def test_a_job_that_was_in_neither_list_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: object, tries: int
) -> None:
    """Leases and queue are read one after the other, and the end of a preempted job has a result, too."""
    monkeypatch.setattr("tests.faults.day.by_hand.AGAIN_S", 0.0)

    def succeeds(words: Sequence[str], environment: Mapping[str, str], said: Path) -> Any:
        said.write_text("")
        return SimpleNamespace(wait=lambda: 0)

    looks = iter([False] * (3 if status else 100))
    manager: Any = SimpleNamespace(
        status_of=lambda name: status, result_of=lambda name: {"outcome": Outcome.PREEMPTED}
    )
    job, nowhere = replace(SHORT, way="submit"), cast(Present, ())
    desk = Desk(job, {}, tmp_path, tmp_path, manager, nowhere, lambda: next(looks, True), succeeds)
    desk.work()
    assert (desk.state, desk.tries) == ("failed", tries)


def test_a_try_that_airflow_has_lost_is_a_remark() -> None:
    assert broken(LOST) == []
    [remark] = remarks(LOST)
    assert remark == "Airflow has no record of try 1 of job_001, whose job ran right in one go"
    assert remark in page_of(LOST, [])
    assert list(remarks(GOOD)) == []
    assert "Remarks" not in page_of(GOOD, [])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lost: replace(lost, tasks={**lost.tasks, "job_001": task(tries=3, unrecorded=(1,))}),
        lambda lost: replace(
            lost,
            changes=[*GOOD_CHANGES[:4], released("job_001", 2, 117.0, Outcome.FAILED), *GOOD_CHANGES[5:]],
        ),
        lambda lost: replace(
            lost, changes=[*GOOD_CHANGES[:4], Expired("a1:day_00/run/job_001", 2, 117.0), *GOOD_CHANGES[5:]]
        ),
        lambda lost: replace(lost, changes=[*GOOD_CHANGES[:6], released("job_001", 3, 131.0, "CANCELLED")]),
        lambda lost: replace(lost, beats=[*GOOD_BEATS, *beats("job_001", 3, 131.0, range(14, 16), "gpu-01")]),
    ],
    ids=["another try is recorded", "a lease failed", "a lease expired", "no success", "a second process"],
)
def test_a_lost_try_stays_a_violation_where_anything_speaks_against_the_job(
    spoil: Callable[[Evidence], Evidence],
) -> None:
    lines = broken(spoil(LOST))
    assert any(line.startswith("job_001 needed") for line in lines), lines
    assert list(remarks(spoil(LOST))) == []


def test_the_page_says_first_whether_a_promise_was_broken() -> None:
    assert "2 of 2 jobs succeeded, and nothing that was promised was lost." in page_of(GOOD, [])
    page = page_of(GOOD, ["job_000 <did> this"])
    assert "1 promises were broken" in page
    assert "job_000 &lt;did&gt; this" in page
