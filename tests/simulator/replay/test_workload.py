"""A user's own workload: validated strictly, replayed with results checked by hand."""

from __future__ import annotations

import csv
import gzip
import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from resource_manager.core.changes import Cancelled, GpuClosed, InventoryChanged, Released
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from simulator.cli import main
from simulator.errors import InputError, SimulationError
from simulator.io.rows import read_csv
from simulator.replay import metrics
from simulator.replay.cluster_samples import Sample
from simulator.replay.job_runs import Record
from simulator.replay.replay import Replay
from simulator.replay.workload import EventBatch, Job, Part, read_workload
from tests.simulator.refusing import assert_refused

NODES = "node,gpus,gpu_type,cpus,memory_mib\na,2,T4,8,1000\nb,1,A100,8,1000\n"
JOBS = """job,submit_s,runtime_s,gpus,gpu_milli,cpus,gpu_types,team,priority
x,0,100,2,,1,,red,
y,10,50,1,,1,A100,blue,
z,20,10,2,,1,,red,
s,30,20,1,500,1,,blue,5
"""


def files(folder: Path, nodes: str = NODES, jobs: str = JOBS) -> tuple[Path, Path]:
    (folder / "nodes.csv").write_text(nodes, encoding="utf-8")
    (folder / "jobs.csv").write_text(jobs)
    return folder / "nodes.csv", folder / "jobs.csv"


def play(folder: Path, order: str) -> Record:
    return Replay(read_workload(*files(folder)), first_fit, get_order(order)).run()


def starts(record: Record) -> dict[str, float | None]:
    return {task_id: job_run.started_at for task_id, job_run in record.job_runs.items()}


def test_a_row_names_types_and_vendor_of_the_gpus(tmp_path: Path) -> None:
    jobs = "job,submit_s,runtime_s,gpus,gpu_types,vendor\nx,0,100,1,A100|H100,nvidia\n"
    nodes = "node,gpus,gpu_type,vendor,cpus\na,2,A100,nvidia,8\nb,2,H100,nvidia,8\n"
    [job] = read_workload(*files(tmp_path, nodes, jobs)).jobs
    assert (job.request.gpu_types, job.request.vendor) == (("A100", "H100"), "nvidia")


def test_a_replay_runs_only_once(tmp_path: Path) -> None:
    replay = Replay(read_workload(*files(tmp_path)), first_fit, get_order("fifo"))
    replay.run()
    with pytest.raises(SimulationError, match="has already run"):
        replay.run()


def test_fifo_starts_jobs_in_order_of_arrival(tmp_path: Path) -> None:
    """x occupies a until 100, y b until 60; z needs two GPUs and waits, and s waits behind it."""
    record = play(tmp_path, "fifo")
    assert starts(record) == {"x": 0, "y": 10, "z": 100, "s": 100}
    assert [member.node for member in record.job_runs["s"].members] == ["b"]


def test_backfill_starts_a_job_that_delays_no_earlier_one(tmp_path: Path) -> None:
    """From 60 b is free: s runs there for 20 s and does not delay z, whose placement is on a."""
    assert starts(play(tmp_path, "fifo+backfill")) == {"x": 0, "y": 10, "z": 100, "s": 60}


def test_the_more_urgent_job_starts_first(tmp_path: Path) -> None:
    """s has a higher priority than z, and takes b when y ends."""
    assert starts(play(tmp_path, "priority")) == {"x": 0, "y": 10, "z": 100, "s": 60}


def test_capacity_is_freed_before_the_arrivals_of_the_same_time(tmp_path: Path) -> None:
    """At 100 x frees a, the first server: n is placed there, though b is free as well."""
    paths = files(tmp_path, jobs=JOBS.splitlines()[0] + "\nx,0,100,2,,1,,red,\nn,100,10,1,,1,,red,\n")
    record = Replay(read_workload(*paths), first_fit, get_order("fifo")).run()
    assert [member.node for member in record.job_runs["n"].members] == ["a"]


def test_a_recorded_cancellation_ends_a_job_that_the_replay_has_started(tmp_path: Path) -> None:
    """A job that is still pending in the replay leaves the queue."""
    workload = read_workload(*files(tmp_path))
    [early, late] = [
        Job(Request(name, 2, gpu_types=("T4",)), 0.0, math.inf) for name in ("starts at once", "waits")
    ]
    cancelled = [Cancelled(job.request.lease_id, 50.0) for job in (early, late)]
    batches = (
        EventBatch(0.0, arrivals=[early, late]),
        EventBatch(50.0, external=[*cancelled[1:], *cancelled[:1]]),
    )
    record = Replay(replace(workload, batches=batches), first_fit, get_order("fifo")).run()
    started, waited = record.job_runs["starts at once"], record.job_runs["waits"]
    assert (started.started_at, started.ended_at, started.cancelled) == (0.0, 50.0, False)
    assert (waited.started_at, waited.cancelled) == (None, True)


