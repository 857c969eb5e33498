"""Every command, on a service and directly on a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from werkzeug.serving import make_server

from demo.stack import free_ports
from resource_manager import GPUResourceManager, Settings
from resource_manager.cli import main, reconciling, target
from resource_manager.cli.target import Target
from resource_manager.jobs.reconcile import Action, ActionKind, Reconciliation
from resource_manager.manager.cluster_change import ApplyOptions
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from tests.cli.targets import Run, holding
from tests.manager.test_slurm_jobs import slurm_job


def parsed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_name_where_none_is_taken_leads_to_what_takes_one(run: Run) -> None:
    done = run("leases", "gpu-server-0")
    assert done.exit_code == 2
    assert "takes no name: --server gpu-server-0 shows those on a server, gpu-manager status" in done.output


def test_a_lease_is_granted_renewed_and_released(run: Run) -> None:
    asked = ("--gpus", "4", "--cpus", "8", "--label", "a=b", "--ttl", "60")
    lease = parsed(run("allocate", "t1", *asked, "--json"))
    assert lease["gpu_ids"] == [0, 1, 2, 3]
    assert lease["labels"] == {"a": "b"}
    assert parsed(run("status", "--json"))["servers"][0]["available_gpus"] == 4
    assert [item["task_id"] for item in parsed(run("leases", "--json"))] == ["t1"]
    assert parsed(run("renew", "t1", "--for", "2h", "--json"))["expires_at"] >= lease["expires_at"] + 3600
    assert parsed(run("release", "t1", "--outcome", "SUCCESS", "--json")) == {
        "success": True,
        "task_id": "t1",
    }
    changes = [item["change"] for item in parsed(run("history", "--all", "--json"))]
    assert changes == ["granted", "renewed", "released"]
    assert run("release", "t1").exit_code == 1


def test_a_deadline_at_risk_is_said_in_queue_explain_and_history(
    run: Run, manager: GPUResourceManager
) -> None:
    for server in manager.servers():
        manager.allocate(f"nightly_{server['server_id']}", int(server["total_gpus"]), expected_runtime=7200)
    asked = ("--gpus", "8", "--expected-runtime", "1h", "--deadline", "90min")
    assert run("submit", "report", *asked).exit_code == 0
    manager.check_deadlines()
    for words in (("queue",), ("explain", "report"), ("history", "--what", "deadline")):
        said = " ".join(run(*words).stdout.split())
        assert "deadline" in said, words
        assert "should end" in said, said
    wrong = run("submit", "x", "--gpus", "8", "--deadline", "2030-01-31T18:00")
    assert wrong.exit_code == 2
    assert "must be a duration of 10 years at most, such as 6h, or a time with its zone" in wrong.stderr


def test_what_dags_will_ask_for_is_listed_apart_from_the_queue(run: Run, manager: GPUResourceManager) -> None:
    labels = {"dag_id": "etl", "run_id": "r", "task_id": "train"}
    manager.announce("etl/r/train", 4, copies=3, team="vision", labels=labels)
    shown = " ".join(run("queue", "--coming", "--wide").stdout.split())
    for words in ("1 announced", "etl.train", "vision", "3 × 4", "no earlier run of etl/r/train is known"):
        assert words in shown
    assert "at an unknown time 12 more GPUs will be asked for" in shown
    assert [each["copies"] for each in parsed(run("queue", "--coming", "--json"))] == [3]
    assert parsed(run("queue", "--json")) == []
    assert "etl.train will ask for 4 GPUs" in run("history", "--what", "announce", "--wide").stdout


def test_jobs_on_slurm_are_listed_after_leases(run: Run, manager: GPUResourceManager) -> None:
    now = manager.store.now()
    waits = {"state": "PENDING", "where": "", "wait": "others are before it (Priority)", "started_at": None}
    ended = {"state": "COMPLETED", "exit_code": 0, "ended_at": now}
    jobs = [slurm_job(7, now), slurm_job(8, now, **waits), slurm_job(9, now, **ended)]
    manager.keep_slurm_jobs("c", jobs)
    assert run("allocate", "t1", "--gpus", "2").exit_code == 0
    found = parsed(run("leases", "--json"))
    assert [(item.get("source"), item["task_id"]) for item in found] == [
        (None, "t1"),
        ("slurm", "a:d/r/t/7"),
        ("slurm", "a:d/r/t/8"),
    ]
    shown = run("leases", "--wide").stdout
    assert "2 jobs on Slurm" in shown
    for line in (
        "RUNNING",
        "n1 GPU 0-1",
        "PENDING",
        "others are before it (Priority)",
        "ann",
        "vision",
        "2.0 h",
    ):
        assert line in shown
    assert "COMPLETED" not in shown


def test_a_lease_is_preempted_for_a_pending_request(run: Run) -> None:
    assert run("submit", "held", "--gpus", "8", "--server", "0").exit_code == 0
    refused = run("preempt", "held")
    assert (refused.exit_code, "nobody waits for what held vnpm holds" in refused.stderr) == (1, True)
    run("submit", "waits", "--gpus", "8", "--server", "0")
    tried = run("preempt", "held", "--dry-run").stdout
    assert tried == "held vnpm is preempted for waits f462 (--dry-run: not changed)\n"
    assert parsed(run("leases", "--json"))[0]["preempted_by"] is None
    assert "PREEMPTING" not in run("leases").stdout
    assert run("preempt", "held", "--for", "waits").stdout == "held vnpm is preempted for waits f462\n"
    assert "PREEMPTING" in run("leases").stdout
    assert parsed(run("leases", "--json"))[0]["preempted_by"] == "waits"


def test_a_pending_request_is_shown_explained_and_cancelled(run: Run) -> None:
    for i in range(4):
        assert parsed(run("submit", f"t{i}", "--gpus", "8", "--cpus", "8", "--json"))["state"] == "RUNNING"
    assert parsed(run("submit", "late", "--gpus", "8", "--cpus", "8", "--json"))["state"] == "WAITING"
    refused = run("allocate", "later", "--gpus", "2", "--cpus", "1")
    full = "no server with 2 GPUs: none is free anywhere"
    assert (refused.exit_code, refused.stderr.strip().removeprefix("Error: ")) == (
        1,
        f"not granted: {full} (--wait queues for them)",
    )
    told = " ".join(run("queue").stdout.split())
    assert "unknown" in told
    assert (
        "start unknown: the end of t0 vnpm and 3 more is unknown; state runtimes: expected_runtime," in told
    )
    assert parsed(run("queue", "--json"))[0]["position"] == 1
    assert "late" in run("status").stdout
    answer = run("explain", "--gpus", "2", "--cpus", "1", "--json")
    assert answer.exit_code == 1
    explained = json.loads(answer.stdout)
    assert (explained["could_ever_fit"], explained["kind"], explained["reason"]) == (
        True,
        "no_capacity",
        full,
    )
    assert f"Not now: {full}. Should start: unknown: the end of" in " ".join(
        run("explain", "--gpus", "2", "--cpus", "1").stdout.split()
    )
    assert parsed(run("cancel", "late", "--json"))["success"] is True
    assert run("cancel", "late").exit_code == 1


def test_servers_are_drained_resumed_and_reset(run: Run) -> None:
    assert parsed(run("drain", "gpu-server-0", "--reason", "dust", "--json"))["state"] == "DRAINED"
    assert parsed(run("allocate", "t", "--gpus", "2", "--cpus", "1", "--json"))["server_id"] == 1
    assert parsed(run("resume", "0", "--json"))["state"] == "IDLE"
    for wrong, advice in (("gpu-servr-1", "did you mean gpu-server-1, "), ("99", "it has gpu-server-0, ")):
        for asked in (("drain", wrong), ("explain", "--gpus", "2", "--server", wrong), ("verify", wrong)):
            refused = run(*asked)
            assert (refused.exit_code, advice in refused.stderr) == (2, True), asked
    assert run("reset").exit_code == 1
    assert parsed(run("reset", "--yes", "--json")) == {"success": True}
    assert parsed(run("leases", "--json")) == []


def test_a_reset_that_finds_the_lock_busy_exits_as_what_may_be_tried_again() -> None:
    with GPUResourceManager(Settings(store="memory://", lock_timeout_s=0.05)) as manager:
        lock = manager.store.lock()
        assert lock.acquire(1)
        done = CliRunner().invoke(main, ["reset", "--yes"], obj=holding(manager))
        lock.release()
    assert (done.exit_code, done.stderr.partition(";")[0]) == (3, "Error: the lock was busy for 0.05 s")


def test_status_says_why_a_server_or_gpu_is_closed_and_which_command_shows_a_server(run: Run) -> None:
    assert "closed because" not in run("status", "--wide").stdout
    run("drain", "gpu-server-1", "--reason", "new fans")
    run("drain", "gpu-server-2", "--gpu", "3", "--reason", "noisy")
    wide = run("status", "--wide").stdout
    assert "new fans" in wide
    assert "GPU 3: drained; noisy" in wide
    done = run("status", "gpu-server-1")
    assert done.exit_code == 1
    assert "gpu-server-1 is a server: gpu-manager status --wide shows it" in done.stderr


def test_status_says_that_a_server_is_retired(run: Run, manager: GPUResourceManager) -> None:
    manager.submit("train", 2, server="gpu-server-3")
    servers = [{"name": f"gpu-server-{number}", "gpus": 8, "cpus": 64} for number in range(3)]
    manager.apply(ClusterForm.model_validate({"servers": servers}), ApplyOptions(retire=("gpu-server-3",)))
    assert "retired: it leaves once its leases have ended" in run("status", "--wide").stdout
    assert "  retired: it leaves" in run("top", "--once").stdout


def test_status_shows_each_lease_on_its_server_where_an_older_version_left_two_one_number(
    run: Run, manager: GPUResourceManager
) -> None:
    manager.submit("train", 2, server="gpu-server-0")
    other = ClusterForm.model_validate({"servers": [{"name": "other", "gpus": 8, "cpus": 64}]})
    manager.apply(other, ApplyOptions(retire=("gpu-server-0",)))
    now = manager.read(lambda cluster, now: cluster.snapshot())
    manager.store.replace(replace(now, nodes=tuple(replace(node, server_id=0) for node in now.nodes)))
    rows = {line.split()[3]: line for line in run("status", "--wide").stdout.splitlines() if " 0 " in line}
    assert ("train" in rows["other"], "train" in rows["gpu-server-0"]) == (False, True)


def test_a_part_of_a_gpu_is_shown_as_a_part(run: Run) -> None:
    asked = ("--gpus", "1", "--cpus", "1", "--gpu-milli", "250")
    parsed(run("allocate", "part", *asked, "--json"))
    assert " 0 (25%) " in run("leases", "--wide").stdout
    for server in range(4):
        run("drain", str(server))
    parsed(run("submit", "later", *asked, "--json"))
    assert " 0.25 " in run("queue", "--wide").stdout


def test_status_shows_free_used_and_closed_in_80_columns(run: Run) -> None:
    for number in range(2):
        labels = (f"--label={name}" for name in ("dag_id=dag", f"run_id=run_{number}", "task_id=job"))
        parsed(run("allocate", f"job{number}", "--gpus", "2", "--cpus", "8", *labels, "--json"))
    parsed(run("allocate", "p", "--gpus", "1", "--cpus", "1", "--gpu-milli", "500", "--json"))
    run("drain", "0", "--failed")
    run("drain", "1")
    shown = run("status").stdout.splitlines()
    assert shown[1].strip() == "GPUs: 16 free, 5 used, 11 closed of 32"
    assert shown[2].strip() == "CPUs: 128 free, 17 used, 111 closed of 256"
    rows = {line.split()[3]: line for line in shown if "gpu-server-" in line}
    assert [line.split()[-2:-1] for line in shown if "dag.job" in line] == [["vnpm"], ["f462"]]
    assert "████▒xxx" in rows["gpu-server-0"]
    assert "0/8" in rows["gpu-server-0"]
    assert "0/64" in rows["gpu-server-0"]
    assert "dag.job vnpm" in rows["gpu-server-0"]
    assert "xxxxxxxx" in rows["gpu-server-1"]
    assert "········" in rows["gpu-server-2"]
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ("allocate", "t", "--gpus", "1", "--cpus", "1"),
        ("allocate", "t", "--gpus", "9", "--cpus", "1"),
        ("allocate", "t", "--gpus", "two", "--cpus", "1"),
        ("allocate", "t", "--gpus", "0.5"),
        ("allocate", "t", "--cpus", "2"),
        ("allocate", "t", "--gpus", "2", "--server", "nowhere"),
        ("allocate", "t", "--gpus", "2", "--cpus", "65"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--label", "x"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--resource", "memory_mib=much"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--prefer-server", "77"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--resource", "cpus=8"),
        ("allocate", "t", "--gpus", "1", "--cpus", "1", "--gpu-milli", "0"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--ttl", "0"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--expected-runtime", "-1"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--expected-runtime", "nan", "--json"),
        ("allocate", "t", "--gpus", "2", "--cpus", "1", "--expected-runtime", "inf", "--json"),
        ("drain", "gpu-server-0", "--gpu", "0", "--gpu", "1"),
        ("allocate", "t", "--gpus", "2", "--gpus", "4"),
        ("history", "--limit", "0"),
        ("history", "--after", "99999999999999999999"),
        ("status", "--watch", "0"),
        ("status", "--watch", "nan"),
        ("status", "--watch", "inf"),
        ("reconcile", "--airflow-url", "http://127.0.0.1:1", "--every", "inf"),
        ("reset", "--json"),
        ("nonsense",),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert parsed(run("leases", "--json")) == []


@pytest.mark.parametrize("command", ["run --gpus 1 true", "shell --gpus 1", "hold --gpus 1 --for 1h"])
@pytest.mark.parametrize(
    ("store", "code", "words"),
    [
        ("memory://", 2, "memory:// has four servers that are examples"),
        ("redis://127.0.0.1:1/0", 3, "cannot be reached"),
        ("redis://nowhere.invalid/0", 3, "cannot be reached"),
    ],
)
def test_by_hand_without_a_store_that_answers_nothing_is_left_to_be_given_back(
    store: str, code: int, words: str, command: str
) -> None:
    done = CliRunner().invoke(main, ["--store", store, *command.split()])
    assert (done.exit_code, done.stdout) == (code, "")
    assert words in done.stderr
    assert "given back" not in done.stderr


@pytest.mark.parametrize("command", ["allocate", "submit", "explain"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ("--gpus", "9"),
            "--gpus must be between 2 and 8 (the inventory is the built-in one), got 9",
        ),
        (
            ("--gpus", "2", "--cpus", "65"),
            "--cpus must be between 1 and 64 (what the",
        ),
        (("--gpus", "2", "--server", "x"), "--server 'x' is not in the inventory of 4 servers"),
        (("--gpus", "2", "--prefer-server", "x"), "--prefer-server 'x' is not in the inventory of 4 servers"),
        (
            ("--gpus", "0.5"),
            "--gpus must be a whole number, got '0.5'; that GPU fraction is --gpus 1, --gpu-milli 500",
        ),
        (("--gpus", "2", "--gpu-milli", "500"), "Error: --gpu-milli 500 goes with --gpus 1, got --gpus 2\n"),
        (("--gpus", "2", "--expected-runtime", "-1"), "Error: --expected-runtime"),
        (("--gpus", "2", "--resource", "a=-1"), "Error: --resource"),
        (("--gpus", "2", "--utility", "5"), "--target"),
        (
            ("--gpus", "2", "--require-label", "zone"),
            "Error: --require-label must be NAME=VALUE, got 'zone'\n",
        ),
        (("--gpus", "2", "--target", "5"), "Error: --target needs --utility as well\n"),
        (("--gpus", "2", "--expected-rutime", "1h"), "Did you mean one of: '--expected-runtime'"),
    ],
)
def test_a_wrong_option_is_named(run: Run, command: str, options: tuple[str, ...], line: str) -> None:
    result = run(command, *([] if command == "explain" else ["t"]), *options)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert line in result.stderr


@pytest.mark.parametrize("command", ["allocate", "submit"])
@pytest.mark.parametrize(
    ("options", "line"),
    [(("--ttl", "0"), "Error: --ttl"), (("--label", f"a={'x' * 9000}"), "Error: --label")],
)
def test_a_wrong_option_of_the_lease_is_named(
    run: Run, command: str, options: tuple[str, ...], line: str
) -> None:
    result = run(command, "t", "--gpus", "2", *options)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(line)


@pytest.mark.parametrize(
    "words", [("release", "t", "--outcome"), ("cancel", "p", "--reason"), ("drain", "0", "--reason")]
)
def test_a_text_for_the_history_has_an_end(run: Run, words: tuple[str, ...]) -> None:
    parsed(run("allocate", "t", "--gpus", "2", "--json"))
    assert run("submit", "p", "--gpus", "8", "--server", "0").exit_code == 0
    refused = run(*words, "x" * 251)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith(f"Error: {words[-1]}")
    assert run(*words, "x" * 250).exit_code == 0


def test_what_if_asks_for_nobody_who_is_there(run: Run) -> None:
    parsed(run("allocate", "what-if", "--gpus", "2", "--json"))
    assert parsed(run("explain", "--gpus", "2", "--json"))["would_be_granted"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("allocate t --gpus 2 --server 0", "Error: not granted"),
        ("release nothing", "Error: no lease is called 'nothing'"),
    ],
)
def test_a_refusal_is_one_line(words: str, said: str, tmp_path: Path) -> None:
    """In a process of its own: here pytest takes what is logged."""
    inventory = tmp_path / "servers.toml"
    inventory.write_text('[[servers]]\nname = "a"\ngpus = 2\ncpus = 1\n')
    ask = (
        "import sys; from resource_manager.cli.target import Target; from resource_manager.cli import main\n"
        "from resource_manager import GPUResourceManager as M\n"
        "Target.manager = M.from_url('memory://', inventory=sys.argv.pop(1))\n"
        "Target.manager.drain(0)\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask, str(inventory), *words.split()], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_options_request_a_gpu_fraction_and_a_server(run: Run) -> None:
    payload = ("--gpus", "1", "--gpu-milli", "500", "--server", "gpu-server-3", "--json")
    for command in ("allocate", "submit"):
        lease = parsed(run(command, command, *payload))
        assert (lease["server_id"], lease["cpu_count"]) == (3, 1)


def test_server_0_can_be_preferred(run: Run) -> None:
    def server_of(task_id: str, preferred: str) -> int:
        payload = ("allocate", task_id, "--gpus", "2", "--cpus", "1", "--prefer-server", preferred)
        return int(parsed(run(*payload, "--json"))["server_id"])

    assert [server_of("a", "3"), server_of("b", "0")] == [3, 0]


@pytest.mark.parametrize("words", ["status", "status --json", "report --csv", "--help"])
@pytest.mark.parametrize(
    ("redirection", "code", "line"),
    [
        ("> /dev/full", 2, "Error: standard output: No space left on device\n"),
        ("| false", 1, ""),
        (">&-", 0, ""),
    ],
)
def test_output_that_nobody_takes_is_one_line_at_most(
    words: str, redirection: str, code: int, line: str
) -> None:
    command = f"{sys.executable} -m resource_manager.cli --store memory:// {words} {redirection}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, line)


def test_a_terminal_without_the_characters_of_a_table_shows_the_rest() -> None:
    table = CliRunner(charset="ascii").invoke(main, ["--store", "memory://", "status"])
    assert (table.exit_code, table.stderr) == (0, "")
    assert "4 servers, 0 leases, 0 waiting" in table.stdout


def test_ctrl_c_while_a_command_begins_is_the_exit_code_of_an_interrupt() -> None:
    def interrupted(given: object) -> Target:
        raise KeyboardInterrupt

    result = CliRunner().invoke(main, ["status"], obj=interrupted)
    assert (result.exit_code, result.stderr.split()) == (130, ["Error:", "aborted."])


@pytest.mark.parametrize("answers", ["< /dev/null", "<&-", "<<< n"])
def test_what_nobody_confirms_is_not_done_and_says_how(answers: str) -> None:
    command = f"{sys.executable} -m resource_manager.cli --store memory:// reset {answers}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    line = "Error: not confirmed, nothing was changed: add --yes where nobody can answer"
    assert done.stderr.splitlines()[-1] == line


@pytest.mark.parametrize("arguments", [[], ["token"]])
def test_without_arguments_the_help_is_printed(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ")
    assert "\nCommands:\n" in result.stderr


@pytest.mark.parametrize("words", [("--by", "ada"), ("--after", "0"), ("--what", "drain"), ("--all",)])
def test_a_history_in_a_file_is_whole(run: Run, words: tuple[str, ...], tmp_path: Path) -> None:
    for option in ("--export", "--archive"):
        done = run("history", option, str(tmp_path / "file"), *words)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "write the whole history: leave out --after, --all, --by and --what" in done.stderr
        assert not (tmp_path / "file").exists()


def test_a_store_that_a_command_names_is_not_that_of_a_service_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `--store scratch reset --yes` would end every lease of the service that a profile names."""
    monkeypatch.setenv("GPU_MANAGER_URL", "http://127.0.0.1:1")
    named = ["--store", f"sqlite:///{tmp_path}/scratch.db"]
    assert CliRunner().invoke(main, [*named, "reset", "--yes"]).exit_code == 0
    program = [sys.executable, "-m", "resource_manager.cli"]
    with_target = Target.of({"url": None, "store": named[1]}).environment()
    assert subprocess.run([*program, "status"], env=with_target, capture_output=True).returncode == 0
    both = CliRunner().invoke(main, [*named, "--url", "http://127.0.0.1:1", "status"])
    assert (both.exit_code, both.stdout) == (2, "")
    assert both.stderr.startswith("Error: --url and --store exclude each other: leave out --url or --store.")


