"""The replay of the Muri traces gives the published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.cli import main
from simulator.replay.muri import COLUMNS, read_jobs, replay
from tests.simulator.refusing import assert_refused


def assert_published(shared_data: Path, trace: str, order: str) -> None:
    folder = shared_data / "muri"
    text = (folder / "expected.json").read_text()
    expected = json.loads(text, parse_float=str)[trace][order]
    summary = replay(read_jobs(folder, trace), order)
    for name, printed in expected.items():
        digits = len(str(printed).partition(".")[2])
        assert summary[name] == pytest.approx(float(printed), abs=1.01 * 10**-digits, rel=0), name


@pytest.mark.parametrize("order", ["srtf", "srsf"])
def test_trace3_gives_the_published_figures(shared_data: Path, order: str) -> None:
    assert_published(shared_data, "trace3", order)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["srtf", "srsf"])
@pytest.mark.parametrize(
    "trace", ["trace3_pr", *(pytest.param(trace, marks=pytest.mark.e2e) for trace in ("trace1", "trace1_pr"))]
)
def test_every_trace_gives_the_published_figures(shared_data: Path, trace: str, order: str) -> None:
    assert_published(shared_data, trace, order)


def write(folder: Path, *rows: str) -> Path:
    (folder / "made.csv").write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return folder


def test_the_overhead_is_charged_at_each_event(tmp_path: Path) -> None:
    """Two jobs of 32 GPUs run side by side; the running one pays for the arrival and the end of the other.

    One iteration of 1000 ms takes 1.015 s. `a` (32 GPUs, 1,000 iterations) starts at 0; `b` (32 GPUs) at
    100 fits beside it, and costs `a` 10 s of progress; `b` ends at 100 + 101.5 and costs `a` 10 s more.
    """
    write(tmp_path, "a,32,0,1000,bert,1000", "b,32,100000,100,bert,1000")
    summary = replay(read_jobs(tmp_path, "made"), "srtf")
    assert summary["jobs"] == 2
    assert summary["makespan_s"] == pytest.approx(1015 + 10 + 10)
    assert summary["mean_jct_s"] == pytest.approx((1035 + 101.5) / 2)
    assert summary["p99_jct_s"] == pytest.approx(1035)


def test_an_event_costs_no_more_than_the_time_since_the_last_one(tmp_path: Path) -> None:
    """At 5 s `a` has no progress to lose, and loses none; b's end at 106.5 s costs it 10 s of 101.5."""
    write(tmp_path, "a,32,0,1000,bert,1000", "b,32,5000,100,bert,1000")
    jobs = read_jobs(tmp_path, "made")
    replay(jobs, "srtf")
    assert [job.ended_at for job in jobs] == pytest.approx([5 + 1015 + 10, 106.5])


def test_jobs_that_end_together_end_in_one_event(tmp_path: Path) -> None:
    """Otherwise the second of them would pay for the end of the first."""
    write(tmp_path, *(f"{name},8,0,100,bert,1000" for name in "abc"))
    jobs = read_jobs(tmp_path, "made")
    replay(jobs, "srtf")
    assert [job.ended_at for job in jobs] == pytest.approx([101.5] * 3)


def test_a_job_too_large_for_the_idle_gpus_is_skipped(tmp_path: Path) -> None:
    """Beside a and b 31 GPUs are idle: too few for c, of 32, but not for d, which c displaces after a."""
    rows = ["a,1,0,100,bert,1000", "b,32,0,200,bert,1000", "c,32,0,300,bert,1000", "d,1,0,400,bert,1000"]
    write(tmp_path, *rows)
    jobs = read_jobs(tmp_path, "made")
    replay(jobs, "srtf")
    a, b, c, d = (job.ended_at for job in jobs)
    assert (a, b) == pytest.approx((101.5, 203 + 10))
    assert c == pytest.approx(101.5 + 304.5 + 10)  # it pays for the end of b
    assert d == pytest.approx(213 + (406 - 91.5) + 10)  # from the end of b on; it paid for that of a


