"""A recorded history, replayed under its own policy and order, reproduces every recorded decision."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.cli.commands import main as gpu_manager
from resource_manager.core.changes import Granted, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.manager import runtime_learner
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.policies import POLICIES, get_policy
from resource_manager.scheduling.queue_order import get_order
from resource_manager.settings import Settings
from resource_manager.storage.history_file import History, collect, to_lines
from resource_manager.storage.memory import MemoryStore
from simulator.cli import main
from simulator.replay.history import read_history, workload_of
from simulator.replay.replay import Replay, differences

ORDERS = ("fifo", "fifo+backfill", "priority", "srtf", "srsf+backfill", "fair_share", "tiresias")
PAIRS = [(policy, ORDERS[place % len(ORDERS)]) for place, policy in enumerate(sorted(POLICIES))]
PAIRS += [("first_fit", order) for order in ORDERS]


def random_operations(manager: GPUResourceManager, seed: int, steps: int = 200) -> None:
    """Run random operations of users and operators; task ids are used again.

    Where the order backfills, every request has an expected runtime: a replay has no learnt runtimes.
    """
    draw = random.Random(seed)
    known: dict[str, Any] = (
        {"expected_runtime": 60.0}
        if manager.look(lambda cluster, now: manager.order(cluster)).backfill
        else {}
    )
    runtimes = [5.0, 60.0, 600.0] if known else [None, 5.0, 60.0, 600.0]
    for step in range(steps):
        kind = draw.random()
        running, waiting = manager.leases(), manager.queue()
        if kind < 0.35:
            options: dict[str, Any] = {
                "team": draw.choice("abc"),
                "priority": draw.randrange(3),
                "expected_runtime": draw.choice(runtimes),
            }
            task_id = f"s{draw.randrange(1 + step // 2)}"
            if not any(entry["task_id"] == task_id for entry in running + waiting):
                manager.submit(task_id, draw.choice([2, 2, 4, 8]), draw.randrange(1, 30), **options)
        elif kind < 0.5:
            manager.allocate_resources(f"d{step}", 2, 4, draw.choice([None, 1, 2]), **known)
        elif kind < 0.55:
            demand = {"required_gpus": 2, "required_cpus": 2, **known}
            wanted = [{"task_id": f"b{step}-{i}", **demand} for i in range(3)]
            manager.allocate_batch(wanted)
        elif kind < 0.9 and running:
            manager.release_resources(draw.choice(running)["task_id"], outcome="SUCCESS")
        elif kind < 0.94 and waiting:
            manager.cancel(draw.choice(waiting)["task_id"])
        elif kind < 0.97:
            manager.drain(draw.randrange(1, 4), reason="test")
        else:
            manager.restore(draw.randrange(1, 4))


def record(url: str, policy: str, order: str, path: Path, seed: int = 1) -> int:
    with GPUResourceManager.from_url(url, policy=policy, order=order) as manager:
        random_operations(manager, seed)
        lines = list(to_lines(collect(manager)))
    path.write_text("\n".join(lines) + "\n")
    return len(lines) - 1


@pytest.mark.parametrize(("policy", "order"), PAIRS)
def test_a_replay_reproduces_the_recorded_decisions(tmp_path: Path, policy: str, order: str) -> None:
    path = tmp_path / "history.jsonl"
    assert record("memory://", policy, order, path) > 100
    workload = workload_of(read_history(str(path)), "history")
    replayed = Replay(workload, get_policy(policy), get_order(order)).run()
    assert differences(replayed) == []
    assert sum(job_run.started_at is not None for job_run in replayed.job_runs.values()) > 40


def test_jobs_that_used_much_wait_in_the_live_queue_as_in_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`greedy` failed after 16 GPU-hours: asked for again, it lets a later job go first."""
    monkeypatch.setattr(runtime_learner, "LEARN_EVERY_S", 0.0)
    now = [0.0]
    settings, rules = Settings(store="memory://"), {"order": "tiresias"}
    store, inventory = MemoryStore(clock=lambda: now[0]), default_inventory(1, 8, 64)
    with GPUResourceManager(settings, store=store, inventory=inventory, cluster=rules) as manager:
        manager.submit("greedy", 8, 1, expected_runtime=60.0)
        now[0] = 7200.0
        manager.release_resources("greedy", outcome="FAILED")
        manager.submit("other", 8, 1, expected_runtime=60.0)
        manager.submit("greedy", 8, 1, expected_runtime=60.0)
        manager.submit("small", 8, 1, expected_runtime=60.0)
        assert [entry["task_id"] for entry in manager.queue()] == ["small", "greedy"]
        for task_id in ("other", "small", "greedy"):
            now[0] += 60.0
            assert manager.release_resources(task_id, outcome="SUCCESS")
        lines = list(to_lines(collect(manager)))
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(lines) + "\n")
    workload = workload_of(read_history(str(path)), "history")
    for order, same in (("tiresias", True), ("fifo", False)):
        replayed = Replay(workload, get_policy("first_fit"), get_order(order)).run()
        assert (differences(replayed) == []) is same


