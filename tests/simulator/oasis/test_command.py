"""`gpu-simulate oasis`, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from simulator.cli import main
from simulator.errors import InputError
from simulator.oasis.instance_file import to_document
from simulator.oasis.random_instances import draw_instance
from simulator.oasis.report import verdict


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["oasis", *map(str, arguments)])


def summary(*arguments: object) -> dict[str, Any]:
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_has_one_figure_per_seed() -> None:
    found = summary("--seeds", "1-3", "--load", 1, "--jobs", 6)
    oasis = found["algorithms"]["oasis"]
    assert all(len(oasis[key]) == 3 for key in ("utility", "accepted", "alpha"))
    assert oasis["decision_ms_mean"] > 0
    assert found["load"] == pytest.approx([1.0] * 3, abs=0.1)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (summary("--seed", 4, "--load", 0.8)["algorithms"]["oasis"] for _ in range(2))
    assert first["utility"] == second["utility"]


def test_a_saved_instance_gives_the_same_result(tmp_path: Path) -> None:
    drawn = summary("--seed", 5, "--load", 1, "--mixed", "--save-instances", tmp_path)
    read = summary("--seed", 5, "--instance", tmp_path / "instance-5.json")
    assert read["algorithms"]["oasis"]["utility"] == drawn["algorithms"]["oasis"]["utility"]


def test_a_load_that_takes_more_chunks_than_a_file_may_state_is_refused() -> None:
    with pytest.raises(InputError, match="load 1 takes a job of more than 10,000 chunks; draw more jobs"):
        draw_instance(0, jobs=1, servers=10_000, load=1.0)


def test_every_algorithm_reports_and_the_optimum_bounds_them() -> None:
    found = summary(
        "--seeds", "1-2", "--jobs", 4, "--slots", 10, "--servers", 2, "--load", 1,
        "--algorithms", "oasis,fifo,drf,rrh,dorm,optimal",
    )  # fmt: skip
    optimal = found["algorithms"]["optimal"]
    assert optimal["proven"] == [True, True]
    assert len(optimal["seconds"]) == 2
    for name in ("oasis", "fifo", "drf", "rrh", "dorm"):
        figures = found["algorithms"][name]
        for best, utility in zip(optimal["utility"], figures["utility"], strict=True):
            assert utility <= best * (1 + 1e-5)
        assert all(ratio is None or ratio >= 1 - 1e-5 for ratio in figures["optimal_over_utility"])


def test_figures_and_sweeps_are_written(tmp_path: Path) -> None:
    found = summary(
        "--seeds", "1-2", "--jobs", 3, "--slots", 8, "--servers", 2, "--load", 1,
        "--algorithms", "oasis,fifo,optimal", "--sweep", "jobs:2,4", "--sweep", "servers:1,2,20",
        "--output-dir", tmp_path,
    )  # fmt: skip
    assert list(found["sweeps"]["jobs"]) == ["2", "4"]
    assert found["sweeps"]["jobs"]["4"]["jobs"] == [4, 4]
    # The same jobs on more servers are never worse off; at 2 servers it is the plain run.
    by_servers = {
        count: point["algorithms"]["optimal"] for count, point in found["sweeps"]["servers"].items()
    }
    for few, some, many in zip(*(by_servers[count]["utility"] for count in ("1", "2", "20")), strict=True):
        assert few <= some * (1 + 1e-5)
        assert some <= many * (1 + 1e-5)
    assert by_servers["2"]["utility"] == found["algorithms"]["optimal"]["utility"]
    assert found["sweeps"]["servers"]["20"]["load"][0] < found["load"][0] / 5
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "summary.json", "utility.png", "decision_time.png", "target_gap.png", "ratio_to_optimum.png",
        "prices.png", "utility_by_jobs.png", "utility_by_servers.png", "report.html",
    }  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    page = (tmp_path / "report.html").read_text()
    assert (
        page.index("The optimum is proven for 2 of 2 instances") < page.index("<table>") < page.index("<svg")
    )
    assert "mathdefault" not in page


def test_the_command_says_first_what_came_out() -> None:
    result = simulate("--seed", 3, "--jobs", 4, "--slots", 10, "--servers", 2, "--algorithms", "oasis,drf")
    assert result.exit_code == 0, result.output
    assert "brings the most utility" in result.stdout.splitlines()[0]


def test_no_algorithm_is_named_best_where_the_intervals_overlap() -> None:
    def said(**utility: list[float]) -> list[str]:
        algorithms = {name: {"utility": each} for name, each in utility.items()}
        return verdict({"algorithms": algorithms, "seeds": [1, 2, 3]})

    assert said(oasis=[9.0, 9.1, 9.2], drf=[3.0, 3.1, 3.2])[0].startswith(
        "oasis brings the most utility: 9.1"
    )
    first, doubt = said(oasis=[9.0, 2.0, 9.2], drf=[3.0, 8.0, 3.2])
    assert first.startswith("oasis brings a utility of 6.7 on average over 3 instances")
    assert doubt.startswith(
        "That is no more than chance gives beside drf: the 95 % confidence intervals overlap"
    )


def test_calibration_reports_its_training_instances() -> None:
    found = summary("--seeds", "1-2", "--jobs", 3, "--slots", 8, "--servers", 2, "--calibrate", 2)
    assert found["calibration"]["trained_on"] == 2
    assert found["calibration"]["eta"] > 0


@pytest.fixture
def document() -> dict[str, Any]:
    """Return a valid instance; each test makes one value invalid."""
    return to_document(draw_instance(5, jobs=2, slots=12, servers=2))


def corrupt(document: dict[str, Any], place: str, value: object) -> None:
    *path, last = (int(part) if part.isdigit() else part for part in place.split("."))
    target: Any = document
    for part in path:
        target = target[part]
    target[last] = value


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("jobs.0.deadline", 5, "jobs[0].deadline: unknown key"),
        ("colour", "red", "colour: unknown key"),
        ("jobs.1.w.gpus", 1, "jobs[1].w.gpus: unknown key"),
        ("worker_servers", [], "worker_servers: List should have at least 1 item"),
        ("ps_servers", [], "ps_servers: List should have at least 1 item"),
        ("jobs", [], "jobs: List should have at least 1 item"),
        ("jobs.0.w.cpu", -1, "jobs[0].w.cpu: Input should be greater than or equal to 0, got -1"),
        ("worker_servers.1.memory", -8, "worker_servers[1].memory: Input should be greater"),
        ("jobs.0.E", 100_000, "its shortest duration of"),
        ("jobs.0.a", 12, "does not fit the 0 from its arrival in slot 12"),
        ("jobs.0.s.bandwidth", 0.01, "s.bandwidth 0.01 is below w.bandwidth"),
        ("jobs.1.id", "job-0", "job id 'job-0' is used twice"),
        ("slots", "12", "slots: Input should be a valid integer, got '12'"),
        ("jobs.0.tau", True, "jobs[0].tau: Input should be a valid number"),
        ("jobs.0.gamma1", 0, "jobs[0].gamma1: Input should be greater than 0, got 0"),
        ("jobs.0.gamma1", 1e308, "jobs[0].gamma1: Input should be less than or equal to 1000000000"),
        ("jobs.0.N", 10**9, "jobs[0].N: Input should be less than or equal to 10000"),
        ("jobs.0.E", 10**400, "jobs[0].E: Input should be less than or equal to 1000000000"),
        ("jobs.1.w.storage", 1e308, "jobs[1].w.storage: Input should be less than or equal to 1000000000"),
        ("worker_servers.1.gpu", 10**9, "worker_servers[1].gpu: Input should be less than or equal to 1024"),
        ("slots", 10**9, "slots: Input should be less than or equal to 10000"),
    ],
)
def test_an_invalid_instance_is_refused_in_one_line(
    document: dict[str, Any], tmp_path: Path, place: str, value: object, complaint: str
) -> None:
    corrupt(document, place, value)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    result = simulate("--instance", path, "--output-dir", tmp_path / "out")
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_invalid_json_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text('{\n"slots": 3,\n!}')  # Python 3.13 tells of a comma before } in the comma's line
    result = simulate("--instance", path)
    assert result.exit_code == 2
    assert f"{path}:3: not JSON" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--servers", 0),
        ("--jobs", 0),
        ("--slots", -1),
        ("--load", 0),
        ("--load", "inf"),
        ("--load", "1e9"),
        ("--sweep", "load:inf"),
        ("--sweep", "load:nan"),
        ("--misestimate", "nan", 1),
        ("--time-limit-s", "nan"),
        ("--seed", -1),
        ("--seeds", "5-1"),
        ("--seeds", "many"),
        ("--algorithms", "oasis,magic"),
        ("--sweep", "colour:1,2"),
        ("--sweep", "jobs:1.5"),
        ("--sweep", "jobs:1e300"),
        ("--jobs", 10**9),
        ("--slots", 10**9),
        ("--utility-floor", 0),
        ("--eta", 0),
        ("--eta", "prove"),
        ("--eta", "1e308"),
        ("--misestimate", "1e308", "1e308"),
        ("--misestimate", "1e-320", 1),
        ("--sweep", "jobs:2", "--sweep", "jobs:3"),
        ("--calibrate", 2, "--eta", 1),
        ("--misestimate", 0, 1),
        ("--calibrate", 2, "--prices", "clairvoyant"),
        ("--algorithms", "fifo", "--calibrate", 2),
        ("--algorithms", "fifo", "--eta", 1),
        ("--time-limit-s", 1),
        ("--seed", 1, "--seeds", "1-2"),
        ("--instance", "nowhere.json"),
    ],
)
def test_wrong_options_exit_with_2(arguments: tuple[object, ...]) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "option",
    [("--jobs", 10), ("--slots", 30), ("--servers", 5), ("--mixed",), ("--load", 1), ("--sweep", "jobs:2")],
)
def test_options_for_drawn_instances_are_refused_beside_a_given_one(
    document: dict[str, Any], tmp_path: Path, option: tuple[object, ...]
) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(document))
    result = simulate("--instance", path, *option)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {option[0]} shapes drawn instances; it cannot be used with --instance\n"


def test_prices_that_are_all_0_are_drawn(document: dict[str, Any], tmp_path: Path) -> None:
    """No server has what the jobs request, so nothing has a price."""
    document["worker_servers"] = [{"cpu": 4}]
    for job in document["jobs"]:
        job |= {"w": {"gpu": 1}, "e": 0}
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(document))
    result = simulate("--instance", path, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "prices.png").is_file()


def test_the_eta_of_the_proof_makes_first_prices_lower_and_alpha_higher() -> None:
    given, proof = (
        summary("--seed", 2, "--load", 1, *eta)["algorithms"]["oasis"] for eta in ((), ("--eta", "proof"))
    )
    assert proof["alpha"][0] > given["alpha"][0] + 1
