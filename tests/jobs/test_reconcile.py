"""Leases and jobs of tasks that have ended, with real jobs of the local launcher."""

import time

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import GpuClosed, Quarantined
from resource_manager.core.models import JobPlace
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import LeaseNotFoundError
from resource_manager.jobs import reconcile as reconcile_module
from resource_manager.jobs.launchers import (
    LAUNCHERS,
    Job,
    JobState,
    LauncherUnreachableError,
    NoAnswerError,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.reconcile import reconcile as reconcile_instance
from resource_manager.jobs.running_job import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from tests.builders import redefine
from tests.eventually import wait_for, wait_until_ended
from tests.jobs.gangs import place


class States:
    """Given states of tasks and runs in Airflow."""

    def __init__(self, unfinished=(), runs=()):
        self._unfinished, self._runs = set(unfinished), set(runs)

    def unfinished(self, identities):
        return set(identities) & self._unfinished

    def run_is_unfinished(self, dag_id, run_id):
        return (dag_id, run_id) in self._runs


@pytest.fixture
def manager(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    return GPUResourceManager.from_url("memory://")


def identity(task_id, map_index=-1, instance="production"):
    return TaskIdentity(instance, "d", "r", task_id, map_index)


def reconcile(manager, states):
    """Return the actions of production's reconciler; nothing belongs to another instance."""
    done = reconcile_instance(manager, states, "production")
    assert done.other_instances == 0
    return done.actions


def submit(manager, task, gpus=8, **labels):
    labels = {**task.labels, **labels}
    return manager.submit(task.lease_id, gpus, 8, ttl=60, quarantine=True, labels=labels)


def start_job(manager, task, command):
    allocation = place(manager, submit(manager, task))
    [job] = RunningJob.all_of(allocation)
    key = job.key
    LocalLauncher().start(Job(key, ("/bin/sh", "-c", f"echo begun; {command}")))
    wait_for(lambda: "begun" in LocalLauncher().tail(key))
    return key


def test_the_job_of_an_ended_task_is_stopped_before_its_gpus_are_free(manager):
    over, goes_on = identity("over"), identity("goes_on", 3)
    orphan, alive = start_job(manager, over, "sleep 60"), start_job(manager, goes_on, "sleep 60")
    actions = reconcile(manager, States(unfinished=[goes_on]))
    assert [(action.task_id, action.action, action.detail) for action in actions] == [
        ("production:d/r/over", "released", "its job was stopped")
    ]
    assert LocalLauncher().status(orphan).state is JobState.ABSENT
    assert LocalLauncher().status(alive).state is JobState.RUNNING
    assert [lease["task_id"] for lease in manager.leases()] == ["production:d/r/goes_on/3"]
    LocalLauncher().stop(alive, 0)


def test_a_task_that_was_cleared_before_its_turn_keeps_its_job(manager):
    """Those before it may take minutes, as where a server is out of reach."""
    over, cleared = identity("over"), identity("cleared")
    job, _ = start_job(manager, cleared, "sleep 60"), submit(manager, over)

    class ClearedMeanwhile(States):
        def unfinished(self, identities):
            try:
                return super().unfinished(identities)
            finally:
                self._unfinished.add(cleared)

    assert [action.task_id for action in reconcile(manager, ClearedMeanwhile())] == [over.lease_id]
    assert LocalLauncher().status(job).state is JobState.RUNNING
    LocalLauncher().stop(job, 0)


def test_what_is_announced_of_a_task_that_will_not_run_is_withdrawn(manager):
    """Of a skipped branch, a deleted DAG, a run whose end nobody told; a mapped task's goes with its run."""
    comes, skipped, mapped = map(identity, ("comes", "skipped", "mapped"))
    others = identity("others", instance="staging")
    for task, copies in ((comes, 1), (skipped, 1), (mapped, 2000), (others, 1)):
        manager.announce(task.lease_id, 2, copies=copies, labels=task.labels)
    [action] = reconcile(manager, States(unfinished=[comes], runs=[("d", "r")]))
    assert (action.name, action.action) == ("d.skipped", "withdrawn")
    assert [action.name for action in reconcile(manager, States())] == ["d.comes", "d.mapped"]
    assert [each["name"] for each in manager.coming()] == ["d.others"]


def test_a_lease_is_kept_while_its_job_is_unreachable(manager):
    allocation = submit(manager, identity("over"))
    elsewhere = JobPlace("local", machine="elsewhere", folder="/jobs", mark="f00d", user="ada")
    manager.place_job(allocation["task_id"], [elsewhere], fencing_token=allocation["fencing_token"])
    (action,) = reconcile(manager, States())
    assert action.action == "kept"
    assert "elsewhere" in action.detail
    assert len(manager.leases()) == 1


@pytest.fixture
def at_ssh(manager, monkeypatch):
    """Return at_ssh(error, *tasks): the jobs of these tasks are on one server, whose launcher raises that.

    It returns the list of the questions that were asked there.
    """
    there = JobPlace("ssh", "gpu-a", machine="gpu-a/1", folder="/jobs", mark="f00d", user="ada")

    def put(error, *tasks):
        questions = []

        class Failing(LocalLauncher):
            def ask(self, act, **arguments):
                questions.append(act)
                raise error

        monkeypatch.setitem(LAUNCHERS, "ssh", lambda place: Failing())
        for task in tasks:
            lease = submit(manager, task, 2)
            manager.place_job(task.lease_id, [there], fencing_token=lease["fencing_token"])
        assert len({lease["server_name"] for lease in manager.leases()}) == 1
        return questions

    return put


def test_a_place_that_gives_no_answer_is_asked_once_in_a_pass_and_holds_up_no_other(manager, at_ssh):
    """Each question takes as long as a connection may, and a run of the DAG has ten minutes."""
    lost = [identity(f"lost{number}") for number in range(3)]
    questions = at_ssh(NoAnswerError("gpu-a does not answer"), *lost)
    over = identity("over")
    start_job(manager, over, "sleep 60")
    for asked in (1, 2):
        done = {action.task_id: action for action in reconcile(manager, States())}
        assert len(questions) == asked
        assert {(done[task.lease_id].action, done[task.lease_id].detail) for task in lost} == {
            ("kept", "its job may still run: gpu-a does not answer")
        }
        assert asked == 2 or done[over.lease_id].action == "released"


def test_a_job_that_cannot_be_ended_keeps_no_other_at_its_place(manager, at_ssh):
    lost = [identity(f"lost{number}") for number in range(3)]
    questions = at_ssh(LauncherUnreachableError("it is being ended and still runs"), *lost)
    assert {action.action for action in reconcile(manager, States())} == {"kept"}
    assert len(questions) == 3


def test_a_lease_whose_job_was_not_placed_is_released_wherever_its_task_ran(manager):
    """Nothing can run: a start would have to place it first, and finds no lease then."""
    allocation = submit(manager, identity("over"), launcher="ssh")
    (action,) = reconcile(manager, States())
    assert (action.action, action.detail) == ("released", "it had no job")
    with pytest.raises(LeaseNotFoundError):
        place(manager, allocation)


@pytest.mark.parametrize("begins", ["pending", "granted"])
def test_what_was_granted_or_placed_while_it_was_to_end_is_ended_as_it_is_by_then(manager, begins):
    """`stop` said that it was gone, and it ran; or it was refused, with the hint to stop it."""
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    if begins == "granted":
        manager.release_resources("holds1")
    entry = submit(manager, identity("over"))
    manager.release_resources("holds1")  # before it is cancelled
    place(manager, manager.status_of(entry["task_id"]))
    done = reconcile_module.end(manager, entry)
    assert (done.action, done.detail) == ("released", "its job was over already")
    assert entry["task_id"] not in {lease["task_id"] for lease in manager.leases()}
    assert reconcile_module.end(manager, entry).action == "gone before"


def placed_by_hand(manager, command):
    """Return the key of a job of `gpu-manager run`, whose caller is gone and whose lease is quarantined."""
    allocation = place(manager, manager.submit("hand:ada@desk/1", 8, 8, ttl=60))
    [job] = RunningJob.all_of(allocation)
    LocalLauncher().start(Job(job.key, ("/bin/sh", "-c", command)))
    manager.commit(lambda cluster, now: [Quarantined(job.task_id, job.fencing_token, now)])
    assert manager.leases()[0]["state"] == "ERROR"
    return job.key


def test_a_quarantined_lease_of_no_task_ends_once_its_job_is_seen_to_be_over(manager):
    key = placed_by_hand(manager, "exit 0")
    wait_until_ended(LocalLauncher(), key)
    (action,) = reconcile(manager, States())
    assert (action.action, action.detail) == ("released", "its job was over already")
    assert manager.leases() == []


def test_a_quarantined_lease_of_no_task_stays_while_its_job_runs(manager):
    key = placed_by_hand(manager, "sleep 600")
    assert reconcile(manager, States()) == []
    assert LocalLauncher().status(key).state is JobState.RUNNING
    assert len(manager.leases()) == 1
    LocalLauncher().stop(key, 0)


def test_a_lease_that_cannot_be_reconciled_does_not_keep_the_others(manager, monkeypatch):
    first, second = identity("first"), identity("second")
    broken = start_job(manager, first, "sleep 600")
    start_job(manager, second, "sleep 600")
    stop = LocalLauncher.stop

    def stop_or_fail(launcher, key, grace_s=0.0):
        if key == broken:
            raise ValueError("rubbish")
        stop(launcher, key, grace_s)

    with monkeypatch.context() as patched:
        patched.setattr(LocalLauncher, "stop", stop_or_fail)
        done = {action.task_id: action for action in reconcile(manager, States())}
    assert (done[first.lease_id].action, done[first.lease_id].detail) == ("kept", "ValueError: rubbish")
    assert done[second.lease_id].action == "released"
    assert [lease["task_id"] for lease in manager.leases()] == [first.lease_id]
    stop(LocalLauncher(), broken, 0.0)


def test_a_lease_released_by_force_ends_with_its_job_whatever_its_task_does(manager):
    task = identity("forced")
    key = start_job(manager, task, "sleep 600")
    assert manager.release(task.lease_id, job_end="forced") == "quarantined"
    (action,) = reconcile(manager, States(unfinished=[task]))
    assert (action.action, action.detail) == ("released", "its job was stopped")
    assert LocalLauncher().status(key).state is JobState.ABSENT


def test_the_pending_request_of_an_ended_task_is_cancelled(manager):
    for number in range(4):
        submit(manager, identity(f"holds{number}"))
    submit(manager, identity("waits"))
    holders = [identity(f"holds{number}") for number in range(4)]
    (action,) = reconcile(manager, States(unfinished=holders))
    assert (action.action, manager.queue()) == ("cancelled", [])


def test_a_lease_of_a_run_lives_until_the_run_and_the_processes_of_its_tasks_have_ended(manager, monkeypatch):
    monkeypatch.setattr(reconcile_module, "ENDING_S", 0.5)
    submit(manager, identity("allocate"), scope="run")
    assert reconcile(manager, States(runs=[("d", "r")])) == []
    began = time.monotonic()
    (action,) = reconcile(manager, States())
    assert (action.action, action.detail) == ("released", "it had no job")
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("begins", ["waits", "is granted"])
def test_a_pending_request_for_a_lease_of_a_run_is_its_own_tasks(manager, begins):
    """If it is granted while the tasks are looked at, others of the run may use it by then."""
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    task = identity("allocate")
    submit(manager, task, scope="run")
    assert reconcile(manager, States(unfinished=[task])) == []

    class Ended(States):
        def unfinished(self, identities):
            if begins == "is granted":
                manager.release_resources("holds0")
            return set()

    (action,) = reconcile(manager, Ended(runs=[("d", "r")]))
    granted = [lease["task_id"] for lease in manager.leases() if lease["task_id"] == task.lease_id]
    if begins == "waits":
        assert (action.action, manager.queue(), granted) == ("cancelled", [], [])
    else:
        assert (action.action, granted) == ("kept", [task.lease_id])


def test_a_lease_of_a_process_is_left_to_expire(manager):
    """A worker learns some seconds later that its task was ended; until then its process uses the GPUs."""
    submit(manager, identity("python"), scope="process")
    (action,) = reconcile(manager, States())
    assert (action.action, len(manager.leases())) == ("kept", 1)


def test_a_quarantined_lease_of_an_unfinished_task_is_renewed(manager):
    task = identity("slow")
    manager.submit(task.lease_id, 8, 8, ttl=1e-9, quarantine=True, labels=task.labels)
    manager.expire_and_schedule()
    assert manager.leases()[0]["quarantined"]
    (action,) = reconcile(manager, States(unfinished=[task]))
    assert action.action == "renewed"


def test_leases_without_an_airflow_task_are_kept(manager):
    manager.submit("by-hand", 8, 8)
    assert reconcile(manager, States()) == []
    assert len(manager.leases()) == 1


def test_identities_survive_their_labels():
    for task in (identity("a"), identity("a.b-c", 0), identity("a", 12)):
        assert TaskIdentity.from_labels(task.labels) == task
    assert TaskIdentity.from_labels({}) is None


def test_the_job_of_a_lease_whose_gpu_failed_is_stopped_and_its_task_ends_the_lease(manager):
    task = identity("unlucky")
    key = start_job(manager, task, "sleep 600")
    node = manager.leases()[0]["server_name"]
    manager.commit(lambda cluster, now: [GpuClosed(node, 0, "", "xid 79; lost", now, stop=True)])
    (action,) = reconcile(manager, States(unfinished=[task]))
    assert (action.action, action.detail) == ("stopped", "one of its GPUs failed: xid 79; lost")
    assert LocalLauncher().status(key).state is not JobState.RUNNING
    assert len(manager.leases()) == 1


@pytest.fixture
def take(manager):
    """Return a function that preempts the lease of a task, as if that began some seconds ago."""
    redefine(manager, teams=Teams((Team("vision", 32),), True, 0.0, 0.0))

    def take(task, seconds_ago):
        server = manager.status_of(task.lease_id)["server_name"]
        manager.submit("stronger", 8, team="vision", server=server, priority=9)
        (found,) = manager.preempting()
        return {**found, "until": found["until"] - seconds_ago}

    return take


@pytest.fixture
def overdue(set_wall_clock):
    """Return a function after which the clock of the reconciler is an hour ahead."""
    return lambda: set_wall_clock(lambda now: now + 3600.0)


def test_a_preempted_job_whose_operator_is_gone_is_ended_and_queued_again(manager, take, overdue):
    task = identity("x")
    start_job(manager, task, "sleep 600")
    take(task, 0)
    assert reconcile(manager, States([task])) == []  # the operator has its time
    overdue()
    actions = reconcile(manager, States([task]))
    assert [(action.task_id, str(action.action)) for action in actions] == [(task.lease_id, "queued again")]
    assert manager.status_of("stronger")["state"] == "RUNNING"
    assert manager.history()[-1]["change"] == "granted"


def test_a_job_runs_on_whose_preemption_was_taken_back_before_it_was_told(manager, take, overdue):
    task = identity("x")
    start_job(manager, task, "sleep 600")
    take(task, 0)
    manager.cancel("stronger")
    [lease] = manager.leases()
    assert (lease["state"], lease["preempted_by"], lease["until"] > 0) == ("RUNNING", None, True)
    overdue()
    assert reconcile(manager, States([task])) == []
    reconcile_module.end(manager, lease)


def test_a_preempted_job_that_had_ended_well_is_left_to_its_task(manager, take, overdue):
    task = identity("x")
    key = start_job(manager, task, "exit 0")
    wait_until_ended(LocalLauncher(), key)
    take(task, 0)
    overdue()
    (action,) = reconcile(manager, States([task]))
    assert (str(action.action), action.detail) == (
        "kept",
        "its job had ended by itself, which its task will see",
    )
