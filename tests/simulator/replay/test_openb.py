"""The replay of openb reproduces the published results, and names errors in its files."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from functools import cache, lru_cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from simulator.cli import main
from simulator.replay.comparison import Source
from simulator.replay.openb import CURVE_COLUMNS, place, policy_for, read_trace, replay
from tests.simulator.refusing import assert_refused

DETERMINISTIC = ("fgd", "best_fit", "dot_product", "gpu_packing", "gpu_clustering")
TRACES = ("default", "cpu250", "gpushare100")
SEEDS = (42, 43, 44, 45, 46)
TABLES = ("allocation_ratio", "fragmentation_amount", "fragmentation_ratio")


@pytest.fixture(scope="session")
def openb(shared_data: Path) -> Path:
    return shared_data / "openb"


@cache
def published(folder: Path, table: str) -> dict[tuple[str, str, int], list[float]]:
    with (folder / "expected" / f"{table}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        (row["trace"], row["policy"], int(row["seed"])): [float(row[str(x)]) for x in range(131)]
        for row in rows
    }


read_once = lru_cache(maxsize=1)(read_trace)
"""One trace is enough to cache: the slow tests run all policies of a trace and seed in succession."""


@pytest.mark.parametrize("policy", DETERMINISTIC)
@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.e2e) for seed in SEEDS[1:])]
)
@pytest.mark.parametrize(
    "trace", [TRACES[0], *(pytest.param(trace, marks=pytest.mark.slow) for trace in TRACES[1:])]
)
def test_every_curve_equals_the_published_one(openb: Path, trace: str, policy: str, seed: int) -> None:
    _, rows = replay(read_once(openb, trace, seed), policy, seed)
    for column, table in enumerate(TABLES, start=1):
        expected = published(openb, table)[trace, policy, seed]
        # Tables are printed with two decimals, ratios with all: the last digit of a float may differ.
        assert [row[column] for row in rows] == pytest.approx(expected, abs=1e-9, rel=0), table


@pytest.mark.slow
@pytest.mark.parametrize(
    "trace", [TRACES[0], *(pytest.param(trace, marks=pytest.mark.e2e) for trace in TRACES[1:])]
)
def test_random_is_within_half_a_point_of_its_published_mean(openb: Path, trace: str) -> None:
    runs = [replay(read_trace(openb, trace, seed), "random", seed)[0] for seed in SEEDS]
    mean = sum(run["allocated_percent"] for run in runs) / len(runs)
    expected = [published(openb, "allocation_ratio")[trace, "random", seed][130] for seed in SEEDS]
    assert mean == pytest.approx(sum(expected) / len(expected), abs=0.5)


# ---- a small synthetic trace, its results computed by hand ----

NODES = """sn,cpu_milli,memory_mib,gpu,model
a,8000,1000,2,T4
b,8000,1000,2,T4
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec
p0,1000,10,1,500,
p1,1000,10,1,500,
p2,1000,10,2,1000,
p3,1000,10,1,1000,T4
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write two nodes of two GPUs; node b ranks before node a; arrivals p0, p1, p2, p3."""
    (tmp_path / "csv").mkdir()
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "csv" / "openb_node_list_gpu_node.csv").write_text(NODES)
    (tmp_path / "csv" / "openb_pod_list_default.csv").write_text(PODS)
    fixture = {"1": {"order": [0, 1, 2, 3], "node_rank": [1, 0]}}
    (tmp_path / "fixtures" / "default.json.gz").write_bytes(gzip.compress(json.dumps(fixture).encode()))
    return tmp_path


def test_a_small_trace_gives_the_results_computed_by_hand(small: Path) -> None:
    """All nodes tie, so p0 goes to b, which ranks first, and p1 to the same GPU; p2 to a, p3 to b."""
    summary, rows = replay(read_trace(small, "default", 1), "gpu_packing", 1)
    assert (summary["pods"], summary["placed"]) == (4, 4)
    by_x = {row[0]: row[1:] for row in rows}
    # 4,000 milli in all: the pods arrive at 12.5 (rounded to 12), 25, 75 and 100 %.
    assert by_x[12][0] == 12.5
    assert by_x[25][0] == 25.0
    assert by_x[50] == by_x[74] == by_x[25]  # no pod arrives there
    assert by_x[75][0] == 75.0
    assert by_x[100] == (100.0, 0.0, 0.0)
    # F after p1: b has one GPU of 1000 free, useless only to p2's class (a quarter of the mix), a none lost.
    assert by_x[25][1] == 100 * 0.25 * 1000 / 4000
    assert by_x[25][2] == round(100 * 0.25 * 1000 / 3000, 2)


def test_ties_go_to_the_lowest_rank_and_not_to_the_first_row(small: Path) -> None:
    trace = read_trace(small, "default", 1)
    leases = place(trace, policy_for("gpu_packing", Fragmentation.of(trace.pods), 1)).cluster.leases
    assert [leases[f"p{k}#{k}"].placement.node for k in range(4)] == ["b", "b", "a", "b"]


def test_a_load_is_rounded_to_the_nearest_percent(small: Path) -> None:
    """Of three GPUs, half a GPU is 16.67 %: it counts at 17, and 16 repeats the row before."""
    nodes = NODES.replace("b,8000,1000,2", "b,8000,1000,1")
    (small / "csv" / "openb_node_list_gpu_node.csv").write_text(nodes)
    _, rows = replay(read_trace(small, "default", 1), "gpu_packing", 1)
    assert [row[1] for row in rows[16:18]] == [0.0, 16.67]


def test_a_pod_may_name_several_models(small: Path) -> None:
    for name, text in (("node_list_gpu_node", NODES.replace("b,8000,1000,2,T4", "b,8000,1000,2,G3")),
                       ("pod_list_default", PODS.replace("1000,T4", "1000,T4|G3"))):  # fmt: skip
        (small / "csv" / f"openb_{name}.csv").write_text(text)
    assert [pod.gpu_types for pod in read_trace(small, "default", 1).pods] == [(), (), (), ("T4", "G3")]


def test_a_pod_list_without_the_column_of_models_accepts_any(small: Path) -> None:
    """The public list multigpu50 has five columns."""
    text = "".join(line.rpartition(",")[0] + "\n" for line in PODS.splitlines())
    (small / "csv" / "openb_pod_list_default.csv").write_text(text)
    trace = read_trace(small, "default", 1)
    assert [pod.gpu_types for pod in trace.pods] == [()] * 4
    assert replay(trace, "fgd", 1)[0]["placed"] == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p2,1000,10,2", "p2,1000,10,3"),
        ("p2,1000,10", "p2,9000,10"),
        ("p2,1000,10,2,1000,", "p2,1000,10,2,1000,A10|H100"),
    ],
    ids=["GPUs", "CPU", "model"],
)
@pytest.mark.parametrize("policy", [*DETERMINISTIC, "random"])
def test_a_pod_larger_than_any_node_arrives_and_is_never_placed(
    small: Path, old: str, new: str, policy: str
) -> None:
    """As the public list gpuspec33 has them; the order names the pod twice and the mix counts it."""
    (small / "csv" / "openb_pod_list_default.csv").write_text(PODS.replace(old, new))
    fixture = {"1": {"order": [0, 2, 1, 2, 3], "node_rank": [1, 0]}}
    (small / "fixtures" / "default.json.gz").write_bytes(gzip.compress(json.dumps(fixture).encode()))
    trace = read_trace(small, "default", 1)
    summary, rows = replay(trace, policy, 1)
    assert (summary["pods"], summary["placed"]) == (5, 3)
    assert (summary["never_fit"], summary["never_fit_rows"]) == (2, 1)
    gpus = 3 if ",3," in new else 2
    arrived = round(100 * (500 + gpus * 1000) / 4000)  # after the first of the two
    assert [row[1] for row in rows[arrived - 1 : arrived + 1]] == [12.5, 12.5]


@pytest.mark.parametrize("policy", DETERMINISTIC)
def test_a_pod_of_more_gpus_than_there_is_memory_for_is_never_placed(small: Path, policy: str) -> None:
    pods = PODS.replace("p2,1000,10,2", "p2,1000,10,1000000000000000")
    (small / "csv" / "openb_pod_list_default.csv").write_text(pods)
    summary, _ = replay(read_trace(small, "default", 1), policy, 1)
    assert (summary["placed"], summary["never_fit"]) == (3, 1)


def test_a_kept_result_depends_on_every_file_of_the_trace(small: Path) -> None:
    found = Source("openb", (str(small), "default")).fingerprint()
    stamped = {entry[0] for entry in found if isinstance(entry, list)}
    assert stamped == {str(path) for path in small.rglob("*.*")}


def test_without_fixtures_the_seed_draws_the_order(small: Path) -> None:
    shutil.rmtree(small / "fixtures")
    first, again, other = (read_trace(small, "default", seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sum(pod.gpus * pod.gpu_milli for pod in first.arrivals) >= 1.3 * first.gpu_milli


def test_command_writes_summary_and_curve(small: Path, tmp_path: Path) -> None:
    curve = tmp_path / "out" / "curve.csv"
    arguments = ["replay", "--trace", "openb", "--data", str(small), "--pods", "default", "--seed", "1"]
    result = CliRunner().invoke(main, [*arguments, "--policy", "fgd", "--json", "--curve", str(curve)])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert {"policy", "pods", "placed", "allocated_percent", "frag_ratio_percent"} <= summary.keys()
    assert {"wall_s", "cpu_s", "pods_per_s"} <= summary.keys()
    with curve.open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == list(CURVE_COLUMNS)
    assert [row[0] for row in rows[1:]] == [str(x) for x in range(131)]


def corrupt(folder: Path, what: str) -> None:
    nodes = folder / "csv" / "openb_node_list_gpu_node.csv"
    pods = folder / "csv" / "openb_pod_list_default.csv"
    fixture = folder / "fixtures" / "default.json.gz"
    if what == "column":
        nodes.write_text(NODES.replace("model", "modell"))
    elif what == "monster":
        nodes.write_text(NODES.replace("1000,2,T4", "1000,9602661,T4", 1))
    elif what == "negative":
        pods.write_text(PODS.replace("p1,1000", "p1,-1000"))
    elif what == "row":
        pods.write_text(PODS.replace("p2,1000,10,2,1000,", "p2,1000,10"))
    elif what == "order":
        value = {"1": {"order": [0, 4], "node_rank": [1, 0]}}
        fixture.write_bytes(gzip.compress(json.dumps(value).encode()))
    elif what == "rank":
        value = {"1": {"order": [0, 1], "node_rank": [1, 0, 2]}}
        fixture.write_bytes(gzip.compress(json.dumps(value).encode()))
    elif what == "truncated":
        fixture.write_bytes(fixture.read_bytes()[:-12])
    elif what == "seed":
        fixture.write_bytes(gzip.compress(b"{}"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("column", "gpu_node.csv:1: the column model is missing"),
        ("negative", "default.csv:3: cpu_milli is -1000, below 0"),
        ("monster", "gpu_node.csv:2: gpu is 9602661, above 1,024"),
        ("row", "default.csv:4: 3 values for 6 columns"),
        ("order", "default.json.gz: the order of seed 1 does not match the pod list of 4 pods"),
        ("rank", "default.json.gz: node_rank of seed 1 has 3 ranks for 2 nodes"),
        ("truncated", "default.json.gz: not a whole gzip file"),
        ("seed", "default.json.gz: no order for seed 1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    small: Path, tmp_path: Path, what: str, message: str
) -> None:
    corrupt(small, what)
    curve = tmp_path / "curve.csv"
    arguments = ["replay", "--trace", "openb", "--data", str(small), "--seed", "1", "--policy", "fgd"]
    result = CliRunner().invoke(main, [*arguments, "--json", "--curve", str(curve)])
    assert_refused(result, message)
    assert not curve.exists()


def test_the_first_recorded_order_is_the_default(small: Path) -> None:
    """The file has the order of seed 1 alone; without a file it is drawn, by default from seed 0."""
    arguments = ["--trace", "openb", "--data", str(small), "--json"]
    for command in ("replay", "compare"):
        result = CliRunner().invoke(main, [command, *arguments])
        assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(main, ["replay", *arguments, "--seed", "0"])
    assert "no order for seed 0; the file has 1" in refused.stderr
    (small / "fixtures" / "default.json.gz").unlink()
    assert CliRunner().invoke(main, ["replay", *arguments]).exit_code == 0


def test_unknown_policy_is_named(small: Path) -> None:
    arguments = ["replay", "--trace", "openb", "--data", str(small), "--seed", "1", "--policy", "best"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "unknown policy 'best'" in result.stderr
