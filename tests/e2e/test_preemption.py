"""Preemption in a real Airflow: the job saves, its task keeps its try, waits again and goes on."""

import pytest

from resource_manager.core.changes import Expired, Granted, Outcome, Preempting, Released
from resource_manager.core.teams import NO_TEAMS
from resource_manager.manager.teams_file import load_teams
from tests.e2e.bench import TIMEOUT_FACTOR, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600 * TIMEOUT_FACTOR)]

GRACE_S = 10.0
"""`preempt_grace` of the DAG `preemptible_job`."""

TEAMS = """
preemption = true
min_runtime = "1s"
preemption_delay = "0s"

[teams.vision]
guaranteed = 8

[teams.nlp]
"""


@pytest.fixture
def teams(bench, tmp_path):
    """Rules of two teams with preemption; no rules again after the test."""
    path = tmp_path / "teams.toml"
    path.write_text(TEAMS)
    bench.manager.apply_teams(load_teams(path))
    yield
    for run in bench.runs:
        run.finish()
    bench.check_free(120.0)
    bench.manager.apply_teams(NO_TEAMS)


def history(bench, *kinds):
    """Return all changes of these kinds, oldest first."""
    return [change for _, change in bench.manager.store.history(0, 1_000_000) if isinstance(change, kinds)]


def of(run, changes):
    """Return those changes that end or preempt the run's lease."""
    return [change for change in changes if change.lease_id == run.lease_id]


def check_history(bench):
    """Assert that every GPU was released before it was granted again."""
    holders = {}
    for change in history(bench, Granted, Released, Expired):
        if isinstance(change, Granted):
            gpus = {(member.node, gpu) for member in change.lease.members for gpu in member.gpu_ids}
            assert not gpus & {gpu for held in holders.values() for gpu in held}, change
            holders[change.lease.lease_id] = gpus
        else:
            del holders[change.lease_id]


def check_outcome(bench, victim, taker):
    """End both jobs, the taker's first; assert that the victim went on where it was, in its first try."""
    wait_for(
        lambda: victim.lease_id in {entry["task_id"] for entry in bench.manager.queue()}, what="its wait"
    )
    victim.wait_until_deferred()
    taker.finish()
    taker.wait_until("success")
    wait_for(lambda: len(victim.processes()) == 2, what="the second process of the preempted job")
    victim.finish()
    victim.wait_until("success")
    beats = victim.beats()
    assert [beat["step"] for beat in beats] == list(range(len(beats))), (
        "no step is lost, and none is done twice"
    )
    assert list(dict.fromkeys((beat["process"], beat["restart"]) for beat in beats)) == list(
        zip(victim.processes(), ("0", "1"), strict=True)
    )
    assert [victim.task()["try_number"], taker.task()["try_number"]] == [1, 1]
    assert len(taker.processes()) == 1
    assert "the lease is preempted for" in victim.log(1)
    outcomes = [change.outcome for change in of(victim, history(bench, Released))]
    assert outcomes == [Outcome.PREEMPTED, Outcome.SUCCESS]
    assert [change.by for change in of(victim, history(bench, Preempting))] == [taker.lease_id]
    check_history(bench)


def times_of(bench, victim, taker):
    """Return the seconds from the preemption to the victim's release, the next lease and its first line."""
    [preempting] = of(victim, history(bench, Preempting))
    [granted] = [change for change in history(bench, Granted) if change.lease.lease_id == taker.lease_id]
    ends = {
        "preemption_to_release_s": of(victim, history(bench, Released))[0].at,
        "preemption_to_next_lease_s": granted.at,
        "preemption_to_first_line_s": taker.beats()[0]["at"],
    }
    return {name: at - preempting.at for name, at in ends.items()}


@pytest.mark.parametrize(
    ("team", "priority"), [("nlp", 9), ("vision", 1)], ids=["higher_priority", "inside_its_guarantee"]
)
def test_a_preempted_training_loses_no_step_and_no_try(bench, teams, record_property, team, priority):
    victim = bench.run("preemptible_job")
    victim.wait_until_training()
    wait_for(lambda: victim.xcom("job_log_place")["offset"], what="a trigger that watches the job")
    taker = bench.run("preemptible_job", team=team, priority=priority)
    taker.wait_until_training()
    times = times_of(bench, victim, taker)
    for name, seconds in times.items():
        record_property(name, seconds)
        print(f"{name}: {seconds:.1f}")
    check_outcome(bench, victim, taker)
    assert times["preemption_to_next_lease_s"] <= GRACE_S + 3 * TIMEOUT_FACTOR
    assert times["preemption_to_first_line_s"] <= GRACE_S + 15 * TIMEOUT_FACTOR


def test_the_triggerer_is_killed_while_a_lease_is_preempted(bench, teams):
    """The task resumes from its trigger, so it ends its job only once a triggerer runs again."""
    victim = bench.run("preemptible_job")
    victim.wait_until_training()
    bench.kill("triggerer")
    taker = bench.run("preemptible_job", team="vision")
    wait_for(lambda: bench.manager.preempting(), what="the preemption")
    bench.start("triggerer")
    taker.wait_until_training()
    check_outcome(bench, victim, taker)
