"""GPUs by hand, in a real terminal (pexpect), here and over a real sshd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

from resource_manager import GPUResourceManager
from resource_manager.manager.answer_words import name_in_words
from tests.builders import present
from tests.cli.programs import GPU_MANAGER, begun, environment_of, manager_of, piped
from tests.e2e.gang_servers import GangServer, GangServers
from tests.e2e.servers import SSHD, SSHServer, ssh_server
from tests.eventually import wait_for
from tests.faults.namespaces import what_is_missing
from tests.redis_server import RedisServer

__all__ = ["ssh_server"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(params=["here", "ssh"])
def environment(
    request: pytest.FixtureRequest, embedded_redis: RedisServer, tmp_path: Path
) -> dict[str, str]:
    """Environment of the commands, for a server that is this machine or one that ssh reaches."""
    ssh = request.getfixturevalue("ssh_server") if request.param == "ssh" else None
    return environment_of(tmp_path, embedded_redis.fresh_url(), ssh)


@pytest.fixture
def manager(environment: dict[str, str]) -> Iterator[GPUResourceManager]:
    with manager_of(environment) as manager:
        yield manager
        assert manager.leases() == []
        assert manager.queue() == []


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Callable[..., pexpect.spawn]]:
    """Return a function that calls a command in a terminal of its own."""
    opened: list[pexpect.spawn] = []

    def call(*arguments: str) -> pexpect.spawn:
        command, *rest = [*GPU_MANAGER, *arguments]
        opened.append(
            pexpect.spawn(command, rest, env=environment, timeout=60, encoding="utf-8", dimensions=(33, 101))
        )
        return opened[-1]

    yield call
    for each in opened:
        each.close(force=True)


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_exit_code_and_the_output_are_the_command_s_own(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    script = "echo of $GPU_SERVER: $CUDA_VISIBLE_DEVICES; echo no >&2; exit 7"
    done = piped(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (7, "of s: 0\n")
    assert "no\n" in done.stderr
    assert re.search(r"^gpu-manager: \S+@\S+ \w+: GPU 0 and 1 CPU of s, ", done.stderr, re.M)
    [released] = [change for change in manager.history() if change["change"] == "released"]
    assert (released["outcome"], released["reason"]) == ("FAILED", "exit code 7")


def test_arguments_arrive_as_they_are(environment: dict[str, str], manager: GPUResourceManager) -> None:
    odd = ["a b", "$HOME", "'", '"', "`id`", "ünï", "--json", "\\n", ""]
    done = piped(environment, "run", "--gpus", "1", "--", "printf", "<%s>", *odd)
    assert done.stdout == "".join(f"<{each}>" for each in odd)
    done = piped(environment, "run", "--gpus", "1", "echo", "--gpus", "3")
    assert done.stdout == "--gpus 3\n", "what follows the program is its own, without -- too"


def test_a_command_has_the_terminal_and_its_size(
    terminal: Callable[..., pexpect.spawn], manager: GPUResourceManager
) -> None:
    child = terminal("run", "--gpus", "1", "--", "sh", "-c", "stty size; read line; echo said $line")
    child.expect(r"33 101\r\n")
    child.setwinsize(40, 90)
    child.sendline("yes")
    child.expect("said yes")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c_reaches_the_command(
    terminal: Callable[..., pexpect.spawn], manager: GPUResourceManager
) -> None:
    child = terminal(
        "run", "--gpus", "1", "--", "sh", "-c", "trap 'exit 42' INT; echo ready; sleep 100 & wait"
    )
    child.expect("ready")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 42


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_frees_the_gpu_at_once(
    number: signal.Signals, terminal: Callable[..., pexpect.spawn], manager: GPUResourceManager
) -> None:
    child = terminal("run", "--gpus", "1", "--", "sh", "-c", "echo ready $$; sleep 1000")
    child.expect(r"ready (\d+)")
    job = int(child.match[1])
    child.kill(number)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 128 + number
    assert not runs(job)
    assert manager.leases() == []


def test_a_closed_terminal_ends_the_command_and_frees_the_gpu(
    terminal: Callable[..., pexpect.spawn], manager: GPUResourceManager
) -> None:
    child = terminal("run", "--gpus", "1", "--", "sh", "-c", "echo ready $$; sleep 1000")
    child.expect(r"ready (\d+)")
    job = int(child.match[1])
    child.ptyproc.fileobj.close()
    wait_for(lambda: not manager.leases() and not runs(job), 30)


def test_a_killed_program_leaves_no_command_and_its_lease_ends_once_that_is_known(
    terminal: Callable[..., pexpect.spawn], environment: dict[str, str], manager: GPUResourceManager
) -> None:
    child = terminal("run", "--gpus", "1", "--", "sh", "-c", "echo ready $$; trap '' HUP; sleep 1000")
    child.expect(r"ready (\d+)")
    job = int(child.match[1])
    child.kill(signal.SIGKILL)
    wait_for(lambda: not runs(job), 30)
    (lease,) = manager.leases()
    assert present(lease["expires_at"]) - time.time() <= 60
    stopped = piped(environment, "stop", lease["task_id"])
    assert (stopped.returncode, stopped.stdout) == (
        0,
        f"{name_in_words(lease)}: released, its job was over already\n",
    )


def test_processes_left_behind_end_with_the_command(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    done = piped(environment, "run", "--gpus", "1", "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
    assert done.returncode == 0
    assert not runs(int(done.stdout))


def test_the_time_is_the_end_with_a_warning_before(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    done = piped(environment, "run", "--gpus", "1", "--time", "3s", "--", "sleep", "1000")
    assert done.returncode == 124
    assert "left of the 3 s" in done.stderr
    assert "its time is over" in done.stderr


def test_ten_commands_wait_for_their_turn(environment: dict[str, str], manager: GPUResourceManager) -> None:
    """Two at a time fit; each waits in one line that says why, and all end well."""
    command = [*GPU_MANAGER, "run", "--gpus", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; sleep 0.5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    jobs = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(10)]  # type: ignore[call-overload]
    said = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 10
    assert {output for output, _ in said} == {"0\n", "1\n"}
    assert sum("waits at position" in problems for _, problems in said) >= 6


def test_a_wait_that_is_interrupted_leaves_the_queue(
    environment: dict[str, str], terminal: Callable[..., pexpect.spawn], manager: GPUResourceManager
) -> None:
    manager.submit("all", 2)
    child = terminal("run", "--gpus", "1", "--", "true")
    child.expect("waits at position 1: .*\n")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert manager.queue() == []
    manager.release_resources("all")


def test_a_released_lease_ends_its_command(
    terminal: Callable[..., pexpect.spawn], environment: dict[str, str], manager: GPUResourceManager
) -> None:
    child = terminal("run", "--gpus", "1", "--", "sh", "-c", "echo ready $$; sleep 1000")
    child.expect(r"ready (\d+)")
    job = int(child.match[1])
    (lease,) = manager.leases()
    stopped = piped(environment, "stop", lease["task_id"])
    assert stopped.returncode == 0
    assert re.fullmatch(r"\S+@\S+ \w+: (released|gone before), its job was stopped\n", stopped.stdout)
    assert not runs(job)
    child.expect("stopped by SIG(TERM|KILL) from elsewhere, as gpu-manager stop does|the lease .* was ended")
    child.expect(pexpect.EOF)


def test_a_shell_and_one_beside_it(
    terminal: Callable[..., pexpect.spawn], environment: dict[str, str], manager: GPUResourceManager
) -> None:
    child = terminal("shell", "--gpus", "2")
    child.expect("GPUs 0,1")
    child.sendline("echo mine=$CUDA_VISIBLE_DEVICES.")
    child.expect(r"mine=0,1\.")
    (lease,) = manager.leases()
    beside = piped(environment, "attach", lease["task_id"], "--", "sh", "-c", "echo $GPU_LEASE_GPUS; exit 3")
    assert (beside.returncode, beside.stdout) == (3, "0,1\n")
    child.sendline("exit 5")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 5


def test_gpus_are_held_for_a_time_without_a_job(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    done = piped(environment, "hold", "--for", "2 hours", "--server", "s")
    assert done.returncode == 0, done.stderr
    (lease,) = manager.leases()
    assert done.stdout.startswith(f"{name_in_words(lease)}: ")
    assert 7100 < present(lease["expires_at"]) - time.time() <= 7200
    assert manager.release_resources(lease["task_id"])


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["run", "--gpus", "3", "--", "true"], 2, "gpus"),
        (["run", "--gpus", "1"], 2, "COMMAND"),
        (["run", "--expected-runtime", "2h", "--", "true"], 2, "--expected-runtime: did you mean --time?"),
        (["run", "--gpu-tpe", "A100", "true"], 2, "no such option --gpu-tpe: did you mean --gpu-type?"),
        (["run", "--gpu", "1", "true"], 2, "no such option --gpu: did you mean --gpus?"),
        (["run", "--gpus", "1", "-xyz", "true"], 2, "the command comes after all options"),
        (
            ["submit", "a", "--gpus", "1", "--time", "2h"],
            2,
            "No such option --time: did you mean --expected-runtime?",
        ),
        (["hold", "--time", "2h"], 2, "No such option --time: did you mean --for?"),
        (
            ["run", "--gpus", "1", "--time", "soon", "--", "true"],
            2,
            "a duration must be seconds or a text such as 45s, 10min, 12h, 3d, got 'soon'",
        ),
        (["run", "--gpus", "1", "--", "no-such-program-here"], 127, "no-such-program-here"),
        (["hold"], 2, "--for"),
        (["attach", "nobody", "--gpus", "1"], 2, "No such option '--gpus'"),
        (["attach", "nobody"], 1, "no lease or pending request is called 'nobody'"),
        (["stop", "nobody"], 1, "no lease or pending request is called 'nobody'"),
        (["logs", "nobody"], 1, "no lease or pending request is called 'nobody'"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], code: int, line: str, environment: dict[str, str], manager: GPUResourceManager
) -> None:
    done = piped(environment, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    (said,) = [each for each in done.stderr.splitlines() if ": GPU " not in each]
    assert line in said


# ---- what its lease, its server and its own program can do to it ----


def test_a_job_ends_when_its_program_has_given_no_sign_for_a_minute(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    process = begun(environment, "run", "--gpus", "1", "--", "sh", "-c", "echo ready $$; exec sleep 1000")
    assert process.stdout is not None
    job = int(process.stdout.readline().split()[1])
    process.send_signal(signal.SIGSTOP)
    time.sleep(50)
    assert runs(job)
    wait_for(lambda: not runs(job), 40)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_a_shell_beside_a_job_ends_when_the_lease_is_preempted(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    job = begun(environment, "run", "--gpus", "2", "--", "sh", "-c", "echo ready; exec sleep 1000")
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    [lease] = manager.leases()
    beside = begun(environment, "attach", lease["task_id"], "--", "sh", "-c", "echo ready; exec sleep 1000")
    assert beside.stdout is not None
    assert beside.stdout.readline() == "ready\n"
    manager.submit("urgent", 2)
    manager.preempt(lease["task_id"])
    _, said = beside.communicate(timeout=30)
    assert beside.returncode in (75, 143)  # told of the preemption, or that the lease has ended
    assert "preempted for urgent" in said or "was ended" in said
    job.communicate(timeout=30)
    assert job.returncode == 75
    assert manager.release_resources("urgent")


@pytest.mark.parametrize("environment", ["ssh"], indirect=True)
def test_all_of_a_command_shares_one_log_in(
    environment: dict[str, str], manager: GPUResourceManager, ssh_server: SSHServer
) -> None:
    """So a password, or a second factor, is asked for once."""
    log = ssh_server.home / "log"
    before = log.read_text().count("Accepted publickey")
    done = piped(environment, "run", "--gpus", "1", "--", "sleep", "17")  # with a sign in it
    assert done.returncode == 0, done.stderr
    assert log.read_text().count("Accepted publickey") - before == 1


@pytest.mark.parametrize("environment", ["ssh"], indirect=True)
def test_a_server_whose_key_is_refused_frees_the_gpus_at_once_and_says_why(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path
) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("StrictHostKeyChecking=no", "StrictHostKeyChecking=yes"))
    done = piped(environment, "run", "--gpus", "1", "--", "true")
    assert (done.returncode, done.stdout) == (3, "")
    _, why = done.stderr.splitlines()
    assert re.fullmatch(r"Error: server root@\S+ does not answer by ssh: Host key verification failed\.", why)
    [change] = [change for change in manager.history() if change["change"] == "released"]
    assert (change["outcome"], change["failed_nodes"]) == ("FAILED", ["s"])
    assert "Host key verification failed" in change["reason"]


@pytest.mark.parametrize("environment", ["ssh"], indirect=True)
def test_a_server_without_python_frees_the_gpus_at_once_and_says_so(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path
) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(
        "#!/usr/bin/env python3\nimport os, sys\n"
        f"given = {ssh.read_text().splitlines()[1].split()[1:-1]!r}\n"
        "words = [word.replace('python3', 'no-python3') for word in sys.argv[1:]]\n"
        "os.execv(given[0], [*given, *words])\n"
    )
    done = piped(environment, "run", "--gpus", "1", "--", "true")
    assert done.returncode == 1, done
    assert "python3" in done.stderr.splitlines()[-1]


NOBODY = 65534

AS_NOBODY = """
import os
from contextlib import suppress
from resource_manager.cli import main
from resource_manager.jobs import reconcile
from resource_manager.jobs.launchers import local, ssh, terminal
with suppress(Exception):
    main(["stop", "nobody"], standalone_mode=False)  # loads all modules, from where nobody may not read
