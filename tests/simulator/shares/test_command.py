"""`gpu-simulate shares` end to end: figures for programs, a table for people, one line for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from simulator.cli import main
from tests.simulator.refusing import assert_refused
from tests.simulator.shares.small import job, write

EXAMPLE = Path(__file__).parents[3] / "docs" / "simulators" / "sample-fleet.json"
KINDS = {
    "alone": {"a": {"old": 1, "new": 1.5}, "b": {"old": 1, "new": 3}},
    "pairs": [{"types": ["a", "b"], "old": [0.5, 0.5], "new": [1.5, 2]}],
}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["shares", *map(str, arguments)])


def values(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_has_what_every_job_gets(tmp_path: Path) -> None:
    found = values(write(tmp_path, job("x"), job("y", weight=3)), "--policy", "max_min")
    keys = "policy jobs parts levels programs normalised throughput gpus wall_s"
    assert list(found) == keys.split()
    assert (found["policy"], found["jobs"], found["parts"]) == ("max_min", 2, 1)
    assert found["normalised"] == pytest.approx({"x": 2 / 3, "y": 4 / 3})
    assert found["throughput"] == pytest.approx({"x": 1, "y": 2})
    assert found["gpus"]["x"] == pytest.approx({"old": 1, "new": 0})
    assert found["levels"] == pytest.approx([4 / 9])


def test_types_are_read_from_the_file_or_from_the_one_it_names(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "kinds.json").write_text(json.dumps(KINDS))
    jobs = [{"name": "x", "type": "a"}, {"name": "y", "type": "b"}]
    found = [
        values(write(tmp_path, *jobs, throughputs=table), "--policy", "max_min", "--pack") | {"wall_s": 0}
        for table in (KINDS, "tables/kinds.json")
    ]
    assert found[0] == found[1]


def test_jobs_share_gpus_only_when_packed_and_of_one_size(tmp_path: Path) -> None:
    """On one new GPU, x and y together are as fast as each alone on average."""
    for gpus, gains in ((1, True), (2, False)):
        jobs = [{"name": "x", "type": "a"}, {"name": "y", "type": "b", "gpus": gpus}]
        path = write(tmp_path, *jobs, throughputs=KINDS, gpus={"old": 0, "new": 2})
        apart, packed = (values(path, "--policy", "max_min", *more)["levels"] for more in ([], ["--pack"]))
        assert (packed > apart) == (gains and packed != apart)
        if not gains:
            assert packed == pytest.approx(apart)


def test_without_knowledge_of_types_shares_follow_the_fleet(tmp_path: Path) -> None:
    path = write(tmp_path, job("x"), job("y"), gpus={"old": 3, "new": 1}, teams={})
    found = values(path, "--policy", "max_min", "--agnostic")
    assert found["gpus"]["x"] == pytest.approx({"old": 0.75, "new": 0.25})
    assert found["throughput"]["x"] == pytest.approx(1.25)


def test_people_read_a_sentence_and_two_tables() -> None:
    result = call(EXAMPLE, "--policy", "two_level")
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    assert first == (
        "With knowledge of GPU types the lowest job, detect, gets 0.491; without it the lowest job, detect, "
        "gets 0.375. Job llm-large gains most: 1.58 instead of 1. Job tokens loses most: 0.542 instead of 1."
    )
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in rest]
    assert ["vision", "3", "0.863 (0.792)", "8.76 (5.33)", "1.00 (2.67)"] in cells
    assert ["llm-large", "language", "1.580 (1.000)", "1.00 (5.33)", "7.00 (2.67)"] in cells
    assert max(map(len, rest)) <= 80


def test_the_agnostic_table_stands_alone_and_alike_jobs_share_a_row(tmp_path: Path) -> None:
    jobs = [{"name": name, "type": "a"} for name in "xyz"]
    result = call(write(tmp_path, *jobs, throughputs=KINDS), "--policy", "max_min", "--agnostic")
    first, *rest = result.stdout.splitlines()
    assert first == "Without knowledge of GPU types the lowest job, x, gets 0.667."
    assert "│ a × 3 │      0.667 │ 0.33 │ 0.33 │" in rest
    assert "In brackets" not in result.stdout


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    result = call(write(tmp_path, job("train[a]"), job("x[/b]")), "--policy", "max_min")
    assert result.exit_code == 0, result.output
    assert "│ train[a] │" in result.stdout
    assert "│ x[/b]    │" in result.stdout


TEAM = {"a": {"weight": 1, "within": "fairness"}}


@pytest.mark.parametrize(
    ("jobs", "given", "message"),
    [
        ([], {}, "instance.json: there are no jobs"),
        (None, {}, "instance.json: jobs: Input should be a valid list"),
        ([3], {}, "instance.json: jobs[0]: Input should be a valid dictionary"),
        ([{}], {}, "instance.json: jobs[0].name: Field required"),
        ([job("\x1b[2J")], {}, "instance.json: jobs[0].name: String should match pattern"),
        ([job("x"), job("x")], {}, "instance.json: job 'x': the name is used twice"),
        ([{"name": "x"}], {}, "instance.json: job 'x': needs either a type or a throughput of its own"),
        ([job("x", type="a")], {"throughputs": KINDS}, "job 'x': needs either a type or a throughput"),
        ([{"name": "x", "type": "c"}], {"throughputs": KINDS}, "job 'x': unknown type 'c'"),
        ([{"name": "x", "type": "a"}], {}, "job 'x': unknown type 'a'"),
        ([job("x", team="b")], {"teams": TEAM}, "instance.json: job 'x': unknown team 'b'"),
        ([job("x", weight=0)], {}, "jobs[0].weight: Input should be greater than 0"),
        ([job("x", weight="3")], {}, "jobs[0].weight: Input should be a valid number"),
        ([job("x", weight=float("nan"))], {}, "jobs[0].weight: Input should be a finite number"),
        ([job("x", gpus=0)], {}, "jobs[0].gpus: Input should be greater than or equal to 1"),
        ([job("x", gpus=1.5)], {}, "jobs[0].gpus: Input should be a valid integer"),
        ([job("x", throughput={"old": -1})], {}, "jobs[0].throughput.old: Input should be greater than or"),
        ([job("x")], {"gpus": {"old": 0}}, "instance.json: there are no gpus"),
        ([job("x")], {"gpus": {}}, "instance.json: there are no gpus"),
        ([job("x")], {"gpus": {"old": 1.5}}, "gpus.old: Input should be a valid integer"),
        ([job("x")], {"gpus": 3}, "gpus: Input should be a valid dictionary"),
        ([job("x")], {"teams": {"a": {"weight": 1}}}, "teams.a.within: Field required"),
        ([job("x")], {"teams": {"a": {"weight": 1, "within": "luck"}}}, "teams.a.within: Input should be"),
        ([job("x")], {"teams": {"a": {"weight": -1, "within": "fifo"}}}, "teams.a.weight: Input should be"),
        ([job("x")], {"throughputs": "none.json"}, "none.json: cannot be read: No such file"),
        ([job("x")], {"throughputs": {"alone": 3}}, "alone: Input should be a valid dictionary"),
        ([job("x")], {"throughputs": {"alone": {}, "pairs": [{"types": ["a"]}]}}, "at least 2 items"),
        ([job("x")], {"throughputs": {"pairs": [{"types": ["a", "b"], "old": 1}]}}, "a valid list"),
        ([job("x", throughput={"older": 1})], {}, "job 'x': unknown GPU type 'older'; gpus has no such"),
        ([job("x", throughput={"old": 0})], {}, "job 'x' can run on no GPU type of the fleet"),
        ([job("x", gpus=2)], {}, "instance.json: job 'x' can run on no GPU type of the fleet"),
        ([job("x", gpu=2)], {}, "instance.json: jobs[0].gpu: unknown key"),
        ([job("x")], {"job": []}, "instance.json: job: unknown key"),
        ([job("x")], {"teams": {"a": {"weight": 1, "within": "fifo", "jobs": 1}}}, "teams.a.jobs: unknown"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_one_line(tmp_path: Path, jobs: Any, given: dict[str, Any], message: str) -> None:
    path = write(tmp_path, *(jobs or []), **({"jobs": None} if jobs is None else {}), **given)
    assert_refused(call(path, "--policy", "max_min"), message)


@pytest.mark.parametrize("text", ["", "[1, 2", "[]", "3", '{"gpus": {"a": 1e999}}', "\udcff", "[" * 100_000])
def test_a_file_that_is_no_instance_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "instance.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(call(path, "--policy", "max_min"), "instance.json:")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert_refused(
        call(tmp_path / "none.json", "--policy", "max_min"), "none.json: cannot be read: No such file"
    )
    assert_refused(call(tmp_path, "--policy", "max_min"), "cannot be read: Is a directory")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Missing option '--policy'"),
        ("--policy fair", "Invalid value for '--policy': 'fair' is not one of 'max_min', 'two_level'"),
        ("--policy max_min --parts 0", "Invalid value for '--parts'"),
        ("--policy max_min --parts 2", "--parts 2 for 1 job: some parts would have none"),
        ("--policy max_min --solver simplex", "Invalid value for '--solver'"),
        ("--policy max_min --solver ecos", "--solver applies only to --settle at_once"),
        ("--policy two_level --settle later", "Invalid value for '--settle'"),
        ("--policy two_level", "job 'x': two_level needs a team for every job"),
        ("--policy two_level --parts 2", "--parts above 1 is for --policy max_min"),
        ("--policy max_min --agnostic --pack", "--agnostic knows no pairs of jobs: leave out --pack"),
        ("--policy max_min --settle at_once", "--settle at_once is for --policy two_level without --pack"),
        ("--policy two_level --settle at_once --pack", "--settle at_once is for --policy two_level without"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_one_line(tmp_path: Path, options: str, message: str) -> None:
    assert_refused(call(write(tmp_path, job("x")), *options.split()), message)


def test_ecos_is_named_where_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ecos", None)
    path = write(tmp_path, job("x", team="a"), teams=TEAM)
    asked = [path, "--policy", "two_level", "--settle", "at_once"]
    assert_refused(call(*asked, "--solver", "ecos"), "--solver ecos needs ecos (GPL-3): ")
    assert call(*asked).exit_code == 0


def test_max_min_takes_no_notice_of_teams(tmp_path: Path) -> None:
    path = write(tmp_path, job("x", team="a"), job("y", team="a"), job("z"))
    assert values(path, "--policy", "max_min")["normalised"] == pytest.approx(dict.fromkeys("xyz", 2 / 3))
