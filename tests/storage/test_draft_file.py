"""Files that are written as drafts: in place as a whole, or an error that names what was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resource_manager.storage.draft_file import replacing
from simulator.io.files import write_text
from tests.small_disk import small_disk_at


@pytest.mark.parametrize("special", ["fifo", "folder", "/dev/full", "/dev/stdout", ""])
def test_what_is_no_plain_file_is_refused_and_stays(special: str, tmp_path: Path) -> None:
    """Root may replace a device: then all programs of the machine write to a file."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    path = tmp_path / special if special else Path()
    before = path.lstat()
    with pytest.raises(OSError, match="not a plain file") as caught, replacing(path):
        pass
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match="not a plain file"):
        write_text(path, "")
    assert os.path.samestat(before, path.lstat())


def test_a_dash_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes it means standard output, and would find a file of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="not a plain file"), replacing(Path("-")):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_of_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "size=64k") as folder:
        (folder / "state").write_text("old")
        with pytest.raises(OSError, match="No space left") as caught, replacing(folder / "state") as file:
            file.write("x" * 200_000)
        assert caught.value.filename == str(folder / "state")
        with pytest.raises(OSError, match=f"No space left.*'{folder}/state'"):
            write_text(folder / "state", "x" * 200_000)
        assert [path.name for path in folder.iterdir()] == ["state"]
        assert (folder / "state").read_text() == "old"
