"""Preemption in a real Airflow: the job saves, its task keeps its try, waits again and goes on."""

import re
import signal
import time
from typing import Any

import pytest

from resource_manager.core.changes import Expired, Granted, Outcome, Preempting, Released
from resource_manager.core.teams import NO_TEAMS
from resource_manager.manager.cluster_file.reading import load_teams
from tests.builders import redefine
from tests.e2e.bench import wait_for
from tests.e2e.test_faults import containers, needs_docker
from tests.eventually import TIMEOUT_FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GRACE_S = 10.0
"""`preempt_grace` of the DAG `preemptible_job`."""

OUTAGE_S = 3.0

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
    redefine(bench.manager, teams=load_teams(path))
    yield
    for lease in bench.manager.leases():
        if lease["task_id"].startswith("taker-"):
            bench.manager.release(lease["task_id"])
    for run in bench.runs:
        run.finish()
    bench.check_free(120.0)
    redefine(bench.manager, teams=NO_TEAMS)


# ---- what must hold, by the history and by the ledger ----


def history(bench, *kinds):
    """Return all changes of these kinds, oldest first."""
    return [change for _, change in bench.manager.store.history(0, 1_000_000) if isinstance(change, kinds)]


def of(run, changes):
    """Return those changes that end or preempt the run's lease."""
    return [change for change in changes if change.lease_id == run.lease_id]


def check_history(bench):
    """Assert that every GPU was released before it was granted again."""
    holders: dict[str, Any] = {}
    for change in history(bench, Granted, Released, Expired):
        if isinstance(change, Granted):
            gpus = {(member.node, gpu) for member in change.lease.members for gpu in member.gpu_ids}
            assert not gpus & {gpu for held in holders.values() for gpu in held}, change
            holders[change.lease.lease_id] = gpus
        else:
            del holders[change.lease_id]


def check_victim(bench, victim, preemptions):
    """End the job; assert that it went on so often without losing a step, in this try of its task."""
    victim.finish()
    victim.wait_until("success")
    beats = victim.beats()
    assert [beat["step"] for beat in beats] == list(range(len(beats))), (
        "no step is lost, and none is done twice"
    )
    restarts = dict.fromkeys((beat["process"], beat["restart"]) for beat in beats)
    assert [restart for _, restart in restarts] == [str(number) for number in range(preemptions + 1)]
    assert victim.task()["try_number"] == 1
    outcomes = [change.outcome for change in of(victim, history(bench, Released))]
    assert outcomes == [Outcome.PREEMPTED] * preemptions + [Outcome.SUCCESS]
    assert len(of(victim, history(bench, Preempting))) == preemptions
    check_history(bench)


def times_of(bench, victim, taker, record_property):
    """Return the seconds from the preemption to the victim's release, the next lease and its first line."""
    [preempting] = of(victim, history(bench, Preempting))
    [granted] = [change for change in history(bench, Granted) if change.lease.lease_id == taker.lease_id]
    ends = {
        "preemption_to_release_s": of(victim, history(bench, Released))[0].at,
        "preemption_to_next_lease_s": granted.at,
        "preemption_to_first_line_s": taker.beats()[0]["at"],
    }
    times = {name: at - preempting.at for name, at in ends.items()}
    for name, seconds in times.items():
        record_property(name, seconds)
        print(f"{name}: {seconds:.1f}")
    return times


def check_times(times):
    assert times["preemption_to_next_lease_s"] <= GRACE_S + 3 * TIMEOUT_FACTOR
    assert times["preemption_to_first_line_s"] <= GRACE_S + 15 * TIMEOUT_FACTOR


def goes_on(victim, restarts):
    """Wait until the job runs again after so many preemptions, and is watched."""
    wait_for(lambda: victim.beats()[-1]["restart"] == str(restarts), what=f"restart {restarts}")
    victim.wait_until_deferred()


# ---- a taker that is a task too ----


@pytest.mark.parametrize(
    ("dag", "team", "priority"),
    [
        pytest.param("preemptible_job", "nlp", 9, id="higher_priority"),
        pytest.param("preemptible_job", "vision", 1, id="inside_its_guarantee"),
        pytest.param("preemptible_docker_job", "vision", 1, id="in_a_container", marks=needs_docker),
    ],
)
def test_a_preempted_training_loses_no_step_and_no_try(bench, teams, record_property, dag, team, priority):
    victim = bench.run(dag)
    victim.wait_until_training()
    wait_for(
        lambda: (victim.xcom("job_log_place") or {}).get("offset"), what="a trigger that watches the job"
    )
    taker = bench.run(dag, team=team, priority=priority)
    taker.wait_until_training()
    times = times_of(bench, victim, taker, record_property)
    wait_for(lambda: is_pending(bench, victim), what="its wait")
    victim.wait_until_deferred()
    taker.finish()
    taker.wait_until("success")
    goes_on(victim, 1)
    check_victim(bench, victim, 1)
    assert [change.preemptor for change in of(victim, history(bench, Preempting))] == [taker.lease_id]
    assert len(taker.processes()) == 1
    assert taker.task()["try_number"] == 1
    assert "the lease is preempted for" in victim.log(1)
    if dag == "preemptible_docker_job":
        assert not containers(bench)
    check_times(times)


