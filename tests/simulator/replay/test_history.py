"""A recorded history, replayed under its own policy and order, reproduces every recorded decision."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.cli.program import main as gpu_manager
from resource_manager.core.changes import (
    AgentSeen,
    Change,
    GpuCleaned,
    Granted,
    Outcome,
    Preempting,
    Queued,
    Released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import AVOIDED_S
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.placement.policies import POLICIES, get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.settings import Settings
from resource_manager.storage.history_file import History, before_changes, collect, to_lines, write_file
from resource_manager.storage.memory import MemoryStore
from simulator.cli import main
from simulator.replay import metrics
from simulator.replay.agreement import differences
from simulator.replay.history import read_history, workload_of
from simulator.replay.replay import Replay
from tests.builders import node, redefine
from tests.simulator.refusing import assert_refused

ORDERS = ("fifo", "fifo+backfill", "priority", "srtf", "srsf+backfill", "fair_share", "tiresias")
PAIRS = [(policy, ORDERS[place % len(ORDERS)]) for place, policy in enumerate(sorted(POLICIES))]
PAIRS += [("first_fit", order) for order in ORDERS]


def random_operations(manager: GPUResourceManager, seed: int, steps: int = 200) -> None:
    """Run random operations of users and operators; task ids are used again."""
    draw = random.Random(seed)
    for step in range(steps):
        kind = draw.random()
        running, waiting = manager.leases(), manager.queue(estimated=False)
        if kind < 0.35:
            options: dict[str, Any] = {
                "team": draw.choice("abc"),
                "priority": draw.randrange(3),
                "expected_runtime": draw.choice([None, 5.0, 60.0, 600.0]),
            }
            task_id = f"s{draw.randrange(1 + step // 2)}"
            if not any(entry["task_id"] == task_id for entry in running + waiting):
                manager.submit(task_id, draw.choice([2, 2, 4, 8]), draw.randrange(1, 30), **options)
        elif kind < 0.5:
            manager.allocate_resources(f"d{step}", 2, 4, draw.choice([None, 1, 2]))
        elif kind < 0.55:
            demand = {"required_gpus": 2, "required_cpus": 2}
            wanted = [{"task_id": f"b{step}-{i}", **demand} for i in range(3)]
            manager.allocate_batch(wanted)
        elif kind < 0.9 and running:
            manager.release_resources(draw.choice(running)["task_id"], outcome="SUCCESS")
        elif kind < 0.94 and waiting:
            manager.cancel(draw.choice(waiting)["task_id"])
        elif kind < 0.97:
            manager.drain(draw.randrange(1, 4), reason="test")
        else:
            manager.resume(draw.randrange(1, 4))


def record(url: str, policy: str, order: str, path: Path, seed: int = 1) -> int:
    with GPUResourceManager.from_url(
        url, inventory=default_inventory(), policy=policy, order=order
    ) as manager:
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


def test_jobs_that_used_much_wait_in_the_live_queue_as_in_the_replay(tmp_path: Path) -> None:
    """`greedy` failed after 16 GPU-hours: asked for again, it lets a later job go first."""
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
    tmp_path: Path, redis_url: str, temporary_files: Path
) -> None:
    record(redis_url, "best_fit", "fifo", tmp_path / "same.jsonl")
    arguments = ["compare", "--policies", "first_fit,best_fit", "--workers", "1", "--json"]
    summaries = []
    for source in (redis_url, str(tmp_path / "same.jsonl")):
        result = CliRunner().invoke(main, [*arguments, "--history", source])
        assert result.exit_code == 0, result.output
        summaries.append(json.loads(result.stdout))
    assert summaries[0] == summaries[1]
    assert list(temporary_files.iterdir()) == []


def test_the_copy_of_a_store_s_history_replaces_no_file_of_the_folder(tmp_path: Path, redis_url: str) -> None:
    """It lies beside the runs, and is there only once all names are right."""
    record(redis_url, "best_fit", "fifo", tmp_path / "same.jsonl")
    archive = tmp_path / "history.jsonl"
    archive.write_text("of a year")
    options = ["compare", "--history", redis_url, "--workers", "1", "--output-dir", str(tmp_path)]
    wrong = CliRunner().invoke(main, [*options, "--policies", "worst"])
    assert (wrong.exit_code, (tmp_path / "runs").exists()) == (2, False)
    done = CliRunner().invoke(main, [*options, "--policies", "first_fit"])
    assert done.exit_code == 0, done.output
    assert archive.read_text() == "of a year"
    assert (tmp_path / "runs" / "history.jsonl").read_text() == (tmp_path / "same.jsonl").read_text()


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
    record("memory://", "first_fit", "priority+backfill", tmp_path / "history.jsonl")
    workload = ["--history", str(tmp_path / "history.jsonl"), "--json"]
    replayed = json.loads(CliRunner().invoke(main, ["replay", *workload]).stdout)
    assert (replayed["order"], replayed["recorded"]["different"]) == ("priority+backfill", 0)
    compared = CliRunner().invoke(main, ["compare", *workload, "--workers", "1", "--policies", "fgd"])
    assert [run["order"] for run in json.loads(compared.stdout)["runs"]] == ["priority+backfill"]
    help_text = CliRunner().invoke(main, ["compare", "--help"]).output
    assert "default priority+backfill for --history" in " ".join(help_text.split())


def test_a_history_without_its_first_changes_is_replayed() -> None:
    """The kept changes are replayed; earlier leases that have since ended are unknown and left out."""
    with GPUResourceManager.from_url("memory://") as manager:
        random_operations(manager, 3)
        whole = manager.history(limit=10_000)

        def history_since(after: int = 0, limit: int = 1000) -> list[Any]:
            return [entry for entry in whole if entry["version"] > max(after, 60)][:limit]

        history = collect(Mock(wraps=manager, history=history_since))
    assert history.before.version == 60
    assert len(history.changes) + history.forgotten == len(whole) - 60
    replayed = Replay(workload_of(history, "history"), get_policy("first_fit"), get_order("fifo")).run()
    assert len(replayed.job_runs) > 20


def preempting_manager(servers: str = "n") -> tuple[GPUResourceManager, list[float]]:
    """Return a manager of servers of four GPUs, four guaranteed to team `a`, and its clock."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    inventory = [node(name, 4, 64) for name in servers]
    manager = GPUResourceManager(
        Settings(store="memory://"), store=store, inventory=inventory, cluster={"order": "fifo"}
    )
    rules = Teams((Team("a", 4),), preemption=True, min_runtime_s=0.0, preemption_delay_s=5.0)
    redefine(manager, teams=rules)
    return manager, now


