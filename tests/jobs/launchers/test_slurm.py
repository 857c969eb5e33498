"""Jobs on a real Slurm under faults and bad input, and texts of Slurm's versions."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import (
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    directory_launcher,
    job_key,
    open_at,
    slurm_commands,
    slurm_job,
    slurm_script,
)
from resource_manager.jobs.launchers.base import BatchRequest
from resource_manager.jobs.launchers.slurm import Said, arguments_of
from tests.e2e.servers import SSHServer
from tests.eventually import wait_for, wait_until_ended
from tests.small_disk import small_disk_at, take_all_files

on_slurm = [pytest.mark.e2e, pytest.mark.parametrize("launcher", ["slurm"], indirect=True)]
TORCHRUN = os.environ.get("TORCHRUN") or shutil.which("torchrun")
MPI = find_library("mpi") or next(map(str, Path("/usr/lib").glob("*/libmpi.so.*")), None)
ABOUT = {"task_id": "a:d/r/t", "conn_id": "", "labels": {"dag_id": "d"}, "owner": "ann", "team": "vision"}


def shell(key, command, **asked):
    about = {**ABOUT, "gpus": asked.get("gpus", 0), "nodes": asked.get("nodes", 1)}
    return Job(key, ("/bin/sh", "-c", command), batch=BatchRequest(about=about, **asked))


def said(launcher, key):
    return launcher.read_all({key: -1}).jobs[key].said


def stub(folder, name, text):
    """Put a program of that name before Slurm's own."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


