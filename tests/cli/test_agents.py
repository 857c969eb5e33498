"""Installation of agents: what a server gets is all that its agent needs."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import resource_manager
from resource_manager.agent import install
from resource_manager.cli.agents import PROGRAM


def test_the_files_that_a_server_gets_run_without_the_package(tmp_path: Path) -> None:
    package = Path(resource_manager.__file__).parent
    for name in PROGRAM:
        (tmp_path / "resource_manager" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / name, tmp_path / "resource_manager" / name)
    modules = [f"resource_manager/{name}".removesuffix(".py").replace("/", ".") for name in PROGRAM]
    alone = [sys.executable, "-S", "-c", "\n".join(f"import {module}" for module in modules)]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


BWRAP = shutil.which("bwrap")


@pytest.mark.skipif(BWRAP is None or os.geteuid() != 0, reason="needs bubblewrap and root")
@pytest.mark.parametrize(
    ("programs", "user", "said"),
    [
        (
            (),
            "0",
            "it has no systemctl: have its own init keep gpu-manager agent --server NAME --url URL",
        ),
        (("systemctl",), "65534", "its user is not root, and there is no sudo: --user root"),
    ],
)
def test_a_server_that_lacks_what_an_installation_needs_says_so_and_stays_as_it_is(
    programs: tuple[str, ...], user: str, said: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    for name in programs:
        (tmp_path / name).symlink_to("/bin/true")
    walls = [str(BWRAP), "--ro-bind", "/", "/", "--unshare-user", "--uid", user]
    python = os.path.realpath(sys.executable)
    done = subprocess.run(
        [*walls, "--setenv", "PATH", str(tmp_path), python, "-I", "-S", "-"],
        input=f"{inspect.getsource(install)}\ninstall('', {{}}, '', '')\n",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, f"{said}\n")


@pytest.mark.skipif(BWRAP is None or os.geteuid() != 0, reason="needs bubblewrap and root")
def test_an_update_leaves_what_was_added_to_the_settings(tmp_path: Path) -> None:
    (tmp_path / "systemctl").symlink_to("/bin/true")
    added = "# our authority\nSSL_CERT_FILE=/etc/ours.pem\n"
    before, now = "GPU_MANAGER_URL=old\nGPU_MANAGER_SERVER=a\n", "GPU_MANAGER_URL=new\nGPU_MANAGER_SERVER=a\n"
    program = (
        f"{inspect.getsource(install)}\nos.makedirs(os.path.dirname(SETTINGS))\n"
        f"open(SETTINGS, 'w').write({before + added!r})\n"
        f"for _ in range(2):\n    install('', {{}}, {now!r}, '')\nprint(open(SETTINGS).read())\n"
    )
    walls = [str(BWRAP), "--ro-bind", "/", "/", "--tmpfs", "/etc", "--unshare-user", "--uid", "0"]
    done = subprocess.run(
        [*walls, "--setenv", "PATH", str(tmp_path), os.path.realpath(sys.executable), "-I", "-S", "-"],
        input=program,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{now}{added}\n", "")
