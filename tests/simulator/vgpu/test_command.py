"""`gpu-simulate vgpu` end to end: output, reports, plots, and one line on invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from simulator.cli import main
from simulator.errors import InputError
from simulator.vgpu.page import verdict
from simulator.vgpu.plots import CHINESE, Labels
from simulator.vgpu.scenario import ORIGIN_NAMES, load_scenario, scenario_names, without_profiles_except

SHORT = ("--duration", "40", "--tasks", "20", "--engine", "plain")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["vgpu", *arguments])


def test_json_has_one_figure_per_seed() -> None:
    result = call("--scenarios", "A1,A3", *SHORT, "--seeds", "1-2,5", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert list(summary["scenarios"]) == ["A1", "A3"]
    for figures in summary["scenarios"].values():
        for name in ("ir_over_1_25", "slo_rate", "drop_rate", "ir_p95", "wall_s"):
            assert len(figures[name]) == 3
        assert set(figures["limiter_events"]) == {"memory", "bandwidth", "compute"}
        assert set(figures["utilization"]["nv-node-1"]) == {"compute", "memory", "bandwidth"}
        spread = figures["confidence"]["slo_rate"]
        assert spread["low"] <= spread["mean"] <= spread["high"]
    assert sum(summary["scenarios"]["A1"]["limiter_events"]["compute"]) == 0


def test_names_and_options_of_the_original_are_accepted() -> None:
    ours = call("--scenarios", "A3", *SHORT, "--arrival", "burst", "--seed", "7", "--json")
    arguments = (
        "--scenario",
        "A3-sandbox",
        "--num_tasks",
        "20",
        "--arrival_mode",
        "burst",
        "--duration",
        "40",
    )
    theirs = call(*arguments, "--engine", "plain", "--seed", "7", "--json")
    first, second = json.loads(ours.stdout), json.loads(theirs.stdout)
    for each in (first, second):
        del each["scenarios"]["A3"]["wall_s"]
    assert first == second
    assert {load_scenario(name).name for name in ORIGIN_NAMES} < set(scenario_names())


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    outputs = []
    for jobs in ("1", "2"):
        result = call("--scenarios", "A1,A3", *SHORT, "--seeds", "1-3", "--jobs", jobs, "--json")
        figures = json.loads(result.stdout)["scenarios"]
        for each in figures.values():
            del each["wall_s"]
        outputs.append(figures)
    assert outputs[0] == outputs[1]


def test_reports_and_plots_are_written(tmp_path: Path) -> None:
    result = call("--scenarios", "A1,A3", *SHORT, "--seeds", "1-2", "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    plots = {"ir_cdf", "slo_rate", "compute_util", "drop_rate", "limiter_events", "A1_ir_hist", "A3_ir_hist"}
    assert names == {f"{name}.png" for name in plots} | {
        "A1_report.json",
        "A3_report.json",
        "comparison.html",
        "comparison.zh.html",
    }
    report = json.loads((tmp_path / "A3_report.json").read_text(encoding="utf-8"))
    assert set(report) >= {"cluster", "tasks", "task_outcomes", "summary", "ir_histogram"}
    assert len(report["tasks"]) == len(report["task_outcomes"]) == 40
    started = [row for row in report["task_outcomes"] if row["interference_ratio"] is not None]
    assert sum(bucket["tasks"] for bucket in report["ir_histogram"]) == len(started)
    for bucket in report["ir_histogram"]:
        assert bucket["to"] - bucket["from"] == pytest.approx(0.1)
    assert [node["node"] for node in report["cluster"]] == [
        "nv-node-1",
        "nv-node-2",
        "asc-node-1",
        "asc-node-2",
    ]
    capacity = report["cluster"][2]["capacity"]  # two 910B, their coefficients applied once
    assert capacity["compute_tflops"] == pytest.approx(2 * 280 * 0.85)
    assert capacity["memory_gb"] == pytest.approx(2 * 64 * 0.90)
    assert capacity["bandwidth_gbps"] == pytest.approx(2 * 1600 * 0.80)
    pages = [
        (tmp_path / name).read_text(encoding="utf-8") for name in ("comparison.html", "comparison.zh.html")
    ]
    assert ["slowdown p95" in page for page in pages] == [True, False]
    assert ["减速比 p95" in page for page in pages] == [False, True]
    for page in pages:
        assert page.index('class="verdict"') < page.index("<table>") < page.index("<svg")


def test_a_scenario_name_may_contain_any_characters(tmp_path: Path) -> None:
    """The name is a formula to matplotlib and a fragment to a browser."""
    (tmp_path / "a$^$#1.toml").write_text('title = "<i>"')
    result = call("--scenarios", str(tmp_path / "a$^$#1.toml"), *SHORT, "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert 'href="a%24%5E%24%231_report.json"' in page
    assert "a$^$#1" in page[page.index("<svg") :]
    assert "&lt;i&gt;" in page


def test_points_of_a_sweep_that_nearly_agree_are_both_told() -> None:
    result = call("--scenarios", "A3", *SHORT, "--sweep", "decay:0.01,0.01000001", "--json")
    assert list(json.loads(result.stdout)["sweeps"]["decay"]) == ["0.01", "0.01000001"]


def test_a_sweep_varies_load_and_sandbox_one_at_a_time_and_draws_each(tmp_path: Path) -> None:
    axes = {"tasks": "10,20", "duration": "20,40", "limit_threshold": "1,1.2", "card_factor": "0.9,1"}
    sweeps = [part for axis, values in axes.items() for part in ("--sweep", f"{axis}:{values}")]
    arguments = ("--scenarios", "A1,A3", *SHORT, *sweeps, "--output-dir", str(tmp_path), "--json")
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {axis: list(points) for axis, points in found["sweeps"].items()} == {
        axis: values.split(",") for axis, values in axes.items()
    }
    # The values that the scenarios have anyway change nothing, others do.
    unchanged = {
        name: {key: value for key, value in each.items() if key != "wall_s"}
        for name, each in found["scenarios"].items()
    }
    same = {axis: points[axes[axis].split(",")[1]]["scenarios"] for axis, points in found["sweeps"].items()}
    assert same["tasks"] == same["duration"] == same["card_factor"] == unchanged
    assert found["sweeps"]["tasks"]["10"]["scenarios"] != unchanged
    assert found["sweeps"]["card_factor"]["0.9"]["scenarios"] != unchanged
    pictures = {path.name for path in tmp_path.glob("sweep_*.png")}
    figures = ("ir_over_1_25", "slo_rate", "drop_rate")
    assert pictures == {f"sweep_{axis}_{figure}.png" for axis in axes for figure in figures}
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert all(f"Over {axis}" in page for axis in axes)


def test_the_trace_of_a_run_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ("--scenarios", "A3", *SHORT, "--seed", "2", "--trace", str(path), "--trace-ticks", "50")
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert [sample["tick"] for sample in trace["samples"]] == list(range(0, 4000, 50))
    outcomes = {row["task_id"]: row for row in trace["task_outcomes"]}
    assert len(outcomes) == 20
    for sample in trace["samples"]:
        now = sample["time_s"]
        running = {row["task_id"]: row for row in sample["running_tasks"]}
        for task_id, row in outcomes.items():
            starts, ends = row["start_s"], row["end_s"]
            runs = starts is not None and starts <= now < ends
            assert (task_id in running) == runs
            arrived = row["arrival_s"] <= now and not (starts is not None and starts <= now)
            assert (task_id in sample["waiting_tasks"]) == arrived
        for node, used in sample["node_usage"].items():
            granted = [row["granted"]["compute"] for row in running.values() if row["node"] == node]
            assert used["compute"] == pytest.approx(sum(granted))
    assert any(any(row["limited"].values()) for s in trace["samples"] for row in s["running_tasks"])
    figures = json.loads(result.stdout)["scenarios"]["A3"]
    assert trace["summary"]["ir_mean"] == figures["ir_mean"]  # observed or not, the run is the same


@pytest.mark.parametrize("with_font", [True, False])
def test_labels_never_have_missing_glyphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_font: bool
) -> None:
    """A missing glyph is a warning in matplotlib, and pytest makes it an error."""
    if not with_font:
        monkeypatch.setattr("simulator.vgpu.plots.CHINESE_FONTS", ())
    elif Labels.for_this_machine().font is None:
        pytest.skip("no font with Chinese glyphs on this machine")
    assert (Labels.for_this_machine()("SLO rate") == "SLO rate") != with_font
    result = call("--scenarios", "A1", *SHORT, "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert ("no font with Chinese glyphs" in result.stderr) != with_font
    assert all(CHINESE.values())


def test_equal_seeds_write_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        call("--scenarios", "A3", *SHORT, "--seed", "3", "--output-dir", str(tmp_path / folder))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_without_json_a_table_is_printed() -> None:
    result = call("--scenarios", "A1", *SHORT, "--seeds", "1-2")
    assert result.exit_code == 0
    assert result.stdout.startswith("A1: ")  # the verdict
    assert "IR > 1.25" in result.stdout
    assert "means over 2 seeds" in result.stdout


def test_the_verdict_names_all_that_are_best_and_says_if_loads_differ() -> None:
    def collected(**figures: tuple[float, float]) -> dict[str, Any]:
        return {
            name: {
                "confidence": {
                    "ir_over_1_25": {"mean": ir},
                    "slo_rate": {"mean": slo},
                    "drop_rate": {"mean": 0.1},
                    "name": name,
                }
            }
            for name, (ir, slo) in figures.items()
        }

    lines = verdict(collected(A=(0.0001, 0.5), B=(0.0, 0.7), C=(0.05, 0.7)), {}, same_load=False)
    assert lines[0].startswith("Isolation is best in A, B: 0.0 % of started tasks")
    assert lines[0].endswith("5.0 % in C.")
    assert lines[1] == "Most tasks meet their deadline in B, C (70.0 %), fewest in A (50.0 %)."
    assert lines[2].endswith("to compare them under one load.")

    by_chance = collected(A=(0.01, 0.512), B=(0.2, 0.509))
    for each in ("A", "B"):
        for name in ("ir_over_1_25", "slo_rate"):
            figures = by_chance[each]["confidence"][name]
            figures |= {"low": figures["mean"] - 0.08, "high": figures["mean"] + 0.08}
    isolation, deadlines = verdict(by_chance, {})
    assert isolation.startswith("Isolation is best in A: 1.0 %")
    assert deadlines.startswith("No scenario meets more deadlines: 50.9 % to 51.2 %, and the confidence")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scenarios", "A9"), "unknown scenario 'A9'; known are A1, A2"),
        (("--scenarios", "A1,a1"), "names a scenario twice"),
        (("--scenarios", "no/such.toml"), "no/such.toml: No such file"),
        (("--profiles", "llm-batch,nope"), "unknown profile 'nope'; known are llm-batch"),
        (("--duration", "0.015", "--scenarios", "A1"), "is not a multiple of delta_t_s = 0.01"),
        (("--duration", "-5", "--scenarios", "A1"), "'--duration': -5.0 is not in the range x>0"),
        (("--duration", "inf", "--scenarios", "A1"), "'--duration': 'inf' is not a finite number"),
        (("--duration", "nan", "--scenarios", "A1"), "'--duration': 'nan' is not a finite number"),
        (("--delta-t", "0", "--scenarios", "A1"), "'--delta_t': 0.0 is not in the range x>0"),
        (("--delta-t", "0.003", "--scenarios", "A1"), "is not a multiple"),
        (("--delta-t", "0.004", "--scenarios", "A1"), "a multiple or a whole fraction of the 0.01 s grid"),
        (("--seeds", "5-1"), "'5-1' ends before it begins"),
        (("--seeds", "x"), "'x' is neither a number nor a range"),
        (("--seeds", ""), "'' is neither a number nor a range"),
        (("--seed", "-1", "--scenarios", "A1"), "-1 is not in the range x>=0"),
        (
            ("--duration", "1e300", "--scenarios", "A1"),
            "duration_s = 1e+300 is 1e+302 ticks, above 10,000,000",
        ),
        (("--hist-bucket", "nan", "--scenarios", "A1"), "'nan' is not a finite number"),
        (("--tasks", "-1"), "--tasks"),
        (("--tasks", "10001", "--scenarios", "A1"), "10001 is not in the range 0<=x<=10000"),
        (("--arrival", "never"), "--arrival"),
        (("--jobs", "0"), "--jobs"),
        (("--sweep", "speed:1,2"), "'speed:1,2' is not AXIS:VALUES with an axis of tasks, duration"),
        (("--sweep", "tasks:1,x"), "'x' is not a valid integer range"),
        (("--sweep", "tasks:1", "--sweep", "tasks:2"), "tasks is varied twice"),
        (("--sweep", "limit_threshold:0.9", "--scenarios", "A3"), "limit_threshold: Input should be greater"),
        (("--sweep", "card_factor:0", "--scenarios", "A3"), "A3: card_factor must be above 0, got 0"),
        (
            ("--sweep", "oversubscription:9", "--scenarios", "A3"),
            "'llm-batch' fits no node, not even an empty",
        ),
        (
            ("--sweep", "oversubscription:1e308", "--scenarios", "A2-MIG"),
            "'llm-batch' fits no node, not even an empty one: it needs inf compute_tflops",
        ),
        (("--trace", "trace.json", "--scenarios", "A1,A3"), "--trace is for one run"),
        (("--trace-ticks", "5", "--scenarios", "A1"), "--trace-ticks is for the trace"),
    ],
)
def test_invalid_input_gives_one_line_and_status_2(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    out = tmp_path / "out"
    result = call(*arguments, "--output-dir", str(out), "--engine", "plain")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not out.exists()


def test_unused_options_are_refused() -> None:
    bucket = call("--scenarios", "A1", "--hist-bucket", "0.2", "--engine", "plain")
    assert bucket.exit_code == 2
    assert "--hist-bucket is for the reports; give their folder with --output-dir" in bucket.stderr
    seeds = call("--scenarios", "A1", "--seed", "3", "--seeds", "1-2", "--engine", "plain")
    assert seeds.exit_code == 2
    assert "--seed is for one run; use either --seed or --seeds" in seeds.stderr


def test_a_file_at_the_path_of_the_output_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("here first")
    result = call("--scenarios", "A1", *SHORT, "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert (tmp_path / "out").read_text() == "here first"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title = ", "mine.toml: not TOML: Invalid value (at "),
        ('base = "A3"\ntasks = 1\nspeed = 3', "mine.toml: speed: unknown key"),
        ('base = "A3"\n[guard]\nboost = 2', "guard.boost: unknown key"),
        ('base = "A3"\ntasks = -4', "tasks: Input should be greater than or equal to 0, got -4"),
        ('base = "A3"\ntasks = "4"', "tasks: Input should be a valid integer, got '4'"),
        ('base = "A7"', "unknown scenario 'A7'"),
        (f'base = "A3"\nscheduling.interval_ticks = {10**9}', "interval_ticks: Input should be less than"),
        (f'base = "A3"\nguard.adjust_interval_ticks = {10**9}', "interval_ticks: Input should be less than"),
        (
            'base = "A3"\nnodes = [{name = "n", card = "A100", cards = 1025}]',
            "nodes[0].cards: Input",
        ),
        ('base = "mine.toml"', "leads back to itself"),
        ('base = "A1"\nname = "../x"', "name: not allowed, a scenario has the name of its file"),
        ('\ufeffbase = "A1"\ntasks = -1', "tasks: Input should be greater than or equal to 0, got -1"),
        (
            'base = "A1"\n[[nodes]]\nname = ""\ncard = "A100"\ncards = 1',
            "nodes[0].name: String should have at",
        ),
        ("base = 3", "base: must be the name of a scenario, got 3"),
        (
            'base = "A1"\n[cards.A100]\nmemory_gb = -80',
            "cards.A100.memory_gb: Input should be greater than 0",
        ),
        ('base = "A1"\n[[nodes]]\nname = "n"\ncard = "B200"\ncards = 1', "'n' has the unknown card 'B200'"),
        ('base = "A1"\n[[nodes]]\nname = "n"\ncard = "A100"\ncards = 0', "nodes[0].cards: "),
        (
            'base = "A1"\n[[nodes]]\nname = "n"\ncard = "A100"\ncards = 1\n'
            '[[nodes]]\nname = "n"\ncard = "A100"\ncards = 1',
            "two nodes have the name 'n'",
        ),
        ('base = "A1"\nnodes = []', "nodes: "),
        ('base = "A1"\n[scheduling.performance]\namd = 2.0', "names the unknown vendor 'amd'"),
        ('base = "A1"\n[sandbox]\nlimit_threshold = 0.9', "sandbox.limit_threshold: "),
        ('base = "A1"\n[scheduling]\npartition = "half"', "scheduling.partition: "),
    ],
)
def test_invalid_scenario_files_are_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    result = call("--scenarios", str(tmp_path / "mine.toml"), "--engine", "plain")
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


PROFILE = """
base = "A1"
[[profiles]]
name = "giant"
compute_tflops = {compute}
memory_gb = 40
bandwidth_gbps = 400
workload_tflop = 100
deadline_s = 10
vendors = ["{vendor}"]
"""


@pytest.mark.parametrize(
    ("compute", "vendor", "says"),
    [
        (
            700,
            "nvidia",
            "profile 'giant' fits no node, not even an empty one: it needs 735 compute_tflops, 42 memory_gb,"
            " 420 bandwidth_gbps of nvidia",
        ),
        (100, "amd", "profile 'giant' names the unknown vendor 'amd'; known are huawei, nvidia"),
        (1e-300, "nvidia", "'giant': workload_tflop / compute_tflops is 1e+302 s, not within 1e-15 to 1e+15"),
        (-1, "nvidia", "profiles[0].compute_tflops: Input should be greater than 0, got -1"),
    ],
)
def test_invalid_profiles_are_refused_with_the_reason(
    tmp_path: Path, compute: float, vendor: str, says: str
) -> None:
    (tmp_path / "mine.toml").write_text(PROFILE.format(compute=compute, vendor=vendor))
    result = call("--scenarios", str(tmp_path / "mine.toml"), *SHORT)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_profile_named_twice_counts_once() -> None:
    where = load_scenario("A1")
    once, twice = ("llm-batch", "feature-etl"), ("llm-batch", "llm-batch", "feature-etl")
    assert without_profiles_except(where, twice) == without_profiles_except(where, once)


def test_a_change_of_a_key_inside_a_value_is_refused() -> None:
    with pytest.raises(InputError, match=r"A3: tasks\.all: tasks is not a table"):
        load_scenario("A3", {"tasks.all": 3})


def test_a_scenario_of_a_user_needs_only_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'base = "A3"\ntitle = "Mine"\ntasks = 8\nduration_s = 30\n[sandbox]\nlimit_threshold = 1.2\n'
    )
    (tmp_path / "wider.toml").write_text('base = "mine.toml"\n[scheduling]\noversubscription = 1.2\n')
    wider = load_scenario(str(tmp_path / "wider.toml"))
    assert (wider.name, wider.tasks, wider.sandbox.limit_threshold) == ("wider", 8, 1.2)
    assert wider.scheduling.oversubscription == 1.2
    result = call("--scenarios", f"{tmp_path / 'mine.toml'},A1", *SHORT, "--json")
    assert list(json.loads(result.stdout)["scenarios"]) == ["mine", "A1"]