class TestFaults:
    pytestmark = on_slurm

    def test_a_half_written_file_about_one_job_hides_no_other_and_it_can_be_removed(self, launcher, key):
        launcher.start(shell(key, "sleep 60"))
        launcher.start(shell(other := job_key(f"{key}/other", 1), "sleep 60"))
        (Path(launcher.root).expanduser() / other / "about").write_text("")  # its login node lost its power
        try:
            assert key in {record["key"] for record in launcher.read_all({}, since=0.0).records}
        finally:
            launcher.stop(other, 0.0)
        assert launcher.status(other).state is JobState.ABSENT

    def test_a_job_that_has_left_no_file_to_be_made_is_ended_and_collected(self, launcher, key, tmp_path):
        with small_disk_at(tmp_path / "small", "size=1m,nr_inodes=64") as small_disk:
            launcher.root = str(small_disk)
            launcher.start(shell(key, "echo begun; sleep 60"))
            wait_for(lambda: "begun" in launcher.logs(key).text)
            with pytest.raises(OSError, match="No space left"):
                take_all_files(small_disk)
            assert launcher.stop(key, 0.0)
            with pytest.raises(AlreadyEndedError):
                launcher.start(shell(key, "echo begun"))
            launcher.root = str(tmp_path)

    def test_a_job_of_the_user_whose_name_is_no_text_hides_no_other(self, launcher, key):
        submitted = subprocess.run(
            [b"sbatch", b"--parsable", b"--hold", b"--job-name=caf\xe9", b"--wrap=true"],
            check=True,
            capture_output=True,
            cwd="/tmp",
        )
        try:
            launcher.start(shell(key, "sleep 60"))
            assert said(launcher, key) is not None
        finally:
            subprocess.run(["scancel", submitted.stdout.strip()], check=True)

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

    def test_a_job_whose_folder_was_removed_runs_once(self, launcher, key, slurm):
        launcher.start(shell(key, "sleep 60"))
        wait_for(lambda: said(launcher, key).state == "RUNNING")
        shutil.rmtree(Path(launcher.root).expanduser() / key)
        assert launcher.status(key).state is JobState.RUNNING
        slurm.ask(f"scancel -n {key}")
        assert wait_until_ended(launcher, key).state is JobState.FINISHED
        wait_for(lambda: key not in slurm.ask("squeue -h -o %j"), 60.0)
        assert launcher.start(shell(key, "sleep 60")) is False
        assert launcher.stop(key, 0.0) is False

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

    def test_a_job_that_its_owner_has_requeued_ends_as_its_last_run(self, launcher, key, slurm, tmp_path):
        launcher.start(shell(key, f"echo begun; [ -e {tmp_path}/again ] || sleep 60"))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        number = said(launcher, key).id
        (tmp_path / "again").touch()
        slurm.ask(f"scontrol update job={number} Requeue=1")
        slurm.ask(f"scontrol requeue {number}")
        wait_for(lambda: said(launcher, key).state == "PENDING", 60.0)
        # Slurm gives it two minutes: at once, it may take the end of the first run for that of the next.
        wait_for((tmp_path / key / "exit_code").exists)
        slurm.ask(f"scontrol update job={number} StartTime=now+2")
        assert wait_until_ended(launcher, key) == JobStatus(JobState.FINISHED, 0)

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
        launcher.start(shell(key, "echo begun; sleep 12; echo end"))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        slurm.kill_controller()
        with pytest.raises(LauncherUnreachableError, match=r"cannot be seen on .*Unable to contact slurm"):
            launcher.status(key)
        with pytest.raises(LauncherUnreachableError, match="Unable to contact slurm"):
            launcher.start(shell(f"{key}0", "true"))
        slurm.start_controller()
        wait_for(lambda: slurm.ask("scontrol ping", check=False).count("UP"), 60.0)
        assert wait_until_ended(launcher, key) == JobStatus(JobState.FINISHED, 0)
        assert launcher.logs(key).text == "begun\nend\n"
        launcher.stop(f"{key}0")

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_a_node_that_fails_ends_its_job_as_such(self, launcher, key, slurm, nodes):
        """Of two nodes it is the second one, whose member srun waits for."""
        launcher.start(shell(key, "echo begun; sleep 900", gpus=1, nodes=nodes))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        node = slurm.ask(f"scontrol show hostnames $(squeue -h -n {key} -o %N)").split()[-1]
        slurm.kill(node)
        try:
            wait_for(lambda: launcher.status(key).state is JobState.FINISHED, 90.0)
        finally:
            slurm.start_node(node)
        assert (said(launcher, key).state, said(launcher, key).end) == (
            "NODE_FAIL",
            "a node of the job failed",
        )
        assert launcher.status(key).exit_code != 0

    def test_a_preempted_job_is_told_from_one_that_failed(self, launcher, key, slurm):
        launcher.start(shell(key, "echo begun; sleep 60", nodes=4, gpus=4))
        wait_for(lambda: "begun" in launcher.logs(key).text)
        slurm.ask("sbatch -p urgent -N4 --gpus-per-node=4 -o /dev/null --wrap 'sleep 1'")
        wait_for(lambda: launcher.status(key).state is JobState.FINISHED, 60.0)
        assert said(launcher, key).end == "Slurm preempted the job"

    def test_a_job_whose_nodes_slurm_still_cleans_up_is_over(self, launcher, key, tmp_path, monkeypatch):
        """An epilog may take minutes, and the task's next try does not wait for it."""
        real, later = shutil.which("squeue"), shell(f"{key[:-1]}2", "true")
        cleans_up = f'{real} "$@" --states=all | sed s/COMPLETED/COMPLETING/'
        launcher.start(shell(key, "true"))
        wait_until_ended(launcher, key)
        with monkeypatch.context() as patched:
            patched.setenv("PATH", stub(tmp_path / "bin", "squeue", cleans_up))
            launcher.prepare(later)
            launcher.stop(key)
            launcher.prepare(later)
        launcher.stop(later.key)

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
            patched.setattr(directory_launcher, "ANSWER_TIMEOUT_S", 1.0)
            with pytest.raises(LauncherUnreachableError, match="gave no answer within 1 s"):
                launcher.status(key)
        assert wait_until_ended(launcher, key).exit_code == 0


