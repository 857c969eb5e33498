"""Limits in a real Airflow: a job that is idle or whose turn is over goes on, one that ran too long fails."""

import time

import pytest

from resource_manager.agent.report_format import read_report
from resource_manager.core.changes import Granted, Outcome, Preempting, Released
from resource_manager.core.lease_limits import IDLE, MAX_RUNTIME, REQUEUE_AFTER
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.manager.cluster_file.sections import ClusterForm
from tests.agent.reporting import as_text, gpu, process, report, uuid
from tests.e2e.bench import wait_for
from tests.e2e.test_preemption import history, of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Watched:
    """A server of one GPU, of which the test is the agent."""

    def __init__(self, manager):
        self._receiver = ReportReceiver(manager)

    def report(self, *gpus):
        said = report(time.time(), *gpus, name="watched", interval_s=5.0)
        self._receiver.receive(read_report(as_text(said)))


@pytest.fixture
def watched(bench):
    before = bench.manager.cluster()["sections"]["servers"]
    card = {"ids": [0], "type": "watched", "uuids": [uuid(0)]}
    added = [*before, {"name": "watched", "cpus": 8, "gpus": [card]}]
    bench.manager.apply(ClusterForm.model_validate({"servers": added}))
    yield Watched(bench.manager)
    bench.check_free()
    bench.manager.apply(ClusterForm.model_validate({"servers": before}))


def steps_of(run):
    return [beat["step"] for beat in run.beats()]


def ended_by(bench, run):
    """Return what preempted the run's leases, and how each of its leases ended."""
    preemptors = [change.preemptor for change in of(run, history(bench, Preempting))]
    return preemptors, [change.outcome for change in of(run, history(bench, Released))]


def restarts(run, count):
    return bool(run.beats()) and int(run.beats()[-1]["restart"]) >= count


def test_a_job_gives_its_gpus_back_after_its_turn_and_goes_on_with_what_it_saved(bench):
    run = bench.run("turn_job")
    run.wait_until_training()
    wait_for(lambda: restarts(run, 1), what="its restart")
    run.wait_until_deferred()
    run.finish()
    run.wait_until("success")
    assert steps_of(run) == list(range(len(steps_of(run)))), "no step is lost"
    assert run.task()["try_number"] == 1
    preemptors, outcomes = ended_by(bench, run)
    assert preemptors
    assert set(preemptors) == {REQUEUE_AFTER}
    assert outcomes == [Outcome.PREEMPTED] * len(preemptors) + [Outcome.SUCCESS]


def test_a_job_is_ended_at_its_longest_runtime_and_tried_again_with_what_it_saved(bench):
    run = bench.run("timed_job")
    run.wait_until_training()
    first = run.beats()[0]["process"]
    wait_for(lambda: run.beats()[-1]["process"] != first, what="the next try")
    preemptors, outcomes = ended_by(bench, run)
    assert (preemptors[0], outcomes[0]) == (MAX_RUNTIME, Outcome.TIMED_OUT)
    steps = steps_of(run)
    assert steps == list(range(len(steps))), "it went on with what it saved"
    run.finish()
    run.wait_until("success")
    assert run.task()["try_number"] == len(preemptors) + 1, "each end is a try that failed"


def test_an_idle_job_is_released_and_goes_on_once_it_has_gpus_again(bench, watched):
    run = bench.run("idle_job", gpus=1)
    watched.report(gpu(0))
    run.wait_until_training()
    wait_for(lambda: watched.report(gpu(0)) or restarts(run, 1), what="its restart", every_s=1)
    own = process(lease_id=run.lease_id, lease_source="environment")
    watched.report(gpu(0, utilization_percent=90, processes=[own]))
    preemptors, outcomes = ended_by(bench, run)
    assert (preemptors, outcomes) == ([IDLE], [Outcome.IDLE])
    assert len(of_lease(bench, run)) == 2, "it waited for another lease"
    run.finish()
    run.wait_until("success")
    assert steps_of(run) == list(range(len(steps_of(run)))), "no step is lost"
    assert run.task()["try_number"] == 1
    watched.report(gpu(0))  # it is clean


def of_lease(bench, run):
    return [change for change in history(bench, Granted) if change.lease.lease_id == run.lease_id]
