"""What DAGs will ask for, on a real Airflow: announced, served, withdrawn; and 200 estimates."""

import time

import pytest

from resource_manager.manager.forecasts import kept_record
from tests.e2e.bench import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000)]


def coming(bench):
    """Return what is announced: the number of copies by name."""
    return {each["name"]: each["copies"] for each in bench.manager.coming()}


def task_of(lease_id, runs):
    """Return the task of a lease of these runs, "" of another: each DAG of the tests may announce demand."""
    run, _, task = lease_id.rpartition("/")
    return task if any(each.lease_id == f"{run}/job" for each in runs) else ""


def withdrawn(bench, runs):
    """Return the reasons of what was withdrawn of these runs, by task."""
    reasons = {task_of(each["lease_id"], runs): each["reason"] for each in bench.history("withdrawn")}
    reasons.pop("", None)
    return reasons


def reconciled(bench):
    """Return how many runs of the reconciler have ended."""
    return bench.api.call("GET", "/dags/gpu_reconcile/dagRuns?state=success&limit=1")["total_entries"]


def test_what_dags_will_ask_for_is_announced_served_and_withdrawn(bench):
    runs = [bench.run(f"coming_{name}") for name in ("chain", "branch", "deleted")]
    chain, branch, deleted = runs
    first = {"coming_chain.first", "coming_chain.second", "coming_deleted.train"}
    wait_for(lambda: coming(bench).keys() >= first, 60, "the announcement")
    wait_for(lambda: "not_taken" in withdrawn(bench, runs), 120, "the withdrawal of the skipped branch")
    assert branch.state() == "running"
    assert withdrawn(bench, runs)["not_taken"] == "its task will not run"
    lease_id = chain.lease_id.replace("/job", "/second")
    wait_for(lambda: bench.manager.status_of(lease_id), 300, "the start of the second")
    wait_for(lambda: bench.manager.check_deadlines(), 10, "the risk of its deadline")
    chain.wait_until("success", 300)
    assert "the deadline " in chain.log(1, "second")
    assert " is at risk: the task should end by " in chain.log(1, "second")
    wait_for(lambda: deleted.states()["prepare"] == "up_for_retry", 120, "the failure before the deletion")
    bench.api.call("PATCH", "/dags/coming_deleted", {"is_paused": True})
    before = reconciled(bench)  # a scheduler that looks at a run as it is deleted ends
    wait_for(lambda: reconciled(bench) > before + 1, 180, "two loops of the scheduler")
    bench.api.call("DELETE", "/dags/coming_deleted")  # its run has not ended: nobody is told
    wait_for(lambda: "train" in withdrawn(bench, runs), 180, "the withdrawal of the deleted DAG's")
    assert withdrawn(bench, runs)["train"] == "its task will not run"
    announced = [task_of(each["request"]["lease_id"], runs) for each in bench.history("announced")]
    assert sorted(filter(None, announced)) == ["first", "not_taken", "second", "train"], "once each"
    assert coming(bench) == {}, "nothing is left"
    branch.wait_until("success", 300)
    again = bench.run("coming_chain")
    wait_for(lambda: "coming_chain.first" in coming(bench), 60, "the announcement")
    [at] = [each["at"] for each in bench.manager.coming() if each["name"] == "coming_chain.first"]
    assert at > time.time(), "the run before tells how long after its begin it asks"
    again.mark_run("failed")
    wait_for(lambda: not coming(bench), 60, "the withdrawal with the run")


def test_the_estimates_of_two_hundred_short_tasks_against_what_happened(bench, record_property):
    own = []
    for name in ("coming_warm_up", "coming_shorts"):
        run = bench.run(name)
        own.append(f"{run.lease_id}/")

        def is_over(run=run):
            bench.manager.queue()  # as a console does that shows it
            return run.state() in ("success", "failed")

        wait_for(is_over, 2400, f"the end of {name}", every_s=2)
        run.wait_until("success", 10)
    record_property("estimates", bench.manager.estimates()["kinds"])
    # Those of the tests before are kept, too.
    outcomes = [
        each for each in kept_record(bench.manager.store).outcomes if each.lease_id.startswith(tuple(own))
    ]
    known = [each for each in outcomes if each.given.median is not None]
    assert len(outcomes) >= 150
    assert len(known) >= 0.9 * len(outcomes), "all but those of the first tasks ever"
    assert sum(each.is_inside for each in known) >= 0.6 * len(known)