INSTALL = "agent install --all --service http://127.0.0.1:1 --tokens tokens.json"


@pytest.mark.parametrize("command", ["serve", "store check", "token list", INSTALL])
def test_a_command_of_a_store_says_what_named_a_service(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:1"
    given = CliRunner().invoke(main, ["--url", url, *command.split()])
    monkeypatch.setenv("GPU_MANAGER_URL", url)
    for done, way in (
        (given, "leave out --url"),
        (CliRunner().invoke(main, command.split()), "unset GPU_MANAGER_URL"),
    ):
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f": {way}, or name a --store before the command" in done.stderr


def test_an_unreachable_target_is_exit_3() -> None:
    impatient = partial(Target.of, connect_timeout_s=0.0)
    for arguments in (["--url", "http://127.0.0.1:1"], ["--store", "redis://127.0.0.1:1"]):
        result = CliRunner().invoke(main, [*arguments, "status"], obj=impatient)
        assert result.exit_code == 3, result.output
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.fixture
def outside_airflow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which no Airflow is configured, although other tests have loaded one."""
    return lambda: monkeypatch.setattr(target, "in_airflow", lambda: False)


@pytest.mark.parametrize("command", ["status", "serve", "submit t --gpus 2 --cpus 1", "history --json"])
def test_without_a_store_the_error_has_two_lines(command: str, outside_airflow: Callable[[], None]) -> None:
    outside_airflow()
    result = CliRunner().invoke(main, command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    missing, advice = result.stderr.splitlines()
    assert missing.startswith("Error: no store is set")
    assert "--store redis://" in advice


def test_a_store_is_set_by_environment_file_or_airflow(
    outside_airflow: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = Target(None, None)
    assert target.in_airflow()
    assert bare.settings().store == "airflow://"
    outside_airflow()
    (tmp_path / "settings.toml").write_text('store = "redis://one"')
    monkeypatch.setenv("GPU_MANAGER_SETTINGS", str(tmp_path / "settings.toml"))
    assert bare.settings().store == "redis://one"
    monkeypatch.setenv("GPU_MANAGER_STORE", "redis://two")
    assert bare.settings().store == "redis://two"
    assert Target(None, None, "redis://three").settings().store == "redis://three"


def test_a_service_is_reconciled_without_a_store_of_ones_own(outside_airflow: Callable[[], None]) -> None:
    """The instance is then the setting's, or what the Airflow tells; here none answers."""
    outside_airflow()
    command = ["--url", "http://127.0.0.1:1", "reconcile", "--airflow-url", "http://127.0.0.1:1"]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "no store is set" not in result.stderr
    without_a_service = CliRunner().invoke(main, command[2:])
    assert without_a_service.stderr.startswith("Error: no store is set")


def test_a_service_that_starts_is_waited_for() -> None:
    """Nobody listens at first; then somebody does."""
    manager = GPUResourceManager.from_url("memory://")
    service = standalone(manager, persistence_of(Settings(store="memory://")), open_to="loopback")
    [port] = free_ports(1)
    servers: list[Any] = []

    def serve() -> None:
        servers.append(make_server("127.0.0.1", port, create_app(service), threaded=True))
        servers[0].serve_forever(0.01)

    late = threading.Timer(0.3, serve)
    late.start()
    assert parsed(CliRunner().invoke(main, ["--url", f"http://127.0.0.1:{port}", "status", "--json"]))
    service.watch.close()
    servers[0].shutdown()
    late.join()
    servers[0].server_close()


def test_completion_prints_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_GPU_MANAGER_COMPLETE" in CliRunner().invoke(main, ["completion", shell]).stdout


NAME = "here:d/run__2026-01-05T08:00/train"
"""Lease id with colons, at which bash would break words."""

TASK = {"dag_id": "my_dag", "run_id": "run", "task_id": "train"}


@pytest.fixture
def taken_url(embedded_redis: Any) -> str:
    """URL of a store in which NAME holds a server and `waits` waits for it."""
    with GPUResourceManager.from_url(embedded_redis.url, inventory=default_inventory()) as manager:
        manager.reset_resources()
        manager.submit(NAME, 8, server=1, labels=TASK)
        manager.submit("waits", 8, server=1)
    return str(embedded_redis.url)


@pytest.mark.slow
def test_bash_completes_ids_with_colons(taken_url: str) -> None:
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    script += f"""
        COMP_WORDS=(gpu-manager --store {taken_url} release here:d/run__2026); COMP_CWORD=4
        _gpu_manager_completion "$PROGRAM"; echo "${{COMPREPLY[*]}}"; [[ $COMP_WORDBREAKS != *:* ]]"""
    known = {**os.environ, "PROGRAM": str(Path(sys.executable).with_name("gpu-manager"))}
    done = subprocess.run(["bash", "-c", script], env=known, capture_output=True, text=True, check=True)
    assert done.stdout == f"{NAME}\n"


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("release", ["SHORT", "my_dag.train"]),
        ("stop", ["SHORT", "OTHER", "my_dag.train", "waits"]),
        ("cancel", ["OTHER", "waits"]),
        ("preempt x --for", ["OTHER", "waits"]),
        ("drain", [f"gpu-server-{number}" for number in range(4)]),
        ("submit x --server", [f"gpu-server-{number}" for number in range(4)]),
    ],
)
def test_ids_and_names_are_completed(taken_url: str, command: str, known: list[str]) -> None:
    with GPUResourceManager.from_url(taken_url) as manager:
        ids = {"SHORT": manager.named(NAME)["short_id"], "OTHER": manager.named("waits")["short_id"]}
    assert completed(f"--store {taken_url} {command}") == [ids.get(word, word) for word in known]