class TestSignals:
    pytestmark = on_slurm

    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("by", ["us", "somebody", "time"])
    def test_the_command_gets_one_sigterm_whoever_ends_it(self, launcher, key, slurm, nodes, by):
        """A second one may interrupt the checkpoint: only at the very end of its time Slurm sends another."""
        out = Path(launcher.root, "out")
        trap = f"trap 'echo told >> {out}; sleep 2; echo saved >> {out}; exit 3' TERM; echo ready >> {out}"
        limits = {"time_s": 60, "grace_s": 30} if by == "time" else {}
        launcher.start(shell(key, f"{trap}; while :; do sleep 0.1; done", nodes=nodes, **limits))
        wait_for(lambda: out.exists() and out.read_text().count("ready") == nodes)
        if by == "us":
            launcher.terminate(key, 20.0)
        elif by == "somebody":
            slurm.ask(f"scancel {said(launcher, key).id}")
        ended = wait_until_ended(launcher, key, 120.0)
        assert (out.read_text().count("told"), out.read_text().count("saved")) == (nodes, nodes)
        assert ended.exit_code == 3

    @pytest.mark.parametrize("signal", ["TERM", "USR1"])
    def test_a_member_that_ends_in_its_grace_takes_none_from_the_others(self, launcher, key, signal):
        out = Path(launcher.root, "out")
        trap = f"[ $GPU_NODE_RANK = 0 ] || {{ echo told >> {out}; sleep 4; echo saved >> {out}; }}; exit 3"
        command = f"trap '{trap}' TERM USR1; echo ready >> {out}; while :; do sleep 0.1; done"
        launcher.start(shell(key, command, nodes=2))
        wait_for(lambda: out.exists() and out.read_text().count("ready") == 2)
        ended = launcher.preempt(key, 20.0, signal, 20.0)
        assert out.read_text().splitlines()[2:] == ["told", "saved"]
        assert ended.exit_code == 3


class AsUser:
    """Login node on this machine for another user than root, whose home nobody can write."""

    host = "here"

    def __init__(self, user):
        self.user = pwd.getpwnam(user)

    def run(self, program, timeout_s, library=""):
        home = {"HOME": self.user.pw_dir, "USER": self.user.pw_name, "LOGNAME": self.user.pw_name}
        done = subprocess.run(
            ["python3", "-I", "-S", "-"],
            input=f"{library}\n{program}",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **home},
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            extra_groups=[],
            cwd="/",
        )
        return done.returncode, done.stdout, done.stderr