def with_a_preemption() -> History:
    """`long` runs from 10 to 45, the last 15 s of which it saves what it did, and from 100 to 300."""
    manager, now = preempting_manager()
    now[0] = 10.0
    manager.submit("long", 4, 1, team="b")
    now[0] = 25.0
    manager.submit("owed", 4, 1, team="a")
    now[0] = 30.0
    manager.expire_and_schedule()
    now[0] = 45.0
    manager.release("long", outcome="PREEMPTED")
    now[0] = 100.0
    manager.release("owed", outcome="SUCCESS")
    now[0] = 300.0
    manager.release("long", outcome="SUCCESS")
    return collect(manager)


def test_a_preempted_job_is_one_job_with_its_parts(tmp_path: Path) -> None:
    write_file(with_a_preemption(), tmp_path / "history.jsonl")
    workload = workload_of(read_history(str(tmp_path / "history.jsonl")), "history")
    record = Replay(workload, get_policy("first_fit"), get_order("fifo")).run()
    assert differences(record) == []
    long = record.job_runs["long"]
    assert (long.job.runtime_s, long.job.waited_s, long.ended_at) == (235.0, 55.0, 300.0)
    assert [(part.lease.granted_at, part.preempted_at, part.ended_at) for part in long.parts] == [
        (10.0, 30.0, 45.0)
    ]
    assert [until - begin for _, begin, until in metrics.spans(long, 300.0)] == [35.0, 200.0]
    arguments = ["replay", "--history", str(tmp_path / "history.jsonl"), "--order", "fifo", "--json"]
    summary = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert (summary["jobs"], summary["started"], summary["ended"]) == (2, 2, 2)
    assert (summary["recorded"]["same"], summary["recorded"]["different"]) == (2, 0)
    assert (summary["mean_wait_s"], summary["recorded_mean_wait_s"]) == (37.5, 37.5)


def test_a_job_that_is_preempted_at_another_time_takes_as_long_to_save() -> None:
    """Here `long` starts a second later, so its recorded end is not that of this lease."""
    workload = workload_of(with_a_preemption(), "history")
    first, second, *rest = workload.batches
    late = replace(workload, batches=(first, replace(second, at=11.0), *rest))
    replayed = Replay(late, get_policy("first_fit"), get_order("fifo")).run()
    [part] = replayed.job_runs["long"].parts
    assert (part.lease.granted_at, part.preempted_at, part.ended_at) == (11.0, 30.0, 45.0)
    assert replayed.job_runs["owed"].started_at == 45.0
    assert len(differences(replayed)) == 1