def test_a_name_of_several_is_not_completed_but_their_short_ids_are(taken_url: str) -> None:
    with GPUResourceManager.from_url(taken_url) as manager:
        manager.submit("again", 2, labels=TASK | {"run_id": "run2"})
        ids = [entry["short_id"] for entry in (*manager.leases(), *manager.queue())]
    assert len(ids) == 3
    assert completed(f"--store {taken_url} stop") == [*ids, "waits"]


def test_no_completed_word_is_anything_but_a_name_to_a_shell(taken_url: str) -> None:
    """Bash takes a completed word as it is: the next return key would run what somebody called a lease."""
    signs = ("$(id)", "`id`", ";id", "&id", "|id", ">f", "~root", "*", "?", "{1,2}", "!!", "'", '"', "\\")
    with GPUResourceManager.from_url(taken_url) as manager:
        for number, sign in enumerate(signs):
            manager.submit(f"{sign}begin{number}", 8, 1, server=1)
            manager.submit(f"waits{sign}", 8, 1, server=1)
        manager.submit("--all", 8, 1, server=1)
        manager.submit("né[3]", 8, 1, server=1)
        short_ids = {entry["short_id"] for entry in manager.queue()}
    assert {*completed(f"--store {taken_url} cancel")} - short_ids == {"waits", "né[3]"}