def test_shortest_service_multiplies_time_by_gpus(tmp_path: Path) -> None:
    """64 GPUs: 100 s on 32 of them are 3,200 GPU seconds, 300 s on 8 are 2,400, so these go first."""
    rows = ["wide,32,0,100,bert,1000", "long,8,0,300,bert,1000"]
    ends = {}
    for order in ("srtf", "srsf"):
        write(tmp_path, *rows, "other,32,0,50,bert,1000")
        jobs = read_jobs(tmp_path, "made")
        replay(jobs, order)
        ends[order] = {job.parts[0].lease_id.split("/")[0]: job.ended_at for job in jobs}
    assert ends["srtf"]["long"] > ends["srtf"]["wide"]
    assert ends["srsf"]["long"] < ends["srtf"]["long"]
    assert ends["srsf"]["wide"] > ends["srtf"]["wide"]


def test_vgg16_on_32_gpus_loses_ten_seconds_at_an_event(tmp_path: Path) -> None:
    """The published figures need 10 s, though every other size of the model loses 7 to 9 s."""
    write(tmp_path, "a,32,0,1000,vgg16,1000", "b,32,100000,100,vgg16,1000", "c,16,0,10,vgg16,1000")
    assert [job.overhead_s for job in read_jobs(tmp_path, "made")] == [10, 9, 10]


def test_p99_is_the_hundredth_of_101(tmp_path: Path) -> None:
    """Jobs one after the other, each a second longer than the one before."""
    write(tmp_path, *(f"j{k},1,{1_000_000 * k},{k + 1},bert,1000" for k in range(101)))
    assert replay(read_jobs(tmp_path, "made"), "srtf")["p99_jct_s"] == pytest.approx(100 * 1.015)


def test_a_shorter_job_preempts_a_longer_one(tmp_path: Path) -> None:
    """Two jobs of 32 GPUs fill the cluster; a short one of 32 takes the place of the longer of them."""
    rows = ["a,32,0,1000,bert,1000", "b,32,0,2000,bert,1000", "c,32,100000,100,bert,1000"]
    write(tmp_path, *rows)
    jobs = read_jobs(tmp_path, "made")
    replay(jobs, "srtf")
    a, b, c = jobs
    assert c.ended_at == pytest.approx(201.5)
    assert a.ended_at == pytest.approx(1015 + 20)
    # b runs to 100, waits to 201.5, pays at 100 and when a ends: 2030 + 101.5 + 10 + 10.
    assert b.ended_at == pytest.approx(2030 + 101.5 + 20)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,32,0,1000,llama,1000", "made.csv:2: unknown model 'llama'"),
        ("a,3,0,1000,bert,1000", "made.csv:2: num_gpu is 3, not one of"),
        ("a,1,-5,1000,bert,1000", "made.csv:2: submit_time is -5, not a finite number of 0 or more"),
        ("a,1,0,0,bert,1000", "made.csv:2: iterations and iteration_time must be above 0"),
        (
            "a,1,0,10,bert,1000\na,1,9,10,bert,1000",
            "made.csv:3: job_id 'a' is empty or used twice",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    write(tmp_path, row)
    result = CliRunner().invoke(
        main,
        ["replay", "--trace", "muri", "--data", str(tmp_path), "--jobs", "made", "--order", "srtf", "--json"],
    )
    assert_refused(result, message)


def test_the_makespan_begins_with_the_first_submission(tmp_path: Path) -> None:
    found = []
    for begin in (0, 5000):
        write(tmp_path, f"a,8,{begin},10,dqn,100", f"b,8,{begin + 1000},10,dqn,100")
        found.append(replay(read_jobs(tmp_path, "made"), "srtf")["makespan_s"])
    assert found[1] == pytest.approx(found[0])


def test_the_command_prints_the_summary(tmp_path: Path) -> None:
    write(tmp_path, "a,8,0,10,dqn,100")
    result = CliRunner().invoke(
        main,
        ["replay", "--trace", "muri", "--data", str(tmp_path), "--jobs", "made", "--order", "srsf", "--json"],
    )
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"jobs", "mean_jct_s", "makespan_s", "p99_jct_s", "wall_s"}
