"""The comparison with published cases: it tells agreement from deviation, and ours agree where they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vectors.run import DATA, Case, compare, main


def job(name: str, gpus: int, members: int = 1, on: str = "", **more: Any) -> dict[str, Any]:
    member = {"state": "running", "node": on} if on else {"state": "pending"}
    return {
        "name": name,
        "team": "t",
        "priority": 50,
        "preemptible": True,
        "gpus": gpus,
        "min_members": members,
        "members": [member] * members,
        **more,
    }


def case(outcome: dict[str, str], *jobs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "made/up",
        "class": "made up",
        "aim": "agree",
        "settings": {},
        "nodes": [
            {"name": "n0", "gpus": 2, "labels": {"rack": "x"}},
            {"name": "n1", "gpus": 2, "labels": {"rack": "y"}},
        ],
        "teams": [{"name": "t", "guarantee_gpus": -1}],
        "jobs": list(jobs),
        "expected": {"outcome": outcome},
        **more,
    }


def folder(path: Path, *cases: dict[str, Any]) -> Path:
    (path / "suite.json").write_text(json.dumps({"cases": cases}))
    return path


def test_a_gang_starts_whole_or_not_at_all_and_a_share_is_on_its_own_gpu() -> None:
    data = case(
        {"held": "stays", "part": "stays", "large": "waits", "small": "starts"},
        job("held", 1, on="n0"),
        job("part", 1, on="n0", gpu_milli=300),
        job("large", 1, 3, queued_at_s=-60),
        job("small", 1, 2, queued_at_s=-30),
    )
    decided = Case(data)
    decided.decide()
    assert decided.outcomes() == data["expected"]["outcome"]
    assert list(decided.differences()) == []
    assert [member.node for member in decided.cluster.leases["small"].members] == ["n1", "n1"]


def test_a_required_label_keeps_the_gang_in_one_domain() -> None:
    decided = Case(case({}, job("g", 1, 3, same_required="rack")))
    decided.decide()
    assert decided.outcomes() == {"g": "waits"}


def test_a_deviation_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = case({"a": "starts"}, job("a", 1))
    wrong = case({"b": "waits"}, job("b", 1), id="made/wrong")
    optional = case({"c": "waits"}, job("c", 1), aim="optional")
    assert main([str(folder(tmp_path, right, wrong, optional)), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["agree"], report["of"], report["by_class"]) == (1, 2, {"made up": [1, 2]})
    assert report["deviations"] == [
        {
            "id": "made/wrong",
            "class": "made up",
            "job": "b",
            "expected": "waits",
            "got": "starts",
            "reason": "",
        }
    ]
    assert (report["optional"]["agree"], report["optional"]["of"]) == (0, 1)
    assert main([str(folder(tmp_path, right, optional))]) == 0
    assert "1 of 1 agree" in capsys.readouterr().out


def test_cases_with_other_orders_fractions_and_more_than_there_is_are_decided(tmp_path: Path) -> None:
    """What holds more than a server has is held all the same, and no case ends the comparison."""
    parts, twice = (job(name, count, on="n0", gpu_milli=500) for name, count in (("parts", 2), ("twice", 1)))
    parts["members"] = [{"state": "running", "node": "n0", "gpu_groups": ["g", "h"]}]
    twice["members"] = [{"state": "running", "node": "n0", "gpu_groups": ["g"]}]
    stays = dict.fromkeys(("whole", "parts", "twice", "more"), "stays")
    overfull = case(
        {**stays, "wants": "waits", "small": "starts"},
        job("whole", 2, on="n0"),
        parts,
        twice,
        job("more", 1, 3, on="n0"),
        job("wants", 2, 2, queued_at_s=-9),
        job("small", 1, queued_at_s=-5, gpu_milli=250),
    )
    cases = [
        {**overfull, "id": f"made/{order}", "settings": {"order": order}, "jobs": jobs}
        for order in ("fifo", "fair_share", "fair_tree", "srtf", "tiresias")
        for jobs in (overfull["jobs"], overfull["jobs"][::-1])
    ]
    unlabelled = case({"g": "waits", "who": "starts"}, job("g", 1, 3, same_required="zone"), id="made/label")
    wrong = [
        case({}, job("a", 1), id="made/order", settings={"order": "lottery"}),
        case({}, job("a", 1, on="gone"), id="made/server"),
        case({}, job("a", -1), id="made/negative"),
        case({}, {"name": "a"}, id="made/short"),
        {**case({}), "id": "made/parent", "teams": [{"name": "t", "guarantee_gpus": 1, "parent": "u"}]},
    ]
    report = compare(folder(tmp_path, *cases, unlabelled, *wrong))
    assert report["of"] == len(cases) + 1 + len(wrong)
    assert {each["id"]: each["got"].partition(":")[0] for each in report["deviations"]} == {
        "made/label": "no such job",
        "made/order": "PolicyError",
        "made/server": "KeyError",
        "made/negative": "InvalidRequestError",
        "made/short": "KeyError",
        "made/parent": "KeyError",
    }


def test_a_folder_without_cases_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path)])
    assert caught.value.code == 2
    assert "no cases" in capsys.readouterr().err


@pytest.mark.skipif(not any(DATA.glob("*.json")), reason="the cases are not beside the repository")
def test_the_published_cases_come_out_as_published() -> None:
    report = compare(DATA)
    assert report["deviations"] == []
    assert report["agree"] == report["of"] > 100
