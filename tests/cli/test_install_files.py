"""`gpu-manager files`: what the package brings for its installation pages."""

from __future__ import annotations

import compileall
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager.cli import install_files, main
from resource_manager.cli.install_files import KINDS
from resource_manager.manager.cluster_file.reading import load_inventory
from tests.small_disk import small_disk_at


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_each_kind_are_written_and_named(kind: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["files", kind, "--output", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    named = {Path(line) for line in done.stdout.splitlines()}
    assert named == {path for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert kind in CliRunner().invoke(main, ["files", "--help"]).stdout
    again = CliRunner().invoke(main, ["files", kind, "--output", str(tmp_path / "new"), "--json"])
    assert json.loads(again.stdout) == done.stdout.splitlines()


def test_a_package_that_pip_compiled_gives_its_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    shutil.copytree(install_files.PACKAGE / "deploy", package / "deploy")
    assert compileall.compile_dir(package, quiet=1)
    assert list((package / "deploy" / "compose").rglob("*.pyc"))
    monkeypatch.setattr(install_files, "PACKAGE", package)
    written = install_files.write_files("compose", tmp_path / "new")
    assert not [path for path in written if path.suffix == ".pyc"]


def test_the_example_is_a_cluster(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["files", "servers", "--output", str(tmp_path)]).exit_code == 0
    assert len(load_inventory(tmp_path / "servers.toml")) == 4


def test_a_file_that_was_changed_is_kept(tmp_path: Path) -> None:
    wanted = ["files", "compose", "--output", str(tmp_path)]
    (tmp_path / "servers.toml").write_text("mine")
    refused = CliRunner().invoke(main, wanted)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "servers.toml is there and differs" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["servers.toml"], "nothing else was written"
    (tmp_path / "servers.toml").unlink()
    assert [CliRunner().invoke(main, wanted).exit_code for _ in range(2)] == [0, 0], "the same again is fine"


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "size=4k") as folder:
        (folder / "other").write_text("x" * 4096)
        refused = CliRunner().invoke(main, ["files", "servers", "--output", str(folder)])
        assert refused.stderr == f"Error: {folder}/servers.toml: No space left on device\n"
        assert [path.name for path in folder.iterdir()] == ["other"]


@pytest.mark.parametrize("kind", ["compose", "container"])
def test_an_image_takes_the_newest_of_the_wheels_beside_its_file(kind: str, tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        (tmp_path / f"gpu_resource_manager-{version}-py3-none-any.whl").touch()
    install_files.write_files(kind, tmp_path)
    [wheel] = re.findall(r'"(\$\(.*whl.*\))\[', (tmp_path / "Dockerfile").read_text())
    command = ["sh", "-c", f'echo "{wheel}"'.replace("/tmp/", f"{tmp_path}/")]
    named = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert named == f"{tmp_path}/gpu_resource_manager-0.10.0-py3-none-any.whl\n"
