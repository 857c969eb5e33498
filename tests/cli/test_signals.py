"""Signals at any moment of a program's life: it ends in time, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from resource_manager import GPUResourceManager
from resource_manager.cli.shared_connection import SharedConnection
from resource_manager.cli.signals import Calls, Interrupted, Signals, ended_in_order
from resource_manager.cli.target import Target
from resource_manager.cli.waiting import hold_once_granted
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.demand import Demand
from tests.cli.programs import GPU_MANAGER, MARK, begun, environment_of, left_of, manager_of, piped
from tests.e2e.servers import SSHServer, ssh_server
from tests.eventually import wait_for
from tests.listening import served
from tests.redis_server import EMBEDDED, RedisServer, running_redis

__all__ = ["ssh_server"]

pytestmark = pytest.mark.timeout(900)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS_WITHIN_S = 5.0
GRACE_S = 10.0
SLACK_S = 1.5
"""For this machine, on which several programs start at once; more where it is busy."""


# ---- what waits ----


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_what_was_started_and_the_next_one_changes_nothing(
    number: signal.Signals,
) -> None:
    before, ended = signal.getsignal(number), list[str]()

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            ended.append("the service")

    with pytest.raises(SystemExit) as raised, ended_in_order():
        work()
    assert (raised.value.code, ended, signal.getsignal(number)) == (128 + number, ["the service"], before)


def test_a_signal_ends_the_wait_for_a_call_and_not_the_call(signals: Signals) -> None:
    calls, done = Calls(signals), Future[int]()
    slow = calls.begin(done.result)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted) as interrupted:
        signals.result(slow)
    assert interrupted.value.code == 143
    assert calls.is_busy
    done.set_result(7)
    assert signals.is_settled(slow, 30.0)
    assert slow.result() == 7


def test_the_first_signal_counts_and_later_ones_do_nothing(signals: Signals) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    with pytest.raises(Interrupted) as interrupted:
        signals.pause(30.0)
    assert interrupted.value.code == 129


def test_a_call_is_made_after_those_before_it_and_its_error_is_the_waiter_s(signals: Signals) -> None:
    made: list[int] = []
    calls = Calls(signals)
    for number in range(20):
        calls.begin(partial(made.append, number))
    nothing: dict[str, int] = {}
    with pytest.raises(KeyError, match="it"):
        signals.result(calls.begin(lambda: nothing["it"]))
    assert made == list(range(20))


def test_a_wait_after_a_signal_has_an_end(signals: Signals) -> None:
    signal.raise_signal(signal.SIGINT)
    signals.wait(0.0)
    begun_at = time.monotonic()
    assert not signals.is_settled(Future(), 60.0, 0.1)
    assert time.monotonic() - begun_at < 10


@pytest.mark.parametrize(
    ("before", "code", "output"), [("default_int_handler", -signal.SIGINT, ""), ("SIG_IGN", 0, "SIG_IGN\n")]
)
def test_ctrl_c_while_a_program_is_loaded_ends_it_without_a_word(
    before: str, code: int, output: str, tmp_path: Path
) -> None:
    (tmp_path / "loads.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
        "def main():\n    print(signal.getsignal(signal.SIGINT).name)\n"
    )
    script = (
        "import signal; from resource_manager.lazy import program_of\n"
        f"signal.signal(signal.SIGINT, signal.{before})\nprogram_of('loads')()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, "")


def test_ctrl_c_is_an_interrupt_again_once_a_program_runs(tmp_path: Path) -> None:
    script = (
        "import signal; from resource_manager.lazy import program_of\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nprogram_of('simulator.cli')\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_ctrl_c_and_a_closed_terminal_leave_the_log_in_to_its_program(
    signals: Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which that still has to end the job: its GPUs stayed allocated."""
    ssh = tmp_path / "ssh"
    at_socket = 'for word; do case $word in ControlPath=*) touch "${word#*=}";; esac; done'
    ssh.write_text(f"#!/bin/sh\nkill -INT $$\nkill -HUP $$\n{at_socket}\nexec sleep 60\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with SharedConnection("gpu-a", signals) as connection:
        socket = connection.options[-1].partition("=")[2]
        assert Path(socket).exists()


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with Signals():
        assert [signal.getsignal(number) for number in ENDING] != before
    assert [signal.getsignal(number) for number in ENDING] == before


# ---- random moments ----


def slack_s() -> float:
    """Return the slack of a machine as busy as this one is now, by the time in which a program starts."""
    begun_at = time.monotonic()
    subprocess.run([*GPU_MANAGER, "--version"], check=True, capture_output=True)
    return max(SLACK_S, 3 * (time.monotonic() - begun_at))


def of_run(environment: dict[str, str]) -> list[str]:
    return ["run", "--gpus", "1", "--", "sh", "-c", f": {environment[MARK]}; sleep 1 & sleep 1; wait"]


def of_hold(environment: dict[str, str]) -> list[str]:
    return ["hold", "--gpus", "1", "--for", "2h"]


def of_a_wait(environment: dict[str, str]) -> list[str]:
    """Return a command that waits for GPUs which another holds."""
    with manager_of(environment) as manager:
        manager.submit(OTHER, 2)
    return of_run(environment)


OTHER = "other"
COMMANDS = (of_run, of_run, of_run, of_hold, of_a_wait)


def left(environment: dict[str, str]) -> list[str]:
    """Return what is left of a program: its leases, requests and processes."""
    with manager_of(environment) as manager:
        entries = [entry["task_id"] for entry in (*manager.leases(), *manager.queue())]
    return [
        *(entry for entry in entries if entry != OTHER),
        *(" ".join(process.cmdline()[:6]) for process in left_of(environment)),
    ]


def interrupted(environment: dict[str, str], arguments: list[str], draw: random.Random, life_s: float) -> str:
    """Send a program a signal, sometimes several, at a random moment; return what was wrong, or nothing."""
    numbers = draw.choices(ENDING, k=draw.choice((1, 1, 2, 3)))
    moment_s = draw.uniform(0.0, life_s)
    process = begun(environment, *arguments)
    time.sleep(moment_s)
    sent_at = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(draw.uniform(0.0, 0.2))
    where = f"{arguments[0]}, {' '.join(number.name for number in numbers)} after {moment_s:.2f} s"
    try:
        said = process.communicate(timeout=sent_at + ENDS_WITHIN_S + slack_s() - time.monotonic())
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{where}: it goes on; it said {process.communicate()}"
    if arguments[0] == "hold":
        end_what_is_held(environment, said[0])
    return f"{where}: left {found}; it said {said}" if (found := left(environment)) else ""


def end_what_is_held(environment: dict[str, str], said: str) -> None:
    """Release the lease that a `hold` has told: it stays whatever comes afterwards."""
    with manager_of(environment) as manager:
        for lease in manager.leases():
            if lease["short_id"] in said:
                manager.release(lease["task_id"])


def lives(folder: Path, redis: RedisServer, ssh: SSHServer | None) -> dict[Callable[..., list[str]], float]:
    """Return the time from start to end of each command that nobody interrupts."""
    found = {of_a_wait: 4.0}
    for command in (of_run, of_hold):
        environment = environment_of(folder / command.__name__, redis.fresh_url(), ssh)
        begun_at = time.monotonic()
        done = piped(environment, *command(environment))
        assert done.returncode == 0, done.stderr
        found[command] = time.monotonic() - begun_at
    return found


def interrupted_often(
    folder: Path, redis: RedisServer, times: int, ssh: SSHServer | None = None
) -> list[str]:
    """Return what was wrong in so many tries, two at a time, each on a store of its own."""
    life_s = lives(folder, redis, ssh)

    def one(number: int) -> str:
        environment = environment_of(folder / str(number), redis.fresh_url(), ssh)
        command = COMMANDS[number % len(COMMANDS)]
        return interrupted(environment, command(environment), random.Random(number), 1.2 * life_s[command])

    with ThreadPoolExecutor(2) as pool:
        return [wrong for wrong in pool.map(one, range(times)) if wrong]


def test_a_signal_at_random_moments_leaves_nothing(embedded_redis: RedisServer, tmp_path: Path) -> None:
    assert interrupted_often(tmp_path, embedded_redis, 4) == []


def test_a_signal_while_a_lease_is_told_comes_too_late(embedded_redis: RedisServer, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, embedded_redis.fresh_url())
    target = Target.of({"store": environment["GPU_MANAGER_STORE"]})
    demand = Demand.of(lease_id="held", gpus=1)
    told = []

    def tell(lease: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        told.append(lease["task_id"])

    hold_once_granted(target, demand, tell)
    target.close()
    assert left(environment) == told == ["held"]


@pytest.mark.e2e
@pytest.mark.parametrize("place", ["here", "ssh"])
def test_a_signal_at_a_hundred_random_moments_leaves_nothing(
    place: str, embedded_redis: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ssh = request.getfixturevalue("ssh_server") if place == "ssh" else None
    assert interrupted_often(tmp_path, embedded_redis, 100, ssh) == []


@pytest.mark.e2e
@pytest.mark.parametrize("place", ["here", "ssh"])
@pytest.mark.parametrize("number", ENDING)
def test_a_job_that_ignores_signals_is_killed_after_its_grace(
    number: signal.Signals,
    place: str,
    embedded_redis: RedisServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    ssh = request.getfixturevalue("ssh_server") if place == "ssh" else None
    environment = environment_of(tmp_path, embedded_redis.fresh_url(), ssh)
    script = f": {environment[MARK]}; trap '' INT TERM HUP; echo ready; while :; do sleep 0.1; done"
    process = begun(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=GRACE_S + ENDS_WITHIN_S + slack_s())
    assert process.returncode == 128 + number
    assert left(environment) == []


@pytest.mark.e2e
def test_what_shares_the_log_in_has_ended_before_the_program(
    embedded_redis: RedisServer, tmp_path: Path, ssh_server: SSHServer
) -> None:
    """An `ssh` is slow to end once the log-in that it shares is over."""
    environment = environment_of(tmp_path, embedded_redis.fresh_url(), ssh_server)
    program = tmp_path / "bin" / "ssh"
    quick = program.rename(tmp_path / "bin" / "quick-ssh")
    wait = f'{quick} "$@" & touch {tmp_path}/asked; wait $!; sleep 0.3'
    program.write_text(f'#!/bin/sh\ncase "$*" in *" -T "*|-T*) {wait};; *) exec {quick} "$@";; esac\n')
    program.chmod(0o755)
    process = begun(environment, *of_run(environment))
    wait_for((tmp_path / "asked").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=ENDS_WITHIN_S + slack_s())
    assert process.returncode == 143
    assert left(environment) == []


# ---- a silent store ----


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """What a shell starts in the background ignores SIGINT, and so does all that the tests would start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis server for one test, which may halt it."""
    with running_redis(EMBEDDED) as server:
        yield server


def test_a_signal_ends_a_job_while_the_store_is_silent_and_its_lease_afterwards(
    redis: RedisServer, tmp_path: Path
) -> None:
    environment = environment_of(tmp_path, redis.fresh_url())
    script = f": {environment[MARK]}; echo ready; sleep 1000"
    process = begun(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert redis.process is not None
    assert process.stdout.readline() == "ready\n"
    redis.process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=ENDS_WITHIN_S + slack_s())
    assert process.returncode == 143
    last = said.splitlines()[-1]
    assert re.match(r"gpu-manager: \S+@\S+ could not be given back yet; process ", last), (
        "not by its lease id"
    )
    [other] = left_of(environment)
    assert str(other.pid) in last
    redis.process.send_signal(signal.SIGCONT)
    wait_for(lambda: left(environment) == [], 30.0)


def emptied(client: Redis, user: str) -> None:
    client.flushall()


def with_new_password(client: Redis, user: str) -> None:
    client.execute_command("ACL", "SETUSER", user, "resetpass", ">another")
    client.execute_command("CLIENT", "KILL", "USER", user)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (emptied, r"Redis at .* has lost the state .*; restore its data, .*"),
        (
            with_new_password,
            r"(\S+) could not be given back: .* refused the login: .*; then gpu-manager stop \1",
        ),
    ],
)
def test_a_job_keeps_its_exit_code_though_its_lease_cannot_be_given_back(
    fault: Callable[[Redis, str], None], line: str, redis: RedisServer, tmp_path: Path
) -> None:
    url = redis.limited_url()
    environment = environment_of(tmp_path, url)
    script = f": {environment[MARK]}; echo ready; until [ -e {tmp_path}/end ]; do sleep 0.05; done; exit 4"
    process = begun(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with redis.client() as client:
        fault(client, url.partition("//")[2].partition(":")[0])
    (tmp_path / "end").touch()
    _, said = process.communicate(timeout=ENDS_WITHIN_S + slack_s())
    assert process.returncode == 4
    assert re.fullmatch(f"gpu-manager: {line}", said.splitlines()[-1])
    assert list(left_of(environment)) == []


def test_a_request_whose_store_was_emptied_fails_with_one_line(redis: RedisServer, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, redis.fresh_url())
    with manager_of(environment) as manager:
        for server in manager.servers():
            manager.submit(server["server_name"], int(server["total_gpus"]), server=server["server_name"])
    process = begun(environment, "run", "--gpus", "1", "--", "true")
    assert process.stderr is not None
    assert "waits at position 1" in process.stderr.readline()
    with redis.client() as client:
        client.flushall()
    _, said = process.communicate(timeout=ENDS_WITHIN_S + slack_s())
    assert process.returncode == 3
    assert re.fullmatch(r"Error: Redis at .* has lost the state .*\n", said)


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_request_that_a_service_holds_is_given_back_at_a_signal_and_granted_without_one(
    number: signal.Signals | None, tmp_path: Path
) -> None:
    with (
        GPUResourceManager.from_url("memory://", inventory=default_inventory(1)) as manager,
        served(manager, tmp_path, 4) as url,
    ):
        manager.submit("holds", 8)
        environment = {**os.environ, "GPU_MANAGER_URL": url}
        process = begun(environment, "run", "--gpus", "1", "--", "echo", "runs")
        wait_for(lambda: "held_requests 1.0" in httpx.get(f"{url}/metrics").text, 60.0)
        if number is None:
            manager.release("holds")
        else:
            process.send_signal(number)
        output, said = process.communicate(timeout=ENDS_WITHIN_S + slack_s())
        assert "waits at position 1" in said
        assert "could not be given back" not in said  # the held call keeps no other from its turn
        assert (process.returncode, output) == ((0, "runs\n") if number is None else (143, ""))
        assert manager.queue() == []


@pytest.mark.e2e
@pytest.mark.parametrize("silence_s", [3.0, 12.0])
@pytest.mark.parametrize("place", ["here", "ssh"])
def test_a_signal_around_a_silence_of_the_store_leaves_nothing(
    place: str, silence_s: float, redis: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ssh = request.getfixturevalue("ssh_server") if place == "ssh" else None
    life_s = lives(tmp_path, redis, ssh)
    draw = random.Random(silence_s)
    assert redis.process is not None
    for number in range(12):
        environment = environment_of(tmp_path / str(number), redis.fresh_url(), ssh)
        command = COMMANDS[number % len(COMMANDS)]
        slack = slack_s()  # before the time that it is added to: it takes a while itself
        process = begun(environment, *command(environment))
        time.sleep(draw.uniform(0.0, life_s[command]))
        redis.process.send_signal(signal.SIGSTOP)
        halted_at = time.monotonic()
        time.sleep(draw.uniform(0.0, 2.0))
        sent_at = time.monotonic()
        process.send_signal(draw.choice(ENDING))
        time.sleep(max(halted_at + min(silence_s, 6.5) - time.monotonic(), 0.0))
        try:
            if silence_s < ENDS_WITHIN_S:
                redis.process.send_signal(signal.SIGCONT)
            said = process.communicate(timeout=sent_at + ENDS_WITHIN_S + slack - time.monotonic())
            time.sleep(max(halted_at + silence_s - time.monotonic(), 0.0))
        finally:
            redis.process.send_signal(signal.SIGCONT)
        if command is of_hold:
            end_what_is_held(environment, said[0])
        wait_for(lambda: left(environment) == [], 60.0)  # noqa: B023 - called before the next round


# ---- other programs ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "arguments",
    [["serve", "--port", "0"], ["submit", "a", "--gpus", "1"], ["status", "--watch", "1"]],
    ids=lambda arguments: arguments[0],
)
def test_another_program_ends_in_time_while_the_store_is_silent(
    arguments: list[str], number: signal.Signals, redis: RedisServer, tmp_path: Path
) -> None:
    environment = environment_of(tmp_path, redis.fresh_url())
    environment["GPU_MANAGER_TOKENS"] = str(tmp_path / "tokens.json")
    assert redis.process is not None
    process = begun(environment, *arguments)
    if arguments[0] != "submit":
        stream = process.stderr if arguments[0] == "serve" else process.stdout
        assert stream is not None
        stream.readline()  # it is at work
    redis.process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    process.send_signal(number)
    process.communicate(timeout=ENDS_WITHIN_S + slack_s())
    assert not list(left_of(environment))
