"""Job in a terminal of this machine: placed before it starts, told what its lease is told, and found."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pexpect
import pytest
from click.testing import CliRunner, Result

from resource_manager import GPUResourceManager
from resource_manager.cli import attended, by_agent, by_hand, main
from resource_manager.cli.endings import ending_by_itself
from resource_manager.cli.session import say
from resource_manager.core.changes import GpuClosed
from resource_manager.core.lease_limits import MAX_RUNTIME
from resource_manager.core.maintenance import preemptor_in_words
from resource_manager.core.models import JobPlace
from resource_manager.errors import NewerFormatError, StoreUnavailableError
from resource_manager.jobs import reconcile
from resource_manager.jobs.launchers import Job, job_key, terminal
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.manager.agent_jobs import note_opened
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit.asking import asked_by, user_name
from resource_manager.manager.use_results import IdleWarning
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.builders import granted_lease, present, redefine
from tests.cli.programs import GPU_MANAGER, MARK, begun, environment_of, left_of, manager_of, piped
from tests.cli.targets import holding
from tests.eventually import wait_for, wait_until_ended
from tests.redis_server import RedisServer


@pytest.fixture
def environment(embedded_redis: RedisServer, tmp_path: Path) -> dict[str, str]:
    return environment_of(tmp_path, embedded_redis.fresh_url())


@pytest.fixture
def manager(environment: dict[str, str]) -> Iterator[GPUResourceManager]:
    with manager_of(environment) as manager:
        yield manager
        assert not list(left_of(environment))


def running(environment: dict[str, str], script: str) -> subprocess.Popen[str]:
    """Return a program whose job has said that it is ready."""
    process = begun(environment, "run", "--gpus", "2", "--", "sh", "-c", f"{script}; exit 9")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def released(manager: GPUResourceManager) -> dict[str, Any]:
    """Return the only release in the history."""
    [change] = [change for change in manager.history() if change["change"] == "released"]
    return change


def test_a_job_is_placed_in_its_lease_before_it_starts(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    process = running(environment, "echo ready; sleep 1")
    [lease] = manager.leases()
    [place] = lease["job_places"]
    assert (place["launcher"], place["folder"]) == ("terminal", environment["GPU_MANAGER_JOBS_DIR"])
    process.communicate(timeout=30)
    assert process.returncode == 9
    kinds = [change["change"] for change in manager.history()]
    assert [kind for kind in kinds if kind != "inventory_changed"] == ["granted", "jobplaced", "released"]


def test_a_preempted_command_is_told_and_what_it_held_is_granted_at_once(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    told = "trap 'echo saved within $(cat $GPU_PREEMPT_FILE); exit 4' TERM"
    process = running(environment, f"{told}; echo ready; while :; do sleep 0.1; done")
    [lease] = manager.leases()
    manager.submit("urgent", 2)
    manager.preempt(lease["task_id"])
    output, said = process.communicate(timeout=30)
    assert process.returncode == 75
    assert re.fullmatch(r"saved within 5\d(\.\d+)?\n", output)
    _, first, second = (line for line in said.splitlines() if line.startswith("gpu-manager: "))
    assert re.fullmatch(
        r"gpu-manager: preempted for urgent \w+; the job has 5\d s to save what it did", first
    )
    assert second == "gpu-manager: it was preempted and does not wait again by itself: run the command again"
    assert released(manager)["outcome"] == "EVICTED"
    assert [lease["task_id"] for lease in manager.leases()] == ["urgent"]
    assert manager.queue() == []


@pytest.mark.parametrize(("preemptor", "code", "says"), [(MAX_RUNTIME, 124, False), ("urgent", 75, True)])
def test_only_a_command_that_others_took_its_gpus_from_is_to_be_run_again(
    capfd: pytest.CaptureFixture[str], preemptor: str, code: int, says: bool
) -> None:
    ending = ending_by_itself(143, {"preempted_by": preemptor_in_words(preemptor)}, "preempted")
    assert (ending.exit_code, ending.outcome) == (code, "EVICTED")
    assert ("run the command again" in capfd.readouterr().err) is says


@pytest.mark.e2e  # only for the time it takes
def test_a_command_that_is_preempted_and_ends_well_has_succeeded(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    process = running(environment, "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    [lease] = manager.leases()
    manager.submit("urgent", 2)
    manager.preempt(lease["task_id"])
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert released(manager)["outcome"] == "SUCCESS"


def test_a_command_on_a_failed_gpu_is_ended_and_says_so(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    process = running(environment, "echo ready; exec sleep 1000")
    manager.commit(lambda cluster, now: [GpuClosed("s", 0, "", "xid 79; lost", now, stop=True)])
    _, said = process.communicate(timeout=30)
    assert process.returncode == 74
    assert said.splitlines()[-1] == "gpu-manager: a GPU of the lease failed: xid 79; lost; its job is ended"
    assert (released(manager)["outcome"], released(manager)["reason"]) == (
        "FAILED",
        "a GPU failed: xid 79; lost",
    )


@pytest.mark.e2e  # only for the time it takes
def test_a_command_whose_lease_is_ended_by_force_ends_and_frees_its_gpus(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    process = running(environment, "echo ready; exec sleep 1000")
    [lease] = manager.leases()
    manager.release(lease["task_id"], job_end="forced")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    assert said.splitlines()[-1] == f"gpu-manager: the lease {name_in_words(lease)} was ended"
    assert manager.leases() == []


def test_stop_finds_a_job_from_another_home_and_with_another_folder_of_jobs(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path
) -> None:
    process = running(environment, "echo ready; exec sleep 1000")
    [lease] = manager.leases()
    elsewhere = {**environment, "GPU_MANAGER_JOBS_DIR": str(tmp_path / "other"), "HOME": str(tmp_path)}
    done = piped(elsewhere, "stop", lease["task_id"])
    assert done.returncode == 0
    # Its own program may be the first to release it.
    assert re.fullmatch(r"\S+@\S+ \w+: (released|gone before), its job was stopped\n", done.stdout)
    process.communicate(timeout=30)
    assert manager.leases() == []


def test_stop_of_a_job_that_cannot_be_seen_from_here_keeps_its_lease(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    lease = manager.submit("t", 1)
    place = JobPlace("terminal", machine="far/1", folder="/home/u/jobs", mark="1", user="u")
    manager.place_job("t", [place], fencing_token=lease["fencing_token"])  # type: ignore[typeddict-item]
    done = piped(environment, "stop", "t")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "Error: t vnpm keeps its lease: its job may still run: the job runs in a terminal of far"
    )
    assert [each["task_id"] for each in manager.leases()] == ["t"]


def test_stop_of_a_gang_of_which_a_member_cannot_be_seen_says_so_and_fails(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    redefine(manager, nodes=tuple(replace(node, address="u@near") for node in default_inventory(2)))
    lease = manager.submit("t", 2, nodes=2)
    places = [
        JobPlace("local"),
        JobPlace("local", machine="far/1", folder="/home/u/jobs", mark="1", user="u"),
    ]
    manager.place_job("t", places, fencing_token=lease["fencing_token"])  # type: ignore[typeddict-item]
    done = piped(environment, "stop", "t")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "Error: t vnpm is partly released: its job may still run: rank 1 on gpu-server-1: "
    )
    [rest] = manager.leases()
    assert (rest["state"], [member["rank"] for member in rest["members"]]) == ("ERROR", [1])
    assert "is what is left of its gang, whose other members were released" in rest["reason"]


def test_a_command_that_cannot_be_prepared_gives_its_lease_back_and_says_why(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    blocked = {**environment, "GPU_MANAGER_JOBS_DIR": str(tmp_path / "file" / "jobs")}
    done = piped(blocked, "run", "--gpus", "2", "--", "sh", "-c", f": {environment[MARK]}")
    assert (done.returncode, done.stdout) == (1, "")
    _, why = done.stderr.splitlines()
    assert re.fullmatch(r"Error: job \S+ cannot be started on \S+: .*Not a directory.*", why)
    assert manager.leases() == []
    change = released(manager)
    assert (change["outcome"], change["failed_nodes"]) == ("FAILED", ["s"])
    assert "Not a directory" in change["reason"]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "server 127.0.0.1:1 does not answer by ssh: .*Connection refused"),
        ("", "server gpu-c has no address in the inventory, so no ssh can reach it"),
    ],
)
def test_run_on_a_server_where_nobody_logs_in_and_no_agent_reports_says_both(
    embedded_redis: RedisServer, tmp_path: Path, address: str, why: str
) -> None:
    servers = f'[[servers]]\nname = "gpu-c"\ngpus = 1\ncpus = 8\njob_user = "train"\naddress = "{address}"\n'
    (tmp_path / "servers.toml").write_text(servers)
    store = embedded_redis.fresh_url()
    with GPUResourceManager.from_url(store, inventory=tmp_path / "servers.toml") as manager:
        began = time.monotonic()
        done = piped(
            {**os.environ, "GPU_MANAGER_STORE": store, terminal.OWN_SERVER: "gpu-z"},
            "run",
            "--gpus",
            "1",
            "--",
            "true",
        )
        assert time.monotonic() - began < by_agent.PATIENCE_S, "no agent of it is started again"
        first, last = done.stderr.splitlines()[-2:]
        said = f"gpu-manager: {why}; its agent runs the command, which gets no input from here"
        assert re.fullmatch(said, first), done.stderr
        assert last == "Error: the agent of gpu-c is silent: what it runs is unknown"
        assert manager.leases() == []


def test_stop_waits_for_a_task_that_is_not_known_yet_or_gives_up(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    process = begun(environment, "stop", "late", "--retry-for", "20s")
    wait_for(lambda: list(left_of(environment)))
    done = piped(environment, "stop", "nobody")
    assert (done.returncode, done.stdout) == (1, "")
    manager.submit("late", 1)
    assert process.communicate(timeout=30) == ("late vnpm: released, it had no job\n", "")


@pytest.fixture
def stop_again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return stop_again(manager, meanwhile): what `stop t --retry-for` says, with that between two tries."""

    def stop(manager: Any, meanwhile: Callable[[], object]) -> Result:
        left = iter([meanwhile])
        pause = time.sleep

        def sleep(time_s: float) -> None:
            if time_s != by_hand.LOOK_AGAIN_S:
                pause(time_s)
            elif (step := next(left, None)) is not None:
                step()

        monkeypatch.setattr(time, "sleep", sleep)
        return CliRunner().invoke(main, ["stop", "t", "--retry-for", "1h"], obj=holding(manager))

    return stop