def test_a_history_is_read_from_redis(tmp_path: Path, redis_url: str) -> None:
    """The command reads the store itself; the exported file and the store give the same result."""
    record(redis_url, "best_fit", "fifo", tmp_path / "same.jsonl")
    path = tmp_path / "history.jsonl"
    exported = CliRunner().invoke(
        gpu_manager, ["--store", redis_url, "history", "--export", str(path), "--json"]
    )
    assert exported.exit_code == 0, exported.output
    assert path.read_text() == (tmp_path / "same.jsonl").read_text()
    summaries = []
    for source in (redis_url, str(path)):
        arguments = ["replay", "--history", source, "--policy", "best_fit", "--order", "fifo", "--json"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        summaries.append({**json.loads(result.stdout), "wall_s": 0})
    assert summaries[0] == summaries[1]
    recorded = summaries[0]["recorded"]
    assert recorded["different"] == 0
    assert recorded["same"] == recorded["decisions"] > 40


def test_a_comparison_on_a_store_leaves_no_temporary_copy(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(redis_url, "best_fit", "fifo", tmp_path / "same.jsonl")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    arguments = ["compare", "--policies", "first_fit,best_fit", "--workers", "1", "--json"]
    summaries = []
    for source in (redis_url, str(tmp_path / "same.jsonl")):
        result = CliRunner().invoke(main, [*arguments, "--history", source])
        assert result.exit_code == 0, result.output
        summaries.append(json.loads(result.stdout))
    assert summaries[0] == summaries[1]
    assert list(temporary.iterdir()) == []


def test_another_policy_decides_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    record("memory://", "first_fit", "fifo", path)
    result = CliRunner().invoke(
        main, ["replay", "--history", str(path), "--policy", "least_loaded", "--json"]
    )
    recorded = json.loads(result.stdout)["recorded"]
    assert recorded["different"] > 0
    assert recorded["earlier"] >= len(recorded["started_earlier"])


def test_ones_own_history_is_replayed_in_the_live_default_order(tmp_path: Path) -> None:
    record("memory://", "first_fit", "priority", tmp_path / "history.jsonl")
    workload = ["--history", str(tmp_path / "history.jsonl"), "--json"]
    replayed = json.loads(CliRunner().invoke(main, ["replay", *workload]).stdout)
    assert (replayed["order"], replayed["recorded"]["different"]) == ("priority", 0)
    compared = CliRunner().invoke(main, ["compare", *workload, "--workers", "1", "--policies", "fgd"])
    assert [run["order"] for run in json.loads(compared.stdout)["runs"]] == ["priority"]
    help_text = CliRunner().invoke(main, ["compare", "--help"]).output
    assert "default priority for --history" in " ".join(help_text.split())


def test_a_history_without_its_first_changes_is_replayed(tmp_path: Path) -> None:
    """The kept changes are replayed; earlier leases that have since ended are unknown and left out."""
    with GPUResourceManager.from_url("memory://") as manager:
        random_operations(manager, 3)
        whole = manager.history(limit=10_000)
        manager.history = (
            lambda after=0, limit=1000: [  # type: ignore[method-assign]
                entry for entry in whole if entry["version"] > max(after, 60)
            ][:limit]
        )
        history = collect(manager)
    assert history.before.version == 60
    assert len(history.changes) + history.forgotten == len(whole) - 60
    replayed = Replay(workload_of(history, "history"), get_policy("first_fit"), get_order("fifo")).run()
    assert len(replayed.job_runs) > 20


def test_the_run_time_of_a_job_excludes_its_wait() -> None:
    node = Node("a", 0, {}, (Gpu(0), Gpu(1)))
    request = Request("waited", 2)
    lease = Lease(request, (Placement("a", (0, 1)),), 1, 10.0, 99.0, queued_at=0.0)
    changes = (Queued(request, 0.0, 1, 0.0), Granted(lease, 10.0), Released("waited", 1, 40.0))
    [job] = workload_of(History(ClusterState([node]).snapshot(), changes), "history").jobs
    assert (job.submitted_at, job.runtime_s) == (0.0, 30.0)


def test_commits_of_one_time_stay_separate() -> None:
    """The job that ends in the second commit was granted in the first, so it must have arrived by then."""
    node = Node("a", 0, {}, (Gpu(0), Gpu(1)))
    first, second = (
        Lease(Request(name, 2), (Placement("a", (0, 1)),), token, 5.0, 90.0)
        for token, name in enumerate("xy", 1)
    )
    changes = (Granted(first, 5.0), Released("x", 1, 5.0), Granted(second, 5.0))
    workload = workload_of(History(ClusterState([node]).snapshot(), changes), "history")
    replayed = Replay(workload, get_policy("first_fit"), get_order("fifo")).run()
    assert differences(replayed) == []
    assert [job_run.ended_at for job_run in replayed.job_runs.values()] == [5.0, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; expected a history export"),
        ('{"change":"granted"}\n', ":1: the first line of a history must be the state before it: "),
        ('{"snapshot":{"format":99}}\n', ":1: the snapshot was written in format 99"),
        ("{broken\n", ":1: not JSON"),
        ("SNAPSHOT\n{}\n", ":2: not a change"),
        ('SNAPSHOT\n{"change":"released","lease_id":"x"}\n', ":2: not a released change: fencing_token"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        first = next(to_lines(collect(manager)))
    path = tmp_path / "history.jsonl"
    path.write_text(text.replace("SNAPSHOT", first))
    result = CliRunner().invoke(main, ["replay", "--history", str(path), "--json"])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("at", ["NaN", "1e308", "-1"])
def test_a_change_with_an_invalid_time_is_named(tmp_path: Path, at: str) -> None:
    record("memory://", "first_fit", "fifo", tmp_path / "history.jsonl")
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    values = json.loads(lines[1]) | {"at": float(at)}
    (tmp_path / "history.jsonl").write_text("\n".join([lines[0], json.dumps(values)]))
    result = CliRunner().invoke(main, ["replay", "--history", str(tmp_path / "history.jsonl"), "--json"])
    assert result.exit_code == 2
    assert f"history.jsonl:2: at is {float(at)}, not a time" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ((0, 1, 2, 5), ":5: version is 6 after 3; lines are missing or in another order"),
        ((1, 0, 2, 3), ":3: version is 1 after 2; lines are missing or in another order"),
        ((0, 1, 1, 2), ":4: version is 2 after 2; lines are missing or in another order"),
    ],
)
def test_missing_or_reordered_lines_are_named(tmp_path: Path, places: tuple[int, ...], message: str) -> None:
    path = tmp_path / "history.jsonl"
    record("memory://", "first_fit", "fifo", path)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, *(rest[place] for place in places)]))
    result = CliRunner().invoke(main, ["replay", "--history", str(path), "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_history_without_changes_is_drawn_without_a_warning(tmp_path: Path) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        (tmp_path / "history.jsonl").write_text(next(to_lines(collect(manager))))
    arguments = ["compare", "--history", str(tmp_path / "history.jsonl"), "--workers", "1"]
    result = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / "report.html")])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("There is no job in this workload")


