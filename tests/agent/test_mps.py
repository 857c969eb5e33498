"""MPS daemons that the agent keeps: one for each shared GPU, found again, and ended with the last share.

Against a stand-in: no real MPS was seen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent import mps
from tests.agent import mps_control
from tests.eventually import wait_for

ONE, TWO = "GPU-0c1d", "GPU-5e2f"


def process_of(folder: Path, uuid: str) -> int:
    return int((folder / uuid / "pipe" / f"{mps.CONTROL}.pid").read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("MPS_STANDIN", str(mps_control.install(tmp_path / "bin")))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    yield tmp_path / "mps"
    (tmp_path / "bin" / "deaf").unlink(missing_ok=True)
    mps.keep({"folder": str(tmp_path / "mps"), "uuids": []})


def keep(folder: Path, *uuids: str) -> dict[str, Any]:
    return mps.keep({"folder": str(folder), "uuids": list(uuids)})


def test_a_daemon_runs_for_each_shared_gpu_and_ends_with_its_last_share(folder: Path) -> None:
    assert keep(folder, ONE, TWO) == {"mps": [ONE, TWO], "mps_error": None}
    assert f"started for {ONE}" in (folder / ONE / "log" / "control.log").read_text()
    assert (folder / ONE / "pipe").stat().st_uid == os.geteuid()
    one, two = process_of(folder, ONE), process_of(folder, TWO)
    assert one != two
    assert keep(folder, TWO) == {"mps": [TWO], "mps_error": None}
    assert process_of(folder, TWO) == two, "the other goes on"
    assert sorted(each.name for each in folder.iterdir()) == [TWO]
    assert keep(folder) == {"mps": [], "mps_error": None}


def test_an_agent_that_was_restarted_finds_its_daemons(folder: Path) -> None:
    keep(folder, ONE)
    before = process_of(folder, ONE)
    assert keep(folder, ONE)["mps"] == [ONE]
    assert process_of(folder, ONE) == before


def test_a_daemon_that_died_is_restarted(folder: Path) -> None:
    keep(folder, ONE)
    died = process_of(folder, ONE)
    os.kill(died, signal.SIGKILL)
    wait_for(lambda: not mps.is_running(str(folder / ONE)))
    assert keep(folder, ONE) == {"mps": [ONE], "mps_error": None}
    assert process_of(folder, ONE) != died


def test_what_keeps_a_daemon_from_running_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    refuses = tmp_path / "bin" / "refuses"
    refuses.write_text("first\nCannot find MPS control daemon process\n")
    said = f"{mps.CONTROL} of {ONE} did not start: Cannot find MPS control daemon process"
    assert keep(folder, ONE) == {"mps": [], "mps_error": said}
    refuses.unlink()
    keep(folder, ONE)
    (tmp_path / "bin" / "deaf").touch()
    assert keep(folder) == {"mps": [], "mps_error": f"{mps.CONTROL} of {ONE} does not quit"}


def test_without_the_program_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert keep(tmp_path / "mps", ONE) == {"mps": [], "mps_error": f"{mps.CONTROL} is not installed"}


def test_a_folder_of_somebody_else_gets_no_daemon(folder: Path, as_another_user: Any) -> None:
    folder.mkdir()
    as_another_user()
    assert keep(folder, ONE) == {"mps": [], "mps_error": f"{folder} is not this agent's own"}
    assert not list(folder.iterdir())


@pytest.mark.parametrize("wanted", [None, "x", {}, {"folder": "relative", "uuids": [ONE]}])
def test_without_a_wish_of_the_service_nothing_is_done(wanted: object) -> None:
    assert mps.keep(wanted) == {}


def test_a_name_that_is_no_uuid_becomes_no_folder(folder: Path) -> None:
    assert keep(folder, "../x", "GPU-../../x")["mps"] == []
    assert not list(folder.iterdir())