os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
main()
""".replace("NOBODY", str(NOBODY))


@pytest.mark.parametrize("environment", ["here"], indirect=True)
def test_stop_by_another_user_keeps_the_lease_of_a_job_that_it_may_not_see(
    environment: dict[str, str],
    manager: GPUResourceManager,
    embedded_redis: RedisServer,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    for path in (embedded_redis.socket, embedded_redis.folder):
        path.chmod(0o777)
    job = begun(environment, "run", "--gpus", "1", "--", "sh", "-c", "echo ready $$; exec sleep 1000")
    assert job.stdout is not None
    process = int(job.stdout.readline().split()[1])
    [lease] = manager.leases()
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "stop", lease["task_id"]],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert f"{name_in_words(lease)} keeps its lease: its job may still run: " in done.stderr
    assert "user root" in done.stderr
    assert runs(process)
    assert piped(environment, "stop", lease["task_id"]).returncode == 0
    job.communicate(timeout=30)


# ---- a server that is cut off ----


@pytest.fixture
def far_server(tmp_path: Path) -> Iterator[GangServer]:
    """A server in a network namespace, with a name of its own."""
    if SSHD is None or os.geteuid() != 0 or what_is_missing():
        pytest.skip("needs sshd, root and the right to make network namespaces")
    (tmp_path / "far").mkdir()
    servers = GangServers(tmp_path / "far", count=1)
    [server] = servers.servers
    server.stop()
    server.prefix = (*server.inside, "unshare", "--uts", "sh", "-c", 'hostname far && exec "$@"', "sh")
    server.start()
    yield server
    servers.close()


def test_a_server_that_is_cut_off_keeps_its_gpus_until_its_job_is_known_to_be_gone(
    far_server: GangServer, embedded_redis: RedisServer, tmp_path: Path
) -> None:
    environment = environment_of(tmp_path / "near", embedded_redis.fresh_url(), far_server)
    with manager_of(environment) as manager:
        process = begun(environment, "run", "--gpus", "2", "--", "sh", "-c", "echo ready $$; exec sleep 1000")
        assert process.stdout is not None
        job = int(process.stdout.readline().split()[1])
        [lease] = manager.leases()
        far_server.cut()
        _, said = process.communicate(timeout=90)
        assert process.returncode == 3
        assert (
            f"its GPUs stay allocated until it is known to be gone: gpu-manager stop {lease['short_id']}"
            in said
        )
        kept = piped(environment, "stop", lease["task_id"])
        assert kept.returncode == 1
        assert "keeps its lease" in kept.stderr
        wait_for(lambda: not runs(job), 90)
        manager.submit("next", 2)
        wait_for(lambda: manager.expire_and_schedule() or manager.leases()[0]["state"] == "ERROR", 90)
        assert [entry["task_id"] for entry in manager.queue()] == ["next"]
        assert "its job on s (terminal, user root) may still run" in manager.leases()[0]["reason"]
        far_server.join()
        stopped = piped(environment, "stop", lease["task_id"])
        assert (stopped.returncode, stopped.stdout) == (
            0,
            f"{name_in_words(lease)}: released, its job was over already\n",
        )
        assert [each["task_id"] for each in manager.leases()] == ["next"]