def test_a_job_that_needs_more_than_its_grace_ends_with_it(bench, teams, record_property):
    victim = bench.run("preemptible_job", saves_for_s="600")
    victim.wait_until_training()
    taker = bench.run("preemptible_job", team="vision")
    taker.wait_until_training()
    times = times_of(bench, victim, taker, record_property)
    assert times["preemption_to_release_s"] >= GRACE_S
    told = [beat for beat in victim.beats() if beat.get("told")]
    assert told[-1]["at"] - told[0]["at"] >= GRACE_S / 2 - 1.0
    taker.finish()
    goes_on(victim, 1)
    victim.finish()
    victim.wait_until("success")
    assert victim.task()["try_number"] == 1
    check_history(bench)
    check_times(times)


# ---- a taker that is only a lease ----


def take(bench, number, server="here"):
    """Request, as the other team, what the victim holds; return the id of the request."""
    lease_id = f"taker-{number}"
    bench.manager.submit(lease_id, 8, 8, team="vision", server=server, ttl=3600)
    return lease_id


def is_granted(bench, lease_id):
    return lease_id in {lease["task_id"] for lease in bench.manager.leases()}


def is_pending(bench, run):
    return run.lease_id in {entry["task_id"] for entry in bench.manager.queue()}


def test_ten_preemptions_in_a_row_lose_no_step_and_no_try(bench, teams):
    victim = bench.run("preemptible_job")
    victim.wait_until_training()
    for number in range(10):
        taker = take(bench, f"{victim.run_id}-{number}")
        wait_for(lambda taker=taker: is_granted(bench, taker), what=f"preemption {number}")
        bench.manager.release(taker)
        goes_on(victim, number + 1)
    check_victim(bench, victim, 10)


def test_the_example_goes_on_with_the_epoch_after_its_checkpoint(bench, teams):
    # Its launcher is `local`, and the DAG names no server: it has only this one.
    for kind in ("ssh", "docker"):
        assert bench.manager.allocate_resources(f"holds {kind}", 8, 8, gpu_types=[kind], ttl=3600)
    run = bench.run("train_preemptible", epochs=20_000)
    lease_id = f"{bench.instance}:train_preemptible/{run.run_id}/train"

    def said(words):
        return re.search(words, run.log(task_id="train"))

    wait_for(lambda: is_granted(bench, lease_id), what="its lease")
    wait_for(lambda: said(r"\bepoch \d\d"), what="epochs in the task's log")
    taker = take(bench, run.run_id, bench.manager.status_of(lease_id)["server_name"])
    wait_for(lambda: is_granted(bench, taker), what="the preemption")
    bench.manager.release(taker)
    run.wait_until("success", 300.0)
    for kind in ("ssh", "docker"):
        bench.manager.release(f"holds {kind}")
    left = said(r"preempted after epoch (\d+)")
    assert left is not None
    assert said(f"start 1 from epoch {left[1]}\\b")
    result = bench.api.xcom("train_preemptible", run.run_id, "train")
    assert result["epochs"] == 20_000
    assert result["accuracy"] > 0.9
    assert run.task()["try_number"] == 1


def kill_triggerer(bench, service, victim):
    bench.kill("triggerer")
    bench.start("triggerer")


def kill_redis(bench, service, victim):
    redis = next(process for process in bench.processes() if "redis" in process.name())
    redis.send_signal(signal.SIGKILL)
    time.sleep(OUTAGE_S)
    bench.start_redis()


def kill_service(bench, service, victim):
    service.kill()
    time.sleep(OUTAGE_S)
    service.start(bench)


PREEMPTING, SAVING, PENDING, GOING_ON = "preempting", "saving", "pending", "going on"


@pytest.mark.parametrize(
    "kill", [kill_triggerer, kill_redis, kill_service], ids=["triggerer", "redis", "service"]
)
def test_a_component_is_killed_in_each_phase_of_a_preemption(bench, teams, service, kill):
    """No worker is among them: the task stays deferred in every phase."""
    if kill is kill_service and (service.process is None or service.process.poll() is not None):
        service.start(bench)
    victim = bench.run("preemptible_service_job" if kill is kill_service else "preemptible_job")
    victim.wait_until_training()
    is_in = {
        PREEMPTING: lambda: bench.manager.preempting(),
        SAVING: lambda: victim.beats()[-1].get("told"),
        PENDING: lambda: is_pending(bench, victim),
        GOING_ON: lambda: is_granted(bench, victim.lease_id),
    }
    for number, phase in enumerate(is_in):
        taker = take(bench, f"{victim.run_id}-{number}")
        if phase != GOING_ON:
            wait_for(is_in[phase], what=phase)
            assert victim.task()["state"] == "deferred"
            kill(bench, service, victim)
        wait_for(lambda taker=taker: is_granted(bench, taker), 150.0, f"the lease of the taker, {phase}")
        bench.manager.release(taker)
        if phase == GOING_ON:
            wait_for(is_in[phase], what=phase)
            assert victim.task()["state"] == "deferred"
            kill(bench, service, victim)
        goes_on(victim, number + 1)
    check_victim(bench, victim, len(is_in))
