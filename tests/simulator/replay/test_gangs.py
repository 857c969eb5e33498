"""Jobs on several servers in a replay: stated, split or recorded; all members start and end together."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from resource_manager import GPUResourceManager
from resource_manager.core.cluster import ClusterState
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.settings import Settings
from resource_manager.storage.history_file import History, collect, to_lines
from resource_manager.storage.memory import MemoryStore
from simulator.cli import main
from simulator.replay import metrics
from simulator.replay.agreement import differences
from simulator.replay.comparison import Source, case_from_values, cases_as_values
from simulator.replay.history import read_history, workload_of
from simulator.replay.job_runs import Record
from simulator.replay.replay import Replay
from simulator.replay.workload import Workload, read_workload
from tests.simulator.refusing import assert_refused

NODES = "node,gpus,cpus,gpu_type\na,8,64,A100\nb,8,64,A100\nc,4,64,T4\n"
JOBS = """job,submit_s,runtime_s,gpus,nodes,cpus
solo,0,100,8,,
gang,10,50,8,2,
late,20,30,4,1,
"""


def files(folder: Path, jobs: str, nodes: str = NODES) -> tuple[Path, Path]:
    (folder / "nodes.csv").write_text(nodes)
    (folder / "jobs.csv").write_text(jobs)
    return folder / "nodes.csv", folder / "jobs.csv"


def command(folder: Path, *more: str, name: str = "replay") -> Result:
    paths = ["--nodes", str(folder / "nodes.csv"), "--jobs", str(folder / "jobs.csv")]
    return CliRunner().invoke(main, [name, "--trace", "csv", *paths, "--json", *more])


def play(workload: Workload, order: str = "fifo") -> Record:
    return Replay(workload, first_fit, get_order(order)).run()


def test_the_members_of_a_job_start_and_end_together(tmp_path: Path) -> None:
    """b is free from the beginning and stays idle until a is, too; `late` waits behind, though c is free."""
    record = play(read_workload(*files(tmp_path, JOBS)))
    gang, late = record.job_runs["gang"], record.job_runs["late"]
    assert (gang.started_at, gang.ended_at) == (100, 150)
    assert [(member.node, len(member.gpu_ids)) for member in gang.members] == [("a", 8), ("b", 8)]
    assert late.started_at == 100


def test_backfill_delays_no_gang(tmp_path: Path) -> None:
    """`late` and then `short` have b, which the gang needs from 100 on; `long` would have it longer."""
    jobs = JOBS + "long,30,200,8,,\nshort,40,50,8,,\n"
    record = play(read_workload(*files(tmp_path, jobs)), "fifo+backfill")
    starts = {name: job_run.started_at for name, job_run in record.job_runs.items()}
    assert starts == {"solo": 0, "gang": 100, "late": 20, "long": 150, "short": 50}


def test_every_member_counts_as_in_use(tmp_path: Path) -> None:
    """Of 20 GPUs over 150 s: 8 for 100 s, 16 for 50 s and 4 for 30 s; the gang's completion time is 140 s."""
    record = play(read_workload(*files(tmp_path, JOBS)))
    summary = metrics.summarise(record)
    assert summary["allocated_percent"] == pytest.approx(100 * (800 + 800 + 120) / (20 * 150), abs=0.01)
    assert summary["peak_allocated_percent"] == 100
    assert summary["occupied_nodes_percent"] == pytest.approx(100 * (100 + 2 * 50 + 30) / (3 * 150), abs=0.01)
    assert summary["mean_jct_s"] == pytest.approx((100 + 140 + 110) / 3, abs=0.001)
    names, shares, _, _ = metrics.busy_shares(record, bins=3)
    assert dict(zip(names, shares, strict=True)) == {
        "a": [1, 1, 1],
        "b": [0, 0, 1],
        "c": [0, 0, pytest.approx(0.6)],
    }


