"""Contract of every launcher, with a real shell, a real sshd and a real Docker engine."""

import socket
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import job_states
from resource_manager.jobs.launchers import (
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    job_key,
    open_at,
)
from resource_manager.jobs.launchers.base import TAIL_BYTES
from tests.e2e.servers import SSHServer
from tests.eventually import wait_for, wait_until_ended
from tests.small_disk import small_disk_at

# Docker's SDK leaves its pools, and sockets to engines that do not answer, to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_a_job_runs_once_and_leaves_its_exit_code_and_log(launcher, job):
    started = job(
        "echo gpus $GPU_LEASE_GPUS $A; sleep 0.5; echo end; exit 7", gpu_ids=(4, 5), environment={"A": "b c"}
    )
    assert launcher.status(started.key) == JobStatus(JobState.ABSENT)
    assert launcher.logs(started.key)[:2] == ("", 0)
    assert launcher.start(started)
    assert not launcher.start(started)
    assert wait_until_ended(launcher, started.key) == JobStatus(JobState.FINISHED, 7)
    launcher.start(started)
    assert launcher.status(started.key) == JobStatus(JobState.FINISHED, 7)
    text, offset, *_ = launcher.logs(started.key)
    granted = "0,1" if type(launcher).__name__ == "SlurmLauncher" else "4,5"  # Slurm chooses itself
    assert text == f"gpus {granted} b c\nend\n"
    assert launcher.logs(started.key, offset)[:3] == ("", offset, JobStatus(JobState.FINISHED, 7))


def test_the_log_can_be_read_as_it_grows(launcher, job):
    started = job("for i in 1 2 3 4 5; do echo line $i; sleep 0.3; done")
    launcher.start(started)
    lines, offset = [], 0
    while launcher.status(started.key).state is not JobState.FINISHED:
        text, offset, *_ = launcher.logs(started.key, offset)
        lines += text.splitlines()
    lines += launcher.logs(started.key, offset)[0].splitlines()
    assert lines == [f"line {number}" for number in range(1, 6)]


def test_output_is_returned_unchanged(launcher, job):
    written = "10%\r20% \r30%\nform\ffeed\x1cs\n\x1b[1mé\u2028\x1b[0m\n" + "x" * 40_000 + "\n\nlast"
    started = job('printf %s "$WRITTEN"', environment={"WRITTEN": written})
    launcher.start(started)
    wait_until_ended(launcher, started.key)
    text, offset, following = "", 0, -1
    while offset != following:
        following = offset
        piece, offset, *_ = launcher.logs(started.key, offset)
        text += piece
    assert text == written


def test_long_output_is_returned_in_chunks(launcher, job):
    started = job("yes $(seq 1000) | head -n 3000")
    launcher.start(started)
    wait_until_ended(launcher, started.key)
    sizes, offset, following = [], 0, -1
    while offset != following:
        following = offset
        text, offset, *_ = launcher.logs(started.key, offset)
        sizes.append(len(text))
    assert sum(sizes) == 3000 * 3893
    assert max(sizes) < 5 * 1024**2


def test_a_part_of_the_output_says_whether_there_was_more(tmp_path):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "log").write_text("12345\n789")

    def part(offset, is_running):
        return job_states.log_from(str(tmp_path), "j", offset, is_running, size=8)

    assert part(0, False) == {"text": "12345\n", "offset": 6, "is_all": False}
    assert part(6, True) == {"text": "", "offset": 6, "is_all": True}, "half a line is for the next look"
    assert part(6, False) == {"text": "789", "offset": 9, "is_all": True}


def test_all_that_run_are_listed(launcher, job):
    made = job("sleep 60")
    over, prepared, runs = (replace(made, key=job_key(made.key, token)) for token in (1, 2, 3))
    launcher.start(replace(over, command=("/bin/sh", "-c", "exit 0")))
    wait_until_ended(launcher, over.key)
    launcher.prepare(prepared)
    launcher.start(runs)
    try:
        wait_for(lambda: over.key not in launcher.running())  # what wrote its end ends a moment later
        assert {runs.key, prepared.key, over.key} & set(launcher.running()) == {runs.key}
    finally:
        for each in (runs, prepared, over):
            launcher.stop(each.key, grace_s=0)
    assert runs.key not in launcher.running()


