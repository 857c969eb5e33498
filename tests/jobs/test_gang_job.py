"""Jobs of several members, as real processes of the local launcher: started, resumed and ended together."""

import re
import socket
from contextlib import closing
from dataclasses import replace

import pytest

from resource_manager.jobs.gang_job import GangJob, StartupOrder
from resource_manager.jobs.launchers import (
    AlreadyEndedError,
    JobState,
    LauncherError,
    LauncherUnreachableError,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from tests.eventually import wait_for
from tests.jobs.gangs import gang_allocation, gang_of, wanted_of

SLEEP = "exec sleep 600"


@pytest.fixture(autouse=True)
def jobs_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    return tmp_path


@pytest.fixture
def gang(jobs_dir):
    """Return a function like `gang_of`; its jobs are stopped after the test."""
    made = []

    def make(command, allocation=None, **more):
        found = gang_of(allocation or gang_allocation(), command, **more)
        made.append(found[0])
        return found

    yield make
    for each in made:
        for job in each.jobs:
            LocalLauncher().stop(job.key, 0)


def states(jobs):
    return [LocalLauncher().status(job.key).state.value for job in jobs]


def test_all_members_run_and_are_stopped_together(gang):
    all_of_it, wanted = gang(SLEEP)
    assert all_of_it.start(wanted)
    assert states(all_of_it.jobs) == ["running"] * 3
    assert not all_of_it.start(wanted)
    stopped = all_of_it.stop()
    assert (stopped.ranks, stopped.ran, dict(stopped.left)) == ((0, 1, 2), 3, {})
    assert states(all_of_it.jobs) == ["absent"] * 3


def test_keys_are_stable_by_lease_and_rank():
    def planned(**given):
        return GangJob.planned(gang_allocation(**given), "local", None).jobs

    first, again, later = (planned(token=token) for token in (1, 1, 2))
    assert first == again
    assert len({job.key for job in (*first, *later)}) == 6
    rest = {**gang_allocation(), "members": gang_allocation()["members"][2:]}
    assert GangJob.planned(rest, "local", None).jobs == first[2:]
    [single] = planned(nodes=1)
    assert single.key == first[0].key.removesuffix(".0")


def test_a_lease_without_places_has_no_jobs():
    assert GangJob.of(gang_allocation()) is None


def test_no_member_starts_if_one_cannot_be_prepared(jobs_dir):
    planned = GangJob.planned(gang_allocation(), "local", None)
    wanted = wanted_of(planned, f"touch {jobs_dir}/began-$MY_RANK; {SLEEP}")
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        wanted[1] = replace(wanted[1], port=taken.getsockname()[1])
        prepared = planned.prepare(wanted)
    assert len(prepared.places) == 2
    [(server, error)] = prepared.failed.items()
    assert server == "gpu-1"
    assert re.search(r"^rank 1 on gpu-1: .*port \d+ cannot be bound: Address", str(error))
    assert states(planned.jobs) == ["absent"] * 3
    assert not list(jobs_dir.glob("began-*"))


def test_a_member_out_of_reach_is_named_and_none_starts(gang):
    all_of_it, wanted = gang(SLEEP)
    jobs = list(all_of_it.jobs)
    jobs[2] = replace(jobs[2], place=replace(jobs[2].place, machine="elsewhere"))
    cut = GangJob(tuple(jobs))
    with pytest.raises(LauncherUnreachableError, match=r"^rank 2 on gpu-2: .*elsewhere"):
        cut.start(wanted)
    assert states(all_of_it.jobs) == ["absent"] * 3
    all_of_it.start(wanted)
    stopped = cut.stop()
    assert (stopped.ranks, stopped.ran, list(stopped.left)) == ((0, 1), 2, [2])
    assert states(all_of_it.jobs) == ["absent", "absent", "running"]


@pytest.mark.parametrize("order", StartupOrder)
def test_a_start_that_broke_off_between_two_members_is_continued(gang, jobs_dir, order):
    allocation = gang_allocation(startup_order=order.value)
    (jobs_dir / "began").touch()
    all_of_it, wanted = gang(f"echo $MY_RANK >> {jobs_dir}/began; {SLEEP}", allocation)
    begun = 0 if order is StartupOrder.TOGETHER else 2
    LocalLauncher().start(wanted[begun])
    wait_for(lambda: (jobs_dir / "began").exists())
    assert all_of_it.start(wanted)
    assert states(all_of_it.jobs) == ["running"] * 3
    wait_for(lambda: sorted((jobs_dir / "began").read_text().split()) == ["0", "1", "2"])


@pytest.mark.parametrize("order", StartupOrder)
def test_an_end_that_broke_off_between_two_members_starts_nothing(gang, jobs_dir, order):
    """A member that was removed must not join others that ran without it: its lease is over."""
    allocation = gang_allocation(startup_order=order.value)
    (jobs_dir / "began").touch()
    all_of_it, wanted = gang(f"echo $MY_RANK >> {jobs_dir}/began; {SLEEP}", allocation)
    all_of_it.start(wanted)
    wait_for(lambda: len((jobs_dir / "began").read_text().split()) == 3)
    LocalLauncher().stop(wanted[0 if order is StartupOrder.TOGETHER else 1].key)
    with pytest.raises(AlreadyEndedError):
        all_of_it.start(wanted)
    assert all_of_it.stop().ran == 2
    with pytest.raises(AlreadyEndedError):
        all_of_it.start(wanted)
    assert len((jobs_dir / "began").read_text().split()) == 3


@pytest.mark.parametrize("order", StartupOrder)
def test_a_start_that_fails_names_the_server_and_leaves_those_before_it_to_be_stopped(gang, order):
    all_of_it, wanted = gang(SLEEP, gang_allocation(startup_order=order.value))
    wanted[0] = replace(wanted[0], command=("no\0command",))
    with pytest.raises(LauncherError, match=r"^rank 0 on gpu-0: .*could not be started"):
        all_of_it.start(wanted)
    others = "absent" if order is StartupOrder.TOGETHER else "running"
    assert states(all_of_it.jobs) == ["absent", others, others]
    assert all_of_it.stop().ranks == (0, 1, 2)
    assert states(all_of_it.jobs) == ["absent"] * 3


def test_a_member_that_failed_is_not_started_again(gang, jobs_dir):
    all_of_it, wanted = gang(f"echo $MY_RANK >> {jobs_dir}/began; exit $MY_RANK")
    assert all_of_it.start(wanted)
    wait_for(lambda: states(all_of_it.jobs) == ["finished"] * 3)
    assert not all_of_it.start(wanted)
    assert sorted((jobs_dir / "began").read_text().split()) == ["0", "1", "2"]
    assert all_of_it.stop().ran == 0


def test_the_next_lease_does_not_start_beside_the_job_of_an_earlier_one(gang):
    earlier, wanted = gang(SLEEP)
    earlier.start(wanted)
    later = GangJob.planned(gang_allocation(token=2), "local", None)
    failed = later.prepare(wanted_of(later, SLEEP)).failed
    assert re.search(r"rank 0 on gpu-0: job \S+-1\.\d of an earlier lease", str(failed["gpu-0"]))
    earlier.stop()
    assert not later.prepare(wanted_of(later, SLEEP)).failed


def test_the_job_of_one_server_starts_alone(gang):
    alone, wanted = gang("exit 3", gang_allocation(nodes=1))
    assert alone.start(wanted)
    [job] = alone.jobs
    wait_for(lambda: LocalLauncher().status(job.key).state is JobState.FINISHED)
    assert alone.stop().ranks == (0,)