def test_the_sample_history_of_the_docs_is_what_the_command_writes(tmp_path: Path) -> None:
    """Byte by byte; under the live defaults it replays as recorded, and another order makes a difference."""
    result = CliRunner().invoke(main, ["sample", "--output-dir", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "sample-history.jsonl"
    shipped = Path(__file__).parents[3] / "docs" / "simulators" / "sample-history.jsonl"
    assert path.read_bytes() == shipped.read_bytes()
    result = CliRunner().invoke(main, ["replay", "--history", str(path), "--json"])
    assert json.loads(result.stdout)["recorded"]["same"] == 400
    orders = ["--orders", "priority,priority+backfill", "--policies", "first_fit", "--workers", "1"]
    result = CliRunner().invoke(main, ["compare", "--history", str(path), *orders])
    assert result.stdout.startswith(
        "Change from first_fit, priority to first_fit, priority+backfill: on this"
    )


def test_an_end_without_a_grant_is_left_out(tmp_path: Path) -> None:
    """As in a file whose first changes were cut off."""
    record("memory://", "first_fit", "fifo", tmp_path / "history.jsonl")
    first, *rest = (tmp_path / "history.jsonl").read_text().splitlines()
    end = next(line for line in rest if json.loads(line)["change"] == "released")
    (tmp_path / "history.jsonl").write_text(f"{first}\n{end}")
    result = CliRunner().invoke(main, ["replay", "--history", str(tmp_path / "history.jsonl"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["jobs"] == 0