def test_a_job_that_is_not_preempted_in_the_replay_runs_on() -> None:
    """Without the rules `owed` waits until `long` has run for as long as its parts ran together."""
    workload = workload_of(with_a_preemption(), "history")
    without = replace(workload, batches=workload.batches[1:])
    runs = Replay(without, get_policy("first_fit"), get_order("fifo")).run().job_runs
    assert (runs["long"].parts, runs["long"].ended_at) == ([], 245.0)
    assert (runs["owed"].started_at, runs["owed"].ended_at) == (245.0, 300.0)


def test_rules_that_are_given_replace_all_that_were_recorded() -> None:
    """Also those that say nothing: nobody is preempted."""
    workload = workload_of(with_a_preemption(), "history")
    record = Replay(workload, get_policy("first_fit"), get_order("fifo"), Teams()).run()
    assert (record.job_runs["long"].parts, record.job_runs["owed"].started_at) == ([], 245.0)
    assert metrics.summarise(record)["preemptions"] == 0


def test_guarantees_are_checked_against_the_last_servers_of_a_history(tmp_path: Path) -> None:
    manager, _ = preempting_manager()
    redefine(manager, nodes=[node(name, 4, 64) for name in "no"])
    write_file(collect(manager), tmp_path / "history.jsonl")
    teams = tmp_path / "teams.toml"
    teams.write_text("[teams.a]\nguaranteed = 8\n")
    arguments = ["replay", "--history", str(tmp_path / "history.jsonl"), "--teams", str(teams)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    teams.write_text("[teams.a]\nguaranteed = 9\n")
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_gpus_of_a_watched_server_are_free_once_they_were_clean() -> None:
    """A lease that ends at another time than it did leaves them dirty for as long."""
    manager, now = preempting_manager()

    def clean(cluster: ClusterState, at: float) -> list[Change]:
        entries = cluster.node("n").cleaning.values()
        return [GpuCleaned("n", entry.gpu_id, entry.fencing_token, at) for entry in entries]

    manager.commit(lambda cluster, at: [AgentSeen("n", at)])
    now[0] = 10.0
    manager.submit("x", 4, 1)
    now[0] = 20.0
    manager.submit("y", 4, 1)
    now[0] = 50.0
    manager.release("x", outcome="SUCCESS")
    now[0] = 57.0
    manager.commit(clean)
    workload = workload_of(collect(manager), "history")
    as_it_was = Replay(workload, get_policy("first_fit"), get_order("fifo")).run()
    assert differences(as_it_was) == []
    assert as_it_was.job_runs["y"].started_at == 57.0
    late = tuple(replace(batch, at=12.0) if batch.at == 10.0 else batch for batch in workload.batches)
    shifted = Replay(replace(workload, batches=late), get_policy("first_fit"), get_order("fifo")).run()
    assert (shifted.job_runs["x"].ended_at, shifted.job_runs["y"].started_at) == (52.0, 59.0)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.NOT_STARTED])
def test_a_server_on_which_a_job_did_not_start_is_avoided_in_the_replay_too(outcome: Outcome) -> None:
    """By the next request of its id, and by its own, which waits again."""
    manager, now = preempting_manager(servers="no")
    manager.submit("t", 4, 1)
    now[0] = 10.0
    manager.release("t", outcome=outcome, failed_nodes=["n"])
    if outcome == Outcome.FAILED:
        manager.submit("t", 4, 1)
    workload = workload_of(collect(manager), "history")
    record = Replay(workload, get_policy("first_fit"), get_order("fifo")).run()
    assert differences(record) == []
    [*_, tried_again] = record.job_runs.values()
    assert [member.node for member in tried_again.members] == ["o"]


def test_a_server_is_tried_again_once_it_is_no_longer_avoided() -> None:
    """Ten minutes after the failed start, though nothing else happens at that time."""
    manager, now = preempting_manager(servers="no")
    for name, gpus in (("s", 1), ("u", 1), ("t", 2), ("long", 3)):
        manager.submit(name, gpus, 1)
        now[0] += 5.0
    manager.release("t", outcome="FAILED", failed_nodes=["n"])
    manager.submit("t", 2, 1)
    now[0] = 5000.0
    manager.release("long", outcome="SUCCESS")
    workload = workload_of(collect(manager), "history")
    runs = Replay(workload, get_policy("least_loaded"), get_order("fifo")).run().job_runs
    assert [runs[name].started_at for name in ("t", "t#2")] == [10.0, 20.0 + AVOIDED_S]


def test_a_job_before_a_server_was_added_is_placed_on_those_of_its_time() -> None:
    manager, now = preempting_manager()
    manager.submit("x", 4, 1)
    now[0] = 10.0
    manager.submit("y", 4, 1)
    now[0] = 20.0
    more = Node("m", 1, {"cpus": 64}, tuple(Gpu(i) for i in range(4)))
    redefine(manager, nodes=(*manager.inventory, more))
    workload = workload_of(collect(manager), "history")
    assert [node.name for node in workload.start.nodes] == ["n"]
    record = Replay(workload, get_policy("first_fit"), get_order("fifo")).run()
    assert differences(record) == []
    assert record.job_runs["y"].started_at == 20.0