def test_nothing_is_completed_where_no_store_answers() -> None:
    assert completed("--url http://127.0.0.1:9 release") == []


def completed(line: str) -> list[str]:
    """Return what is offered as the next word of a command line."""
    words = ["gpu-manager", *line.split()]
    asked = {"COMP_WORDS": f"{' '.join(words)} ", "COMP_CWORD": str(len(words))}
    asked["_GPU_MANAGER_COMPLETE"] = "bash_complete"
    done = CliRunner().invoke(main, prog_name="gpu-manager", env=asked)
    assert done.exit_code == 0
    return [line.removeprefix("plain,") for line in done.output.splitlines() if line]


def test_every_command_has_json_and_a_help_text() -> None:
    for name, command in main.commands.items():
        assert command.help, name
        terminal = name in ("run", "shell", "attach", "logs")
        if not (terminal or isinstance(command, click.Group) or name in ("serve", "completion")):
            assert any("--json" in option.opts for option in command.params), name


@pytest.mark.parametrize("command", ["allocate", "submit", "explain"])
def test_gpus_may_be_left_out_beside_a_fraction_or_a_name(run: Run, command: str) -> None:
    """Some versions of click would refuse a command without a required option before we see it."""
    assert "[required]" not in run(command, "--help").output


def test_types_of_options_need_no_newer_click_than_the_package_asks_for() -> None:
    """`ParamType` is generic since click 8.4."""
    kinds = click.ParamType.__subclasses__()
    own = [kind for kind in kinds if kind.__module__.startswith("resource_manager.")]
    assert {kind.__name__ for kind in own} >= {"Duration", "PoolGPUs"}
    assert [kind for kind in own if "__orig_bases__" in vars(kind)] == []