def test_stop_ends_and_removes_a_job_and_may_be_repeated(launcher, job):
    started = job("trap '' TERM; while :; do sleep 0.1; done")
    launcher.start(started)
    assert launcher.status(started.key).state is JobState.RUNNING
    assert launcher.stop(started.key, grace_s=1), "it ran until then"
    assert launcher.status(started.key) == JobStatus(JobState.ABSENT)
    assert not launcher.stop(started.key)


def test_a_prepared_job_is_absent_until_it_is_started(launcher, job):
    wanted = job("echo begun")
    launcher.prepare(wanted)
    launcher.prepare(wanted)
    assert launcher.status(wanted.key) == JobStatus(JobState.ABSENT)
    launcher.start(wanted)
    assert wait_until_ended(launcher, wanted.key) == JobStatus(JobState.FINISHED, 0)
    assert launcher.logs(wanted.key)[0] == "begun\n"


def test_a_job_is_not_prepared_where_its_port_is_taken(launcher, job):
    if type(launcher).__name__ == "SlurmLauncher":
        pytest.skip("nodes are chosen after the job was submitted")
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LauncherError, match=f"port {port} cannot be bound: Address already in use"):
            launcher.prepare(job("true", port=port))
    launcher.prepare(job("true", port=port))


def test_a_job_is_not_prepared_beside_one_of_an_earlier_lease(launcher, job):
    made = job("sleep 60")

    def of(token, rank):
        return replace(made, key=job_key(made.key, token, rank, 2), labels={"lease": str(token)})

    earlier, next_rank, later = of(1, 0), of(1, 1), of(2, 0)
    try:
        launcher.start(earlier)
        launcher.prepare(next_rank)
        with pytest.raises(LauncherError, match=f"job {earlier.key} of an earlier lease .* still runs on "):
            launcher.prepare(later)
        launcher.terminate(earlier.key, grace_s=1)
        launcher.prepare(later)
    finally:
        for each in (earlier, next_rank, later):
            launcher.stop(each.key, grace_s=0)


def test_a_job_finds_its_files(launcher, job):
    started = job("cat $GPU_HOSTFILE", files={"GPU_HOSTFILE": "10.0.0.1 slots=2\né\n"})
    launcher.start(started)
    wait_until_ended(launcher, started.key)
    assert launcher.logs(started.key)[0] == "10.0.0.1 slots=2\né\n"


def test_a_terminated_job_keeps_its_end_and_the_last_of_its_output(launcher, job):
    began = time.time()
    started = job("echo first; yes $(seq 100) | head -n 300; echo last; exec sleep 60")
    assert launcher.tail(started.key) == ""
    launcher.terminate(started.key)
    launcher.start(started)
    wait_for(lambda: "last" in launcher.tail(started.key))
    launcher.terminate(started.key, grace_s=5)
    ended = launcher.status(started.key)
    assert ended == JobStatus(JobState.FINISHED, 143)
    assert began - 5 < ended.ended_at < time.time() + 5
    text = launcher.tail(started.key)
    assert "\nlast\n" in text
    assert len(text) <= TAIL_BYTES
    launcher.start(started)
    assert launcher.status(started.key).state is JobState.FINISHED


def test_concurrent_starts_start_one_job(launcher, job):
    started = job("echo started; sleep 2")
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: launcher.start(started), range(6)))
    wait_until_ended(launcher, started.key)
    assert launcher.logs(started.key)[0] == "started\n"


def test_concurrent_stops_succeed(launcher, job):
    started = job("trap '' TERM; sleep 60")
    launcher.start(started)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: launcher.stop(started.key, grace_s=1), range(4)))
    assert launcher.status(started.key) == JobStatus(JobState.ABSENT)


