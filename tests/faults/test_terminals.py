"""Courses of jobs in terminals: what their check finds, and one course on real machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.changes import Change, Granted, Released
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.names import short_id
from tests.faults import machines, terminals
from tests.faults.terminals import check_ledger, check_successes


def granted(token: int, at: float, *gpu_ids: int) -> Granted:
    lease_id = f"hand:a@b/{token:x}"
    members = (Placement("a", gpu_ids),)
    return Granted(Lease(Request(lease_id, len(gpu_ids)), members, token, at, sequence=token), at)


def beat(token: int, at: float, gpus: str = "0") -> dict[str, Any]:
    return {"process": f"{token}-7-1.0", "server": "a", "gpus": gpus, "at": at}


CHANGES: list[Change] = [granted(1, 10.0, 0), granted(2, 20.0, 0, 1)]


def test_a_ledger_in_which_every_process_was_alone_is_right() -> None:
    assert check_ledger([beat(1, 11.0), beat(1, 19.9), beat(2, 20.1, "0,1")], CHANGES) == []


@pytest.mark.parametrize(
    ("beats", "found"),
    [
        ([beat(1, 20.1)], "a process of lease 1 still ran on GPU 0 of a when lease 2 had it"),
        ([beat(1, 11.0, "1")], "a process of lease 1 ran on GPU 1 of a, which it never had"),
        ([beat(9, 11.0)], "a process of lease 9 ran on GPU 0 of a, which it never had"),
    ],
)
def test_a_process_beside_another_lease_is_found(beats: list[dict[str, Any]], found: str) -> None:
    assert check_ledger(beats, CHANGES) == [found]


def test_a_command_that_ended_well_has_a_lease_that_did() -> None:
    said = [f"gpu-manager: a@b {short_id(1)}: GPUs 0 of a"]
    assert check_successes(said, [*CHANGES, Released("hand:a@b/1", 1, 15.0, "SUCCESS")]) == []
    lost = check_successes(said, [*CHANGES, Released("hand:a@b/1", 1, 15.0, "CANCELLED")])
    assert lost == [f"{short_id(1)} ended well, and its lease did not"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if reason := machines.what_is_missing():
        pytest.skip(reason)
    with closing(machines.Machines(tmp_path_factory.mktemp("machines"), 3)) as made:
        terminals.fleet.append(made)
        yield
        terminals.fleet.clear()


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
def test_no_gpu_is_given_away_in_a_course(fleet: None, seed: int, tmp_path: Path) -> None:
    outcome = terminals.run_course(seed, tmp_path)
    assert outcome.complaints == []
    assert outcome.granted >= 5