def test_the_summary_gives_the_figures_computed_by_hand(tmp_path: Path) -> None:
    """Waits are 0, 0, 80 and 70 s; of 3 GPUs over 120 s: 2 x 100, 1 x 50, 2 x 10 and 0.5 x 20 s."""
    summary = metrics.summarise(play(tmp_path, "fifo"))
    assert summary["mean_wait_s"] == 37.5
    assert summary["max_wait_s"] == 80
    assert summary["p50_wait_s"] == 35  # half-way between the second and the third
    assert summary["p95_wait_s"] == 78.5
    assert summary["mean_jct_s"] == (100 + 50 + 90 + 90) / 4
    assert summary["makespan_s"] == 120
    assert summary["allocated_percent"] == pytest.approx(100 * (200 + 50 + 20 + 10) / 360, abs=0.01)
    assert summary["peak_allocated_percent"] == 100
    assert summary["occupied_nodes_percent"] == pytest.approx(100 * (110 + 50 + 20) / 240, abs=0.01)


def test_fragmentation_is_a_share_of_the_free_capacity(tmp_path: Path) -> None:
    """Of four GPUs one is closed, one is used for 10 s, then two; 900 milli of the free are of no use."""
    record = play(tmp_path, "fifo")
    record.samples = [
        Sample(0, 1000, 1, 4, 900, 4000, 2, 2000),
        Sample(10, 2000, 1, 2, 900, 4000, 2, 1000),
        Sample(20, 0, 0, 0, 0, 4000, 2, 3000),
    ]
    figures = metrics.over_time(record)
    assert figures["frag_ratio_percent"] == 60.0
    assert figures["mean_queue_length"] == 3


def test_a_closed_gpu_is_neither_used_nor_free(tmp_path: Path) -> None:
    """Of the three GPUs one is closed, one runs x, and one is free."""
    workload = read_workload(*files(tmp_path))
    closed = GpuClosed("a", 0, "", "xid 79", 0.0)
    batches = (EventBatch(0.0, external=[closed], arrivals=[Job(Request("x", 1), 0.0, 10.0)]),)
    record = Replay(replace(workload, batches=batches), first_fit, get_order("fifo")).run()
    sample = record.samples[0]
    assert (sample.used_milli, sample.free_milli, sample.gpu_milli) == (1000, 1000, 3000)
    figures = metrics.over_time(record)
    assert (figures["allocated_percent"], figures["frag_ratio_percent"]) == (33.33, 0.0)


def test_a_record_of_one_time_of_day_is_drawn(tmp_path: Path) -> None:
    record = play(tmp_path, "fifo")
    record.samples = [Sample(1.76e9, 1000, 1, 4, 900, 3000, 2, 2000)]
    assert all(map(math.isfinite, chain(*metrics.binned(record))))


def test_percentages_refer_to_the_servers_present_at_the_time(tmp_path: Path) -> None:
    """a is removed at 10 but runs x until 20, b stays; c is added at 10 and runs w for 10 s."""
    workload = read_workload(*files(tmp_path))
    b = workload.start.nodes[1]
    c = Node("c", 2, {}, (Gpu(0), Gpu(1)))
    x, w = (Job(Request(name, 2), 0.0, 20.0) for name in "xw")
    batches = (
        EventBatch(0.0, arrivals=[x, w]),
        EventBatch(10.0, external=[InventoryChanged((b, c), 10.0)]),
        EventBatch(40.0),
    )
    record = Replay(replace(workload, batches=batches), first_fit, get_order("fifo")).run()
    figures = metrics.over_time(record)
    assert [(s.at, s.used_milli, s.gpu_milli, s.nodes) for s in record.samples] == [
        (0.0, 2000, 3000, 2),
        (10.0, 4000, 5000, 3),
        (20.0, 2000, 3000, 2),
        (30.0, 0, 3000, 2),
    ]
    assert figures["allocated_percent"] == pytest.approx(100 * 80 / 110, abs=0.01)
    assert figures["peak_allocated_percent"] == 80.0
    assert figures["occupied_nodes_percent"] == pytest.approx(100 * 4 / 7, abs=0.01)
    names, shares, _, _ = metrics.busy_shares(record, bins=3)
    assert (names, shares) == (["a", "b", "c"], [[1, 1, 0], [0, 0, 0], [0, 1, 1]])


