"""Limits in a real Airflow: a job gives its GPUs back after its turn, and goes on with what it saved."""

import pytest

from resource_manager.core.changes import Outcome, Preempting, Released
from resource_manager.core.lease_limits import REQUEUE_AFTER
from tests.e2e.bench import TIMEOUT_FACTOR, wait_for
from tests.e2e.test_preemption import history, of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600 * TIMEOUT_FACTOR)]


def ends_well(bench, run, limit, outcome):
    """End the job; assert that it was ended by the limit, and went on without losing a step or its try."""
    run.finish()
    run.wait_until("success")
    steps = [beat["step"] for beat in run.beats()]
    assert steps == list(range(len(steps)))
    assert run.task()["try_number"] == 1
    ended = of(run, history(bench, Preempting))
    assert ended
    assert {change.preemptor for change in ended} == {limit}
    outcomes = [change.outcome for change in of(run, history(bench, Released))]
    assert outcomes == [outcome] * len(ended) + [Outcome.SUCCESS]


def test_a_job_gives_its_gpus_back_after_its_turn_and_goes_on_with_what_it_saved(bench):
    run = bench.run("turn_job")
    run.wait_until_training()
    wait_for(lambda: run.beats()[-1]["restart"] == "1", what="its restart")
    run.wait_until_deferred()
    ends_well(bench, run, REQUEUE_AFTER, Outcome.PREEMPTED)