def test_the_files_written_name_every_member(tmp_path: Path) -> None:
    files(tmp_path, JOBS)
    result = command(tmp_path, "--output-dir", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    with (tmp_path / "o" / "jobs.csv").open() as file:
        rows = {row["job"]: (row["node"], row["gpu_ids"]) for row in csv.DictReader(file)}
    assert rows["gang"] == ("a;b", "0 1 2 3 4 5 6 7;0 1 2 3 4 5 6 7")
    assert rows["late"] == ("c", "0 1 2 3")
    assert (tmp_path / "o" / "timeline.png").exists()


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_states_nodes_too(tmp_path: Path, suffix: str) -> None:
    nodes, jobs = files(tmp_path, JOBS)
    with jobs.open() as file:
        rows = list(csv.DictReader(file))
    path = tmp_path / f"jobs.{suffix}"
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    assert [job.request.nodes for job in read_workload(nodes, path).jobs] == [1, 2, 1]
    assert read_workload(nodes, path).batches == read_workload(nodes, jobs).batches


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ("x,0,1,16,,", [], "jobs.csv:2: job 'x' never fits: no server could ever satisfy 16 GPUs"),
        ("x,0,1,16,,", [], "nodes is missing, the number of nodes for a job on several"),
        ("x,0,1,16,,", [], "split such jobs with --split-large-jobs"),
        ("x,0,1,8,3,", [], "jobs.csv:2: job 'x' never fits: a gang of 3 needs 3 servers with"),
        ("x,0,1,16,2,", [], "jobs.csv:2: job 'x' never fits: "),
        ("x,0,1,1,0,", [], "jobs.csv:2: nodes must be 1 or more, got 0"),
        ("x,0,1,1,two,", [], "jobs.csv:2: nodes is 'two', not a whole number"),
        ("x,0,1,11,,", ["--split-large-jobs"], "and no equal parts of its 11 GPUs fit on different nodes"),
        ("x,0,1,32,,", ["--split-large-jobs"], "and no equal parts of its 32 GPUs fit on different nodes"),
        ("x,0,1,16,2,", ["--split-large-jobs"], "jobs.csv:2: job 'x' never fits: "),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, job: str, options: list[str], message: str) -> None:
    files(tmp_path, f"{JOBS.splitlines()[0]}\n{job}\n")
    for name in ("replay", "compare"):
        assert_refused(command(tmp_path, *options, name=name), message)


@pytest.mark.parametrize(
    ("job", "nodes", "gpus", "cpus"),
    [
        ("x,0,1,16,,20,", 2, 8, 10),
        ("x,0,1,16,,5,", 2, 8, 2.5),
        ("x,0,1,10,,,", 2, 5, None),
        ("x,0,1,9,,,", 3, 3, None),  # c has fewer than 4.5, and 4.5 is no number of GPUs
        ("x,0,1,12,,130,", 3, 4, 130 / 3),  # two members would need 65 CPUs each
        ("x,0,1,8,,,", 1, 8, None),
        ("x,0,1,4,2,,T4|A100", 2, 4, None),
        ("x,0,1,16,,,A100", 2, 8, None),
    ],
)
def test_a_large_job_is_split_into_the_fewest_equal_members_that_fit(
    tmp_path: Path, job: str, nodes: int, gpus: int, cpus: float | None
) -> None:
    header = "job,submit_s,runtime_s,gpus,nodes,cpus,gpu_types"
    paths = files(tmp_path, f"{header}\n{job}\n")
    [found] = read_workload(*paths, split_large_jobs=True).jobs
    assert (found.request.nodes, found.request.gpus) == (nodes, gpus)
    assert found.request.resources.get("cpus") == cpus
    assert play(read_workload(*paths, split_large_jobs=True)).job_runs["x"].ended_at == 1


def test_a_split_trace_is_compared_and_sent_to_other_machines(tmp_path: Path) -> None:
    files(tmp_path, "job,submit_s,runtime_s,gpus\nx,0,60,16\ny,0,60,8\n")
    policies = ["--policies", "first_fit,tiresias", "--workers", "1"]
    result = command(tmp_path, "--split-large-jobs", *policies, name="compare")
    assert result.exit_code == 0, result.output
    assert [row["ended"] for row in json.loads(result.stdout)["rows"]] == [2, 2]
    source = Source("jobs", ("nodes.csv", "jobs.csv"), split_large_jobs=True)
    [values] = cases_as_values(source, ["first_fit"], ["fifo"], [1])
    assert case_from_values(json.loads(json.dumps(values))).source == source
    assert source.fingerprint() != Source("jobs", ("nodes.csv", "jobs.csv")).fingerprint()


