"""Comparisons: equal results over any executor, resumable, with a self-contained page."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from simulator import sweep
from simulator.cli import main
from simulator.errors import SimulationError
from simulator.replay import comparison, metrics, report, verdict
from simulator.replay.compare_command import copied
from simulator.replay.comparison import Source
from simulator.replay.report import MAX_HEAT_MAPS
from tests import package_policies
from tests.simulator.refusing import assert_refused
from tests.simulator.rounds.small import shockwave_job, write_pollux, write_shockwave

NODES = "node,gpus,cpus\na,4,16\nb,2,16\n"
JOBS = "job,submit_s,runtime_s,gpus,cpus,team\n" + "".join(
    f"j{i},{i * 20},{50 + 37 * i % 200},{1 + i * 7 % 4},1,{'red' if i % 3 else 'blue'}\n" for i in range(40)
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "jobs.csv").write_text(JOBS)
    return tmp_path


def source(own: Path) -> Source:
    return Source("jobs", (str(own / "nodes.csv"), str(own / "jobs.csv")))


def some_cases(own: Path) -> list[comparison.Case]:
    return comparison.cases(source(own), ["first_fit", "random"], ["fifo", "srtf+backfill"], [1, 2])


def test_cases_combine_policies_orders_and_seeds(own: Path) -> None:
    """Only the policy `random` runs once for each seed."""
    found = [(case.policy, case.order, case.seed) for case in some_cases(own)]
    assert found == [
        ("first_fit", "fifo", 1),
        ("first_fit", "srtf+backfill", 1),
        ("random", "fifo", 1),
        ("random", "fifo", 2),
        ("random", "srtf+backfill", 1),
        ("random", "srtf+backfill", 2),
    ]


def test_every_executor_gives_the_same_results(own: Path) -> None:
    cases = some_cases(own)
    expected = [comparison.run_case(case) for case in cases]
    with ThreadPoolExecutor(2) as threads:
        assert sweep.sweep(comparison.run_case, cases, threads) == expected
    with sweep.processes(2) as processes:
        assert sweep.sweep(comparison.run_case, cases, processes) == expected


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_results(own: Path) -> None:
    distributed = pytest.importorskip("distributed")
    cases = some_cases(own)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as cluster,
        sweep.dask(cluster.scheduler_address) as executor,
    ):
        assert sweep.sweep(comparison.run_case, cases, executor) == [comparison.run_case(c) for c in cases]


@dataclass(frozen=True)
class Numbered:
    number: int

    def fingerprint(self) -> str:
        return str(self.number)


class FailingRun:
    """A run that counts its calls and fails at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen: list[int] = []

    def __call__(self, case: Numbered) -> dict[str, Any]:
        self.seen.append(case.number)
        if case.number == self.at:
            raise RuntimeError("power cut")
        return {"square": case.number**2}


@pytest.fixture
def one_by_one() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_an_interrupted_sweep_is_resumed(tmp_path: Path, one_by_one: Executor) -> None:
    cases = [Numbered(number) for number in range(6)]
    first = FailingRun(at=3)
    with pytest.raises(RuntimeError, match="power cut"):
        sweep.sweep(first, cases, one_by_one, folder=tmp_path)
    done = len(list(tmp_path.glob("*.json")))
    assert 0 < done <= 3
    second = FailingRun(at=None)
    results = sweep.sweep(second, cases, one_by_one, folder=tmp_path)
    assert results == [{"square": number**2} for number in range(6)]
    assert len(second.seen) == 6 - done


def test_a_damaged_result_is_run_again(tmp_path: Path, one_by_one: Executor) -> None:
    run = FailingRun(at=None)
    sweep.sweep(run, [Numbered(2)], one_by_one, folder=tmp_path)
    next(tmp_path.glob("*.json")).write_text("{half")
    assert sweep.sweep(run, [Numbered(2)], one_by_one, folder=tmp_path) == [{"square": 4}]
    assert run.seen == [2, 2]


def killed(case: Numbered) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_process_that_is_killed_is_named() -> None:
    with pytest.raises(SimulationError, match="want of memory: use fewer"), sweep.processes(2) as pool:
        sweep.sweep(killed, [Numbered(1), Numbered(2)], pool)