@pytest.mark.parametrize("launcher", ["local", pytest.param("ssh", marks=pytest.mark.e2e)], indirect=True)
def test_a_job_of_unknown_state_is_reported_unreachable(launcher, tmp_path):
    (tmp_path / "j" / "lock").mkdir(parents=True)
    for look in (launcher.status, launcher.logs):
        with pytest.raises(LauncherUnreachableError, match="Is a directory"):
            look("j")


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
@pytest.mark.parametrize(
    ("container", "reason"),
    [
        ({"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        ({"mem_limit": "many"}, "value for memory"),
        ({"network_mode": "no-such-network"}, "network no-such-network not found"),
    ],
)
def test_a_wrong_container_option_is_named(launcher, job, container, reason):
    with pytest.raises(LauncherError, match=f"could not be started on .*{reason}"):
        launcher.start(job("true", container=container))


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
def test_a_log_that_the_engine_cannot_read_is_reported_unreachable(launcher, job):
    started = job("echo", container={"log_config": {"Type": "none"}})
    launcher.start(started)
    with pytest.raises(LauncherUnreachableError, match="does not support reading"):
        launcher.logs(started.key)


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
@pytest.mark.parametrize("options", [{"auto_remove": True}, {"restart_policy": {"Name": "always"}}])
def test_a_container_that_was_to_remove_or_restart_itself_runs_once(launcher, job, options):
    started = job("exit 3", container=options)
    launcher.start(started)
    wait_for(lambda: launcher.status(started.key) == JobStatus(JobState.FINISHED, 3))
    assert not launcher.start(started)


@pytest.mark.e2e
@pytest.mark.usefixtures("ssh_server")
def test_output_of_a_login_script_is_not_part_of_the_answer(tmp_path, monkeypatch):
    server = SSHServer(tmp_path)
    with (tmp_path / "config").open("a") as config:
        config.write("ForceCommand printf 'wel\\377come\\nto'; eval \"$SSH_ORIGINAL_COMMAND\"\n")
    server.start()
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SSH", server.connection)
    launcher: Any = open_at(JobPlace("ssh", f"127.0.0.1:{server.port}", "test_ssh"))
    launcher.root = str(tmp_path)
    try:
        assert launcher.status("j") == JobStatus(JobState.ABSENT)
    finally:
        launcher.close()
        server.stop()


@pytest.mark.e2e
def test_a_job_outlives_an_unreachable_server(ssh_server, tmp_path, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SSH", ssh_server.connection)
    launcher: Any = open_at(JobPlace("ssh", f"127.0.0.1:{ssh_server.port}", "test_ssh"))
    launcher.root = str(tmp_path)
    started = Job("outlives", ("/bin/sh", "-c", "sleep 3; echo end"))
    launcher.start(started)
    ssh_server.stop()
    with pytest.raises(LauncherUnreachableError, match="does not answer by ssh"):
        launcher.status("outlives")
    ssh_server.start()
    assert wait_until_ended(launcher, "outlives").exit_code == 0
    launcher.stop("outlives")
    launcher.close()


def test_missing_parts_are_reported_in_one_line(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LauncherError, match="the ssh launcher has no address: set the server's"):
            open_at(JobPlace("ssh"))
        with pytest.raises(LauncherError, match=r"ssh connection 'nope'.*defined"):
            open_at(JobPlace("ssh", "host", "nope"))
        with pytest.raises(LauncherUnreachableError, match=r"tcp://127\.0\.0\.1:1 does not answer"):
            open_at(JobPlace("docker", "tcp://127.0.0.1:1"))
        monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2")
        for here in ("", "127.0.0.1", "localhost"):
            with pytest.raises(LauncherUnreachableError, match=r"tcp://127\.0\.0\.1:2 does not answer"):
                open_at(JobPlace("docker", here))
        monkeypatch.setitem(sys.modules, "airflow.providers.docker.hooks.docker", None)
        monkeypatch.setitem(sys.modules, "airflow.providers.ssh.hooks.ssh", None)
        for name, extra in (("ssh", "airflow-ssh"), ("docker", "docker")):
            with pytest.raises(LauncherError, match=rf"pip install '\S+\.whl\[{extra}\]'"):
                open_at(JobPlace(name, "host"))


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
def test_a_container_that_cannot_start_reports_why_and_is_removed(launcher, job):
    with pytest.raises(LauncherError, match=r"image 'no.invalid/x:1' is not on .* and cannot be pulled"):
        launcher.start(job("true", image="no.invalid/x:1"))
    wanted = job("true", gpu_ids=(0, 1), container={})
    with suppress(LauncherError):  # raised by an engine without NVIDIA's runtime
        launcher.start(wanted)
    launcher.stop(wanted.key)
    assert launcher.status(wanted.key) == JobStatus(JobState.ABSENT)


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
@pytest.mark.parametrize(
    ("uuids", "asked"),
    [
        (("GPU-8f6a2c1e-0000-4000-8000-000000000004", "GPU-8f6a2c1e-0000-4000-8000-000000000005"), None),
        (("MIG-8f6a2c1e-0000-4000-8000-000000000004",), None),
        ((), ["4", "5"]),
    ],
)
def test_the_engine_is_asked_for_the_leases_devices_and_no_others(launcher, job, uuids, asked):
    """As by `docker run --gpus device=UUID,UUID`; no engine has these devices, so none starts it."""
    wanted = job("true", gpu_ids=(4, 5)[: len(uuids) or 2], gpu_uuids=uuids, container={})
    with pytest.raises(LauncherError, match=f"job {wanted.key} could not be started on .*: "):
        launcher.start(wanted)
    made = launcher._engine.api.inspect_container(wanted.key)
    [request] = made["HostConfig"]["DeviceRequests"]
    assert request["DeviceIDs"] == (asked or list(uuids))
    assert (request["Driver"], request["Count"], request["Capabilities"]) == ("", 0, [["gpu"]])
    assert not made["HostConfig"]["Devices"]
    assert not made["HostConfig"]["Privileged"]
    assert f"GPU_LEASE_UUIDS={','.join(uuids)}" in made["Config"]["Env"] or not uuids


@pytest.mark.parametrize("signal_name", ["TERM", "USR2"])
def test_a_preempted_job_is_told_once_by_signal_and_file(launcher, job, signal_name):
    started = job(
        f"trap 'echo told; [ -e $GPU_PREEMPT_FILE ] && sleep 0.5 && exit 3' {signal_name}; echo ready; "
        "while :; do sleep 0.1; done"
    )
    launcher.start(started)
    wait_for(lambda: "ready" in launcher.logs(started.key)[0])
    told = launcher.preempt(started.key, 60.0, signal_name)
    assert (told.state, told.preempted) == (JobState.RUNNING, True)
    ended = launcher.preempt(started.key, 60.0, signal_name, wait_s=50.0)
    assert (ended.state, ended.exit_code, ended.preempted) == (JobState.FINISHED, 3, True)
    assert launcher.status(started.key).preempted
    assert launcher.logs(started.key)[0].count("told") == 1


def test_a_preempted_job_that_does_not_end_is_killed_when_its_grace_is_over(launcher, job):
    started = job("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    launcher.start(started)
    wait_for(lambda: "ready" in launcher.logs(started.key)[0])
    began = time.monotonic()
    assert launcher.preempt(started.key, 1.0).state is JobState.RUNNING
    ended = launcher.preempt(started.key, 60.0, wait_s=50.0)  # the grace is that of the first call
    assert (ended.state, ended.preempted) == (JobState.FINISHED, True)
    assert ended.exit_code != 0
    assert 0.9 < time.monotonic() - began < 30.0


@pytest.mark.parametrize("launcher", [pytest.param("docker", marks=pytest.mark.e2e)], indirect=True)
def test_a_preempted_container_on_a_full_disk_is_told_once_and_killed_when_its_grace_is_over(
    launcher, job, tmp_path
):
    with small_disk_at(tmp_path / "small", "size=1m") as small_disk:
        started = job(
            "trap 'echo told; [ -e $GPU_PREEMPT_FILE ] && echo a file' TERM; echo ready; "
            "while :; do sleep 0.1; done",
            container={"device_requests": [], "binds": [f"{small_disk}:/var/lib/gpu-manager:rw"]},
        )
        launcher.start(started)
        wait_for(lambda: "ready" in launcher.logs(started.key).text)
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "filler").write_bytes(b"x" * 2**21)
        began = time.monotonic()
        for _ in range(2):
            told = launcher.preempt(started.key, 3.0)
            assert (told.state, told.preempted) == (JobState.RUNNING, True)
        ended = launcher.preempt(started.key, 60.0, wait_s=50.0)
        assert (ended.state, ended.preempted) == (JobState.FINISHED, True)
        assert 2.9 < time.monotonic() - began < 30.0
        assert launcher.logs(started.key).text == "ready\ntold\na file\n"
        launcher.stop(started.key, grace_s=0)
