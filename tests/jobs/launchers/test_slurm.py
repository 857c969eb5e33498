"""Jobs on a real Slurm under faults and bad input, and texts of Slurm's versions."""

import os
import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest

from resource_manager.jobs.launchers import (
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    job_key,
    open_launcher,
    slurm_commands,
    ssh,
)
from resource_manager.jobs.launchers.base import BatchRequest
from resource_manager.jobs.launchers.slurm import Said, arguments_of
from tests.e2e.servers import SSHServer
from tests.eventually import wait_for, wait_until_ended

on_slurm = [pytest.mark.e2e, pytest.mark.parametrize("launcher", ["slurm"], indirect=True)]
ABOUT = {"lease_id": "a:d/r/t", "conn_id": "", "labels": {"dag_id": "d"}, "owner": "ann", "team": "vision"}


def shell(key, command, **asked):
    about = {**ABOUT, "gpus": asked.get("gpus", 0), "nodes": asked.get("nodes", 1)}
    return Job(key, ("/bin/sh", "-c", command), batch=BatchRequest(about=about, **asked))


def said(launcher, key):
    return launcher.look({key: -1})[key].said


def stub(folder, name, text):
    """Put a program of that name before Slurm's own."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def key(launcher):
    """Return a key whose job is ended after the test."""
    key = job_key(f"a:d/{time.monotonic_ns()}/t", 1)
    yield key
    launcher.stop(key, 0.0)


class TestFaults:
    pytestmark = on_slurm

    def test_a_submitter_that_dies_between_sbatch_and_its_answer_leaves_one_job(
        self, launcher, key, tmp_path, monkeypatch
    ):
        real = shutil.which("sbatch")
        with monkeypatch.context() as patched:
            patched.setenv(
                "PATH", stub(tmp_path / "bin", "sbatch", f'{real} "$@" > /dev/null; kill -9 $PPID')
            )
            with pytest.raises(LauncherUnreachableError):
                launcher.start(shell(key, "echo begun; sleep 3"))
        assert launcher.status(key).state is JobState.RUNNING
        launcher.start(shell(key, "echo begun; sleep 3"))
        assert wait_until_ended(launcher, key) == JobStatus(JobState.FINISHED, 0)
        assert launcher.logs(key).text == "begun\n"

    def test_a_job_that_was_submitted_twice_runs_once(self, launcher, key, slurm):
        launcher.start(shell(key, "echo begun; sleep 2"))
        directory = f"{launcher.root}/{key}"
        again = (
            f"sbatch --parsable -J {key} -d singleton -D {directory} -o {directory}/log --open-mode=append"
        )
        second = slurm.ask(f"{again} {directory}/script").strip()
        assert wait_until_ended(launcher, key) == JobStatus(JobState.FINISHED, 0)
        wait_for(lambda: second not in slurm.ask("squeue -h -o %i"), 60.0)
        assert launcher.logs(key).text == "begun\n"

    def test_a_job_that_slurm_starts_after_stop_does_nothing(self, launcher, key, slurm):
        launcher.start(shell(key, "echo begun"))
        wait_until_ended(launcher, key)
        script = Path(launcher.root, key, "script").read_text()
        launcher.stop(key)
        (Path(launcher.root) / "late").write_text(script)
        late = slurm.ask(
            f"sbatch --parsable -J {key} -o {launcher.root}/late.log {launcher.root}/late"
        ).strip()
        wait_for(lambda: "JobState=COMPLETED" in slurm.ask(f"scontrol show job {late}"), 60.0)
        assert not Path(launcher.root, key).exists()
        with pytest.raises(AlreadyEndedError):
            launcher.start(shell(key, "echo begun"))

    def test_a_job_outlives_slurms_controller(self, launcher, key, slurm):
        launcher.start(shell(key, "echo begun; sleep 4; echo end"))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        slurm.kill("slurmctld")
        with pytest.raises(LauncherUnreachableError, match=r"could not status job .*Unable to contact slurm"):
            launcher.status(key)
        with pytest.raises(LauncherUnreachableError, match="Unable to contact slurm"):
            launcher.start(shell(f"{key}0", "true"))
        slurm.start_controller()
        wait_for(lambda: slurm.ask("scontrol ping", check=False).count("UP"), 60.0)
        assert wait_until_ended(launcher, key) == JobStatus(JobState.FINISHED, 0)
        assert launcher.logs(key).text == "begun\nend\n"
        launcher.stop(f"{key}0")

    def test_a_node_that_fails_ends_its_job_as_such(self, launcher, key, slurm):
        launcher.start(shell(key, "echo begun; sleep 60", gpus=1))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        node = said(launcher, key).devices[0][0]
        slurm.kill(node)
        wait_for(lambda: launcher.status(key).state is JobState.FINISHED, 90.0)
        slurm.start_node(node)
        assert (said(launcher, key).state, said(launcher, key).end) == (
            "NODE_FAIL",
            "a node of the job failed",
        )
        assert launcher.status(key).exit_code != 0
        slurm.wait_for_nodes()

    def test_a_preempted_job_is_told_from_one_that_failed(self, launcher, key, slurm):
        launcher.start(shell(key, "echo begun; sleep 60", nodes=4, gpus=4))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        slurm.ask("sbatch -p urgent -N4 --gpus-per-node=4 -o /dev/null --wrap 'sleep 1'")
        wait_for(lambda: launcher.status(key).state is JobState.FINISHED, 60.0)
        assert said(launcher, key).end == "Slurm preempted the job"

    def test_a_job_cancelled_on_slurm_says_so(self, launcher, key, slurm):
        launcher.start(shell(key, "sleep 60"))
        wait_for(lambda: said(launcher, key).state == "RUNNING")
        slurm.ask(f"scancel {said(launcher, key).id}")
        wait_for(lambda: launcher.status(key).state is JobState.FINISHED, 60.0)
        assert said(launcher, key).end == "the job was cancelled on Slurm"

    def test_a_job_at_its_time_limit_is_warned_and_ended(self, launcher, key):
        launcher.start(
            shell(key, "trap 'echo told' TERM; while :; do sleep 0.2; done", time_s=60, grace_s=20)
        )
        wait_for(lambda: launcher.status(key).state is JobState.FINISHED, 180.0)
        assert said(launcher, key).end == "Slurm ended the job at its time limit"
        assert "\ntold\n" in launcher.logs(key).text

    def test_a_login_node_that_hangs_is_out_of_reach(self, launcher, key, tmp_path, monkeypatch):
        launcher.start(shell(key, "sleep 3"))
        with monkeypatch.context() as patched:
            patched.setenv("PATH", stub(tmp_path / "bin", "squeue", "exec sleep 5"))
            patched.setattr(ssh, "ANSWER_TIMEOUT_S", 1.0)
            with pytest.raises(LauncherUnreachableError, match="gave no answer within 1 s"):
                launcher.status(key)
        assert wait_until_ended(launcher, key).exit_code == 0


class TestBadInput:
    pytestmark = on_slurm

    @pytest.mark.parametrize(
        ("asked", "reason"),
        [
            ({"options": {"partition": "nope"}}, "invalid partition specified: nope; Invalid partition name"),
            ({"gpus": 9}, "Requested node configuration is not available"),
            ({"options": {"reservation": "nope"}}, "Requested reservation is invalid"),
            ({"options": {"constraint": "a100"}}, "Invalid feature specification"),
            ({"options": {"wrap": "rm -rf /"}}, "unknown option 'wrap'; known are partition, account"),
            ({"options": {"partition": "a\n#SBATCH"}}, "partition is not one line"),
        ],
    )
    def test_what_slurm_does_not_take_is_told_in_its_own_words(self, launcher, key, asked, reason):
        with pytest.raises(LauncherError, match=reason) as failed:
            launcher.start(shell(key, "true", **asked))
        assert not isinstance(failed.value, LauncherUnreachableError)
        assert "\n" not in str(failed.value)
        assert launcher.status(key) == JobStatus(JobState.ABSENT)

    def test_a_time_above_the_limit_never_runs(self, launcher, key):
        launcher.start(shell(key, "true", time_s=3600, options={"partition": "short"}))
        wait_for(lambda: said(launcher, key).reason == "PartitionTimeLimit")
        assert said(launcher, key).never
        assert said(launcher, key).wait == "its time is above the limit of the partition (PartitionTimeLimit)"
        launcher.stop(key)
        assert launcher.status(key) == JobStatus(JobState.ABSENT)

    def test_a_job_that_an_administrator_holds_waits(self, launcher, key, slurm):
        launcher.start(shell(key, "true", nodes=4, gpus=4, options={"exclude": ""}))
        slurm.ask(f"scontrol hold jobname={key}", check=False)
        wait_for(lambda: said(launcher, key).reason == "JobHeldAdmin")
        assert (said(launcher, key).never, said(launcher, key).wait) == (
            False,
            "an administrator holds it (JobHeldAdmin)",
        )
        slurm.ask(f"scontrol release jobname={key}")
        assert wait_until_ended(launcher, key).exit_code == 0

    def test_a_name_that_somebody_took_is_not_taken_for_the_job(self, launcher, key, slurm):
        other = slurm.ask(f"sbatch --parsable -J {key} -D /tmp -o /dev/null --wrap 'sleep 30'").strip()
        with pytest.raises(
            LauncherError, match=f"the name {key} is taken by job {other} in /tmp: end it"
        ) as failed:
            launcher.start(shell(key, "true"))
        assert not isinstance(failed.value, LauncherUnreachableError)
        launcher.stop(key, 0.0)
        assert f"{other}\n" in slurm.ask("squeue -h -o %i")
        slurm.ask(f"scancel {other}")

    def test_the_users_own_formats_and_language_change_nothing(self, launcher, key, monkeypatch):
        for name, value in (("SQUEUE_FORMAT", "%i"), ("SLURM_TIME_FORMAT", "relative"), ("LC_ALL", "de_DE")):
            monkeypatch.setenv(name, value)
        launcher.start(shell(key, "sleep 2"))
        assert said(launcher, key).id.isdigit()
        assert wait_until_ended(launcher, key).exit_code == 0

    def test_a_variable_that_no_shell_exports_is_named(self, launcher, key):
        with pytest.raises(LauncherError, match=r"env: 'A\.B' is not a name that a shell can export"):
            launcher.start(Job(key, ("true",), environment={"A.B": "1"}))


class TestGangs:
    pytestmark = on_slurm

    def test_each_node_gets_what_torchrun_reads(self, launcher, key):
        command = (
            "echo $GPU_NODE_RANK $GPU_NODES_NUM $PET_NNODES $PET_NPROC_PER_NODE $PET_NODE_RANK $GPU_GPUS_NUM"
            " $PET_MASTER_ADDR:$((MASTER_PORT == PET_MASTER_PORT)) $GPU_LEASE_GPUS $GPU_SERVER >> $OUT"
        )
        out = Path(launcher.root, "out")
        job = shell(key, f"OUT={out}; {command}", nodes=3, gpus=2)
        launcher.start(job)
        assert wait_until_ended(launcher, key).exit_code == 0
        assert sorted(out.read_text().splitlines()) == [
            f"{rank} 3 3 2 {rank} 6 127.0.0.1:1 0,1 n{rank + 1}" for rank in range(3)
        ]
        assert said(launcher, key).where == "n[1-3] GPU 0-1"

    def test_a_member_that_fails_ends_the_others_and_is_heard(self, launcher, key):
        launcher.start(shell(key, "[ $GPU_NODE_RANK = 1 ] && echo bad && exit 9; sleep 60", nodes=2, gpus=1))
        assert wait_until_ended(launcher, key).exit_code == 9
        assert "[rank 1] bad\n" in launcher.logs(key).text

    @pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs OpenMPI (Debian: openmpi-bin)")
    def test_mpirun_of_rank_0_starts_a_process_for_each_gpu(self, launcher, key):
        """Its own servers are started by Slurm, inside the job."""
        run = "mpirun --allow-run-as-root --oversubscribe --hostfile $GPU_HOSTFILE"
        launcher.start(
            shell(
                key,
                f"[ $GPU_NODE_RANK != 0 ] || {run} sh -c 'echo rank $OMPI_COMM_WORLD_RANK $SLURMD_NODENAME'",
                nodes=2,
                gpus=2,
            )
        )
        assert wait_until_ended(launcher, key, 60.0).exit_code == 0, launcher.logs(key).text
        ranks = sorted(line for line in launcher.logs(key).text.splitlines() if line.startswith("rank"))
        assert ranks == ["rank 0 n1", "rank 1 n1", "rank 2 n2", "rank 3 n2"]


class TestManyJobs:
    pytestmark = on_slurm

    def test_a_hundred_jobs_are_looked_at_by_one_question(self, launcher, tmp_path, monkeypatch, slurm):
        keys = [launcher.current(f"a:d/r/t/{number}") for number in range(3)]
        keys += [job_key(f"a:d/r/t/{number}", 1) for number in range(3, 100)]
        real, count = shutil.which("squeue"), tmp_path / "count"
        for each in keys[:12]:
            launcher.start(shell(each, "echo done", gpus=4))
        monkeypatch.setenv("PATH", stub(tmp_path / "bin", "squeue", f'echo >> {count}; exec {real} "$@"'))
        found = launcher.look(dict.fromkeys(keys, 0))
        assert len(found) == 100
        assert count.read_text() == "\n"
        for each in keys[:12]:
            wait_until_ended(launcher, each)
        assert {launcher.logs(each).text for each in keys[:12]} == {"done\n"}
        assert {record.lease_id for record in launcher.records()[1]} == {ABOUT["lease_id"]}
        for each in keys[:12]:
            launcher.stop(each)
        cluster, records = launcher.records()
        assert cluster == "test"
        assert {(record.state, record.exit_code, record.gpus) for record in records} == {("COMPLETED", 0, 4)}
        assert launcher.current("a:d/r/t/0") == keys[0][:-1] + "2"


@pytest.mark.e2e
@pytest.mark.usefixtures("ssh_server")
def test_a_login_node_is_reached_by_ssh(slurm, tmp_path, monkeypatch):
    server = SSHServer(tmp_path, variables=slurm.environment)
    server.start()
    monkeypatch.setenv("AIRFLOW_CONN_LOGIN_NODE", server.connection)
    key = job_key("a:d/r/ssh", 1)
    try:
        with closing(open_launcher("slurm", f"127.0.0.1:{server.port}", "login_node")) as launcher:
            launcher.root = str(tmp_path / "jobs")
            place = launcher.prepare(shell(key, "true"))
            assert (place.launcher, place.machine) == ("slurm", "slurm/test")
            launcher.start(shell(key, "echo $GPU_LEASE_GPUS; sleep 1", gpus=2))
            server.stop()
            with pytest.raises(LauncherUnreachableError, match="does not answer by ssh"):
                launcher.status(key)
            server.start()
            assert wait_until_ended(launcher, key).exit_code == 0
            assert launcher.logs(key).text.count(",") == 1
            launcher.stop(key)
    finally:
        server.stop()


QUEUE = (
    "8123\tPENDING\t(QOSMaxGRESPerUser)\t1795520736\tgpu\t/home/ann/.gpu-manager/slurm/k\tgpu-k-1a2b3c4d-1\n"
)
ACCOUNTS = (
    "71|CANCELLED by 1000|0:0|1795520736|gpu|/home/ann/j|gpu-k\n"
    "71.batch|CANCELLED|0:15|1795520736|||batch\n"
    "72|OUT_OF_MEMORY|0:125|Unknown|gpu|/home/a|b|gpu-k\n"
)
JOBS = {
    "untyped GPUs": "JobId=7 JobState=NODE_FAIL Reason=NodeDown Dependency=(null) Requeue=0 ExitCode=1:0 "
    "EndTime=1795520736 Partition=gpu NodeList=n1 TRES=cpu=2,mem=1000M,node=1,billing=2,gres/gpu=2 "
    "Nodes=n1 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0,3) MinCPUsNode=2",
    "typed GPUs": "JobId=7 JobState=NODE_FAIL Reason=NodeDown Dependency=(null) Requeue=0 ExitCode=1:0 "
    "EndTime=1795520736 Partition=gpu NodeList=n1 TRES=cpu=2,node=1,billing=2,gres/gpu:a100=2 "
    "JOB_GRES=gpu:a100:2 Nodes=n1 CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0,3) MinCPUsNode=2",
    "apart": "JobId=7 JobState=NODE_FAIL Reason=NodeDown Dependency=(null) Requeue=0 ExitCode=1:0 "
    "EndTime=1795520736 Partition=gpu NodeList=n1 ReqTRES=cpu=2,gres/gpu=2 "
    "AllocTRES=cpu=2,mem=1000M,node=1,billing=2,gres/gpu=2,gres/gpu:a100=2 "
    "JOB_GRES=gpu:a100:2 Nodes=n1 CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0,3) NtasksPerTRES:0",
}


@pytest.mark.parametrize("form", JOBS)
def test_a_jobs_end_and_devices_are_read_from_each_form(form):
    job = slurm_commands.parse_job(JOBS[form])
    assert (job["state"], job["exit"], job["ends_at"]) == ("NODE_FAIL", "1:0", "1795520736")
    assert slurm_commands.parse_devices(JOBS[form]) == [["n1", "0,3"]]
    assert slurm_commands.parse_gpus(JOBS[form]) == 2


def test_a_job_without_an_index_of_its_gpus_has_their_number():
    text = "JobState=RUNNING NodeList=n[1-2] AllocTRES=cpu=4,node=2,gres/gpu=8 GRES="
    assert (slurm_commands.parse_devices(text), slurm_commands.parse_gpus(text)) == ([["n[1-2]", ""]], 8)


def test_accounts_are_read_without_steps_and_with_what_a_state_adds():
    cancelled, memory = slurm_commands.parse_account(ACCOUNTS)
    assert slurm_commands.state_word(cancelled) == "CANCELLED"
    assert slurm_commands.exit_code_of(cancelled) is None
    assert slurm_commands.exit_code_of(memory) == 128 + 125
    assert slurm_commands.time_of(memory["ends_at"]) is None


def test_a_wait_is_told_in_words_and_in_slurms_own():
    [job] = slurm_commands.parse_queue(QUEUE)
    assert (job["id"], job["where"][-2:], job["name"][-2:]) == ("8123", "/k", "-1")
    waits = {
        "Priority": "others are before it (Priority)",
        "ReqNodeNotAvail, UnavailableNodes:n[1-2]": "a node that it needs is down or reserved "
        "(ReqNodeNotAvail, UnavailableNodes:n[1-2])",
        "launch failed requeued held": "launch failed requeued held",
        "": "Slurm has not looked at it yet",
    }
    for reason, words in waits.items():
        found = Said(
            id="1", state="PENDING", reason=reason, begins_at=None, partition="p", devices=[], gpus_granted=0
        )
        assert (found.wait, found.never) == (words, False)


def test_what_a_job_asks_for_becomes_options_of_sbatch():
    asked = BatchRequest(
        gpus=8,
        gpu_type="a100",
        nodes=2,
        cpus=2.5,
        memory_mib=1024,
        time_s=90,
        options={"account": "ai", "qos": ""},
    )
    assert arguments_of(asked) == [
        "--account=ai",
        "--cpus-per-task=3",
        "--gpus-per-node=a100:8",
        "--mem=1024M",
        "--time=2",
        "--signal=B:TERM@60",
    ]


def test_the_slurm_launcher_runs_no_images():
    with pytest.raises(
        LauncherError, match="the slurm launcher runs no images: start the container in command"
    ):
        open_launcher("slurm").prepare(Job("k", ("true",), image="python"))