def tell_and_wait(begun: Path, goes_on: Path) -> str:
    begun.write_text("")
    return goes_on.read_text()


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, ValueError])
def test_no_run_is_waited_for_whose_result_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: type[BaseException]
) -> None:
    """Ctrl-C comes twice at once from `timeout -s INT`."""
    shutdown = ProcessPoolExecutor.shutdown

    def interrupted(pool: ProcessPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if ended_by is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        shutdown(pool, wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", interrupted)
    begun, goes_on = tmp_path / "begun", tmp_path / "goes_on"
    for path in (begun, goes_on):
        os.mkfifo(path)
    late = threading.Timer(9, goes_on.write_text, ("",))  # lets a pool end that waits for the run
    late.daemon = True
    before = signal.getsignal(signal.SIGINT)
    late.start()
    runs: list[Future[str]] = []

    def end_while_it_runs() -> None:
        with sweep.processes(2) as pool:
            runs.append(pool.submit(tell_and_wait, begun, goes_on))
            begun.read_text()
            raise ended_by

    with pytest.raises(ended_by):
        end_while_it_runs()
    assert isinstance(runs[0].exception(), BrokenExecutor)
    late.cancel()
    assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C is heard again"


def ignored(signal_number: int) -> bool:
    return signal.getsignal(signal_number) is signal.SIG_IGN


def test_a_process_of_the_runs_leaves_ctrl_c_to_the_command() -> None:
    with sweep.processes(2) as pool:
        assert pool.submit(ignored, signal.SIGINT).result()


def compare(own: Path, *more: str) -> Result:
    arguments = ["compare", "--trace", "csv", "--nodes", str(own / "nodes.csv")]
    return CliRunner().invoke(main, [*arguments, "--jobs", str(own / "jobs.csv"), "--workers", "1", *more])


def test_command_writes_one_page(own: Path) -> None:
    out = own / "out"
    more = ("--policies", "first_fit,fgd", "--orders", "fifo,fair_share", "--output-dir", str(out), "--json")
    result = compare(own, *more)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert [row["name"] for row in summary["rows"]] == [
        "first_fit, fifo",
        "first_fit, fair_share",
        "fgd, fifo",
        "fgd, fair_share",
    ]
    assert summary["verdict"][0].startswith("Keep first_fit, fifo")
    assert summary["cautions"] == [
        "Only 40 jobs: with fewer than 50, a difference may be chance; compare over a longer time."
    ]
    assert len(summary["findings"]) == 1  # both policies place alike, so each order is one line
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "first_fit, fair_share = fgd, fair_share" in page
    assert 'src="' not in page
    lines = [*summary["verdict"], *summary["cautions"], *summary["findings"]]
    places = [page.index(f"<p>{line}</p>") for line in lines]
    assert places == sorted(places)
    again = compare(own, *more)
    assert json.loads(again.stdout) == summary
    assert len(list((out / "runs").glob("*.json"))) == 4


def test_a_distribution_has_each_job_once(own: Path) -> None:
    [result] = [comparison.run_case(case) for case in comparison.cases(source(own), ["fgd"], ["fifo"], [0])]
    assert len(result["waits_s"]) == len(result["jct_s"]) == 40
    assert result["waits_s"][-1] == result["summary"]["max_wait_s"]


def test_of_many_jobs_a_distribution_has_some_and_the_last(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_VALUES", 20)
    [result] = [comparison.run_case(case) for case in comparison.cases(source(own), ["fgd"], ["fifo"], [0])]
    assert len(result["waits_s"]) == 21
    assert result["waits_s"][-1] == result["summary"]["max_wait_s"]


def test_a_narrow_terminal_truncates_no_name_or_figure(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = compare(own, "--policies", "gpu_clustering", "--orders", "fair_share+backfill")
    [row] = [line for line in result.stdout.splitlines() if "│ gpu_clustering, fair_share+backfill" in line]
    assert row.endswith("│")
    assert "…" not in result.stdout


def test_a_changed_file_is_run_again(own: Path, one_by_one: Executor) -> None:
    cases = some_cases(own)[:1]
    jobs = []
    for text in (JOBS, JOBS + "more,900,10,1,1,red\n"):
        (own / "jobs.csv").write_text(text)
        results = sweep.sweep(comparison.run_case, cases, one_by_one, folder=own / "runs")
        jobs.append(results[0]["summary"]["jobs"])
    assert jobs == [40, 41]


def test_a_run_is_repeated_if_the_package_of_its_policy_has_changed(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_policies.install(own, monkeypatch)
    monkeypatch.delitem(sys.modules, "our_policies", raising=False)
    cases = comparison.cases(source(own), ["first_fit", "good"], ["fifo"], [1])
    before = [case.fingerprint() for case in cases]
    (own / "our_policies.py").write_text(f"{package_policies.CODE}# changed\n")
    assert [case.fingerprint() == old for case, old in zip(cases, before, strict=True)] == [True, False]


@pytest.mark.parametrize("study", ["pollux", "shockwave"])
def test_a_run_depends_on_the_files_of_its_study_and_not_on_what_is_written_beside_them(
    tmp_path: Path, study: str
) -> None:
    if study == "pollux":
        made = Source(study, (str(write_pollux(tmp_path, "a,0,toy,1,8")), "1.0", "1"))
    else:
        made = Source(study, (str(write_shockwave(tmp_path, shockwave_job(0))),))
    before = made.fingerprint()
    stamped = {entry[0] for entry in before if isinstance(entry, list)}
    assert stamped == {str(path) for path in tmp_path.rglob("*.*") if path.is_file()}
    (tmp_path / "out" / "runs").mkdir(parents=True)
    for name in ("summary.json", "runs/0123.json"):
        (tmp_path / "out" / name).write_text("{}")
    assert made.fingerprint() == before


def test_an_equal_copy_of_a_history_leaves_the_kept_runs_good(tmp_path: Path) -> None:
    """A comparison of a store's history writes it into the folder again each time."""
    history, folder = tmp_path / "history.jsonl", tmp_path / "runs"
    prints = []
    for text in ("one", "one", "two"):
        history.write_text(text)
        copy = copied(Source("history", (str(history),)), folder)
        assert Path(copy.paths[0]).read_text() == text
        prints.append(copy.fingerprint())
        if len(prints) == 1:
            os.utime(copy.paths[0], ns=(0, 0))
            prints = [copy.fingerprint()]
    assert prints[0] == prints[1] != prints[2]


def row(name: str, **figures: float) -> dict[str, Any]:
    return {
        "case": {"name": name},
        "summary": figures,
        "curve": {"frag_ratio_percent": [figures.get("lost", 0)] * 131},
    }


def test_many_runs_of_the_same_figures_have_a_short_name_and_are_listed_once() -> None:
    names = [f"{policy}, {order}" for policy in ("first_fit", "best_fit", "fgd") for order in ("fifo", "sjf")]
    table = report.table_of([timed(name) for name in names])
    assert [row[0] for row in table.rows] == ["first_fit, fifo and 5 equal ones"]
    assert table.note.endswith(f" Equal to first_fit, fifo: {'; '.join(names[1:])}.")


def test_findings_call_a_figure_the_reason_only_where_it_agrees() -> None:
    first = row("first_fit", pods=1, allocated_percent=93.1, lost=74.1)
    better = row("fgd", pods=1, allocated_percent=95.4, lost=50.0)
    odd = row("odd", pods=1, allocated_percent=94.1, lost=80.0)
    assert verdict.findings([first, better, odd]) == [
        "fgd places 2.3 points more than first_fit, because when 90 % of the load has arrived, 50.0 % of the "
        "GPU capacity that it leaves free is of no use, 74.1 % of that of first_fit.",
        "odd places 1.0 points more than first_fit, although when 90 % of the load has arrived, 80.0 % of "
        "the GPU capacity that it leaves free is of no use, 74.1 % of that of first_fit.",
    ]
    alike = row("alike", pods=1, allocated_percent=92.1, lost=74.12)
    assert verdict.findings([first, alike]) == ["alike places 1.0 points less than first_fit."]


def test_the_best_placing_is_named_only_where_it_differs() -> None:
    best = [row(name, pods=1, allocated_percent=95.4, lost=50.0) for name in ("fgd", "best_fit")]
    when = "95.4 % of the GPUs when 130 % of them have been requested"
    worse = row("first_fit", pods=1, allocated_percent=93.1, lost=74.1)
    assert verdict.verdict(best[:1]) == [f"fgd uses {when}."]
    assert verdict.verdict([worse, best[0]]) == [
        f"The cluster is filled best by fgd: {when}, 2.3 points more than first_fit."
    ]
    assert verdict.verdict([worse, *best]) == [
        f"The cluster is filled best by fgd = best_fit: {when}, 2.3 points more than first_fit."
    ]
    [none] = verdict.verdict(best)
    assert none.endswith(f"no difference on this workload: each uses {when}.")


@pytest.mark.parametrize(
    ("used", "lost", "fact"),
    [
        (80, 5, "with 80.0 % of the GPUs in use over time instead of 70.0 %"),
        (60, 5, "with 60.0 % of the GPUs in use over time instead of 70.0 %"),
        (70.7, 1, "with 1.0 % of the free GPU capacity of no use instead of 5.0 %"),
        (70, 5, "and 2.5 hours instead of 2 minutes at most"),
    ],
)
def test_a_shorter_wait_stands_beside_the_measure_that_differs(used: float, lost: float, fact: str) -> None:
    slow = row("slow", mean_wait_s=40.0, max_wait_s=120.0, allocated_percent=70, frag_ratio_percent=5)
    quick = row("quick", mean_wait_s=30.0, max_wait_s=9000.0, allocated_percent=used, frag_ratio_percent=lost)
    assert verdict.findings([slow, quick]) == [
        f"Jobs wait 25 % shorter under quick than under slow: 30 instead of 40 s on average, {fact}."
    ]


def test_a_longest_wait_that_is_the_same_is_said_once() -> None:
    slow, quick = (
        row(name, mean_wait_s=wait, max_wait_s=9000.0, allocated_percent=70, frag_ratio_percent=5)
        for name, wait in (("slow", 40.0), ("quick", 30.0))
    )
    [said] = verdict.findings([slow, quick])
    assert said.endswith("30 instead of 40 s on average, and 2.5 hours at most, as before.")


def timed(name: str, **figures: Any) -> dict[str, Any]:
    policy, order = name.split(", ")
    usual = {"jobs": 400, "started": 400, "mean_wait_s": 7200.0, "max_wait_s": 9000.0, "stated_runtimes": 400}
    case = {"name": name, "policy": policy, "order": order}
    return {"case": case, "summary": usual | {"allocated_percent": 50.0, "known_runtimes": 400} | figures}


def test_fairness_is_defined_below_its_columns() -> None:
    fair = timed("first_fit, fifo", worst_ftf=1.2, unfair_percent=3.0)
    table = report.table_of([fair])
    assert {"worst fairness", "treated unfairly"} <= set(table.heads())
    assert (
        "Fairness: a job's time from submission to end over the time with an equal share of the cluster "
        "among all jobs (Themis); the worst of a run, and the part above 1.05, treated unfairly."
        in table.note
    )
    assert "Fairness" not in report.table_of([timed("first_fit, fifo")]).note


def test_a_verdict_names_the_change_that_asks_for_the_fewest_settings() -> None:
    results = [
        timed("first_fit, fifo"),
        timed("fgd, fifo", mean_wait_s=6000.0),
        timed("fgd, fifo+backfill", mean_wait_s=3599.0, max_wait_s=600.0),
        timed("first_fit, fifo+backfill", mean_wait_s=3600.0, max_wait_s=600.0),
        timed("fgd, srtf", mean_wait_s=9.0, started=399),  # it starts fewer jobs
    ]
    assert verdict.verdict(results) == [
        "Change from first_fit, fifo to first_fit, fifo+backfill: on this workload jobs would wait 1 "
        "instead of 2 hours on average (50 % less), and 10 minutes instead of 2.5 hours at most.",
        'To do so, set order = "fifo+backfill" in [cluster] and apply it.',
    ]
    assert verdict.cautions(results) == [
        "Jobs do not start under fgd, srtf (1), and count in no wait: compare the jobs started, too."
    ]


def test_quotas_are_weights_of_the_teams_file_in_a_manager() -> None:
    """Nothing is said of them where they were in force before, too."""
    shared = timed("first_fit, fair_share", mean_wait_s=600.0)
    shared["case"]["quotas"] = (("a", 0.9), ("b", 0.1))
    assert verdict.verdict([timed("first_fit, fifo"), shared])[-1] == (
        'To do so, set order = "fair_share" in [cluster] and apply it and for each team weight = its quota '
        "in the teams file."
    )
    before = timed("fgd, fair_share", mean_wait_s=7200.0)
    assert verdict.verdict([before, shared])[-1] == (
        'To do so, set policy = "first_fit" in [cluster] and apply it.'
    )


def test_no_change_is_advised_where_the_intervals_over_the_seeds_overlap() -> None:
    first = [timed("random, fifo", mean_wait_s=wait) for wait in (7000.0, 7400.0)]
    unsure = [timed("random, sjf", mean_wait_s=wait) for wait in (2000.0, 7000.0)]
    [keep] = verdict.verdict([*first, *unsure])
    assert keep.startswith("Keep random, fifo: under random, sjf jobs would wait 1.2")
    assert keep.endswith("but the 95 % confidence intervals overlap: compare over more seeds.")
    clear = [timed("random, sjf", mean_wait_s=wait) for wait in (2000.0, 2050.0)]
    assert verdict.verdict([*first, *clear])[0].startswith("Change from random, fifo to random, sjf")
    beside = [timed("random, srtf", mean_wait_s=wait) for wait in (2010.0, 2300.0)]
    advice = verdict.verdict([*first, *clear, *beside])
    assert "random, sjf is no better than random, srtf beyond chance." in advice


def test_a_group_is_named_only_beyond_the_intervals_over_the_seeds() -> None:
    def runs(name: str, *waits: float) -> list[dict[str, Any]]:
        steady = {"team a": [200, waits[-1]]}
        return [
            timed(name, mean_wait_s=waits[-1], waits_of={**steady, "team b": [200, wait]}) for wait in waits
        ]

    who = verdict.verdict([*runs("random, fifo", 8000.0, 9000.0), *runs("random, sjf", 1000.0, 6000.0)])[0]
    assert "these wait less: team a (" in who
    assert "team b" not in who


def test_winners_and_losers_stand_before_the_advice() -> None:
    before = {"jobs of up to 1 GPU": [300, 7200.0], "team a": [200, 9000.0], "team b": [200, 5400.0]}
    now = {"jobs of up to 1 GPU": [300, 600.0], "team a": [200, 0.0], "team b": [200, 5460.0]}
    quick = timed("fgd, fifo", mean_wait_s=3600.0, waits_of=now)
    who, advice, _ = verdict.verdict([timed("first_fit, fifo", waits_of=before), quick])
    assert who == (
        "Under fgd, fifo these wait less: team a (0 s instead of 2.5 hours), jobs of up to 1 GPU (10 minutes "
        "instead of 2 hours); these wait longer: none."
    )
    assert advice.startswith("Change from first_fit, fifo to fgd, fifo")
    now["team b"] = [200, 7200.0]
    assert (
        "these wait longer: team b (2 instead of 1.5 hours)."
        in verdict.verdict([timed("first_fit, fifo", waits_of=before), quick])[0]
    )


@pytest.mark.parametrize(
    ("figures", "reason", "caution"),
    [
        (
            {"max_wait_s": 0.5, "mean_wait_s": 0.1},
            "no job had to wait for longer than a second",
            "No job waited",
        ),
        ({"stated_runtimes": 0}, "no request states a runtime, so backfill had nothing", "No request states"),
        (
            {"stated_runtimes": 3},
            "every run starts the same jobs at the same times",
            "Only 3 of 400 jobs state",
        ),
        (
            {"stated_runtimes": 1},
            "every run starts the same jobs at the same times",
            "Only 1 of 400 jobs states a runtime, so backfill",
        ),
        (
            {"jobs": 401},
            "every run starts the same jobs at the same times",
            "Jobs do not start under first_fit",
        ),
        ({"preemptions": 7}, "every run starts the same jobs at the same times", "Jobs are preempted under "),
        ({"jobs": 49}, "every run starts the same jobs at the same times", "Only 49 jobs"),
        (
            {"known_runtimes": 0},
            "every run starts the same jobs at the same times",
            "No job ends in this record",
        ),
    ],
)
def test_a_verdict_says_why_there_is_no_difference(
    figures: dict[str, Any], reason: str, caution: str
) -> None:
    names = ("first_fit, fifo", "first_fit, fifo+backfill", "fgd, fifo", "fgd, fifo+backfill")
    results = [timed(name, recorded_mean_wait_s=1.0, **figures) for name in names]
    [line] = verdict.verdict(results)
    assert line.startswith(f"Order and policy make no difference on this history: {reason}")
    assert [line for line in verdict.cautions(results) if line.startswith(caution)]
    assert verdict.findings(results) == []


def test_more_runs_than_heat_maps_are_announced(own: Path) -> None:
    cases = comparison.cases(source(own), ["first_fit"], ["fifo", "srtf", "fair_share"], [0])
    results = [comparison.run_case(case) for case in cases]
    assert "different runs" not in report.page_of("All", results)
    case, heat = results[0]["case"], results[0]["heat"]
    for number in range(MAX_HEAT_MAPS - 2):
        other = {**heat, "end_s": heat["end_s"] + number + 1}
        results.append({**results[0], "case": {**case, "name": f"other {number}"}, "heat": other})
    assert f"The first {MAX_HEAT_MAPS} of {MAX_HEAT_MAPS + 1} different runs" in report.page_of(
        "Many", results
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policies", "first_fit,worst"], "unknown policy 'worst'"),
        (["--orders", "lifo"], "unknown queue order 'lifo'"),
        (["--seeds", "3,5-1"], "'5-1' ends before it begins"),
        (
            ["--policies", "first_fit,tiresias", "--seeds", "1-3"],
            "--seeds has no effect with first_fit, tiresias: none of them draws",
        ),
        (
            ["--policies", "tiresias", "--orders", "srtf"],
            "--orders has no effect with tiresias: round policies rank all jobs in every round",
        ),
        (["--seeds", "1-99999999999"], "makes more than 100,000 seeds"),
        (["--seed", "1", "--seeds", "2-3"], "--seed is for one run; use either --seed or --seeds"),
        (["--dask", "tcp://there:1"], "--workers sets the number of local processes; it cannot be used with"),
        (["--quotas", "red=1"], "--quotas applies only to the order fair_share"),
        (
            ["--orders", "fair_share", "--quotas", "red=1", "--teams", "t.toml"],
            "--quotas has no effect with --teams: the weights of the teams are the quotas there",
        ),
        (
            ["--policies", "tiresias,gandiva_fair", "--teams", "t.toml"],
            "--teams has no effect with tiresias, gandiva_fair: round policies rank all jobs in every round",
        ),
        (
            ["--policies", "tiresias", "--checkpoint-every", "9", "--teams", "t.toml"],
            "has no effect with tiresias: round policies rank",
        ),
        (["--data", "there"], "--data cannot be used with --trace csv"),
        (["--quotas", "red=2"], "is not a list of shares"),
    ],
)
def test_bad_input_runs_nothing(own: Path, more: list[str], message: str) -> None:
    result = compare(own, *more, "--output-dir", str(own / "out"), "--json")
    assert_refused(result, message)
    assert not (own / "out").exists()


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("tcp://127.0.0.1:1", "Error: no Dask scheduler at tcp://127.0.0.1:1: "),
        ("host", "Error: --dask must be an address such as tcp://host:8786, got 'host'"),
    ],
)
def test_an_unreachable_dask_cluster_is_named(
    own: Path, monkeypatch: pytest.MonkeyPatch, address: str, line: str
) -> None:
    monkeypatch.setattr(sweep, "CONNECT_TIMEOUT", "0.2s")
    files = ["--nodes", str(own / "nodes.csv"), "--jobs", str(own / "jobs.csv")]
    result = CliRunner().invoke(main, ["compare", "--trace", "csv", *files, "--dask", address])
    assert result.exit_code == 2
    assert result.stderr.startswith(line)