def test_a_lease_that_is_older_than_the_history_begins_without_what_the_history_tells_of_it() -> None:
    whole = with_a_preemption()
    cluster = ClusterState.from_snapshot(whole.before)
    for change in whole.changes:
        cluster.apply(change)
        if isinstance(change, Preempting):
            break
    history = before_changes(cluster.snapshot(), [change])
    [lease] = history.before.leases
    assert (lease.lease_id, lease.preempted_by, lease.preempt_until) == ("long", "", math.inf)


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
        ("{broken\n", ":1: not JSON: Expecting property name enclosed in double quotes, at column 2"),
        ("SNAPSHOT\n{}\n", ":2: not a change"),
        ('SNAPSHOT\n{"change":"released","lease_id":"x"}\n', ":2: not a released change: fencing_token"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        first = next(to_lines(collect(manager)))
    path = tmp_path / "history.jsonl"
    path.write_text(text.replace("SNAPSHOT", first))
    assert_refused(CliRunner().invoke(main, ["replay", "--history", str(path), "--json"]), message)


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
    ("source", "message"),
    [
        ("sqlite:///{folder}/none.db", "none.db: no such file"),
        ("memory://", "--history reads a file, Redis or a database, not memory://"),
        ("airflow://", "--history reads a file, Redis or a database, not airflow://"),
        ("https://gpu.example", "--history reads a file, Redis or a database, not https://"),
    ],
)
def test_what_is_no_history_is_named_and_not_made(tmp_path: Path, source: str, message: str) -> None:
    for command in ("replay", "compare"):
        options = ["--history", source.format(folder=tmp_path), "--output-dir", str(tmp_path / "out")]
        assert_refused(CliRunner().invoke(main, [command, *options]), message)
        assert not list(tmp_path.iterdir())


def test_a_lease_that_is_granted_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    record("memory://", "first_fit", "fifo", path)
    first, *rest = map(json.loads, path.read_text().splitlines())
    granted = next(change for change in rest if change["change"] == "granted")
    twice = [first, granted | {"version": 1}, granted | {"version": 2}]
    path.write_text("\n".join(map(json.dumps, twice)))
    result = CliRunner().invoke(main, ["replay", "--history", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f":3: the fencing_token {granted['lease']['fencing_token']} was granted before" in result.stderr


def test_a_history_of_no_server_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with GPUResourceManager.from_url("memory://") as manager:
        snapshot = json.loads(next(to_lines(collect(manager))))
    snapshot["snapshot"]["nodes"] = []
    queued = {
        "version": 1,
        "change": "queued",
        "request": {"lease_id": "x", "gpus": 1},
        "queued_at": 5.0,
        "sequence": 1,
        "at": 5.0,
    }
    path.write_text(f"{json.dumps(snapshot)}\n{json.dumps(queued)}\n")
    result = CliRunner().invoke(main, ["replay", "--history", str(path), "--output-dir", str(tmp_path / "o")])
    assert result.exit_code == 0, result.output
    assert "No job starts" in (tmp_path / "o" / "report.html").read_text()


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
    assert_refused(CliRunner().invoke(main, ["replay", "--history", str(path), "--json"]), message)


@pytest.mark.parametrize("policies", ["first_fit", "first_fit,tiresias"])
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_history_without_jobs_is_drawn_without_a_warning(
    tmp_path: Path, policies: str, is_changed: bool
) -> None:
    with GPUResourceManager.from_url("memory://", inventory=default_inventory()) as manager:
        if is_changed:
            manager.drain(1, reason="test")
        write_file(collect(manager), tmp_path / "history.jsonl")
    arguments = ["compare", "--history", str(tmp_path / "history.jsonl"), "--workers", "1"]
    arguments += ["--policies", policies]
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
    who, advice = result.stdout.splitlines()[:2]
    assert who.startswith("Under first_fit, priority+backfill these wait less: jobs of ")
    assert advice.startswith("Change from first_fit, priority to first_fit, priority+backfill: on this")


def test_an_end_without_a_grant_is_left_out(tmp_path: Path) -> None:
    """As in a file whose first changes were cut off."""
    record("memory://", "first_fit", "fifo", tmp_path / "history.jsonl")
    first, *rest = (tmp_path / "history.jsonl").read_text().splitlines()
    end = next(line for line in rest if json.loads(line)["change"] == "released")
    (tmp_path / "history.jsonl").write_text(f"{first}\n{end}")
    result = CliRunner().invoke(main, ["replay", "--history", str(tmp_path / "history.jsonl"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["jobs"] == 0