def test_a_recorded_end_applies_only_to_a_job_that_started_as_recorded(tmp_path: Path) -> None:
    """y ran from 10 to 40. Here it starts at 30, since x occupies a until then, and runs its 30 s."""
    workload = read_workload(*files(tmp_path))
    asked = {name: Request(name, 2, gpu_types=("T4",)) for name in "xy"}
    recorded = Lease(asked["y"], (Placement("a", (0, 1)),), 1, 10.0, 99.0)
    batches = (
        EventBatch(0.0, arrivals=[Job(asked["x"], 0.0, 30.0)]),
        EventBatch(10.0, arrivals=[Job(asked["y"], 10.0, 30.0, (Part(recorded, ended_at=40.0),))]),
        EventBatch(40.0, external=[Released("y", 1, 40.0)]),
    )
    job_run = Replay(replace(workload, batches=batches), first_fit, get_order("fifo")).run().job_runs["y"]
    assert (job_run.started_at, job_run.ended_at) == (30.0, 60.0)


def test_busy_shares_add_up(tmp_path: Path) -> None:
    nodes, shares, start, end = metrics.busy_shares(play(tmp_path, "fifo"), bins=12)
    assert nodes == ["a", "b"]
    assert (start, end) == (0, 120)
    assert sum(shares[0]) * 10 * 2 == pytest.approx(200 + 20)
    assert sum(shares[1]) * 10 == pytest.approx(50 + 10)