class TestOtherUser:
    pytestmark = on_slurm

    @pytest.fixture
    def theirs(self, launcher):
        """Return a launcher of user `nobody` beside that of root."""
        theirs: Any = open_at(JobPlace("slurm"))
        theirs._server = AsUser("nobody")
        with tempfile.TemporaryDirectory() as root:
            os.chown(root, theirs._server.user.pw_uid, theirs._server.user.pw_gid)
            theirs.root = root
            yield theirs

    def test_a_job_runs_as_the_user_of_the_connection(self, theirs, key, slurm):
        theirs.start(shell(key, "id -un; echo $GPU_LEASE_GPUS; sleep 1", gpus=2))
        assert slurm.ask(f"squeue -h -n {key} -o %u") == "nobody\n"
        assert wait_until_ended(theirs, key) == JobStatus(JobState.FINISHED, 0)
        assert theirs.logs(key).text == "nobody\n0,1\n"
        theirs.stop(key)

    def test_the_same_name_of_another_user_is_no_matter(self, launcher, theirs, key):
        launcher.start(shell(key, "echo ours; sleep 3"))
        theirs.start(shell(key, "echo theirs; sleep 3"))
        assert wait_until_ended(launcher, key).exit_code == wait_until_ended(theirs, key).exit_code == 0
        assert (launcher.logs(key).text, theirs.logs(key).text) == ("ours\n", "theirs\n")
        theirs.stop(key)

    def test_root_holds_a_job_and_it_waits(self, theirs, key, slurm):
        blocker = slurm.ask("sbatch --parsable -N4 --gpus-per-node=4 -o /dev/null --wrap 'sleep 60'").strip()
        theirs.start(shell(key, "true", nodes=4, gpus=4))
        slurm.ask(f"scontrol hold jobname={key}")
        slurm.ask(f"scancel {blocker}")
        wait_for(lambda: said(theirs, key).reason == "JobHeldAdmin")
        assert (said(theirs, key).never, said(theirs, key).wait) == (
            False,
            "an administrator holds it (JobHeldAdmin)",
        )
        slurm.ask(f"scontrol release jobname={key}")
        assert wait_until_ended(theirs, key, 60.0).exit_code == 0
        theirs.stop(key)


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

    def test_a_job_gets_no_secret_of_who_submits_it(self, launcher, key, monkeypatch):
        monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "secret")
        monkeypatch.setenv("GPU_MANAGER_TOKEN", "secret")
        launcher.start(shell(key, "env | grep -E 'AIRFLOW__|GPU_MANAGER_'"))
        assert wait_until_ended(launcher, key).exit_code == 1

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

    @pytest.mark.skipif(TORCHRUN is None, reason="needs torchrun, by PATH or TORCHRUN")
    def test_torchrun_needs_no_option(self, launcher, key, tmp_path):
        program = tmp_path / "sum.py"
        program.write_text(
            "import torch, torch.distributed as group\n"
            "group.init_process_group('gloo')\n"
            "total = torch.tensor([group.get_rank() + 1])\n"
            "group.all_reduce(total)\n"
            "print('sum', int(total), 'of', group.get_world_size(), flush=True)\n"
            "group.destroy_process_group()\n"
        )
        launcher.start(shell(key, f"{TORCHRUN} {program}", nodes=2, gpus=2, cpus=2))
        assert wait_until_ended(launcher, key, 180.0).exit_code == 0, launcher.logs(key).text
        assert launcher.logs(key).text.count("sum 10 of 4\n") == 2
        assert (Path(launcher.root, key) / "log.1").read_text().count("sum 10 of 4\n") == 2

    @pytest.mark.skipif(MPI is None, reason="needs OpenMPI (Debian: openmpi-bin)")
    def test_a_program_of_mpi_starts_without_mpirun(self, launcher, key):
        """As does one that imports mpi4py; in a step of Slurm it would look for PMI."""
        code = f"import ctypes; print(ctypes.CDLL('{MPI}', ctypes.RTLD_GLOBAL).MPI_Init(None, None))"
        launcher.start(shell(key, f'{sys.executable} -c "{code}"'))
        assert wait_until_ended(launcher, key, 60.0).exit_code == 0, launcher.logs(key).text
        assert launcher.logs(key).text == "0\n"

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
        found = launcher.read_all(dict.fromkeys(keys, 0), since=0.0)
        assert len(found.jobs) == 100
        assert count.read_text() == "\n"
        for each in keys[:12]:
            wait_until_ended(launcher, each)
        assert {launcher.logs(each).text for each in keys[:12]} == {"done\n"}
        assert {record["task_id"] for record in launcher.read_all({}, 0.0).records} == {ABOUT["task_id"]}
        for each in keys[:12]:
            launcher.stop(each)
        found = launcher.read_all({}, 0.0)
        assert found.cluster == "test"
        ended = [(record["state"], record["exit_code"], record["gpus"]) for record in found.records]
        assert ended == [("COMPLETED", 0, 4)] * 12
        assert launcher.current("a:d/r/t/0") == keys[0][:-1] + "2"


@pytest.mark.e2e
@pytest.mark.usefixtures("ssh_server")
def test_a_login_node_is_reached_by_ssh(slurm, tmp_path, monkeypatch):
    server = SSHServer(tmp_path, variables=slurm.environment)
    server.start()
    monkeypatch.setenv("AIRFLOW_CONN_LOGIN_NODE", server.connection)
    key = job_key("a:d/r/ssh", 1)
    try:
        launcher: Any = open_at(JobPlace("slurm", f"127.0.0.1:{server.port}", "login_node"))
        with closing(launcher):
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
            listener = psutil.Process(server.process.pid)
            node = [listener, *listener.children(recursive=True)]
            with monkeypatch.context() as patched:
                patched.setattr(directory_launcher, "ANSWER_TIMEOUT_S", 1.0)
                for each in node:
                    each.suspend()  # a login node that hangs
                with pytest.raises(LauncherUnreachableError, match="does not answer by ssh"):
                    launcher.status(key)
                for each in node:
                    each.resume()
            assert launcher.status(key).exit_code == 0
            launcher.stop(key)
    finally:
        server.stop()


@pytest.mark.parametrize("was_made", [True, False], ids=["its node died", "a full disk"])
def test_a_job_that_cannot_write_its_folder_fails(tmp_path, was_made):
    """Slurm would count it as one that has succeeded, and so would its task."""
    with small_disk_at(tmp_path / "small", "size=1m,nr_inodes=64") as small_disk:
        directory = small_disk / "k-1"
        directory.mkdir()
        slurm_script.write_program(str(small_disk), "k-1", ("true",), {}, {}, 0)
        if was_made:
            (directory / "begun").mkdir()
            (directory / "begun" / "job").touch()
        else:
            with pytest.raises(OSError, match="No space left"):
                take_all_files(small_disk)
        numbered = {**os.environ, "SLURM_JOB_ID": "7"}
        done = subprocess.run([directory / "script"], env=numbered, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, f"gpu-manager: {directory} cannot be written\n")


