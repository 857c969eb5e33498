"""The way of one `submit` through the folders, as a reader follows it from call to call.

A stay is a run of calls within one folder, a climb a call into a folder that stands above the caller's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

from resource_manager import GPUResourceManager
from tests.test_architecture import rung_of

MAX_STAYS = 45
"""Wanted are 20. It is 40 with the folders of `scheduling` taken as one; most of the rest is the time, which
is read at each step, and values of `core`, whose functions are small."""

MAX_CLIMBS = 2
"""The step that is decided and the reader that answers, which the commit calls."""


def folder_of(frame: FrameType) -> str | None:
    name = str(frame.f_globals.get("__name__", ""))
    return name.rpartition(".")[0] if name.startswith("resource_manager.") else None


def calls_of(act: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the folders of caller and callee of each call of a function of ours, in order."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        callee = folder_of(frame) if event == "call" else None
        if callee is None:
            return
        outer = frame.f_back
        while outer is not None and folder_of(outer) is None:
            outer = outer.f_back
        calls.append(((folder_of(outer) if outer else None) or callee, callee))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


def height_of(folder: str) -> tuple[int, int]:
    """Return the row of the part, and that a folder in it stands below what uses it."""
    return rung_of(f"{folder}."), -folder.count(".")


def test_a_submit_walks_through_few_folders_and_seldom_back_up() -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        manager.submit("warm", 2)
        calls = calls_of(lambda: manager.submit("t", 2, cpus=4))
        assert len(manager.leases()) == 2
    folders = [callee for _, callee in calls]
    stays = [folders[0]] + [after for before, after in pairwise(folders) if after != before]
    climbs = [(caller, callee) for caller, callee in calls if height_of(callee) > height_of(caller)]
    assert len(stays) <= MAX_STAYS, " → ".join(stays)
    assert len(climbs) <= MAX_CLIMBS, climbs