FAR = JobPlace("local", machine="far/1", folder="/home/u/jobs", mark="1", user="u")


def test_stop_ends_no_lease_that_gets_the_name_after_it_began(
    manager: GPUResourceManager, stop_again: Callable[..., Result]
) -> None:
    token = granted_lease(manager.submit("t", 1))["fencing_token"]
    manager.place_job("t", [FAR], fencing_token=token)

    def end_and_begin_anew() -> None:
        manager.release("t", fencing_token=token, job_end="ended")
        manager.submit("t", 1)

    done = stop_again(manager, end_and_begin_anew)
    assert (done.exit_code, done.stdout) == (0, "t vnpm: gone before, it has ended meanwhile\n")
    assert [lease["fencing_token"] for lease in manager.leases()] == [token + 1]
    manager.release("t")


@pytest.mark.parametrize("other", [False, True], ids=["granted", "another of that name"])
def test_stop_ends_the_request_that_it_found_also_once_it_is_granted_and_no_other(
    manager: GPUResourceManager,
    stop_again: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    other: bool,
) -> None:
    manager.submit("first", 2)
    manager.submit("t", 2)
    end = Mock(side_effect=[StoreUnavailableError("it restarts"), DEFAULT], wraps=reconcile.end)
    monkeypatch.setattr(reconcile, "end", end)

    def meanwhile() -> None:
        if other:
            manager.cancel("t")
            manager.submit("t", 2)
        else:
            manager.release("first")

    done = stop_again(manager, meanwhile)
    said = "gone before, it has ended meanwhile" if other else "released, it had no job"
    assert (done.exit_code, done.stdout.partition(": ")[2]) == (0, f"{said}\n")
    assert [entry["task_id"] for entry in manager.queue()] == (["t"] if other else [])


