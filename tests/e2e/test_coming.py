"""What DAGs will ask for, on a real Airflow: announced, served, withdrawn."""

import time

import pytest

from tests.e2e.bench import TIMEOUT_FACTOR, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800 * TIMEOUT_FACTOR)]


def coming(bench):
    """Return what is announced: the number of copies by name."""
    return {each["name"]: each["copies"] for each in bench.manager.coming()}


def withdrawn(bench):
    """Return the reasons of what was withdrawn, by task."""
    return {each["lease_id"].rpartition("/")[2]: each["reason"] for each in bench.history("withdrawn")}


def test_what_five_dags_will_ask_for_is_announced_served_and_withdrawn(bench):
    runs = [bench.run(f"coming_{name}") for name in ("chain", "branch", "mapped", "deleted")]
    chain, branch, mapped, deleted = runs
    first = {"coming_chain.first", "coming_chain.second", "coming_deleted.train"}
    wait_for(lambda: coming(bench).keys() >= first, 60, "the announcement")
    print("announced:", coming(bench))
    wait_for(lambda: "not_taken" in withdrawn(bench), 120, "the withdrawal of the branch that is skipped")
    assert branch.state() == "running"
    assert withdrawn(bench)["not_taken"] == "its task will not run"
    deleted.mark_run("failed")  # Airflow deletes no running run
    deleted.delete()
    wait_for(lambda: "train" in withdrawn(bench), 120, "the withdrawal of the deleted run's")
    mapped.wait_until("failed", 600)
    wait_for(lambda: "many" in withdrawn(bench), 60, "the withdrawal of a hundred mapped tasks, as one")
    assert withdrawn(bench)["many"] == "the run has ended"
    lease_id = chain.lease_id.replace("/job", "/second")
    wait_for(lambda: bench.manager.status_of(lease_id), 300, "the start of the second")
    wait_for(lambda: bench.manager.check_deadlines(), 10, "the risk of its deadline")
    chain.wait_until("success", 300)
    assert "the deadline " in chain.log(1, "second")
    assert " is at risk: the task should end by " in chain.log(1, "second")
    announced = [each["request"]["lease_id"].rpartition("/")[2] for each in bench.history("announced")]
    assert sorted(announced) == ["first", "many", "not_taken", "second", "train"], "once each"
    assert coming(bench) == {}, "nothing is left"
    branch.wait_until("success", 300)
    again = bench.run("coming_chain")
    wait_for(lambda: "coming_chain.first" in coming(bench), 60, "the announcement")
    [at] = [each["at"] for each in bench.manager.coming() if each["name"] == "coming_chain.first"]
    print("first should ask in", at - time.time(), "s")
    assert at > time.time(), "the run before tells how long after its begin it asks"
    again.mark_run("failed")
    wait_for(lambda: not coming(bench), 60, "the withdrawal with the run")
