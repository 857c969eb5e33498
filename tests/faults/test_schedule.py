"""The schedule of faults: what was stopped goes on in its time, also while an operator repeats a step."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager.errors import StoreUnavailableError
from tests.faults.schedule import Schedule


@pytest.fixture
def schedule() -> Schedule:
    crew: Any = SimpleNamespace(tend=lambda: None)
    setup: Any = SimpleNamespace(manager=lambda: nullcontext())
    return Schedule(crew, setup, random.Random(0), lambda line: None)


def test_a_store_that_a_fault_holds_is_free_once_the_fault_is_over(
    schedule: Schedule, tmp_path: Path
) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        schedule.after(0.05, holder.rollback)

        def step(manager: object) -> None:
            with closing(sqlite3.connect(path, timeout=0.01)) as other:
                try:
                    other.execute("CREATE TABLE t (x)")
                except sqlite3.OperationalError as error:
                    raise StoreUnavailableError(str(error)) from error

        schedule.insist(step)
    assert schedule.later == []


def test_a_step_that_waits_does_what_is_due_meanwhile(schedule: Schedule) -> None:
    done: list[str] = []

    def first() -> None:
        schedule.wait_until(0.0)
        done.append("first")

    schedule.after(0.0, first)
    schedule.after(0.0, lambda: done.append("second"))
    schedule.heal()
    assert done == ["second", "first"]
