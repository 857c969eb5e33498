"""Example DAGs in a real Airflow; `train_digits` is tested with the demo."""

import pytest

from tests.e2e.bench import wait_for
from tests.e2e.test_faults import IMAGE, needs_docker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def run(bench, dag_id, **conf):
    """Run a DAG until it succeeds; return the id of the run."""
    run_id = bench.run(dag_id, **conf).run_id
    states = ("success", "failed")
    wait_for(lambda: bench.api.run_state(dag_id, run_id) in states, 300, f"the end of {dag_id}")
    tasks = {task["task_id"]: task["state"] for task in bench.api.task_instances(dag_id, run_id)}
    assert bench.api.run_state(dag_id, run_id) == "success", tasks
    return run_id


def test_submit_training_takes_a_form(bench):
    form = {
        "command": "echo $CUDA_VISIBLE_DEVICES of $GPU_SERVER",
        "gpus": 3,
        "cpus": 4,
        "prefer_server": "here",
    }
    run_id = run(bench, "submit_training", **form)
    assert bench.api.xcom("submit_training", run_id, "train") == "0,1,2 of here"


def test_submit_training_runs_with_the_defaults_of_the_form(bench):
    run_id = run(bench, "submit_training")
    said = bench.api.xcom("submit_training", run_id, "train")
    assert said.startswith("training on GPUs 0")


def test_sweep_digits_maps_a_grid(bench):
    elsewhere = (
        "by-ssh",
        "by-docker",
    )  # where its launcher starts no job
    for server in elsewhere:
        bench.manager.submit(server, 8, server=server)
    try:
        run_id = run(bench, "sweep_digits")
    finally:
        for server in elsewhere:
            bench.manager.release(server)
    assert bench.api.xcom("sweep_digits", run_id, "best")["accuracy"] > 0.9
    seen = {request["lease_id"] for request in bench.grants()}
    assert {f"{bench.instance}:sweep_digits/{run_id}/train/{point}" for point in range(6)} <= seen


def test_pipeline_digits_shares_a_lease(bench):
    run_id = run(bench, "pipeline_digits")
    allocation = bench.api.xcom("pipeline_digits", run_id, "on_shared_gpus.allocate")
    for stage in ("pretrain", "finetune"):
        log = bench.api.log("pipeline_digits", run_id, f"on_shared_gpus.{stage}")
        assert f"CUDA_VISIBLE_DEVICES={allocation['gpu_devices']}" in log
    assert len(bench.api.xcom("pipeline_digits", run_id, "evaluate").split(",")) == 2


def test_each_index_of_a_mapped_group_has_the_gpus_of_its_own_lease(bench):
    run_id = run(bench, "mapped_leases")
    group = f"/dags/mapped_leases/dagRuns/{run_id}/taskInstances/on_gpus_of_its_own.gpu_lease"
    key = "xcomEntries/return_value?map_index="
    for number in range(3):
        allocation = bench.api.call("GET", f"{group}.allocate/{key}{number}&deserialize=true")["value"]
        seen = bench.api.call("GET", f"{group}.step/{key}{number}")["value"]
        assert seen == allocation["gpu_devices"]


@needs_docker
def test_docker_step_runs_between_setup_and_teardown(bench):
    run_id = run(bench, "docker_step", image=IMAGE)
    allocation = bench.api.xcom("docker_step", run_id, "gpu_lease.allocate")
    log = bench.api.log("docker_step", run_id, "gpu_lease.train")
    assert f"training on GPUs {allocation['gpu_devices']}" in log


def test_gpu_reconcile_reports(bench):
    run_id = run(bench, "gpu_reconcile")
    log = bench.api.log("gpu_reconcile", run_id, "reconcile")
    assert "every lease of this Airflow belongs to an unfinished task" in log


def test_the_example_of_the_provider_trains_and_evaluates(bench):
    run_id = run(bench, "example_gpu_training")
    assert bench.api.xcom("example_gpu_training", run_id, "train").startswith("training on GPU 0 of")
    assert bench.api.xcom("example_gpu_training", run_id, "evaluate").startswith("evaluated on GPU ")


def test_a_training_with_a_deadline_ends_before_it(bench):
    run_id = run(bench, "example_gpu_alerts")
    assert bench.api.xcom("example_gpu_alerts", run_id, "train") == "training on GPU 0"


def test_mails_tell_of_a_training_that_is_late_and_of_one_that_failed(bench, mail):
    example = (bench.dags / "provider" / "example_gpu_alerts.py").read_text()
    told = bench.home / "told"
    for planned, at_once in {
        '"example_gpu_alerts"': '"late_and_failed"',
        "timedelta(hours=1)": "timedelta(seconds=10)",
        'echo "training on GPU $CUDA_VISIBLE_DEVICES"': f"until test -e {told}; do sleep 0.2; done; exit 1",
        "retries=1": "retries=0",
    }.items():
        assert example.count(planned) == 1
        example = example.replace(planned, at_once)
    (bench.dags / "provider" / "late_and_failed.py").write_text(example)
    bench.command("dags", "reserialize")
    run = bench.run("late_and_failed")

    def is_told(subject):
        return any(f"Subject: {subject}" in text and "gpu-team@example.com" in text for text in mail.mails)

    wait_for(lambda: is_told("A training has not ended within an hour"), 180, "the mail about the deadline")
    assert run.state() == "running"
    told.touch()
    wait_for(lambda: is_told("train of "), 180, "the mail about the failure")
    run.wait_until("failed")


def test_a_run_over_the_usual_number_of_gpus_waits_for_a_person(bench):
    trains = bench.run("example_gpu_approval", gpus=3)
    question = f"{trains.path}/taskInstances/approve/-1/hitlDetails"
    wait_for(lambda: trains.states()["approve"] in ("deferred", "awaiting_input"), 120, "the question")
    # Airflow fails a task that goes on before its scheduler has seen it pause; no person is that quick.
    paused = "TaskInstance Finished: dag_id=example_gpu_approval, task_id=approve"
    # A scheduler that a test before has started has a log of its own.
    wait_for(
        lambda: any(paused in log.read_text() for log in bench.home.glob("*.log")),
        what="the scheduler's view of it",
    )
    assert trains.states()["train"] is None
    bench.api.call("PATCH", question, {"chosen_options": ["Approve"], "params_input": {}})
    trains.wait_until("success", 300)
    said = bench.api.xcom("example_gpu_approval", trains.run_id, "train")
    assert said == "training on GPUs 0,1,2"