def test_watch_repeats_the_state(run: Run, naps: list[float]) -> None:
    result = run("status", "--watch", "0.5", "--json")
    assert result.exit_code == 0
    assert naps == [0.5, 0.5, 0.5]
    assert [json.loads(line)["total_servers"] for line in result.stdout.splitlines()] == [4, 4, 4]
    naps.clear()
    assert "4 servers" in run("status", "--watch", "0.5").stdout


def test_rules_of_teams_are_tried_applied_and_shown(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "teams.toml"
    path.write_text("[teams.vision]\nguaranteed = 8\nlimit = 16\n")
    tried = run("diff", str(path))
    assert (tried.exit_code, tried.stdout) == (1, "+ team vision, guaranteed 8, limit 16\n")
    assert parsed(run("teams", "--json"))["teams"] == []
    assert parsed(run("apply", str(path), "--yes", "--json"))["changed"]
    assert run("apply", str(path), "--yes").stdout == "no difference\n"
    (vision,) = parsed(run("teams", "--json"))["teams"]
    assert (vision["guaranteed"], vision["limit"], vision["allocated"]) == (8, 16, 0)
    assert "vision" in run("teams").stdout
    path.write_text("[teams.vision]\nguaranteed = 99\n")
    wrong = run("apply", str(path), "--yes")
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith(f"Error: {path}:2:1: teams.vision.guaranteed: the guarantees add up to 99")
    assert wrong.stderr.count("\n") == 1


def test_each_action_of_a_reconciler_is_apart_from_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    done = [Action("here:d/r/t", "d.t vnpm", kind, "why") for kind in ActionKind]
    reconciling._show(Reconciliation(done, 0), False, once=True)
    assert all(line.endswith(" d.t vnpm: why") for line in capsys.readouterr().out.splitlines())