def test_a_gang_is_preempted_as_a_whole(tmp_path: Path) -> None:
    """In rounds, `solo` and `gang` take turns; the timeline has the gang on both servers."""
    files(tmp_path, "job,submit_s,runtime_s,gpus,nodes\nsolo,0,300,8,\ngang,0,300,8,2\n", NODES)
    result = command(tmp_path, "--policy", "gandiva_fair", "--output-dir", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["ended"] == 2
    assert (tmp_path / "o" / "timeline.png").exists()
    with (tmp_path / "o" / "jobs.csv").open() as file:
        assert {row["job"]: row["gpus"] for row in csv.DictReader(file)}["gang"] == "16"


# ---- recorded gangs ----


def recorded(policy: str, order: str, seed: int) -> History:
    """Return the history of random gangs and single tasks on four servers, with remainders.

    A lease id is asked for again, also while a remainder of its last gang is quarantined.
    """
    now, draw = [0.0], random.Random(seed)
    settings, rules = Settings(store="memory://"), {"policy": policy, "order": order}
    store = MemoryStore(clock=lambda: now[0])
    inventory = [replace(node, address=node.name) for node in default_inventory(4, 8, 64)]
    with GPUResourceManager(settings, store=store, inventory=inventory, cluster=rules) as manager:
        remainders: list[tuple[str, int, list[int]]] = []
        for _ in range(250):
            now[0] += draw.choice([1.0, 2.0, 5.0])
            kind = draw.random()
            left = {token for _, token, _ in remainders}
            running = [lease for lease in manager.leases() if lease["fencing_token"] not in left]
            pending = manager.queue()
            known = {entry["task_id"] for entry in (*running, *pending)}
            if kind < 0.5:
                name = f"t{draw.randrange(12)}"
                nodes = draw.choice([1, 1, 2, 3, 4])
                spread = draw.choice(["servers", "pack"]) if nodes > 1 else "servers"
                if name not in known:
                    gpus = draw.choice([1, 2, 4, 8])
                    manager.submit(
                        name, gpus, 1, nodes=nodes, spread=spread, expected_runtime=draw.choice([5.0, 60.0])
                    )
            elif kind < 0.85 and running:
                manager.release(draw.choice(running)["task_id"], outcome="SUCCESS")
            elif kind < 0.92 and (gangs := [lease for lease in running if len(lease["members"]) > 1]):
                lease = draw.choice(gangs)
                ranks = list(range(len(lease["members"])))
                gone = draw.sample(ranks, draw.randrange(1, len(ranks)))
                token = lease["fencing_token"]
                manager.release_members(lease["task_id"], gone, fencing_token=token)
                remainders.append((lease["task_id"], token, [rank for rank in ranks if rank not in gone]))
            elif kind < 0.98 and remainders:
                name, token, ranks = remainders.pop(draw.randrange(len(remainders)))
                if draw.random() < 0.5:
                    for rank in ranks:
                        manager.release_members(name, [rank], fencing_token=token)
                else:
                    manager.release(name, fencing_token=token)
            elif pending:
                manager.cancel(draw.choice(pending)["task_id"])
        return collect(manager)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("first_fit", "priority"), ("best_fit", "fifo+backfill"), ("fgd", "srtf"), ("round_robin", "fifo")],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.e2e)])
def test_recorded_gangs_are_replayed_exactly(tmp_path: Path, policy: str, order: str, seed: int) -> None:
    history = recorded(policy, order, seed)
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(to_lines(history)))
    record = Replay(
        workload_of(read_history(str(path)), "history"), get_policy(policy), get_order(order)
    ).run()
    assert differences(record) == []
    runs = record.job_runs.values()
    assert sum(len(job_run.members) > 1 and job_run.ended_at is not None for job_run in runs) > 5
    assert sum(bool(job_run.left_at) for job_run in runs) > 2
    end = record.samples[-1].at
    used = sum(
        job_run.job.request.gpus * (until - begin)
        for job_run in runs
        for _, begin, until in metrics.spans(job_run, end)
    )
    span = end - record.samples[0].at
    share = metrics.summarise(record)["allocated_percent"]
    assert used / (32 * span) * 100 == pytest.approx(share, abs=0.01)


def test_a_history_that_begins_with_a_remainder_is_replayed(tmp_path: Path) -> None:
    """Its lease id is in use again; the remainder ends by its token, the new gang by its own."""
    whole = recorded("first_fit", "fifo", 0)
    cluster = ClusterState.from_snapshot(whole.before)
    changes = iter(whole.changes)
    while not {lease.lease_id for lease in cluster.remainders.values()} & set(cluster.leases):
        cluster.apply(next(changes))
    history = History(cluster.snapshot(), tuple(changes))
    record = play(workload_of(history, "history"))
    assert differences(record) == []