def test_json_is_the_same_workload(tmp_path: Path) -> None:
    nodes, jobs = files(tmp_path)
    expected = read_workload(nodes, jobs)
    for name, path in (("nodes", nodes), ("jobs", jobs)):
        with path.open() as file:
            rows = [row | {"comment": "no end of a\u2028line"} for row in csv.DictReader(file)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for suffix in ("json", "jsonl"):
        found = read_workload(tmp_path / f"nodes.{suffix}", tmp_path / f"jobs.{suffix}")
        assert (found.start, found.batches) == (expected.start, expected.batches)


def replay(folder: Path, *more: str, as_json: bool = True) -> Result:
    arguments = ["replay", "--trace", "csv", "--nodes", str(folder / "nodes.csv")]
    arguments += ["--jobs", str(folder / "jobs.csv"), *(["--json"] if as_json else [])]
    return CliRunner().invoke(main, [*arguments, *more])


def test_command_writes_jobs_and_pictures(tmp_path: Path) -> None:
    files(tmp_path)
    result = replay(
        tmp_path, "--policy", "fgd", "--order", "srtf+backfill", "--output-dir", str(tmp_path / "o")
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["started"] == 4
    with (tmp_path / "o" / "jobs.csv").open() as file:
        assert [row["job"] for row in csv.DictReader(file)] == ["x", "y", "z", "s"]
    assert len(list((tmp_path / "o").glob("*.png"))) == 7


def test_no_job_of_a_trace_is_a_formula_of_the_table(tmp_path: Path) -> None:
    _, jobs = files(tmp_path)
    jobs.write_text(jobs.read_text().replace("\ny,", "\n=HYPERLINK(0),"))
    assert replay(tmp_path, "--output-dir", str(tmp_path / "o")).exit_code == 0
    with (tmp_path / "o" / "jobs.csv").open() as file:
        assert [row["job"] for row in csv.DictReader(file)] == ["x", "'=HYPERLINK(0)", "z", "s"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "runtime_s",
            "run_time",
            "jobs.csv:1: the column runtime_s is missing: there is 'job,submit_s,run_time,",
        ),
        (",", ";", "nodes.csv:1: the column node is missing: there is 'node;gpus;"),
        ("priority", "prioirty", "jobs.csv:2: the column prioirty is not read: did you mean priority?"),
        ("priority", "gpus", "jobs.csv:1: the column gpus appears twice"),
        (
            "gpu_types",
            "gpu_type",
            "jobs.csv:2: the column gpu_type is not read: did you mean gpu_types? Rename or remove it",
        ),
        (
            ",gpu_type,",
            ",model,",
            "jobs.csv:3: no node has a GPU of type 'A100'; known are none: the nodes have",
        ),
        ("y,10,50", "y,10,-50", "jobs.csv:3: runtime_s is -50, not a finite number of 0 or more"),
        ("y,10,50", "y,nan,50", "jobs.csv:3: submit_s is nan, not a finite number of 0 or more"),
        ("z,20,10,2", "z,20,10,3", "a, has 2; nodes is missing, the number of"),
        (
            "2,,1,,red",
            "2,,9,,red",
            "jobs.csv:2: job 'x' never fits: no server could ever satisfy 2 GPUs and 9 ",
        ),
        ("y,10,50", ",10,50", "jobs.csv:3: job is empty: each job needs a name"),
        ("A100,blue", "H100,blue", "jobs.csv:3: no node has a GPU of type 'H100'; known are A100, T4"),
        ("1,500", "2,500", "jobs.csv:5: gpu_milli=500 goes with gpus=1, got gpus=2"),
        ("y,10", "x,10", "jobs.csv:3: job 'x' appears twice"),
        ("blue,5", "blue,high", "jobs.csv:5: priority is 'high', not a whole number"),
        ("z,20,10,2", "z,20,10,two", "jobs.csv:4: gpus is 'two', not a whole number"),
        ("z,20,10,2", "z,20,10,1_0", "jobs.csv:4: gpus is '1_0', not a whole number"),
        ("z,20,10,2", "z,2_0,10,2", "jobs.csv:4: submit_s is '2_0', not a number"),
        ("a,2", "a,1025", "nodes.csv:2: gpus is 1025, above 1,024"),
        ("y,10", "y,1e308", "jobs.csv:3: submit_s is 1e308, above 1,000,000,000,000,000"),
        ("blue,5", "blue,-" + 400 * "9", "999, below -1,000,000,000,000,000"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    files(tmp_path, NODES.replace(old, new), JOBS.replace(old, new))
    result = replay(tmp_path, "--output-dir", str(tmp_path / "o"))
    assert_refused(result, message)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_is_called_empty(tmp_path: Path, text: str) -> None:
    files(tmp_path, text)
    assert "nodes.csv:1: it is empty: its first line must name the columns node,gpus\n" in (
        replay(tmp_path).stderr
    )
    (tmp_path / "nodes.json").write_text(text)
    with pytest.raises(InputError, match=r"nodes\.json: it is empty: it must be JSON"):
        read_workload(tmp_path / "nodes.json", tmp_path / "jobs.csv")


def test_a_file_that_fails_while_it_is_read_is_named() -> None:
    with pytest.raises(InputError, match=r"^/proc/self/mem: cannot be read: Input/output error"):
        list(read_csv(Path("/proc/self/mem"), ["node"]))


def test_results_do_not_replace_the_trace(tmp_path: Path) -> None:
    _, jobs = files(tmp_path)
    refused = replay(tmp_path, "--output-dir", str(tmp_path / "." / "x" / ".."))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "--output-dir: the results' jobs.csv would replace the trace's" in refused.stderr
    assert jobs.read_text() == JOBS


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_value_of_json_is_one_text_or_number(tmp_path: Path, kind: str) -> None:
    nodes, _ = files(tmp_path)
    trace = tmp_path / f"j.{kind}"
    job = {"job": "x", "submit_s": 0, "runtime_s": 1, "gpus": 1, "gpu_types": ["T4"]}
    for types in (["T4"], "T4"):
        text = json.dumps({**job, "gpu_types": types})
        trace.write_text(text if kind == "jsonl" else f"[{text}]", encoding="utf-8-sig")
        if isinstance(types, str):
            assert len(read_workload(nodes, trace).jobs) == 1
        else:
            where = ":1" if kind == "jsonl" else ": item 1"
            with pytest.raises(InputError, match=rf'{where}: gpu_types is \["T4"\], not one text or number'):
                read_workload(nodes, trace)


@pytest.mark.parametrize(("kind", "place"), [("json", ""), ("jsonl", ":1")])
def test_a_name_that_cannot_be_written_is_refused(tmp_path: Path, kind: str, place: str) -> None:
    nodes, _ = files(tmp_path)
    trace = tmp_path / f"j.{kind}"
    text = r'{"job": "\ud800", "submit_s": 0, "runtime_s": 1, "gpus": 1}'
    trace.write_text(text if kind == "jsonl" else f"[{text}]")
    with pytest.raises(InputError, match=rf"j.{kind}{place}: not JSON: .* surrogates not allowed"):
        read_workload(nodes, trace)
    trace.write_text(trace.read_text().replace(r"\ud800", r"\ud83d\ude00"))
    assert [job.request.lease_id for job in read_workload(nodes, trace).jobs] == ["😀"]


def test_people_read_a_value_in_each_line(tmp_path: Path) -> None:
    files(tmp_path)
    lines = replay(tmp_path, as_json=False).stdout.splitlines()
    assert [line for line in lines if len(line.split()) < 2] == []


def test_servers_without_gpus_have_a_page(tmp_path: Path) -> None:
    files(tmp_path, "node,gpus,cpus\na,0,4\n", "job,submit_s,runtime_s,gpus,cpus\nx,0,10,0,4\ny,0,10,0,4\n")
    result = replay(tmp_path, "--output-dir", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "o" / "report.html").read_text()
    assert "jobs wait 5 s on average and 10 s at most." in page


def test_names_in_letters_that_no_font_has_are_drawn_without_a_warning(tmp_path: Path) -> None:
    files(tmp_path, NODES.replace("a,2", "\U00013000,2"))
    result = replay(tmp_path, "--output-dir", str(tmp_path / "o"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\U00013000" in (tmp_path / "o" / "report.html").read_text(encoding="utf-8")


def test_a_job_of_no_kind_that_is_there_is_not_told_to_split(tmp_path: Path) -> None:
    nodes = "node,gpus,gpu_type,vendor\na,2,A100,nvidia\nb,2,MI300,amd\n"
    files(tmp_path, nodes, "job,submit_s,runtime_s,gpus,gpu_types,vendor\nx,0,1,1,A100,amd\n")
    assert replay(tmp_path).stderr.startswith(f"Error: {tmp_path}/jobs.csv:2: job 'x' never fits: no server")
    assert "split" not in replay(tmp_path).stderr


def test_a_file_that_is_no_text_has_no_line(tmp_path: Path) -> None:
    _, jobs = files(tmp_path)
    jobs.write_bytes(gzip.compress(jobs.read_bytes()))
    assert "jobs.csv: not a table of text: 'utf-8' codec can't decode" in replay(tmp_path).stderr


def test_a_compressed_trace_is_to_be_unpacked(tmp_path: Path) -> None:
    nodes, jobs = files(tmp_path)
    for name in ("jobs.csv.gz", "jobs.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(jobs.read_bytes()))
        with pytest.raises(InputError, match=f"/{name}: compressed: unpack it first$"):
            read_workload(nodes, tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one workload"),
        (["--trace", "csv"], "--trace csv needs --nodes and --jobs"),
        (["--trace", "openb"], "--trace openb needs --data"),
        (["--trace", "muri", "--jobs", "trace1"], "--trace muri needs --data"),
        (["--trace", "muri", "--nodes", "n.csv"], "--nodes cannot be used with --trace muri"),
        (["--history", "h.jsonl", "--jobs", "j.csv"], "--jobs cannot be used with --history"),
        (["--trace", "json", "--nodes", "n.csv", "--jobs", "j.csv"], "cannot read the file n.csv"),
        (
            ["--trace", "csv", "--checkpoint-every", "9"],
            "--checkpoint-every applies only to --teams and --hist",
        ),
        (["--trace", "csv", "--quotas", "a=1,a=0"], "one a team, such as"),
        (["--trace", "csv", "--teams", "t", "--checkpoint-every", "nan"], "'nan' is not a finite number"),
        (["--trace", "csv", "--solver", "highs"], "--solver applies only to policies that solve: max_min"),
        (
            ["--trace", "shockwave", "--policy", "tiresias", "--solver", "highs"],
            "--solver applies only to policies that solve: max_min_fairness, max_sum_throughput, min_total",
        ),
        (["--trace", "openb", "--order", "fifo"], "--order cannot be used with --trace openb"),
        (["--trace", "openb", "--quotas", "a=1"], "--quotas cannot be used with --trace openb"),
        (["--trace", "muri", "--policy", "fgd"], "--policy cannot be used with --trace muri"),
        (["--trace", "muri", "--split-large-jobs"], "--split-large-jobs cannot be used with --trace muri"),
        (["--trace", "csv", "--pods", "cpu250"], "--pods cannot be used with --trace csv"),
        (["--history", "h.jsonl", "--quotas", "a=1"], "--quotas applies only to the order fair_share"),
        (["--history", "absent.jsonl"], "absent.jsonl: cannot be read: No such file"),
        (["--history", "redis://localhost:1/0"], "localhost:1"),
    ],
)
def test_missing_options_are_named(arguments: list[str], message: str) -> None:
    assert_refused(CliRunner().invoke(main, ["replay", *arguments]), message)


def test_unknown_order_is_named(tmp_path: Path) -> None:
    files(tmp_path)
    result = replay(tmp_path, "--order", "lifo")
    assert result.exit_code == 2
    assert "unknown queue order 'lifo'" in result.stderr