ANOTHER_S = "JobId=71 JobName=k-1 JobState=COMPLETED ExitCode=0:0 WorkDir=/theirs/k-1 StdErr=/dev/null"


@pytest.mark.parametrize("accounts", ["71|COMPLETED|0:0|1795520736|gpu|theirs", ""])
def test_the_end_of_another_job_that_got_the_same_number_is_not_the_job_s(tmp_path, monkeypatch, accounts):
    """A controller that begins with a clean state counts from the start again."""
    for name, text in (("squeue", ""), ("scontrol", f"echo '{ANOTHER_S}'"), ("sacct", f"echo '{accounts}'")):
        monkeypatch.setenv("PATH", stub(tmp_path / name, name, text))
    launcher: Any = open_at(JobPlace("slurm"))
    launcher.root = str(tmp_path / "jobs")
    (tmp_path / "jobs" / "k-1").mkdir(parents=True)
    (tmp_path / "jobs" / "k-1" / "submitted").write_text("71")
    assert launcher.status("k-1") == JobStatus(JobState.FINISHED, None)


@pytest.mark.parametrize("exit_code", ["0", ""])
def test_slurm_is_asked_once_for_a_job_that_has_ended(tmp_path, monkeypatch, exit_code):
    """Some hundred of them took longer than an answer may, at each look of each triggerer."""
    calls, sacct = tmp_path / "calls", "7|PREEMPTED|0:15|1795520736|gpu|k-1"
    controller = 'if [ $2 = config ]; then echo "ClusterName = c"; else echo Invalid job id >&2; exit 1; fi'
    for name, text in (("squeue", ""), ("scontrol", controller), ("sacct", f"echo '{sacct}'")):
        path = stub(tmp_path / name, name, f"echo {name} $2 >> {calls}\n{text}")
        monkeypatch.setenv("PATH", path)
    launcher: Any = open_at(JobPlace("slurm"))
    launcher.root = str(tmp_path / "jobs")
    directory = tmp_path / "jobs" / "k-1"
    directory.mkdir(parents=True)
    (directory / "submitted").write_text("7")
    (directory / "about").write_text(json.dumps({**ABOUT, "gpus": 1, "nodes": 1}))
    (directory / "record").touch()
    (directory / "exit_code").write_text(exit_code)
    [first] = launcher.read_all({}, since=0.0).records
    assert (first["state"], first["uncollected"]) == ("PREEMPTED", True)
    calls.write_text("")
    assert launcher.read_all({}, since=0.0).records == [first]
    assert "job" not in calls.read_text()
    assert "sacct" not in calls.read_text()
    os.utime(directory / "exit_code", (1.0, 1.0))  # somebody had it requeued
    [again] = launcher.read_all({}, since=0.0).records
    assert again["ended_at"] == 1.0
    assert set(os.listdir(directory)) == {"submitted", "about", "record", "exit_code"}
    launcher.stop("k-1")
    [collected] = launcher.read_all({}, since=0.0).records
    assert not collected.get("uncollected")


def test_an_end_that_no_accounts_told_is_asked_for_again_for_a_day(tmp_path, monkeypatch):
    """Else a job that Slurm preempted while they were away counted as failed, until that look at it."""
    end, accounts = tmp_path / "end", 'cat "$END" 2>/dev/null || { echo away >&2; exit 1; }'
    for name, text in (("squeue", ""), ("scontrol", "echo Invalid job id >&2; exit 1"), ("sacct", accounts)):
        monkeypatch.setenv("PATH", stub(tmp_path / name, name, text))
    monkeypatch.setenv("END", str(end))
    directory = tmp_path / "k-1"
    directory.mkdir()
    (directory / "submitted").write_text("7")
    (directory / "about").write_text(json.dumps(ABOUT))
    (directory / "record").touch()

    def seen(at):
        monkeypatch.setattr(slurm_job, "time", SimpleNamespace(time=lambda: at))
        record: Any = slurm_job._record(str(tmp_path), "k-1", ())
        return record["state"], record["ended_at"]

    assert seen(1000.0) == seen(2000.0) == ("", 1000.0)
    end.write_text("7|PREEMPTED|0:15|900|gpu|k-1")
    assert seen(3000.0) == ("PREEMPTED", 900.0)
    (directory / "record").write_text("")
    end.unlink()
    assert seen(1000.0) == ("", 1000.0)
    end.write_text("7|PREEMPTED|0:15|900|gpu|k-1")
    assert seen(1000.0 + slurm_job.UNKNOWN_S + 1.0) == ("", 1000.0), "it has none"


