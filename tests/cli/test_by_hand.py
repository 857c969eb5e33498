"""GPUs by hand, in a real terminal (pexpect), here and over a real sshd."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

from resource_manager import GPUResourceManager
from tests.cli.programs import GPU_MANAGER, environment_of, manager_of, piped
from tests.e2e.servers import ssh_server
from tests.eventually import wait_for
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
    assert re.search(r"^gpu-manager: hand:\S+: GPUs 0 and 1 CPUs of s, ", done.stderr, re.M)
    assert [change["outcome"] for change in manager.history() if change["change"] == "released"] == ["FAILED"]


def test_arguments_arrive_as_they_are(environment: dict[str, str], manager: GPUResourceManager) -> None:
    odd = ["a b", "$HOME", "'", '"', "`id`", "ünï", "--json", "\\n", ""]
    done = piped(environment, "run", "--gpus", "1", "--", "printf", "<%s>", *odd)
    assert done.stdout == "".join(f"<{each}>" for each in odd)


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
    assert lease["expires_at"] - time.time() <= 60
    stopped = piped(environment, "stop", lease["task_id"])
    assert (stopped.returncode, stopped.stdout) == (
        0,
        f"{lease['task_id']}: released, its job was over already\n",
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
    assert re.fullmatch(r"hand:\S+: (released|gone before), its job was stopped\n", stopped.stdout)
    assert not runs(job)
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
    done = piped(environment, "hold", "--for", "2h", "--server", "s")
    assert done.returncode == 0, done.stderr
    (lease,) = manager.leases()
    assert lease["task_id"] in done.stdout
    assert 7100 < lease["expires_at"] - time.time() <= 7200
    assert manager.release_resources(lease["task_id"])


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["run", "--gpus", "3", "--", "true"], 2, "gpus"),
        (["run", "--gpus", "1"], 2, "COMMAND"),
        (
            ["run", "--gpus", "1", "--time", "soon", "--", "true"],
            2,
            "a duration must be seconds or a text such as 45s, 10min, 12h, 3d, got 'soon'",
        ),
        (["run", "--gpus", "1", "--", "no-such-program-here"], 127, "no-such-program-here"),
        (["hold"], 2, "--for"),
        (["attach", "nobody"], 1, "'nobody' holds no lease"),
        (["stop", "nobody"], 1, "'nobody' holds no lease"),
        (["logs", "nobody"], 1, "'nobody' holds no lease"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], code: int, line: str, environment: dict[str, str], manager: GPUResourceManager
) -> None:
    done = piped(environment, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    (said,) = [each for each in done.stderr.splitlines() if not each.startswith("gpu-manager: hand:")]
    assert line in said
