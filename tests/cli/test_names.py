"""What people call leases, in every command: on a service and directly on a store."""

from __future__ import annotations

import json
import logging
import re

import pytest
from click.testing import Result

from tests.cli.targets import Run


def names(*parts: str) -> tuple[str, ...]:
    return tuple(f"--label={part}" for part in parts)


def submit(run: Run, dag_run: int, index: int = -1, *options: str) -> str:
    """Submit a task of Airflow; return its short id."""
    lease_id = f"here:my_dag/run{dag_run}/train/{index}"
    labels = names("dag_id=my_dag", f"run_id=run{dag_run}", "task_id=train", f"map_index={index}")
    gpus = () if "--gpus" in options else ("--gpus", "2")
    found = json.loads(run("submit", lease_id, *gpus, *labels, *options, "--json").stdout)
    assert re.fullmatch("[a-z0-9]{4}", found["short_id"])
    return str(found["short_id"])


def refused(result: Result) -> str:
    """Return the line with which a command was refused."""
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("Error: ")


def test_tables_have_display_names_and_short_ids_in_80_columns(run: Run) -> None:
    ids = [submit(run, number) for number in (1, 2)] + [submit(run, 1, index) for index in (0, 1)]
    waits = submit(run, 3, -1, "--gpus", "8", "--server", "0")
    for command in ("leases", "status"):
        shown = run(command).stdout
        assert max(map(len, shown.splitlines())) <= 80
        assert shown.count("my_dag.train") >= 4
        assert all(short in shown for short in ids)
        assert "my_dag.train[1]" in shown
        assert "here:my_dag" not in shown
    queue = run("queue").stdout
    assert (waits in queue, "here:my_dag" in queue) == (True, False)
    assert [lease["task_id"][:12] for lease in json.loads(run("leases", "--json").stdout)] == [
        "here:my_dag/"
    ] * 4


def test_every_command_takes_every_name(run: Run) -> None:
    first, second = submit(run, 1, 3), submit(run, 2, 4)
    big = submit(run, 3, -1, "--gpus", "8", "--server", "0")
    for name in (first, "my_dag.train[3]", "here:my_dag/run1/train/3"):
        assert run("renew", name).stdout.startswith(f"my_dag.train[3] {first}: GPUs 0,1 ")
    tried = run("preempt", second, "--for", big, "--dry-run")
    assert (tried.exit_code, tried.stdout) == (1, "")
    assert f"my_dag.train {big} would not start if my_dag.train[4] {second} ended" in refused(tried)
    assert run("cancel", "my_dag.train").stdout == f"my_dag.train {big}: cancelled\n"
    assert run("release", "my_dag.train[3]").stdout == f"my_dag.train[3] {first}: released\n"
    assert run("stop", second).stdout == f"my_dag.train[4] {second}: released, it had no job\n"
    assert json.loads(run("leases", "--json").stdout) == []


def test_where_several_match_they_are_listed_and_none_is_touched(run: Run) -> None:
    ids = [submit(run, number) for number in (1, 2, 3, 4)]
    listed = ", ".join(f"my_dag.train {short}" for short in ids)
    for command in ("release", "renew", "preempt", "stop", "logs", "attach"):
        assert refused(run(command, "my_dag.train")) == (
            f"'my_dag.train' names 4: {listed}; say which by its short id"
        )
        kind = "lease" if command in ("release", "renew", "preempt") else "lease or pending request"
        assert refused(run(command, "train")) == f"no {kind} is called 'train'; alike: {listed}"
    assert len(json.loads(run("leases", "--json").stdout)) == 4
    assert run("release", ids[2]).exit_code == 0
    assert refused(run("release", ids[2])) == f"no lease is called '{ids[2]}'"


def test_the_history_names_what_has_ended(run: Run) -> None:
    first = submit(run, 1)
    run("release", first)
    again = submit(run, 1)
    run("release", again, "--outcome", "SUCCESS")
    assert first != again, "another lease of the same task"
    shown = [line.split("│")[-3].strip() for line in run("history", "--wide").stdout.splitlines()[3:-1]]
    words = [line.split("│")[-4].strip() for line in run("history", "--wide").stdout.splitlines()[3:-1]]
    assert words == ["grant", "release", "grant", "release"], "as --what takes them"
    assert shown == [
        f"my_dag.train {first} on gpu-server-0, GPUs 0, 1",
        f"my_dag.train {first}",
        f"my_dag.train {again} on gpu-server-0, GPUs 0, 1",
        f"my_dag.train {again} SUCCESS",
    ]


@pytest.mark.parametrize("name", ["bbbb", "dag.task[1]", "here:dag/run/task"])
def test_what_nobody_is_called_is_told_in_the_caller_s_words(run: Run, name: str) -> None:
    assert refused(run("release", name)) == f"no lease is called '{name}'"
    assert refused(run("cancel", name)) == f"no pending request is called '{name}'"


def test_a_request_is_explained_by_each_of_its_names(run: Run) -> None:
    holder = submit(run, 1, 3, "--gpus", "8", "--server", "0")
    waits = submit(run, 2, 4, "--gpus", "8", "--server", "0")
    for name in (waits, "my_dag.train[4]", "here:my_dag/run2/train/4"):
        told = run("explain", name)
        assert (told.exit_code, told.stdout.startswith("Not now: ")) == (1, True)
        assert " ".join(told.stdout.split()).count(f"my_dag.train[3] {holder}") == 1
    assert json.loads(run("explain", waits, "--json").stdout)["task_id"] == "here:my_dag/run2/train/4"
    several = json.loads(run("explain", "my_dag.train", "--json").stdout)
    assert several["task_id"] == "here:my_dag/run2/train/4", "of a lease and a request, what waits"
    neither = run("explain")
    assert (neither.exit_code, neither.stderr.partition(",")[0]) == (2, "Error: say a NAME")
    assert "the task has a lease already" in run("explain", holder).stdout
    both = run("explain", waits, "--gpus", "2")
    assert both.exit_code == 2
    assert both.stderr.strip() == "Error: NAME and --gpus: say either a name or what is asked for"


def test_no_log_that_a_person_reads_is_without_names(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    package = logging.getLogger("resource_manager")
    package.addHandler(caplog.handler)  # a command gives its logs to no other
    with caplog.at_level("INFO", "resource_manager"):
        run("release", submit(run, 1))
    package.removeHandler(caplog.handler)
    told = [record.getMessage() for record in caplog.records if "my_dag" in record.getMessage()]
    assert told
    assert all("here:my_dag" not in line for line in told), told


def test_a_command_gives_its_logs_to_none_who_prints_all(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """As Airflow does once the launcher of a job has loaded it."""
    with caplog.at_level("INFO"):
        run("release", submit(run, 1))
    assert not [record for record in caplog.records if record.name.startswith("resource_manager")]
    assert logging.getLogger("resource_manager").propagate, "again"