def test_slurm_is_asked_nothing_for_the_list_of_a_job_that_is_not_listed(tmp_path, monkeypatch):
    (tmp_path / "k-1").mkdir()
    (tmp_path / "k-1" / "submitted").write_text("7")
    (tmp_path / "k-1" / "about").write_text("{}")
    commands = []

    def run(command, *_):
        commands.append(command[0])
        return subprocess.CompletedProcess(command, 0, "ClusterName = c", "")

    monkeypatch.setattr(slurm_commands, "run", run)
    assert slurm_job.read_all(str(tmp_path), {}, since=0.0)["records"] == []
    assert commands == ["squeue", "scontrol"], "what runs, and the cluster's name"


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
    assert slurm_commands.place_of(JOBS[form]) == "n1 GPU 0,3"


def test_a_job_without_an_index_of_its_gpus_has_their_number():
    text = "JobState=RUNNING NodeList=n[1-2] AllocTRES=cpu=4,node=2,gres/gpu=8 GRES="
    assert slurm_commands.place_of(text) == "n[1-2], 8 GPUs"
    assert slurm_commands.place_of("JobState=RUNNING NodeList=n1 AllocTRES=cpu=4,node=1") == "n1"
    assert slurm_commands.place_of("JobState=PENDING NodeList=(null) GRES=") == ""


@pytest.mark.parametrize(
    ("line", "state", "exit_code", "ended_at"),
    [
        ("71|CANCELLED by 1000|0:0|1795520736|gpu", "CANCELLED", None, 1795520736.0),
        ("72|OUT_OF_MEMORY|0:125|Unknown|gpu", "OUT_OF_MEMORY", 128 + 125, None),
        ("73|COMPLETED|0:0|1795520736|a|b", "COMPLETED", 0, 1795520736.0),
        ("74|FAILED|2:0|None|gpu", "FAILED", 2, None),
    ],
)
def test_accounts_are_read_with_what_a_state_adds(line, state, exit_code, ended_at):
    [job] = slurm_commands.rows(line, "|", "id", "state", "exit", "ends_at", "partition")
    assert (slurm_commands.state_of(job), slurm_commands.exit_code_of(job)) == (state, exit_code)
    assert slurm_commands.time_of(job["ends_at"]) == ended_at


@pytest.mark.parametrize(
    ("state", "reason", "wait", "never"),
    [
        ("PENDING", "Priority", "others are before it (Priority)", False),
        (
            "PENDING",
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "a node that it needs is down or reserved (ReqNodeNotAvail, UnavailableNodes:n[1-2])",
            False,
        ),
        ("PENDING", "launch failed requeued held", "launch failed requeued held", False),
        ("PENDING", "None", "Slurm has not looked at it yet", False),
        ("PENDING", "InvalidQOS", "its QOS is not valid (InvalidQOS)", True),
        ("RUNNING", "None", "", False),
    ],
)
def test_a_wait_is_told_in_words_and_in_slurms_own(state, reason, wait, never):
    found = Said(**slurm_commands.described({"id": "1", "state": state, "reason": reason}, ""))
    assert (found.wait, found.never) == (wait, never)


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
        "--nodes=2",
        "--cpus-per-task=3",
        "--gpus-per-node=a100:8",
        "--mem=1024M",
        "--time=2",
        "--signal=TERM@60",
    ]


def test_the_slurm_launcher_runs_no_images():
    with pytest.raises(
        LauncherError, match="the slurm launcher runs no images: start the container in command"
    ):
        open_at(JobPlace("slurm")).prepare(Job("k", ("true",), image="python"))
