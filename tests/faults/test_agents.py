"""Courses of jobs that agents run: what their check finds, a few seeds, and bugs that they must find."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from resource_manager.core.changes import Change, Granted, Released
from resource_manager.core.models import Lease, Placement, Request
from tests.faults.agents import SETTING
from tests.faults.bugs import OF_AGENTS
from tests.faults.job_ledger import Beat, check_jobs
from tests.faults.processes import ROOT
from tests.faults.run import run_seed

HERE = os.readlink("/proc/self/ns/pid")
FIRST = Beat(1, 0, "p", HERE, "a", "0", None, 11.0)
LAST = replace(FIRST, code=0, at=12.0)


def granted(token: int, at: float) -> Granted:
    return Granted(Lease(Request(f"t{token}", 1), (Placement("a", (0,)),), token, at), at)


STILL = "a process of lease 1 still ran"
HISTORY: list[Change] = [granted(1, 10.0), Released("t1", 1, 13.0, "SUCCESS"), granted(2, 13.0)]


def complaints(
    beats: Sequence[Beat], outcome: str = "SUCCESS", exit_code: int | None = 0, **options: Any
) -> list[str]:
    changes = [HISTORY[0], Released("t1", 1, 13.0, outcome), HISTORY[2]]
    known = {"hurt": (), "walls": {"a": False}, **options}
    return check_jobs(beats, changes, {1: {"exit_code": exit_code}}, **known)


def test_a_job_that_ran_once_and_ended_as_its_lease_did_has_no_complaint() -> None:
    assert complaints([FIRST, LAST]) == []
    assert complaints([FIRST, replace(LAST, code=3)], "FAILED", 3) == []
    assert complaints([FIRST, LAST], "CANCELLED", 143, hurt=[1]) == []
    assert complaints([FIRST], "FAILED", None) == [], "its server died"


@pytest.mark.parametrize(
    ("beats", "options", "words"),
    [
        ([FIRST, replace(LAST, process="q")], {}, "rank 0 of lease 1 was started 2 times"),
        ([FIRST, LAST], {"walls": {"a": True}}, "the job of lease 1 ran outside walls"),
        ([replace(FIRST, namespace="pid:[1]"), LAST], {}, "the job of lease 1 ran within walls"),
        ([FIRST, replace(LAST, at=13.5)], {}, "the job of lease 1 still ran when it was released"),
        (
            [FIRST, replace(LAST, at=13.5)],
            {},
            "a process of lease 1 still ran on GPU 0 of a when lease 2 had it",
        ),
        ([FIRST], {}, "lease 1 ended well, and its job did not"),
        ([FIRST, LAST], {"outcome": "FAILED"}, "lease 1 ended as FAILED, and its job ended well"),
        ([FIRST, LAST], {"exit_code": 4}, "the job of lease 1 is said to have ended with 4"),
    ],
)
def test_a_broken_promise_is_found(beats: list[Beat], options: dict[str, Any], words: str) -> None:
    assert words in complaints(beats, **options)


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_a_course_breaks_no_promise(seed: int) -> None:
    outcome = run_seed(seed, setting=SETTING)
    assert outcome.complaints == []
    assert outcome.kinds["jobs that ran"] > 3
    assert outcome.faults.total() > 5


@pytest.mark.e2e
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("bug", [*OF_AGENTS, "expired job"])
def test_a_planted_bug_is_found(bug: str) -> None:
    command = [sys.executable, "-m", "tests.faults.run", "--setting", SETTING, "--bug", bug, "--seeds", "1"]
    # Some need a job that outlives both a restore and the pause after it: one of four seeds has such a job.
    runs = (
        subprocess.run([*command, "--first", str(seed)], cwd=ROOT, capture_output=True) for seed in range(24)
    )
    assert any(done.returncode == 1 for done in runs)
