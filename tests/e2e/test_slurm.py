"""A real Airflow whose tasks run on a real Slurm: no lease, no worker while they wait, one job each."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.bench import Bench, wait_for
from tests.e2e.servers import SSHServer
from tests.slurm_cluster import slurm, slurm_cluster
from tests.test_docs import ROOT, blocks

__all__ = ["slurm", "slurm_cluster"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

NO_SSH = 1
PAGE = ROOT / "docs" / "slurm.md"


@pytest.fixture(scope="module")
def airflow(tmp_path_factory, slurm_cluster):
    """Airflow on a login node, whose questions to Slurm are counted."""
    home = tmp_path_factory.mktemp("airflow")
    (home / "bin").mkdir()
    counted = home / "bin" / "squeue"
    counted.write_text(
        f'#!/bin/sh\necho "$(date +%s) $*" >> {home}/asked\nexec {shutil.which("squeue")} "$@"\n'
    )
    counted.chmod(0o755)
    path = f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"HOME": str(home), "PATH": path, **slurm_cluster.environment}
    with Bench(home, NO_SSH, **own) as bench:
        bench.switch_the_reconciler_on()
        yield bench


def test_the_page_leads_from_a_cluster_to_a_running_dag(airflow, slurm, tmp_path):
    """Its commands and its DAG, with this login node's port and key instead of the page's."""
    check, connect = blocks(PAGE, "sh")
    [dag] = blocks(PAGE, "python")
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["bash", "-ec", check], cwd=home, env={**os.environ, **slurm.environment}, check=True)
    server = SSHServer(tmp_path, variables={**slurm.environment, "HOME": str(home)})
    server.start()
    try:
        for theirs, ours in (
            ("login.example.org", "127.0.0.1"),
            ("--conn-port 22", f"--conn-port {server.port}"),
            ("--conn-login ann", "--conn-login root"),
            ('"/home/airflow/.ssh/id_ed25519"', f'"{server.key}", "no_host_key_check": true'),
        ):
            assert theirs in connect
            connect = connect.replace(theirs, ours)
        subprocess.run(["bash", "-ec", connect], env=airflow.environment, check=True)
        (airflow.dags / "train_on_slurm.py").write_text(dag)
        airflow.command("dags", "reserialize")
        run = airflow.run("train_on_slurm")
        wait_for(lambda: run.state() == "success", 200.0, "the run of the page")
        log = run.log(task_id="train")
        assert "training on 0,1 of n" in log
    finally:
        server.stop()


def test_a_task_waits_runs_and_returns_its_jobs_last_line(airflow, slurm):
    blocker = slurm.ask("sbatch --parsable -N4 --gpus-per-node=4 -o /dev/null --wrap 'sleep 3000'").strip()
    run = airflow.run("slurm_job", command="echo on $GPU_LEASE_GPUS; echo '{\"loss\": 1}'", gpus=2, nodes=1)
    run.wait_until_deferred()
    wait_for(lambda: "waiting on Slurm as job" in run.log(), what="the line of the wait")
    slurm.ask(f"scancel {blocker}")
    run.wait_until("success")
    log = run.log()
    assert "submitted job gpu-" in log
    assert "(Resources)" in log or "(Priority)" in log
    assert "on 0,1" in log
    assert run.xcom("return_value") == {"loss": 1}
    assert run.xcom("slurm_job")["where"].endswith("GPU 0-1")
    assert not airflow.manager.leases()
    [job] = [job for job in airflow.manager.slurm_jobs() if job["task_id"] == run.lease_id]
    assert (job["state"], job["exit_code"], job["where"][2:]) == ("COMPLETED", 0, " GPU 0-1")


def test_a_job_that_fails_or_never_runs_says_why(airflow):
    fails = airflow.run("slurm_job", command="echo bad data; exit 3", gpus=1, nodes=1)
    unknown = airflow.run("slurm_job", command="true", partition="nope")
    too_long = airflow.run("slurm_job", command="true", gpus=9)
    for run in (fails, unknown, too_long):
        run.wait_until("failed")
    assert "the job ended with exit code 3: bad data" in fails.log()
    assert "Slurm did not take the job: " in unknown.log()
    assert "invalid partition specified: nope; Invalid partition name specified" in unknown.log()
    assert "Requested node configuration is not available" in too_long.log()


def test_a_preempted_job_waits_again_in_the_same_try(airflow, slurm):
    saved = airflow.home / "saved"
    saves = f"touch $GPU_JOB_DIR/saved {saved}; sleep 3000"
    command = f"if [ -e $GPU_JOB_DIR/saved ]; then echo went on; else {saves}; fi"
    run = airflow.run("slurm_job", command=command, gpus=4, nodes=4)
    wait_for(saved.exists, what="what the job saves")
    slurm.ask("sbatch -p urgent -N4 --gpus-per-node=4 -o /dev/null --wrap 'sleep 5'")
    run.wait_until("success")
    assert run.task()["try_number"] == 1
    assert "Slurm preempted job" in run.log()
    assert run.xcom("return_value") == "went on"


def test_a_job_goes_on_though_worker_triggerer_and_controller_were_killed(airflow, slurm):
    count, may_end = airflow.home / "count", airflow.home / "may_end"
    command = f"echo begun >> {count}; until [ -e {may_end} ]; do sleep 1; done; cat {count}"
    run = airflow.run("slurm_job", command=command, nodes=1)
    run.wait_until_deferred()
    wait_for(count.exists, what="the job")
    airflow.kill("triggerer")
    slurm.kill_controller()
    airflow.start("triggerer")
    wait_for(lambda: "Slurm cannot be asked; still watching" in run.log(), 300.0, "a look without an answer")
    slurm.start_controller()
    may_end.touch()
    run.wait_until("success")
    assert run.xcom("return_value") == "begun"


def test_a_task_that_a_user_ends_ends_its_job(airflow, slurm):
    run = airflow.run("slurm_job", command="sleep 300", nodes=1)
    run.wait_until_deferred()
    wait_for(lambda: "RUNNING" in slurm.ask("squeue -h -o %T"), what="the job")
    run.mark("failed")
    wait_for(lambda: slurm.ask("squeue -h -o %i") == "", 120.0, "the end of the job")


def test_a_job_that_a_dead_triggerer_left_ends_with_its_task(airflow, slurm):
    run = airflow.run("slurm_job", command="sleep 600", nodes=1)
    run.wait_until_deferred()
    wait_for(
        lambda: [job for job in airflow.manager.slurm_jobs() if job["state"] == "RUNNING"], what="the job"
    )
    airflow.kill("triggerer")
    run.mark("failed")
    wait_for(lambda: slurm.ask("squeue -h -o %i") == "", 150.0, "the end of the job")
    airflow.start("triggerer")


def test_a_hundred_mapped_tasks_are_watched_by_one_question_in_five_seconds(airflow, slurm):
    """The questions of submissions come on top: each looks for its own job by name."""
    held = slurm.ask(
        "sbatch --parsable -p urgent -N4 --gpus-per-node=4 -o /dev/null --wrap 'sleep 3000'"
    ).strip()
    run = airflow.run("slurm_mapped")
    asked = airflow.home / "asked"
    wait_for(lambda: run.count("deferred") == 100, 900.0, "a hundred tasks on Slurm")
    asked.write_text("")
    time.sleep(65)
    slurm.ask(f"scancel {held}")
    polls = [line for line in asked.read_text().splitlines() if "--name" not in line]
    times = [int(line.split()[0]) for line in polls]
    assert len(times) > 3
    busiest = max(sum(start <= at < start + 60 for at in times) for start in times)
    print(f"questions in the busiest minute: {busiest}")
    assert busiest <= 60 / 5 + 1
    run.wait_until("success", 900.0)
    tasks = airflow.api.call("GET", f"{run.path}/taskInstances?limit=200")["task_instances"]
    assert {task["state"] for task in tasks} == {"success"}