def test_stop_tries_again_to_end_a_gang_of_which_a_member_cannot_be_seen(
    manager: GPUResourceManager, stop_again: Callable[..., Result]
) -> None:
    redefine(manager, nodes=tuple(replace(node, address="u@near") for node in default_inventory(2)))
    token = granted_lease(manager.submit("t", 2, nodes=2))["fencing_token"]
    manager.place_job("t", [JobPlace("local"), FAR], fencing_token=token)

    def seen_to_be_over() -> None:
        assert [lease["state"] for lease in manager.leases()] == ["ERROR"], "it is half done"
        manager.release("t", fencing_token=token, job_end="gone", reason="its server burnt")

    done = stop_again(manager, seen_to_be_over)
    assert (done.exit_code, done.stdout) == (0, "t vnpm: gone before, it has ended meanwhile\n")


def test_a_run_whose_request_was_ended_is_named_as_in_the_queue(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    manager.allocate_resources("first", 2, 1)
    waiting = begun(environment, "run", "--gpus", "2", "--", "true")
    wait_for(lambda: manager.queue() != [])
    [entry] = manager.queue()
    with asked_by("boss"):
        assert manager.cancel(entry["task_id"])
    _, said = waiting.communicate(timeout=60)
    assert said.splitlines()[-1] == f"Error: {entry['name']} waits no more: boss cancelled its request"
    assert manager.release_resources("first")


@pytest.mark.parametrize("ending", ["granted", "interrupted", "ended between two looks", "lost"])
def test_allocate_waits_for_its_grant_or_gives_its_place_up(
    environment: dict[str, str], manager: GPUResourceManager, ending: str, tmp_path: Path
) -> None:
    manager.allocate_resources("first", 2, 1)
    write_backup(manager.store, tmp_path / "backup.json", [])
    waiting = begun(environment, "allocate", "second", "--gpus", "2", "--wait")
    wait_for(lambda: [entry["task_id"] for entry in manager.queue()] == ["second"])
    if ending == "granted":
        assert manager.release_resources("first")
        told, _ = waiting.communicate(timeout=60)
        assert (waiting.returncode, told.split()[0]) == (0, "second")
        assert manager.release_resources("second")
    elif ending == "lost":  # the state goes back to a backup
        restore(manager.store, read_backup(tmp_path / "backup.json"), force=True)
        wait_for(lambda: [entry["task_id"] for entry in manager.queue()] == ["second"])
        manager.cancel("second")
        waiting.communicate(timeout=60)
        assert manager.release_resources("first")
    elif ending == "ended between two looks":
        with asked_by("boss"):
            assert manager.cancel("second")
        _, said = waiting.communicate(timeout=60)
        assert waiting.returncode == 1
        assert said.splitlines()[-1] == "Error: second waits no more: boss cancelled its request"
        assert manager.release_resources("first")
    else:
        waiting.send_signal(signal.SIGINT)
        waiting.communicate(timeout=60)
        assert waiting.returncode == 128 + signal.SIGINT
        assert manager.queue() == []
        assert manager.release_resources("first")


@pytest.mark.parametrize(
    ("owner", "gpus", "waits", "stays"),
    [
        ("bob", 1, False, True),
        ("bob", 1, True, True),
        ("", 1, False, True),
        ("", 2, True, True),
        ("", 1, True, False),
    ],
    ids=["another's lease", "another's request", "own lease", "own other request", "own request"],
)
def test_a_signal_during_allocate_ends_nothing_that_had_the_name_before(
    owner: str, gpus: int, waits: bool, stays: bool
) -> None:
    """The lease of another was ended, and its GPUs were granted while they computed for it."""
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:
        if waits:
            manager.submit("first", 2)
        manager.submit("train", gpus, owner=owner or user_name())

        def interrupted(*given: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            return manager.submit(*given)

        words = ["allocate", "train", "--gpus", "1", "--wait"]
        done = CliRunner().invoke(main, words, obj=holding(Mock(wraps=manager, submit=interrupted)))
        assert done.exit_code == 130, done.output
        assert (manager.status_of("train") is not None) == stays


@pytest.mark.parametrize(("owner", "stays"), [("bob", True), ("", False)], ids=["another's", "own"])
def test_a_signal_while_a_service_is_silent_ends_no_request_of_another_user(owner: str, stays: bool) -> None:
    """Its operator may end any; who asks is known by the token alone."""
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:
        manager.submit("first", 2)
        manager.submit("train", 1, owner=owner or user_name())

        def silent(demand: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            raise StoreUnavailableError("it restarts")

        service = Mock(wraps=manager, submit=silent, stated_owner=lambda owner: None)
        words = ["allocate", "train", "--gpus", "1", "--wait"]
        assert CliRunner().invoke(main, words, obj=holding(service)).exit_code == 130
        assert (manager.status_of("train") is not None) == stays


def test_a_job_whose_end_is_not_confirmed_in_time_keeps_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    monkeypatch.setattr(attended, "GRACE_S", 0.1)
    monkeypatch.setattr(attended, "END_S", 0.1)
    answered = Event()
    monkeypatch.setattr(LocalLauncher, "stop", lambda *_: answered.wait(60.0))
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:
        done = CliRunner().invoke(main, ["run", "--gpus", "1", "--", "true"], obj=holding(manager))
        answered.set()
        assert "may still run: server gpu-server-0 does not answer in time; its GPUs stay" in done.output
        assert len(manager.leases()) == 1


@pytest.mark.parametrize("step", ["submit", "prepare", "place_job", "attend", "stop", "release"])
def test_a_signal_in_each_step_ends_the_command_and_its_lease(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    servers = default_inventory(1, 2, 8)
    with GPUResourceManager.from_url("memory://", inventory=servers) as manager:
        owner = {"prepare": LocalLauncher, "stop": LocalLauncher, "attend": terminal}.get(step, manager)
        act = getattr(owner, step)

        def interrupted(*given: Any, **more: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            return act(*given, **more)

        monkeypatch.setattr(owner, step, interrupted)
        done = CliRunner().invoke(main, ["run", "--gpus", "1", "--", "sleep", "1"], obj=holding(manager))
        # The job was over before its processes were looked for.
        assert done.exit_code == (0 if step in ("stop", "release") else 143), done.output
        assert manager.leases() == []
        assert manager.queue() == []


def test_a_store_that_is_silent_when_the_job_is_about_to_begin_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:
        place_job = Mock(wraps=manager.place_job)
        place_job.side_effect = [StoreUnavailableError("it restarts"), DEFAULT]
        words = ["run", "--gpus", "1", "--", "sh", "-c", "exit 9"]
        done = CliRunner().invoke(main, words, obj=holding(Mock(wraps=manager, place_job=place_job)))
        assert (done.exit_code, place_job.call_count) == (9, 2), done.output
        assert manager.leases() == []


@pytest.mark.parametrize("step", ["login", "prepare"])
def test_a_lease_is_renewed_while_its_command_is_about_to_begin(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password may be asked for, and code copied, for minutes."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    monkeypatch.setattr(attended, "RENEW_EVERY_S", 0.01)
    owner, name = (attended.Attended, "_log_in") if step == "login" else (LocalLauncher, "prepare")
    act, renewed = getattr(owner, name), []
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:

        def slow(*given: Any) -> Any:
            [before] = manager.leases()
            ends_at = present(before["expires_at"])
            wait_for(lambda: present(manager.leases()[0]["expires_at"]) > ends_at)
            renewed.append(step)
            return act(*given)

        monkeypatch.setattr(owner, name, slow)
        done = CliRunner().invoke(main, ["run", "--gpus", "1", "--", "true"], obj=holding(manager))
        assert (done.exit_code, renewed) == (0, [step]), done.output
        assert manager.leases() == []


def test_a_command_whose_lease_is_taken_before_it_begins_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for maintenance: it ran into that until it was told."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:

        def taken(lease_id: str, *given: Any, **more: Any) -> Any:
            manager.submit("urgent", 2)
            manager.preempt(lease_id)
            return manager.place_job(lease_id, *given, **more)

        words = ["run", "--gpus", "1", "--", "touch", str(tmp_path / "began")]
        done = CliRunner().invoke(main, words, obj=holding(Mock(wraps=manager, place_job=taken)))
        assert done.exit_code == 75
        last = done.output.splitlines()[-1]
        assert last == "gpu-manager: preempted for urgent f462 before its command began: run it again"
        assert not (tmp_path / "began").exists()
        assert released(manager)["outcome"] == "EVICTED"
        assert [lease["task_id"] for lease in manager.leases()] == ["urgent"]


def test_a_command_whose_time_is_over_before_it_begins_ends_as_one_whose_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a slow log-in, or a copy of much code."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(1, 2, 8)) as manager:

        def over(lease_id: str, *given: Any, **more: Any) -> Any:
            lease = manager.place_job(lease_id, *given, **more)
            reason = "preempted: its longest runtime is over"
            return {**lease, "preempted_by": preemptor_in_words(MAX_RUNTIME), "reason": reason}

        words = ["run", "--gpus", "1", "--", "touch", str(tmp_path / "began")]
        done = CliRunner().invoke(main, words, obj=holding(Mock(wraps=manager, place_job=over)))
        assert done.exit_code == 124
        last = done.output.splitlines()[-1]
        assert last == "gpu-manager: preempted: its longest runtime is over before its command began"
        assert not (tmp_path / "began").exists()
        assert manager.leases() == []


def test_under_nohup_a_command_outlives_its_terminal(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    words = ("run", "--gpus", "1", "--", "sh", "-c", "echo ready; sleep 1; exit 9")
    ignores = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), "start_new_session": True}
    process = begun(environment, *words, **ignores)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 9
    assert released(manager)["outcome"] == "FAILED"


@pytest.mark.parametrize("reader", ["", " | cat"], ids=["in front", "before a pipe"])
def test_ctrl_z_stops_neither_a_command_nor_who_reads_its_output(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path, reader: str
) -> None:
    """Its lease was renewed no more, and its job killed when its user came back."""
    os.mkfifo(go := tmp_path / "go")
    script = f"echo ready; read line < {go}; echo over"
    command = shlex.join([*GPU_MANAGER, "run", "--gpus", "1", "--", "sh", "-c", script]) + reader
    child = pexpect.spawn("bash", ["-mc", f"{command}; echo left"], env=environment, timeout=30)
    try:
        child.expect("ready")
        child.sendcontrol("z")
        child.expect_exact("^Z")
        with go.open("r+b", 0) as line:  # which waits for no reader
            line.write(b"\n")
            assert child.expect(["over", "left"]) == 0, child.before
        child.expect("left")
    finally:
        child.close(force=True)
    assert released(manager)["outcome"] == "SUCCESS"


@pytest.mark.parametrize(
    ("stream", "words"),
    [(">&-", ["logs", "t"]), ("<&-", ["run", "--gpus", "1", "--", "true"])],
    ids=["output", "input"],
)
def test_a_closed_standard_stream_is_no_terminal(
    environment: dict[str, str],
    manager: GPUResourceManager,
    monkeypatch: pytest.MonkeyPatch,
    stream: str,
    words: list[str],
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", environment["GPU_MANAGER_JOBS_DIR"])
    token, launcher = granted_lease(manager.submit("t", 1))["fencing_token"], LocalLauncher()
    job = Job(job_key("t", token), ("echo", "here"))
    manager.place_job("t", [launcher.prepare(job)], fencing_token=token)
    launcher.start(job)
    wait_until_ended(launcher, job.key)
    command = ["sh", "-c", f'exec "$@" {stream}', "sh", *GPU_MANAGER, *words]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    launcher.stop(job.key, 0.0)


def test_an_order_that_service_or_agent_did_not_answer_is_given_again() -> None:
    place = {"machine": "m", "folder": "/jobs", "mark": "m"}
    run = {"state": "running", "n": "2", "want": "run", "refusal": None, "error": None, "began": True}
    state = {"server": "gpu-a", "place": place, "runs": {"k": run}, "is_silent": False}
    silent = {**state, "is_silent": True, "has_reported": True}  # as its agent is started again, too
    before = {**state, "runs": {}}
    service = Mock()
    service.agent_state.side_effect = chain([silent, before, before], repeat(state))
    service.order_job.side_effect = [StoreUnavailableError("it restarts"), "1"]
    note_opened(service)
    launcher = by_agent.AgentTerminal(JobPlace("agent", "gpu-a"))
    assert launcher.start(Job("k", ("true",)))
    assert service.order_job.call_count == 2


def test_a_state_that_a_newer_version_wrote_is_no_failed_renewal() -> None:
    """Its lease is renewed there; before, each look between two renewals said that it could not be."""
    lease = {"task_id": "t", "fencing_token": 1}
    state = SimpleNamespace(_owns=True, _renewed_at=time.monotonic(), _lease=lease, _lease_id="t")
    manager = SimpleNamespace(status_of=Mock(side_effect=NewerFormatError("upgrade it")))
    look = attended.Attended._current_lease
    assert look(state, manager) is lease  # type: ignore[arg-type]
    state._owns = False
    with pytest.raises(NewerFormatError):
        look(state, manager)  # type: ignore[arg-type]


def test_a_shell_whose_gpus_compute_nothing_is_told_once_before_they_are_released(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"task_id": "t", "idle_s": None, "released_in_s": 300.0}
    manager = SimpleNamespace(gpus=lambda servers: [{"gpus": [{"leases": [found]}]}])
    here = SimpleNamespace(_owns=True, _server="a", _lease_id="t")
    here._idle = IdleWarning(say)
    for _ in range(2):
        here._gpus_seen_at = -math.inf
        attended.Attended._look_at_gpus(here, manager)  # type: ignore[arg-type]
    said = "gpu-manager: its GPUs compute nothing: unless they do, they are released in 300 s\n"
    assert capsys.readouterr().err == said
